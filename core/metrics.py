"""An evening on metrics, 1 of 4. The metrics of an update.

`UpdateStats` measures the gradient steps, `rollout_metrics` the rollouts; core/evaluation.py
measures an evaluation. core/README.md says what each name means.
"""

import math
import statistics
from collections import defaultdict

import torch
from torch import Tensor

from algorithms.kl import weighted_kl
from algorithms.ppo import gae
from algorithms.tokens import Tokens, minus
from core import distributed
from core.batching import Batch
from core.config import Config
from core.selection import groups_with_spread, has_failed, num_episodes
from core.types import Rollout
from environments.base import PLAYER

OF_ALL_TOKENS = {"policy/entropy", "kl/reference", "weights/mean", "weights/capped"}


class UpdateStats:
    """The metrics of the gradient steps of one update.

    `loss` and `loss_weight` are of the last minibatch, `grad_norm` of the last one that
    --ppo.target-kl let pass. gap/* and tokens/trained are of the whole update. All other metrics
    are means over the last epoch: those of OF_ALL_TOKENS over its sampled tokens, the rest, which
    the algorithm's loss reports, over its tokens in the loss.
    """

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.epoch = 0
        self.epoch_sums: dict[str, float] = defaultdict(float)  # over the tokens of this epoch
        self.step_sums: dict[str, float] = defaultdict(float)  # over the tokens of this step
        self.loss = self.loss_weight = self.approx_kl = 0.0
        self.grad_norm: float | None = None  # None: no gradient step was attempted
        # for report.html, of each micro-batch: its step, and vectors of its n tokens, [5, n]
        self.traces: list[tuple[int, Tensor]] = []
        self.pushes: list[float] = []  # for each step: the sum of |d loss / d log π|
        self.num_steps = 0
        # before the first step: the sum over tokens of -log π minus the entropy, which is 0 on
        # average; the sum of the variances of -log π; the number of tokens
        self.surprise = (0.0, 0.0, 0.0)

    @torch.no_grad()
    def add(self, tokens: Tokens, loss: Tensor, sums: dict[str, float]) -> None:
        """Adds one micro-batch; `sums` by the metric's name."""
        ratio = tokens.sampler_ratio
        cap = self.cfg.tis_cap or math.inf  # 0: no importance weights
        beyond = ratio > cap
        if self.cfg.tis_mode == "mask":
            beyond |= ratio < 1 / cap
        loop_sums = {
            "weights/mean": ratio.sum().item(),  # before the cap
            "weights/capped": beyond.sum().item(),
            "loss": loss.item(),
            "loss/weight": tokens.token_weights.sum().item(),
            "policy/entropy": tokens.entropy.sum().item(),
            "tokens": len(tokens),
            "in_loss": int(tokens.in_loss.sum()),
        }
        if "ref_logprobs" in tokens:
            policy_ratio = (tokens.logprobs - tokens.old_logprobs).exp()
            kl = weighted_kl(tokens.logprobs, policy_ratio, tokens.ref_logprobs, "k3")
            loop_sums["kl/reference"] = kl.sum().item()
        if "varentropy" in tokens:
            loop_sums["surprise"] = -(tokens.logprobs + tokens.entropy).sum().item()
            loop_sums["varentropy"] = tokens.varentropy.sum().item()
        gradient = tokens.logprobs.grad
        assert gradient is not None  # optimizer.backward sets it
        loop_sums["push"] = gradient.abs().sum().item()
        weights = [tokens.token_weights, tokens.importance_weights]
        vectors = [tokens.index, tokens.logprobs, *weights, gradient]
        self.traces.append((len(self.pushes), torch.stack([x.cpu().double() for x in vectors])))
        _add({name: float(value) for name, value in sums.items()} | loop_sums, to=self.step_sums)

    def end_minibatch(self, epoch: int) -> None:
        """Ends the micro-batches of one step: sets `loss` and `approx_kl`, over all ranks."""
        if epoch != self.epoch:  # not in `add`, which a rank without micro-batches does not call
            self.epoch, self.epoch_sums = epoch, defaultdict(float)
        sums = distributed.all_reduce_metrics(dict(self.step_sums))
        self.loss, self.loss_weight = sums.pop("loss", 0.0), sums.pop("loss/weight", 0.0)
        self.pushes.append(sums.pop("push", 0.0))
        surprise, varentropy = sums.pop("surprise", 0.0), sums.pop("varentropy", 0.0)
        if not self.num_steps:
            self.surprise = surprise, varentropy, sums.get("tokens", 0.0)
        self.approx_kl = sums.get("kl/approx", 0.0) / max(1.0, sums.get("in_loss", 0.0))
        _add(sums, to=self.epoch_sums)
        self.step_sums.clear()

    def means(self, batch: Batch) -> dict[str, float]:
        """The metrics by name; to be called once, after the last step."""
        tokens, in_loss = (self.epoch_sums.pop(name, 0.0) for name in ("tokens", "in_loss"))
        metrics = {
            name: total / (tokens if name in OF_ALL_TOKENS else max(1, in_loss))
            for name, total in self.epoch_sums.items()
        } | {
            "update/steps": self.num_steps,
            "update/skipped": float(self.num_steps == 0),
            "tokens/trained": int(batch.in_loss.sum()),
        }
        if not tokens:
            return metrics
        metrics |= {"loss": self.loss, "loss/weight": self.loss_weight}
        if self.grad_norm is not None:
            metrics["grad/norm"] = self.grad_norm
        gap = (batch.old_logprobs - batch.sampler_logprobs).abs()
        metrics |= {"gap/logprob_mean": gap.mean().item(), "gap/logprob_max": gap.max().item()}
        surprise, varentropy, scored = self.surprise
        if varentropy > 0:
            metrics["gap/surprise"] = surprise / scored
            metrics["gap/surprise_z"] = surprise / math.sqrt(varentropy)
        if "old_values" in batch:
            # the rewards that followed each token: with λ = 1 and without values
            without = Tokens(**batch.vectors() | {"old_values": torch.zeros(len(batch))})
            explained = explained_variance(gae(without, 1.0), batch.old_values)
            metrics["value/explained_variance"] = explained
        return metrics | batch.advantage_metrics


def _add(sums: dict[str, float], to: dict[str, float]) -> None:
    for name, value in sums.items():
        to[name] += value


def rollout_metrics(cfg: Config, sampled: list[Rollout]) -> dict[str, float]:
    """Rewards, groups and lengths of the rollouts of one update (core/README.md has every name).

    Rollouts without a reward count only in "tokens/sampled", episodes/failed and .../no_reward.
    """
    rollouts = [rollout for rollout in sampled if not rollout.error]
    if not rollouts:  # other agents ended each episode before the policy acted
        return {"tokens/sampled": 0}
    played = num_episodes(rollouts)
    failed = num_episodes([*filter(has_failed, sampled)])
    unjudged = num_episodes([rollout for rollout in sampled if rollout.no_reward])
    returns = torch.tensor([r.episode_return for r in rollouts])
    turns = [turn for r in rollouts for turn in r.turns]
    lengths = [len(turn.completion_ids) for turn in turns]
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    alive = groups_with_spread(cfg, rollouts)
    # openings may differ within a group where another agent acts before the first turn
    one_agent = {rollout.agent for rollout in rollouts} == {PLAYER}
    openings = [set(map(opening_of, group)) for group in groups.values()]
    correct = [[*map(is_correct, group)] for group in map(judged, groups.values()) if group]
    metrics: dict[str, float] = {
        "reward/mean": returns.mean().item(),
        "reward/std": returns.std(correction=0).item(),
        "reward/min": returns.min().item(),
        "reward/max": returns.max().item(),
        "groups/zero_std_fraction": (len(groups) - len(alive)) / len(groups),
        **({"groups/openings": statistics.fmean(map(len, openings))} if one_agent else {}),
        "length/mean": statistics.fmean(lengths),
        "length/hit_token_limit": statistics.fmean(t.finish_reason == "length" for t in turns),
        "episodes/turns": len(turns) / len(rollouts),
        "episodes/truncated": statistics.fmean(r.episode_truncated for r in rollouts),
        "episodes/failed": 1 - (played + unjudged) / (played + unjudged + failed),
        **({"episodes/no_reward": unjudged / (played + unjudged + failed)} if unjudged else {}),
        "tokens/sampled": sum(rollout.num_tokens for rollout in sampled),
    }
    if correct:
        metrics["reward/correct"] = statistics.fmean(x for group in correct for x in group)
        metrics["groups/all_right"] = statistics.fmean(map(all, correct))
        metrics["groups/all_wrong"] = statistics.fmean(not any(group) for group in correct)
    return metrics | _info_means(rollouts)


def opening_of(rollout: Rollout) -> tuple[int, ...]:
    """The first prompt of an episode; () without a turn."""
    return tuple(rollout.turns[0].prompt_ids) if rollout.turns else ()


def judged(rollouts: list[Rollout]) -> list[Rollout]:
    """Those of which the environment can tell whether they are right."""
    return [rollout for rollout in rollouts if rollout.info.get("correct", False) is not None]


def is_correct(rollout: Rollout) -> bool:
    """Whether the environment calls the episode correct."""
    return bool(rollout.info.get("correct"))


def explained_variance(targets: Tensor, values: Tensor) -> float:
    """1 - Var(targets - values) / Var(targets): 1 for perfect values, 0 for a constant, below 0 for
    worse ones; 0 if all targets are equal."""
    targets = targets.double()
    errors = targets - values.double()
    unexplained = minus(errors, errors.mean()).square().sum()
    spread = minus(targets, targets.mean()).square().sum()
    return 1 - (unexplained / spread).item() if spread else 0.0


def _info_means(rollouts: list[Rollout]) -> dict[str, float]:
    """info/<key>: the mean of a value; reported/<key>: how many rollouts report it, if not all."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for key, value in rollout.info.items():
            if key != "correct" and isinstance(value, (bool, int, float)):
                values[key].append(float(value))
    means = {f"info/{key}": statistics.fmean(column) for key, column in values.items()}
    few = {key: column for key, column in values.items() if len(column) < len(rollouts)}
    return means | {f"reported/{key}": len(column) for key, column in few.items()}
