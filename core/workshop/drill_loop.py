"""A GRPO run on one page: the loop of the drill, as it should be."""

import copy
import re

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from core.tiny import PRETRAINED  # the folder of a Qwen3 with 0.9M weights
from environments.letter_counting import LetterCounting

P, G = 16, 8  # tasks of an update; answers to each, a group. A batch has B = P · G rows
MAX_TOKENS = 40  # of an answer
TEMPERATURE = 1.2  # the policy is softmax(logits / TEMPERATURE), in sampling and in training
UPDATES, EPOCHS, MINIBATCHES = 10, 2, 2  # passes over the answers of an update; steps of a pass
LEARNING_RATE, CLIP, BETA = 1e-4, 0.2, 0.01  # BETA: weight of the KL penalty
EVALUATED = range(1_500_000_000, 1_500_000_128)  # seeds of tasks that no update trains on

tokenizer = AutoTokenizer.from_pretrained(PRETRAINED, padding_side="left")
END, PAD = tokenizer.eos_token_id, tokenizer.pad_token_id


def ask(seed: int) -> tuple[str, int]:
    """Task `seed`: its question, and the right number."""
    env = LetterCounting()
    question = env.reset(seed)[0]["content"]  # How many r in "drackri"? Work it out, then ..
    return question, sum(env.counts.values())


def reward(text: str, right: int) -> float:
    """1 for `<answer>right</answer>`, 0.1 for another number in it; 0 without it, or with two."""
    found = re.findall(r"<answer>(\d+)</answer>", text)
    if len(found) != 1:
        return 0.0
    return 1.0 if int(found[0]) == right else 0.1


def encode(questions: list[str]) -> tuple[Tensor, Tensor]:
    """Chat prompts that open the model's turn: ids [B, T-N], padded on the left, so that answers
    all begin in one column; and which of them are no padding, of the same shape, 0 and 1."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    return batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def sample(model, ids: Tensor, attention: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
    """One answer to each prompt, of at most MAX_TOKENS tokens, drawn from the policy or, `greedy`,
    the likeliest: ids [B, N], and which of them are the answer's, [B, N] of 0 and 1: all to its
    first END, and this too."""
    answers, cache, last = [], DynamicCache(config=model.config), ids
    ended = torch.zeros(len(ids), dtype=torch.bool)
    while len(answers) < MAX_TOKENS and not ended.all():
        logits = model(last, attention, None, cache).logits[:, -1] / TEMPERATURE  # [B, V]
        p = logits.softmax(-1)
        last = p.argmax(-1, keepdim=True) if greedy else p.multinomial(1)  # [B, 1]
        answers.append(last)
        attention = torch.cat([attention, torch.ones_like(last)], dim=1)
        ended |= last[:, 0] == END
    tokens = torch.cat(answers, dim=1)
    ends = (tokens == END).long()
    return tokens, (ends.cumsum(1) - ends == 0).long()


def token_logprobs(model, ids: Tensor, attention: Tensor, n: int) -> Tensor:
    """The policy's log-probs of the last `n` tokens of each row, [B, n]. Position t of the logits
    is about token t+1. Padding is not seen."""
    logits = model(ids, attention_mask=attention).logits[:, -n - 1 : -1] / TEMPERATURE  # [B, n, V]
    return logits.log_softmax(-1).gather(-1, ids[:, -n:, None]).squeeze(-1)


def group_advantages(rewards: Tensor) -> Tensor:
    """How far each reward is above the mean of its group, in the group's standard deviations; [B].
    The answers of a group are neighbours. Equal rewards have advantages 0."""
    groups = rewards.view(-1, G)  # [P, G]
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    return ((groups - mean) / (std + 1e-4)).flatten()


def compute_loss(logprobs, old, ref, advantages, mask) -> tuple[Tensor, dict[str, float]]:
    """GRPO's loss: the mean over all tokens of answers, whatever their row, of
    -min(ρ A, clip(ρ, 1 ± CLIP) A) + BETA · KL(π ‖ reference), where ρ = π / π_old.
    Each row has one advantage, and N of the others: the log-probs now, those before the update's
    first step (`old`) and of the reference (`ref`), and the mask. The KL's estimator is k3."""
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    surrogate = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    kl = (ref - logprobs).exp() - (ref - logprobs) - 1
    loss = ((BETA * kl - surrogate) * mask).sum() / mask.sum()
    clipped_fraction = ((ratio != clipped) * mask).sum() / mask.sum()
    return loss, {"kl": ((kl * mask).sum() / mask.sum()).item(), "clipped": clipped_fraction.item()}


def update(model, reference, optimizer, ids, attention, mask, advantages) -> dict[str, float]:
    """EPOCHS passes over the B answers, in MINIBATCHES steps each. A step is along the gradient of
    its own rows, which is scaled to length 1 if it is longer. Returns numbers of the last step."""
    with torch.no_grad():
        old = token_logprobs(model, ids, attention, mask.shape[1])
        ref = token_logprobs(reference, ids, attention, mask.shape[1])
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(ids)).chunk(MINIBATCHES):
            now = token_logprobs(model, ids[rows], attention[rows], mask.shape[1])
            loss, numbers = compute_loss(now, old[rows], ref[rows], advantages[rows], mask[rows])
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return numbers | {"gradient": norm.item()}


def play(model, seeds, greedy=False) -> tuple[Tensor, ...]:
    """Answers to the tasks of `seeds`: ids [B, T], attention [B, T], mask [B, N], rewards [B]."""
    questions, right = zip(*map(ask, seeds), strict=True)
    prompts, attention = encode(list(questions))
    answers, mask = sample(model, prompts, attention, greedy)
    texts = tokenizer.batch_decode(answers.where(mask == 1, PAD), skip_special_tokens=True)
    rewards = torch.tensor([reward(*pair) for pair in zip(texts, right, strict=True)])
    return torch.cat([prompts, answers], 1), torch.cat([attention, mask], 1), mask, rewards


def evaluate(model) -> float:
    """The fraction of the held-out tasks EVALUATED that a greedy answer solves."""
    *_, rewards = play(model, EVALUATED, greedy=True)
    return (rewards == 1.0).float().mean().item()


def train(seed: int = 0) -> list[float]:
    """UPDATES updates with P new tasks each; returns the accuracies before and after them."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(PRETRAINED)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    before = evaluate(model)
    for number in range(UPDATES):
        tasks = range(number * P, (number + 1) * P)
        ids, attention, mask, rewards = play(model, [task for task in tasks for _ in range(G)])
        advantages = group_advantages(rewards)
        numbers = update(model, reference, optimizer, ids, attention, mask, advantages)
        numbers |= {"length": mask.sum(1).float().mean().item(), "reward": rewards.mean().item()}
        print(f"update {number + 1:2}", *(f"{k} {v:.4f}" for k, v in numbers.items()), sep="  ")
    after = evaluate(model)
    print(f"accuracy {before:.2f} -> {after:.2f}")
    return [before, after]


if __name__ == "__main__":
    train()
