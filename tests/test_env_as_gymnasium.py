"""Our environments as Gymnasium's: its own checker, seeds, and what is passed through."""

import sys
import warnings

import pytest

pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env

from core.types import UsageError
from environments.adapters.as_gymnasium import as_gymnasium
from environments.base import Env, Step
from environments.letter_counting import LetterCounting
from environments.parsing import Retries, user


class Echo(Env):
    """Says what it was told, twice; a system message, and characters outside ASCII."""

    def reset(self, seed):
        self.retries = Retries()
        self.turns = 0
        return [{"role": "system", "content": "≤ 2 turns"}, user(f"seed {seed}")]

    def step(self, response):
        self.turns += 1
        if self.turns == 3:
            return Step(None, 1, True, {"correct": True})
        return Step(user(response), 0.25, False)


@pytest.mark.parametrize("env", [LetterCounting(2), Echo()])
def test_gymnasium_finds_no_fault(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # the render check asks for a registered spec, and we draw nothing
        check_env(as_gymnasium(env), skip_render_check=True)


def test_it_plays_through_with_our_rewards_and_info():
    env = as_gymnasium(Echo())
    assert env.reset(seed=7) == ("≤ 2 turns\n\nseed 7", {})
    assert env.reset(seed=7)[0] in env.observation_space
    assert env.step("a") == ("a", 0.25, False, False, {})
    assert env.step("b") == ("b", 0.25, False, False, {})
    last = env.step("c")
    assert last == ("", 1.0, True, False, {"correct": True})
    assert type(last[1]) is float and "" in env.observation_space


def test_a_seed_names_our_task_and_later_resets_draw_from_it():
    ours = LetterCounting(2)
    env, other = as_gymnasium(LetterCounting(2)), as_gymnasium(LetterCounting(2))
    assert env.reset(seed=5)[0] == ours.reset(5)[0]["content"]
    other.reset(seed=5)
    drawn = [env.reset()[0] for _ in range(3)]
    assert drawn == [other.reset()[0] for _ in range(3)] and len(set(drawn)) == 3
    ours.reset(5)
    env.reset(seed=5)
    assert env.step(ours.demonstrate())[1] == 1.0


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UsageError, match="needs gymnasium: pip install"):
        as_gymnasium(Echo())
