"""The ten exercises of scratch.py: for each, the facts that must hold on small tensors.

A fact asks a question of a set of functions `f`: the participant's scratch.py, or the solutions in
core/workshop/solutions.py, whose answer is the right one. The checker compares the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Fact:
    """One statement about an exercise, and how to check it."""

    statement: str  # what must be true, for the report
    ask: Callable[[Any], Any]  # calls the functions `f` and returns their answer
    hint: str  # for an answer that matches no known mistake
    tolerance: float = 1e-4  # absolute and relative


@dataclass(frozen=True)
class Exercise:
    """One exercise: its function in scratch.py, and its facts in the order of checking."""

    number: int
    name: str
    title: str
    hint: str  # printed by --hint
    read: str  # where the library does the same
    facts: tuple[Fact, ...]
    needs: tuple[int, ...] = ()  # exercises that this one calls


TURNS = [([5, 6, 7], [8, 2]), ([9, 9], [4, 2]), ([6], [3])]  # (context, completion)
ONES = torch.ones(1, 1)
ONE_TOKEN = torch.ones(1, 1, dtype=torch.bool)
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -6.0]])
OLD_LOGPROBS = torch.tensor([[-1.5, -2.0, -2.9], [-0.4, -3.0, -6.0]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])
MASK = torch.tensor([[False, True, True], [True, True, True]])
EPISODE = torch.tensor([[0.0, 1.0, 2.0], [0.5, 1.0, 4.0]])  # rewards, values
REWARDS = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.5, 0.0]])
SAMPLED = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
ONE_GROUP, TWO_GROUPS = torch.tensor([0, 0, 0]), torch.tensor([0, 1, 1])
FACTORS = torch.tensor([[1.0], [2.0], [1.0]])


def example_logits() -> tuple[Tensor, Tensor]:
    """Returns logits [2, 4, 5] and token ids [2, 4]."""
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    return logits, torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Returns the gradient of the sum of `loss(at)`; zeros if the loss does not depend on `at`."""
    at = at.clone().requires_grad_()
    total = loss(at).sum() + 0 * at.sum()  # a constant loss gets a gradient too: 0
    return torch.autograd.grad(total, at)[0]


def clipped_loss_of_one_token(f: Any, ratio: float, advantage: float) -> Any:
    """Returns f.clipped_loss of one token with this ratio and advantage."""
    return f.clipped_loss(ONES * math.log(ratio), ONES * 0, ONES * advantage, ONE_TOKEN)


def draws(f: Any, odds: float, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns ids and log-probs of 4,000 draws from two tokens; the second has these odds."""
    logits = torch.tensor([[0.0, math.log(odds)]]).expand(4000, 2)
    return f.sample(logits, temperature, torch.Generator().manual_seed(2))


class BigramModel(nn.Module):
    """The smallest language model: the next token depends only on the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 25).view(5, 5).clone())

    def forward(self, input_ids: Tensor) -> Tensor:
        return 4 * self.table[input_ids]


def take_steps(
    f: Any, returns: tuple[float, ...], steps: int = 1
) -> tuple[float, Tensor, Tensor, Tensor]:
    """Takes training steps on a BigramModel with f.training_step.

    Returns the last loss, the weights, the gradient that remains, and the norm of the gradient at
    each optimizer step (-1: no gradient).
    """
    model, norms = BigramModel(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def record_norm(*_: Any) -> None:
        norms.append(-1.0 if model.table.grad is None else float(model.table.grad.norm()))

    optimizer.register_step_pre_hook(record_norm)
    input_ids = torch.tensor([[0, 1, 2, 4], [0, 1, 3, 4], [1, 2, 3, 4], [1, 2, 0, 4]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]]).bool()
    group_ids = torch.tensor([0, 0, 1, 1])
    for _ in range(steps):
        loss = f.training_step(
            model, optimizer, input_ids, mask, torch.tensor(returns).float(), group_ids
        )
    remaining = torch.zeros(5, 5) if model.table.grad is None else model.table.grad
    return loss, model.table.detach(), remaining, torch.tensor(norms)


EXERCISES = (
    Exercise(
        1, "token_logprobs", "Log-probs and the causal shift",
        "logits[:, :-1] and input_ids[:, 1:] line up. log_softmax(-1) makes log-probs; gather(-1, "
        "ids[:, :, None]) picks one of V at each position, and squeeze(-1) drops the last axis.",
        "token_logprobs in algorithms/common.py: only at sampled tokens, in chunks",
        (
            Fact("4 tokens have 3 predictions: logits [2, 4, 5] give log-probs [2, 3]",
                 lambda f: tuple(f.token_logprobs(*example_logits()).shape),
                 "drop the last position of the logits and the first token of the ids"),
            Fact("a model without any preference gives each of 5 tokens the log-prob log 1/5",
                 lambda f: f.token_logprobs(torch.zeros(1, 4, 5), example_logits()[1][:1]),
                 "log_softmax over the last axis, the vocabulary"),
            Fact("each log-prob is that of the token that follows, under the logits before it",
                 lambda f: f.token_logprobs(*example_logits()),
                 "the logits at position t predict the token at t+1"),
            Fact("the gradient reaches the logits",
                 lambda f: gradient(lambda x: f.token_logprobs(x, example_logits()[1]),
                                    example_logits()[0]),
                 "do not use detach, no_grad, item or numpy"),
        ),
    ),
    Exercise(
        2, "completion_mask", "The completion mask of a chat",
        "Make a list of False and True for all T ids, drop its first entry (no logits predict the "
        "first token), and return torch.tensor(.., dtype=torch.bool).",
        "to_rollout_batch in core/batching.py",
        (
            Fact("two turns of 3 + 2 and 2 + 2 ids: four of the eight predictions are sampled",
                 lambda f: f.completion_mask(TURNS[:2]),
                 "position t is True if the token at t+1 was sampled"),
            Fact("three turns: every completion counts, no context does",
                 lambda f: f.completion_mask(TURNS),
                 "go through the turns in order; in each, the context and then the completion"),
        ),
    ),
    Exercise(
        3, "group_advantages", "Better or worse than the group",
        "for group in group_ids.unique(): members = group_ids == group; then returns[members] is "
        "one group. Tensor.std() divides by n - 1.",
        "compute_advantages in algorithms/grpo.py: the same without a loop",
        (
            Fact("of two rollouts with returns 1 and 0, one is above its group and one below",
                 lambda f: f.group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([7, 7])),
                 "minus the mean, over the sample standard deviation: 0.5 / 0.7071", 1e-3),
            Fact("groups do not mix, whatever their order and size",
                 lambda f: f.group_advantages(torch.tensor([1.0, 9.0, 0.0, 5.0, 0.0, 1.0]),
                                              torch.tensor([0, 1, 0, 1, 0, 0])),
                 "use the mean and the standard deviation of each group separately", 1e-3),
            Fact("a group of equal returns has advantage 0",
                 lambda f: f.group_advantages(torch.tensor([0.3, 0.3]), torch.tensor([0, 0])),
                 "add 1e-4 to the standard deviation, or you divide 0 by 0", 1e-3),
        ),
    ),
    Exercise(
        4, "reinforce_loss", "The policy gradient",
        "(advantages * logprobs)[mask] are the terms of the sampled tokens; there are mask.sum().",
        "compute_loss in algorithms/reinforce.py",
        (
            Fact("one token with log-prob -2 and advantage 3: the loss is 6",
                 lambda f: f.reinforce_loss(ONES * -2, ONES * 3, ONE_TOKEN), "-A · log π"),
            Fact("the loss is a mean over the mask",
                 lambda f: f.reinforce_loss(LOGPROBS, ADVANTAGES, MASK),
                 "sum over the sampled tokens, divided by mask.sum()"),
            Fact("values outside the mask do not matter, even infinity",
                 lambda f: f.reinforce_loss(LOGPROBS.masked_fill(~MASK, -torch.inf), ADVANTAGES,
                                            MASK),
                 "0 · infinity is nan: select with [mask] or torch.where instead of multiplying"),
            Fact("the gradient is -A / number of tokens, and 0 outside the mask",
                 lambda f: gradient(lambda x: f.reinforce_loss(x, ADVANTAGES, MASK), LOGPROBS),
                 "do not detach the log-probs; use only positions inside the mask"),
        ),
    ),
    Exercise(
        5, "clipped_loss", "The clipped surrogate",
        "ratio = exp(logprobs - old_logprobs); torch.minimum(ratio * A, ratio.clamp(..) * A).",
        "compute_loss in algorithms/grpo.py",
        (
            Fact("ratio 1: the loss is minus the advantage",
                 lambda f: clipped_loss_of_one_token(f, 1.0, 3.0), "ρ = exp(log π - log π_old)"),
            Fact("ratio 1.5, A = 1: clipped at 1.2",
                 lambda f: clipped_loss_of_one_token(f, 1.5, 1.0),
                 "clamp the ratio to 1-clip..1+clip, and take the smaller product"),
            Fact("ratio 0.5, A = 1: not clipped, the token should become likelier again",
                 lambda f: clipped_loss_of_one_token(f, 0.5, 1.0),
                 "take the smaller of the two products, not always the clipped one"),
            Fact("ratio 0.5, A = -1: clipped at 0.8",
                 lambda f: clipped_loss_of_one_token(f, 0.5, -1.0),
                 "multiply by A before you take the smaller one"),
            Fact("ratio 1.5, A = -1: not clipped, the token should become less likely again",
                 lambda f: clipped_loss_of_one_token(f, 1.5, -1.0),
                 "the clip may remove a gain, never a loss"),
            Fact("the loss is a mean over the mask",
                 lambda f: f.clipped_loss(LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK),
                 "sum over the sampled tokens, divided by mask.sum()"),
            Fact("the argument `clip` sets the bounds",
                 lambda f: f.clipped_loss(LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK, clip=0.05),
                 "use the argument `clip`"),
            Fact("the gradient is -A ρ / number of tokens, and 0 where the ratio is clipped",
                 lambda f: gradient(lambda x: f.clipped_loss(x, OLD_LOGPROBS, ADVANTAGES, MASK),
                                    LOGPROBS),
                 "do not detach the new log-probs or the ratio"),
        ),
    ),
    Exercise(
        6, "kl_k3", "KL to a reference, estimator k3",
        "log_r = ref_logprobs - logprobs, and r is its exponential.",
        "kl_estimate in algorithms/common.py: three estimators, and the gradient of each",
        (
            Fact("the estimate is 0 where both policies agree",
                 lambda f: f.kl_k3(LOGPROBS, LOGPROBS), "there r = 1 and log r = 0"),
            Fact("where the reference gives twice the probability, it is 2 - 1 - log 2",
                 lambda f: f.kl_k3(ONES * -2, ONES * -2 + math.log(2)), "r = π_ref / π"),
            Fact("one estimate for each token, none of them negative",
                 lambda f: f.kl_k3(LOGPROBS, OLD_LOGPROBS), "r - 1 - log r, no mean, no sum"),
        ),
    ),
    Exercise(
        7, "gae", "An advantage for each token",
        "for t in reversed(range(N)): keep the value and the advantage of t+1; both start at 0.",
        "gae in algorithms/ppo.py: for many rollouts at once, also truncated ones",
        (
            Fact("λ = 1, γ = 1: the sum of the rewards from t on, minus the value",
                 lambda f: f.gae(*EPISODE, 1, 1),
                 "compute δ_t, then A_t = δ_t + γ λ A_t+1, from right to left"),
            Fact("λ = 0: the error of one step",
                 lambda f: f.gae(*EPISODE, 1, 0),
                 "δ_t = r_t + γ V_t+1 - V_t; after the last token the value is 0"),
            Fact("values of γ and λ in between",
                 lambda f: f.gae(*EPISODE, 0.9, 0.5),
                 "γ multiplies the next value, γ λ the next advantage"),
        ),
    ),
    Exercise(
        8, "sample", "Sample a token at a temperature",
        "torch.multinomial takes probabilities [B, V] and returns [B, 1]; squeeze(-1) drops the "
        "last axis. Pick the log-prob with gather, as in exercise 1.",
        "draw in core/sampler.py: also with top-k and top-p",
        (
            Fact("4000 rows of logits give 4000 ids and 4000 log-probs",
                 lambda f: tuple(tuple(x.shape) for x in draws(f, 3, 1.0)),
                 "squeeze(-1) the results of multinomial and gather"),
            Fact("odds of 3 to 1: the likelier token is drawn in three quarters of the cases",
                 lambda f: draws(f, 3, 1.0)[0].float().mean(),
                 "multinomial takes probabilities: the exponentials of the log-probs", 0.03),
            Fact("temperature 0.5 turns odds of 3 to 1 into odds of 9 to 1",
                 lambda f: draws(f, 3, 0.5)[0].float().mean(),
                 "divide the logits by the temperature", 0.03),
            Fact("the log-probs are those of the sampled distribution: log 0.9 or log 0.1",
                 lambda f: draws(f, 3, 0.5)[1].sort().values[[0, -1]],
                 "gather from the log-probs of logits / temperature"),
            Fact("temperature 0 always takes the most likely token",
                 lambda f: f.sample(torch.tensor([[0.0, 2.0, 1.0], [5.0, 4.9, 0.0]]), 0.0,
                                    torch.Generator()),
                 "at temperature 0: argmax, and the log-prob under the undivided logits"),
            Fact("generators with the same seed give the same draws",
                 lambda f: (draws(f, 3, 1.0)[0] == draws(f, 3, 1.0)[0]).all(),
                 "pass generator=generator to multinomial"),
        ),
    ),
    Exercise(
        9, "training_step", "A whole training step",
        "advantages[:, None].expand_as(logprobs) gives each token its rollout's advantage; "
        "logprobs.detach() are the old ones; then backward, clip_grad_norm_, step, zero_grad.",
        "main in train.py: step 4 of each update",
        (
            Fact("the loss of the batch, as a float", lambda f: take_steps(f, (1, 0, 1, 0))[0],
                 "advantages of the returns, log-probs under the mask, the clipped loss"),
            Fact("one optimizer step, with a gradient of norm 1",
                 lambda f: take_steps(f, (1, 0, 1, 0))[3],
                 "backward, clip the norm to 1, optimizer.step()"),
            Fact("the weights after the step", lambda f: take_steps(f, (1, 0, 1, 0))[1],
                 "backward before step; the gradient clipped to a norm of 1"),
            Fact("no gradient remains after the step", lambda f: take_steps(f, (1, 0, 1, 0))[2],
                 "optimizer.zero_grad() after the step"),
            Fact("the weights after three steps", lambda f: take_steps(f, (1, 0, 0, 1), 3)[1],
                 "each step starts without a gradient"),
            Fact("equal returns within each group change nothing",
                 lambda f: take_steps(f, (1, 1, 0, 0))[1],
                 "advantages compare a rollout with its own group"),
        ),
        needs=(1, 3, 5),
    ),
    Exercise(
        10, "advantages_of_tokens", "Find the bug",
        "Take two right answers, a short one and a long one. Which of them gets the larger "
        "advantage? Look at what `returns` is divided by.",
        "token_weights in algorithms/common.py, and Dr. GRPO, arXiv:2503.20783",
        (
            Fact("with equal rewards, a long answer has the same advantage as a short one",
                 lambda f: f.advantages_of_tokens(REWARDS, SAMPLED, ONE_GROUP),
                 "a return is a sum; the number of tokens has no influence"),
            Fact("a larger reward gives a larger advantage",
                 lambda f: f.advantages_of_tokens(REWARDS * FACTORS, SAMPLED, ONE_GROUP),
                 "return minus the group's mean return"),
            Fact("padding has no influence and gets no advantage",
                 lambda f: f.advantages_of_tokens(REWARDS + 1, SAMPLED, TWO_GROUPS),
                 "ignore the rewards outside the mask"),
        ),
    ),
)  # fmt: skip
