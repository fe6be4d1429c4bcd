"""The ten exercises of scratch.py: for each, the facts that must hold on small tensors.

A fact has inputs of the exercise's function. The checker compares the participant's answer with
that of core/workshop/solutions.py.

Hints come in three steps: a question, the idea, and the line of the solution.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Fact:
    """One statement about a function, and how to check it."""

    statement: str  # what must be true, for the report
    inputs: tuple[Any, ...] = ()
    ask: Callable[..., Any] = call  # (function, *inputs) -> its answer
    tolerance: float = 1e-4  # absolute and relative

    def answer(self, function: Any) -> Any:
        """The answer of `function` to a copy of the inputs; an exception is an answer, too."""
        try:
            return self.ask(function, *copy.deepcopy(self.inputs))
        except Exception as error:
            return error


@dataclass(frozen=True)
class Exercise:
    """One exercise: its function in scratch.py, and its facts in the order of checking."""

    number: int
    name: str
    title: str
    question: str  # the three hints
    idea: str
    line: str  # a part of it
    read: str  # where the library does the same
    facts: tuple[Fact, ...]


LOGITS = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1)).round(decimals=1)
IDS = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])
TURNS = [([5, 6, 7], [8, 2]), ([9, 9], [4, 2]), ([6], [3])]  # (context, completion)
ONES = torch.ones(1, 1)
ONE_TOKEN = torch.ones(1, 1, dtype=torch.bool)
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -4.0, -6.0]])
OLD_LOGPROBS = torch.tensor([[-1.5, -2.3, -2.9], [-0.4, -3.0, -6.0]])
ADVANTAGES = torch.tensor([[1.0, 2.0, 1.0], [-2.0, -3.0, -2.0]])
MASK = torch.tensor([[False, True, True], [True, True, True]])
# the same, with infinities where they must not matter
INFINITE = LOGPROBS.masked_fill(~MASK, -torch.inf)
INFINITE_OLD = OLD_LOGPROBS.masked_fill(~MASK, -torch.inf)
INFINITE_ADVANTAGES = ADVANTAGES.masked_fill(~MASK, torch.inf)
EPISODE = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 1.0, 4.0])  # rewards, values
ODDS = torch.tensor([[1.0, 1.0 + math.log(3)]]).expand(4000, 2), 0.5, 2  # temperature, seed
REWARDS = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.5, 0.0]])
SAMPLED = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
ONE_GROUP, TWO_GROUPS = torch.tensor([0, 0, 0]), torch.tensor([0, 1, 1])
FACTORS = torch.tensor([[1.0], [2.0], [1.0]])


class BigramModel(nn.Module):
    """The smallest language model: the next token depends only on the one before it."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.table = nn.Parameter(torch.linspace(-0.1, 0.1, 25).view(5, 5).clone())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.scale * self.table[input_ids]


BATCH_IDS = torch.tensor([[0, 1, 2, 4], [0, 1, 3, 4], [1, 2, 3, 4], [1, 2, 0, 4]])
BATCH_MASK = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]]).bool()
BATCH = BATCH_IDS, BATCH_MASK, torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
STEP, SMALL_STEP = ((BigramModel(scale), "SGD", *BATCH) for scale in (30.0, 1.0))


def gradient(function: Any, at: Tensor, *inputs: Any) -> Tensor:
    """Returns the gradient of the sum of `function(at, *inputs)` by `at`; 0 if there is none."""
    total = function(at.requires_grad_().clone(), *inputs).sum()
    if not total.requires_grad:  # a constant
        return torch.zeros_like(at)
    return torch.autograd.grad(total, at, materialize_grads=True)[0]


def draw(sample: Any, logits: Tensor, temperature: float, seed: int) -> Any:
    return sample(logits, temperature, torch.Generator().manual_seed(seed))


def means_of_draws(sample: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Returns the mean id, and the mean log-prob of draws with id 0 and of those with id 1: [2]."""
    ids, logprobs = draw(sample, *inputs)
    return ids.float().mean(), torch.stack([logprobs[ids == token].mean() for token in (0, 1)])


def compare_draws(sample: Any, logits: Tensor, temperature: float, seed: int) -> Tensor:
    """Returns whether draws are the same with a generator of the same seed, and in the next call
    with the same generator: [2] bool."""
    generator, equal = (torch.Generator().manual_seed(seed) for _ in range(2))
    ids, _ = sample(logits.clone(), temperature, generator)
    equal_ids, _ = sample(logits.clone(), temperature, equal)
    next_ids, _ = sample(logits.clone(), temperature, generator)
    return torch.stack([(ids == equal_ids).all(), (ids == next_ids).all()])


def take_step(part: int, training_step: Any, model: BigramModel, _: str, *batch: Any) -> Any:
    """Takes a step. Returns the loss (part 0), the weights (1) or the gradient that remains (2)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    loss = training_step(model, optimizer, *batch)
    gradient = torch.zeros(5, 5) if model.table.grad is None else model.table.grad
    return (loss, model.table.detach(), gradient)[part]


EXERCISES = (
    Exercise(
        1, "token_logprobs", "Log-probs and the causal shift",
        "Which position of the logits predicts the second token of the text?",
        "logits[:, :-1] and input_ids[:, 1:] line up. log_softmax(-1) makes log-probs; gather(-1, "
        "ids[:, :, None]) picks one of V at each position, and squeeze(-1) drops the last axis.",
        ".gather(-1, input_ids",
        "token_logprobs in algorithms/token_logprobs.py: only at sampled tokens, in chunks",
        (
            Fact("a model without any preference gives each of 5 tokens the log-prob log 1/5",
                 (torch.zeros(1, 4, 5), IDS[:1]), tolerance=1e-3),
            Fact("each log-prob is that of the token that follows, under the logits before it",
                 (LOGITS, IDS)),
            Fact("logits that are 200 apart: the log-prob is -200, not -infinity",
                 (torch.tensor([[[0.0, 200.0]] * 3]), torch.tensor([[1, 0, 1]]))),
            Fact("the gradient reaches the logits", (LOGITS, IDS), gradient),
        ),
    ),
    Exercise(
        2, "completion_mask", "The completion mask of a chat",
        "Which of the T ids were sampled? And why does the result have only T-1 entries?",
        "Make a list of False and True for all T ids, drop its first entry (no logits predict the "
        "first token), and return torch.tensor(.., dtype=torch.bool).",
        "sampled[1:]",
        "to_tokens in core/batching.py",
        (
            Fact("one turn of 3 + 2 ids: the last two of the four predictions are sampled",
                 (TURNS[:1],)),
            Fact("three turns: every completion counts, no context does", (TURNS,)),
        ),
    ),
    Exercise(
        3, "group_advantages", "Better or worse than the group",
        "With which other returns is a return compared?",
        "for group in group_ids.unique(): members = group_ids == group; then returns[members] is "
        "one group. Tensor.std() divides by n - 1.",
        "centered = ",
        "compute_advantages in algorithms/grpo.py: the same without a loop",
        (
            Fact("one of two returns is above their mean and one below: by 0.015 / (0.0212 + 1e-4)",
                 (torch.tensor([0.53, 0.5]), torch.tensor([7, 7])), tolerance=4e-3),
            Fact("groups of 4 and 2 rollouts, mixed: each return is compared with its own group",
                 (torch.tensor([1.0, 9.0, 0.0, 5.0, 0.0, 4.0]), torch.tensor([0, 1, 0, 1, 0, 0])),
                 tolerance=1e-3),
            Fact("a group of equal returns has advantage 0",
                 (torch.tensor([0.3, 0.3]), torch.tensor([0, 0])), tolerance=1e-3),
        ),
    ),
    Exercise(
        4, "reinforce_loss", "The policy gradient",
        "A token has a positive advantage. Should the loss rise or fall when it becomes likelier?",
        "logprobs[mask] and advantages[mask] are those of the sampled tokens; there are "
        "mask.sum() of them.",
        "return",
        "compute_loss in algorithms/reinforce.py",
        (
            Fact("one token with log-prob -2 and advantage 3: the loss is 6",
                 (ONES * -2, ONES * 3, ONE_TOKEN)),
            Fact("the loss is a mean over the sampled tokens", (LOGPROBS, ADVANTAGES, MASK)),
            Fact("values outside the mask do not matter, even infinity",
                 (INFINITE, INFINITE_ADVANTAGES, MASK)),
            Fact("the gradient is -A / number of tokens, and 0 outside the mask, even at infinity",
                 (INFINITE, INFINITE_ADVANTAGES, MASK), gradient),
        ),
    ),
    Exercise(
        5, "clipped_loss", "The clipped surrogate",
        "By which factor did the probability of a token change, if its log-prob rose by 0.1?",
        "Select the sampled tokens of all three tensors. ratio = exp(logprobs - old_logprobs); "
        "torch.minimum(ratio * A, ratio.clamp(..) * A).",
        "torch.minimum",
        "compute_loss in algorithms/grpo.py",
        (
            *(Fact(statement, (ONES * math.log(ratio), ONES * 0, ONES * advantage, ONE_TOKEN))
              for ratio, advantage, statement in (
                  (1.5, 1, "ratio 1.5, A = 1: clipped at 1.2"),
                  (0.5, 1, "ratio 0.5, A = 1: not clipped, may become likelier again"),
                  (0.1, -1, "ratio 0.1, A = -1: clipped at 0.8"),
                  (1.5, -1, "ratio 1.5, A = -1: not clipped, may become less likely again"))),
            Fact("the loss is a mean over the sampled tokens",
                 (LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK)),
            Fact("the argument `clip` sets the bounds",
                 (LOGPROBS, OLD_LOGPROBS, ADVANTAGES, MASK, 0.05)),
            Fact("values outside the mask do not matter, even infinity",
                 (INFINITE, INFINITE_OLD, INFINITE_ADVANTAGES, MASK)),
            Fact("the gradient is -A ρ / number of tokens, and 0 where clipped or outside the mask",
                 (INFINITE, INFINITE_OLD, INFINITE_ADVANTAGES, MASK), gradient),
        ),
    ),
    Exercise(
        6, "kl_k3", "KL to a reference, estimator k3",
        "How do you get log r, with r = π_ref / π, from the two log-probs?",
        "log_r = ref_logprobs - logprobs, and r is its exponential.",
        "return",
        "kl_estimate in algorithms/kl.py: three estimators, and the gradient of each",
        (
            Fact("where the reference gives twice the probability, it is 2 - 1 - log 2",
                 (ONES * -2, ONES * -2 + math.log(2))),
            Fact("one estimate for each token, none of them negative", (LOGPROBS, OLD_LOGPROBS)),
            Fact("the gradient is 1 - r", (LOGPROBS, OLD_LOGPROBS), gradient),
        ),
    ),
    Exercise(
        7, "gae", "An advantage for each token",
        "Which two numbers of token t+1 does A_t need? So in which order do you compute?",
        "for t in reversed(range(N)): keep the value and the advantage of t+1; both start at 0.",
        "delta = ",
        "gae in algorithms/ppo.py: for many rollouts at once, also truncated ones",
        (
            Fact("λ = 1, γ = 1: the sum of the rewards from t on, minus the value",
                 (*EPISODE, 1, 1)),
            Fact("values of γ and λ in between", (*EPISODE, 0.9, 0.5)),
        ),
    ),
    Exercise(
        8, "sample", "Sample a token at a temperature",
        "From which distribution is the token drawn, and under which one is its log-prob?",
        "torch.multinomial takes probabilities [B, V] and returns [B, 1]; squeeze(-1) drops the "
        "last axis. Pick the log-prob with gather, as in exercise 1.",
        "torch.multinomial",
        "draw in core/sampler.py: also with top-k and top-p",
        (
            Fact("three rows, each nearly certain of another token: each gets its own",
                 (torch.eye(3).roll(1, 0) * 50, 1.0, 0), draw),
            Fact("temperature 0.5 turns odds of 3 to 1 into odds of 9 to 1: the mean of the ids, "
                 "and the log-probs of 0 and 1, log 0.1 and log 0.9", ODDS, means_of_draws, 0.03),
            Fact("temperature 0 always takes the most likely token",
                 (torch.tensor([[0.0, 2.0, 1.0], [5.0, 4.9, 0.0]]), 0.0, 0), draw),
            Fact("the same seed gives the same draws, the next call with a generator others",
                 (torch.zeros(64, 2), 1.0, 5), compare_draws),
        ),
    ),
    Exercise(
        9, "training_step", "A whole training step",
        "Which of the exercises before this one turns returns into advantages, and which one "
        "log-probs into a loss?",
        "advantages[:, None].expand_as(logprobs) gives each token its rollout's advantage; "
        "logprobs.detach() are the old ones; then backward, clip_grad_norm_, step, zero_grad.",
        "loss = ",
        "main in train.py: step 4 of each update",
        (
            Fact("the loss of the batch, as a float", STEP, partial(take_step, 0)),
            Fact("the weights after the step, whose gradient is scaled down to a norm of 1",
                 STEP, partial(take_step, 1)),
            Fact("a gradient with a smaller norm stays as it is: the weights after the step",
                 SMALL_STEP, partial(take_step, 1)),
            Fact("no gradient remains after the step", STEP, partial(take_step, 2)),
        ),
    ),
    Exercise(
        10, "advantages_of_tokens", "Find the bug",
        "Take two right answers, a short one and a long one. Which gets the larger advantage?",
        "Look at what `returns` is divided by.",
        "returns = ",
        "token_weights in algorithms/tokens.py, and Dr. GRPO, arXiv:2503.20783",
        (
            Fact("with equal rewards, a long answer has the same advantage as a short one",
                 (REWARDS, SAMPLED, ONE_GROUP)),
            Fact("a larger reward gives a larger advantage",
                 (REWARDS * FACTORS, SAMPLED, ONE_GROUP)),
            Fact("padding has no influence and gets no advantage; groups do not mix",
                 (REWARDS + 1, SAMPLED, TWO_GROUPS)),
        ),
    ),
)  # fmt: skip
