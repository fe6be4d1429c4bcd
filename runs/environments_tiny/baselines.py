"""What players without a model reach on the held-out tasks of this page.

    python runs/environments_tiny/baselines.py     # writes its table in README.md; a minute

A policy that is not better than these players has learned nothing about the task.
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from record import Run, cell, markdown, write_table  # noqa: E402

from core.metrics import distinct_tasks, eval_metrics  # noqa: E402
from core.types import Message, Rollout, Turn  # noqa: E402
from environments.base import EVAL_SEEDS  # noqa: E402
from environments.plumbing.registry import make  # noqa: E402

Player = Callable[[list[Message], random.Random], str]  # (chat so far, random) -> response
CARTPOLE = "gymnasium:id=CartPole-v1,repeat=3,max_steps=90,memory=false"
WIKIPEDIA = "wikipedia_maze:n_hops=2,brief=true"


def main() -> None:
    rows = list[list[str]]()
    for env, tasks, turns, player, description in PLAYERS:
        rollouts = play(env, tasks, turns, player)
        found = eval_metrics(rollouts, distinct_tasks(rollouts))
        kind = "return" if "gymnasium" in env else "accuracy"
        run = Run(HERE, env, None, None, kind, [{"update": 0} | found])
        measured = "mean return" if kind == "return" else kind
        rows.append([f"`{env}`", description, measured, cell("before", [run], env)])
        print(rows[-1], flush=True)
    table = markdown("environment | player | measured | result [95%]", rows)
    write_table(HERE, table, "baselines")


def play(env: str, tasks: int, max_turns: int, player: Player) -> list[Rollout]:
    """Plays the held-out episodes. The texts stand for the token ids, which tell tasks apart."""
    rollouts = []
    for number in range(tasks):
        episode, rng = make(env), random.Random(number)
        chat = episode.reset(EVAL_SEEDS[number])
        rollout = Rollout(env, "player", EVAL_SEEDS[number], number)
        for _ in range(max_turns):
            response = player(chat, rng)
            step = episode.step(response)
            prompt, completion = hash(str(chat)), hash(response)
            rollout.turns.append(Turn([prompt], [completion], [0.0], "stop", step.reward))
            if step.done or step.message is None:
                rollout.info = step.info
                break
            chat.append(step.message)
        rollouts.append(rollout)
    return rollouts


def always(response: str) -> Player:
    return lambda chat, rng: response


def one_of(*responses: str) -> Player:
    return lambda chat, rng: rng.choice(responses)


def free_cells(chat: list[Message]) -> list[int]:
    """Returns the free cells of the last board of tic-tac-toe, 1 to 9."""
    board = chat[-1]["content"].split("Board: ")[-1].replace("/", "").split()
    return [cell for cell, mark in enumerate(board, start=1) if mark == "."]


def random_cell(chat: list[Message], rng: random.Random) -> str:
    return f"<move>{rng.choice(free_cells(chat))}</move>"


def first_free_cell(chat: list[Message], rng: random.Random) -> str:
    return f"<move>{free_cells(chat)[0]}</move>"


def target_or_random_link(chat: list[Message], rng: random.Random) -> str:
    """Takes the link to the target if the page has it, otherwise any link."""
    target = chat[0]["content"].removeprefix("Target: ").split(",")[0]
    links = chat[-1]["content"].split("Links: ")[-1].split(", ")
    link = target if target in links else rng.choice(links)
    return f'{{"action": "visit_url", "url": "{link}"}}'


PLAYERS = (  # environment, held-out tasks and turns as in README.md, player, its description
    ("reverse", 256, 3, always("<answer>a</answer>"), "always the same word"),
    ("tic_tac_toe", 256, 8, random_cell, "a random free cell"),
    ("tic_tac_toe", 256, 8, first_free_cell, "the first free cell"),
    (CARTPOLE, 64, 30, always("right"), "always right"),
    (CARTPOLE, 64, 30, one_of("left", "right"), "left or right at random"),
    ("gymnasium:id=Blackjack-v1", 1024, 8, always("hit"), "always hit"),
    ("gymnasium:id=Blackjack-v1", 1024, 8, always("stick"), "always stick"),
    ("math_qa:level=1", 256, 1, always("<answer>12</answer>"), "always 12, the most common answer"),
    (WIKIPEDIA, 256, 6, target_or_random_link,
     "the target if it is linked, otherwise a random link"),
    ("letter_counting", 256, 1, always("<answer>1</answer>"), "always 1"),
)  # fmt: skip

if __name__ == "__main__":
    main()
