"""Tic-tac-toe: the rules, the perfect player, the rewards of each side and the retries."""

import pytest

from environments import tic_tac_toe as game


def moves(env, *cells):
    """Plays the cells in self-play; returns the steps of the last move."""
    for cell in cells:
        steps = env.step({env.turn: f"<move>{cell}</move>"})
    return steps


def test_the_eight_lines_win_and_a_full_board_without_a_line_is_a_draw():
    lines = "XXX...... ...XXX... ......XXX X..X..X.. .X..X..X. ..X..X..X X...X...X ..X.X.X.."
    for board in lines.split():
        assert game.is_over(board) and not game.has_line(board, "O")
        assert (game.outcome(board, "X"), game.outcome(board, "O")) == (1.0, -1.0)
    assert not game.is_over("XX.X.....")
    assert game.is_over("XOXXOOOXX") and game.outcome("XOXXOOOXX", "X") == 0.0


@pytest.mark.parametrize("perfect", ["X", "O", "XO"])
def test_the_perfect_player_never_loses_and_draws_with_itself(perfect):
    seen, outcomes, boards = set(), set(), [(game.EMPTY, "X")]
    while boards:  # all games
        board, side = boards.pop()
        cells = game.best_moves(board, side) if side in perfect else game.free(board)
        for after in (game.place(board, cell, side) for cell in cells):
            if game.is_over(after):
                outcomes.add(game.outcome(after, perfect[0]))
            elif after not in seen:
                seen.add(after)
                boards.append((after, game.OTHER[side]))
    assert outcomes == ({0} if perfect == "XO" else {0, 1})


def test_a_demonstration_wins_soon_and_leaves_a_random_opponent_the_most_ways_to_lose():
    assert game.best_moves("...OXOXOX", "X") == [1, 3]  # 2 wins one move later
    assert game.best_moves("O..X.OXOX", "X") == [2, 3, 5]  # all draw; after 3, O must take 5
    assert game.worked_response("O..X.OXOX", "X") == "X wins: none. O wins: none. <move>3</move>"


@pytest.mark.parametrize("opponent", ["random", "perfect"])
@pytest.mark.parametrize("board, cell, reward, last", [
    ("XX.OO....", 3, 1.0, "You won. Board: X X X / O O . / . . ."),
    ("XOXXOO.XO", 7, 1.0, "You won. Board: X O X / X O O / X X O"),  # the last free cell
    ("XOXOOX.XO", 7, 0.0, "A draw. Board: X O X / O O X / X X O"),  # X fills the board
    ("XO.OOX.XO", 3, 0.0, "A draw. Board: X O X / O O X / O X O"),  # O fills it
    ("OOXXOXO..", 8, -1.0, "You lost. Board: O O X / X O X / O X O"),  # O takes 9
])  # fmt: skip
def test_rewards_and_last_board_of_a_win_a_draw_and_a_loss(board, cell, reward, last, opponent):
    env = game.tic_tac_toe(opponent)
    env.reset(0)
    env.board = board
    step = env.step(f"<move>{cell}</move>")
    assert (step.message["content"], step.reward, step.done) == (last, reward, True)
    # a draw is correct against the perfect opponent only
    assert step.info == {"correct": reward == 1.0 or (opponent == "perfect" and reward == 0.0)}


def test_in_self_play_each_agent_has_its_own_reward_and_retries():
    env = game.tic_tac_toe("self")
    env.reset(0)
    assert not any(step.done for step in moves(env, 1, 4, 2, 5, 9).values())
    steps = moves(env, 6)
    assert [(a, s.reward, s.done, s.info["correct"]) for a, s in sorted(steps.items())] == [
        ("O", 1.0, True, True), ("X", -1.0, True, False)]  # fmt: skip
    assert steps["X"].message["content"].startswith("You lost. ")
    env.reset(0)
    for invalid, mover in (("none", "X"), (5, "O")):  # the cell 5 is occupied then
        for _ in range(2):
            steps = moves(env, invalid)
            assert list(steps) == [mover] and steps[mover].reward == -0.1
        if mover == "X":
            assert "free: 1 2 3 4 5 6 7 8 9" in steps["X"].message["content"]
            moves(env, 5)
    rewards = {agent: (step.reward, step.done) for agent, step in moves(env, 5).items()}
    assert rewards == {"O": (-1.0, True), "X": (0.0, True)}
