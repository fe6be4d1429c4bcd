"""Whom a run asks: the sampler, the environments, and opponents. Each extra is imported if it is
used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from core import distributed
from core.algorithm import Algorithm
from core.chat_template import is_rendered
from core.config import Config, needs
from core.episodes import RolloutCollector
from core.faults import UsageError
from core.nanollm import make_sampler
from core.policy import Policy
from core.pool import is_program
from core.sampler import Sampler, TorchSampler
from environments import Env
from environments.plumbing.registry import make


def open_opponents(cfg: Config, policy: Policy, folder: Path, progress: dict[str, Any]) -> Any:
    """The `Opponents` that --env and --eval-env name, or None."""
    names = {env.opponent for env in (*cfg.env, *cfg.eval_env)} - {""}
    if not names:
        return None
    # a thread would give the policy the weights of older copies while it trains, and of a model
    # behind a server there are none
    for flag in ["--overlap"] * cfg.overlap + ["--sampler openai"] * (cfg.sampler == "openai"):
        raise UsageError(f"{flag} does not go with opponent={names.pop()}: remove one of them")
    from core.extras.opponents import Opponents

    return Opponents(names, cfg, policy, folder, progress)


def open_sampler(
    cfg: Config, policy: Policy, algorithm: Algorithm, reserved: int, folder: Path
) -> Sampler:
    """The sampler of --sampler. `reserved`: bytes of GPU memory that others will allocate."""
    if cfg.overlap and distributed.num_ranks() > 1:  # two threads would exchange at once
        raise UsageError("--overlap does not go with several processes: remove it, or torchrun")
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
    return make_sampler(
        cfg.sampler, policy, cfg.gpu_memory_utilization, reserved,
        with_kept_ids=drops_tokens, num_rollouts=num_rollouts(cfg),
    )  # fmt: skip


def num_rollouts(cfg: Config) -> int:
    """How many completions this rank samples at the same time, at most; 0: unknown, as for games.

    >>> from core import config
    >>> num_rollouts(config.resolve(Config(num_prompts=16, group_size=8, eval_num_tasks=100)))
    128
    >>> num_rollouts(config.resolve(Config(env=("iterated_game",))))
    0
    """
    for spec in (*cfg.env, *cfg.eval_env):
        made: Any = spec.constructor  # a function may return a game of several agents
        if not isinstance(made, type) or not issubclass(made, Env) or is_program(spec):
            return 0
    trained = cfg.num_prompts * cfg.group_size if cfg.num_updates else 0
    evaluated = cfg.eval_num_tasks * len(cfg.eval_env or cfg.env)
    return -(-max(trained, evaluated) // distributed.num_ranks())


def open_collector(
    cfg: Config, policy: Policy, opponents: Any, say: Callable[[str], None]
) -> RolloutCollector:
    """What plays the episodes. Raises UsageError for data that does not go with the settings."""
    envs = (*cfg.env, *cfg.eval_env)
    for spec in dict.fromkeys(env for env in envs if env.name == "rewarded"):
        env: Any = make(spec)
        if cfg.overlap and not env.waits:
            # as math-verify's alarm raises there, all answers would be wrong
            raise UsageError("--overlap calls reward functions in a second thread: make them "
                             "async, or remove it")  # fmt: skip
        prompt = env.train[0][env.prompt]
        if not env.raw and isinstance(prompt, str) and is_rendered(prompt):
            raise UsageError(f"--env {spec}: a prompt has the chat template around it already: add "
                             "raw=true to take it as it is, or give messages")  # fmt: skip
        say(f"{spec.short}: {env.what_is_right}")
    play_program: Any = None
    if any(map(is_program, envs)):
        from core.extras import programs

        play_program = programs.play_program
    return RolloutCollector(
        policy, cfg.max_turns, cfg.env_timeout, system_prompt=cfg.system_prompt,
        redirect=opponents.redirect if opponents else None,
        shows_right="feedback" in needs(cfg), play_program=play_program, say=say,
    )  # fmt: skip
