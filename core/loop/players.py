"""Opens the sampler, the environments and the opponents of a run; imports only extras in use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from core import distributed
from core.algorithm import Algorithm
from core.config import Config, needs
from core.episodes import RolloutCollector
from core.faults import UsageError
from core.nanollm import make_sampler
from core.policy import Policy
from core.pool import is_program
from core.sampler import Sampler, TorchSampler
from environments import Env
from environments.plumbing.registry import make
from environments.plumbing.text import is_rendered


def open_opponents(cfg: Config, policy: Policy, folder: Path, progress: dict[str, Any]) -> Any:
    """The `Opponents` that --env and --eval-env name, or None."""
    names = {env.opponent for env in (*cfg.env, *cfg.eval_env)} - {""}
    if not names:
        return None
    # the thread of --overlap would give the policy the weights of older copies while it trains; a
    # model behind a server has no weights here
    if cfg.overlap or cfg.sampler == "openai":
        flag = "--overlap" if cfg.overlap else "--sampler openai"
        raise UsageError(f"{flag} does not go with opponent={names.pop()}: remove one of them")
    from core.extras.opponents import Opponents

    return Opponents(names, cfg, policy, folder, progress)


def open_sampler(
    cfg: Config, policy: Policy, algorithm: Algorithm, reserved: int, folder: Path
) -> Sampler:
    """The sampler of --sampler. `reserved`: bytes of GPU memory that the reference will need."""
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
    options = {"with_kept_ids": cfg.top_p < 1 or cfg.top_k > 0, "num_rollouts": num_rollouts(cfg)}
    return make_sampler(cfg.sampler, policy, cfg.gpu_memory_utilization, reserved, **options)


def num_rollouts(cfg: Config) -> int:
    """How many completions this rank samples at the same time, at most; 0: unknown, as for games.

    >>> from core import config
    >>> num_rollouts(config.resolve(Config(num_prompts=16, group_size=8, eval_num_tasks=100)))
    128
    >>> num_rollouts(config.resolve(Config(env=("iterated_game",))))
    0
    """
    for spec in (*cfg.env, *cfg.eval_env):
        constructor: Any = spec.constructor  # a function may return a game of several agents
        is_class = isinstance(constructor, type)
        if not is_class or not issubclass(constructor, Env) or is_program(spec):
            return 0
    trained = cfg.num_prompts * cfg.group_size if cfg.num_updates else 0
    evaluated = cfg.eval_num_tasks * len(cfg.eval_env or cfg.env)
    return -(-max(trained, evaluated) // distributed.num_ranks())


def open_collector(
    cfg: Config, policy: Policy, opponents: Any, say: Callable[[str], None]
) -> RolloutCollector:
    """Plays the episodes. Raises UsageError if the rows of `rewarded` do not suit the settings."""
    envs = (*cfg.env, *cfg.eval_env)
    for spec in dict.fromkeys(env for env in envs if env.name == "rewarded"):
        env: Any = make(spec)
        if cfg.overlap and not env.waits:
            # math-verify's alarm raises in a second thread, so all answers would be wrong
            raise UsageError(
                "--overlap needs async reward functions: make them async, or remove it"
            )
        prompt = env.train[0][env.prompt]
        if not env.raw and isinstance(prompt, str) and is_rendered(prompt):
            advice = "add raw=true to take it as it is, or give messages"
            raise UsageError(f"--env {spec}: a prompt contains the chat template: {advice}")
        say(f"{spec.short}: {env.what_is_right}")
    collector = RolloutCollector(policy, cfg.max_turns, cfg.env_timeout, cfg.system_prompt, say=say)
    collector.shows_right = "feedback" in needs(cfg)
    if opponents:
        collector.redirect = opponents.redirect
    if any(map(is_program, envs)):
        from core.extras import programs

        collector.play_program = programs.play_program
    return collector
