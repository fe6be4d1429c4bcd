"""What the loop of train.py does for flags that are off by default."""

import torch
from torch import Tensor

from algorithms import kl
from algorithms.tokens import Tokens
from core.batching import Batch
from core.loop.run import Run
from core.scoring import score_tokens


def score_first(run: Run, batch: Batch) -> None:
    """Sets π_old and PPO's values where they are needed before the first step, and π_ref.

    π_old is needed then if there are several steps, a value head, or advantages made of it.
    """
    if run.scores_first:
        found = score_tokens(run.policy, batch, run.cfg.temperature)
        batch.add({f"old_{name}": x for name, x in found.items()})
    if run.reference:
        found = score_tokens(run.reference, batch, run.cfg.temperature)
        batch.ref_logprobs = found["logprobs"]


def regularizers(run: Run, tokens: Tokens) -> Tensor:
    """What --entropy-coef and --kl-coef add to the loss; by default 0.

    Each token's term has the factors of the policy loss: token weight, importance weight and the
    policy ratio ρ = π / π_old. ρ is not clipped here: where GRPO's clip has removed a token's
    gradient, these terms keep theirs.
    """
    cfg, added = run.cfg, torch.zeros((), device=run.policy.device)
    if not cfg.entropy_coef and not run.reference:
        return added
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()  # [n]
    weights = tokens.token_weights * tokens.importance_weights
    if cfg.entropy_coef:
        bonus = (weights * ratio.detach() * tokens.entropy).sum()
        added = added - cfg.entropy_coef * bonus
    if run.reference:
        weighted_kl = run.algorithm.weighted_kl or kl.weighted_kl
        found = weighted_kl(tokens.logprobs, ratio, tokens.ref_logprobs, cfg.kl_estimator)
        added = added + cfg.kl_coef * (weights * found).sum()
    return added
