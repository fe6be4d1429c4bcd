"""Opponents: who plays the other agents of a game while the policy plays one.

    --env tic_tac_toe:opponent=runs/x       the model of a finished run, or the folder of a model
    --env tic_tac_toe:opponent=older:10     the policy's own weights after update 0, 10, 20, ..

Any environment that names its `agents` can have one. A task's seed decides which agent the policy
plays, `agents[seed % len(agents)]`: the same in all rollouts of a group. An opponent is another
sampler at temperature 1, in evaluations too; nothing of it is trained on, counted or evaluated.

`older:k` draws a copy for each task from the last `KEEP`, evenly; evaluations play against that of
update 0, the policy before RL. The copies are <run>/opponents/<update>/, the trained weights alone.
"""

import itertools
import random
import re
from dataclasses import replace
from pathlib import Path

from core import distributed
from core.config import Config
from core.context import Agent
from core.episodes import Episode, RolloutCollector
from core.faults import UsageError
from core.files.atomic import remove
from core.files.checkpoint import copy_weights, publish_weights
from core.files.models import load_exported, settings_beside
from core.policy import Policy, borrowed
from core.results import Record
from core.sampler import Request, SamplingParams, TorchSampler
from core.seeds import OTHER_AGENTS, derive_seed
from core.types import Completion
from environments.base import EVAL_SEEDS

KEEP = 4  # older copies that are drawn from


class OlderCopy(TorchSampler):
    """Samples with the weights of `folder`."""

    def __init__(self, policy: Policy, folder: Path):
        super().__init__(policy)
        self.folder = folder

    def step(self) -> list[tuple[Request, Completion]]:
        """Samples all requests to their end. Raises UsageError if the folder cannot be read."""
        completions: list[tuple[Request, Completion]] = []
        weights = self.policy.trainable()
        with borrowed(weights):  # on exit the policy has its present weights again, bit for bit
            copy_weights(self.folder, weights)
            while self.waiting or self.batch:
                completions += super().step()
        return completions


class Opponents:
    """The opponents of these names. Raises UsageError if one cannot be loaded."""

    def __init__(self, names: set[str], cfg: Config, policy: Policy, run: Path, progress: Record):
        self.policy, self.folder, self.progress = policy, run / "opponents", progress
        older = {name for name in names if re.fullmatch("older:[1-9][0-9]{0,8}", name)}
        self.intervals = {name: int(name.removeprefix("older:")) for name in older}
        models = {name: load_opponent(name, cfg, policy) for name in names - older}
        self.samplers = {name: TorchSampler(model) for name, model in models.items()}

    def redirect(
        self, collector: RolloutCollector, episode: Episode, agent: Agent, request: Request
    ) -> Request:
        """The request of an agent; the opponent's sampler gets it if the policy plays another."""
        opponent, name = episode.task.env.opponent, agent.rollout.agent
        if not opponent:
            return request
        collector.take_seat(episode, name)
        if name == episode.seat:  # the policy's
            return request
        if opponent in self.intervals:
            update = self.copy_for(episode.task.seed, opponent, request.params.seed)
            opponent = f"{opponent}, update {update}"
            older_copy = OlderCopy(self.policy, self.folder / f"{update:06d}")
            self.samplers.setdefault(opponent, older_copy)
        log = episode.agents[episode.seat].rollout.for_log  # no other rollout is kept
        conversation = {"player": opponent, "messages": agent.rollout.messages}
        log.setdefault("opponents", {})[name] = conversation
        sampler = self.samplers[opponent]
        params = SamplingParams(request.params.max_tokens)
        seed = derive_seed(request.params.seed, OTHER_AGENTS)
        stream = derive_seed(agent.stream, len(agent.rollout.turns))
        return replace(request, params=params, sampler=sampler, seed=seed, stream=stream)

    def copy_for(self, task_seed: int, opponent: str, seed: int) -> int:
        """The update whose copy plays against the policy in a task."""
        if task_seed in EVAL_SEEDS:
            return 0
        updates = copies_at(self.progress["update"], self.intervals[opponent])
        return random.Random(derive_seed(seed, OTHER_AGENTS, task_seed)).choice(updates)

    def save_copy(self) -> None:
        """Writes the copy that is due before the next update; removes copies that nobody needs."""
        update = max(0, self.progress["update"])
        if all(update % interval for interval in self.intervals.values()):
            return
        publish_weights(self.folder / f"{update:06d}", self.policy.trainable())
        # a resumed run starts at a checkpoint, whose name ends with its next update
        checkpoints = self.folder.parent.glob("checkpoint/[0-9]*-[0-9]*")
        starts = [update, *(int(path.name[7:]) - 1 for path in checkpoints)]
        needed = {0}
        for start, interval in itertools.product(starts, self.intervals.values()):
            needed.update(copies_at(start, interval))
        for folder in self.folder.glob("[0-9]*"):
            if int(folder.name) not in needed and distributed.rank() == 0:
                remove(folder)


def copies_at(update: int, interval: int) -> list[int]:
    """The updates whose copies play after this one: of older:10 after 59, [20, 30, 40, 50]."""
    newest = max(0, update) // interval
    return [n * interval for n in range(max(0, newest - KEEP + 1), newest + 1)]


def load_opponent(folder: str, cfg: Config, policy: Policy) -> Policy:
    """The model of a finished run, or of a model's folder; it must suit the policy."""
    name = f"opponent={folder}"
    if not Path(folder).is_dir():
        raise UsageError(f"{name}: there is no such folder of a run or model; try older:10")
    opponent = load_exported(settings_beside(cfg, policy), Path(folder), "opponent")
    if opponent.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UsageError(f"{name}: its tokenizer differs from that of --model-id")
    if (limit := opponent.max_length) < policy.max_length:
        raise UsageError(f"{name}: its context has {limit} tokens: lower --max-model-len to that")
    return opponent
