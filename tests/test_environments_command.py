"""`python -m environments`: the list, an episode to watch, an episode to play."""

import re

import pytest

import environments.__main__ as command
from environments.plumbing.registry import list_envs


@pytest.fixture
def run(capsys):
    """Runs `python -m environments ARGS`; returns its stdout."""

    def run(*args):
        assert command.execute([*args]) == 0
        return capsys.readouterr().out

    return run


def printed_return(out):
    return float(re.search(r"sum of rewards: (\S+)\n$", out)[1])


def test_list_names_every_environment_with_its_options(run):
    out = run()
    assert all(name[:8] in out for name in list_envs())
    assert "n_hops" in out and "opponent" in out and "afternoon" not in out


@pytest.mark.parametrize("spec", ["reverse", "tic_tac_toe:opponent=self", "calculator"])
def test_show_plays_every_environment_and_repeats_the_episode_of_a_seed(spec, run):
    out = run("show", spec, "--seed", "1")
    assert run("show", spec, "--seed", "1") == out
    rewards = [float(x) for x in re.findall(r" ?reward ([+-]\S+)\n", out)]
    assert rewards and printed_return(out) == pytest.approx(sum(rewards), abs=0.01)
    assert "demonstrator: " in out and "guess: " not in out
    assert ("tool: " in out) is (spec == "calculator")


def test_play_sends_the_typed_responses_to_the_environment(monkeypatch, run):
    typed = iter(["no idea", "<move>5</move>", *(f"<move>{i}</move>" for i in range(1, 10))])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    out = run("play", "tic_tac_toe:opponent=perfect", "--seed", "2")
    assert "reward -0.1" in out and "O takes" in out and "demonstrator" not in out
    assert printed_return(out) <= 0  # the perfect player never loses


def test_play_asks_each_of_several_agents_by_its_name(monkeypatch, run):
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or "?")
    out = run("play", "iterated_game:opponent=self")
    assert asked == ["row, you: ", "column, you: "] * 3
    assert out.index("row, environment: Each") < out.index("column, environment: Each")
    assert printed_return(out) == pytest.approx(-2.4) and out.count(", the end: ") == 2
