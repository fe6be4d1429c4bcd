"""How board games for X and O are played: against an opponent, or by two agents.

A `BoardGame` has the rules and the words. A board may be any value; moves are numbers from 1.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from environments.base import Env, Message, MultiAgentEnv, Step
from environments.parsing import Retries, integer, read_action, result, user

Board = Any
OTHER = {"X": "O", "O": "X"}


@dataclass(frozen=True)
class BoardGame:
    rules: str  # {side} stands for X or O
    move: str  # what a move is: a cell, or a column
    takes: str  # what a player does with it
    free: str  # what moves are that are possible
    plain: str  # pattern of a move in plain text
    start: Board
    legal: Callable[[Board], list[int]]
    place: Callable[[Board, int, str], Board]  # board, move, side -> the board after it
    has_line: Callable[[Board, str], bool]
    best_moves: Callable[[Board, str], list[int]]  # of an opponent that plays well
    best_move: Callable[[Board, str], int]  # of a demonstration
    show: Callable[[Board], str]

    def read(self, response: str, board: Board) -> int | None:
        """The move that a response names; None if there is none, or if it is impossible."""
        moves = self.legal(board)
        move = read_action(response, "move", integer(1, max(self.legal(self.start))), self.plain)
        return move if move in moves else None

    def is_over(self, board: Board) -> bool:
        """Whether a side has a line or the board is full."""
        return bool(self.outcome(board, "X")) or not self.legal(board)

    def outcome(self, board: Board, side: str) -> float:
        """1 if `side` has a line, -1 if the other side has one, else 0."""
        return float(self.has_line(board, side) - self.has_line(board, OTHER[side]))

    def worked(self, board: Board, side: str) -> str:
        """A worked response: the moves that win for `side`, those for the other, a best move."""
        wins = {s: [m for m in self.legal(board) if self.has_line(self.place(board, m, s), s)]
                for s in (side, OTHER[side])}  # fmt: skip
        named = " ".join(f"{s} wins: {_names(moves)}." for s, moves in wins.items())
        return f"{named} {_tagged(self.best_move(board, side))}"

    def opening(self, board: Board, side: str) -> Message:
        form = f"Work it out, then end with {_tagged(self.move)}."
        return user(f"{self.rules.format(side=side)} {form}{self.show(board)}")

    def later(self, board: Board, mover: str, move: int) -> Message:
        return user(f"{mover} {self.takes} {move}.{self.show(board)}")

    def last(self, board: Board, side: str) -> Message:
        return user(f"{result(self.outcome(board, side))}{self.show(board)}")

    def hint(self, board: Board) -> str:
        return f"End with {_tagged(self.move)}; {self.free}: {_names(self.legal(board))}"


class AgainstOpponent(Env):
    """The policy plays X; O moves at random, or `plays_well`. The seed decides who begins.

    `drawing_is_correct`: whether `info["correct"]` is True for a draw too, not only for a win.
    """

    def __init__(self, game: BoardGame, plays_well: bool, drawing_is_correct: bool = False):
        self.game, self.plays_well = game, plays_well
        self.drawing_is_correct = drawing_is_correct

    def reset(self, seed: int) -> list[Message]:
        self.rng, self.retries, self.board = random.Random(seed), Retries(), self.game.start
        if self.rng.random() < 0.5:
            self._reply()
        self.guess = self.rng.choice(self.game.legal(self.board))
        return [self.game.opening(self.board, "X")]

    def step(self, response: str) -> Step:
        game, move = self.game, self.game.read(response, self.board)
        if move is None:
            return self.retries.refuse(game.hint(self.board))
        self.board = game.place(self.board, move, "X")
        reply = None if game.is_over(self.board) else self._reply()
        if reply is None or game.is_over(self.board):
            reward = game.outcome(self.board, "X")
            info = {"correct": reward > 0 or (self.drawing_is_correct and reward == 0)}
            return Step(game.last(self.board, "X"), reward, True, info)
        self.guess = self.rng.choice(game.legal(self.board))
        return Step(game.later(self.board, "O", reply), 0.0, False, {"correct": False})

    def demonstrate(self, hasty: bool = False) -> str:
        """Names the winning moves of both sides, then a best one; `hasty`: a random move."""
        return _tagged(self.guess) if hasty else self.game.worked(self.board, "X")

    def trivial(self) -> str:
        """The first legal move: of tic-tac-toe the first free cell, of connect four the middle."""
        return _tagged(self.game.legal(self.board)[0])

    def _reply(self) -> int:
        """Makes a move of O and returns it."""
        legal, best = self.game.legal, self.game.best_moves
        move = self.rng.choice(best(self.board, "O") if self.plays_well else legal(self.board))
        self.board = self.game.place(self.board, move, "O")
        return move


class SelfPlay(MultiAgentEnv):
    """Two agents. The game has no random element: every seed is the same game."""

    agents = ("X", "O")

    def __init__(self, game: BoardGame):
        self.game = game

    def reset(self, seed: int) -> dict[str, list[Message]]:
        self.seed, self.board, self.turn = seed, self.game.start, "X"
        self.retries = {"X": Retries(), "O": Retries()}
        return {"X": [self.game.opening(self.board, "X")]}

    def step(self, responses: dict[str, str]) -> dict[str, Step]:
        game, mover, other = self.game, self.turn, OTHER[self.turn]
        move, info = game.read(responses[mover], self.board), {"correct": False}
        if move is None:
            refused = {mover: self.retries[mover].refuse(game.hint(self.board))}
            return refused | ({other: Step(None, 0.0, True, info)} if refused[mover].done else {})
        is_first = self.board == game.start
        self.board = game.place(self.board, move, mover)
        if game.is_over(self.board):
            rewards = {side: game.outcome(self.board, side) for side in (mover, other)}
            return {s: Step(game.last(self.board, s), r, True, {"correct": r > 0})
                    for s, r in rewards.items()}  # fmt: skip
        self.turn = other
        later = game.later(self.board, mover, move)
        ask = game.opening(self.board, "O") if is_first else later
        return {mover: Step(None, 0.0, False, info), other: Step(ask, 0.0, False, info)}

    def guess(self, agent: str, rng: random.Random) -> str:
        return _tagged(rng.choice(self.game.legal(self.board)))

    def demonstrate(self, agent: str, hasty: bool = False) -> str:
        """As `AgainstOpponent.demonstrate`, from the side of `agent`."""
        if hasty:
            return self.guess(agent, random.Random(f"hasty {self.seed} {self.board}"))
        return self.game.worked(self.board, agent)


def _tagged(move: int | str) -> str:
    return f"<move>{move}</move>"


def _names(moves: list[int]) -> str:
    return " ".join(map(str, sorted(moves))) or "none"
