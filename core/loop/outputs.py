"""Opens the outputs of a run: its log, and the display in the terminal."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from core import config, distributed
from core.algorithm import FOLDER, Algorithm, title_of
from core.config import Config
from core.files import run_folder
from core.files.run_log import RunLog, rewind
from core.policy import Policy
from core.results import Record
from core.settings import by_flag, config_to_dict, read_file
from core.terminal.console import Display
from environments.plumbing.registry import meanings, short_names


@contextmanager
def open_outputs(
    cfg: Config, algorithm: Algorithm, policy: Policy, folder: Path, log_dir: Path, progress: Record
) -> Iterator[tuple[RunLog, Display]]:
    """Opens the log, in `log_dir`, and the display of the run in `folder`.

    Drops the records after the checkpoint, writes config.yaml, copies the algorithm's file, and
    prints the settings that a resume has changed.
    """
    distributed.broadcast_from_rank_0(lambda: rewind(log_dir, progress))
    settings = config_to_dict(cfg)
    quiet = log_dir != folder  # a rank other than 0
    changes = changed_settings(folder, settings) if cfg.resume and not quiet else []
    run_folder.write_config(log_dir, settings)
    if FOLDER not in algorithm.file.parents:  # a file of the user's
        copy = log_dir / algorithm.file.name
        if copy.exists() and copy.read_bytes() != algorithm.file.read_bytes():
            changes.append(f"code of {copy.name}")
        with suppress(shutil.SameFileError):
            shutil.copy(algorithm.file, log_dir)
    changes += note_changes(cfg, progress)
    algo = title_of(cfg.algo, algorithm.variant or cfg.options.loss_type)
    ranks = f" x {distributed.num_ranks()}" if distributed.num_ranks() > 1 else ""
    title = f"picoRL · {algo} · {short_names(cfg.env)} · {policy.size()}{ranks}"
    console = Console(highlight=False, quiet=quiet)
    updates = 0 if cfg.max_sampled_tokens else cfg.num_updates
    with (
        RunLog(log_dir, settings, "none" if quiet else cfg.track) as log,
        Display(title, console, meanings(cfg.env), updates) as display,
    ):
        if changes:
            display.say(f"changed at this resume: {', '.join(changes)}")
        yield log, display


def changed_settings(folder: Path, settings: Record) -> list[str]:
    """The flags whose value in the run's config.yaml differs from `settings`: "lr 0.1 -> 0.2"."""
    saved = config.resolve(read_file(folder / "config.yaml")[1])
    old, new = by_flag(config_to_dict(saved)), by_flag(settings)
    changed = [name for name in old if name in new and new[name] != old[name]]
    return [f"{name} {old[name]} -> {new[name]}" for name in changed]


def note_changes(cfg: Config, progress: Record) -> list[str]:
    """Stores checksums of the environments, and a warning if one has changed: later evaluations are
    then compared with the first one after the change. Returns what has changed."""
    checksums = {env.short: env.checksum() for env in (*cfg.env, *cfg.eval_env)}
    before = progress.get("checksums", {})
    changed = [env for env, checksum in checksums.items() if before.get(env, checksum) != checksum]
    progress["checksums"] = checksums
    change = f"options, code or data of {', '.join(changed)}"
    if changed:
        progress |= {"first_correct": {}, "first_returns": {}}
        progress["changed_code"] = f"{change}: accuracies before and after are not compared"
    return [change] if changed else []
