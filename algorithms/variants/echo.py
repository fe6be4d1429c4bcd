"""ECHO: predict what the environment says next, beside the policy gradient.

    L = L_GRPO(sampled tokens) + λ / |O| Σ_{t in O} -log π(x_t | x_<t)      ECHO, arXiv:2605.24517

O are the observation tokens of a gradient step: the messages with which an environment answers a
turn, and that the next turn reads. The policy did not sample them, so no other algorithm has them
in its loss; yet they say what an action led to, also in groups in which every rollout fails and
GRPO has nothing to compare. Their hidden states are computed anyway, as context of the later turns.
ECHO needs their logits, too, and no further pass and no teacher.

The term is supervised learning: it has no advantage, no importance weight, no policy ratio and no
temperature, and λ is `coef`. |O| counts all observation tokens of the step, each alike. `loss/echo`
is the mean without λ. --reward-coef 0 leaves the prediction alone, and --echo.coef 0 only measures.

Only what a message says counts (core/observations.py). Not in O are the first prompt of an episode
or of a fresh context, which no sampled token precedes; what the chat template writes around a
message, such as the header of a role; and the last message, after which nothing is sampled. With
one turn ECHO is GRPO.

Differences from the paper, of which we have read the abstract and summaries: it also leaves out
what a harness adds to the output of a terminal, such as warnings; here that is a part of the
message. The default λ is reported to be that of the authors' setting for Qwen3-8B.

    python train.py --algo echo --env tic_tac_toe --lr 1e-4
"""

from collections.abc import Set
from dataclasses import dataclass

from torch import Tensor

from algorithms import grpo
from algorithms.options import Coefficient
from algorithms.tokens import Tokens

compute_advantages = grpo.compute_advantages


@dataclass(frozen=True)
class Options(grpo.Options):
    """Options of ECHO, beside those of GRPO."""

    coef: Coefficient = 0.05
    """Coefficient of the cross-entropy of the environment's tokens."""

    @property
    def needs(self) -> Set[str]:
        """What GRPO needs, and `observations` (core/algorithm.py)."""
        return super().needs | {"observations"}


def compute_loss(tokens: Tokens, options: Options) -> tuple[Tensor, dict[str, float]]:
    """GRPO's loss and `tokens.cross_entropy`, this micro-batch's part of the mean, a number."""
    loss, metrics = grpo.compute_loss(tokens, options)
    if "cross_entropy" not in tokens:  # no turn of this step follows another
        return loss, metrics
    cross_entropy = tokens.cross_entropy
    return loss + options.coef * cross_entropy, metrics | {"loss/echo": cross_entropy.item()}
