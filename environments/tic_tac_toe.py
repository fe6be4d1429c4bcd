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

from functools import cache
from typing import Literal

from environments.base import Env, MultiAgentEnv
from environments.plumbing.board_games import OTHER, AgainstOpponent, BoardGame, SelfPlay

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
EMPTY = "." * 9


def tic_tac_toe(opponent: Literal["random", "perfect", "self"] = "random") -> Env | MultiAgentEnv:
    """`opponent`: random, perfect or self. A draw with the perfect one is correct."""
    perfect = opponent == "perfect"
    return SelfPlay(GAME) if opponent == "self" else AgainstOpponent(GAME, perfect, perfect)


def free(board: str) -> list[int]:
    """Returns the empty cells, 1 to 9."""
    return [i + 1 for i, mark in enumerate(board) if mark == "."]


def place(board: str, cell: int, side: str) -> str:
    """Returns the board after `side` has taken `cell`."""
    return board[: cell - 1] + side + board[cell:]


def has_line(board: str, side: str) -> bool:
    """Whether `side` has three in a line."""
    return any(all(board[i] == side for i in line) for line in LINES)


@cache
def value(board: str, side: str) -> float:
    """Returns the minimax value for `side`, which moves next.

    Positive: `side` wins; 0: draw; negative: `side` loses. Each move discounts by 0.9.
    """
    if GAME.is_over(board):
        return GAME.outcome(board, side)
    return max(-0.9 * value(place(board, c, side), OTHER[side]) for c in free(board))


def best_moves(board: str, side: str) -> list[int]:
    """Returns all moves with the maximum minimax value.

    >>> best_moves("X...O...X", "O")  # a corner would lose
    [2, 4, 6, 8]
    """
    after = {c: -value(place(board, c, side), OTHER[side]) for c in free(board)}
    return [cell for cell in after if after[cell] == max(after.values())]


def best_move(board: str, side: str) -> int:
    """Returns among equally good moves the one that is best against a random opponent.

    >>> GAME.worked("XX.OO....", "O")
    'O wins: 6. X wins: 3. <move>6</move>'
    """
    return max(best_moves(board, side), key=lambda cell: _value_vs_random(board, cell, side))


def _value_vs_random(board: str, cell: int, side: str) -> float:
    """Returns the mean value for `side` after it takes `cell` and the other makes a random move."""
    board = place(board, cell, side)
    if GAME.is_over(board):
        return GAME.outcome(board, side)
    replies = [value(place(board, reply, OTHER[side]), side) for reply in free(board)]
    return sum(replies) / len(replies)


def _show(board: str) -> str:
    return f" Board: {' / '.join(' '.join(board[i : i + 3]) for i in (0, 3, 6))}"


GAME = BoardGame(
    rules="Tic-tac-toe: you are {side}. Cells are 1 to 9, row by row.",
    move="cell", takes="takes", free="free",
    plain=r"(?:^|move is|move:|cell|take|play) *([1-9])\W*$",
    start=EMPTY, legal=free, place=place, has_line=has_line,
    best_moves=best_moves, best_move=best_move, show=_show,
)  # fmt: skip
