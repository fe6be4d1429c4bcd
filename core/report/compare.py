"""`report.html`, the microscope: curves, tasks, every rollout and each of its tokens, in one page.

The page is core/report/page.html with a run's data in it; it opens anywhere, without a network.
What a model or a task wrote travels as JSON and is shown as text, never as markup. However large
the run, the page stays below 10 MB, and it says what it left out.

    write_comparison([Path("runs/a"), Path("runs/b")], to=Path("runs/compare.html"))
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from core import diagnostics
from core.metrics import before_after, describe
from core.report.page import choose, cut, encode, number
from core.run_log import read_records
from core.types import UsageError

TEMPLATE = Path(__file__).with_name("page.html")
PAGE_BYTES = 9_500_000  # of a page; files are said to be small below 10 MB
CURVE_POINTS = 600  # of a metric: more than a screen shows
GOOD_ACCURACY = 0.9  # a comparison tells how many sampled tokens it took to come so far


def write_report(run: Path, config: dict[str, Any]) -> Path:
    """Write `report.html` of a run from its journal, whole or not at all; return its path.

    `config` needs "algo", "env", "model_id" and "seed". What isn't there yet, the page says.
    """
    return _write(run / "report.html", [_run_data(run, config, PAGE_BYTES - _page_size())])


def write_comparison(runs: list[Path], to: Path) -> Path:
    """Write one page about several runs to `to`, each with an equal share of it; return `to`.

    Raises UsageError for a folder that isn't a run's.
    """
    configs = [read_config(run) for run in runs]
    room = (PAGE_BYTES - _page_size()) // len(runs)
    both = zip(runs, configs, strict=True)
    return _write(to, [_run_data(run, config, room) for run, config in both])


def compare(runs: list[Path]) -> list[list[str]]:
    """For each run and environment that it was evaluated on: run, algorithm, environment, accuracy
    before -> after with intervals, sampled tokens, those until accuracy was 0.9, minutes.

    Raises UsageError for a folder that isn't a run's.
    """
    table = []
    for run, config in [(run, read_config(run)) for run in runs]:
        records = _records(run)
        for env, first, last in before_after(records) or [(" ".join(config["env"]), {}, {})]:
            change = "not evaluated"
            if first:
                change = f"{describe(env, first)} -> {describe(env, last)}"
            until = _tokens_until(env, records)
            table.append([
                run.name, str(config["algo"]), env, change, f"{_tokens(records):,}",
                "not reached" if until is None else f"{until:,}", f"{_minutes(records):.1f}",
            ])  # fmt: skip
    return table


def read_config(run: Path) -> dict[str, Any]:
    """The settings of a run. Raises UsageError where there are none, or no metrics."""
    for name in ("config.yaml", "metrics.jsonl"):
        if not (run / name).is_file():
            raise UsageError(f"{run}: not a run folder (it has no {name})")
    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise UsageError(f"{run / 'config.yaml'}: not YAML") from None
    needed = {"algo", "env", "model_id", "seed"}
    if not isinstance(config, dict) or needed - config.keys():
        raise UsageError(f"{run / 'config.yaml'}: not a run's settings")
    return config


def _write(path: Path, runs: list[dict[str, Any]]) -> Path:
    before, after = TEMPLATE.read_text(encoding="utf-8").split("$data", 1)
    part = path.with_name(f".part-{path.name}")
    part.write_text(before + encode({"runs": runs}) + after, encoding="utf-8")
    return part.replace(path)


def _page_size() -> int:
    return TEMPLATE.stat().st_size


def _run_data(run: Path, config: dict[str, Any], room: int) -> dict[str, Any]:
    """What the page shows of a run, in at most `room` bytes."""
    records = _records(run)
    results: list[list[Any]] = [
        [env, *([*_interval(env, record), record["update"]] for record in ends)]
        for env, *ends in before_after(records)
    ]
    curves, lost = _curves(records, room // 4)
    data: dict[str, Any] = {
        "name": run.name,
        "algo": cut(str(config["algo"]), 200),
        "env": cut(" ".join(config["env"]), 500),
        "model": cut(str(config["model_id"]), 500),
        "seed": config["seed"],
        "again": f"python train.py --config {run / 'config.yaml'} --run-name again",
        "updates": max([r["update"] for r in records if "update" in r], default=0),
        "minutes": round(_minutes(records), 2),
        "tokens": _tokens(records),
        "results": [[*result, _tokens_until(result[0], records)] for result in results],
        "settings": [[key, cut(str(value), 200)] for key, value in _flat(config)][:200],
        "warnings": [
            [cut(name, 100), at, cut(line, 500), diagnostics.WARNINGS.get(name, [""])[0]]
            for name, at, line in diagnostics.collect(records)
        ],
        "curves": curves,
    }
    data["segments"], left = choose(run / "rollouts.jsonl", room - len(encode(data)) - 4000)
    data["left"] = ([f"{lost} metrics"] if lost else []) + left
    return data


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return read_records(path) if path.exists() else []


def _interval(env: str, record: dict[str, Any]) -> list[float | None]:
    return [number(record[f"eval/{env}/{key}"]) for key in ("accuracy", "ci_low", "ci_high")]


def _minutes(records: list[dict[str, Any]]) -> float:
    return sum(v for r in records for k, v in r.items() if k.startswith("time/") and v) / 60


def _tokens(records: list[dict[str, Any]]) -> int:
    return sum(record.get("tokens/sampled") or 0 for record in records)


def _tokens_until(env: str, records: list[dict[str, Any]]) -> int | None:
    """Tokens sampled in training until accuracy on `env` first was GOOD_ACCURACY; None: never."""
    for i, record in enumerate(records):
        if (record.get(f"eval/{env}/accuracy") or 0) >= GOOD_ACCURACY:
            return _tokens(records[: i + 1])
    return None


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"[:100], value


def _curves(records: list[dict[str, Any]], room: int) -> tuple[dict[str, list], int]:
    """Each metric as [updates, values], thinned; and how many there was no room for."""
    points: dict[str, list] = {}
    for record in records:
        for name, value in record.items():
            at = record.get("update", record.get("sft_step"))
            if name not in ("update", "sft_step") and (known := number(value)) is not None:
                points.setdefault(name, []).append((at, known))
    curves: dict[str, list] = {}
    for name, found in sorted(points.items(), key=lambda item: not item[0].startswith("eval/")):
        every = math.ceil(len(found) / CURVE_POINTS)
        thin = [*found[:-1:every], found[-1]]
        column = [[at for at, _ in thin], [value for _, value in thin]]
        room -= len(encode([name, column]))
        if room > 0:
            curves[name] = column
    return curves, len(points) - len(curves)
