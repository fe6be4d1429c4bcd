"""Connect four, as X against a random O or a minimax O, or against itself.

Observation: the rules and the board in the first message, later O's move and the board. The board
has six rows of seven columns, the top row first. The rules are one line:

    Connect four: you are X. Drop stones in columns 1 to 7; four in a line win. Work it out, then
    end with <move>column</move>.
    .......
    .......
    .......
    .......
    .......
    ...O...

    O drops in 4.
    (the board)

The seed decides which side begins and which moves O draws. X moves at most 21 times; against a
strong O often more than ten times, so set --max-turns accordingly. Reward of each response:

     1.0    four in a row, in any direction: the end; only then `info["correct"]` is True
     0.0    the game continues, or the board is full (the end)
    -1.0    O has four in a row: the end
    -0.1    an unreadable or full column, twice per episode; the third costs -1 and ends it

With opponent=self two agents, "X" (who begins) and "O", act in turn, as in tic_tac_toe.

>>> env = connect4()
>>> env.reset(seed=1)[0]["content"].splitlines()[-1]
'......O'
>>> env.demonstrate()
'X wins: none. O wins: none. <move>4</move>'
>>> env.step(env.demonstrate()).message["content"].splitlines()[0]
'O drops in 7.'
"""

import math
from typing import Literal, NamedTuple

from environments.base import Env, MultiAgentEnv, check_range
from environments.plumbing.board_games import AgainstOpponent, BoardGame, SelfPlay

# Bitboard: the stones of a side are the bits of one integer, bit 7 * column + row, row 0 at the
# bottom. Bit 6 of each column stays 0: no line continues from the top of a column into the next.
COLUMNS, ROWS, STRIDE = 7, 6, 7
DIRECTIONS = (1, STRIDE - 1, STRIDE, STRIDE + 1)  # bit offsets: up, down right, right, up right
CENTRE_FIRST = (3, 2, 4, 1, 5, 0, 6)  # columns from 0; most lines pass through the centre
MIN_DEMO_DEPTH = 4  # search depth of demonstrations, unless that of the opponent is larger
Opponent = Literal["random", "minimax", "self"]


class Stones(NamedTuple):
    """The board: the stones of each side; as text, of both."""

    X: int = 0
    O: int = 0  # noqa: E741

    def __str__(self) -> str:
        return str(self.X | self.O)


def connect4(opponent: Opponent = "random", depth: int = 4) -> Env | MultiAgentEnv:
    """`opponent`: random, minimax or self; `depth`: search depth of minimax in moves, 1 to 6."""
    check_range("depth", depth, 1, 6)
    game = BoardGame(
        rules="Connect four: you are {side}. Drop stones in columns 1 to 7; four in a line win.",
        move="column", takes="drops in", free="open",
        plain=r"(?:^|move is|move:|column|drop in|play) *([1-7])\W*$",
        start=Stones(), show=show, has_line=lambda stones, side: has_line(getattr(stones, side)),
        legal=lambda stones: [column + 1 for column in legal(stones.X | stones.O)], place=place,
        best_moves=lambda stones, side: best_moves(stones, side, depth),
        best_move=lambda stones, side: best_moves(stones, side, max(depth, MIN_DEMO_DEPTH))[0],
    )  # fmt: skip
    return SelfPlay(game) if opponent == "self" else AgainstOpponent(game, opponent == "minimax")


def place(stones: Stones, column: int, side: str) -> Stones:
    """Returns the board after `side` has dropped a stone in `column`, 1 to 7."""
    new = getattr(stones, side) | stone(stones.X | stones.O, column - 1)
    return stones._replace(**{side: new})


def legal(taken: int) -> list[int]:
    """Returns the columns (from 0) that are not full, the centre first."""
    return [column for column in CENTRE_FIRST if not taken >> (STRIDE * column + ROWS - 1) & 1]


def stone(taken: int, column: int) -> int:
    """Returns the bit of a stone dropped in `column`.

    >>> stone(0b011, 0) == 0b100
    True
    """
    return (taken + (1 << STRIDE * column)) & ~taken  # the carry reaches the lowest free row


def has_line(stones: int) -> bool:
    """Whether four stones are in a row."""
    pairs = [(stones & stones >> direction, direction) for direction in DIRECTIONS]
    return any(both & both >> 2 * direction for both, direction in pairs)


def best_moves(stones: Stones, side: str, depth: int) -> list[int]:
    """Returns the columns, 1 to 7, with the maximum minimax score for `side`, which moves next."""
    own, other = (stones.X, stones.O) if side == "X" else (stones.O, stones.X)
    scores = {}
    for column in legal(own | other):
        after = own | stone(own | other, column)
        scores[column + 1] = depth * 1.0 if has_line(after) else -search(other, after, depth - 1)
    return [column for column in scores if scores[column] == max(scores.values())]


def search(
    own: int, other: int, depth: int, low: float = -math.inf, high: float = math.inf
) -> float:
    """Returns the minimax score for `own`, which moves next, by alpha-beta search.

    Positive: `own` wins within `depth` moves; an earlier win scores higher. The score is exact if
    it lies between `low` and `high`, else a bound.
    """
    after = [own | stone(own | other, column) for column in legal(own | other)]
    if depth == 0 or not after:
        return 0.0
    if any(map(has_line, after)):
        return float(depth)
    for stones in after:
        low = max(low, -search(other, stones, depth - 1, -high, -low))
        if low >= high:
            break
    return low


def show(stones: Stones) -> str:
    """Returns the board as lines of text, the top row first."""

    def mark(bit: int) -> str:
        return "X" if stones.X >> bit & 1 else "O" if stones.O >> bit & 1 else "."

    rows = ["".join(mark(STRIDE * c + row) for c in range(COLUMNS)) for row in range(ROWS)]
    return "\n" + "\n".join(reversed(rows))
