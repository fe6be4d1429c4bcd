"""TextArena: turns, observations, rewards, seeds, and the global random generators."""

import random

import numpy as np
import pytest
from conftest import needs

from environments.adapters.textarena import TextArena
from environments.plumbing.registry import make

pytestmark = needs("envs", "textarena")


def play(env, seed, *actions):
    """Plays each action for the agent that is asked; returns (agents asked, last steps)."""
    (agent,) = env.reset(seed)
    asked = []
    for action in actions:
        asked.append(agent)
        steps = env.step({agent: action})
        agent = next((a for a, step in steps.items() if step.message), None)
    return asked, steps


def test_two_players_take_turns_and_the_winner_gets_1():
    env = make("textarena")
    opening = env.reset(0)
    assert list(opening) == ["player_0"] and "Tic Tac Toe" in opening["player_0"][0]["content"]
    asked, last = play(env, 0, "[0]", "[3]", "[1]", "[4]", "[2]")  # the upper row
    assert asked == ["player_0", "player_1"] * 2 + ["player_0"]
    assert {a: (s.reward, s.done, s.message) for a, s in last.items()} == {
        "player_0": (1, True, None), "player_1": (-1, True, None)}  # fmt: skip
    assert last["player_0"].info == {"correct": True, "invalid": False}
    assert last["player_1"].info == {"correct": False, "invalid": False}


def test_observation_is_what_others_said_since_the_last_turn():
    env = TextArena("TicTacToe-v0")
    env.reset(0)
    steps = env.step({"player_0": "middle: [4]"})
    assert (steps["player_0"].message, steps["player_0"].done) == (None, False)
    text = steps["player_1"].message["content"]
    assert "You are Player 1" in text and "[Player 0] middle: [4]" in text
    text = env.step({"player_1": "corner: [0]"})["player_0"].message["content"]
    assert "corner: [0]" in text and "middle" not in text and "You are Player 0" not in text


@pytest.mark.parametrize("id", ["KuhnPoker-v0", "Mastermind-v0"])
def test_a_game_and_other_code_do_not_draw_from_the_same_generators(id):
    env, drawn = TextArena(id), []

    def episode(seed):
        (agent,) = opening = env.reset(seed)
        history = [opening]
        for action in ["[roll]", "[1 2 3 4]", "[check]", "[bet]"] * 3:
            drawn.append((random.random(), np.random.random()))
            history.append(steps := env.step({agent: action}))
            agent = next((a for a, step in steps.items() if step.message), None)
            if agent is None:
                break
        return history

    random.seed(9), np.random.seed(9)
    first, *others = [episode(seed) for seed in (1_999_999_999, *range(5), 1_999_999_999)]
    assert first == others[-1] and any(other != first for other in others)
    random.seed(9), np.random.seed(9)
    assert drawn == [(random.random(), np.random.random()) for _ in drawn]


def test_a_game_that_raises_costs_its_player_and_is_named_once(capsys):
    env = TextArena("CharacterConclave-v0", players=3)  # its step raises, whatever is answered
    for seed in (0, 1):
        _, steps = play(env, seed, "hello")
        assert [steps[agent].reward for agent in env.agents] == [-1.0, 0.0, 0.0]
        assert steps["player_0"].info == {"correct": False, "invalid": True}
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("textarena:id=CharacterConclave-v0 raised TypeError: ")
    assert "the player gets -1" in line
