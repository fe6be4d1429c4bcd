"""Opens everything that a run needs, and closes it on exit: policy, optimizer, sampler, files."""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from algorithms.kl import weighted_kl
from core import (
    STARTED,
    config,
    distributed,
    evaluation,
    feedback,
    memory,
    scoring,
    tasks,
)
from core.algorithm import FOLDER, Algorithm, load_algorithm, name_of, title_of
from core.chat_template import TODAY, is_rendered
from core.config import RUNS, Config
from core.context import Renderer
from core.episodes import RolloutCollector
from core.faults import EpisodesFailed, NoServer, Stopped, UsageError
from core.files import checkpoint, run_folder, run_log
from core.files.atomic import scratch_folder
from core.files.models import folder_of_model
from core.loading import load_policy
from core.loop import best
from core.loop.ahead import Ahead
from core.loop.evaluator import Evaluator
from core.loop.outputs import Outputs
from core.loop.reference import load_teacher, reference_bytes
from core.loop.run import Run
from core.nanollm import make_sampler
from core.optimizer import MasterAdamW, adamw_8bit, fused_adamw, make_optimizer
from core.policy import Policy, Weights
from core.pool import is_program
from core.report import write_pages
from core.report.doctor import final_lines
from core.sampler import Sampler, TorchSampler
from core.settings import changed_settings, complete, config_to_dict, read_config
from core.terminal.console import Display, Output, print_line
from core.terminal.interrupt import Interrupt, owns_process
from environments import Env, rewarded
from environments.base import RunInfo
from environments.plumbing.registry import (
    EnvSpec,
    begin_run,
    checksums,
    make,
    meanings,
    short_names,
)


def one_at_a_time(opened: Callable[[Config], Iterator[Run]]) -> Callable[[Config], Iterator[Run]]:
    """`opened`, while no other run of this process is open: runs set what a process has once."""
    lock = threading.Lock()

    def alone(cfg: Config) -> Iterator[Run]:
        if not lock.acquire(blocking=False):
            raise UsageError("another run of this process goes on, and both would set its random "
                             "states and its data: start each in a process of its own")  # fmt: skip
        try:
            yield from opened(cfg)
        finally:
            lock.release()

    return alone


@contextmanager
@one_at_a_time
def open_run(cfg: Config) -> Iterator[Run]:
    """Creates the folder of a new run, or opens that of `cfg.resume`, and all that the run needs.

    `run.cfg` has the settings with all defaults; the largest micro-batch fits into memory. Ctrl-C,
    SIGTERM, SIGHUP and SIGUSR1 save the run and raise Stopped. On exit, writes report.html,
    curves.png, README.md and, for a run that reached its last update, the model. Raises UsageError
    for invalid settings; then no new folder is left behind.
    """
    cfg, info = prepare(cfg)
    algorithm = load_algorithm(cfg)
    if cfg.overlap and distributed.num_ranks() > 1:  # two threads would exchange at once
        raise UsageError("--overlap does not go with several processes: remove it, or torchrun")
    if cfg.overlap and any(env.name == "rewarded" and not make(env).waits for env in cfg.env):
        # as math-verify's alarm raises there, all answers would be wrong
        raise UsageError("--overlap calls reward functions in a second thread: make them async, or "
                         "remove it")  # fmt: skip
    with distributed.process_group(cfg.device), scratch_folder() as scratch_dir:
        restarted = distributed.is_restarted()
        folder, is_new = distributed.broadcast_from_rank_0(lambda: folder_of(cfg, restarted))
        cfg = distributed.broadcast_from_rank_0(lambda: with_date(cfg, folder, is_new))
        settings = config_to_dict(cfg)
        if is_new:
            folder = distributed.broadcast_from_rank_0(
                lambda: run_folder.create_run(folder, settings, take_next=not cfg.run_name)
            )
        is_writer = distributed.rank() == 0
        with run_folder.lock_run(folder, settings, is_new) if is_writer else nullcontext():
            distributed.check_shared(folder)
            # ranks other than 0 write into a folder that is thrown away
            log_dir = folder if is_writer else scratch_dir
            with _opened(cfg, info, algorithm, folder, log_dir, is_new) as run:
                interrupted = saved = False
                try:
                    with memory.out_of_memory_as_one_line(run.command_with_less_memory):
                        memory.probe_peak_memory(cfg, run.policy, run.optimizer, run.say)
                        yield run
                except Stopped:
                    interrupted = True
                    if cfg.sampler != "openai":
                        saved = run.save()
                except EpisodesFailed as error:
                    if not run.is_sampling:  # the weights are of an update that is not complete
                        raise
                    run.save()
                    command = run.outputs.resume_command()
                    raise EpisodesFailed(f"{error}; resume with: {command}") from None
                except NoServer as error:
                    if run.is_sampling and distributed.num_ranks() == 1:
                        run.save()
                    command = run.outputs.resume_command()
                    raise NoServer(f"{error}; resume with: {command}") from None
            if is_writer:
                for line in write_pages(folder, settings):
                    run.say(line)
            if interrupted:
                what = " and saved; resume" if saved else "; resume from the last checkpoint"
                raise Stopped(f"stopped{what} with: {run.outputs.resume_command()}")
            if is_writer and not run.stopped:
                if cfg.keep_best and best.export(folder):
                    update, _ = run.progress["best"]
                    run.say(f"model/ is that of update {update}, the best evaluation. The best of "
                            "many is flattered: evaluate it on other tasks")  # fmt: skip
                elif cfg.sampler != "openai":
                    latest = checkpoint.folder_of(folder, run.progress)
                    same = latest if run.outputs.saved == latest else None  # of the same weights
                    checkpoint.export_model(folder, run.policy, same)
                for line in final_lines(folder, settings):
                    print_line(line, Output(highlight=False))


def prepare(cfg: Config) -> tuple[Config, RunInfo]:
    """Fills in the defaults that depend on the model and the algorithm, checks all settings, and
    tells the environments about the run.

    Raises UsageError for an invalid setting.
    """
    cfg = config.resolve(complete(cfg))
    config.validate(cfg)
    train_envs, eval_envs = ([*map(str, envs)] for envs in (cfg.env, cfg.eval_env or cfg.env))
    info = RunInfo(train_envs, eval_envs, cfg.num_updates, 0, cfg.num_prompts, cfg.seed)
    begin_run(info)  # before any other use: it says which rows of data sets are held out
    tasks.held_out_envs(cfg.eval_env, cfg.env, cfg.train_difficulty)  # raises for unknown names
    if cfg.sft_steps:
        tasks.check_demonstrations(tasks.training_envs(cfg.env, cfg.train_difficulty))
    return cfg, info


def folder_of(cfg: Config, restarted: bool = False) -> tuple[Path, bool]:
    """The run's folder, and whether it is new. Raises UsageError for a name that is taken."""
    if cfg.resume:
        return Path(cfg.resume), False
    if distributed.may_restart() and not cfg.run_name:
        raise UsageError("torchrun --max-restarts needs a --run-name, to find the run to resume")
    if restarted and (RUNS / cfg.run_name).exists():
        return RUNS / cfg.run_name, False
    names = [env.name.rpartition(":")[2] for env in cfg.env]  # of module:Class, Class
    stem = f"{name_of(cfg.algo)}-{'+'.join(names)}"
    return run_folder.new_folder(RUNS, cfg.run_name, stem[: config.MAX_NAME_BYTES]), True


def with_date(cfg: Config, folder: Path, is_new: bool) -> Config:
    """The settings with the date of the run's start for the chat template, if it may show a date.

    A run that torchrun restarts keeps its date.
    """
    options = config.parse_template_options(cfg.template_options)
    if TODAY in options or cfg.model_id in (*config.TINY, config.SMOLLM2):
        return cfg
    if cfg.sampler == "openai":  # the server has the template
        return cfg
    if not is_new:
        return replace(cfg, template_options=read_config(folder / "config.yaml").template_options)
    day = f"{TODAY}={date.today().isoformat()}"
    return replace(cfg, template_options=",".join(filter(None, [cfg.template_options, day])))


@contextmanager
def _opened(
    cfg: Config, info: RunInfo, algorithm: Algorithm, folder: Path, log_dir: Path, new: bool
) -> Iterator[Run]:
    """The run, open: weights first, then its files, then what shows and plays."""
    started = perf_counter()
    found = checkpoint.ResumePoint() if new else checkpoint.find_checkpoint(folder)
    progress = checkpoint.START | found.progress
    others = "--optimizer adamw8bit, a lower --max-model-len or a smaller model"
    with memory.out_of_memory_as_one_line(lambda: f"Use {memory.SMALLER}, {others}"):
        policy = _load_policy(cfg, folder, bool(found.folder))
        opponents = _load_opponents(cfg, policy, folder, progress)
        optimizer = optimizer_for(cfg, policy)  # warm_start sets its own learning rate
        older = deque[Weights](maxlen=cfg.staleness)
        if found.folder:
            checkpoint.load_checkpoint(found.folder, policy, optimizer)
            older.extend(checkpoint.load_older(found.folder))
        teacher = load_teacher(cfg, policy) if cfg.teacher else None
        reserved = reference_bytes(cfg, policy)
        loaded = perf_counter()
        sampler = _make_sampler(cfg, policy, algorithm, reserved, folder)
        seconds = {"model": loaded - started, "sampler": perf_counter() - loaded}
        if owns_process():
            seconds["import"] = started - STARTED
        budget = memory.set_micro_batch_budget(policy, cfg, reserved + optimizer.gradient_bytes())
    notes, changed = _continue_files(cfg, algorithm, folder, log_dir, progress, new)
    records = run_log.read_records(log_dir / run_log.METRICS)
    settings, quiet = config_to_dict(cfg), log_dir != folder
    with (
        closing(sampler),
        Interrupt() as interrupt,
        run_log.RunLog(log_dir, settings, "none" if quiet else cfg.track) as log,
        _open_display(cfg, algorithm, policy, quiet) as display,
        closing(_make_collector(cfg, policy, opponents, display.say)) as collector,
        closing(Ahead(interrupt)) as ahead,
    ):
        sampler.say = interrupt.say = display.say
        lines = [changed, notes.get("changed_code", "")]
        if not new and not found.folder:
            lines.append(f"{folder} has no checkpoint yet: starting from the beginning")
        if not new and 0 < cfg.num_updates <= progress["update"]:
            lines.append(f"{progress['update']} updates are done: a higher --num-updates goes on")
        lines += [*policy.remarks, sampler.remark]
        lines += config.remarks(cfg, distributed.num_ranks())
        lines += [*budget, *algorithm.remarks]
        lines.append(f"report: {folder / 'report.html'}  (there before update 1; reload it)")
        lines += _lines_about_data(cfg, policy)
        for line in filter(None, lines):
            display.say(line)
        yield Run(
            cfg, info, algorithm, policy, optimizer, collector, sampler,
            Evaluator(cfg, collector, sampler, log, display, interrupt, progress),
            Outputs(cfg, folder, log, display), display, interrupt, ahead, progress,
            records, older, notes,
            {f"time/start_{name}_s": value for name, value in seconds.items()}, teacher,
            canary=({}, progress.get("canary", {})), read_out=_read_out(cfg, algorithm),
            weighted_kl=algorithm.weighted_kl or weighted_kl,
            save_copy=opponents.save_copy if opponents else lambda: None,
        )  # fmt: skip


def _read_out(cfg: Config, algorithm: Algorithm) -> Callable[..., dict[str, torch.Tensor]]:
    """What is read out of the hidden states of a micro-batch, for `compute_loss`."""
    if "feedback" in config.needs(cfg):
        return partial(feedback.read_out, cfg.options.divergence)
    return algorithm.read_out or scoring.read_out


def _load_policy(cfg: Config, folder: Path, has_trained: bool) -> Policy:
    # with --sampler openai the server has the model; tiny's tokenizer counts the tokens here
    model_id = "tiny" if cfg.sampler == "openai" else cfg.model_id
    return distributed.rank_0_first(lambda: load_policy(
        cfg, folder_of_model(model_id, folder / "base", cfg.seed, has_trained),
        value_head="value_head" in config.needs(cfg),
        plain=all(map(is_raw, (*cfg.env, *cfg.eval_env))),
    ))  # fmt: skip


def is_raw(env: EnvSpec) -> bool:
    """Whether the prompts of an environment are taken as they are."""
    return env.name == "rewarded" and bool(env.values["raw"])


def _load_opponents(cfg: Config, policy: Policy, folder: Path, progress: dict[str, Any]) -> Any:
    if not any(env.opponent for env in (*cfg.env, *cfg.eval_env)):
        return None
    from core.extras.opponents import Opponents

    return Opponents(cfg, policy, folder, progress)


def optimizer_for(cfg: Config, policy: Policy) -> MasterAdamW:
    """The optimizer of a run, with the learning rates of RL.

    Raises UsageError if it does not suit the device.
    """
    if cfg.optimizer == "adamw8bit" and policy.device.type == "mps":
        raise UsageError("--optimizer adamw8bit: bitsandbytes has no 8-bit step for MPS; add "
                         "--device cpu")  # fmt: skip
    make_adamw = adamw_8bit if cfg.optimizer == "adamw8bit" else fused_adamw
    return make_optimizer(policy, cfg.lr, cfg.options.value_lr, make_adamw=make_adamw)


def _make_sampler(
    cfg: Config, policy: Policy, algorithm: Algorithm, reserved: int, folder: Path
) -> Sampler:
    if cfg.sampler == "openai":
        from core.extras.openai_sampler import OpenAISampler

        return OpenAISampler(policy, cfg.base_url, cfg.model_id)
    if cfg.sampler == "server":
        from core.extras.server_sampler import ServerSampler

        return ServerSampler(policy, cfg.base_url, folder / "adapters")
    if algorithm.draw:
        return TorchSampler(policy, algorithm.draw)
    # the trainer has to know which tokens top-k and top-p kept
    drops_tokens = cfg.top_p < 1 or cfg.top_k > 0
    name = cfg.sampler
    return make_sampler(name, policy, cfg.gpu_memory_utilization, reserved, cfg.vllm_eager,
                        drops_tokens, num_rollouts(cfg))  # fmt: skip


def num_rollouts(cfg: Config) -> int:
    """How many completions this rank samples at the same time, at most; 0: unknown, as for games.

    >>> num_rollouts(config.resolve(Config(num_prompts=16, group_size=8, eval_num_tasks=100)))
    128
    >>> num_rollouts(config.resolve(Config(env=("iterated_game",))))
    0
    """
    if not all(map(has_one_agent, (*cfg.env, *cfg.eval_env))):
        return 0
    trained = cfg.num_prompts * cfg.group_size if cfg.num_updates else 0
    evaluated = cfg.eval_num_tasks * max(1, cfg.eval_samples) * len(cfg.eval_env or cfg.env)
    return -(-max(trained, evaluated) // distributed.num_ranks())


def has_one_agent(spec: EnvSpec) -> bool:
    """Whether an episode never asks for several completions at the same time; False: unknown."""
    made: Any = spec.constructor
    return isinstance(made, type) and issubclass(made, Env) and not is_program(spec)


def _continue_files(
    cfg: Config,
    algorithm: Algorithm,
    folder: Path,
    log_dir: Path,
    progress: dict[str, Any],
    new: bool,
) -> tuple[dict[str, str], str]:
    """Drops the records after the checkpoint, writes config.yaml and keeps the algorithm's file.

    Returns what the next record says about that, and a line about settings that have changed.
    What was edited since the checkpoint is compared with nothing from before.
    """
    distributed.broadcast_from_rank_0(lambda: run_log.rewind(log_dir, progress))
    changed = distributed.broadcast_from_rank_0(
        lambda: {} if new else changed_settings(cfg, folder)
    )
    held_out = tasks.held_out_envs(cfg.eval_env, cfg.env, cfg.train_difficulty)
    files = distributed.broadcast_from_rank_0(
        lambda: [(env.short, checksums(env)) for env in (*cfg.env, *held_out)]
    )
    edited = evaluation.forget_edited(files, progress)
    notes = {"changed_code": edited}
    run_folder.write_config(log_dir, config_to_dict(cfg))
    if FOLDER not in algorithm.file.parents:  # a file of the user's, which the run keeps
        with suppress(shutil.SameFileError):
            shutil.copy(algorithm.file, log_dir)
    changes = ", ".join(f"{name} {old} -> {now}" for name, (old, now) in changed.items())
    line = f"changed at this resume: {changes}" if changed else ""
    return {name: note for name, note in notes.items() if note}, line


def _open_display(cfg: Config, algorithm: Algorithm, policy: Policy, quiet: bool) -> Display:
    algo = title_of(cfg.algo, algorithm.variant or cfg.options.loss_type)
    ranks = f" x {distributed.num_ranks()}" if distributed.num_ranks() > 1 else ""
    title = f"picoRL · {algo} · {short_names(cfg.env)} · {policy.size()}{ranks}"
    updates = 0 if cfg.max_sampled_tokens else cfg.num_updates
    return Display(title, None, quiet, meanings(cfg.env), updates)


def _make_collector(
    cfg: Config, policy: Policy, opponents: Any, say: Callable[[str], None]
) -> RolloutCollector:
    envs, renderer = (*cfg.env, *cfg.eval_env), Renderer
    if any(map(tasks.has_tools, envs)):
        from core.extras.tools import ToolRenderer as renderer
    play_program: Any = None
    if any(map(is_program, envs)):
        from core.extras import programs

        play_program = programs.play_program
    return RolloutCollector(
        policy, cfg.max_turns, cfg.thinking == "drop", cfg.env_timeout,
        env_instances=cfg.env_instances, system_prompt=cfg.system_prompt, renderer=renderer,
        redirect=opponents.redirect if opponents else None,
        shows_right="feedback" in config.needs(cfg), play_program=play_program,
        say=say,
    )  # fmt: skip


def _lines_about_data(cfg: Config, policy: Policy) -> list[str]:
    """What counts as right in the environments `rewarded`. Raises UsageError for prompts that are
    rendered already."""
    own = [env for env in dict.fromkeys((*cfg.env, *cfg.eval_env)) if env.name == "rewarded"]
    for env in own:
        texts = [] if is_raw(env) else rewarded.texts_of(env)
        if any(is_rendered(policy.tokenizer, text) for text in texts):
            raise UsageError(f"--env {env}: a prompt has the chat template around it already: add "
                             "raw=true to take it as it is, or give messages")  # fmt: skip
    return [*map(rewarded.what_is_right, own)]
