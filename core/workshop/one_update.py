"""The hour, 2 of 2. One update of the default run, from words to new weights, with its numbers.

    python -m core.workshop.one_update

The model samples eight answers to each of two questions, and the environment rewards them. One
gradient step makes the tokens of the better answers more likely, and those of the worse ones less
likely. The default run does this 25 times, with sixteen questions each time. train.py also has:

- episodes of several turns, whose rollouts may be several sequences (core/episodes.py, batching.py)
- a cache in sampling: here the model reads the whole text again for each token (core/sampler.py)
- micro-batches, which bound the memory; what texts begin with alike is computed once
- importance weights, as the sampler's log-probs differ slightly (algorithms/off_policy.py)
- several gradient steps per update; then the ratio leaves 1, and the clip acts (algorithms/grpo.py)
- penalties for leaving a reference (KL), a bonus for entropy, and PPO's values (algorithms/ppo.py)
- several processes, evaluation, logging, checkpoints
"""

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from core.chat_template import prompt_ids
from core.loading import load_policy
from core.policy import Policy
from core.tiny import PRETRAINED
from environments.letter_counting import LetterCounting
from environments.plumbing.text import printable

SEEDS = [2, 3]  # each is a task, one question; P = 2
G = 8  # answers to each question: a group
MAX_TOKENS = 64  # of an answer


@torch.no_grad()
def sample(policy: Policy, prompt: list[int]) -> list[list[int]]:
    """G answers to one prompt, as token ids; each ends with the end-of-turn token, if it ended."""
    ids = torch.tensor([prompt] * G)  # [G, T], T grows by one token at a time
    ended = torch.zeros(G, dtype=torch.bool)  # [G]
    while not ended.all() and ids.shape[1] < len(prompt) + MAX_TOKENS:
        logits = policy.model(ids).logits[:, -1]  # [G, V], a score for every possible next token
        token = torch.multinomial(logits.softmax(-1), num_samples=1)  # [G, 1]
        ids = torch.cat([ids, token], dim=1)
        ended |= token[:, 0] == policy.end_of_turn_id
    answers, end = ids[:, len(prompt) :].tolist(), policy.end_of_turn_id
    return [a[: a.index(end) + 1] if end in a else a for a in answers]  # cut what follows the end


def token_logprobs(policy: Policy, ids: Tensor) -> Tensor:
    """The log of the probability that the model gives to each next token; [B, T] -> [B, T-1]."""
    logprobs = policy.model(ids).logits[:, :-1].log_softmax(-1)  # [B, T-1, V]
    return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)  # at position t that of token t+1


def compute_loss(logprobs: Tensor, advantages: Tensor, sampled: Tensor) -> Tensor:
    """GRPO's loss, a mean over all sampled tokens (DAPO's); `advantages` [B], the others [B, T-1].

    The ratio is the probability of a token now, divided by that when it was sampled. Before the
    first step the two are equal, so it is 1. It is there for its gradient, which is that of the
    log-prob, because the derivative of exp at 0 is 1: a step along -gradient raises a token's
    log-prob where its answer has a positive advantage.
    """
    ratio = (logprobs - logprobs.detach()).exp()  # detach: the same numbers, as constants
    return -(ratio * advantages[:, None] * sampled).sum() / sampled.sum()


def main(policy: Policy) -> None:
    """One update of the weights of `policy`, printed as a table for each question."""
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=5e-5, weight_decay=0.0)

    # 1. Sample G answers to each question. 2. The environment gives each answer its reward
    torch.manual_seed(0)
    questions, rows, masks, texts, rewards = [], [], [], [], []
    for seed in SEEDS:
        env = LetterCounting()
        messages = env.reset(seed)  # How many r in "drackri"? Work it out, then ..
        questions.append(messages[0]["content"])
        prompt = prompt_ids(policy.tokenizer, messages)
        for answer in sample(policy, prompt):
            rows.append(torch.tensor(prompt + answer))
            masks.append(torch.tensor([False] * len(prompt) + [True] * len(answer)))
            texts.append(str(policy.tokenizer.decode(answer, skip_special_tokens=True)))
            rewards.append(env.step(texts[-1]).reward)
    ids = pad_sequence(rows, batch_first=True)  # [B, T], B = P·G; no token sees what follows it
    sampled = pad_sequence(masks, batch_first=True)[:, 1:]  # [B, T-1]: nothing predicts token 0

    # 3. The advantage: how much better than the other answers to the same question. If all are
    #    equally good, all advantages are 0, and this question teaches nothing
    returns = torch.tensor(rewards).view(len(SEEDS), G)  # [P, G]
    mean, std = returns.mean(1, keepdim=True), returns.std(1, keepdim=True)  # [P, 1]
    advantages = ((returns - mean) / (std + 1e-4)).flatten()  # [B]

    # 4. The loss, its gradient, and a step against the gradient
    logprobs = token_logprobs(policy, ids)  # [B, T-1]
    compute_loss(logprobs, advantages, sampled).backward()  # gives every weight its gradient
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)  # if longer, to length 1
    optimizer.step()

    # 5. The log-prob of each answer, the sum of those of its tokens, before the step and after it
    with torch.no_grad():
        before = (logprobs * sampled).sum(1)  # [B]
        after = (token_logprobs(policy, ids) * sampled).sum(1)  # [B]
    for i, question in enumerate(questions):
        table = Table("answer", "reward", "advantage", "log-prob", "after", title=question)
        for row in range(i * G, (i + 1) * G):
            numbers = rewards[row], advantages[row], before[row], after[row]
            table.add_row(printable(texts[row]), *(f"{number:.2f}" for number in numbers))
        Console(markup=False).print(table)
    print("A right guess may become less likely although its advantage is positive: it shares its "
          "tokens\nwith other guesses, most of which are wrong.")  # fmt: skip


if __name__ == "__main__":
    main(load_policy(str(PRETRAINED), device="cpu"))
