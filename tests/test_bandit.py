"""A task whose best action is known is learnt by every algorithm, variant and option, from chance.

A contextual bandit in text: the message names one of four words, any response is one of four
actions, one of which is right for the word. The policy starts from random weights and gets no
demonstrations. All runs share their settings but for what is tested; a run takes a few seconds.
"""

import json
import random

import pytest
import torch
from conftest import save_small
from transformers import AutoConfig, AutoModelForCausalLM

from core import report
from environments import registry
from environments.base import Env, Step
from environments.registry import register

WORDS = ["north", "east", "south", "west"]
SETTINGS = """--lr 3e-3 --num-updates 40 --num-prompts 16 --group-size 8 --num-epochs 2
    --max-tokens 2 --sft-steps 0 --eval-every 0 --eval-num-tasks 64 --save-every 0
    --device cpu""".split()
LOSS_TYPES = {
    **{
        f"reinforce, {baseline}": f"--algo reinforce --reinforce.baseline {baseline}"
        for baseline in ("batch", "group", "leave_one_out", "none")
    },
    "reinforce, normalised": "--algo reinforce --reinforce.normalize",
    **{v: f"--grpo.loss-type {v}" for v in ("grpo", "dr_grpo", "dapo", "gspo", "cispo")},
    "dual clip": "--grpo.dual-clip 1.2",
    "ppo": "--algo ppo",
    "kl in the loss": "--kl-coef 0.01",
    "kl in the reward": "--algo reinforce --kl-coef 0.01 --kl-in reward --kl-estimator k1",
    "filter groups": "--filter-groups 2",
    "best again": "--sft-best 8",
    "entropy": "--entropy-coef 0.01",
    "top-k and several steps": "--top-k 128 --num-minibatches 2",
    "credit by turn": "--credit turn --env bandit:turns=2",
}


@pytest.fixture
def bandit(monkeypatch):
    known = dict(registry.ENVIRONMENTS)

    @register("bandit")
    class Bandit(Env):
        def __init__(self, turns: int = 1):
            self.turns = turns

        def reset(self, seed):
            self.seed, self.played, self.all_right = seed, 0, True
            return [self.ask()]

        def ask(self):
            self.context = self.seed // 4**self.played % 4
            aside = random.Random(self.seed).randrange(10)  # that has to be overlooked
            return {"role": "user", "content": f"{WORDS[self.context]} {aside}"}

        def step(self, response):
            action = ord(response[0]) % 4 if response else 0
            right = action == self.context
            self.played, self.all_right = self.played + 1, self.all_right and right
            done = self.played == self.turns
            return Step(
                None if done else self.ask(), float(right), done, {"correct": self.all_right}
            )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors so small
    monkeypatch.setattr(report, "write_pages", lambda *args: None)  # longer than the updates
    yield
    torch.set_num_threads(threads)
    registry.ENVIRONMENTS.clear()
    registry.ENVIRONMENTS.update(known)


def random_policy(folder, seed):
    """One layer, with weights that the seed decides."""
    save_small("qwen3", folder, num_hidden_layers=1)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def read(lines):
    """What the evaluations found, without the name of the environment."""
    records = [json.loads(line) for line in lines]
    found = [{k.split("/")[-1]: v for k, v in r.items() if k.startswith("eval/")} for r in records]
    return [numbers for numbers in found if numbers]


FAST = ("dapo",)
SLOW = ("reinforce, leave_one_out", "ppo", "cispo")
MARKS = {  # the gradients of all variants are compared with float64 loops in test_float64_step.py
    variant: [] if variant in FAST else pytest.mark.slow if variant in SLOW else pytest.mark.seeds
    for variant in LOSS_TYPES
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.seeds) for seed in (1, 2, 3, 4))]
)
@pytest.mark.parametrize("variant", [pytest.param(v, marks=m) for v, m in MARKS.items()])
def test_the_best_actions_are_learnt_from_chance(command, bandit, tmp_path, variant, seed):
    flags = ["--model-id", random_policy(tmp_path / "start", seed), "--seed", seed, *SETTINGS]
    flags = ["--env", "bandit", *flags, *LOSS_TYPES[variant].split()]
    code, _, err = command("--run-name", "a", *flags)
    assert (code, err) == (0, "")
    lines = (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()
    (before, after), turns = read(lines), 2 if "turns=2" in LOSS_TYPES[variant] else 1
    assert 0.1 <= before["return_mean"] / turns <= 0.4
    assert after["accuracy"] >= 0.95  # right in every turn
