"""Connect four: lines in all directions, the search, the rewards and the retries."""

import random

import pytest

from environments.connect4 import (
    ConnectFour,
    best_moves,
    has_line,
    legal,
    search,
    stone,
    wins,
)

LINES = {
    frozenset((c + k * right, r + k * up) for k in range(4))
    for c in range(7)
    for r in range(6)
    for right, up in [(1, 0), (0, 1), (1, 1), (1, -1)]
    if c + 3 * right < 7 and 0 <= r + 3 * up < 6
}


def bits(cells):
    return sum(1 << 7 * column + row for column, row in cells)


def stones(text):
    """Returns the bits of X and O of a board as text; empty upper rows may be omitted."""
    rows = text.split()[::-1]
    return tuple(
        bits((c, r) for r, row in enumerate(rows) for c in range(7) if row[c] == side)
        for side in "XO"
    )


def at(text, opponent="random", depth=4):
    """Returns an episode on a board with X to move."""
    env = ConnectFour(opponent, depth)
    env.reset(0)
    env.x, env.o = stones(text)
    return env


def test_has_line_finds_the_69_lines_and_nothing_else():
    assert len(LINES) == 69
    for line in LINES:
        assert has_line(bits(line))
        assert not any(has_line(bits(line - {cell})) for cell in line)
    rng = random.Random(0)
    for _ in range(1000):
        cells = rng.sample([(c, r) for c in range(7) for r in range(6)], 14)
        assert has_line(bits(cells)) is any(line <= set(cells) for line in LINES)


def test_a_stone_lands_on_the_others_and_a_full_column_is_closed():
    taken = 0
    for row in range(6):
        assert 2 in legal(taken)
        assert stone(taken, 2) == 1 << 14 + row
        taken |= stone(taken, 2)
    assert legal(taken) == [3, 4, 1, 5, 0, 6]


def plain_minimax(own, other, depth):
    """The search without pruning."""
    if depth == 0 or not legal(own | other):
        return 0
    if wins(own, other):
        return depth
    return max(
        -plain_minimax(other, own | stone(own | other, c), depth - 1) for c in legal(own | other)
    )


def test_search_is_minimax():
    rng = random.Random(0)
    scores = set()
    for _ in range(100):
        own = other = 0
        for _ in range(rng.randrange(8, 30)):
            if not legal(own | other):
                break
            after = own | stone(own | other, rng.choice(legal(own | other)))
            own, other = other, after
            if has_line(other):
                own = other = 0
        score = search(own, other, 3)
        assert score == plain_minimax(own, other, 3)
        scores.add(score)
        best = best_moves(own, other, 3)
        for column in legal(own | other):
            after = own | stone(own | other, column)
            column_score = 3 if has_line(after) else -plain_minimax(other, after, 2)
            assert (column_score == score) is (column in best)
    assert {-2.0, 0.0, 1.0, 3.0} <= scores


def test_minimax_wins_before_it_blocks_and_sees_a_double_threat():
    assert best_moves(*stones("XXX.OOO"), 4) == [3]
    assert best_moves(*stones("O.....X O.....X O......"), 2) == [0]
    # three in the middle of the lowest row with both ends open
    assert best_moves(*stones("O...... O.XX..."), 4) == [4]


def test_a_demonstration_names_the_winning_columns_and_does_not_change_the_episode():
    env = at("O...... O...... O.XXX..")
    before = env.x, env.o, env.rng.getstate()
    # 2 and 6 win; both are equally near the centre, and the left one is tried first
    assert env.demonstrate() == "X wins: 2 6. O wins: 1. <move>2</move>"
    assert (env.x, env.o, env.rng.getstate()) == before


NEARLY_FULL = ".OXOXOX XOXOXOX OXOXOXO OXOXOXO XOXOXOX XOXOXOX"


@pytest.mark.parametrize("board, opponent, column, reward", [
    ("OOO.... XXX....", "random", 4, 1.0), ("X...... OOO.XX.", "minimax", 7, -1.0),
    (NEARLY_FULL, "random", 1, 0.0),  # X drops the last stone
    (NEARLY_FULL.replace(".O", "..", 1), "random", 1, 0.0),  # O does
])  # fmt: skip
def test_rewards_of_a_win_a_loss_and_a_full_board(board, opponent, column, reward):
    step = at(board, opponent, 1).step(f"<move>{column}</move>")
    assert (step.message, step.reward, step.done) == (None, reward, True)
    assert step.info == {"correct": reward == 1.0}


@pytest.mark.parametrize("response", [
    "44", "<move>8</move>",
    "<move>1</move>",  # full
    "<move>4</move> no, <move>1</move>",  # the last one counts, although it is full
])  # fmt: skip
def test_an_invalid_move_changes_nothing_and_lists_the_open_columns(response):
    env = at("O...... X...... O...... X...... O...... X......")
    before = env.x, env.o
    step = env.step(response)
    assert (step.reward, step.done, env.x, env.o) == (-0.1, False, *before)
    assert step.message["content"] == "End with <move>column</move>; open: 2 3 4 5 6 7"
