"""TextArena: whose turn it is, what is shown and paid, and that the global draws stay."""

import random
import sys
import time

import pytest

pytest.importorskip("textarena")

import numpy as np

import environments.adapters.textarena  # noqa: F401  registers
from core.types import UsageError
from environments.adapters.textarena import TextArena
from environments.registry import make


def play(env, seed, *actions):
    """Each action is that of whoever is asked; returns the agents asked, and the last steps."""
    (agent,) = env.reset(seed)
    asked = []
    for action in actions:
        asked.append(agent)
        steps = env.step({agent: action})
        following = [a for a, step in steps.items() if step.message]
        agent = following[0] if following else None
    return asked, steps


def test_two_players_take_turns_and_the_winner_is_paid():
    env = make("textarena")
    opening = env.reset(0)
    assert list(opening) == ["player_0"] and "Tic Tac Toe" in opening["player_0"][0]["content"]
    asked, last = play(env, 0, "[0]", "[3]", "[1]", "[4]", "[2]")  # the upper row
    assert asked == ["player_0", "player_1"] * 2 + ["player_0"]
    assert {a: (s.reward, s.done, s.message) for a, s in last.items()} == {
        "player_0": (1, True, None), "player_1": (-1, True, None)}  # fmt: skip
    assert last["player_0"].info == {"correct": True, "invalid": False}
    assert last["player_1"].info == {"correct": False, "invalid": False}


def test_a_draw_pays_nothing():
    cells = [0, 1, 2, 4, 3, 5, 7, 6, 8]  # no three in a row for either
    _, last = play(TextArena("TicTacToe-v0"), 0, *(f"[{cell}]" for cell in cells))
    assert [(s.reward, s.done, s.info["correct"]) for s in last.values()] == [(0, True, False)] * 2


def test_an_agent_is_shown_what_is_new_but_not_its_own_words():
    env = TextArena("TicTacToe-v0")
    env.reset(0)
    steps = env.step({"player_0": "middle: [4]"})
    assert (steps["player_0"].message, steps["player_0"].done) == (None, False)
    text = steps["player_1"].message["content"]
    assert "You are Player 1" in text and "[Player 0] middle: [4]" in text
    text = env.step({"player_1": "corner: [0]"})["player_0"].message["content"]
    assert "corner: [0]" in text and "middle" not in text and "You are Player 0" not in text


def test_an_invalid_move_is_forgiven_once_and_then_loses():
    env = TextArena("TicTacToe-v0")
    env.reset(0)
    steps = env.step({"player_0": "pass"})
    assert list(steps) == ["player_0"] and "invalid move" in steps["player_0"].message["content"]
    steps = env.step({"player_0": "[9]"})
    assert [step.reward for step in steps.values()] == [-1, 1]
    assert steps["player_0"].info == {"correct": False, "invalid": True}
    assert steps["player_1"].info == {"correct": True, "invalid": False}


@pytest.mark.parametrize(
    "response", ['not [0], so {"action": "[4]"}', "[0]? <action>[4]</action>", "[4] then [0]"]
)
def test_an_action_may_be_marked_otherwise_the_game_reads_all(response):
    env = TextArena("TicTacToe-v0")
    env.reset(0)
    assert "in cell 4" in env.step({"player_0": response})["player_1"].message["content"]


def test_a_game_for_one_has_one_agent():
    env = make("textarena:id=GuessTheNumber-v0")
    assert list(env.reset(3)) == ["player_0"]
    number = env.game.state.game_state["game_number"]
    last = env.step({"player_0": f"[{number}]"})
    assert list(last) == ["player_0"] and last["player_0"].info["correct"] is True
    assert last["player_0"].reward == 1


def test_the_number_of_players_can_be_chosen():
    assert TextArena("LiarsDice-v0").players == 2
    assert TextArena("LiarsDice-v0", players=4).players == 4


@pytest.mark.parametrize("id", ["KuhnPoker-v0", "Mastermind-v0", "PigDice-v0", "LiarsDice-v0"])
def test_the_seed_decides_everything_and_the_global_draws_stay(id):
    actions = ["[roll]", "[1 2 3 4]", "[check]", "[bet]"]

    def episode(env, seed):
        (agent,) = opening = env.reset(seed)
        seen = [opening]
        for action in actions * 3:
            random.random(), np.random.random()  # others draw meanwhile
            steps = env.step({agent: action})
            seen.append(steps)
            following = [a for a, step in steps.items() if step.message]
            if not following:
                break
            agent = following[0]
        return seen

    env = TextArena(id)
    first = episode(env, 1_999_999_999)
    others = [episode(env, seed) for seed in range(5)]
    random.seed(9), np.random.seed(9)
    assert episode(env, 1_999_999_999) == first == episode(TextArena(id), 1_999_999_999)
    assert any(other != first for other in others)
    drawn = [(random.random(), np.random.random()) for _ in range(100)]
    random.seed(9), np.random.seed(9)
    assert drawn[-1] in [(random.random(), np.random.random()) for _ in range(200)]


def test_resetting_and_playing_do_not_move_the_global_generators():
    random.seed(9), np.random.seed(9)
    play(TextArena("PigDice-v0"), 4, "[roll]", "[hold]")
    drawn = random.random(), np.random.random()
    random.seed(9), np.random.seed(9)
    assert drawn == (random.random(), np.random.random())


def test_a_response_that_makes_the_game_fail_ends_it(monkeypatch):
    env = TextArena("TicTacToe-v0")
    env.reset(0)

    def fail(action):
        raise KeyError(action)

    monkeypatch.setattr(env.env, "step", fail)
    steps = env.step({"player_0": "[0]"})
    assert [(s.reward, s.done) for s in steps.values()] == [(-1, True), (0, True)]
    assert steps["player_0"].info["correct"] is False


@pytest.mark.parametrize(
    "options, message",
    [
        ("id=Nope-v0", "can't begin 'Nope-v0'"),
        ("id=", "can't begin ''"),
        ("id=TicTacToe-v0,players=3", "can't begin 'TicTacToe-v0': The number of players has to"),
        ("players=21", "players is 0 to 20"),
    ],
)
def test_a_bad_option_is_one_clear_line(options, message):
    with pytest.raises(UsageError, match=message) as error:
        make(f"textarena:{options}")
    assert "\n" not in str(error.value)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UsageError, match="needs textarena: pip install"):
        make("textarena")


HOSTILE = [
    "",
    "[" * 100_000,
    "{" * 100_000,
    "\ud800",
    "[\ud800]",
    "\0" * 1000,
    f"[{'9' * 5000}]",
    f'{{"action": "{"x" * 10_000}"}}',
    "[٣]",
    "[-1]",
    "[[1]]",
]


@pytest.mark.parametrize("index", range(len(HOSTILE)))
@pytest.mark.parametrize("id", ["TicTacToe-v0", "GuessTheNumber-v0", "KuhnPoker-v0", "Sudoku-v0"])
def test_a_hostile_response_raises_nothing_and_is_fast(id, index):
    env = TextArena(id)
    (agent,) = env.reset(0)
    started = time.perf_counter()
    steps = env.step({agent: HOSTILE[index]})
    assert time.perf_counter() - started < 0.5
    assert steps and steps[agent].reward <= 0
