"""The hour, 2 of 2. One update of the default run, from words to new weights, with its numbers.

    python -m core.workshop.one_update            # prints after some ten seconds, on a laptop

The model samples eight answers to each of two questions, and the environment rewards them: a right
answer earns 1, a wrong one in the right format 0.1, anything else 0. The model was pretrained on
two ways to answer: guess at once, which is right once in four, or spell the word and count, which
is right nearly always. A misspelt word costs nothing: only the number counts. One gradient step
makes the tokens of the better answers more likely, on the whole, and those of the worse ones less.
The default run does this 25 times, with sixteen questions each time.

Imported: `load_policy` loads a model of transformers, `policy.model`, and its tokenizer;
`prompt_ids` writes messages as token ids, with the chat template's special tokens; `LetterCounting`
asks (`reset`) and rewards (`step`). Shapes: P questions, each a task, G answers to each, B = P·G
answers, T tokens of prompt and answer, V tokens in the vocabulary.

This file is the loop of train.py without what makes that fast or general; its last lines name what
is added there.
"""

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from core.chat_template import prompt_ids
from core.config import Config
from core.loading import load_policy
from core.policy import Policy
from core.tiny import PRETRAINED
from environments.letter_counting import LetterCounting

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
    """The policy gradient's loss; `advantages` [B], the others [B, T-1].

    A step on it pushes the tokens of an answer up where its advantage is positive, and down where
    it is negative. All answers share the weights, so the sum of all pushes decides. Divided by the
    number of sampled tokens, the loss counts each token the same, in long answers and short.
    """
    return -(logprobs * advantages[:, None] * sampled).sum() / sampled.sum()


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

    # 4. The loss, its gradient, and a step. A gradient that is longer than 1 is scaled to length 1,
    #    so that in a longer run no single update decides. AdamW's first step is not affected: it
    #    divides the gradient by its own size, and moves almost every weight by about lr
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
            table.add_row(texts[row], *(f"{number:.2f}" for number in numbers))
        Console(markup=False).print(table)
    print("Why can a right guess become less likely, although its advantage is positive? All "
          "guesses begin\nwith the same token, <answer>. The advantages of a question add up to "
          "0, and the spelled answers\nhave positive ones, so those of the guesses add up to less "
          "than 0: <answer> becomes less likely.\nThe right digit after it becomes likelier, but "
          "may gain less than <answer> loses.")  # fmt: skip


# train.py does the same, and also has:
#
# - episodes of several turns (core/episodes.py), sometimes of several texts each (core/batching.py)
# - a cache in sampling: here the model reads the whole text again for each token (core/sampler.py)
# - one row of sampled tokens, without padding and `sampled`, and micro-batches, which bound the
#   memory (core/batching.py); the common beginning of texts is computed once
# - importance weights, as sampler and trainer give slightly different log-probs
#   (algorithms/off_policy.py)
# - several gradient steps per update: then the loss has the policy ratio in place of the log-prob,
#   and clips it (algorithms/grpo.py); in the first step the gradient is the same
# - a penalty for leaving a reference (KL), a bonus for variety (entropy), PPO's values (ppo.py)
# - several processes, evaluation, logging, checkpoints


if __name__ == "__main__":
    main(load_policy(Config(device="cpu"), str(PRETRAINED)))
