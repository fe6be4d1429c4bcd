"""A task whose best action is known is learnt from chance by every algorithm.

A contextual bandit in text: the message names one of four words, any response is one of four
actions, one of which is right for the word. The policy starts from random weights and gets no
demonstrations. All runs share their settings but for what is tested; a run takes a few seconds.
"""

import pytest
import torch
from conftest import save_small
from transformers import AutoConfig, AutoModelForCausalLM

from core import report
from core.run.log import read_records
from environments.base import Env, Step
from environments.plumbing import registry

WORDS = ["north", "east", "south", "west"]
SETTINGS = """--lr 5e-3 --num-prompts 8 --group-size 8 --num-epochs 4
    --max-tokens 2 --sft-steps 0 --eval-every 0 --eval-num-tasks 8 --save-every 0
    --device cpu""".split()
VARIANTS = {  # only the first is fast; test_float64_step.py has the gradients
    "dapo": "--num-updates 24",
    "reinforce": "--num-updates 50 --algo reinforce --reinforce.baseline leave_one_out",
    # the bonus keeps all actions likely enough to be tried: without it one is lost at some seeds
    "ppo": "--num-updates 50 --algo ppo --num-prompts 16 --entropy-coef 0.05",
}


class Bandit(Env):
    def reset(self, seed):
        self.right = seed % 4
        return [{"role": "user", "content": WORDS[self.right]}]

    def step(self, response):
        correct = bool(response) and ord(response[0]) % 4 == self.right
        return Step(None, float(correct), True, {"correct": correct})


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[pytest.mark.seeds] * (v != "dapo")) for v in VARIANTS]
)
def test_the_best_actions_are_learnt_from_chance(command, monkeypatch, tmp_path, variant):
    monkeypatch.setitem(registry.ENVIRONMENTS, "bandit", Bandit)
    monkeypatch.setattr(report, "write_pages", lambda *args: None)  # longer than the updates
    start = save_small("qwen3", tmp_path / "start", num_hidden_layers=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(start)).save_pretrained(start)
    flags = ["--env", "bandit", "--model-id", start, *SETTINGS, *VARIANTS[variant].split()]
    code, _, err = command("--run-name", "a", *flags)
    assert (code, err) == (0, "")
    records = read_records(tmp_path / "runs/a/metrics.jsonl")
    before, after = (r["eval/bandit/accuracy"] for r in records if "eval/bandit/accuracy" in r)
    assert before <= 0.5 and after >= 0.95
