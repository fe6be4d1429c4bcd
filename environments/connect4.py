"""Connect four, as X against a random O or one that looks some moves ahead.

Observation: the rules and the board in the first message, later O's move and the board. The board
is six rows of the seven columns, the top row first:

    Connect four: you are X. Drop stones in columns 1 to 7; four in a line win. Work it out, then
    end with <move>column</move>.                                       (on one line)
    .......
    .......
    .......
    .......
    .......
    ...O...

    O drops in 4.
    (the board)

The seed decides who begins, and what O does. A game takes X up to 21 turns, and a good O often
makes it more than ten: see that --max-turns allows them. Reward of each response:

     1.0    four in a line, across, up or aslant: the end; only this is "correct"
     0.0    the game goes on, or the board is full (the end)
    -1.0    O has four in a line: the end
    -0.1    no column could be read, or it is full: try again, twice in an episode; then -1, the end

>>> env = ConnectFour()
>>> env.reset(seed=1)[0]["content"].splitlines()[-1]
'......O'
>>> env.demonstrate()
'X wins: none. O wins: none. <move>4</move>'
>>> env.step(env.demonstrate()).message["content"].splitlines()[0]
'O drops in 7.'
"""

import random

from core.types import Message, UsageError
from environments.base import Env, Step
from environments.parsing import Retries, read_action, user, whole_number

# A side's stones are the bits of one number: bit 7 * column + row, row 0 at the bottom. The seventh
# row stays empty, so that no line runs from the top of a column into the next one.
COLUMNS, ROWS, HIGH = 7, 6, 7
DIRECTIONS = (1, HIGH - 1, HIGH, HIGH + 1)  # from bit to bit: up, down right, right, up right
CENTRE_FIRST = (3, 2, 4, 1, 5, 0, 6)  # columns counted from 0; in the middle most lines cross
BEST = 1000.0  # above every score
SHOWN_DEPTH = 4  # moves that a demonstration looks ahead, or as many as its opponent
PLAIN = r"(?:^|move is|move:|column|drop in|play) *([1-7])\W*$"


class ConnectFour(Env):
    """`opponent`: random or minimax; `depth`: the moves that minimax looks ahead, 1 to 6."""

    def __init__(self, opponent: str = "random", depth: int = 4):
        if opponent not in ("random", "minimax"):
            raise UsageError(f"opponent is random or minimax, not {opponent!r}")
        if not 1 <= depth <= 6:
            raise UsageError(f"depth is 1 to 6, not {depth}")
        self.opponent, self.depth = opponent, depth

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.retries = Retries()
        self.mine = self.theirs = 0
        if self.rng.random() < 0.5:
            self._reply()
        self.guess = self.rng.choice(legal(self.mine | self.theirs))
        rules = "Connect four: you are X. Drop stones in columns 1 to 7; four in a line win."
        form = "Work it out, then end with <move>column</move>."
        return [user(f"{rules} {form}\n{show(self.mine, self.theirs)}")]

    def step(self, response: str) -> Step:
        move = read_action(response, "move", whole_number(1, COLUMNS), PLAIN)
        choices = legal(self.mine | self.theirs)
        if move is None or move - 1 not in choices:
            names = " ".join(str(column + 1) for column in sorted(choices))
            return self.retries.refuse(f"End with <move>column</move>; open: {names}")
        self.mine |= stone(self.mine | self.theirs, move - 1)
        if has_line(self.mine):
            return Step(None, 1.0, True, {"correct": True})
        if not legal(self.mine | self.theirs):
            return Step(None, 0.0, True, {"correct": False})
        reply = self._reply()
        if has_line(self.theirs):
            return Step(None, -1.0, True, {"correct": False})
        if not legal(self.mine | self.theirs):
            return Step(None, 0.0, True, {"correct": False})
        self.guess = self.rng.choice(legal(self.mine | self.theirs))
        shown = f"O drops in {reply + 1}.\n{show(self.mine, self.theirs)}"
        return Step(user(shown), 0.0, False, {"correct": False})

    def demonstrate(self, hasty: bool = False) -> str:
        """Name the columns that win for either side, then the best; `hasty`: any open column."""
        if hasty:
            return f"<move>{self.guess + 1}</move>"
        mine = _names(wins(self.mine, self.theirs))
        theirs = _names(wins(self.theirs, self.mine))
        move = best_moves(self.mine, self.theirs, max(self.depth, SHOWN_DEPTH))[0] + 1
        return f"X wins: {mine}. O wins: {theirs}. <move>{move}</move>"

    def _reply(self) -> int:
        """O's move: made, and returned."""
        if self.opponent == "minimax":
            column = self.rng.choice(best_moves(self.theirs, self.mine, self.depth))
        else:
            column = self.rng.choice(legal(self.mine | self.theirs))
        self.theirs |= stone(self.mine | self.theirs, column)
        return column


def legal(taken: int) -> list[int]:
    """The columns (from 0) that aren't full, the middle one first."""
    return [column for column in CENTRE_FIRST if not taken >> (HIGH * column + ROWS - 1) & 1]


def stone(taken: int, column: int) -> int:
    """The bit of the stone that falls into `column`.

    >>> stone(0b011, 0) == 0b100
    True
    """
    return (taken + (1 << HIGH * column)) & ~taken  # adding at the bottom carries to the top


def has_line(stones: int) -> bool:
    """Whether four stones stand in a line."""
    for direction in DIRECTIONS:
        pairs = stones & stones >> direction
        if pairs & pairs >> 2 * direction:
            return True
    return False


def wins(own: int, other: int) -> list[int]:
    """The columns where one more stone of `own` makes a line."""
    return [c for c in legal(own | other) if has_line(own | stone(own | other, c))]


def best_moves(own: int, other: int, depth: int) -> list[int]:
    """The columns of the highest score for `own`, who moves, the middle first."""
    scores = {}
    for column in legal(own | other):
        after = own | stone(own | other, column)
        scores[column] = depth * 1.0 if has_line(after) else -search(other, after, depth - 1)
    return [column for column in scores if scores[column] == max(scores.values())]


def search(own: int, other: int, depth: int, low: float = -BEST, high: float = BEST) -> float:
    """Minimax with alpha-beta pruning: above 0 if `own`, who moves, wins within `depth` moves.

    The sooner a win the higher its score. Exact if it lies between `low` and `high`.
    """
    columns = legal(own | other)
    if depth == 0 or not columns:
        return 0.0
    for column in columns:
        after = own | stone(own | other, column)
        if has_line(after):
            return float(depth)
    for column in columns:
        after = own | stone(own | other, column)
        low = max(low, -search(other, after, depth - 1, -high, -low))
        if low >= high:
            break
    return low


def show(mine: int, theirs: int) -> str:
    """The board as text, the top row first."""

    def mark(bit: int) -> str:
        return "X" if mine >> bit & 1 else "O" if theirs >> bit & 1 else "."

    rows = ["".join(mark(HIGH * c + row) for c in range(COLUMNS)) for row in range(ROWS)]
    return "\n".join(reversed(rows))


def _names(columns: list[int]) -> str:
    return " ".join(str(column + 1) for column in sorted(columns)) or "none"
