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

    `env` takes the place of `cfg.env`: a class, an object, which is copied for every episode, or a
    function that returns a new environment. `data` does so too: the options of the environment
    `rewarded`, with `data=` a `datasets.Dataset` or a list of dicts, and `reward=` functions with
    TRL's signature. To resume the run, call this again with the same arguments.
    """

    def settings(_: list[str]) -> Config:
        if data and env is not None:
            raise UsageError("give env= or data=, not both")
        environment = rewarded.of_objects(**data) if data else env
        if environment is None:
            return complete(cfg)
        return complete(replace(cfg, env=(registry.name_object(environment),)))

    return cli.execute(main, [], settings)
