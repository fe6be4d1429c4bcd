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

>>> env = ConnectFour()
>>> env.reset(seed=1)[0]["content"].splitlines()[-1]
'......O'
>>> env.demonstrate()
'X wins: none. O wins: none. <move>4</move>'
>>> env.step(env.demonstrate()).message["content"].splitlines()[0]
'O drops in 7.'
"""

import math
import random

from environments.base import Env, Message, MultiAgentEnv, Step, UsageError
from environments.parsing import Retries, integer, read_action, result, user

# Bitboard: the stones of a side are the bits of one integer, bit 7 * column + row, row 0 at the
# bottom. Bit 6 of each column stays 0: no line continues from the top of a column into the next.
COLUMNS, ROWS, STRIDE = 7, 6, 7
OTHER = {"X": "O", "O": "X"}
DIRECTIONS = (1, STRIDE - 1, STRIDE, STRIDE + 1)  # bit offsets: up, down right, right, up right
CENTRE_FIRST = (3, 2, 4, 1, 5, 0, 6)  # columns from 0; most lines pass through the centre
MIN_DEMO_DEPTH = 4  # search depth of demonstrations, unless that of the opponent is larger
PLAIN = r"(?:^|move is|move:|column|drop in|play) *([1-7])\W*$"


def connect4(opponent: str = "random", depth: int = 4) -> Env | MultiAgentEnv:
    """`opponent`: random, minimax or self; `depth`: search depth of minimax in moves, 1 to 6."""
    return SelfPlay(depth) if opponent == "self" else ConnectFour(opponent, depth)


class ConnectFour(Env):
    """`opponent`: random or minimax; `depth`: search depth of minimax in moves, 1 to 6."""

    def __init__(self, opponent: str = "random", depth: int = 4):
        if opponent not in ("random", "minimax"):
            raise UsageError(f"opponent must be random, minimax or self, not {opponent!r}")
        _check_depth(depth)
        self.opponent, self.depth = opponent, depth

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.retries = Retries()
        self.x = self.o = 0  # stones
        if self.rng.random() < 0.5:
            self._reply()
        self.guess = self.rng.choice(legal(self.x | self.o))
        return [user(_opening("X", self.x, self.o))]

    def step(self, response: str) -> Step:
        move = read_action(response, "move", integer(1, COLUMNS), PLAIN)
        choices = legal(self.x | self.o)
        if move is None or move - 1 not in choices:
            return self.retries.refuse(_hint(choices))
        self.x |= stone(self.x | self.o, move - 1)
        if has_line(self.x):
            return _end(1.0, self.x, self.o)
        if not legal(self.x | self.o):
            return _end(0.0, self.x, self.o)
        reply = self._reply()
        if has_line(self.o):
            return _end(-1.0, self.x, self.o)
        if not legal(self.x | self.o):
            return _end(0.0, self.x, self.o)
        self.guess = self.rng.choice(legal(self.x | self.o))
        shown = f"O drops in {reply + 1}.\n{show(self.x, self.o)}"
        return Step(user(shown), 0.0, False, {"correct": False})

    def demonstrate(self, hasty: bool = False) -> str:
        """Names the winning columns of both sides, then a best one; `hasty`: a random column."""
        if hasty:
            return f"<move>{self.guess + 1}</move>"
        return worked("X", self.x, self.o, self.depth)

    def _reply(self) -> int:
        """Makes a move of O and returns its column."""
        if self.opponent == "minimax":
            column = self.rng.choice(best_moves(self.o, self.x, self.depth))
        else:
            column = self.rng.choice(legal(self.x | self.o))
        self.o |= stone(self.x | self.o, column)
        return column


class SelfPlay(MultiAgentEnv):
    """Two agents. The game has no random element: every seed is the same game."""

    agents = ("X", "O")

    def __init__(self, depth: int):
        _check_depth(depth)
        self.depth = depth

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.seed, self.turn = seed, "X"
        self.stones = {"X": 0, "O": 0}
        self.retries = {"X": Retries(), "O": Retries()}
        return {"X": [user(_opening("X", 0, 0))]}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        mover, other = self.turn, OTHER[self.turn]
        move = read_action(responses[mover], "move", integer(1, COLUMNS), PLAIN)
        choices, info = legal(self.taken), {"correct": False}
        if move is None or move - 1 not in choices:
            refused = self.retries[mover].refuse(_hint(choices))
            unaffected = Step(None, 0.0, True, info)
            return {mover: refused, other: unaffected} if refused.done else {mover: refused}
        first = not self.taken
        self.stones[mover] |= stone(self.taken, move - 1)
        won, x, o = has_line(self.stones[mover]), self.stones["X"], self.stones["O"]
        if won or not legal(self.taken):
            return {mover: _end(float(won), x, o), other: _end(-float(won), x, o)}
        self.turn = other
        ask = _opening("O", x, o) if first else f"{mover} drops in {move}.\n{show(x, o)}"
        return {mover: Step(None, 0.0, False, info), other: Step(user(ask), 0.0, False, info)}

    def guess(self, agent: str, rng: random.Random) -> str:
        return f"<move>{rng.choice(legal(self.taken)) + 1}</move>"

    def demonstrate(self, agent: str, hasty: bool = False) -> str:
        """As `ConnectFour.demonstrate`, from the side of `agent`."""
        if hasty:
            return self.guess(agent, random.Random(f"hasty {self.seed} {self.taken}"))
        return worked(agent, self.stones[agent], self.stones[OTHER[agent]], self.depth)

    @property
    def taken(self) -> int:
        """The stones of both sides."""
        return self.stones["X"] | self.stones["O"]


def worked(side: str, own: int, other: int, depth: int) -> str:
    """Returns a worked response: the winning columns of `side`, of the other, and a best move."""
    own_wins, other_wins = _names(wins(own, other)), _names(wins(other, own))
    move = best_moves(own, other, max(depth, MIN_DEMO_DEPTH))[0] + 1
    return f"{side} wins: {own_wins}. {OTHER[side]} wins: {other_wins}. <move>{move}</move>"


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
    for direction in DIRECTIONS:
        pairs = stones & stones >> direction
        if pairs & pairs >> 2 * direction:
            return True
    return False


def wins(own: int, other: int) -> list[int]:
    """Returns the columns that complete a line of `own`."""
    return [c for c in legal(own | other) if has_line(own | stone(own | other, c))]


def best_moves(own: int, other: int, depth: int) -> list[int]:
    """Returns the columns with the maximum minimax score for `own`, which moves next."""
    scores = {}
    for column in legal(own | other):
        after = own | stone(own | other, column)
        scores[column] = depth * 1.0 if has_line(after) else -search(other, after, depth - 1)
    return [column for column in scores if scores[column] == max(scores.values())]


def search(
    own: int, other: int, depth: int, low: float = -math.inf, high: float = math.inf
) -> float:
    """Returns the minimax score for `own`, which moves next, by alpha-beta search.

    Positive: `own` wins within `depth` moves; an earlier win scores higher. The score is exact if
    it lies between `low` and `high`, else a bound.
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


def show(x: int, o: int) -> str:
    """Returns the board as text, the top row first."""

    def mark(bit: int) -> str:
        return "X" if x >> bit & 1 else "O" if o >> bit & 1 else "."

    rows = ["".join(mark(STRIDE * c + row) for c in range(COLUMNS)) for row in range(ROWS)]
    return "\n".join(reversed(rows))


def _opening(side: str, x: int, o: int) -> str:
    rules = f"Connect four: you are {side}. Drop stones in columns 1 to 7; four in a line win."
    return f"{rules} Work it out, then end with <move>column</move>.\n{show(x, o)}"


def _end(reward: float, x: int, o: int) -> Step:
    last = user(f"{result(reward)}\n{show(x, o)}")
    return Step(last, reward, True, {"correct": reward > 0})


def _hint(columns: list[int]) -> str:
    return f"End with <move>column</move>; open: {_names(columns)}"


def _check_depth(depth: int) -> None:
    if not 1 <= depth <= 6:
        raise UsageError(f"depth must be 1 to 6, not {depth}")


def _names(columns: list[int]) -> str:
    return " ".join(str(column + 1) for column in sorted(columns)) or "none"
