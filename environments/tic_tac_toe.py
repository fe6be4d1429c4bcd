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
from typing import Literal

from environments.base import Env, Message, MultiAgentEnv, Step
from environments.parsing import Retries, integer, read_action, user

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
EMPTY = "." * 9
OTHER = {"X": "O", "O": "X"}
RULES = (
    "Tic-tac-toe: you are {}. Cells are 1 to 9, row by row. Work it out, then end with "
    "<move>cell</move>."
)
PLAIN = r"(?:^|move is|move:|cell|take|play) *([1-9])\W*$"  # a move without tags
RESULTS = {1.0: "You won.", 0.0: "A draw.", -1.0: "You lost."}


def tic_tac_toe(opponent: Literal["random", "perfect", "self"] = "random") -> Env | MultiAgentEnv:
    """`opponent`: random, perfect or self."""
    return SelfPlay() if opponent == "self" else AgainstOpponent(opponent == "perfect")


class AgainstOpponent(Env):
    """The policy plays X; O moves at random, or is `perfect`."""

    def __init__(self, perfect: bool):
        self.perfect = perfect

    def reset(self, seed: int) -> list[Message]:
        self.rng, self.retries, self.board = random.Random(seed), Retries(), EMPTY
        if self.rng.random() < 0.5:
            self._reply()
        self.guess = self.rng.choice(free(self.board))
        return [_show(RULES.format("X"), self.board)]

    def step(self, response: str) -> Step:
        cell = read_cell(response, self.board)
        if cell is None:
            return self.retries.refuse(_hint(self.board))
        self.board = place(self.board, cell, "X")
        if not is_over(self.board):
            reply = self._reply()
        if is_over(self.board):
            return _end(self.board, "X", lowest_correct=0.0 if self.perfect else 1.0)
        self.guess = self.rng.choice(free(self.board))
        return Step(_show(f"O takes {reply}.", self.board), 0.0, False, {"correct": False})

    def demonstrate(self, hasty: bool = False) -> str:
        """Names the winning moves of both sides, then a best one; `hasty`: a random move."""
        return f"<move>{self.guess}</move>" if hasty else worked_response(self.board, "X")

    def trivial(self) -> str:
        """Always takes the first free cell."""
        return f"<move>{free(self.board)[0]}</move>"

    def _reply(self) -> int:
        """O makes a move."""
        cells = best_moves(self.board, "O") if self.perfect else free(self.board)
        cell = self.rng.choice(cells)
        self.board = place(self.board, cell, "O")
        return cell


class SelfPlay(MultiAgentEnv):
    """Two agents. The game has no random element: every seed is the same game."""

    agents = ("X", "O")

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.seed, self.board, self.turn = seed, EMPTY, "X"
        self.retries = {"X": Retries(), "O": Retries()}
        return {"X": [_show(RULES.format("X"), self.board)]}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        mover, opponent = self.turn, OTHER[self.turn]
        info = {"correct": False}
        cell = read_cell(responses[mover], self.board)
        if cell is None:
            steps = {mover: self.retries[mover].refuse(_hint(self.board))}
            if steps[mover].done:
                steps[opponent] = Step(None, 0.0, True, info)
            return steps
        text = RULES.format("O") if self.board == EMPTY else f"{mover} takes {cell}."
        self.board, self.turn = place(self.board, cell, mover), opponent
        if is_over(self.board):
            return {side: _end(self.board, side) for side in (mover, opponent)}
        message = _show(text, self.board)
        return {mover: Step(None, 0.0, False, info), opponent: Step(message, 0.0, False, info)}

    def demonstrate(self, agent: str, hasty: bool = False) -> str:
        """As `AgainstOpponent.demonstrate`, from the side of `agent`."""
        if hasty:
            rng = random.Random(f"hasty {self.seed} {self.board}")
            return f"<move>{rng.choice(free(self.board))}</move>"
        return worked_response(self.board, agent)


def free(board: str) -> list[int]:
    """Returns the empty cells, 1 to 9."""
    return [i + 1 for i, mark in enumerate(board) if mark == "."]


def read_cell(response: str, board: str) -> int | None:
    """Returns the cell that a response names; None if there is none, or if it is occupied."""
    cell = read_action(response, "move", integer(1, 9), PLAIN)
    return cell if cell in free(board) else None


def place(board: str, cell: int, side: str) -> str:
    """Returns the board after `side` has taken `cell`."""
    return board[: cell - 1] + side + board[cell:]


def has_line(board: str, side: str) -> bool:
    """Whether `side` has three in a line."""
    return any(all(board[i] == side for i in line) for line in LINES)


def outcome(board: str, side: str) -> float:
    """Returns 1 if `side` has a line, -1 if the other side has one, else 0."""
    return float(has_line(board, side) - has_line(board, OTHER[side]))


def is_over(board: str) -> bool:
    """Whether a side has a line or the board is full."""
    return bool(outcome(board, "X")) or not free(board)


@cache
def value(board: str, side: str) -> float:
    """Returns the minimax value for `side`, which moves next.

    Positive: `side` wins; 0: draw; negative: `side` loses. Each move discounts by 0.9.
    """
    if is_over(board):
        return outcome(board, side)
    return max(-0.9 * value(place(board, cell, side), OTHER[side]) for cell in free(board))


def best_moves(board: str, side: str) -> list[int]:
    """Returns all moves with the maximum minimax value.

    >>> best_moves("X...O...X", "O")  # a corner would lose
    [2, 4, 6, 8]
    """
    values = {cell: -value(place(board, cell, side), OTHER[side]) for cell in free(board)}
    return [cell for cell in values if values[cell] == max(values.values())]


def worked_response(board: str, side: str) -> str:
    """Returns a worked response: the cells that win for `side`, those that win for the other side,
    and the move: of the best ones that which is best against a random opponent.

    >>> worked_response("XX.OO....", "O")
    'O wins: 6. X wins: 3. <move>6</move>'
    """
    winning = []
    for player in (side, OTHER[side]):
        cells = [cell for cell in free(board) if has_line(place(board, cell, player), player)]
        winning.append(f"{player} wins: {_names(cells)}.")
    best = max(best_moves(board, side), key=lambda cell: _value_vs_random(board, cell, side))
    return f"{' '.join(winning)} <move>{best}</move>"


def _value_vs_random(board: str, cell: int, side: str) -> float:
    """Returns the mean value for `side` after it takes `cell` and the other makes a random move."""
    board = place(board, cell, side)
    if is_over(board):
        return outcome(board, side)
    replies = [value(place(board, reply, OTHER[side]), side) for reply in free(board)]
    return sum(replies) / len(replies)


def _hint(board: str) -> str:
    return f"End with <move>cell</move>; free: {_names(free(board))}"


def _end(board: str, side: str, lowest_correct: float = 1.0) -> Step:
    """The last step of `side`; `lowest_correct`: the reward from which on the game is correct."""
    reward = outcome(board, side)
    info = {"correct": reward >= lowest_correct}
    return Step(_show(RESULTS[reward], board), reward, True, info)


def _show(text: str, board: str) -> Message:
    rows = " / ".join(" ".join(board[i : i + 3]) for i in (0, 3, 6))
    return user(f"{text} Board: {rows}")


def _names(cells: list[int]) -> str:
    return " ".join(map(str, cells)) or "none"
