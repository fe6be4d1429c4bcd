"""Summarizes a run: totals, and the README.md in its folder."""

from pathlib import Path
from typing import Any

from core.algorithm import name_of, title_of
from core.files.atomic import published
from core.files.run_folder import again
from core.results import Record, accuracy_of, before_after
from environments.plumbing.registry import short_names

TARGET_ACCURACY = 0.9  # `tokens_to_target` counts the tokens until this held-out accuracy


def algorithm_title(config: dict[str, Any]) -> str:
    """The algorithm of a run, and its variant if it has one.

    >>> algorithm_title({"algo": "/home/me/mine.py", "mine": {"loss_type": "first"}})
    'mine (first)'
    """
    options = config.get(name_of(str(config["algo"])))
    variant = options.get("loss_type") if isinstance(options, dict) else ""
    return title_of(str(config["algo"]), variant or "")


def write_readme(folder: Path, config: dict[str, Any], records: list[Record]) -> None:
    """Writes README.md of a run: its result, and the command that repeats it."""
    lines = [
        f"# {folder.name}",
        "",
        f"`{algorithm_title(config)}` on `{short_names(config['env'])}`, model"
        f" `{config['model_id']}`, seed {config['seed']}: {config['sft_steps']} warm-start steps,"
        f" {num_updates(records)} updates, {minutes(records):.1f} min.",
        "",
    ]
    for env, first, last in before_after(records):
        both = f"{accuracy_of(env, first)} -> {accuracy_of(env, last)}"
        lines += [f"Held-out accuracy on {env} [95%], before RL and after: {both}", ""]
    lines += [
        "![curves](curves.png)",
        "",
        "To repeat the run under another name:",
        "",
        f"    {repeat_command(folder, config)}",
    ]
    with published(folder / "README.md") as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def repeat_command(folder: Path, config: dict[str, Any]) -> str:
    """Returns the command that repeats a run under another name."""
    return again(config["env"], "--config", str(folder / "config.yaml"), "--run-name", "again")


def logged_warnings(records: list[Record]) -> list[tuple[str, list[int], str]]:
    """Returns the warnings in the records of a log: (name, updates that raised it, first message).

    >>> first, second = {"dead_groups": "all returns equal"}, {"dead_groups": "again"}
    >>> logged_warnings([{"update": 5, "warnings": first}, {"update": 9, "warnings": second}])
    [('dead_groups', [5, 9], 'all returns equal')]
    """
    warnings: dict[str, tuple[str, list[int], str]] = {}
    for record in records:
        for name, message in (record.get("warnings") or {}).items():
            warnings.setdefault(name, (name, [], message))[1].append(record["update"])
    return list(warnings.values())


def reported(records: list[Record]) -> list[str]:
    """Returns the info/* that all rollouts report; the mean of a flag that only those report for
    which it is true is always 1.

    >>> reported([{"info/invalid": 1.0, "reported/invalid": 3, "info/right": 1.0}])
    ['info/right']
    """
    names = {name for record in records for name in record}
    few = {f"info/{name[9:]}" for name in names if name.startswith("reported/")}
    return sorted(name for name in names - few if name.startswith("info/"))


def names_of(folders: list[Path]) -> list[str]:
    """The names of runs: those of their folders, or their paths where two names are equal.

    >>> names_of([Path("runs/a"), Path("runs/b")]), names_of([Path("one/a"), Path("two/a")])
    (['a', 'b'], ['one/a', 'two/a'])
    """
    names = [folder.resolve().name for folder in folders]
    return names if len({*names}) == len(names) else [*map(str, folders)]


def num_updates(records: list[Record]) -> int:
    """Returns the number of the last update; 0 before the first."""
    return max((record["update"] for record in records if "update" in record), default=0)


def minutes(records: list[Record]) -> float:
    """Returns the minutes spent in warm start, sampling, training and evaluation."""
    parts = ("rollout", "train", "eval", "sft")  # time/sync_s is a part of time/train_s
    return sum(r.get(f"time/{part}_s") or 0 for r in records for part in parts) / 60


def sampled_tokens(records: list[Record]) -> int:
    """Returns the number of tokens sampled for training."""
    return sum(record.get("tokens/sampled") or 0 for record in records)


def tokens_to_target(env: str, records: list[Record]) -> int | None:
    """Returns the tokens sampled for training up to the first evaluation with TARGET_ACCURACY on
    `env`; None if no evaluation reached it.

    >>> updates = [{"eval/a/accuracy": 0.2}, {"tokens/sampled": 70}, {"tokens/sampled": 30}]
    >>> tokens_to_target("a", [*updates, {"eval/a/accuracy": 0.9}])
    100
    """
    for end, record in enumerate(records, 1):
        if (record.get(f"eval/{env}/accuracy") or 0) >= TARGET_ACCURACY:
            return sampled_tokens(records[:end])
    return None
