"""The title of a run, and the README.md in its folder."""

from pathlib import Path
from typing import Any

from core.algorithm import name_of, title_of
from core.files.atomic import published
from core.files.run_folder import start_command
from core.report.doctor import accuracy
from core.results import Record, before_after, minutes, num_updates
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
    title = f"`{algorithm_title(config)}` on `{short_names(config['env'])}`"
    accuracies = [accuracy(*evaluations)[1] + ".\n" for evaluations in before_after(records)]
    lines = [
        f"# {folder.name}\n",
        f"{title}, model `{config['model_id']}`, seed {config['seed']}: {config['sft_steps']}"
        f" warm-start steps, {num_updates(records)} updates, {minutes(records):.1f} min.\n",
        *accuracies,
        "![curves](curves.png)\n",
        "To repeat the run under another name:\n",
        f"    {repeat_command(folder, config)}\n",
    ]
    with published(folder / "README.md") as part:
        part.write_text("\n".join(lines), encoding="utf-8", newline="\n")


def repeat_command(folder: Path, config: dict[str, Any]) -> str:
    flags = "--config", str(folder / "config.yaml"), "--run-name", "again"
    return start_command(config["env"], *flags)
