"""What is measured of rollouts: rewards, groups, lengths; held-out accuracy with its interval."""

import itertools
import math
import statistics
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from core.types import Rollout


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Rewards, groups and lengths of an update's rollouts; each name is in the README's table."""
    returns = torch.tensor([r.episode_return for r in rollouts])
    turns = [turn for r in rollouts for turn in r.turns]
    lengths = [len(turn.completion_ids) for turn in turns]
    groups: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    means = {i: statistics.fmean(r.episode_return for r in g) for i, g in groups.items()}
    foreseen = torch.tensor([means[r.group_id] for r in rollouts])
    alike = [len({r.episode_return for r in group}) == 1 for group in groups.values()]
    right = [[bool(r.info.get("correct")) for r in group] for group in groups.values()]
    return {
        "reward/mean": returns.mean().item(),
        "reward/std": returns.std(correction=0).item(),
        "reward/min": returns.min().item(),
        "reward/max": returns.max().item(),
        "reward/correct": statistics.fmean(itertools.chain(*right)),
        "groups/zero_std_fraction": statistics.fmean(alike),
        "groups/all_right": statistics.fmean(map(all, right)),
        "groups/all_wrong": statistics.fmean(not any(group) for group in right),
        "length/mean": statistics.fmean(lengths),
        "length/max": max(lengths),
        "length/hit_token_limit": statistics.fmean(
            turn.finish_reason == "length" for turn in turns
        ),
        "episodes/turns": len(turns) / len(rollouts),
        "episodes/truncated": statistics.fmean(r.episode_truncated for r in rollouts),
        **explained_variance(
            returns, foreseen
        ),  # PPO puts its value head's in the place of the group's
        **_info_means(rollouts),
    }


def eval_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Accuracy with its 95% interval, mean return and length, for each environment."""
    by_env: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_env[rollout.env].append(rollout)
    metrics: dict[str, float] = {}
    for env, some in by_env.items():
        correct = sum(bool(r.info.get("correct")) for r in some)
        low, high = wilson(correct, len(some))
        returns = torch.tensor([r.episode_return for r in some], dtype=torch.float64)
        error = 1.96 * returns.std(correction=0).item() / math.sqrt(len(some))
        metrics |= {
            f"eval/{env}/accuracy": correct / len(some),
            f"eval/{env}/ci_low": low,
            f"eval/{env}/ci_high": high,
            f"eval/{env}/return_mean": returns.mean().item(),
            f"eval/{env}/return_low": returns.mean().item() - error,
            f"eval/{env}/return_high": returns.mean().item() + error,
            f"eval/{env}/tokens_mean": statistics.fmean(r.num_tokens for r in some),
        }
    return metrics


def before_after(records: list[dict[str, Any]]) -> list[tuple[str, dict, dict]]:
    """For each environment evaluated: its name, and the first and last records that tell of it."""
    evaluated = [r for r in records if any(key.startswith("eval/") for key in r)]
    if not evaluated:
        return []
    names = [k[len("eval/") : -len("/accuracy")] for k in evaluated[0] if k.endswith("/accuracy")]
    return [(name, evaluated[0], evaluated[-1]) for name in names]


def describe(env: str, record: dict[str, Any]) -> str:
    """'0.98 [0.96, 0.99]': accuracy with its interval."""
    value, low, high = (record[f"eval/{env}/{k}"] for k in ("accuracy", "ci_low", "ci_high"))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def token_metrics(known: dict[str, Tensor], mask: Tensor) -> dict[str, float]:
    """How far the trainer's log-probs are from the sampler's, in nats; how good values were."""
    gap = (known["old_logprobs"] - known["sampler_logprobs"])[mask].abs()
    found = {"gap/logprob_mean": gap.mean().item(), "gap/logprob_max": gap.max().item()}
    if "targets" in known:
        found |= explained_variance(known["targets"][mask], known["values"][mask])
    return found


def weight_metrics(ratio: Tensor, cap: float, mode: str) -> dict[str, float]:
    """Sums over tokens of the importance weights before the cap, and of those that it changes."""
    beyond = (ratio > cap) | (ratio < 1 / max(cap, 1)) if mode == "mask" else ratio > cap
    return {
        "weights/mean": ratio.sum().item(),
        "weights/capped": beyond.sum().item() if cap else 0.0,
    }


def explained_variance(targets: Tensor, values: Tensor) -> dict[str, float]:
    """1 - Var(targets - values) / Var(targets): 1 is a perfect baseline, 0 one that says nothing.

    >>> explained_variance(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    {'baseline/explained_variance': 1.0}
    """
    spread = targets.var().item()
    unexplained = (targets - values).var().item()
    return {"baseline/explained_variance": 1 - unexplained / spread if spread > 0 else 0.0}


def wilson(successes: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927): right near 0 and 1, where ±2 std errors isn't.

    >>> [round(x, 3) for x in wilson(0, 256)]
    [0.0, 0.015]
    """
    p = successes / total
    scale = 1 + z * z / total
    middle = (p + z * z / (2 * total)) / scale
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def _info_means(rollouts: list[Rollout]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for key, value in rollout.info.items():
            if key != "correct" and _is_number(value):
                values[f"info/{key}"].append(float(value))
    return {key: statistics.fmean(column) for key, column in values.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)
