"""Opens everything that a run needs, and closes it on exit: policy, optimizer, sampler, files."""

from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from core import config, distributed, memory, tasks
from core.algorithm import Algorithm, load_algorithm, name_of
from core.config import Config
from core.files import checkpoint, run_folder
from core.files.models import load_run_policy
from core.loop import players
from core.loop.outputs import open_outputs
from core.loop.reference import load_teacher, reference_bytes
from core.loop.run import Run
from core.optimizer import optimizer_for
from core.policy import Weights
from core.terminal.interrupt import Interrupt
from environments.base import RunInfo


@contextmanager
def open_run(cfg: Config) -> Iterator[Run]:
    """Opens everything that a run needs, in a new folder or in that of `cfg.resume`.

    `run.cfg` has the settings with all defaults; the largest micro-batch fits into memory. Ctrl-C,
    SIGTERM, SIGHUP and SIGUSR1 save the run and raise Stopped. On exit, writes report.html,
    curves.png, README.md and, for a run that reached its last update, the model. Raises UsageError
    for invalid settings, and then removes the folder of a new run.
    """
    cfg, info = prepare(cfg)
    algorithm = load_algorithm(cfg)
    scratch = TemporaryDirectory(ignore_cleanup_errors=True)
    with distributed.process_group(cfg.device), scratch as scratch_dir:
        cfg, folder = distributed.broadcast_from_rank_0(lambda: run_folder.begin(cfg))
        is_writer = distributed.rank() == 0
        lock = run_folder.lock_run(folder, new=not cfg.resume)
        with lock if is_writer else nullcontext():
            # ranks other than 0 write into a folder that is thrown away
            log_dir = folder if is_writer else Path(scratch_dir)
            with _open(cfg, info, algorithm, folder, log_dir) as run, run.save_when_stopped():
                memory.probe_peak_memory(cfg, run.policy, run.optimizer, run.say)
                yield run
            run.finish()


def prepare(cfg: Config) -> tuple[Config, RunInfo]:
    """Fills in the defaults that depend on the model and the algorithm, checks all settings, and
    tells the environments about the run.

    Raises UsageError for an invalid setting.
    """
    cfg = config.resolve(cfg)
    config.validate(cfg)
    return cfg, tasks.begin(cfg)


@contextmanager
def _open(
    cfg: Config, info: RunInfo, algorithm: Algorithm, folder: Path, log_dir: Path
) -> Iterator[Run]:
    """Opens the weights first, then the files, then the display and the environments."""
    saved, progress = distributed.broadcast_from_rank_0(lambda: checkpoint.find_checkpoint(folder))
    smaller = f"{memory.SMALLER}, --optimizer adamw8bit, a lower --max-model-len or a smaller model"
    with memory.out_of_memory_as_one_line(lambda: f"Use {smaller}"):
        policy = load_run_policy(cfg, folder, bool(saved))
        opponents = players.open_opponents(cfg, policy, folder, progress)
        optimizer = optimizer_for(cfg, policy)  # a warm start sets its own learning rate
        older = deque[Weights](maxlen=cfg.staleness)
        if saved:
            checkpoint.load_checkpoint(saved, policy, optimizer)
            older.extend(checkpoint.load_older(saved))
        teacher = load_teacher(cfg, policy) if cfg.teacher else None
        reserved = reference_bytes(cfg, policy)  # `begin` allocates them later
        sampler = players.open_sampler(cfg, policy, algorithm, reserved, folder)
        budget = memory.set_micro_batch_budget(policy, cfg, reserved + optimizer.gradient_bytes())
    with (
        closing(sampler),
        Interrupt() as interrupt,
        open_outputs(cfg, algorithm, policy, folder, log_dir, progress) as (log, display),
        closing(players.open_collector(cfg, policy, opponents, display.say)) as collector,
    ):
        sampler.say = interrupt.say = display.say
        options = f"{name_of(cfg.algo)}: {cfg.options}"
        lines = [*policy.remarks, sampler.remark, options, *budget, *algorithm.remarks]
        if cfg.resume and not saved:
            lines.append(f"{folder} has no checkpoint yet: starting from the beginning")
        if cfg.resume and 0 < cfg.num_updates <= progress["update"]:
            lines.append(f"{progress['update']} updates are done: a higher --num-updates goes on")
        lines.append(f"report: {folder / 'report.html'}  (there before update 1; reload it)")
        for line in filter(None, lines):
            display.say(line)
        run = Run(
            cfg, info, algorithm, policy, optimizer, collector, sampler,
            folder, log, display, interrupt, progress, older, reference=teacher,
        )  # fmt: skip
        if opponents:
            run.save_copy = opponents.save_copy
        yield run
