"""Opponents: who plays the other agents of a game while the policy plays one.

    --env tic_tac_toe:opponent=runs/x       the model of a finished run, or the folder of a model
    --env tic_tac_toe:opponent=older:10     the policy's own weights after update 0, 10, 20, ..

Any environment that names its `agents` can have one. The seed decides which agent the policy plays,
`agents[seed % len(agents)]`, so all rollouts of a group have the same one. An opponent is another
sampler at temperature 1, in evaluations too; nothing of it is trained on, counted or evaluated.

`older:k` draws a copy for each task from the last `KEEP`, evenly; evaluations play against that of
update 0, the policy before RL. The copies are <run>/opponents/<update>/: the trained weights, with
LoRA only the adapters. A resumed run finds those that it needs, and writes the later ones again.
"""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from core import distributed
from core.config import Config
from core.context import Agent
from core.episodes import Episode, RolloutCollector
from core.faults import UsageError
from core.files.atomic import remove
from core.files.checkpoint import copy_weights, publish_weights
from core.files.models import load_exported
from core.policy import Policy, borrowed
from core.sampler import Request, SamplingParams, TorchSampler
from core.seeds import OTHER_AGENTS, derive_seed
from core.types import Completion
from environments.base import EVAL_SEEDS

KEEP = 4  # older copies that are drawn from


class OlderCopy(TorchSampler):
    """Samples with the weights of `folder`; one step samples all requests to their end."""

    def __init__(self, policy: Policy, folder: Path):
        super().__init__(policy)
        self.folder = folder

    def step(self) -> list[tuple[Request, Completion]]:
        """As `TorchSampler.step`. Raises UsageError if the folder cannot be read."""
        weights, ended = self.policy.trainable(), list[tuple[Request, Completion]]()
        with borrowed(weights):  # on exit the policy has its own again, bit for bit
            copy_weights(self.folder, weights)
            while self.waiting or self.batch:
                ended += super().step()
        return ended


class Opponents:
    """The opponents of these names; `progress` is that of the run. Raises UsageError for one that
    cannot be loaded."""

    def __init__(
        self, names: set[str], cfg: Config, policy: Policy, run: Path, progress: dict[str, Any]
    ):
        self.policy, self.folder, self.progress = policy, run / "opponents", progress
        older = [name for name in names if re.fullmatch("older:[1-9][0-9]{0,8}", name)]
        self.intervals = {name: int(name.removeprefix("older:")) for name in older}
        others = names - self.intervals.keys()
        self.samplers = {name: TorchSampler(load_opponent(name, cfg, policy)) for name in others}

    def redirect(
        self, collector: RolloutCollector, episode: Episode, agent: Agent, request: Request
    ) -> Request:
        """The request of an agent, to the opponent if that one plays it."""
        opponent, name = episode.task.env.opponent, agent.rollout.agent
        if opponent:
            collector.take_seat(episode, name)
        if not opponent or name == episode.seat:
            return request
        seed = request.params.seed
        if opponent in self.intervals:
            update = self.copy_for(episode.task.seed, opponent, seed)
            opponent = f"{opponent}, update {update}"
            self.samplers.setdefault(opponent, OlderCopy(self.policy, self.folder_of(update)))
        own = episode.agents[episode.seat].rollout  # the only one that is kept
        shown = {"player": opponent, "messages": agent.rollout.messages}
        own.for_log.setdefault("opponents", {})[name] = shown
        params, sampler = SamplingParams(request.params.max_tokens), self.samplers[opponent]
        seed = derive_seed(seed, OTHER_AGENTS)
        stream = derive_seed(agent.stream, len(agent.rollout.turns))
        return replace(request, params=params, sampler=sampler, seed=seed, stream=stream)

    def copy_for(self, task_seed: int, opponent: str, seed: int) -> int:
        """The update whose copy plays against the policy in a task."""
        if task_seed in EVAL_SEEDS:
            return 0
        drawn = random.Random(derive_seed(seed, OTHER_AGENTS, task_seed))
        return drawn.choice(copies_at(self.progress["update"], self.intervals[opponent]))

    def folder_of(self, update: int) -> Path:
        return self.folder / f"{update:06d}"

    def save_copy(self) -> None:
        """Writes the copy that is due before the next update, and removes those not needed."""
        update, intervals = max(0, self.progress["update"]), self.intervals.values()
        if all(update % interval for interval in intervals):
            return
        publish_weights(self.folder_of(update), self.policy.trainable())
        # a resumed run starts at a checkpoint, whose name ends with its next update
        saved = [int(p.name[7:]) - 1 for p in self.folder.parent.glob("checkpoint/[0-9]*-[0-9]*")]
        starts = (update, *saved)
        needed = {0, *(n for start in starts for k in intervals for n in copies_at(start, k))}
        for folder in self.folder.glob("[0-9]*"):
            if int(folder.name) not in needed and distributed.rank() == 0:
                remove(folder)


def copies_at(update: int, interval: int) -> list[int]:
    """The updates whose copies play while update `update` is the last finished one.

    >>> copies_at(7, 2), copies_at(59, 10), copies_at(-1, 10)
    ([0, 2, 4, 6], [20, 30, 40, 50], [0])
    """
    newest = max(0, update) // interval
    return [n * interval for n in range(max(0, newest - KEEP + 1), newest + 1)]


def load_opponent(folder: str, cfg: Config, policy: Policy) -> Policy:
    """The model of a finished run, or of a model's folder; it must suit the policy."""
    name, dtype = f"opponent={folder}", str(policy.dtype).removeprefix("torch.")
    if not Path(folder).is_dir():
        raise UsageError(f"{name}: there is no such folder of a run or of a model; an older copy "
                         "of the policy is older:k, such as older:10")  # fmt: skip
    placed: Any = {"device": str(policy.device), "dtype": dtype}
    loaded = load_exported(replace(cfg, **placed), Path(folder), "opponent")
    if loaded.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UsageError(f"{name}: its tokenizer differs from that of --model-id")
    if (length := loaded.max_length) < policy.max_length:
        raise UsageError(f"{name}: its context has {length} tokens: lower --max-model-len to that")
    return loaded
