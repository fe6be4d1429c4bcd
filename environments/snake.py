"""Snake: walk to the fruit, grow with each one, and touch neither a wall nor yourself.

The snake starts straight, three cells long, anywhere on the board. Cells are `x,y`, counted from 0
at the top left, so `up` takes 1 from y. The tail's cell is free to enter, for the tail moves on,
unless this step eats. Turning straight back is read like any other move: it bites the neck.

Observation: the state at every turn, its rules before the first; with `grid=true` also a picture
(H head, o body, F fruit):

    Snake, 10x10, x right, y down. Eat 5 fruits; walls and your body kill. Think, then end with
    <move>up</move>, down, left or right.
    head 2,9 body 3,9 4,9 fruit 2,3

Reward of a step:

    +1              fruit; the last of `fruits` ends the episode, only this is "correct"
    -1              wall or body, the end
    -0.001          every step; after `max_steps` steps the episode ends
    -0.1            what can't be read: asked again, two times; the third costs -1, the end

>>> env = Snake()
>>> env.reset(seed=1)[0]["content"].splitlines()[-1]
'head 2,9 body 3,9 4,9 fruit 2,3'
>>> env.demonstrate()
'fruit 6 up, 2,8 is free <move>up</move>'
>>> env.step(env.demonstrate()).message["content"]
'head 2,8 body 2,9 3,9 fruit 2,3'
"""

import random
from collections import deque
from collections.abc import Iterator

from core.types import Message, UsageError
from environments.base import Env, Step
from environments.parsing import Retries, one_of, read_action, user

MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
FORM = "<move>up</move>, down, left or right"
START_LENGTH = 3
STEP_COST = 0.001

Cell = tuple[int, int]


class Snake(Env):
    """`size`: 4 to 20 cells a side; `fruits` to eat; `max_steps`; `grid`: add a picture."""

    def __init__(self, size: int = 10, fruits: int = 5, max_steps: int = 200, grid: bool = False):
        if not 4 <= size <= 20:
            raise UsageError(f"size is 4 to 20, not {size}")
        room = size * size - START_LENGTH
        if not 1 <= fruits <= room:
            raise UsageError(f"fruits is 1 to {room} on this board, not {fruits}")
        if max_steps < 1:
            raise UsageError(f"max_steps is at least 1, not {max_steps}")
        self.size, self.fruits, self.max_steps, self.grid = size, fruits, max_steps, grid

    def reset(self, seed: int) -> list[Message]:
        self.seed, self.rng = seed, random.Random(seed)
        self.retries = Retries()
        self.steps = self.eaten = 0
        along, across = self.rng.randrange(self.size - 2), self.rng.randrange(self.size)
        self.body = [(along + i, across) for i in range(START_LENGTH)]  # the head first
        if self.rng.random() < 0.5:
            self.body.reverse()
        if self.rng.random() < 0.5:
            self.body = [(y, x) for x, y in self.body]
        self.fruit = self._draw_fruit()
        rules = (
            f"Snake, {self.size}x{self.size}, x right, y down. Eat {self.fruits} fruits; "
            f"walls and your body kill. Think, then end with {FORM}."
        )
        return [user(f"{rules}\n{self._show()}")]

    def step(self, response: str) -> Step:
        move = read_action(response, "move", one_of(*MOVES), r"\b(up|down|left|right)\b")
        if move is None:
            return self.retries.refuse(f"End with {FORM}.", fruits=self.eaten)
        self.steps += 1
        head = _next(self.body[0], move)
        eats = head == self.fruit
        rest = self.body if eats else self.body[:-1]
        if head in rest or not _inside(head, self.size):
            return self._end(-1 - STEP_COST)
        self.body = [head, *rest]
        self.eaten += eats
        reward = eats - STEP_COST
        if self.eaten == self.fruits or self.steps == self.max_steps:
            return self._end(reward)
        if eats:
            self.fruit = self._draw_fruit()
        info = {"correct": False, "fruits": self.eaten}
        return Step(user(self._show()), reward, False, info)

    def demonstrate(self, hasty: bool = False) -> str:
        """The way to the fruit and the next cell; `hasty`: any move, not even looked at."""
        if hasty:
            rng = random.Random(f"hasty {self.seed} {self.steps}")
            return f"<move>{rng.choice(list(MOVES))}</move>"
        head = self.body[0]
        move = safe_move(self.body, self.fruit, self.size)
        right, down = self.fruit[0] - head[0], self.fruit[1] - head[1]
        way = [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
        way += [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
        return f"fruit {' '.join(way)}, {_write(_next(head, move))} is free <move>{move}</move>"

    def _draw_fruit(self) -> Cell:
        cells = [(x, y) for y in range(self.size) for x in range(self.size)]
        return self.rng.choice([cell for cell in cells if cell not in self.body])

    def _end(self, reward: float) -> Step:
        return Step(
            None, reward, True, {"correct": self.eaten == self.fruits, "fruits": self.eaten}
        )

    def _show(self) -> str:
        head, *rest = self.body
        body = " ".join(_write(cell) for cell in rest)
        state = f"head {_write(head)} body {body} fruit {_write(self.fruit)}"
        if not self.grid:
            return state
        marks = {self.fruit: "F", **dict.fromkeys(rest, "o"), head: "H"}
        span = range(self.size)
        return "\n".join([state, *("".join(marks.get((x, y), ".") for x in span) for y in span)])


def safe_move(body: list[Cell], fruit: Cell, size: int) -> str:
    """The first move of a shortest way to the fruit that doesn't lock the snake in.

    Who can reach the own tail can follow it for ever, so that is what "safe" means. Without a safe
    way to the fruit the snake bides its time, near the tail; without any safe move it hopes.

    >>> safe_move([(1, 0), (0, 0), (0, 1)], (3, 0), size=4)
    'right'
    """
    path = shortest_path(body, fruit, size)
    if path and _can_follow_tail([*path[::-1], *body][: len(body) + 1], size):
        return _name(body[0], path[0])
    free = [cell for cell in _around(body[0], size) if cell not in body[:-1]]
    moved = {cell: [cell, *body] if cell == fruit else [cell, *body[:-1]] for cell in free}
    safe = [cell for cell in free if _can_follow_tail(moved[cell], size)]
    choice = max(safe or free, key=lambda cell: _distance(cell, fruit), default=None)
    return "up" if choice is None else _name(body[0], choice)


def shortest_path(body: list[Cell], goal: Cell, size: int) -> list[Cell] | None:
    """The cells from behind the head to the goal, counting on the body to move on meanwhile."""
    left_after = {cell: len(body) - i for i, cell in enumerate(body)}  # steps until it is free
    came_from: dict[Cell, Cell] = {}
    queue = deque([(body[0], 0)])
    while queue:
        cell, steps = queue.popleft()
        for near in _around(cell, size):
            if near in came_from or left_after.get(near, 0) > steps + 1:
                continue
            came_from[near] = cell
            if near == goal:
                path = [near]
                while came_from[path[-1]] != body[0]:
                    path.append(came_from[path[-1]])
                return path[::-1]
            queue.append((near, steps + 1))
    return None


def _can_follow_tail(body: list[Cell], size: int) -> bool:
    return shortest_path(body, body[-1], size) is not None


def _around(cell: Cell, size: int) -> Iterator[Cell]:
    return (near for near in (_next(cell, move) for move in MOVES) if _inside(near, size))


def _inside(cell: Cell, size: int) -> bool:
    return 0 <= cell[0] < size and 0 <= cell[1] < size


def _next(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def _name(cell: Cell, near: Cell) -> str:
    return next(move for move in MOVES if _next(cell, move) == near)


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _write(cell: Cell) -> str:
    return f"{cell[0]},{cell[1]}"
