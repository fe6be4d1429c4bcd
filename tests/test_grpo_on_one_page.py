"""The page computes what train.py computes: its advantages, its gradient and its loss."""

import re
from unittest.mock import patch

import pytest
import torch
from single_update import gradients_of_update
from transformers import AutoModelForCausalLM

from algorithms import grpo
from algorithms.tokens import Tokens
from core.config import Config
from core.loading import load_policy
from core.tiny import PRETRAINED
from core.types import Rollout, Turn
from core.workshop import grpo_on_one_page as page

TASKS = [task for task in (2, 3) for _ in range(page.G)]


@pytest.fixture(scope="module")
def played():
    torch.manual_seed(0)
    return page.play(AutoModelForCausalLM.from_pretrained(PRETRAINED), TASKS)


def test_its_gradient_is_that_of_train_and_what_is_better_becomes_likelier(played, capsys):
    ids, attention, mask, rewards = played
    model = AutoModelForCausalLM.from_pretrained(PRETRAINED)
    n, advantages = mask.shape[1], page.group_advantages(rewards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=page.LEARNING_RATE)
    with patch.multiple(page, EPOCHS=1, MINIBATCHES=1):
        old = page.update(model, optimizer, ids, attention, mask, advantages)

    rollouts = []
    for row, seed in enumerate(TASKS):
        prompt = ids[row, :-n][attention[row, :-n] == 1].tolist()
        answer = ids[row, -n:][mask[row] == 1].tolist()
        turn = Turn(prompt, answer, old[row, : len(answer)].tolist(), "stop", rewards[row].item())
        rollouts.append(Rollout("letter_counting", "player", seed, row // page.G, turns=[turn]))
    policy = load_policy(Config(device="cpu"), str(PRETRAINED))
    cfg = Config(temperature=page.TEMPERATURE)
    [gradient], metrics = gradients_of_update(cfg, policy, rollouts)
    assert metrics["gap/logprob_max"] < 1e-4
    found = torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])
    assert (found - gradient).abs().max() < 1e-5 * gradient.abs().max()

    page.show(model, ids, attention, mask, rewards, advantages, old)
    row = re.compile(r"^ +(\S+) +(\S+) +(\S+) -> (\S+)", re.MULTILINE)
    shown = [[float(word) for word in words] for words in row.findall(capsys.readouterr().out)]
    assert [reward for reward, *_ in shown] == [round(x, 2) for x in rewards.tolist()]
    assert sum(a * (after - before) for _, a, before, after in shown) > 0


def test_its_advantages_and_loss_are_those_of_grpo():
    generator = torch.Generator().manual_seed(0)
    logprobs, old = -torch.rand(2, 16, 5, generator=generator)
    mask = (torch.arange(5) < torch.randint(1, 6, (16, 1), generator=generator)).long()
    rewards = torch.rand(16, generator=generator)
    advantages = page.group_advantages(rewards)
    loss = page.compute_loss(logprobs, old, advantages, mask)

    own = mask == 1
    rollout = torch.arange(16)[:, None].expand(16, 5)[own]
    tokens = Tokens(
        logprobs=logprobs[own], old_logprobs=old[own], advantages=advantages[rollout],
        token_weights=torch.full((len(rollout),), 1 / len(rollout)),
        importance_weights=torch.ones(len(rollout)), in_loss=torch.ones(len(rollout)).bool(),
    )  # fmt: skip
    options = grpo.Options(clip_low=page.CLIP, clip_high=page.CLIP).with_preset()
    expected, _ = grpo.compute_loss(tokens, options)
    each = Tokens(
        rewards=rewards, rollout=torch.arange(16), turn=torch.zeros(16).long(),
        group=torch.arange(16) // page.G, discounts=torch.ones(16).double(),
    )  # fmt: skip
    assert torch.allclose(grpo.compute_advantages(each, options), advantages, atol=1e-6)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (logprobs - old).exp()[own].sub(1).abs().max() > page.CLIP  # so the clip acts
