"""An algorithm in a file of the user's: it trains, logs, warns, reports and resumes."""

from pathlib import Path

import pytest
import yaml
from conftest import metrics_of

from core.algorithm import algorithm_names, load_algorithm

ROOT = Path(__file__).parent.parent
MINE = '''
"""MaxRL's advantage and a loss like KTO's."""

from dataclasses import dataclass

import torch

from algorithms import common
from algorithms.options import Coefficient, LoopOptions

NEEDS = {"groups"}


@dataclass(frozen=True)
class Options(LoopOptions):
    """Options of MaxRL with KTO's value function."""

    beta: Coefficient = 0.1
    """How fast the gain saturates."""


def compute_advantages(batch, options):
    returns, exists = common.turn_returns(batch)
    size = common.group_sum(exists.double(), batch.group_ids)
    mean = common.group_sum(returns, batch.group_ids) / size.clamp(min=1)
    advantages = (returns - mean) / (mean.abs() + 1e-6)
    advantages = advantages.gather(1, batch.turn_ids).float()
    return {
        "advantages": torch.where(batch.completion_mask, advantages, 0.0),
        "mine/solved": (mean > 0).double().mean().item(),
    }


def compute_loss(logprobs, values, micro, options):
    mask = micro.completion_mask
    log_ratio = torch.where(mask, logprobs - micro.old_logprobs, 0.0)
    gain = torch.sigmoid(options.beta * log_ratio * micro.advantages.sign())
    per_token = -micro.importance_weights * micro.advantages.abs() * gain
    loss = torch.where(mask, per_token * micro.token_weights, 0.0).sum()
    return loss, {"mine/gain": gain[mask].sum().item()}
'''
SHORT = """--num-prompts 2 --group-size 4 --max-tokens 8 --eval-num-tasks 4 --eval-every 1
    --microscope 64""".split()


def test_a_file_trains_logs_reports_and_resumes(command):
    Path("mine.py").write_text(MINE)
    algo = ["--algo", "mine.py", "--mine.beta", "0.5"]
    code, out, err = command(*SHORT, *algo, "--num-updates", "2", "--run-name", "whole")
    assert code == 0 and "picoRL · mine · letter_counting" in out and "beta=0.5" in out, err
    last = metrics_of("runs/whole")[-1]
    assert last["update/steps"] == 1 and 0 < last["mine/gain"] < 1 and last["grad/norm"] >= 0
    assert 0 <= last["mine/solved"] <= 1
    saved = yaml.safe_load(Path("runs/whole/config.yaml").read_text())
    assert saved["mine"] == {"beta": 0.5} and Path(saved["algo"]) == Path("mine.py").absolute()
    page = Path("runs/whole/report.html").read_text(encoding="utf-8")
    assert '"algo":"mine"' in page

    assert command(*SHORT, *algo, "--num-updates", "1", "--run-name", "parts")[0] == 0
    Path("mine.py").unlink()  # the run has a copy
    assert command("--resume", "runs/parts", "--num-updates", "2")[0] == 0
    assert metrics_of("runs/parts")[1:] == metrics_of("runs/whole")[1:]
    code, _, err = command("--resume", "runs/parts", "--mine.beta", "0.6")
    assert code == 2 and "mine.beta is 0.5 in this run, not 0.6" in err


def test_the_example_of_the_readme_trains(command):
    text = (ROOT / "algorithms/README.md").read_text(encoding="utf-8")
    Path("best.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    flags = ["--algo", "best.py", "--best.clip-high", "0.28", "--num-minibatches", "2"]
    code, out, err = command(*SHORT, *flags, "--num-updates", "1")
    assert code == 0 and "best: clip_low=0.2 clip_high=0.28" in out, err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (MINE.replace("def compute_loss", "def loss"), "it has no compute_loss"),
        ("import nonsense_module\n", "ModuleNotFoundError: No module named 'nonsense_module' "
                                     "(mine.py, line 1)"),
        (MINE.replace("@dataclass(frozen=True)\n", ""), "Options must be a dataclass"),
        (MINE.replace('{"groups"}', '{"group"}'), "needs 'group': choose groups, value_head, "),
    ],
    ids=range(4),
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_line(command, text, named):
    Path("mine.py").write_text(text)
    code, out, err = command("--algo", "mine.py")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("train.py: --algo ") and named in err


def test_every_algorithm_of_the_folder_is_found_and_explains_itself():
    assert {"reinforce", "grpo", "ppo", "gspo", "cispo", "scratch"} <= set(algorithm_names())
    for name in algorithm_names():
        assert load_algorithm(name).Options.__doc__ and load_algorithm(name).__doc__
