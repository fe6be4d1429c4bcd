"""Connect four: lines in all directions, the search, the rewards and the retries."""

import random

import pytest

from environments.connect4 import Stones, best_moves, connect4, has_line

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
    """Returns the stones of a board as text; empty upper rows may be omitted."""
    rows = text.split()[::-1]
    return Stones(*(
        bits((c, r) for r, row in enumerate(rows) for c in range(7) if row[c] == side)
        for side in "XO"
    ))  # fmt: skip


def test_has_line_finds_the_69_lines_and_nothing_else():
    assert len(LINES) == 69
    for line in LINES:
        assert has_line(bits(line))
        assert not any(has_line(bits(line - {cell})) for cell in line)
    rng = random.Random(0)
    for _ in range(1000):
        cells = rng.sample([(c, r) for c in range(7) for r in range(6)], 14)
        assert has_line(bits(cells)) is any(line <= set(cells) for line in LINES)


def test_minimax_wins_before_it_blocks_and_sees_a_double_threat():
    assert best_moves(stones("XXX.OOO"), "X", 4) == [4]
    assert best_moves(stones("O.....X O.....X O......"), "X", 2) == [1]
    # three in the middle of the lowest row with both ends open
    assert best_moves(stones("O...... O.XX..."), "X", 4) == [5]


NEARLY_FULL = ".OXOXOX XOXOXOX OXOXOXO OXOXOXO XOXOXOX XOXOXOX"


@pytest.mark.parametrize("board, opponent, column, reward, last", [
    ("OOO.... XXX....", "random", 4, 1.0, "You won. OOO.... XXXX..."),
    ("X...... OOO.XX.", "minimax", 7, -1.0, "You lost. X...... OOOOXXX"),
    (NEARLY_FULL, "random", 1, 0.0, f"A draw. {NEARLY_FULL.replace('.', 'X')}"),
])  # fmt: skip
def test_rewards_and_last_board(board, opponent, column, reward, last):
    env = connect4(opponent, 1)
    env.reset(0)
    env.board = stones(board)
    step = env.step(f"<move>{column}</move>")
    assert (step.reward, step.done) == (reward, True)
    assert " ".join(step.message["content"].replace(".......\n", "").split("\n")) == last
    assert step.info == {"correct": reward == 1.0}
    env.board = stones("...O... ...X... ...O... ...X... ...O... ...X...")  # the middle is full
    assert env.trivial() == "<move>3</move>"
