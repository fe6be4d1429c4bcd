"""Snake: move to the fruit, grow with each one, and avoid the walls and your own body.

The snake starts straight, three cells long, anywhere on the board; one start in eight, with its
first fruit, is reserved for evaluation. Cells are `x,y`, counted from 0 at the top left, so `up`
decreases y. The head may enter the cell that the tail leaves in the same step; the tail stays where
it is if this step eats a fruit. A move straight back hits the body.

Observation: the state at every turn, after the rules in the first turn.

    Snake, 10x10, x right, y down. Eat 5 fruits; walls and your body kill. Think, then end with
    <move>up</move>, down, left or right.
    head 2,9 body 3,9 4,9 fruit 2,3

Reward of a step:

    +1        a fruit; the last of `fruits` ends the episode, only then `info["correct"]` is True
    -1        a wall or the body; the end
    -0.001    every step; after 200 steps the episode ends
    -0.1      an unreadable action, twice per episode; the third costs -1 and ends it

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

from environments.base import EVAL_SEEDS, Env, Message, Step, check_range, is_held_out
from environments.parsing import Retries, one_of, read_action, user

MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
FORM = "<move>up</move>, down, left or right"
START_LENGTH = 3
STEP_COST = 0.001
MAX_STEPS = 200

Cell = tuple[int, int]


class Snake(Env):
    """`size`: side of the board, 4 to 20; `fruits` to eat."""

    def __init__(self, size: int = 10, fruits: int = 5):
        check_range("size", size, 4, 20)
        check_range("fruits", fruits, 1, size * size - START_LENGTH)
        self.size, self.fruits = size, fruits

    def reset(self, seed: int) -> list[Message]:
        self.seed, self.rng = seed, random.Random(seed)
        self.retries = Retries()
        self.steps = self.eaten = 0
        self.body, self.fruit = self._draw_start()
        while is_held_out(f"{self.body} {self.fruit}") != (seed in EVAL_SEEDS):
            self.body, self.fruit = self._draw_start()
        goal = f"{self.size}x{self.size}, x right, y down. Eat {self.fruits} fruits"
        form = f"walls and your body kill. Think, then end with {FORM}."
        return [user(f"Snake, {goal}; {form}\n{self._show()}")]

    def step(self, response: str) -> Step:
        move = read_action(response, "move", one_of(*MOVES), r"\b(up|down|left|right)\b")
        if move is None:
            return self.retries.refuse(f"End with {FORM}.", fruits=self.eaten)
        self.steps += 1
        head = _next(self.body[0], move)
        eats = head == self.fruit
        rest = self.body if eats else self.body[:-1]
        if head in rest or not _inside(head, self.size):
            what = "your body" if _inside(head, self.size) else "a wall"
            return self._end(-1 - STEP_COST, f"You hit {what}.")
        self.body = [head, *rest]
        self.eaten += eats
        reward = eats - STEP_COST
        if self.eaten == self.fruits or self.steps == MAX_STEPS:
            return self._end(reward, f"You ate {self.eaten} of {self.fruits} fruits.")
        if eats:
            self.fruit = self._draw_fruit(self.body)
        return Step(user(self._show()), reward, False, {"correct": False, "fruits": self.eaten})

    def demonstrate(self, hasty: bool = False) -> str:
        """Names the way to the fruit and a safe next cell; `hasty`: a random move."""
        if hasty:
            rng = random.Random(f"hasty {self.seed} {self.steps}")
            return f"<move>{rng.choice(list(MOVES))}</move>"
        head = self.body[0]
        move = safe_move(self.body, self.fruit, self.size)
        right, down = self.fruit[0] - head[0], self.fruit[1] - head[1]
        way = [f"{abs(right)} {'right' if right > 0 else 'left'}"] if right else []
        way += [f"{abs(down)} {'down' if down > 0 else 'up'}"] if down else []
        return f"fruit {' '.join(way)}, {_write(_next(head, move))} is free <move>{move}</move>"

    def _draw_start(self) -> tuple[list[Cell], Cell]:
        """The cells of the snake, head first, and the first fruit."""
        along, across = self.rng.randrange(self.size - 2), self.rng.randrange(self.size)
        body = [(along + i, across) for i in range(START_LENGTH)]
        if self.rng.random() < 0.5:
            body.reverse()
        if self.rng.random() < 0.5:
            body = [(y, x) for x, y in body]
        return body, self._draw_fruit(body)

    def _draw_fruit(self, body: list[Cell]) -> Cell:
        cells = [(x, y) for y in range(self.size) for x in range(self.size)]
        return self.rng.choice([cell for cell in cells if cell not in body])

    def _end(self, reward: float, text: str) -> Step:
        info = {"correct": self.eaten == self.fruits, "fruits": self.eaten}
        return Step(user(f"{text}\n{self._show()}"), reward, True, info)

    def _show(self) -> str:
        head, *rest = self.body
        body = " ".join(_write(cell) for cell in rest)
        return f"head {_write(head)} body {body} fruit {_write(self.fruit)}"


def safe_move(body: list[Cell], fruit: Cell, size: int) -> str:
    """Returns the first move of a shortest path to the fruit that does not trap the snake.

    A position is safe if the head can reach the tail: the snake can then follow its tail forever.
    Without a safe path to the fruit, the snake makes the safe move that ends farthest from the
    fruit; without a safe move, any move to a free cell.

    >>> safe_move([(1, 0), (0, 0), (0, 1)], (3, 0), size=4)
    'right'
    """
    path, moves = shortest_path(body, fruit, size), _neighbours(body[0], size)
    if path and _can_follow_tail([*path[::-1], *body][: len(body) + 1], size):
        return moves[path[0]]
    free = [cell for cell in moves if cell not in body[:-1]]
    moved = {cell: [cell, *body] if cell == fruit else [cell, *body[:-1]] for cell in free}
    safe = [cell for cell in free if _can_follow_tail(moved[cell], size)]
    choice = max(safe or free, default=None,
                 key=lambda cell: abs(cell[0] - fruit[0]) + abs(cell[1] - fruit[1]))  # fmt: skip
    return "up" if choice is None else moves[choice]


def shortest_path(body: list[Cell], goal: Cell, size: int) -> list[Cell] | None:
    """Returns the cells after the head up to the goal, while the body moves on; None if none.

    Breadth-first search: a cell of the body can be entered once the tail has left it.
    """
    free_after = {cell: len(body) - i for i, cell in enumerate(body)}  # steps
    came_from: dict[Cell, Cell] = {}
    queue = deque([(body[0], 0)])
    while queue:
        cell, steps = queue.popleft()
        for near in _neighbours(cell, size):
            if near in came_from or free_after.get(near, 0) > steps + 1:
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


def _neighbours(cell: Cell, size: int) -> dict[Cell, str]:
    """The cells beside a cell, each with the move to it."""
    return {near: move for move in MOVES if _inside(near := _next(cell, move), size)}


def _inside(cell: Cell, size: int) -> bool:
    return 0 <= cell[0] < size and 0 <= cell[1] < size


def _next(cell: Cell, move: str) -> Cell:
    return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]


def _write(cell: Cell) -> str:
    return f"{cell[0]},{cell[1]}"
