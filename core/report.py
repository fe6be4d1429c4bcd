"""`report.html`: a run to look through, in one page that opens anywhere, without a network.

It shows held-out accuracy before and after, the curves, the same held-out tasks at the first and
the last evaluation, and the rollouts of the first, the middle and the last update, in their groups.
Whatever a model or a task wrote is shown as text, never as markup. Long texts lose their middle,
long lists their end, and the page says so: it stays below 10 MB however large the run.
"""

import base64
import html
import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

from core.journal import read_records
from core.metrics import before_after, describe

PICTURE_BYTES = 1_000_000  # a larger curves.png is left beside the page
LISTS_BYTES = 8_000_000  # shared evenly by the lists of tasks and groups
MAX_BLOCKS = 40  # tasks or groups a list
MAX_ROLLOUTS = 32  # a group
MAX_MESSAGES = 30  # a rollout
MAX_CHARS = 8000  # a rollout, shared by its messages

Row = dict[str, Any]  # one line of rollouts.jsonl


def write_report(run: Path, config: dict[str, Any]) -> Path:
    """Write `report.html` of a run from its journal, whole or not at all; return its path.

    `config` needs "algo", "env", "model_id" and "seed". A run that has nothing to show yet, or no
    curves.png, gives a page that says so.
    """
    records = read_records(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    results = before_after(records)
    updates = [r["update"] for r in records if "reward/mean" in r]
    ends = {record["update"] for _, *pair in results for record in pair}
    picks = sorted({updates[0], updates[len(updates) // 2], updates[-1]}) if updates else []
    rows = _rows(run / "rollouts.jsonl", ends, set(picks))
    room = LISTS_BYTES // max(1, len(results) + len(picks))
    name = f"{config['algo']} on {' '.join(config['env'])}"
    page = PAGE.substitute(
        name=_text(name),
        about=_text(f"model {config['model_id']}, seed {config['seed']}, {len(updates)} updates"),
        accuracy=_accuracy(results),
        curves=_curves(run / "curves.png"),
        tasks="".join(_pairs(rows, *result, room) for result in results)
        or "<p>No evaluation yet.</p>",
        updates="".join(_update(rows, update, room) for update in picks)
        or "<p>No update yet.</p>",
    )  # fmt: skip
    part = run / ".part-report.html"
    part.write_text(page, encoding="utf-8")
    os.replace(part, run / "report.html")
    return run / "report.html"


def _rows(path: Path, evaluated: set[int], trained: set[int]) -> list[Row]:
    """The rollouts of these updates, read line by line: the file may be larger than memory."""
    rows: list[Row] = []
    if not path.exists():
        return rows
    with path.open() as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # cut short by a crash
                break
            if row["update"] in (evaluated if row["kind"] == "eval" else trained):
                rows.append(row)
    return rows


def _accuracy(results: list[tuple[str, dict, dict]]) -> str:
    if not results:
        return "<p>Held-out accuracy was not measured.</p>"
    lines = "".join(
        f'<tr><th scope="row">{_text(env)}</th><td>{describe(env, first)}</td>'
        f"<td>{describe(env, last)}</td></tr>"
        for env, first, last in results
    )
    _, first, last = results[0]
    return (
        '<table><thead><tr><th scope="col">held-out accuracy [95% interval]</th>'
        f'<th scope="col">before, update {first["update"]}</th>'
        f'<th scope="col">after, update {last["update"]}</th></tr></thead>'
        f"<tbody>{lines}</tbody></table>"
    )


def _curves(path: Path) -> str:
    if not path.exists():
        return "<p>No curves yet.</p>"
    if path.stat().st_size > PICTURE_BYTES:
        return "<p>The curves are too large for this page: see curves.png beside it.</p>"
    data = base64.b64encode(path.read_bytes()).decode()
    alt = "Held-out accuracy with its interval, reward and completion length over the updates."
    return f'<img src="data:image/png;base64,{data}" alt="{alt}">'


def _pairs(rows: list[Row], env: str, first: dict, last: dict, room: int) -> str:
    """The held-out tasks of one environment, each with its rollouts before and after."""
    if first is last:
        return f"<h3>{_text(env)}</h3><p>Evaluated once; nothing to compare yet.</p>"
    before, after = (
        {(r["seed"], r["agent"]): r
         for r in rows if (r["kind"], r["env"], r["update"]) == ("eval", env, record["update"])}
        for record in (first, last)
    )  # fmt: skip
    pairs = [(row, after[key]) for key, row in before.items() if key in after]
    correct = [(a["info"].get("correct"), b["info"].get("correct")) for a, b in pairs]
    gained = sum(a is False and b is True for a, b in correct)
    lost = sum(a is True and b is False for a, b in correct)
    blocks = (
        f'<details class="group"><summary>{_verdict(a)} → {_verdict(b)} · {_excerpt(a)}</summary>'
        f'{_messages(_opening(a))}<div class="pair">{_rollout(a, "before", _opening(a))}'
        f"{_rollout(b, 'after', _opening(a))}</div></details>"
        for a, b in pairs
    )
    return (
        f"<h3>{_text(env)}</h3><p>{len(pairs)} tasks: {gained} went from wrong to right, "
        f"{lost} from right to wrong.</p>{_fit(blocks, len(pairs), room, 'tasks')}"
    )


def _update(rows: list[Row], update: int, room: int) -> str:
    """The training rollouts of one update, in groups: one task and one agent each."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for r in rows:
        if (r["kind"], r["update"]) == ("train", update):
            groups[r["group_id"], r["env"], r["seed"], r["agent"]].append(r)
    blocks = (_group(sorted(group, key=_paid, reverse=True)) for group in groups.values())
    return (
        f'<details class="update"><summary>Update {update}, {len(groups)} groups</summary>'
        f"{_fit(blocks, len(groups), room, 'groups')}</details>"
    )


def _group(group: list[Row]) -> str:
    """One group, best return first: the prompt once, then what each rollout wrote."""
    prompt = _opening(group[0])
    shown = "".join(_rollout(row, "", prompt) for row in group[:MAX_ROLLOUTS])
    right = sum(row["info"].get("correct") is True for row in group)
    return (
        f'<details class="group"><summary>{right} of {len(group)} right, returns '
        f"{_paid(group[0]):.2f} to {_paid(group[-1]):.2f} · {_excerpt(group[0])}</summary>"
        f"{_messages(prompt)}{shown}{_left_out(len(group) - MAX_ROLLOUTS, 'rollouts')}</details>"
    )


def _rollout(row: Row, when: str, prompt: list[dict[str, str]]) -> str:
    """One rollout; its opening messages only where they aren't the `prompt` shown already."""
    facts = [when, f"return {_paid(row):.2f}", _verdict(row), f"{row['tokens']} tokens"]
    facts += ["cut off at the token limit"] * row["cut_off"]
    facts += ["episode not finished"] * row["truncated"]
    said = row["messages"][len(prompt) if _opening(row) == prompt else 0 :]
    kind = "right" if row["info"].get("correct") else "other"
    return (
        f'<div class="rollout {kind}"><p>{" · ".join(filter(None, facts))}</p>'
        f"{_messages(said)}</div>"
    )


def _messages(messages: list[dict[str, str]]) -> str:
    shown = messages[:MAX_MESSAGES]
    texts = "".join(
        f'<div class="message"><b>{_text(m["role"])}</b>'
        f'<div class="text">{_cut(m["content"], MAX_CHARS // len(shown))}</div></div>'
        for m in shown
    )
    return texts + _left_out(len(messages) - MAX_MESSAGES, "messages")


def _opening(row: Row) -> list[dict[str, str]]:
    """The messages before the policy's first."""
    roles = [m["role"] for m in row["messages"]]
    return row["messages"][: roles.index("assistant") if "assistant" in roles else None]


def _excerpt(row: Row) -> str:
    """Agent and the start of its task, to know a closed group by."""
    text = " ".join((_opening(row) or [{"content": ""}])[-1]["content"][:400].split())
    agent = "" if row["agent"] == "player" else f"{row['agent']}: "
    return _text(agent + (text if len(text) <= 90 else text[:90] + "…"))


def _paid(row: Row) -> float:
    # the journal writes null for a return that is not finite
    return float("-inf") if row["return"] is None else row["return"]


def _verdict(row: Row) -> str:
    return {True: "✓ right", False: "✗ wrong"}.get(row["info"].get("correct"), "not judged")


def _fit(blocks: Iterable[str], total: int, room: int, what: str) -> str:
    """The first blocks, as many as `room` bytes hold, and a note of how many are left out."""
    kept: list[str] = []
    for block in blocks:
        room -= len(block.encode())
        if room < 0 or len(kept) == MAX_BLOCKS:
            break
        kept.append(block)
    return "".join(kept) + _left_out(total - len(kept), what)


def _left_out(count: int, what: str) -> str:
    return f"<p><em>{count} more {what} are in rollouts.jsonl.</em></p>" if count > 0 else ""


def _cut(text: str, limit: int) -> str:
    """Escaped text; of a long one the start and the end, where answers stand."""
    gone = len(text) - limit
    if gone <= 0:
        return _text(text)
    note = f"<em> [{gone} characters left out here; all are in rollouts.jsonl] </em>"
    return _text(text[: limit // 2]) + note + _text(text[-(limit - limit // 2) :])


def _text(text: str) -> str:
    """Text for any place in the page; a lone surrogate, which UTF-8 can't write, becomes "?"."""
    return html.escape(text, quote=True).encode("utf-8", "replace").decode()
