"""Facts that hold for every environment: reproducible, robust against any text, bounded rewards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import needs

from core.faults import UsageError
from environments.base import EVAL_SEEDS
from environments.plumbing import check
from environments.plumbing.check import check_env, digests
from environments.plumbing.registry import make

ROOT = Path(__file__).parent.parent
# lowest and highest reward of a step, highest return, and whether demonstrations always reach it
# ("optimal"), are "correct", or at least "valid"
ONE_TURN, GAME = (0, 1, 1, "optimal"), (-1, 1, 1, "valid")
SPECS = {
    "letter_counting": ONE_TURN,
    "reverse": (-1, 1, 3, "optimal"),
    "reverse_echo": (-1, 1, 3, "optimal"),
    "compose": ONE_TURN,
    "compose:depth=3,mixed=true,pairs=all,steps=false": ONE_TURN,
    "math_qa": ONE_TURN,
    "math_qa:level=6": ONE_TURN,
    "calculator": ONE_TURN,
    "reasoning_gym": ONE_TURN,
    "remote:env=letter_counting": ONE_TURN,
    "wikipedia_maze": (-1, 1, 1, "optimal"),
    "wikipedia_maze:n_hops=3,brief=true": (-1, 1, 1, "optimal"),
    "reward_hacking": (-1, 1, 1, "correct"),
    "reward_hacking:proxy_weight=0": (-1, 1, 1, "optimal"),
    "tic_tac_toe": GAME,  # a random O sometimes draws
    "tic_tac_toe:opponent=perfect": (-1, 0, 0, "optimal"),
    "tic_tac_toe:opponent=self": GAME,  # one agent demonstrates, the other guesses
    "iterated_game": (-1, 1, 5, "correct"),
    "iterated_game:opponent=self": (-1, 1, 5, "valid"),
    "gymnasium": (-1, 1, 500, "valid"),
}
LIBRARIES = {"gymnasium", "reasoning_gym"}
SLOW = {"remote:env=letter_counting", *LIBRARIES}
FAST = [spec for spec in SPECS if ":" not in spec and spec not in {"calculator", *SLOW}]
# games have few openings: their evaluation seeds start other games from the same positions
HELD_OUT = ("letter_counting", "reverse", "math_qa", "wikipedia_maze", "calculator")
RETRIES = ("tic", "iterated", "reward", "wikipedia")


@pytest.mark.parametrize("spec", [
    pytest.param(spec, marks=pytest.mark.slow if spec.startswith("remote") else
                 needs("envs", *LIBRARIES & {spec}))
    for spec in SPECS
])  # fmt: skip
def test_check_env_finds_nothing_wrong_with_our_environments(spec, monkeypatch):
    monkeypatch.setattr(check, "NUM_OPENINGS", 20 if spec in SLOW else 80)
    low, high, max_return, demonstrations = SPECS[spec]
    num_seeds = 2 if spec in SLOW else 10
    report = check_env(spec, num_seeds, other_process=False)
    assert not report.problems
    assert low <= min(report.rewards) <= max(report.rewards) <= high
    assert len(report.demonstrations) == num_seeds
    for seed, (episode_return, correct) in enumerate(report.demonstrations):
        assert episode_return <= max_return + 1e-9
        assert correct or demonstrations == "valid", seed
        assert episode_return == pytest.approx(max_return) or demonstrations != "optimal", seed
    if spec.startswith(HELD_OUT):  # no task of evaluation in training or demonstrations
        assert len(report.openings) > 100 and len(report.held_out) > 20
        assert not report.openings & report.held_out


def test_another_process_plays_the_same_episodes():
    seeds = [0, EVAL_SEEDS[0]]
    code = "import json; from environments.plumbing.check import digests\n"
    code += f"print(json.dumps([digests(s, {seeds}) for s in {FAST}]))"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
    ).stdout  # fmt: skip
    assert json.loads(output.splitlines()[-1]) == [digests(spec, seeds) for spec in FAST]


@pytest.mark.parametrize("spec", [
    spec for spec in SPECS if spec.startswith(RETRIES) and not spec.endswith("self")
])  # fmt: skip
def test_the_third_unreadable_action_ends_the_episode(spec):
    env = make(spec)
    for seed in (0, 1):
        env.reset(seed)
        steps = [env.step("I resign") for _ in range(3)]
        assert [(s.reward, s.done) for s in steps] == [(-0.1, False), (-0.1, False), (-1.0, True)]
        assert steps[0].message and steps[1].message and steps[2].message is None
        assert steps[2].info["invalid"] is True and steps[2].info["correct"] is False


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_a_missing_library_is_a_usage_error_with_the_install_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    package = name.replace("_", "-")
    with pytest.raises(UsageError, match=rf"{package} is not installed: pip install -e .*envs"):
        make(name)
