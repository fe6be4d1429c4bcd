"""Tic-tac-toe: rules, the perfect player, what pays in each seat, and retries."""

import inspect
import random
import re
import time

import pytest

from core.types import UsageError
from environments.base import Env, MultiAgentEnv
from environments.registry import make
from environments.tic_tac_toe import (
    EMPTY,
    OTHER,
    AgainstOpponent,
    SelfPlay,
    best_moves,
    free,
    has_line,
    is_over,
    outcome,
    place,
    tic_tac_toe,
    value,
    wins,
)

OPENING = (
    "Tic-tac-toe: you are X. Cells are 1 to 9, row by row. Work it out, then end with "
    "<move>cell</move>. Board: "
)


def at(board, perfect=False, seed=0):
    """A game in the middle: `board` with X to move."""
    env = AgainstOpponent(perfect)
    env.reset(seed)
    env.board = board
    return env


def play(env, seed, hasty=False):
    """All that was said and paid in an episode as it is demonstrated."""
    said, rewards = [env.reset(seed)[0]["content"]], []
    while True:
        response = env.demonstrate(hasty)
        assert env.demonstrate(hasty) == response
        step = env.step(response)
        said += [response, step.message and step.message["content"]]
        rewards.append(step.reward)
        if step.done:
            return said, rewards, step


def moves(env, *cells):
    """Self-play: the cells in turn; the steps of the last."""
    for cell in cells:
        steps = env.step({env.turn: f"<move>{cell}</move>"})
    return steps


def test_make_returns_the_class_for_the_opponent_and_shows_the_option():
    assert isinstance(make("tic_tac_toe"), Env)
    assert isinstance(make("tic_tac_toe:opponent=perfect"), Env)
    assert isinstance(make("tic_tac_toe:opponent=self"), MultiAgentEnv)
    assert list(inspect.signature(tic_tac_toe).parameters) == ["opponent"]


def test_an_unknown_opponent_is_refused_in_one_line():
    with pytest.raises(UsageError, match="random, perfect or self, not 'human'"):
        make("tic_tac_toe:opponent=human")


@pytest.mark.parametrize(
    "board",
    "XXX...... ...XXX... ......XXX X..X..X.. .X..X..X. ..X..X..X X...X...X ..X.X.X..".split(),
)
def test_each_of_eight_lines_wins(board):
    assert has_line(board, "X") and not has_line(board, "O")
    assert is_over(board)
    assert (outcome(board, "X"), outcome(board, "O")) == (1.0, -1.0)


def test_three_marks_out_of_line_do_not_win():
    assert not is_over("XX.X.....")
    assert is_over("XOXXOOOXX") and outcome("XOXXOOOXX", "X") == 0.0


def test_wins_are_the_cells_that_complete_a_line():
    assert wins("XX.OO....", "X") == [3]
    assert wins("XX.OO....", "O") == [6]
    assert wins("X.X...X..", "X") == [2, 4, 5]
    assert wins(EMPTY, "X") == []


def test_the_empty_board_is_a_draw_and_a_sooner_win_is_worth_more():
    assert value(EMPTY, "X") == 0
    assert best_moves(EMPTY, "X") == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert best_moves("XX.OO....", "X") == [3]  # 6 would block first
    assert best_moves("X........", "O") == [5]  # elsewhere X can make two threats at once
    assert value("XX.......", "X") == pytest.approx(0.9)
    assert value("XX.......", "O") == pytest.approx(-(0.9**4))  # blocks one, X makes two more


def test_the_perfect_player_never_loses_to_a_random_one():
    rng = random.Random(0)
    outcomes = []
    for game in range(1000):
        board, side, perfect = EMPTY, "X", "XO"[game % 2]
        while not is_over(board):
            options = best_moves(board, side) if side == perfect else free(board)
            board, side = place(board, rng.choice(options), side), OTHER[side]
        outcomes.append(outcome(board, perfect))
    assert min(outcomes) == 0 and outcomes.count(1) > 800


def test_every_game_of_two_perfect_players_is_a_draw():
    seen, ended, open_boards = set(), set(), [(EMPTY, "X")]
    while open_boards:
        board, side = open_boards.pop()
        for cell in best_moves(board, side):
            after = place(board, cell, side)
            if is_over(after):
                ended.add(after)
            elif after not in seen:
                seen.add(after)
                open_boards.append((after, OTHER[side]))
    assert len(ended) > 10 and all(outcome(board, "X") == 0 for board in ended)


def test_the_perfect_opponent_never_loses_to_hasty_play():
    rewards = [play(tic_tac_toe("perfect"), seed, hasty=True)[1][-1] for seed in range(300)]
    assert set(rewards) == {-1.0, 0.0}


def test_the_seed_decides_who_begins():
    openings = [tic_tac_toe().reset(seed)[0]["content"] for seed in range(200)]
    assert all(text.startswith(OPENING) for text in openings)
    boards = [text.removeprefix(OPENING) for text in openings]
    assert {board.count("X") for board in boards} == {0}
    assert 70 < sum(board.count("O") == 0 for board in boards) < 130
    assert len(set(boards)) == 10  # empty, and O in each of nine cells


@pytest.mark.parametrize("opponent", ["random", "perfect"])
def test_same_seed_is_the_same_episode_whatever_was_played_before(opponent):
    env = tic_tac_toe(opponent)
    first = [play(env, 3), play(env, 3, hasty=True)]
    others = [play(env, seed)[0] for seed in range(4, 12)]
    env.reset(3)
    for _ in range(3):
        env.step("no move at all")  # uses the retries up
    random.seed(0)
    assert [play(env, 3), play(env, 3, hasty=True)] == first
    assert [play(tic_tac_toe(opponent), 3), play(tic_tac_toe(opponent), 3, True)] == first
    assert any(other != first[0][0] for other in others)


def test_demonstrations_mostly_beat_the_random_opponent_and_never_lose():
    rewards = []
    for seed in range(300):
        _, paid, step = play(tic_tac_toe(), seed)
        assert set(paid[:-1]) <= {0.0}
        assert step.info == {"correct": paid[-1] == 1.0}
        rewards.append(paid[-1])
    assert min(rewards) == 0 and rewards.count(1.0) > 270


def test_demonstrations_draw_with_the_perfect_opponent_which_is_correct():
    for seed in range(300):
        _, paid, step = play(tic_tac_toe("perfect"), seed)
        assert set(paid) == {0.0} and step.info == {"correct": True}


@pytest.mark.parametrize(
    "board, text",
    [
        ("XX.OO....", "X wins: 3. O wins: 6. <move>3</move>"),
        ("X..OO....", "X wins: none. O wins: 6. <move>6</move>"),
        ("X...O...X", "X wins: none. O wins: none."),
        ("X.XO.OX.O", "X wins: 2 5. O wins: 5. <move>2</move>"),
    ],
)
def test_a_demonstration_names_what_wins_and_what_must_be_blocked(board, text):
    assert at(board).demonstrate().startswith(text)


def test_a_hasty_demonstration_is_a_free_cell_drawn_evenly():
    counts = dict.fromkeys(range(1, 10), 0)
    for seed in range(900):
        env = tic_tac_toe()
        env.reset(seed)
        cell = int(re.fullmatch("<move>([1-9])</move>", env.demonstrate(hasty=True))[1])
        assert env.board[cell - 1] == "."
        counts[cell] += 1
    assert min(counts.values()) > 60


def test_a_win_pays_1():
    step = at("XX.OO....").step("<move>3</move>")
    assert (step.message, step.reward, step.done) == (None, 1.0, True)
    assert step.info == {"correct": True}


@pytest.mark.parametrize("perfect", [False, True])
def test_a_full_board_pays_0_and_is_correct_against_the_perfect_opponent_only(perfect):
    for board, cell in [("XOXOOX.XO", 7), ("XO.OOX.XO", 3)]:  # X fills it, or O does
        step = at(board, perfect).step(f"<move>{cell}</move>")
        assert (step.message, step.reward, step.done) == (None, 0.0, True)
        assert step.info == {"correct": perfect}


def test_the_last_cell_may_win():
    assert at("XOXXOO.XO").step("<move>7</move>").reward == 1.0


@pytest.mark.parametrize("perfect", [False, True])
def test_a_loss_pays_minus_1(perfect):
    step = at("OOXXOXO..", perfect).step("<move>8</move>")  # O has but 9, and wins by it
    assert (step.message, step.reward, step.done) == (None, -1.0, True)
    assert step.info == {"correct": False}


def test_a_reply_shows_the_cell_and_the_board():
    step = at("O...X....", perfect=True).step("<move>2</move>")  # O must block
    assert (step.reward, step.done, step.info) == (0.0, False, {"correct": False})
    assert step.message["content"] == "O takes 8. Board: O X . / . X . / . O ."


@pytest.mark.parametrize(
    "response, cell",
    [
        ("<move>5</move>", 5),
        ("X wins: none. <move> 5 </move>", 5),
        ('{"move": 5}', 5),
        ('{"move": "5"}', 5),
        ("<move>1</move> no, <move>5</move>", 5),
        ("<move>5</move> or <move>10</move>", 5),
        ("5", 5),
        (" 5.\n", 5),
        ("My move is 5.", 5),
        ("I take cell 5", 5),
        ("move: 5", 5),
    ],
)
def test_the_last_well_formed_move_counts_in_each_form(response, cell):
    env = at(EMPTY)
    step = env.step(response)
    assert step.reward == 0 and env.board[cell - 1] == "X"
    assert env.board.count("X") == env.board.count("O") == 1


@pytest.mark.parametrize(
    "response",
    [
        "",
        "I resign",
        "<move>0</move>",
        "<move>10</move>",
        "<move>five</move>",
        "<move>5.0</move>",
        '{"move": 5.0}',
        '{"move": true}',
        "<move>٥</move>",
        "<move>1</move>",  # taken
        "<move>5</move> no, <move>1</move>",  # the last is taken: no falling back
        "45",
    ],
)
def test_an_invalid_move_is_forgiven_twice_then_forfeits(response):
    env = at("X.O......")
    for _ in range(2):
        step = env.step(response)
        assert (step.reward, step.done, env.board) == (-0.1, False, "X.O......")
        assert step.message["content"] == "End with <move>cell</move>; free: 2 4 5 6 7 8 9"
        assert step.info == {"correct": False, "invalid": True}
    step = env.step(response)
    assert (step.message, step.reward, step.done) == (None, -1.0, True)
    assert step.info == {"correct": False, "invalid": True}


def test_retries_are_those_of_the_whole_episode_and_new_in_the_next():
    env = at(EMPTY, perfect=True)
    rewards = [env.step(text).reward for text in ("?", "<move>5</move>", "?")]
    assert rewards == [-0.1, 0.0, -0.1]
    assert env.step("?").done
    env.reset(0)
    assert [env.step("?").done for _ in range(3)] == [False, False, True]


def test_in_self_play_x_begins_and_o_joins_with_the_rules():
    env = SelfPlay()
    assert env.reset(0) == {"X": [{"role": "user", "content": OPENING + ". . . / . . . / . . ."}]}
    steps = moves(env, 5)
    assert (steps["X"].message, steps["X"].reward, steps["X"].done) == (None, 0.0, False)
    rules = OPENING.replace("are X", "are O")
    assert steps["O"].message["content"] == rules + ". . . / . X . / . . ."
    steps = moves(env, 1)
    assert steps["O"].message is None and not steps["O"].done
    assert steps["X"].message["content"] == "O takes 1. Board: O . . / . X . / . . ."


@pytest.mark.parametrize(
    "cells, x, o",
    [
        ((1, 4, 2, 5, 3), 1.0, -1.0),
        ((1, 4, 2, 5, 9, 6), -1.0, 1.0),
        ((1, 2, 3, 5, 4, 6, 8, 7, 9), 0.0, 0.0),
    ],
)
def test_in_self_play_each_agent_is_paid_on_its_own_account(cells, x, o):
    env = SelfPlay()
    env.reset(0)
    assert not any(step.done for step in moves(env, *cells[:-1]).values())
    steps = moves(env, cells[-1])
    assert {agent: step.reward for agent, step in steps.items()} == {"X": x, "O": o}
    assert all(step.done and step.message is None for step in steps.values())
    assert {agent: step.info["correct"] for agent, step in steps.items()} == {
        "X": x == 1.0,
        "O": o == 1.0,
    }


def test_in_self_play_retries_are_an_agents_own_and_a_forfeit_spares_the_other():
    env = SelfPlay()
    env.reset(0)
    for _ in range(2):
        steps = moves(env, "none")
        assert list(steps) == ["X"] and steps["X"].reward == -0.1 and not steps["X"].done
        assert "free: 1 2 3 4 5 6 7 8 9" in steps["X"].message["content"]
    moves(env, 5)
    for _ in range(2):  # taken
        steps = moves(env, 5)
        assert list(steps) == ["O"] and steps["O"].reward == -0.1
    steps = moves(env, 5)
    assert {agent: (step.reward, step.done) for agent, step in steps.items()} == {
        "O": (-1.0, True),
        "X": (0.0, True),
    }
    assert not steps["X"].info["correct"]
    env.reset(1)
    assert not moves(env, "none")["X"].done  # retries are new


HOSTILE = [
    "move " * 20_000,
    "cell 5 " * 14_000 + "?x",
    "5" + "." * 100_000 + "x",
    " " * 100_000 + "x",
    "<move>" * 16_000,
    "</move>" * 14_000,
    '{"move": ' * 11_000,
    "[" * 100_000,
    "<move>\ud800</move>",
    "<move>" + "9" * 90_000 + "</move>",
    '{"move": ' + "9" * 5000 + "}",
    "\0" * 1000,
]


@pytest.mark.parametrize("response", HOSTILE)
def test_a_hostile_response_is_refused_at_once(response):
    env, both = at(EMPTY), SelfPlay()
    both.reset(0)
    started = time.perf_counter()
    steps = [env.step(response), both.step({"X": response})["X"]]
    assert time.perf_counter() - started < 1  # seconds
    assert [step.reward for step in steps] == [-0.1, -0.1]


def test_messages_are_short():
    for seed in range(50):
        said, _, _ = play(tic_tac_toe(), seed)
        assert len(said[0]) < 150
        assert all(len(text) < 64 for text in said[1:] if text)
