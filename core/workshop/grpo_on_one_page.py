"""The hour, 2 of 2. GRPO on one page: a run in plain PyTorch, and its first update in numbers.

    python -m core.workshop.grpo_on_one_page          # a minute on a laptop

The model was pretrained on two ways to answer a question such as `How many r in "parrot"?`: guess,
which is right once in four, or spell the word and count, which is right nearly always. An update
raises the probability of the tokens of answers that earned more than others to the same question.
That of a right guess may still fall, as its first token, <answer>, begins the wrong guesses, too.

Shapes: P questions, G answers to each, B = P · G rows of T tokens, the last N for the answer; V
tokens in the vocabulary. train.py has the same formulas, by default with one step per update, so
that its clip does nothing; here it acts. It also has: any model and environment, several turns,
other algorithms, adapters, tokens in one row without padding, micro-batches that fit into memory,
weights for what sampler and trainer round differently, a log, checkpoints, processes.
"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from core.tiny import PRETRAINED  # the folder of a Qwen3 with 0.9M weights
from environments.letter_counting import LetterCounting

P, G = 16, 8
MAX_TOKENS = 40  # of an answer
TEMPERATURE = 1.2  # the policy is softmax(logits / TEMPERATURE), in sampling and in training
UPDATES, EPOCHS, MINIBATCHES = 10, 2, 2  # of the run; passes of an update; steps of a pass
LEARNING_RATE, CLIP = 1e-4, 0.2
HELD_OUT = range(1_500_000_000, 1_500_000_128)  # seeds of tasks that no update trains on

tokenizer = AutoTokenizer.from_pretrained(PRETRAINED, padding_side="left")
END, PAD = tokenizer.eos_token_id, tokenizer.pad_token_id


def encode(questions: list[str]) -> tuple[Tensor, Tensor]:
    """Makes chat prompts that open the model's turn. Returns ids [B, T-N], padded on the left, so
    that all answers begin in one column, and an attention mask of this shape: 0 at padding."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    return batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def sample(model, ids: Tensor, attention: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """Samples an answer of at most MAX_TOKENS tokens to each prompt; `greedy` takes the likeliest
    token instead. Returns ids [B, N], and a mask [B, N] of 0 and 1 that says which ids belong to
    the answer: all up to its first END, and this END."""
    answers, cache = [], DynamicCache(config=model.config)  # the model's fourth argument
    new_ids = ids  # the model reads these next; the cache stores all that it has read before
    finished = torch.zeros(len(ids), dtype=torch.bool)
    while len(answers) < MAX_TOKENS and not finished.all():
        logits = model(new_ids, attention, None, cache).logits[:, -1] / TEMPERATURE  # [B, V]
        probs = logits.softmax(-1)
        new_ids = probs.argmax(-1, keepdim=True) if greedy else probs.multinomial(1)  # [B, 1]
        answers.append(new_ids)
        attention = torch.cat([attention, torch.ones_like(new_ids)], dim=1)
        finished |= new_ids[:, 0] == END
    tokens = torch.cat(answers, dim=1)
    ends = (tokens == END).long()
    return tokens, (ends.cumsum(1) - ends == 0).long()


def token_logprobs(model, ids: Tensor, attention: Tensor, n: int) -> Tensor:
    """The policy's log-probs of the last `n` tokens of each row, [B, n]. The logits at position t
    predict token t+1. `attention` hides the padding."""
    logits = model(ids, attention_mask=attention).logits[:, -n - 1 : -1] / TEMPERATURE  # [B, n, V]
    return logits.log_softmax(-1).gather(-1, ids[:, -n:, None]).squeeze(-1)


def group_advantages(rewards: Tensor) -> Tensor:
    """How far each reward is above the mean of its group, in the group's standard deviations; [B].
    The answers to a question are a group, and neighbours. Equal rewards have advantages 0."""
    groups = rewards.view(-1, G)  # [P, G]
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    return ((groups - mean) / (std + 1e-4)).flatten()


def compute_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The mean over all tokens of answers, whatever their row, of -min(ρ A, clip(ρ, 1 ± CLIP) A),
    where ρ = π / π_old. While ρ is 1, its gradient is the mean of -A ∇log π. Each row has one A,
    and N log-probs, now and before the update's first step (`old`)."""
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return -(surrogate * mask).sum() / mask.sum()


def update(model, optimizer, ids, attention, mask, advantages) -> Tensor:
    """EPOCHS passes over the B answers, in MINIBATCHES steps each. A step follows the gradient of
    its own rows, scaled to norm 1 if it is longer. Returns the log-probs before the first step."""
    with torch.no_grad():
        old = token_logprobs(model, ids, attention, mask.shape[1])
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(ids)).chunk(MINIBATCHES):
            logprobs = token_logprobs(model, ids[rows], attention[rows], mask.shape[1])
            loss = compute_loss(logprobs, old[rows], advantages[rows], mask[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return old


def play(model, seeds, greedy=False) -> tuple[Tensor, ...]:
    """Answers to the tasks of `seeds`: ids [B, T], attention [B, T], mask [B, N], rewards [B], each
    1 for the right number, 0.1 for another in the right format, 0 for anything else."""
    envs = [LetterCounting() for _ in seeds]
    questions = [env.reset(seed)[0]["content"] for env, seed in zip(envs, seeds, strict=True)]
    prompts, attention = encode(questions)
    answers, mask = sample(model, prompts, attention, greedy)
    texts = tokenizer.batch_decode(answers.where(mask == 1, PAD), skip_special_tokens=True)
    rewards = [env.step(text).reward for env, text in zip(envs, texts, strict=True)]
    ids, attention = torch.cat([prompts, answers], 1), torch.cat([attention, mask], 1)
    return ids, attention, mask, torch.tensor(rewards)


def evaluate(model) -> float:
    """The fraction of the held-out tasks that a greedy answer solves."""
    return (play(model, HELD_OUT, greedy=True)[-1] == 1.0).float().mean().item()


@torch.no_grad()
def show(model, ids, attention, mask, rewards, advantages, old) -> None:
    """Prints the answers to the first two questions, and their log-probs: sums over an answer."""
    n = mask.shape[1]
    before = (old * mask).sum(1)
    after = (token_logprobs(model, ids, attention, n) * mask).sum(1)
    for row in range(2 * G):
        if row % G == 0:
            print("prompt: ", tokenizer.decode(ids[row, :-n][attention[row, :-n] == 1]))
            print("reward  advantage  log-prob before -> after  answer")
        print(f"{rewards[row]:6.2f} {advantages[row]:10.2f}", end=" ")
        print(f"{before[row]:16.2f} -> {after[row]:5.2f}", end="  ")
        print(repr(tokenizer.decode(ids[row, -n:][mask[row] == 1])))


def train(seed: int = 0) -> list[float]:
    """UPDATES updates with P new tasks each; returns the accuracies before and after them."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(PRETRAINED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    accuracies = [evaluate(model)]
    for number in range(UPDATES):
        tasks = [task for task in range(number * P, (number + 1) * P) for _ in range(G)]
        ids, attention, mask, rewards = play(model, tasks)
        advantages = group_advantages(rewards)
        old = update(model, optimizer, ids, attention, mask, advantages)
        if number == 0:
            show(model, ids, attention, mask, rewards, advantages, old)
        length = mask.sum(1).float().mean()
        print(f"update {number + 1:2}   reward {rewards.mean():.2f}   tokens {length:4.1f}")
    accuracies.append(evaluate(model))
    print("accuracy on held-out questions: {:.2f} -> {:.2f}".format(*accuracies))
    return accuracies


if __name__ == "__main__":
    train()
