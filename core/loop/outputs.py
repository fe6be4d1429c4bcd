"""Opens what a run writes to: its log, and the terminal."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from core import config, distributed
from core.algorithm import FOLDER, Algorithm, title_of
from core.config import Config
from core.files import run_folder
from core.files.run_log import RunLog, rewind
from core.policy import Policy
from core.settings import by_flag, config_to_dict, read_file
from core.terminal.console import Display
from environments.plumbing.registry import meanings, short_names


@contextmanager
def open_outputs(
    cfg: Config, algorithm: Algorithm, policy: Policy, folder: Path, log_dir: Path,
    progress: dict[str, Any],
) -> Iterator[tuple[RunLog, Display]]:  # fmt: skip
    """The log and the display of a run.

    Drops the records after the checkpoint, writes config.yaml, keeps a copy of the algorithm's
    file, and says which settings a resume has changed. If a file of an environment has changed, the
    tasks may be others: later evaluations are compared with the first one since.
    """
    distributed.broadcast_from_rank_0(lambda: rewind(log_dir, progress))
    settings = config_to_dict(cfg)
    quiet = log_dir != folder
    saved = read_file(folder / "config.yaml")[1] if cfg.resume and not quiet else cfg
    before, now = by_flag(config_to_dict(config.resolve(saved))), by_flag(settings)
    changes = [f"{name} {old} -> {now[name]}" for name, old in before.items()
               if name in now and now[name] != old]  # fmt: skip
    run_folder.write_config(log_dir, settings)
    if FOLDER not in algorithm.file.parents:  # a file of the user's
        with suppress(shutil.SameFileError):
            shutil.copy(algorithm.file, log_dir)
    files = {env.short: env.checksum() for env in (*cfg.env, *cfg.eval_env)}
    known = progress.get("files", {})
    if edited := [env for env, code in files.items() if known.get(env, code) != code]:
        progress.pop("first_correct", None)
        progress["changed_code"] = (f"a file of {', '.join(edited)} has changed: accuracies before "
                                    "and after are of different tasks")  # fmt: skip
    progress["files"] = files
    algo = title_of(cfg.algo, algorithm.variant or cfg.options.loss_type)
    ranks = f" x {distributed.num_ranks()}" if distributed.num_ranks() > 1 else ""
    title = f"picoRL · {algo} · {short_names(cfg.env)} · {policy.size()}{ranks}"
    updates = 0 if cfg.max_sampled_tokens else cfg.num_updates
    with (
        RunLog(log_dir, settings, "none" if quiet else cfg.track) as log,
        Display(title, None, quiet, meanings(cfg.env), updates) as display,
    ):
        if changes:
            display.say(f"changed at this resume: {', '.join(changes)}")
        yield log, display
