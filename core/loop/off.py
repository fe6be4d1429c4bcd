"""Two parts of the loop of train.py that do nothing by default; flags switch them on."""

import torch
from torch import Tensor

from algorithms import kl
from algorithms.tokens import Tokens
from core.batching import Batch
from core.loop.run import Run
from core.scoring import score_tokens


def score_first(run: Run, batch: Batch) -> None:
    """Scores the S sampled tokens before the first gradient step, if the update needs it.

    The policy's log-probs become `old_logprobs` (π_old), and the values of its value head become
    `old_values`: an update of several steps needs them, and so do advantages that are computed from
    them, such as PPO's. The reference's log-probs become `ref_logprobs` (π_ref) for --kl-coef.
    """
    if run.scores_first:
        scores = score_tokens(run.policy, batch, run.cfg.temperature)  # logprobs, values: [S]
        batch.add({f"old_{name}": vector for name, vector in scores.items()})
    if run.reference:
        scores = score_tokens(run.reference, batch, run.cfg.temperature)
        batch.ref_logprobs = scores["logprobs"]


def regularizers(run: Run, tokens: Tokens) -> Tensor:
    """The entropy bonus and the KL penalty, a scalar that is added to the loss; by default 0.

        -entropy_coef Σ w ρ entropy + kl_coef Σ w weighted_kl

    w is the token weight times the importance weight; ρ = π / π_old, the policy ratio, is a factor
    of `weighted_kl`, too. Unlike the policy loss, these terms are not clipped.
    """
    cfg = run.cfg
    total = torch.zeros((), device=run.policy.device)
    if not cfg.entropy_coef and not run.reference:
        return total
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()  # [n]
    weights = tokens.token_weights * tokens.importance_weights  # [n]
    if cfg.entropy_coef:
        bonus = (weights * ratio.detach() * tokens.entropy).sum()
        total = total - cfg.entropy_coef * bonus
    if run.reference:
        weighted_kl = run.algorithm.weighted_kl or kl.weighted_kl
        penalty = weighted_kl(tokens.logprobs, ratio, tokens.ref_logprobs, cfg.kl_estimator)
        total = total + cfg.kl_coef * (weights * penalty).sum()
    return total
