"""Tic-tac-toe: the rules, the perfect player, the rewards of each side and the retries."""

import pytest

from environments.plumbing.board_games import OTHER
from environments.tic_tac_toe import EMPTY, GAME, best_moves, free, has_line, place, tic_tac_toe


def at(board, opponent):
    """Returns an episode on `board` with X to move."""
    env = tic_tac_toe(opponent)
    env.reset(0)
    env.board = board
    return env


def moves(env, *cells):
    """Plays the cells in self-play; returns the steps of the last move."""
    for cell in cells:
        steps = env.step({env.turn: f"<move>{cell}</move>"})
    return steps


def test_the_eight_lines_win_and_a_full_board_without_a_line_is_a_draw():
    lines = "XXX...... ...XXX... ......XXX X..X..X.. .X..X..X. ..X..X..X X...X...X ..X.X.X.."
    for board in lines.split():
        assert has_line(board, "X") and not has_line(board, "O") and GAME.is_over(board)
        assert (GAME.outcome(board, "X"), GAME.outcome(board, "O")) == (1.0, -1.0)
    assert not GAME.is_over("XX.X.....")
    assert GAME.is_over("XOXXOOOXX") and GAME.outcome("XOXXOOOXX", "X") == 0.0


@pytest.mark.parametrize("perfect", "XO")
def test_the_perfect_player_never_loses_and_draws_with_itself(perfect):
    for other_is_perfect in (False, True):
        seen, outcomes, boards = set(), set(), [(EMPTY, "X")]
        while boards:  # all games
            board, side = boards.pop()
            is_perfect = other_is_perfect or side == perfect
            for cell in best_moves(board, side) if is_perfect else free(board):
                after = place(board, cell, side)
                if GAME.is_over(after):
                    outcomes.add(GAME.outcome(after, perfect))
                elif after not in seen:
                    seen.add(after)
                    boards.append((after, OTHER[side]))
        assert outcomes == ({0} if other_is_perfect else {0, 1})


@pytest.mark.parametrize("opponent", ["random", "perfect"])
@pytest.mark.parametrize("board, cell, reward, last", [
    ("XX.OO....", 3, 1.0, "You won. Board: X X X / O O . / . . ."),
    ("XOXXOO.XO", 7, 1.0, "You won. Board: X O X / X O O / X X O"),  # the last free cell
    ("XOXOOX.XO", 7, 0.0, "A draw. Board: X O X / O O X / X X O"),  # X fills the board
    ("XO.OOX.XO", 3, 0.0, "A draw. Board: X O X / O O X / O X O"),  # O fills it
    ("OOXXOXO..", 8, -1.0, "You lost. Board: O O X / X O X / O X O"),  # O takes 9
])  # fmt: skip
def test_rewards_and_last_board_of_a_win_a_draw_and_a_loss(board, cell, reward, last, opponent):
    step = at(board, opponent).step(f"<move>{cell}</move>")
    assert (step.message["content"], step.reward, step.done) == (last, reward, True)
    # a draw is correct against the perfect opponent only
    assert step.info == {"correct": reward == 1.0 or (opponent == "perfect" and reward == 0.0)}


def test_in_self_play_each_agent_has_its_own_reward():
    env = tic_tac_toe("self")
    env.reset(0)
    assert not any(step.done for step in moves(env, 1, 4, 2, 5, 9).values())
    steps = moves(env, 6)
    x, o = steps["X"], steps["O"]
    assert (x.reward, x.done, x.info) == (-1.0, True, {"correct": False})
    assert (o.reward, o.done, o.info) == (1.0, True, {"correct": True})
    assert x.message["content"].startswith("You lost. ")
    assert o.message["content"].startswith("You won. ")


def test_in_self_play_each_agent_has_its_own_retries():
    env = tic_tac_toe("self")
    env.reset(0)
    for _ in range(2):
        steps = moves(env, "none")
        assert list(steps) == ["X"] and steps["X"].reward == -0.1 and not steps["X"].done
        assert "free: 1 2 3 4 5 6 7 8 9" in steps["X"].message["content"]
    moves(env, 5)
    for _ in range(2):  # occupied
        steps = moves(env, 5)
        assert list(steps) == ["O"] and steps["O"].reward == -0.1
    steps = moves(env, 5)
    rewards = {agent: (step.reward, step.done) for agent, step in steps.items()}
    assert rewards == {"O": (-1.0, True), "X": (0.0, True)}
