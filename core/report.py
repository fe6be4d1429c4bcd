"""`report.html`: a run to look through, in one page that opens anywhere, without a network.

Whatever a model or a task wrote is shown as text, never as markup. Long texts lose their middle and
long lists their end, and the page says so: it stays below 10 MB however large the run.
"""

import base64
import html
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import Any

from core.journal import read_records
from core.metrics import before_after, describe

LIST_BYTES = 8_000_000  # of all lists of tasks and groups together
MAX_ITEMS = 40  # of a list
MAX_CHARS = 8000  # of a rollout, shared by its messages
RIGHT, WRONG = "✓ right", "✗ wrong"

Row = dict[str, Any]  # a line of rollouts.jsonl

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$name, $about</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark } /* as the reader prefers; see-through grey suits both */
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem }
body, input { overflow-wrap: anywhere; font-size: 1rem } p { margin: .4rem 0 }
img { max-width: 100% } img[src$$=","] { display: none } summary { padding: .4rem 0 }
.group { border-top: 1px solid #8886 } .update .group { margin-left: 1rem }
.grid { display: grid; gap: 1rem; grid: auto / repeat(auto-fill, minmax(min(100%, 24rem), 1fr)) }
.rollout { border-left: 4px solid #8886; padding-left: .7rem } .right { border-color: seagreen }
.text { white-space: pre-wrap; background: #8882; padding: .4rem; font-family: monospace }
</style></head><body>
<h1>$name</h1><p>$about</p><h2>Held-out accuracy, with its 95% interval</h2>$accuracy
<img alt="Curves: accuracy, reward, completion length" src="data:image/png;base64,$curves">
<p hidden><label>Only tasks and groups with the text <input id="filter" type="search"></label>
<output id="count"></output></p>
<h2>The same held-out tasks, before and after</h2>$tasks
<h2>Training rollouts</h2>
<p>A group is one task, tried several times. The best return comes first.</p>$updates
<script>
const [box, count] = document.querySelectorAll("#filter, #count");
box.closest("p").hidden = false;
box.oninput = () => {
  const text = box.value.trim().toLowerCase(), groups = [...document.querySelectorAll(".group")];
  for (const g of groups) g.hidden = !g.textContent.toLowerCase().includes(text);
  for (const u of document.querySelectorAll(".update")) u.open = text !== "";
  count.textContent = groups.filter(g => !g.hidden).length + " of " + groups.length + " shown";
};
</script></body></html>
""")


def write_report(run: Path, config: dict[str, Any]) -> Path:
    """Write `report.html` of a run from its journal, whole or not at all; return its path.

    `config` needs "algo", "env", "model_id" and "seed". What isn't there yet, the page says.
    """
    records = read_records(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    results = before_after(records)
    updates = [r["update"] for r in records if "reward/mean" in r]
    picks = sorted({updates[0], updates[len(updates) // 2], updates[-1]}) if updates else []
    wanted = {("train", update) for update in picks}
    wanted |= {("eval", record["update"]) for _, *ends in results for record in ends}
    rows = _read_rows(run / "rollouts.jsonl", wanted)
    room = LIST_BYTES // max(1, len(results) + len(picks))
    accuracy = "".join(
        f"<p>{_text(env)}: <b>{describe(env, first)}</b> before RL → "
        f"<b>{describe(env, last)}</b> after {last['update']} updates</p>"
        for env, first, last in results
    )
    picture = run / "curves.png"
    page = PAGE.substitute(
        name=_text(f"{config['algo']} on {' '.join(config['env'])}"),
        about=_text(f"model {config['model_id']}, seed {config['seed']}, {len(updates)} updates"),
        accuracy=accuracy or "<p>Not measured yet.</p>",
        curves=base64.b64encode(picture.read_bytes()).decode() if picture.exists() else "",
        tasks="".join(_tasks(rows, *result, room) for result in results) or "<p>None yet.</p>",
        updates="".join(_update(rows, update, room) for update in picks) or "<p>None yet.</p>",
    )
    part = run / ".part-report.html"
    part.write_text(page, encoding="utf-8")
    return part.replace(run / "report.html")


def _read_rows(path: Path, wanted: set[tuple[str, int]]) -> list[Row]:
    rows: list[Row] = []
    if path.exists():
        with path.open() as file, suppress(ValueError):  # of a line cut short by a crash
            for row in map(json.loads, file):  # one by one: the file may be larger than memory
                if (row["kind"], row["update"]) in wanted:
                    rows.append(row)
    return rows


def _tasks(rows: list[Row], env: str, first: Row, last: Row, room: int) -> str:
    if first is last:
        return f"<h3>{_text(env)}</h3><p>Evaluated once: nothing to compare yet.</p>"
    some = [r for r in rows if r["kind"] == "eval" and r["env"] == env]
    before, after = ({(r["seed"], r["agent"]): r for r in some if r["update"] == end["update"]}
                     for end in (first, last))  # fmt: skip
    pairs = [[before[task], after[task]] for task in before if task in after]
    changes = [[_verdict(row) for row in pair] for pair in pairs]
    blocks = (_group(pair, room) for pair in pairs)
    return (
        f"<h3>{_text(env)}</h3><p>{len(pairs)} kept here: {changes.count([WRONG, RIGHT])} from "
        f"wrong to right, {changes.count([RIGHT, WRONG])} from right to wrong.</p>"
        f"{_fit(blocks, len(pairs), room, 'tasks')}"
    )


def _update(rows: list[Row], update: int, room: int) -> str:
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for r in sorted(rows, key=_paid, reverse=True):
        if (r["kind"], r["update"]) == ("train", update):
            groups[r["group_id"], r["env"], r["seed"], r["agent"]].append(r)
    blocks = (_group(group, room) for _, group in sorted(groups.items()))
    return (
        f'<details class="update"><summary>Update {update}: {len(groups)} groups</summary>'
        f"{_fit(blocks, len(groups), room, 'groups')}</details>"
    )


def _group(group: list[Row], room: int) -> str:
    """Rollouts of one task: what was asked, once, then what each of them wrote."""
    first, asked, verdicts = group[0], _asked(group[0]), [_verdict(row) for row in group]
    outcome = " → ".join(verdicts)
    if first["kind"] == "train":
        outcome = f"{verdicts.count(RIGHT)} of {len(group)} right, best return {_paid(first):.2f}"
    agent = f"{first['agent']}: " * (first["agent"] != "player")
    title = _text(agent + "".join(m["content"] for m in asked[-1:])[:90])
    blocks = (_rollout(row, asked) for row in group)
    return (
        f'<details class="group"><summary>{outcome} · {title}</summary>{_messages(asked)}'
        f'<div class="grid">{_fit(blocks, len(group), room // 4, "rollouts")}</div></details>'
    )


def _rollout(row: Row, asked: list[Row]) -> str:
    facts = f"update {row['update']} · {_verdict(row)} · return {_paid(row):.2f}"
    facts += f" · {row['tokens']} tokens" + " · cut off at the token limit" * row["cut_off"]
    facts += " · episode not finished" * row["truncated"]
    # an agent that joined late may have been asked something else than the rest of its group
    written = row["messages"][len(asked) if _asked(row) == asked else 0 :]
    right = " right" * (_verdict(row) == RIGHT)
    return f'<div class="rollout{right}"><p>{facts}</p>{_messages(written)}</div>'


def _messages(messages: list[Row]) -> str:
    limit = max(100, MAX_CHARS // max(1, len(messages)))
    return "".join(
        f'<b>{_text(m["role"])}</b><div class="text">{_cut(m["content"], limit)}</div>'
        for m in messages
    )


def _asked(row: Row) -> list[Row]:
    """The messages before the policy's first."""
    roles = [message["role"] for message in row["messages"]]
    return row["messages"][: [*roles, "assistant"].index("assistant")]


def _paid(row: Row) -> float:
    return float("-inf") if row["return"] is None else row["return"]  # null: was not finite


def _verdict(row: Row) -> str:
    return {True: RIGHT, False: WRONG}.get(row["info"].get("correct"), "not judged")


def _fit(blocks: Iterable[str], total: int, room: int, what: str) -> str:
    """As many of the blocks as `room` bytes and MAX_ITEMS allow, and a note of the others."""
    some = list(itertools.islice(blocks, MAX_ITEMS))
    sizes = itertools.accumulate(len(block.encode()) for block in some)
    kept = some[: sum(size <= room for size in sizes)]
    left = total - len(kept)
    return "".join(kept) + f"<p>{left} more {what} are in rollouts.jsonl.</p>" * (left > 0)


def _cut(text: str, limit: int) -> str:
    """The text, or its start and its end, where answers stand."""
    gone, half = len(text) - limit, limit // 2
    if gone <= 0:
        return _text(text)
    note = f"<em> [{gone} characters left out: see rollouts.jsonl] </em>"
    return _text(text[:half]) + note + _text(text[half + gone :])


def _text(text: str) -> str:
    """Text for any place in the page; "?" where UTF-8 has no bytes, for half a surrogate pair."""
    return html.escape(text, quote=True).encode("utf-8", "replace").decode()
