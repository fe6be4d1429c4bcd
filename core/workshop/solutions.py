"""One solution to each exercise of scratch.py; `python scratch.py --solution N` prints it."""

import torch
from torch import Tensor, nn


def token_logprobs(logits: Tensor, input_ids: Tensor) -> Tensor:
    all_logprobs = logits[:, :-1].log_softmax(-1)  # [B, T-1, V]
    return all_logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def completion_mask(turns: list[tuple[list[int], list[int]]]) -> Tensor:
    sampled: list[bool] = []
    for context, completion in turns:
        sampled += [False] * len(context) + [True] * len(completion)
    return torch.tensor(sampled[1:], dtype=torch.bool)


def group_advantages(returns: Tensor, group_ids: Tensor) -> Tensor:
    advantages = torch.zeros_like(returns)
    for group in group_ids.unique():
        members = group_ids == group
        centered = returns[members] - returns[members].mean()
        advantages[members] = centered / (returns[members].std() + 1e-4)
    return advantages


def reinforce_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    # select before multiplying: 0 · infinity is nan, in the loss or in its gradient
    return -(advantages[mask] * logprobs[mask]).sum() / mask.sum()


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2
) -> Tensor:
    logprobs, old_logprobs, advantages = logprobs[mask], old_logprobs[mask], advantages[mask]
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    return -objective.sum() / mask.sum()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    log_r = ref_logprobs - logprobs
    return log_r.exp() - 1 - log_r


def gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.tensor(0.0)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage
        next_value, next_advantage = values[t], advantages[t]
    return advantages


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if temperature == 0:
        all_logprobs = logits.log_softmax(-1)
        ids = logits.argmax(-1)
    else:
        all_logprobs = (logits / temperature).log_softmax(-1)
        ids = torch.multinomial(all_logprobs.exp(), 1, generator=generator).squeeze(-1)
    return ids, all_logprobs.gather(-1, ids[:, None]).squeeze(-1)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    input_ids: Tensor,
    mask: Tensor,
    returns: Tensor,
    group_ids: Tensor,
) -> float:
    logprobs = token_logprobs(model(input_ids), input_ids)
    advantages = group_advantages(returns, group_ids)[:, None].expand_as(logprobs)
    loss = clipped_loss(logprobs, logprobs.detach(), advantages, mask)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def advantages_of_tokens(rewards: Tensor, mask: Tensor, group_ids: Tensor) -> Tensor:
    returns = (rewards * mask).sum(1)  # a sum: the number of tokens has no influence
    same = (group_ids[:, None] == group_ids[None, :]).float()
    baseline = (same @ returns) / same.sum(1)
    return (returns - baseline)[:, None] * mask
