"""Tic-tac-toe, as X against a random or a perfect O, or against itself.

Observation: the rules and the board in the first message, later O's move and the board. Each
message is one line.

    Tic-tac-toe: you are X. Cells are 1 to 9, row by row. Work it out, then end with
    <move>cell</move>. Board: . . . / . O . / . . .

    O takes 3. Board: X . O / . O . / . . .

The seed decides which side begins and which moves O draws. Reward of each response:

     1.0    three in a line: the end
     0.0    the game continues, or the board is full (the end)
    -1.0    O has three in a line: the end
    -0.1    an unreadable or occupied cell, twice per episode; the third costs -1 and ends it

`info["correct"]` is True for a game that X won; against the perfect O, which never loses, for a
draw. With opponent=self two agents, "X" (who begins) and "O", act in turn. Each receives the
rewards above and has its own retries; if one loses by invalid actions, the other receives 0.
Other opponents (opponent=runs/x) play one of these two seats: core/extras/opponents.py.

>>> env = tic_tac_toe("perfect")
>>> env.reset(seed=2)[0]["content"].partition("Board: ")[2]
'. . . / . . . / . . .'
>>> env.demonstrate()
'X wins: none. O wins: none. <move>1</move>'
>>> env.step("<move>5</move>").message["content"]
'O takes 1. Board: O . . / . X . / . . .'
"""

import random
from functools import cache

from environments.base import Env, Message, MultiAgentEnv, Step, UsageError
from environments.parsing import Retries, integer, read_action, result, user

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
EMPTY = "." * 9
OTHER = {"X": "O", "O": "X"}
PLAIN = r"(?:^|move is|move:|cell|take|play) *([1-9])\W*$"


def tic_tac_toe(opponent: str = "random") -> Env | MultiAgentEnv:
    """`opponent`: random, perfect or self."""
    if opponent not in ("random", "perfect", "self"):
        raise UsageError(f"opponent must be random, perfect or self, not {opponent!r}")
    return SelfPlay() if opponent == "self" else AgainstOpponent(perfect=opponent == "perfect")


class AgainstOpponent(Env):
    """The policy plays X; the environment plays O."""

    def __init__(self, perfect: bool):
        self.perfect = perfect

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.retries = Retries()
        self.board = EMPTY
        if self.rng.random() < 0.5:
            self._reply()
        self.guess = self.rng.choice(free(self.board))
        return [user(_opening("X", self.board))]

    def step(self, response: str) -> Step:
        cell = _read(response, self.board)
        if cell is None:
            return self.retries.refuse(_hint(self.board))
        self.board = place(self.board, cell, "X")
        if is_over(self.board):
            return self._end()
        taken = self._reply()
        if is_over(self.board):
            return self._end()
        self.guess = self.rng.choice(free(self.board))
        return Step(user(_later("O", taken, self.board)), 0.0, False, {"correct": False})

    def demonstrate(self, hasty: bool = False) -> str:
        """Names the winning cells of both sides, then a best one; `hasty`: a random free cell."""
        return f"<move>{self.guess}</move>" if hasty else worked(self.board, "X")

    def trivial(self) -> str:
        """Takes the first free cell."""
        return f"<move>{free(self.board)[0]}</move>"

    def _reply(self) -> int:
        choices = best_moves(self.board, "O") if self.perfect else free(self.board)
        cell = self.rng.choice(choices)
        self.board = place(self.board, cell, "O")
        return cell

    def _end(self) -> Step:
        reward = outcome(self.board, "X")
        info = {"correct": reward > (-1 if self.perfect else 0)}
        return Step(_last(self.board, "X"), reward, True, info)


class SelfPlay(MultiAgentEnv):
    """Two agents. The game has no random element: every seed is the same game."""

    agents = ("X", "O")

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.seed, self.board, self.turn = seed, EMPTY, "X"
        self.retries = {"X": Retries(), "O": Retries()}
        return {"X": [user(_opening("X", self.board))]}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        mover, other = self.turn, OTHER[self.turn]
        cell = _read(responses[mover], self.board)
        if cell is None:
            refused = self.retries[mover].refuse(_hint(self.board))
            unaffected = Step(None, 0.0, True, {"correct": False})
            return {mover: refused, other: unaffected} if refused.done else {mover: refused}
        first = len(free(self.board)) == 9
        self.board = place(self.board, cell, mover)
        if is_over(self.board):
            rewards = {side: outcome(self.board, side) for side in (mover, other)}
            return {s: Step(_last(self.board, s), r, True, {"correct": r > 0})
                    for s, r in rewards.items()}  # fmt: skip
        self.turn = other
        ask = _opening("O", self.board) if first else _later(mover, cell, self.board)
        info = {"correct": False}
        return {mover: Step(None, 0.0, False, info), other: Step(user(ask), 0.0, False, info)}

    def guess(self, agent: str, rng: random.Random) -> str:
        return f"<move>{rng.choice(free(self.board))}</move>"

    def demonstrate(self, agent: str, hasty: bool = False) -> str:
        """As `AgainstOpponent.demonstrate`, from the side of `agent`."""
        if hasty:
            return self.guess(agent, random.Random(f"hasty {self.seed} {self.board}"))
        return worked(self.board, agent)


def free(board: str) -> list[int]:
    """Returns the empty cells, 1 to 9."""
    return [i + 1 for i, mark in enumerate(board) if mark == "."]


def place(board: str, cell: int, side: str) -> str:
    """Returns the board after `side` has taken `cell`."""
    return board[: cell - 1] + side + board[cell:]


def has_line(board: str, side: str) -> bool:
    """Whether `side` has three in a line."""
    return any(all(board[i] == side for i in line) for line in LINES)


def is_over(board: str) -> bool:
    """Whether a side has a line or the board is full."""
    return has_line(board, "X") or has_line(board, "O") or "." not in board


def outcome(board: str, side: str) -> float:
    """Returns 1 if `side` has a line, -1 if the other side has one, else 0."""
    return float(has_line(board, side) - has_line(board, OTHER[side]))


def wins(board: str, side: str) -> list[int]:
    """Returns the cells that complete a line of `side`."""
    return [cell for cell in free(board) if has_line(place(board, cell, side), side)]


@cache
def value(board: str, side: str) -> float:
    """Returns the minimax value for `side`, which moves next.

    Positive: `side` wins; 0: draw; negative: `side` loses. Each move discounts by 0.9.
    """
    if is_over(board):
        return outcome(board, side)
    return max(-0.9 * value(place(board, c, side), OTHER[side]) for c in free(board))


def best_moves(board: str, side: str) -> list[int]:
    """Returns all moves with the maximum minimax value.

    >>> best_moves("X...O...X", "O")  # a corner would lose
    [2, 4, 6, 8]
    """
    after = {c: -value(place(board, c, side), OTHER[side]) for c in free(board)}
    return [cell for cell in after if after[cell] == max(after.values())]


def worked(board: str, side: str) -> str:
    """Returns a worked response: the winning cells of `side`, of the other side, and a best move.

    >>> worked("XX.OO....", "O")
    'O wins: 6. X wins: 3. <move>6</move>'
    """
    named = (
        f"{s} wins: {' '.join(map(str, wins(board, s))) or 'none'}." for s in side + OTHER[side]
    )
    # among equally good moves the one that is best against a random opponent
    best = max(best_moves(board, side), key=lambda cell: _value_vs_random(board, cell, side))
    return f"{' '.join(named)} <move>{best}</move>"


def _value_vs_random(board: str, cell: int, side: str) -> float:
    """Returns the mean value for `side` after it takes `cell` and the other makes a random move."""
    board = place(board, cell, side)
    if is_over(board):
        return outcome(board, side)
    replies = [value(place(board, reply, OTHER[side]), side) for reply in free(board)]
    return sum(replies) / len(replies)


def _read(response: str, board: str) -> int | None:
    cell = read_action(response, "move", integer(1, 9), PLAIN)
    return cell if cell in free(board) else None


def _show(board: str) -> str:
    return " / ".join(" ".join(board[i : i + 3]) for i in (0, 3, 6))


def _opening(side: str, board: str) -> str:
    rules = f"Tic-tac-toe: you are {side}. Cells are 1 to 9, row by row."
    return f"{rules} Work it out, then end with <move>cell</move>. Board: {_show(board)}"


def _later(mover: str, cell: int, board: str) -> str:
    return f"{mover} takes {cell}. Board: {_show(board)}"


def _last(board: str, side: str) -> Message:
    return user(f"{result(outcome(board, side))} Board: {_show(board)}")


def _hint(board: str) -> str:
    return f"End with <move>cell</move>; free: {' '.join(map(str, free(board)))}"
