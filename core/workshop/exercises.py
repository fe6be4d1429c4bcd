"""What has to be true of each exercise of scratch.py: facts on tensors to check by hand.

A fact asks a question of somebody's functions, `f`; right is what core/workshop/solutions.py says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Fact:
    """`says` what should be; `of` asks `f`; `hint` is for those whose answer is another one."""

    says: str
    of: Callable[[Any], Any]
    hint: str
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Exercise:
    """One exercise: its function in scratch.py, what it needs, its facts in order, what to read."""

    number: int
    name: str
    title: str
    hint: str  # what --hint says
    read: str
    facts: tuple[Fact, ...]
    needs: tuple[int, ...] = ()


TURNS = [([5, 6, 7], [8, 2]), ([9, 9], [4, 2]), ([6], [3])]
ONES = torch.ones(1, 1)
ALL = torch.ones(1, 1, dtype=torch.bool)
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -6.0]])
OLD_LOGPROBS = torch.tensor([[-1.5, -2.0, -2.9], [-0.4, -3.0, -6.0]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])
MASK = torch.tensor([[False, True, True], [True, True, True]])
EPISODE = torch.tensor([[0.0, 1.0, 2.0], [0.5, 1.0, 4.0]])  # rewards, values
PAID = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.5, 0.0]])
TOGETHER, APART = torch.tensor([0, 0, 0]), torch.tensor([0, 1, 1])
UNEQUAL = torch.tensor([[1.0], [2.0], [1.0]])
PLAYED = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()


def some_logits() -> tuple[Tensor, Tensor]:
    """Logits [2, 4, 5] and ids [2, 4]."""
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    return logits, torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])


def gradient(loss_of: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of a scalar; zeros where it doesn't depend on `at`."""
    at = at.clone().requires_grad_()
    total = loss_of(at).sum() + 0 * at.sum()  # so that a constant has a gradient, of 0
    return torch.autograd.grad(total, at)[0]


def one_token(f: Any, ratio: float, advantage: float) -> Any:
    return f.clipped_loss(ONES * math.log(ratio), ONES * 0, ONES * advantage, ALL)


def drawn(f: Any, odds: float, temperature: float) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of 4,000 draws between two tokens, the second likelier by the odds."""
    logits = torch.tensor([[0.0, math.log(odds)]]).expand(4000, 2)
    return f.sample(logits, temperature, torch.Generator().manual_seed(2))


class Bigrams(nn.Module):
    """The smallest language model: what comes next depends on the token before alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 25).view(5, 5).clone())

    def forward(self, input_ids: Tensor) -> Tensor:
        return 4 * self.table[input_ids]


def stepped(
    f: Any, returns: tuple[float, ...], steps: int = 1
) -> tuple[float, Tensor, Tensor, Tensor]:
    """Loss, weights, gradient left behind, and the gradient's norm at each step (-1: none)."""
    model, norms = Bigrams(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def watch(*_: Any) -> None:
        norms.append(-1.0 if model.table.grad is None else float(model.table.grad.norm()))

    optimizer.register_step_pre_hook(watch)
    input_ids = torch.tensor([[0, 1, 2, 4], [0, 1, 3, 4], [1, 2, 3, 4], [1, 2, 0, 4]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]]).bool()
    paid, group_ids = torch.tensor(returns, dtype=torch.float32), torch.tensor([0, 0, 1, 1])
    for _ in range(steps):
        loss = f.training_step(model, optimizer, input_ids, mask, paid, group_ids)
    left = model.table.grad
    left = torch.zeros(5, 5) if left is None else left
    return loss, model.table.detach(), left, torch.tensor(norms)


EXERCISES = (
    Exercise(
        1, "token_logprobs", "Log-probs and the causal shift",
        "logits[:, :-1] and input_ids[:, 1:] line up. log_softmax(-1) makes log-probs; gather(-1, "
        "ids[:, :, None]) picks one of V at each position, and squeeze(-1) drops the axis left.",
        "token_logprobs in algorithms/common.py: only where it's needed, in chunks",
        (
            Fact("4 tokens have 3 that were predicted: [2, 4, 5] gives [2, 3]",
                 lambda f: tuple(f.token_logprobs(*some_logits()).shape),
                 "drop the last position of the logits and the first token of the ids"),
            Fact("a model without a preference gives each of 5 tokens log 1/5",
                 lambda f: f.token_logprobs(torch.zeros(1, 4, 5), some_logits()[1][:1]),
                 "log_softmax over the last axis, the vocabulary"),
            Fact("each is the log-prob of the token that came, by the logits of the one before it",
                 lambda f: f.token_logprobs(*some_logits()),
                 "position t of the logits speaks of the token at t+1"),
            Fact("the gradient reaches the logits",
                 lambda f: gradient(lambda x: f.token_logprobs(x, some_logits()[1]),
                                    some_logits()[0]),
                 "no detach, no_grad, item or numpy on the way"),
        ),
    ),
    Exercise(
        2, "completion_mask", "The completion mask of a chat",
        "a list of False and True for all T ids; then leave out the first of them, for no logits "
        "predict it; torch.tensor(.., dtype=torch.bool).",
        "to_rollout_batch and _pad in core/batching.py",
        (
            Fact("two turns of 3 + 2 and 2 + 2 ids: four of eight predictions are ours",
                 lambda f: f.completion_mask(TURNS[:2]),
                 "position t is True if the token at t+1 was sampled"),
            Fact("three turns: each completion counts, each context doesn't",
                 lambda f: f.completion_mask(TURNS),
                 "context and completion of every turn, in the order in which they came"),
        ),
    ),
    Exercise(
        3, "group_advantages", "Better or worse than the others",
        "for group in group_ids.unique(): members = group_ids == group; then returns[members] is "
        "one group. Tensor.std() divides by n - 1.",
        "compute_advantages in algorithms/grpo.py: the same without a loop",
        (
            Fact("of two tries paid 1 and 0 one is above its group, one below",
                 lambda f: f.group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7])),
                 "minus the mean, over the standard deviation of a sample: 0.5 / 0.7071", 1e-3),
            Fact("groups don't mix, whatever their order and size",
                 lambda f: f.group_advantages(torch.tensor([1.0, 9.0, 0.0, 5.0, 0.0, 1.0]),
                                              torch.tensor([0, 1, 0, 1, 0, 0])),
                 "mean and standard deviation of each group by itself", 1e-3),
            Fact("a group that was paid alike gets 0",
                 lambda f: f.group_advantages(torch.tensor([0.3, 0.3]), torch.tensor([0, 0])),
                 "add 1e-4 to the standard deviation, or 0 is divided by 0", 1e-3),
        ),
    ),
    Exercise(
        4, "reinforce_loss", "The policy gradient",
        "(advantages * logprobs)[mask] are the sampled tokens' terms, as many as mask.sum().",
        "compute_loss in algorithms/reinforce.py",
        (
            Fact("one token, log-prob -2, advantage 3: the loss is 6",
                 lambda f: f.reinforce_loss(ONES * -2, ONES * 3, ALL), "-A · log π"),
            Fact("the mean over the mask", lambda f: f.reinforce_loss(LOGPROBS, ADVANTAGES, MASK),
                 "sum over the sampled tokens, divided by mask.sum()"),
            Fact("what stands off the mask doesn't matter, even infinity",
                 lambda f: f.reinforce_loss(LOGPROBS.masked_fill(~MASK, -torch.inf), ADVANTAGES,
                                            MASK),
                 "0 · infinity is not a number: pick with [mask], or torch.where, don't multiply"),
            Fact("its gradient is -A / number of tokens, at sampled tokens alone",
                 lambda f: gradient(lambda x: f.reinforce_loss(x, ADVANTAGES, MASK), LOGPROBS),
                 "no detach on the log-probs; nothing of what is off the mask"),
        ),
    ),
    Exercise(
        5, "clipped_loss", "The clipped surrogate",
        "ratio = exp(logprobs - old_logprobs); torch.minimum(ratio * A, ratio.clamp(..) * A).",
        "compute_loss in algorithms/grpo.py",
        (
            Fact("ratio 1: minus the advantage", lambda f: one_token(f, 1.0, 3.0),
                 "ρ = exp(log π - log π_old)"),
            Fact("ratio 1.5, A = 1: what is gained ends at 1.2", lambda f: one_token(f, 1.5, 1.0),
                 "clamp the ratio to 1-clip..1+clip, and take the smaller product"),
            Fact("ratio 0.5, A = 1: not clipped, there is all to gain",
                 lambda f: one_token(f, 0.5, 1.0), "the smaller of both products, not the clipped"),
            Fact("ratio 0.5, A = -1: what is gained ends at 0.8", lambda f: one_token(f, 0.5, -1.0),
                 "multiply by A before you take the smaller one"),
            Fact("ratio 1.5, A = -1: not clipped, it has to come down",
                 lambda f: one_token(f, 1.5, -1.0), "a clip takes away a gain, never a loss"),
            Fact("the mean over the tokens of the mask",
                 lambda f: f.clipped_loss(LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK),
                 "sum over the sampled tokens, divided by mask.sum()"),
            Fact("another clip is another bound",
                 lambda f: f.clipped_loss(LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK, clip=0.05),
                 "use the argument `clip`"),
            Fact("its gradient: -A ρ / number of tokens, 0 where it is clipped",
                 lambda f: gradient(lambda x: f.clipped_loss(x, OLD_LOGPROBS, ADVANTAGES, MASK),
                                    LOGPROBS),
                 "no detach on the new log-probs, nor on the ratio"),
        ),
    ),
    Exercise(
        6, "kl_k3", "KL to a reference by k3",
        "log_r = ref_logprobs - logprobs, and r is its exponential.",
        "kl_estimate in algorithms/common.py: also which of the estimates to learn from",
        (
            Fact("0 where both agree", lambda f: f.kl_k3(LOGPROBS, LOGPROBS), "r = 1, log r = 0"),
            Fact("where the reference gives twice the probability: 2 - 1 - log 2",
                 lambda f: f.kl_k3(ONES * -2, ONES * -2 + math.log(2)), "r = π_ref / π"),
            Fact("never negative, for each token by itself",
                 lambda f: f.kl_k3(LOGPROBS, OLD_LOGPROBS), "r - 1 - log r, no mean, no sum"),
        ),
    ),
    Exercise(
        7, "gae", "Credit for each token",
        "for t in reversed(range(N)): carry the value and the advantage of t+1, both 0 at first.",
        "compute_advantages in algorithms/ppo.py: for many rollouts at once, and cut off ones",
        (
            Fact("λ = 1, γ = 1: all that is still paid, minus the value",
                 lambda f: f.gae(*EPISODE, 1, 1),
                 "δ and then A_t = δ_t + γ λ A_t+1, from right to left"),
            Fact("λ = 0: the error of one step",
                 lambda f: f.gae(*EPISODE, 1, 0),
                 "δ_t = r_t + γ V_t+1 - V_t; behind the last there is no value: 0"),
            Fact("in between, with a discount",
                 lambda f: f.gae(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 1.0, 4.0]), 0.9,
                                 0.5),
                 "γ stands before the next value, γ λ before the next advantage"),
        ),
    ),
    Exercise(
        8, "sample", "Draw a token at a temperature",
        "torch.multinomial wants probabilities, [B, V], and returns [B, 1]; squeeze(-1) it. Its "
        "log-prob is picked with gather, as in exercise 1.",
        "draw in core/sampler.py: top-k and top-p too",
        (
            Fact("4000 rows of logits give as many ids and log-probs",
                 lambda f: tuple(tuple(x.shape) for x in drawn(f, 3, 1.0)),
                 "squeeze(-1) what multinomial and gather return"),
            Fact("odds of 3 to 1: three quarters of the draws",
                 lambda f: drawn(f, 3, 1.0)[0].float().mean(),
                 "multinomial draws from probabilities, the exponentials of the log-probs", 0.03),
            Fact("at temperature 0.5 odds of 3 become odds of 9",
                 lambda f: drawn(f, 3, 0.5)[0].float().mean(),
                 "divide the logits by the temperature", 0.03),
            Fact("the log-prob is that of the distribution drawn from: log 0.9 or log 0.1",
                 lambda f: drawn(f, 3, 0.5)[1].sort().values[[0, -1]],
                 "gather from the log-probs of logits / temperature"),
            Fact("temperature 0 takes the likeliest, always",
                 lambda f: f.sample(torch.tensor([[0.0, 2.0, 1.0], [5.0, 4.9, 0.0]]), 0.0,
                                    torch.Generator()),
                 "at temperature 0: argmax, and the log-prob under the logits as they are"),
            Fact("the same generator draws the same",
                 lambda f: (drawn(f, 3, 1.0)[0] == drawn(f, 3, 1.0)[0]).all(),
                 "pass generator=generator to multinomial"),
        ),
    ),
    Exercise(
        9, "training_step", "A whole training step",
        "advantages[:, None].expand_as(logprobs) gives each token its rollout's; "
        "logprobs.detach() are the old ones; backward, clip_grad_norm_, step, zero_grad.",
        "learn and backward in train.py",
        (
            Fact("the loss of the batch, as a float", lambda f: stepped(f, (1, 0, 1, 0))[0],
                 "advantages of the returns, log-probs under the mask, the clipped loss"),
            Fact("one step of the optimiser, on a gradient of norm 1",
                 lambda f: stepped(f, (1, 0, 1, 0))[3],
                 "backward, clip the norm to 1, optimizer.step()"),
            Fact("the weights after it", lambda f: stepped(f, (1, 0, 1, 0))[1],
                 "backward before step; the gradient clipped to a norm of 1"),
            Fact("no gradient is left behind", lambda f: stepped(f, (1, 0, 1, 0))[2],
                 "optimizer.zero_grad() after the step"),
            Fact("the weights after three steps", lambda f: stepped(f, (1, 0, 0, 1), 3)[1],
                 "each step begins without a gradient"),
            Fact("no spread in the returns, no change", lambda f: stepped(f, (1, 1, 0, 0))[1],
                 "advantages are within a group"),
        ),
        needs=(1, 3, 5),
    ),
    Exercise(
        10, "advantages_of_tokens", "Find the bug",
        "two right answers, a short one and a long one: which of them gets more? Look at what "
        "`returns` is divided by.",
        "Dr. GRPO, arXiv:2503.20783, and token_scale in algorithms/common.py",
        (
            Fact("paid alike, a long answer counts as much as a short one",
                 lambda f: f.advantages_of_tokens(PAID, PLAYED, TOGETHER),
                 "a return is a sum; the number of tokens has no place in it"),
            Fact("paid more is worth more",
                 lambda f: f.advantages_of_tokens(PAID * UNEQUAL, PLAYED, TOGETHER),
                 "return minus the group's mean return"),
            Fact("nothing off the mask", lambda f: f.advantages_of_tokens(PAID + 1, PLAYED, APART),
                 "what stands in the padding was not paid"),
        ),
    ),
)  # fmt: skip
