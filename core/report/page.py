"""What the microscope shows of rollouts.jsonl: as much of it as fits a page, packed.

When it doesn't fit, updates in the middle go first: the numbers of their tokens, then all of them.
The first and the last update stay, if need be with shorter texts. Lists and short names keep the
data small; core/report/page.html reads them:

    update {k: kind, u: number, g: groups}
    group {e: env, a: agent, s: seed, q: messages before the policy's first, r: rollouts}
    rollout {p: return, w: reward of each turn, n: tokens, v: correct, m: messages, c: cut off,
             t: truncated, x: error, i: what else the environment told, o: opening, where it is
             another than the group's, l: looks}
    look [texts, sampler, trainer - sampler, after - trainer, advantage], numbers times 10,000
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# what is kept of an update: tokens looked at, characters of a rollout; after the last: nothing
LEVELS = [(math.inf, 8000), (50_000, 8000), (5_000, 8000), (0, 8000), (0, 1000), (0, 200)]
NO_TOKENS, ABSENT = 3, len(LEVELS)
FIELDS = ("text", "sampler", "trainer", "after", "advantage")  # of a turn that was looked at

Row = dict[str, Any]  # a line of rollouts.jsonl


def choose(path: Path, room: int) -> tuple[list[dict[str, Any]], list[str]]:
    """As much of the rollouts as `room` bytes hold, and what was left out, in words.

    The file may be larger than memory: it is read once for sizes, and where not all of it fits,
    once more for what is kept.
    """
    whole: list[dict[str, Any]] = []
    names: list[tuple[str, int]] = []
    sizes: list[dict[int, int]] = []  # of each update, at the levels that it may be kept at
    ends: dict[tuple[str, bool], tuple[int, list[Row]]] = {}  # the first and last of each kind
    total = 0
    for i, (name, rows) in enumerate(_read(path)):
        names.append(name)
        packed = _pack(*name, rows, 0)
        sizes.append({0: _size(packed), NO_TOKENS: _size(_pack(*name, rows, NO_TOKENS))})
        total += sizes[i][0]
        if total <= room:
            whole.append(packed)
        ends.setdefault((name[0], True), (i, rows))
        ends[name[0], False] = (i, rows)
    if total <= room:
        return whole, []
    for i, rows in ends.values():
        sizes[i] = {level: _size(_pack(*names[i], rows, level)) for level in range(ABSENT)}
    levels = _plan(sizes, sorted({i for i, _ in ends.values()}), room)
    kept = [
        _pack(*name, rows, level)
        for (name, rows), level in zip(_read(path), levels, strict=False)
        if level != ABSENT
    ]
    left = []
    for what, low, high in (
        ("all rollouts", ABSENT, ABSENT),
        ("the tokens' numbers", NO_TOKENS, ABSENT - 1),
        ("the numbers of some tokens", 1, NO_TOKENS - 1),
        ("more of long texts", NO_TOKENS + 1, ABSENT - 1),
    ):
        gone = [
            name
            for name, size, level in zip(names, sizes, levels, strict=True)
            if low <= level <= high and (level == ABSENT or size[level] < size[0])
        ]
        for kind, title in (("train", "updates"), ("eval", "evaluations at")):
            if updates := [update for one, update in gone if one == kind]:
                left.append(cut(f"{what} of {title} {_ranges(updates)}", 300))
    return kept, left


def encode(data: Any) -> str:
    """JSON in ASCII that no text breaks out of: neither by a tag nor by half a surrogate pair."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def number(value: Any) -> float | None:
    """The value to six digits; None for what JSON has no number for."""
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def cut(text: str, limit: int) -> str:
    """The text, or its start and its end, where answers stand."""
    gone, half = len(text) - limit, limit // 2
    note = f" [{gone} characters left out: see rollouts.jsonl] "
    return text if gone <= 0 else text[:half] + note + text[half + gone :]


def _read(path: Path) -> Iterator[tuple[tuple[str, int], list[Row]]]:
    """The rows of each update and each evaluation, as (kind, update), in the file's order."""
    rows = itertools.chain(_rows(path.with_name("rollouts.old.jsonl")), _rows(path))
    for name, some in itertools.groupby(rows, lambda row: (row["kind"], row["update"])):
        yield name, list(some)


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a file, if it is there, up to one that was cut short."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from itertools.takewhile(lambda row: row is not None, map(_parse, file))


def _parse(line: str) -> Any:
    try:
        row = json.loads(line)
    except ValueError:  # cut short by a crash
        return None
    return row if isinstance(row, dict) else None


def _plan(sizes: list[dict[int, int]], ends: list[int], room: int) -> list[int]:
    """The level at which each update is kept, so that all fit; the first and last give up last."""
    middle = [i for i in range(len(sizes)) if i not in ends]
    middle.sort(key=lambda i: abs(i - len(sizes) / 2))
    steps = [(i, level) for level in (NO_TOKENS, ABSENT) for i in middle]
    steps += [(i, level) for level in range(1, ABSENT + 1) for i in ends]
    levels, total = [0] * len(sizes), sum(size[0] for size in sizes)
    for i, level in steps:
        if total <= room:
            break
        total += sizes[i].get(level, 0) - sizes[i][levels[i]]  # absent: 0
        levels[i] = level
    return levels


def _size(packed: dict[str, Any]) -> int:
    return len(encode(packed)) + 1  # with the comma after it


def _pack(kind: str, update: int, rows: list[Row], level: int) -> dict[str, Any]:
    """An update as the page has it: groups of rollouts, each group's opening once."""
    tokens, chars = LEVELS[level]
    groups: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        # written by the policy: the last messages of its side, one a turn
        said = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
        start = [*said[max(0, len(said) - len(row["rewards"])) :], len(row["messages"])][0]
        asked = _messages(row["messages"][:start], chars)
        key = (row["group_id"], row["env"], row["seed"], row["agent"])
        about = {"e": row["env"], "a": row["agent"], "s": row["seed"], "q": asked, "r": []}
        group = groups.setdefault(key, about)
        others = {k: v for k, v in row["info"].items() if k != "correct"}
        rollout = {
            "p": number(row["return"]),
            "w": [number(reward) for reward in row["rewards"]],
            "n": row["tokens"],
            "m": _messages(row["messages"][start:], chars),
            "v": number(row["info"].get("correct")),
            "c": row["hit_token_limit"],
            "t": row["episode_truncated"],
            "i": cut(", ".join(f"{k} {v}" for k, v in others.items()), 300),
            "x": cut(row.get("error") or "", 500),
            # joined late, and was asked something else than the rest of its group
            "o": asked if asked != group["q"] else None,
        }
        looks = row.get("token_traces", [])
        tokens -= sum(len(look.get("text", ())) for look in looks)
        if looks and tokens >= 0:
            rollout["l"] = [_trace_tokens(look) for look in looks]
        group["r"].append({k: v for k, v in rollout.items() if v or k in ("p", "v")})
    return {"k": kind, "u": update, "g": list(groups.values())}


def _messages(messages: list[Row], chars: int) -> list[list[str]]:
    limit = max(100, chars // max(1, len(messages)))
    return [[cut(str(m["role"]), 50), cut(str(m["content"]), limit)] for m in messages]


def _trace_tokens(look: dict[str, list]) -> list | None:
    """A turn's tokens: text, log-probs in 1e-4 nats (trainer and after as steps), advantages."""
    texts, *columns = (look.get(field, []) for field in FIELDS)
    if not texts or {len(column) for column in columns} != {len(texts)}:
        return None  # not looked at
    sampler, trainer, after, advantage = ([_ticks(x) for x in column] for column in columns)
    steps = [
        [None if x is None or y is None else y - x for x, y in zip(low, high, strict=True)]
        for low, high in ((sampler, trainer), (trainer, after))
    ]
    same = len(set(advantage)) == 1  # most often: one number for the whole turn
    return [texts, sampler, *steps, advantage[0] if same else advantage]


def _ticks(value: Any) -> int | None:
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return round(value * 10_000) if known else None


def _ranges(numbers: Iterable[int]) -> str:
    """'1-3, 7' of 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number - runs[-1][-1] == 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
