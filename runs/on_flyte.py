"""Run `python train.py FLAGS`, or a sweep over any of its flags, on a Flyte 2 cluster or locally.

    python runs/on_flyte.py --algo ppo --num-updates 20                     # one run on the cluster
    python runs/on_flyte.py --sweep "seed=0,1,2" "algo=grpo,ppo" -- --lr 5e-5   # six runs
    python runs/on_flyte.py --local --sweep "seed=0,1,2" -- --num-updates 10  # without Flyte

A sweep runs all combinations of the values. Separate values that contain commas by semicolons:
'env=reverse;gymnasium:id=CartPole-v1,repeat=3'. Switches take true or false. The cluster is that of
.flyte/config.yaml (`flyte create config`). A run that fails is a row of the table that says why;
the other runs continue. Exit code: 1 if a run failed, 2 for invalid input.
"""

import argparse
import itertools
import json
import os
import sys
import time
import tomllib
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from core.faults import UsageError  # noqa: E402
from core.files.run_folder import new_folder  # noqa: E402
from core.files.run_log import read_records  # noqa: E402
from core.results import accuracy_of, before_after  # noqa: E402
from core.terminal import cli  # noqa: E402
from environments.plumbing.text import one_line, printable  # noqa: E402
from runs.record import markdown  # noqa: E402

try:
    import flyte
    from flyte.io import Dir
except ImportError:  # --local works without Flyte
    flyte = None

# resources of a run on the cluster, and the extras of pyproject.toml in its image
CPU: dict[str, Any] = {"extras": [], "resources": {"cpu": 4, "memory": "8Gi"}}
GPU: dict[str, Any] = {
    "extras": ["vllm"],
    "resources": {"cpu": 8, "memory": "48Gi", "gpu": "L40s:1"},
}
# tasks are made when this file is imported, on the cluster too: from a flag or the environment
MACHINES = {"cpu": CPU, "gpu": GPU}
ASKED = [name for name in MACHINES if f"--{name}" in sys.argv]
MACHINE_NAME = [os.environ.get("PICORL_ON", "cpu"), *ASKED][-1]
MACHINE = MACHINES[MACHINE_NAME]
SWEEP_RESOURCES: dict[str, Any] = {"cpu": 1, "memory": "2Gi"}  # of the task that waits for the runs
CONCURRENCY = 8  # runs at the same time on the cluster; locally one
COLUMNS = ["run", "environment", "before RL [95%]", "after RL [95%]", "minutes", "folder"]
Rows = list[list[str]]  # of the table, without its first column


def main(args: list[str]) -> int:
    """Makes the runs, prints their table and returns the exit code."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true", help="use machines with a GPU")
    parser.add_argument("--sweep", nargs="*", metavar="FLAG=VALUE,VALUE", help="all combinations")
    parser.add_argument("--local", action="store_true", help="run here, without Flyte")
    parser.add_argument(
        "--flyte-local", action="store_true", help="run here, in Flyte's local mode"
    )
    end = args.index("--") if "--" in args else len(args)
    options, flags = parser.parse_known_args(args[:end])
    try:
        labels, runs = plan(options.sweep, flags + args[end + 1 :])
        results = run_here(runs) if options.local else run_on_flyte(runs, options.flyte_local)
    except UsageError as error:
        print(f"on_flyte.py: {one_line(error)}", file=sys.stderr)
        return 2
    rows = [[printable(cell).replace("|", "¦") for cell in (label, *row)]
            for label, of_run in zip(labels, results, strict=True) for row in of_run]  # fmt: skip
    table = "\n".join(markdown(" | ".join(COLUMNS), rows))
    print(table)
    if options.sweep:
        file = Path("runs", runs[0][-1].rpartition("-")[0], "table.md")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(table + "\n", encoding="utf-8")
    return int(any(row[2].startswith("failed: ") for row in rows))


def plan(sweep: list[str] | None, flags: list[str]) -> tuple[list[str], list[list[str]]]:
    """Returns the label and the flags of each run; the last flag is its name.

    Raises UsageError for an invalid sweep, and SystemExit (with tyro's message) for flags that
    train.py does not accept.
    """
    axes = [axis_of(text) for text in sweep or []]
    names = {axis[0][0].partition("=")[0] for axis in axes}
    if sweep is not None and len(names) < max(1, len(axes)):
        raise UsageError("--sweep needs at least one flag, and each flag once: --sweep seed=0,1,2")
    choices = list(itertools.product(*axes))
    runs = [[*flags, *itertools.chain(*(words for _, words in choice))] for choice in choices]
    configs = [cli.parse(run) for run in runs]
    if any(cfg.resume for cfg in configs):
        raise UsageError("--resume needs a folder of this machine; use python train.py --resume")
    stem = new_folder(Path("runs"), configs[0].run_name, "sweep" if axes else "run").name
    named = [[*r, "--run-name", f"{stem}-{i + 1}" if axes else stem] for i, r in enumerate(runs)]
    return [" ".join(label for label, _ in choice) or stem for choice in choices], named


def axis_of(text: str) -> list[tuple[str, list[str]]]:
    """Returns the label and the flags of each value of a --sweep argument.

    >>> axis_of("lr=1,2")
    [('lr=1', ['--lr', '1']), ('lr=2', ['--lr', '2'])]
    """
    flag, _, joined = text.partition("=")
    values = [value.strip() for value in joined.split(";" if ";" in joined else ",")]
    if not (flag and all(values)) or len(set(values)) < len(values):
        raise UsageError(f"--sweep {text!r}: write flag=value,value, each value once")
    switch = {"true": [f"--{flag}"], "false": [f"--no-{flag}"]}
    return [(f"{flag}={v}", switch.get(v, [f"--{flag}", *v.split()])) for v in values]


def run_here(runs: list[list[str]]) -> list[Rows]:
    """Makes one run after another. After Ctrl-C the remaining runs count as failed."""
    results: list[Rows] = []
    for flags in runs:
        try:
            results.append(train_once(flags))
        except RuntimeError as error:
            results.append(failed(error))
        except KeyboardInterrupt:
            return results + [failed("stopped")] * (len(runs) - len(results))
    return results


def train_once(flags: list[str]) -> Rows:
    """Trains with these flags and returns a row for each environment that the run evaluated.

    Raises RuntimeError with the reason if the run failed.
    """
    started = time.monotonic()
    process = Popen([sys.executable, ROOT / "train.py", *flags], stderr=PIPE, encoding="utf-8")
    try:
        stderr = process.communicate()[1]
    finally:
        process.wait()  # on Ctrl-C the run saves a checkpoint before it stops
    sys.stderr.write(stderr)
    if process.returncode:
        lines = [line for line in stderr.splitlines() if line.startswith("train.py: ")]
        lines += stderr.splitlines()[-1:] if "Traceback" in stderr else []
        raise RuntimeError([*lines, f"exit code {process.returncode}"][0])
    folder = Path("runs", flags[-1])
    evaluated = before_after(read_records(folder / "metrics.jsonl"))
    results = [[env, *(accuracy_of(env, record) for record in both)] for env, *both in evaluated]
    minutes = f"{(time.monotonic() - started) / 60:.1f}"
    return [[*row, minutes, str(folder)] for row in results or [["", "not evaluated", ""]]]


def failed(error: object) -> Rows:
    """Returns the row of a run that failed."""
    return [["", "failed: " + (str(error).strip() or repr(error)).splitlines()[0], "", "", ""]]


def run_on_flyte(runs: list[list[str]], local: bool) -> list[Rows]:
    """Makes one Flyte run with an action per training run, and waits for it."""
    if flyte is None:
        raise UsageError('Flyte is not installed: pip install -e ".[flyte]", or use --local')
    if not local:
        flyte.init_from_config(root_dir=ROOT)
        if not flyte.is_control_plane_available():
            raise UsageError("no Flyte cluster is configured: flyte create config, or use --local")
    try:
        context = flyte.with_runcontext(mode="local" if local else "remote", copy_style="all")
        run = context.run(sweep.override(resources=waiting), runs)
        print(f"Flyte: {run.url}")
        run.wait()
        return [json.loads(rows) for rows in run.outputs()[0]]
    except Exception as error:  # the sweep itself failed: its image, its quota, the network
        return [failed(error)] * len(runs)


if flyte is not None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [project["optional-dependencies"][name] for name in MACHINE["extras"]]
    image = flyte.Image.from_debian_base(name="picorl")
    waiting = flyte.Resources(**SWEEP_RESOURCES)
    environment = flyte.TaskEnvironment(
        name="picorl",
        resources=flyte.Resources(**MACHINE["resources"]),
        image=image.with_pip_packages(*project["dependencies"], *itertools.chain(*extras)),
        env_vars={
            "PICORL_ON": MACHINE_NAME,
            "OMP_NUM_THREADS": str(MACHINE["resources"]["cpu"]),
        },
    )

    @environment.task
    def train(flags: list[str]) -> tuple[str, str, Dir]:
        """Returns the rows of the table as JSON, metrics.jsonl, and the folder of the run."""
        rows = train_once(flags)
        folder = Path("runs", flags[-1])
        uploaded = Dir.from_local_sync(folder)
        text = json.dumps([[*row[:-1], uploaded.path] for row in rows])
        return text, (folder / "metrics.jsonl").read_text(encoding="utf-8"), uploaded

    @environment.task
    def sweep(runs: list[list[str]]) -> list[str]:
        """Returns the rows of each run as JSON; a failed run is a row that says why."""
        results = flyte.map(train, runs, concurrency=CONCURRENCY, return_exceptions=True)
        return [json.dumps(failed(x)) if isinstance(x, Exception) else x[0] for x in results]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
