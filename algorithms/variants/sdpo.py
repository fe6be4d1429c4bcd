"""SDPO: learn from right answers, also where every reward is 0.

    D_t = KL(π_T(· | x_<t) ‖ π(· | x_<t))        over the whole vocabulary, after each sampled token
    L   = L_GRPO + c Σ_t ρ_t D_t                      SDPO, arXiv:2601.20802; OPSD, arXiv:2601.18734

Where all rollouts of a group fail, GRPO has nothing to compare. The teacher π_T is the policy
itself, which reads, before the same sampled tokens, a right answer to the task and then the task
once more (core/feedback.py). After each token that the policy sampled, the policy moves towards the
teacher's distribution of the next one, so it learns in contexts of its own. The
teacher has no gradient, and no token of the right answer is in the loss. Each term has the token
weight, the importance weight and the policy ratio ρ, without gradient.

Differences from the papers: SDPO shows a right rollout of the group or the environment's message,
and OPSD the solution, within one prompt; here the right answer is an earlier turn, because a small
model follows an example, and not a hint. SDPO's divergence is KL(π ‖ π_T), `reverse`, over the most
likely tokens, and its teacher has an average of the policy's weights; OPSD's teacher has the first
weights. Neither loss has a term for the reward; arXiv:2606.04036 adds GRPO's, as here.

    python train.py --config runs/feedback/copy.yaml
"""

from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor

from algorithms import grpo
from algorithms.options import Coefficient
from algorithms.tokens import Tokens

compute_advantages = grpo.compute_advantages


@dataclass(frozen=True)
class Options(grpo.Options):
    """Options of SDPO, beside those of GRPO."""

    needs = grpo.Options.needs | {"feedback"}
    coef: Coefficient = 1.0
    """Coefficient of the divergence from the teacher."""
    kind: Literal["forward", "reverse", "jsd"] = "forward"
    """forward: KL(teacher ‖ policy), which spreads over all that the teacher might say; reverse:
    KL(policy ‖ teacher); jsd: the mean of both KLs to the mean of the two."""

    def divergence(self, logprobs: Tensor, teacher: Tensor) -> Tensor:
        """[n] nats, from log-probs [n, V] of the policy and of the teacher, which has no gradient.

        >>> policy, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.8, 0.2]]).log()
        >>> Options(kind="forward").divergence(policy, teacher)  # 0.8 log 1.6 + 0.2 log 0.4
        tensor([0.1927])
        """

        def kl(p: Tensor, q: Tensor) -> Tensor:
            return (p.exp() * (p - q)).sum(-1)

        if self.kind == "forward":
            return kl(teacher, logprobs)
        if self.kind == "reverse":
            return kl(logprobs, teacher)
        mean = torch.logaddexp(logprobs, teacher) - log(2)
        return (kl(teacher, mean) + kl(logprobs, mean)) / 2


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """GRPO's loss and `tokens.divergence` from the teacher [n] (core/feedback.py)."""
    loss, metrics = grpo.compute_loss(tokens, options)
    if "divergence" not in tokens:  # no turn of this micro-batch has feedback
        return loss, metrics
    ratio = (tokens.logprobs - tokens.old_logprobs).exp().detach()
    weights = tokens.token_weights * tokens.importance_weights * ratio
    loss = loss + options.coef * (weights * tokens.divergence).sum()
    total = tokens.divergence.detach()[tokens.in_loss].sum().item()
    return loss, metrics | {"sdpo/divergence": total}
