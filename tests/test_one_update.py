"""core/workshop/one_update.py: its gradient is that of train.py on the same answers."""

import torch
from single_update import gradients_of_update

from core.chat_template import prompt_ids
from core.config import Config
from core.loading import load_policy
from core.tiny import PRETRAINED
from core.types import Rollout, Turn
from core.workshop import one_update
from environments.letter_counting import LetterCounting


def tiny():
    return load_policy(Config(device="cpu"), str(PRETRAINED))


def rollouts_of_the_page(policy):
    """The answers that `one_update.main` samples, as train.py would hold them."""
    torch.manual_seed(0)
    rollouts = []
    for group, seed in enumerate(one_update.SEEDS):
        env = LetterCounting()
        prompt = prompt_ids(policy.tokenizer, env.reset(seed))
        for answer in one_update.sample(policy, prompt):
            reward = env.step(policy.tokenizer.decode(answer, skip_special_tokens=True)).reward
            with torch.no_grad():
                logprobs = one_update.token_logprobs(policy, torch.tensor([prompt + answer]))
            sampled = logprobs[0, -len(answer) :].tolist()
            turn = Turn(prompt, answer, sampled, "stop", reward)
            rollouts.append(Rollout("letter_counting", "player", seed, group, turns=[turn]))
    return rollouts


def test_its_gradient_is_that_of_train_and_what_is_better_becomes_more_likely(capsys):
    ours, theirs = tiny(), tiny()
    one_update.main(ours)
    [gradient], metrics = gradients_of_update(Config(), theirs, rollouts_of_the_page(theirs))
    assert metrics["update/steps"] == 1
    assert metrics["gap/logprob_max"] < 1e-4  # the rollouts are those of these weights
    found = torch.cat([p.grad.flatten() for _, p in sorted(ours.model.named_parameters())])
    assert (found - gradient).abs().max() < 1e-5 * gradient.abs().max()
    printed = capsys.readouterr().out
    assert 'How many r in "drackri"?' in printed and 'How many o in "zoshoon"?' in printed
    lines = [line.strip("│").split("│") for line in printed.splitlines() if line[:1] == "│"]
    rows = [[float(cell) for cell in line[1:]] for line in lines if line[1].strip()]
    assert len(rows) == 2 * one_update.G
    assert sum(a * (after - before) for _, a, before, after in rows) > 0
