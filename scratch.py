"""The workshop: from log-probs to a training step, in ten exercises. Fill them in from the top.

    python scratch.py                 # checks all exercises: ✓ right, ✗ wrong, · not yet written
    python scratch.py --hint 3        # a question about exercise 3; --hint 3 2: the idea,
                                      # --hint 3 3: the line; --solution 3: the whole function
    python train.py --algo scratch    # trains with your exercises: from 3 and 4 on, see the end

The course, a glossary and the answers to the questions: core/workshop/README.md.

Words: the *policy* π is the language model that we train. A *rollout* is one attempt at a task: a
prompt, and the *completion* that the policy samples after it. A *log-prob* is the natural logarithm
of a probability, in nats.

Shapes: B rollouts, T tokens of a chat, N sampled tokens of a rollout, V tokens in the vocabulary.
[B, T] is a tensor of B rows and T columns. Tensors are float32 unless stated otherwise. Rows are
padded, and a mask says which entries are sampled. The library holds all sampled tokens in one row,
without padding; --algo scratch pads it for your functions.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from core.terminal import cli

    cli.say_loading()

import torch
from torch import Tensor, nn

TODO = NotImplementedError  # replace each `raise TODO` by your code


# --- 1. Log-probs and the causal shift ----------------------------------------------------------
#
#     A language model reads a text and predicts, at every position, the next token:
#
#     position        0        1        2        3
#     token           The      cat      sat      .
#                      │        │        │        │
#     logits[t]        └─▶ cat  └─▶ sat  └─▶ .    └─▶ (the text ends here)


def token_logprobs(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Returns the log-prob of each token, given the tokens before it: [B, T-1].

    `logits` [B, T, V]: the model's raw scores; those at position t predict the token at t+1.
    `input_ids` [B, T] int64: the tokens of the text. Column t of the result is the log-prob of the
    token at t+1.

    1. Drop the last position of the logits and the first token of the ids.
    2. Turn the logits into log-probs over the vocabulary.
    3. From each row of V log-probs, pick that of the token that follows (`torch.gather`).

    Question: The first token gets no log-prob. Why is nothing lost?
    """
    raise TODO


# --- 2. Which tokens the policy sampled ---------------------------------------------------------
#
#     Only sampled tokens are trained; everything else is context. Step 1, not yet shifted:
#
#     <user>2+2?<end><assistant> 4<end>  <user>+1?<end><assistant> 5<end>
#     ────────── context ─────── sampled ───────── context ─────── sampled
#      F F F ...               F  T T     F F F ...              F  T T


def completion_mask(turns: list[tuple[list[int], list[int]]]) -> Tensor:
    """Returns True where the *next* token was sampled by the policy: [T-1] bool.

    `turns` holds two lists of token ids for each turn of a chat: the context added before the
    completion (the question and the template's headers), and the completion that the policy
    sampled, with the <end> that closes it. The chat is all of these lists in order, T ids together.
    The result lines up with that of `token_logprobs`.

    1. Write down False for each id of a context and True for each id of a completion.
    2. Shift as in exercise 1: position t refers to the token at t+1.

    Question: What would the policy learn if it were trained on the user's words too?
    """
    raise TODO


# --- 3. Better or worse than the rest of the group ----------------------------------------------
#
#     Eight rollouts of one task. Those above the mean become likelier, those below less likely:
#
#     How many r in "parrot"?     0   1   1   0   0   0   1   0      mean 3/8
#                                 ↓   ↑   ↑   ↓   ↓   ↓   ↑   ↓


def group_advantages(returns: Tensor, group_ids: Tensor) -> Tensor:
    """Returns each return minus the mean of its group, over the standard deviation of its group.

    `returns` [B]: the sum of each rollout's rewards. `group_ids` [B] int64: rollouts of the same
    task have the same number, in any order; each group has at least two rollouts. Use the sample
    standard deviation (divide by the number of rollouts minus 1), plus 1e-4. The result, [B], is
    called the *advantage*.

    For each group: select its returns, subtract their mean, divide, and write the results to the
    places of the group.

    Question: Which groups give no gradient? What does that say about the tasks to train on?
    """
    raise TODO


# --- 4. The policy gradient ---------------------------------------------------------------------
#
#     A *loss* is a number that training makes smaller, by small steps against its gradient. This
#     loss gets smaller when tokens with a positive advantage become likelier. Where it comes from,
#     and why every token of a rollout has the same advantage: core/workshop/policy_gradient.md


def reinforce_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Returns -Σ A · log π over the sampled tokens, divided by their number: a scalar tensor.

    `logprobs`, `advantages` [B, T-1]; `mask` [B, T-1] bool, True at sampled tokens. Positions
    outside the mask may contain any value, even infinity; they must not affect the result or its
    gradient.

    Question: The loss of a perfect policy is no lower than that of a bad one. What is the loss good
    for?
    """
    raise TODO


# --- 5. Not too far in one update ---------------------------------------------------------------
#
#     Several steps on the same rollouts can push a token's probability too far. The ratio ρ
#     measures how far it has moved; beyond the clip the objective is flat, so the push ends.
#
#     objective      │   A > 0               objective      │   A < 0
#                    │      ┌─────── flat                   │──────┐ flat
#                    │     ╱                                │       ╲
#                    │    ╱                                 │        ╲
#                    └────┬─┬──────▶ ratio                  └──────┬─┬────▶ ratio
#                         1 1+clip                            1-clip 1


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2
) -> Tensor:
    """Returns -Σ min(ρ A, clamp(ρ, 1-clip, 1+clip) A) over the sampled tokens, divided by their
    number: a scalar tensor.

    All tensors are [B, T-1]. `old_logprobs` are those that the model in training had before its
    first step on these rollouts. ρ = π / π_old is the ratio of a token's probability now to its
    probability then. As in exercise 4, values outside the mask must not affect the result or its
    gradient.

    1. Compute ρ from the difference of the two log-probs.
    2. Compute both products and take the smaller one: the clip may remove a gain, never a loss.
    3. Mask, sum, divide and negate as in exercise 4.

    Question: ρ can be high or low, A positive or negative. In which two of the four cases is the
    gradient 0?
    """
    raise TODO


# --- 6. The distance from a reference policy ----------------------------------------------------
#
#     The KL divergence measures how much two distributions differ. A penalty on it keeps the
#     policy close to a reference, for example the model before training.


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Returns an estimate of KL(π ‖ reference) for each token sampled from π: r - 1 - log r.

    r = π_ref / π. `logprobs` and `ref_logprobs`, of the policy and of the reference, are [B, T-1];
    so is the result, in nats.

    Question: log π - log π_ref is simpler, and correct on average. What is the advantage of k3?
    """
    raise TODO


# --- 7. An advantage for each token -------------------------------------------------------------
#
#     A *value* v_t predicts, before token t, the rewards that are still to come. If v_t+1 is above
#     v_t, token t was good. GAE (generalized advantage estimation):
#
#     rewards   r_0   r_1   r_2          δ_t = r_t + γ v_t+1 - v_t        v after the last token: 0
#     values    v_0   v_1   v_2          A_t = δ_t + γ λ A_t+1            from right to left
#                         ◀─── A


def gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """Returns the advantage A_t of each sampled token of one rollout: [N].

    `rewards`, `values` [N]; `gamma` is the discount factor γ, `lam` the factor λ.

    Question: What remains of A_t for λ = 1, and for λ = 0?
    """
    raise TODO


# --- 8. Sample a token --------------------------------------------------------------------------


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples one token from each row of `logits` [B, V]. Returns ids [B] int64, log-probs [B].

    1. Divide the logits by the temperature, then turn them into log-probs.
    2. Sample with torch.multinomial(probabilities, 1, generator=generator).
    3. Return with each id its log-prob in the distribution that you sampled from (`gather`).
    4. Temperature 0: take the most likely token, and its log-prob under the undivided logits.

    Question: The trainer divides its logits by the temperature too. What would happen if it did
    not?
    """
    raise TODO


# --- 9. A whole training step -------------------------------------------------------------------
#
#     returns ──▶ 3 advantages ──┐
#     input_ids ─▶ model ─▶ 1 ───┴──▶ 5 loss ──▶ backward ──▶ clip the norm ──▶ optimizer.step


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    input_ids: Tensor,
    mask: Tensor,
    returns: Tensor,
    group_ids: Tensor,
) -> float:
    """Takes one step of GRPO on B finished rollouts. Returns the loss as a float.

    `model(input_ids)` gives logits [B, T, V]. `input_ids` [B, T]; `mask` [B, T-1] bool as in
    exercise 2; `returns`, `group_ids` [B] as in exercise 3. The optimizer holds the model's weights
    and moves them against their gradient.

    1. Compute advantages (exercise 3); every token of a rollout gets its rollout's advantage.
    2. Compute log-probs (exercise 1). The old log-probs are the same numbers as constants, without
       a gradient.
    3. Compute the clipped loss (exercise 5) and its gradient.
    4. Scale the gradient down to a norm of 1: nn.utils.clip_grad_norm_(model.parameters(), 1.0).
    5. Take the optimizer's step, then set the gradient to zero.

    Question: Old and new log-probs are equal here, so the ratio is 1. Where does the gradient come
    from?
    """
    raise TODO


# --- 10. Find the bug ---------------------------------------------------------------------------


def advantages_of_tokens(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    """Returns the return of each rollout minus its group's mean, at each sampled token: [B, N].

    `rewards` [B, N]: each reward is at the token after which it was given. `mask` [B, N] bool: a
    rollout's sampled tokens are on the left, padding is on the right. `group_ids` [B].

    This function is already written, and it raises no error. But it is wrong, and in training
    completions get strangely short. To watch that happen, before the fix and after it:

        python train.py --algo scratch --scratch.advantages 10 --num-minibatches 4 --num-updates 25

    Find the bug and fix it.
    """
    returns = (rewards * mask).sum(1) / mask.sum(1)  # [B]
    same = (group_ids[:, None] == group_ids[None, :]).float()  # [B, B]: 1 within a group
    baseline = (same @ returns) / same.sum(1)  # [B]
    return (returns - baseline)[:, None] * mask


# --- And then: train, and beat the reference -----------------------------------------------------
#
#     python train.py --algo scratch
#
# trains with what you have written so far; the title of the run names the exercises:
#
#     advantages    3; with --scratch.advantages 10 or 7 one of these (7 adds a value head)
#     loss          5; 4 as long as 5 is not written, or with --scratch.loss 4
#     KL penalty    6, with --kl-coef 0.05
#     sampling      8, once it is written
#
# One step per update clips nothing; --num-minibatches 4 takes four. Yours beside ours:
#
#     python train.py --run-name reference --eval-every 1 --max-sampled-tokens 20000
#     python train.py --algo scratch --run-name mine --eval-every 1 --max-sampled-tokens 20000
#     python -m core.report.compare runs/reference runs/mine   # tokens until accuracy 0.90
#
# You may now change the exercises: another clip, no division by the standard deviation, advantages
# by rank. The checker then calls them wrong; --algo scratch trains with them all the same. Settings
# of the training loop work too: more steps on the same rollouts, another learning rate, a KL
# penalty. Both runs start from the same model and may sample 20,000 tokens. Change one thing at a
# time, and compare three seeds before you trust a difference.


if __name__ == "__main__":
    from core.workshop.checker import execute

    sys.exit(execute(sys.argv[1:], Path(__file__)))
