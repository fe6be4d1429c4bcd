"""The workshop: from log-probs to a training step, in ten exercises. Fill them in from the top, and

    python scratch.py                 # checks them all: ✓ right, ✗ wrong, · not yet
    python scratch.py --hint 3        # a hint for exercise 3; --solution 3 shows an answer
    python train.py --algo scratch    # trains with what you wrote

The course that goes with it, and the answers to the questions: runs/README.md.

Shapes: B rollouts, T tokens of a chat, N sampled tokens, V vocabulary. Tensors are float32 where
nothing else is said; log-probs are natural logarithms (nats).
"""

import sys

import torch
from torch import Tensor, nn

TODO = NotImplementedError  # `raise TODO` marks what is yours to write


# --- 1. Log-probs and the causal shift ----------------------------------------------------------
#
#     position        0        1        2        3
#     token           The      cat      sat      .
#                      │        │        │        │
#     logits[t]        └─▶ cat  └─▶ sat  └─▶ .    └─▶ (nothing came)


def token_logprobs(logits: Tensor, input_ids: Tensor) -> Tensor:
    """The log-prob that the model gave to each token, seeing what came before it.

    `logits` [B, T, V]: what stands at t predicts the token at t+1. `input_ids` [B, T] int64.
    Returns [B, T-1]: column t is the log-prob of the token at t+1.

    1. Drop the logits of the last position, and the first token.
    2. Make log-probs of the logits, over the vocabulary.
    3. From each row of V numbers take that of the token that came.

    Question: The first token gets no log-prob. Why is nothing lost?
    """
    raise TODO


# --- 2. Which tokens are ours -------------------------------------------------------------------
#
#     <user>2+2?<end><assistant> 4<end>  <user>+1?<end><assistant> 5<end>
#     ────────── context ─────── sampled ───────── context ─────── sampled
#      F F F ...               F  T T     F F F ...              F  T T


def completion_mask(turns: list[tuple[list[int], list[int]]]) -> Tensor:
    """True where the *next* token was sampled by the policy, over a chat of several turns.

    `turns` holds for each turn two lists of token ids: the context that was added before it (the
    question, with the template's headers), and the completion that the policy sampled, with the
    <end> that closes it. The chat is all of them in order: T ids. Returns [T-1] bool, which lines
    up with `token_logprobs`.

    1. Write down False for each id of a context, True for each id of a completion.
    2. Shift as in exercise 1: position t speaks of the token at t+1.

    Question: What would the policy learn if it were trained on the user's words too?
    """
    raise TODO


# --- 3. Better or worse than the others ---------------------------------------------------------
#
#     How many r in "cherry"?     0   1   1   0   0   0   1   0      mean 3/8
#                                 ↓   ↑   ↑   ↓   ↓   ↓   ↑   ↓


def group_advantages(returns: Tensor, group_ids: Tensor) -> Tensor:
    """Each return minus the mean of its group, over the standard deviation of its group.

    `returns` [B]; `group_ids` [B] int64: tries at the same task share a number, in any order, at
    least two of them. The standard deviation is that of a sample (divide by n - 1), plus 1e-4.
    Returns [B].

    For each group: pick its returns, subtract their mean, divide, put them back in their places.

    Question: Which groups teach nothing? What does that say about the tasks to train on?
    """
    raise TODO


# --- 4. The policy gradient ---------------------------------------------------------------------


def reinforce_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """-Σ A · log π over the sampled tokens, divided by how many they are. A scalar.

    `logprobs`, `advantages` [B, T-1]; `mask` [B, T-1] bool, True at sampled tokens. What stands off
    the mask may be anything, infinite too, and must not matter.

    Question: The loss of a perfect policy is no lower than that of a bad one. What is it good for?
    """
    raise TODO


# --- 5. Not too far in one go -------------------------------------------------------------------
#
#     what is gained │   A > 0               what is gained │   A < 0
#                    │      ┌─────── flat                   │──────┐ flat
#                    │     ╱                                │       ╲
#                    │    ╱                                 │        ╲
#                    └────┬─┬──────▶ ratio                  └──────┬─┬────▶ ratio
#                         1 1+clip                            1-clip 1


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2
) -> Tensor:
    """-Σ min(ρ A, clamp(ρ, 1-clip, 1+clip) A) over the sampled tokens, divided by their number.

    All [B, T-1]; `old_logprobs` are those of the policy that sampled. ρ = π / π_old of each token.

    Returns a scalar.

    1. ρ from the difference of the two log-probs.
    2. Both products; the smaller of the two: a clip takes away what could be gained, never a loss.
    3. Mask, sum, divide and negate as in exercise 4.

    Question: ρ high or low, A positive or negative: in which two of the four is the gradient 0?
    """
    raise TODO


# --- 6. How far from where we were --------------------------------------------------------------


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """An estimate of KL(π ‖ reference) at each token, from tokens sampled by π: r - 1 - log r.

    r = π_ref / π. Both log-probs [B, T-1]; returns [B, T-1] in nats.

    Question: log π - log π_ref is simpler and right on average. What does k3 have that it hasn't?
    """
    raise TODO


# --- 7. Credit for each token -------------------------------------------------------------------
#
#     rewards   r_0   r_1   r_2          δ_t = r_t + γ V_t+1 - V_t        V behind the last: 0
#     values    V_0   V_1   V_2          A_t = δ_t + γ λ A_t+1            from right to left
#                         ◀─── A


def gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Generalised advantage estimates of one episode, which ended. All [N].

    Question: What is left of A_t where λ is 1, and what where it is 0?
    """
    raise TODO


# --- 8. Draw a token ----------------------------------------------------------------------------


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token from each row of `logits` [B, V]. Returns ids [B] int64 and log-probs [B].

    1. Divide the logits by the temperature; make log-probs of them.
    2. Draw with torch.multinomial(probabilities, 1, generator=generator).
    3. Return with each id its log-prob in the distribution that it was drawn from.
    4. Temperature 0: the likeliest token, with its log-prob under the logits as they are.

    Question: The trainer divides its logits by the temperature too. What if it didn't?
    """
    raise TODO


# --- 9. A whole training step -------------------------------------------------------------------
#
#     returns ──▶ 3 advantages ──┐
#     input_ids ─▶ model ─▶ 1 ───┴──▶ 5 loss ──▶ backward ──▶ clip the norm ──▶ optimizer.step


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, input_ids: Tensor, mask: Tensor,
    returns: Tensor, group_ids: Tensor,
) -> float:  # fmt: skip
    """One step of GRPO from B finished rollouts. Returns the loss as a float.

    `model(input_ids)` gives logits [B, T, V]. `input_ids` [B, T]; `mask` [B, T-1] as exercise 2
    makes it; `returns`, `group_ids` [B].

    1. Advantages (exercise 3), the same for every token of a rollout.
    2. Log-probs (exercise 1). The old ones are the same numbers, but constant: no gradient.
    3. The clipped loss (exercise 5), and its gradient.
    4. Scale the gradient down to a norm of 1: nn.utils.clip_grad_norm_(model.parameters(), 1.0).
    5. Step, and leave no gradient behind.

    Question: Old and new log-probs are equal here, so the ratio is 1. Where does a gradient come
    from?
    """
    raise TODO


# --- 10. Find the bug ---------------------------------------------------------------------------


def advantages_of_tokens(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Return of each rollout minus the mean of its group, at each of its sampled tokens. [B, N].

    `rewards` [B, N]: what was paid, at the token after which it was paid. `mask` [B, N] bool: a
    rollout's sampled tokens are to the left, padding to the right. `group_ids` [B].

    This one is written, and it runs: no error, no warning, and with it the reward even rises for a
    while. But it is wrong, and answers get strangely short. Find out why, and mend it.
    """
    returns = (rewards * mask).sum(1) / mask.sum(1)  # [B]
    same = (group_ids[:, None] == group_ids[None, :]).float()  # [B, B]: 1 within a group
    baseline = (same @ returns) / same.sum(1)  # [B]
    return (returns - baseline)[:, None] * mask


# --- And then: beat the reference ---------------------------------------------------------------
#
#     python train.py --run-name reference                 # GRPO as this project has it
#     python train.py --algo scratch --run-name mine       # your training_step, the same start
#     python -m core.run_log runs/reference runs/mine      # who needs fewer tokens to 0.90?
#
# From here on `training_step` is yours: two steps on the same rollouts, another clip, exercise 10
# for exercise 3, a KL to where you began, another optimiser setting. The budget is 20,000 sampled
# tokens. Change one thing at a time, and take three seeds before you believe it.


if __name__ == "__main__":
    from core.workshop.checker import run_command

    sys.exit(run_command(sys.argv[1:]))
