"""Runs of TRL's GRPOTrainer in our words, so that the doctor's rules read them as they read ours.

`read` translates trainer_state.json, which TRL writes beside each checkpoint (and where
`trainer.save_state()` is called), into our records. The settings are in training_args.bin, a pickle
that may run code, so it is not opened: the learning rate is in the log, and what else a rule needs
is left out or taken from the completions that `log_completions=True` writes as Parquet.
`in_their_words` gives what the doctor says the names that settings and metrics have in TRL.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from core import diagnostics
from core.config import Config
from core.faults import UsageError
from core.other_names import OTHER_NAMES
from core.results import Record, from_to

STATE = "trainer_state.json"
METRICS = {  # ours: TRL's
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "groups/zero_std_fraction": "frac_reward_zero_std",
    "length/mean": "completions/mean_length",
    "length/max": "completions/max_length",
    "length/hit_token_limit": "completions/clipped_ratio",
    "loss": "loss",
    "grad/norm": "grad_norm",
    "clip/low_fraction": "clip_ratio/low_mean",
    "clip/high_fraction": "clip_ratio/high_mean",
    "kl/reference": "kl",
    "policy/entropy": "entropy",
    "gap/logprob_mean": "sampling/sampling_logp_difference/mean",
    "gap/logprob_max": "sampling/sampling_logp_difference/max",
    "update/lr": "learning_rate",
}
PICTURES = METRICS | {"Reward per rollout": "reward", "kl/approx": "kl"}
SAME_NAMES = "temperature top_p top_k min_p entropy_coef max_grad_norm mask_truncated_completions"
PHRASES = {  # what no single name of OTHER_NAMES says
    r"python -m environments (play|check) [^\s),;]+": "a call of reward_funcs",
    r" in report\.html": " in completions/",
    r"--sampler torch": "use_vllm=False",
    r"--dtype float32": "bf16=False",
    r"--sft-steps": "SFTTrainer",
    r"--eval-num-tasks": "eval_dataset",
    r"--eval-every": "eval_steps",
    r"rollout(s?)\b": r"completion\1",
}
MOST_GROUPS = 512  # more groups in an entry of the log are not told apart from rounding


def is_theirs(folder: Path) -> bool:
    """Whether a folder is that of a run of TRL, and not of ours."""
    return not (folder / "config.yaml").exists() and bool(_states(folder))


def _states(folder: Path) -> list[Path]:
    """The file of the folder itself, and that of its newest checkpoint."""
    saved = [file for file in folder.glob(f"checkpoint-*/{STATE}")
             if file.parent.name.rpartition("-")[2].isdecimal()]  # fmt: skip
    saved.sort(key=lambda file: int(file.parent.name.rpartition("-")[2]))
    return [file for file in (folder / STATE, *saved[-1:]) if file.exists()]


def read(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """The settings that a run's files tell, and its records, which have the warnings that hold at
    the end. Raises UsageError if these are no files of GRPOTrainer."""
    states = [_state(file) for file in _states(folder)]
    state = max(states, key=lambda state: len(state["log_history"]))
    log = [entry for entry in state["log_history"] if isinstance(entry, dict)]
    records = _records(log)
    if not records:
        raise UsageError(f"{folder}: {STATE} is not of GRPOTrainer: its log has no reward")
    rates = [rate for r in records if not math.isnan(rate := diagnostics.finite(r, "update/lr"))]
    steps = diagnostics.finite(state, "logging_steps")  # of each entry; the rules take it for one
    settings: dict[str, Any] = {"algo": "grpo", "logging_steps": steps}
    if rates:
        settings["lr"] = max(rates)
        if not any(rates):  # the log has no such number, but a step of this size is none
            records = [record | {"update/moved": 0.0} for record in records]
    settings["evaluations"] = [(entry.get("step"), value) for entry in log if not math.isnan(
                               value := diagnostics.finite(entry, "eval_reward"))]  # fmt: skip
    settings["num_prompts"] = _least_groups(records)
    settings |= _with_completions(folder, log, records)
    known = {k: settings[k] for k in ("lr", "num_prompts", "group_size") if k in settings}
    _add_warnings(records, replace(diagnostics.CONFIG, env=("rewarded:",), **known))
    return settings, records


def _state(file: Path) -> dict[str, Any]:
    try:
        state = json.loads(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{file}: not JSON, as a checkpoint of TRL has it") from None
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise UsageError(f"{file}: has no log_history, as a checkpoint of TRL has it")
    return state


def _records(log: list[Record]) -> list[Record]:
    """A record for each entry with a reward. Later steps on the same completions, as with
    `num_iterations`, log none: their numbers replace those of the first one."""
    records: list[Record] = []
    for entry in log:
        if not isinstance(entry.get("step"), int) or not (records or "reward" in entry):
            continue
        found = {ours: entry[name] for ours, name in METRICS.items() if name in entry}
        if "reward" in entry:
            records.append({"update": entry["step"]} | found | _rewards(entry) | _cut(entry))
        else:
            records[-1] |= found
    return records


def _rewards(entry: Record) -> Record:
    """Where all completions earned the same, that is the least and the highest reward. Where every
    function returned None for all of them, they have earned nothing."""
    mean, spread = (diagnostics.finite(entry, name) for name in ("reward", "reward_std"))
    if unjudged := entry["reward"] is None:
        mean = spread = 0.0
    if not spread < 1e-6:
        return {}
    ends = dict.fromkeys(("reward/min", "reward/max"), round(mean, 6))
    return {"reward/mean": mean, "reward/std": 0.0, "episodes/no_reward": float(unjudged)} | ends


def _cut(entry: Record) -> Record:
    """TRL calls a completion clipped that does not end with an end token. If all are, but they are
    not equally long, another token ends them, and not the limit."""
    clipped, least, most = (diagnostics.finite(entry, f"completions/{name}")
                            for name in ("clipped_ratio", "min_length", "max_length"))  # fmt: skip
    return {"length/hit_token_limit": None} if clipped == 1 and least < most else {}


def _least_groups(records: list[Record]) -> int:
    """The least number of groups of which all fractions of dead groups can be; the log has no
    other trace of their number."""
    fractions = [diagnostics.finite(r, "groups/zero_std_fraction") for r in records]
    fractions = [fraction for fraction in fractions if not math.isnan(fraction)]
    fits = (n for n in range(1, MOST_GROUPS) if all(abs(f * n - round(f * n)) < 1e-3
                                                   for f in fractions))  # fmt: skip
    return next(fits, MOST_GROUPS)


def _with_completions(folder: Path, log: list[Record], records: list[Record]) -> dict[str, Any]:
    """What the logged completions tell: the sizes of groups; in the records, how many groups are
    all right. Right is what has earned the most in the whole run, from each function."""
    names = {name.split("/")[1] for entry in log for name in entry
             if name.startswith("rewards/") and name.endswith("/mean")}  # fmt: skip
    prompts = [json.dumps(row["prompt"], default=str) for row in _first_completions(folder)]
    runs = [len([*same]) for _, same in itertools.groupby(prompts)]
    size = math.gcd(*runs)
    if size < 2 or not names:  # no completions, or no groups
        return {}
    earned = {}
    for file in _files(folder):
        rows = _rows(file, ["step", *sorted(names)])
        if rows and len(rows) % size == 0:
            earned[rows[0]["step"]] = [tuple(row[name] or 0 for name in sorted(names))
                                       for row in rows]  # fmt: skip
    best = tuple(map(max, zip(*itertools.chain(*earned.values()), strict=True)))
    for record in records:
        if rewards := earned.get(record["update"]):
            groups = [{*rewards[i : i + size]} for i in range(0, len(rewards), size)]
            record["groups/all_right"] = sum(group == {best} for group in groups) / len(groups)
            # of groups, whatever scale_rewards is
            record["groups/zero_std_fraction"] = sum(len(g) == 1 for g in groups) / len(groups)
    return {"group_size": size, "num_prompts": len(prompts) // size}


def rollouts(folder: Path) -> Iterator[Record]:
    """The completions of the first file of them, as rollouts of ours."""
    for row in _first_completions(folder):
        sides = zip(("user", "assistant"), (row["prompt"], row["completion"]), strict=True)
        messages = [[{"role": role, "content": text}] if isinstance(text, str) else text
                    for role, text in sides]  # fmt: skip
        yield {"kind": "train", "messages": [*itertools.chain(*messages)]}


def _first_completions(folder: Path) -> list[Record]:
    files = _files(folder)
    return _rows(files[0], ["prompt", "completion"]) if files else []


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("completions/completions_*.parquet"))


def _rows(file: Path, columns: list[str]) -> list[Record]:
    """The rows of a Parquet file; none if it has no such columns or pyarrow is missing."""
    with suppress(ImportError, OSError, ValueError, LookupError):
        from pyarrow import parquet

        rows: list[Record] = parquet.read_table(file, columns=columns).to_pylist()
        return rows if rows and {*rows[0]} == {*columns} else []
    return []


def _add_warnings(records: list[Record], cfg: Config) -> None:
    """Writes the warnings that hold at the end to the record since which they have held; in a long
    log, to one of the next few, as only about 500 are looked at."""
    since: dict[str, tuple[int, str]] = {}
    held = {*diagnostics.active_warnings(records, cfg)}
    for end in range(len(records), 0, -1 - len(records) // 500):
        active = diagnostics.active_warnings(records[:end], cfg) if held else {}
        held &= active.keys()
        since |= {name: (end, active[name]) for name in held}
    for name, (end, message) in since.items():
        records[end - 1].setdefault("warnings", {})[name] = message


def lines(
    folder: Path, settings: dict[str, Any], records: list[Record],
    findings: Iterable[tuple[str, str, str]], nothing: str,
) -> list[str]:  # fmt: skip
    """The doctor's findings (text, picture, next step) in TRL's words, or else `nothing`; then what
    its log has beside, and what it lacks."""
    said = []
    for text, picture, step in findings:
        shown = f" (in the log: {PICTURES[picture]})" if picture in PICTURES else ""
        said.append(f"{text}{shown}. Next: {step}")
    said = [in_their_words(line, settings) for line in said or [nothing]]
    if unjudged := sum(record.get("episodes/no_reward") == 1 for record in records):
        said.append(f"In {unjudged} of {len(records)} log entries reward_funcs returned None for "
                    "every completion, which is read as a reward of 0.")  # fmt: skip
    if len(evaluations := settings["evaluations"]) > 1:
        (first, before), (last, after) = evaluations[0], evaluations[-1]
        said.append(f"eval_reward went from {from_to(before, after)} between steps {first} and "
                    f"{last}; the log has no interval for it.")  # fmt: skip
    return [*said, _not_shown(folder, records)]


def in_their_words(text: str, settings: dict[str, Any]) -> str:
    """A sentence of the doctor with TRL's names for flags.

    An item of a list that is only a flag, of which TRL has no counterpart, is left out.

    >>> in_their_words("a lower --lr, --curriculum 0.8, --top-p 1", {})
    'a lower learning_rate, top_p=1'
    """
    for ours, theirs in PHRASES.items():
        text = re.sub(ours, theirs, text)
    if "group_size" not in settings:
        text = re.sub(r"\ball \d+ answers", "all answers", text)
    if (steps := settings.get("logging_steps", 1)) > 1:
        text = re.sub(r"(\d) updates", rf"\1 log entries of {steps:g} steps", text)
    flag, names = r"--[a-z][\w.-]*\w", _names()
    text = re.sub(rf"(?<=, )({flag})(?: [\d.]+)?, ", lambda m: m[0] * (m[1] in names), text)
    return re.sub(rf"({flag})(?: (\d[\d.e-]*)\b)?", lambda m: (
        names.get(m[1], f"picoRL's {m[1]}") + (f"={m[2]}" if m[2] else "")), text)  # fmt: skip


def _names() -> dict[str, str]:
    """flag: TRL's name. A name whose whole advice is the flag comes before others."""
    names = {f"--{name.replace('_', '-')}": name for name in SAME_NAMES.split()}
    for name, advice in sorted(OTHER_NAMES.items(), key=lambda item: " " not in item[1]):
        if found := re.match(r"--[\w.-]*\w", advice):
            names[found[0]] = name
    return names


def _not_shown(folder: Path, records: list[Record]) -> str:
    """What the log of a run lacks, so that nothing here could check it."""
    logged = {name for record in records for name in record}
    missing = [
        "which answers are right",
        "how far a step moves the policy, and whether towards better answers",
        "whether the sampler has the trainer's weights",
        "whether a group has one prompt",
    ]
    if "kl/reference" not in logged:
        missing.append("the KL to a reference (beta=0)")
    if "gap/logprob_mean" not in logged:
        missing.append("the gap between sampler and trainer (only with use_vllm)")
    if not _files(folder):
        missing.append("what the completions say (log_completions=True)")
    return f"Not in TRL's log, so not checked: {'; '.join(missing)}."
