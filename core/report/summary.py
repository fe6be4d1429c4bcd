"""The title of a run, and the README.md in its folder."""

from pathlib import Path
from typing import Any

from core.algorithm import name_of, title_of
from core.files.atomic import published
from core.files.run_folder import again
from core.results import Record, accuracy_of, before_after, minutes, num_updates
from environments.plumbing.registry import short_names


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


def names_of(folders: list[Path]) -> list[str]:
    """The names of runs: those of their folders, or their paths where two names are equal.

    >>> names_of([Path("runs/a"), Path("runs/b")]), names_of([Path("one/a"), Path("two/a")])
    (['a', 'b'], ['one/a', 'two/a'])
    """
    names = [folder.resolve().name for folder in folders]
    return names if len({*names}) == len(names) else [*map(str, folders)]
