"""Opponents: who plays the other agents of a game while the policy plays one.

    --env tic_tac_toe:opponent=runs/x          the model of a finished run, or the folder of a model
    --env tic_tac_toe:opponent=older:10        copies of the policy itself, one every 10 updates
    --env tic_tac_toe:opponent=guess           the environment's random player, or `demonstrate`

Any environment that names its `agents` can have these opponents. The seed decides which agent the
policy plays: `agents[seed % len(agents)]`, so all rollouts of a group have the same one. Opponents
see what the policy would see in their place, and sample at temperature 1, in evaluations too, all
that wait for one opponent in one batch. Nothing of theirs is trained on, counted or evaluated.

`older:k` draws a copy for each task from the last `KEEP`, evenly: the policy as it was after update
0, k, 2k, .. Evaluations play against the copy of update 0, the policy before RL, so that they can
be compared with each other. The copies are <run>/opponents/<update>/: the trained
weights, with LoRA only the adapters. A resumed run finds those that it needs and writes the others
again.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from core import distributed
from core.config import Config, older_interval, opponents
from core.context import Agent
from core.episodes import Episode, Wanted
from core.faults import UsageError
from core.files.atomic import remove, sealed, unseal
from core.files.checkpoint import UNFINISHED, copy_weights, save_weights
from core.files.models import load_exported
from core.policy import Policy, borrowed
from core.pool import EnvCall
from core.sampler import Request, Sampler, SamplingParams, TorchSampler
from core.seeds import OPPONENTS, derive_seed
from core.tasks import Task
from core.types import Completion
from environments.base import EVAL_SEEDS
from environments.plumbing.registry import short_path

KEEP = 4  # older copies that are drawn from


class OlderCopy(Sampler):
    """Samples with the weights of an older copy; one step samples all requests to their end."""

    def __init__(self, opponents: "Opponents", copy: int):
        self.opponents, self.copy = opponents, copy
        self.waiting: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def step(self) -> list[tuple[Request, Completion]]:
        sampler, waiting = self.opponents.own_sampler, self.waiting
        ended: list[tuple[Request, Completion]] = []
        self.waiting = []
        with self.opponents.weights_of(self.copy):
            for request in waiting:
                sampler.add(request)
            while len(ended) < len(waiting):
                ended += sampler.step()
        return ended

    def clear(self) -> None:
        self.waiting = []


class Opponents:
    """The opponents of a run: those that its environments name."""

    def __init__(self, cfg: Config, policy: Policy, folder: Path, progress: dict[str, Any]):
        """Loads their models. `progress` is that of the run: "update" is the last finished one.

        Raises UsageError if a model cannot be loaded, or has other tokens than the policy.
        """
        self.policy, self.folder, self.progress = policy, folder, progress
        self.own_sampler = TorchSampler(policy)  # for older copies
        self.intervals = {k for o in opponents(cfg) if (k := older_interval(o))}
        self.intact: set[int] = set()  # copies whose checksums this process has compared
        self.saved = -1  # the last update whose copy this process has written
        self.samplers: dict[str, Sampler] = {o: s for o in opponents(cfg)
                                             if (s := _sampler(o, cfg, policy))}  # fmt: skip

    def ask(self, opponent: str, episode: Episode, agent: Agent, params: SamplingParams) -> Wanted:
        """Whom the collector asks for the next response of an agent that `opponent` plays."""
        copy = self.copy_for(episode.task, opponent, params.seed)
        agent.player = f"{opponent}, update {copy}" if copy >= 0 else short_path(opponent)
        seed = derive_seed(params.seed, OPPONENTS)
        stream = derive_seed(agent.stream, len(agent.rollout.turns))
        name, env = agent.rollout.agent, episode.env
        if opponent == "guess":
            return EnvCall(env, env.game.guess, (name, random.Random(derive_seed(seed, stream))))
        if opponent == "demonstrate":
            return EnvCall(env, env.game.demonstrate, (name,))
        if copy >= 0:
            opponent = f"update {copy}"
            self.samplers.setdefault(opponent, OlderCopy(self, copy))
        now = SamplingParams(params.max_tokens)  # temperature 1, in evaluations too
        return Request(agent.prompt_ids, now, seed, stream, agent.chat, self.samplers[opponent])

    def copy_for(self, task: Task, opponent: str, seed: int) -> int:
        """The update whose copy plays against the policy in this task; -1: no copy does."""
        interval = older_interval(opponent)
        if not interval:
            return -1
        if task.seed in EVAL_SEEDS:
            return 0
        drawn = random.Random(derive_seed(seed, OPPONENTS, task.seed))
        return drawn.choice(copies_at(self.progress["update"], interval))

    def update_copies(self) -> None:
        """Writes the copy that is due before the next update, and removes those not needed."""
        update = max(0, self.progress["update"])
        due = [k for k in self.intervals if update % k == 0]
        if not due or self.saved == update:
            return
        self.saved = update
        if distributed.rank() == 0:
            self._save(update)
        distributed.all_gather([0])  # the others read the file after it is complete

    @contextmanager
    def weights_of(self, copy: int) -> Iterator[None]:
        """Inside, the policy has the weights of a copy; on exit its own, bit for bit.

        Raises UsageError if the folder of the copy is missing or damaged.
        """
        folder = self._folder(copy)
        fault = "" if copy in self.intact else unseal(folder)[1]
        if fault:
            raise UsageError(f"{folder}: this older copy {fault}")
        self.intact.add(copy)
        parameters = replace(self.policy, value_head=None).trainable()
        with borrowed(parameters):
            copy_weights(folder, parameters)
            yield

    def _folder(self, copy: int) -> Path:
        return self.folder / "opponents" / f"{copy:06d}"

    def _save(self, update: int) -> None:
        parameters = replace(self.policy, value_head=None).trainable()
        folder = self._folder(update)
        folder.parent.mkdir(exist_ok=True)
        with sealed(folder, {}) as part:
            save_weights(part, parameters)
        needed = {0, update}
        for start in (update, *saved_updates(self.folder)):  # a resumed run starts at one of these
            needed |= {n for k in self.intervals for n in copies_at(start, k)}
        for old in copies_in(self.folder):
            if old not in needed:
                remove(self._folder(old))


def copies_at(update: int, interval: int) -> list[int]:
    """The updates whose copies play while update `update` is the last finished one.

    >>> copies_at(7, 2), copies_at(59, 10), copies_at(-1, 10)
    ([0, 2, 4, 6], [20, 30, 40, 50], [0])
    """
    newest = max(0, update) // interval * interval
    return [n for n in range(newest - (KEEP - 1) * interval, newest + 1, interval) if n >= 0]


def saved_updates(run: Path) -> list[int]:
    """The last finished update of each checkpoint, also of the one that is being written."""
    files = (run / "checkpoint").glob("[0-9]*-*")
    names = {p.name.removesuffix(UNFINISHED).rpartition("-")[2] for p in files}
    return [int(name) - 1 for name in names if name.isdecimal()]


def copies_in(run: Path) -> list[int]:
    """The updates of the older copies in the folder of a run."""
    names = [folder.name for folder in (run / "opponents").glob("[0-9]*")]
    return sorted(int(name) for name in names if name.isdecimal())


def load_opponent(folder: Path, cfg: Config, policy: Policy) -> Policy:
    """The model of a finished run, or of a model's folder.

    Raises UsageError if there is none, or if it has other tokens than the policy or a shorter
    context.
    """
    place: dict[str, Any] = {
        "device": str(policy.device), "dtype": str(policy.dtype).removeprefix("torch.")
    }  # fmt: skip
    loaded = load_exported(replace(cfg, **place), folder, "opponent")
    if loaded.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UsageError(f"opponent {folder}: its tokenizer differs from that of --model-id")
    if loaded.max_length < policy.max_length:
        raise UsageError(f"opponent {folder}: its context has {loaded.max_length} tokens, and an "
                         f"episode {policy.max_length}; lower --max-model-len")  # fmt: skip
    return loaded


def _sampler(opponent: str, cfg: Config, policy: Policy) -> Sampler | None:
    """The sampler of an opponent with a model of its own; None for every other one."""
    if opponent in ("guess", "demonstrate") or older_interval(opponent):
        return None
    return TorchSampler(load_opponent(Path(opponent), cfg, policy))
