"""`train.run`: how a notebook trains, with objects in place of names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from core.config import Config
from core.faults import UsageError
from core.settings import complete
from core.terminal import cli
from environments import rewarded
from environments.plumbing import registry


def run(main: Callable[[Config], int], cfg: Config, env: Any = None, **data: Any) -> int:
    """Trains with these settings, and prints errors as one line. Returns the exit code.

    `env`: an environment in place of `cfg.env`: a class, an object, which is copied for every
    episode, or a function that returns a new one. Or `data`: rows, a `datasets.Dataset` or a list
    of dicts, with `reward`, functions with TRL's signature, and other options of the environment
    `rewarded`. To resume the run, call this again with the same.
    """

    def named(_: list[str]) -> Config:
        if data and env is not None:
            raise UsageError("give env= or data=, not both")
        given = rewarded.of_objects(**data) if data else env
        if given is None:
            return complete(cfg)
        return complete(replace(cfg, env=(registry.name_object(given),)))

    return cli.execute(main, [], named)
