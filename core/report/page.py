"""Writes `report.html`: curves, held-out tasks, rollouts and token traces of runs in one file.

The page is core/report/page.html with the data of the runs inserted as JSON. It needs no network.
Text of models and environments is data: the page shows it as text, never as markup. The page stays
below 10 MB; where the rollouts do not fit, the page says what was left out.

    write_report(Path("runs/a"), config)     # writes runs/a/report.html
"""

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from core.algorithm import load_algorithm
from core.report.summary import (
    algorithm_title,
    logged_warnings,
    minutes,
    num_updates,
    repeat_command,
    sampled_tokens,
    tokens_to_target,
)
from core.results import before_after
from core.run import diagnostics
from core.run.files import published
from core.run.log import METRICS, OLD_ROLLOUTS, ROLLOUTS, Record, iter_records, read_records
from environments.plumbing.registry import EnvSpec, meanings
from environments.plumbing.text import printable_json

TEMPLATE = Path(__file__).with_name("page.html")
PAGE_BYTES = 9_500_000
CURVE_POINTS = 600  # of a metric; more than a screen can show
# How much of a batch of rollouts the page keeps: all of it; no token traces; and texts of at most
# 200 characters; nothing
FULL, NO_TRACES, SHORT, OMITTED = range(4)
TEXT_CHARS = {FULL: 8000, NO_TRACES: 8000, SHORT: 200}  # per rollout
ALWAYS = ("return", "correct", "rewards", "tokens", "messages")  # fields that no rollout lacks
BatchKey = tuple[str, int]  # kind ("train" or "eval") and update
# The losses that page.html computes, by algorithm, and what the algorithm has no option for: the
# surrogate, and whether the policy ratio is that of a token or of a sequence. "recorded": the
# advantages of the token traces. CISPO's surrogate without clips has the gradient of REINFORCE; a
# clip that is None is no bound.
FORMS: dict[str, dict[str, Any]] = {
    "grpo": {"surrogate": "min", "ratio_level": "token"},
    "gspo": {"surrogate": "min", "ratio_level": "sequence"},
    "cispo": {"surrogate": "cispo", "ratio_level": "token"},
    "ppo": {"surrogate": "min", "ratio_level": "token", "scale_rewards": "recorded"},
    "reinforce": {"surrogate": "cispo", "ratio_level": "token", "scale_rewards": "recorded",
                  "clip_low": 1.0, "clip_high": None},
}  # fmt: skip
OPTIONS = ("scale_rewards", "clip_low", "clip_high", "aggregation", "dual_clip")


def write_report(run_dir: Path, config: dict[str, Any]) -> Path:
    """Writes report.html of a run from its logs and returns its path.

    `config` needs "algo", "env", "model_id" and "seed".
    """
    return write_page(run_dir / "report.html", [(run_dir, config)])


def write_page(path: Path, runs: list[tuple[Path, dict[str, Any]]]) -> Path:
    """Writes one page about all `runs`, given as folder and settings, to `path`; returns `path`.

    The runs share the page's bytes equally. The file is replaced as a whole or not at all.
    """
    before, after = TEMPLATE.read_text(encoding="utf-8").split("$data", 1)
    room = (PAGE_BYTES - TEMPLATE.stat().st_size) // len(runs)
    data = {
        "runs": [_run_data(run_dir, config, room) for run_dir, config in runs],
        "losses": known_losses(),
    }
    with published(path) as part:
        part.write_text(before + to_json(data) + after, encoding="utf-8", newline="\n")
    return path


def pack_rollouts(run_dir: Path, room: int) -> tuple[list[Record], list[str]]:
    """Packs the rollouts of a run into at most `room` bytes of JSON.

    Returns one object per batch (the rollouts of an update or of an evaluation), and lines that say
    what was left out. Batches in the middle of the run lose first their token traces and then
    everything; the first and last batches of each kind are shortened last.
    """
    batches, size = [], 0
    for key, rows in _read_batches(run_dir):
        batches.append(_pack_batch(key, rows, FULL))
        size += len(to_json(batches[-1])) + 1
        if size > room:
            break
    else:
        return batches, []
    sizes = {
        key: [*(len(to_json(_pack_batch(key, rows, level))) + 1 for level in TEXT_CHARS), 0]
        for key, rows in _read_batches(run_dir)
    }
    levels = _choose_levels(sizes, room)
    batches = [
        _pack_batch(key, rows, levels[key])
        for key, rows in _read_batches(run_dir)
        if levels.get(key, OMITTED) != OMITTED
    ]
    left_out = []
    for what, level in (("all rollouts", OMITTED), ("token traces", NO_TRACES),
                        ("parts of long texts", SHORT)):  # fmt: skip
        for kind, title in (("train", "updates"), ("eval", "evaluations at update")):
            updates = [
                key[1]
                for key, size in sizes.items()
                if key[0] == kind and levels[key] >= level and size[level] < size[level - 1]
                if (levels[key] == OMITTED) == (level == OMITTED)
            ]
            if updates:
                left_out.append(shorten(f"{what} of {title} {_ranges(updates)}", 300))
    return batches, left_out


def known_losses() -> dict[str, Record]:
    """The options of each loss that the page computes: by loss type, or else by algorithm."""
    found = {}
    for algo, form in FORMS.items():
        module = load_algorithm(algo)
        for loss_type in getattr(module, "LOSS_TYPES", [""]):
            options = module.Options(loss_type) if loss_type else module.Options()
            if hasattr(module, "resolve"):
                options = module.resolve(options)
            terms = {"aggregation": options.aggregation, "dual_clip": 0.0} | form
            found[loss_type or algo] = terms | _in_terms_of_the_page(vars(options))
    return found


def loss_settings(config: dict[str, Any]) -> Record | None:
    """What the page needs to compute the loss of a run from its recorded tokens; None if it cannot.

    "options": those of the run's own loss, and "tis_cap". "missing": sentences about what the page
    leaves out. The other keys are settings of the run; those that an older run did not record have
    their default.
    """
    algo = str(config["algo"])
    if algo not in FORMS:
        return None
    own = config.get(algo)
    own = own if isinstance(own, dict) else {}
    loss_type = own.get("loss_type") or load_algorithm(algo).Options().loss_type
    if (default := known_losses().get(loss_type or algo)) is None:
        return None
    options = default | _in_terms_of_the_page(own)
    missing = []
    kl_in_reward = config.get("kl_coef") and config.get("kl_in") == "reward"
    if config.get("overlong_buffer") or kl_in_reward:
        options["scale_rewards"] = "recorded"
        missing.append("Penalties in the reward are in the recorded advantages only.")
    if "tis_cap" not in config:
        missing.append("This run did not record the settings of its loss; these are the defaults.")
    if config.get("kl_coef") or config.get("entropy_coef"):
        missing.append("KL penalty and entropy bonus are left out.")
    if config.get("num_minibatches", 1) > 1:
        missing.append("The run took several steps per update, each on a random part of the "
                       "rollouts; here the token weights are of one step on all.")  # fmt: skip
    shared = {"tis_level": "token", "tis_mode": "truncate", "gamma": 1.0, "credit": "episode",
              "reward_coef": 1.0, "max_tokens": 64, "filter_groups": 0,
              "mask_truncated_completions": False}  # fmt: skip
    return {
        "options": {
            key: _finite(value)
            for key, value in (options | {"tis_cap": config.get("tis_cap", 2.0)}).items()
        },
        "missing": missing,
        **{key: _finite(config.get(key, default)) for key, default in shared.items()},
    }


def _in_terms_of_the_page(options: dict[str, Any]) -> Record:
    """The options of a loss that the page reads; PPO has one clip for both sides."""
    found = {key: options[key] for key in OPTIONS if key in options}
    if "clip" in options:
        found |= {"clip_low": options["clip"], "clip_high": options["clip"]}
    return found


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


def _run_data(run_dir: Path, config: dict[str, Any], room: int) -> Record:
    """The JSON object of a run in at most `room` bytes."""
    records = read_records(run_dir / METRICS)
    curves, num_dropped = _curves(records, room // 4)
    data: Record = {
        "name": run_dir.name,
        "algo": shorten(algorithm_title(config), 200),
        "env": shorten(" ".join(EnvSpec(env).short for env in config["env"]), 500),
        "model": shorten(str(config["model_id"]), 500),
        "seed": config["seed"],
        "command": repeat_command(run_dir, config),
        "num_updates": num_updates(records),
        "minutes": round(minutes(records), 2),
        "tokens": sampled_tokens(records),
        "results": [
            {
                "env": env,
                "before": _evaluation(env, first),
                "after": _evaluation(env, last),
                "tokens_to_target": tokens_to_target(env, records),
            }
            for env, first, last in before_after(records)
        ],
        "settings": [[key, shorten(str(value), 200)] for key, value in _flatten(config)][:200],
        "warnings": [
            {
                "name": shorten(name, 100),
                "updates": updates,
                "message": shorten(message, 500),
                "meaning": diagnostics.WARNINGS.get(name, ("", ""))[0],
            }
            for name, updates, message in logged_warnings(records)
        ],
        "curves": curves,
        "meanings": meanings(config["env"]),
        "held_out": _num_held_out(config),
        "loss": loss_settings(config),
    }
    data["batches"], left_out = pack_rollouts(run_dir, room - len(to_json(data)) - 4000)
    data["left_out"] = ([f"{num_dropped} metrics"] if num_dropped else []) + left_out
    return data


def _num_held_out(config: dict[str, Any]) -> int | None:
    """The number of held-out tasks of each evaluation; None if an older run did not record it."""
    envs = config.get("eval_env") or config["env"]
    tasks = config.get("eval_num_tasks")
    return tasks * len(envs) if isinstance(tasks, int) else None


def _evaluation(env: str, record: Record) -> Record:
    names = {"accuracy": "accuracy", "low": "ci_low", "high": "ci_high"}
    numbers = {key: _number(record[f"eval/{env}/{name}"]) for key, name in names.items()}
    numbers["trivial"] = _number(record.get(f"eval/{env}/trivial"))
    return {"update": record["update"], **numbers}


def _flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"[:100], value


def _curves(records: list[Record], room: int) -> tuple[dict[str, list[list[Any]]], int]:
    """Each metric as [steps, values], and how many metrics did not fit into `room` bytes."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        step = record["sft_step"] if "sft_step" in record else record["update"]
        for name, value in record.items():
            if name not in ("update", "sft_step") and (number := _number(value)) is not None:
                points.setdefault(name, []).append((step, number))
    curves: dict[str, list[list[Any]]] = {}
    for name, column in sorted(points.items(), key=lambda item: not item[0].startswith("eval/")):
        stride = math.ceil(len(column) / CURVE_POINTS)
        steps, values = zip(*column[:-1:stride], column[-1], strict=True)
        room -= len(to_json([name, steps, values]))
        if room > 0:
            curves[name] = [list(steps), list(values)]
    return curves, len(points) - len(curves)


def _read_batches(run_dir: Path) -> Iterator[tuple[BatchKey, list[Record]]]:
    """The rollouts of each update and each evaluation, in the order of the files."""
    rows = (
        row
        for name in (OLD_ROLLOUTS, ROLLOUTS)
        for row in iter_records(run_dir / name)
        if "kind" in row
    )
    for key, batch in itertools.groupby(rows, lambda row: (row["kind"], row["update"])):
        yield key, list(batch)


def _choose_levels(sizes: dict[BatchKey, list[int]], room: int) -> dict[BatchKey, int]:
    """The level at which to keep each batch so that the sum of their `sizes` fits into `room`."""
    keys = list(sizes)
    by_kind = [[key for key in keys if key[0] == kind] for kind in ("train", "eval")]
    ends = {key for same in by_kind if same for key in (same[0], same[-1])}
    from_middle = sorted(enumerate(keys), key=lambda item: abs(item[0] - len(keys) / 2))
    middle = [key for _, key in from_middle if key not in ends]
    steps = [(key, level) for level in (NO_TRACES, OMITTED) for key in middle]
    steps += [(key, level) for level in (NO_TRACES, SHORT, OMITTED) for key in sorted(ends)]
    levels = dict.fromkeys(keys, FULL)
    total = sum(size[FULL] for size in sizes.values())
    for key, level in steps:
        if total <= room:
            break
        total += sizes[key][level] - sizes[key][levels[key]]
        levels[key] = level
    return levels


def _pack_batch(key: BatchKey, rows: list[Record], level: int) -> Record:
    """The JSON object of a batch. The rollouts of a group share the prompt of the first one."""
    chars = TEXT_CHARS[level]
    groups: dict[tuple[Any, ...], Record] = {}
    for row in rows:
        # the policy wrote the last len(rewards) assistant messages; earlier ones are examples
        written = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
        start = [*written[max(0, len(written) - len(row["rewards"])) :], len(row["messages"])][0]
        prompt = _messages(row["messages"][:start], chars)
        group = groups.setdefault(
            (row["group_id"], row["env"], row["seed"], row["agent"]),
            {
                **{name: row[name] for name in ("env", "agent", "seed")},
                "prompt": prompt,
                "rollouts": [],
            },
        )
        facts = [f"{k} {v}" for k, v in row["info"].items() if k != "correct"]
        facts += [f"{k}: {v['player']}" for k, v in row.get("opponents", {}).items()]
        info = ", ".join(facts)
        rollout: Record = {
            "return": _number(row["return"]),
            "correct": _number(row["info"].get("correct")),
            "rewards": [_number(reward) for reward in row["rewards"]],
            "tokens": row["tokens"],
            "messages": _messages(row["messages"][start:], chars),
            "hit_token_limit": row["hit_token_limit"],
            "episode_truncated": row["episode_truncated"],
            "info": shorten(info, 300),
            "error": shorten(row.get("error") or "", 500),
            "prompt": prompt if prompt != group["prompt"] else None,
            "traces": [_pack_trace(t) for t in row.get("token_traces", [])]
            if level == FULL
            else [],
        }
        group["rollouts"].append({k: v for k, v in rollout.items() if v or k in ALWAYS})
    return {"kind": key[0], "update": key[1], "groups": list(groups.values())}


def _messages(messages: list[Record], chars: int) -> list[list[str]]:
    limit = max(100, chars // max(1, len(messages)))
    return [[shorten(str(m["role"]), 50), shorten(str(m["content"]), limit)] for m in messages]


def _pack_trace(trace: dict[str, list[Any]]) -> list[Any] | None:
    """The tokens of a turn as [texts, sampler, trainer - sampler, after - trainer, advantages].

    The numbers are integers in units of 1e-4; advantages are one integer if all are equal. Episodes
    of several turns have a sixth entry, the number of the sequence that the turn belongs to. None
    if the turn has no trace.
    """
    texts, *columns = (
        trace.get(name, []) for name in ("text", "sampler", "trainer", "after", "advantage")
    )
    if not texts or {len(column) for column in columns} != {len(texts)}:
        return None
    sampler, trainer, after, advantages = ([_to_units(x) for x in column] for column in columns)
    differences = [
        [None if x is None or y is None else y - x for x, y in zip(first, second, strict=True)]
        for first, second in ((sampler, trainer), (trainer, after))
    ]
    equal = len(set(advantages)) == 1
    packed = [texts, sampler, *differences, advantages[0] if equal else advantages]
    return packed + trace.get("sequence", [])[:1]


def _to_units(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else round(value * 10_000)


def _number(value: Any) -> float | None:
    """The number to six digits; None for what is not a number below 1e300."""
    if not isinstance(value, (bool, int, float)) or not abs(value) < 1e300:
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _finite(value: Any) -> Any:
    """A setting, or None instead of a float without a place in JSON."""
    return _number(value) if isinstance(value, float) else value


def _ranges(numbers: Iterable[int]) -> str:
    """'1-3, 7' for 1, 2, 3, 7."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number - ranges[-1][-1] == 1:
            ranges[-1][-1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in ranges)
