"""Writes `report.html`: curves, held-out tasks, rollouts and token traces of runs in one file.

The page is core/report/page.html with the data of the runs inserted as JSON. It needs no network.
Text of models and environments is data: the page shows it as text, never as markup. The page stays
below 10 MB; where the rollouts do not fit, the page says what was left out.

    write_page(Path("runs/a/report.html"), [(Path("runs/a"), config)])
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

from core import results
from core.files.atomic import published
from core.files.run_log import METRICS, OLD_ROLLOUTS, ROLLOUTS, iter_records, read_records
from core.report.doctor import findings
from core.report.summary import algorithm_title, repeat_command
from core.results import Record
from core.settings import by_flag
from environments.plumbing.registry import meanings, short_names
from environments.plumbing.text import printable_json

TEMPLATE = Path(__file__).with_name("page.html")
PAGE_BYTES = 9_500_000
CURVE_POINTS = 300  # of a metric; more than a screen can show
TEXT_CHARS = 8000  # of a rollout
ALWAYS = ("return", "correct", "rewards", "tokens", "messages")  # fields that no rollout lacks


def write_page(path: Path, runs: list[tuple[Path, dict[str, Any]]]) -> Path:
    """Writes one page about all `runs`, given as folder and settings, to `path`; returns `path`.

    The runs share the page's bytes equally. The file is replaced as a whole or not at all. The
    settings need "algo", "env", "model_id" and "seed".
    """
    before, after = TEMPLATE.read_text(encoding="utf-8").split("$data", 1)
    room = (PAGE_BYTES - TEMPLATE.stat().st_size) // len(runs)
    data = {"runs": [_run_data(*run, room) for run in runs]}
    with published(path) as part:
        part.write_text(before + to_json(data) + after, encoding="utf-8", newline="\n")
    return path


def pack_rollouts(folder: Path, room: int) -> tuple[list[Record], str]:
    """Packs the rollouts of a run into at most `room` bytes of JSON.

    Returns one object per batch (the rollouts of an update or of an evaluation), and a text about
    the batches that do not fit: those in the middle of the run are left out first.
    """
    files = (iter_records(folder / name) for name in (OLD_ROLLOUTS, ROLLOUTS))
    rows = (row for row in itertools.chain.from_iterable(files) if "kind" in row)
    batches = list[Record]()
    for (kind, update), group in itertools.groupby(rows, lambda row: (row["kind"], row["update"])):
        batch_rows = list(group)
        chars = min(TEXT_CHARS, room // 8 // len(batch_rows))  # so that the first and last ones fit
        batches.append({"kind": kind, "update": update, "groups": _groups(batch_rows, chars)})
    last, left_out = len(batches) - 1, set[int]()
    for number in sorted(range(len(batches)), key=lambda i: (min(i, last - i), -i)):
        size = len(to_json(batches[number])) + 1
        if size > room:
            left_out.add(number)
        else:
            room -= size
    text = f"the rollouts of {len(left_out)} of {len(batches)} updates and evaluations"
    packed = [batch for number, batch in enumerate(batches) if number not in left_out]
    return packed, text if left_out else ""


def to_json(data: Any) -> str:
    """Returns ASCII JSON without <, > and &, so that no text can end the page's script element,
    and without control characters."""
    text = printable_json(json.dumps(data, separators=(",", ":"), allow_nan=False))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def shorten(text: str, limit: int) -> str:
    """Returns the text, or its first and last limit / 2 characters and a note between them."""
    excess, half = len(text) - limit, limit // 2
    note = f" [{excess} characters left out: see rollouts.jsonl] "
    return text if excess <= 0 else text[:half] + note + text[half + excess :]


def _run_data(folder: Path, config: dict[str, Any], room: int) -> Record:
    """The JSON object of a run in at most `room` bytes."""
    records = read_records(folder / METRICS)
    data: Record = {
        "name": str(folder),
        "algo": algorithm_title(config),
        "env": short_names(config["env"]),
        "model": str(config["model_id"]),
        "seed": config["seed"],
        "command": repeat_command(folder, config),
        "num_updates": results.num_updates(records),
        "minutes": round(results.minutes(records), 2),
        "tokens": results.sampled_tokens(records),
        "results": [
            {
                "env": env,
                "before": _evaluation(env, first),
                "after": _evaluation(env, last),
                "tokens_to_target": results.tokens_to_target(env, records),
            }
            for env, first, last in results.before_after(records)
        ],
        "findings": findings(folder, config, records),
        "settings": [[key, shorten(str(value), 200)] for key, value in by_flag(config).items()],
        "warnings": [
            {"name": name, "updates": updates, "message": message}
            for name, updates, message in results.logged_warnings(records)
        ],
        "curves": _curves(records),
        "reported": results.reported(records),
        "meanings": meanings(config["env"]),
    }
    room -= len(to_json(data)) + 400
    data["batches"], data["left_out"] = pack_rollouts(folder, room)
    return data


def _evaluation(env: str, record: Record) -> Record:
    names = {"accuracy": "accuracy", "low": "ci_low", "high": "ci_high", "trivial": "trivial"}
    metrics = {key: _number(record.get(f"eval/{env}/{name}")) for key, name in names.items()}
    return {"update": record["update"], **metrics}


def _curves(records: list[Record]) -> dict[str, list[list[Any]]]:
    """Each metric as [steps, values], of at most about CURVE_POINTS points."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        step = record["sft_step"] if "sft_step" in record else record["update"]
        for name, value in record.items():
            if name not in ("update", "sft_step") and (number := _number(value)) is not None:
                points.setdefault(name, []).append((step, number))
    curves: dict[str, list[list[Any]]] = {}
    for name, curve in points.items():
        stride = math.ceil(len(curve) / CURVE_POINTS)
        fewer = [*curve[:-1:stride], curve[-1]]
        curves[name] = [[step for step, _ in fewer], [value for _, value in fewer]]
    return curves


def _groups(rows: list[Record], chars: int) -> list[Record]:
    """The groups of a batch. The rollouts of a group share the prompt of the first one."""
    groups: dict[tuple[Any, ...], Record] = {}
    for row in rows:
        # the policy wrote the last len(rewards) assistant messages; earlier ones are examples
        answers = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
        sampled = answers[max(0, len(answers) - len(row["rewards"])) :]
        start = sampled[0] if sampled else len(row["messages"])
        prompt = _messages(row["messages"][:start], chars)
        names = {name: row[name] for name in ("env", "agent", "seed")}
        group = groups.setdefault(
            (row["group_id"], *names.values()), names | {"prompt": prompt, "rollouts": []}
        )
        info = ", ".join(f"{key} {x}" for key, x in row["info"].items() if key != "correct")
        rollout: Record = {
            "return": _number(row["return"]),
            "correct": None if row.get("error") else _number(row["info"].get("correct")),
            "rewards": [_number(reward) for reward in row["rewards"]],
            "tokens": row["tokens"],
            "messages": _messages(row["messages"][start:], chars),
            "hit_token_limit": row["hit_token_limit"],
            "episode_truncated": row["episode_truncated"],
            "info": shorten(info, 300),
            "error": shorten(row.get("error") or "", 500),
            "prompt": prompt if prompt != group["prompt"] else None,
            "traces": row.get("token_traces"),
        }
        group["rollouts"].append({k: x for k, x in rollout.items() if x or k in ALWAYS})
    return [*groups.values()]


def _messages(messages: list[Record], chars: int) -> list[list[str]]:
    limit = max(100, chars // max(1, len(messages)))
    return [[shorten(str(m["role"]), 50), shorten(str(m["content"]), limit)] for m in messages]


def _number(value: Any) -> float | None:
    """The number to six digits; None for any other value, and for numbers from 1e300 on."""
    if not isinstance(value, (bool, int, float)) or not abs(value) < 1e300:
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
