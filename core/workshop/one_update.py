"""The hour, 2 of 2. One update of the default run, from words to new weights, with its numbers.

    python -m core.workshop.one_update

The model samples eight answers to each of two questions, and the environment rewards them: a right
answer earns 1, a wrong one in the right format 0.1, anything else 0. The model was pretrained on
two ways to answer: guess at once, which is right once in four, or spell the word and count, which
is right nearly always. A misspelt word costs nothing: only the number counts. One gradient step
makes the tokens of the better answers more likely, on the whole, and those of the worse ones less.
The default run does this 25 times, with sixteen questions each time.

Imported: `load_policy` loads the model and its tokenizer, `prompt_ids` writes messages as token
ids, with the chat template's special tokens, and `LetterCounting` asks (`reset`) and rewards
(`step`). Shapes: P questions, B = P·G answers, T tokens of prompt and answer, V possible tokens.

train.py also has:

- episodes of several turns (core/episodes.py), sometimes of several texts each (core/batching.py)
- a cache in sampling: here the model reads the whole text again for each token (core/sampler.py)
- micro-batches, which bound the memory; the common beginning of texts is computed once
- importance weights, as sampler and trainer give slightly different log-probs
  (algorithms/off_policy.py)
- several gradient steps per update; then the ratio leaves 1, and the clip acts (algorithms/grpo.py)
- a penalty for leaving a reference (KL), a bonus for variety (entropy), PPO's values (ppo.py)
- several processes, evaluation, logging, checkpoints
"""

if __name__ == "__main__":
    from core.run import cli

    cli.say_loading()

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
    """G answers to one prompt, as token ids. They differ because each token is drawn by chance.

    The model ends an answer with its end-of-turn token, which is sampled and trained like any other
    token, but is not part of the text. An answer without it was cut at MAX_TOKENS.
    """
    ids = torch.tensor([prompt] * G)  # [G, T], T grows by one token at a time
    ended = torch.zeros(G, dtype=torch.bool)  # [G]
    while not ended.all() and ids.shape[1] < len(prompt) + MAX_TOKENS:
        logits = policy.model(ids).logits[:, -1]  # [G, V], a score for every possible next token
        token = torch.multinomial(logits.softmax(-1), num_samples=1)  # [G, 1], by chance
        ids = torch.cat([ids, token], dim=1)
        ended |= token[:, 0] == policy.end_of_turn_id
    answers = ids[:, len(prompt) :].tolist()
    end = policy.end_of_turn_id
    return [a[: a.index(end) + 1] if end in a else a for a in answers]  # cut what follows the end


def token_logprobs(policy: Policy, ids: Tensor) -> Tensor:
    """The log of the probability that the model gives to each next token; [B, T] -> [B, T-1]."""
    logprobs = policy.model(ids).logits[:, :-1].log_softmax(-1)  # [B, T-1, V]
    # gather picks, at each t, the log-prob of token t+1; None adds its last axis, squeeze drops it
    return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)


def compute_loss(logprobs: Tensor, advantages: Tensor, sampled: Tensor) -> Tensor:
    """GRPO's loss without the clip; `advantages` [B], the others [B, T-1].

    It is a mean over all sampled tokens, so that each counts the same, in long answers and short
    (as in DAPO, a variant of GRPO). The ratio is the probability of a token now, divided by that
    when it was sampled. Its value here is 1, its gradient that of the log-prob: with `logprobs` in
    the place of `ratio` this file would take the same step. The ratio is for train.py, which may
    take several steps with the same answers: from the second on it is not 1, and corrects for the
    change of a token's own probability, not for those of the other tokens. The step pushes a token
    up where its answer has a positive advantage, and down where it is negative. All answers share
    the weights, so the sum of all pushes decides.
    """
    ratio = (logprobs - logprobs.detach()).exp()  # detach: the same numbers, as constants
    return -(ratio * advantages[:, None] * sampled).sum() / sampled.sum()  # M of policy_gradient.md


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
    # [B, T], B = P·G. Shorter rows end in zeros, which do no harm: no token sees what follows it
    ids = pad_sequence(rows, batch_first=True)
    sampled = pad_sequence(masks, batch_first=True)[:, 1:]  # [B, T-1]: nothing predicts token 0

    # 3. The advantage: how far above the mean of its question's answers, in standard deviations. If
    #    all are equally good, all advantages are 0, and this question teaches nothing
    returns = torch.tensor(rewards).view(len(SEEDS), G)  # [P, G]
    mean, std = returns.mean(1, keepdim=True), returns.std(1, keepdim=True)  # [P, 1]
    advantages = ((returns - mean) / (std + 1e-4)).flatten()  # [B]; 1e-4: no division by 0

    # 4. The loss, its gradient, and a step. AdamW's first step moves almost every weight by about
    #    lr, however long the gradient is: limiting its length only matters from the second step on
    logprobs = token_logprobs(policy, ids)  # [B, T-1]
    compute_loss(logprobs, advantages, sampled).backward()  # gives every weight its gradient
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)  # to length 1, if longer
    optimizer.step()

    # The log-prob of each answer, the sum of those of its tokens, before the step and after it
    with torch.no_grad():
        before = (logprobs * sampled).sum(1)  # [B]
        after = (token_logprobs(policy, ids) * sampled).sum(1)  # [B]
    for i, question in enumerate(questions):
        table = Table("answer", "reward", "advantage", "log-prob before", "after", title=question)
        for row in range(i * G, (i + 1) * G):
            numbers = rewards[row], advantages[row], before[row], after[row]
            table.add_row(printable(texts[row]), *(f"{number:.2f}" for number in numbers))
        Console(markup=False).print(table)
    print("A right guess may become less likely although its advantage is positive. All guesses "
          "begin with\nthe same token, <answer>, and the advantages of a question's guesses add up "
          "to less than 0: that\ntoken may lose more than the digit after it gains.")  # fmt: skip


if __name__ == "__main__":
    main(load_policy(str(PRETRAINED), device="cpu"))
