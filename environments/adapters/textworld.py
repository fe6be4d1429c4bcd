"""TextWorld: text adventures, one generated for each seed.

A game takes about a second to generate and compile. The files are kept in a temporary folder until
the process ends.

Observation: the goal, the room and the format; later the game's answer to each command:

    Make sure that the chest is shut. -= Studio =- You see a chest. Reply with one command.

Action: the value of "command" in a JSON object, else the text between <command> tags, else the last
line of the response. Reward:

    score gained    the game's own score, at most 1 in total
    -0.1            no command, or one for the interpreter (save, quit, ..), at most twice
    -1              the third such response; the episode ends

`info["correct"]`: the game was won.

>>> [read_command(text) for text in ("The chest is open.\\n\\nclose chest\\n", "save", " ")]
['close chest', None, None]
"""

import os
import random
import re
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from environments.base import Env, Message, Step, check_range
from environments.parsing import Retries, read_action, user
from environments.plumbing.installed import import_library

# level: rooms, objects, commands on the shortest solution
LEVELS = {1: (1, 3, 1), 2: (2, 4, 2), 3: (3, 6, 3), 4: (4, 8, 4), 5: (6, 10, 6)}
INFOS = "admissible_commands description feedback objective policy_commands score won".split()
FORMAT = "Reply with one command."
MAX_COMMAND_LENGTH = 100  # characters
MAX_FILES = 900  # kept in the folder: three of a game, 0.4 MB
INTERPRETER = {*"q quit restart save restore undo script recording replay version restrict".split()}


class TextWorld(Env):
    """`level`: difficulty, 1 to 5; `hints`: whether to list the commands that the game accepts."""

    def __init__(self, level: int = 1, hints: bool = False) -> None:
        check_range("level", level, 1, max(LEVELS))
        self.textworld, self.level, self.hints = import_library("textworld"), level, hints
        self.game: Any = None

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.retries = Retries()
        if self.game is not None:
            self.game.close()
        infos = self.textworld.EnvInfos(**dict.fromkeys(INFOS, True))
        file = _make_game(self.textworld, self.level, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Jericho warns that it does not know the game
            self.game = self.textworld.start(file, infos)
        self.state = self.game.reset()
        task = f"{self.state.objective} {self.state.description}"
        return [user(f"{self._describe(task)}\n{FORMAT}")]

    def step(self, response: str) -> Step:
        command = read_command(response)
        if command is None:
            return self.retries.refuse(FORMAT)
        previous_score = self.state.score
        self.state, score, done = self.game.step(command)
        message = None if done else user(self._describe(self.state.feedback))
        reward = float(score - previous_score)
        return Step(message, reward, done, {"correct": bool(self.state.won)})

    def demonstrate(self, hasty: bool = False) -> str | None:
        """Returns the next command of the shortest solution, None if TextWorld knows none.

        `hasty`: a random command that the game accepts.
        """
        if hasty:
            return self.random_command
        return self.state.policy_commands[0] if self.state.policy_commands else None

    def _describe(self, text: str) -> str:
        commands = sorted(self.state.admissible_commands)
        self.random_command = self.rng.choice(commands)
        text = " ".join(text.partition("\n>")[0].split()) or "Nothing happens."  # no status line
        return f"{text}\nCommands: {'; '.join(commands)}" if self.hints else text


def read_command(response: str) -> str | None:
    """Returns the command in a response, in lower-case ASCII; None if there is none to execute."""
    marked = read_action(response, "command", lambda v: v if isinstance(v, str) else None)
    lines = (response[-2000:] if marked is None else marked).strip().splitlines()
    # A backslash would start a command to the interpreter, which may then never return.
    plain = re.sub("[^a-z0-9',.-]", " ", lines[-1].lower() if lines else "")
    words = plain[:MAX_COMMAND_LENGTH].split()
    if not words or INTERPRETER & set(re.findall("[a-z]+", plain)):
        return None
    return " ".join(words)


def _make_game(textworld: Any, level: int, seed: int) -> str:
    """Compiles the game of a level and seed, unless its file exists; returns the file's path."""
    file = Path(_folder().name) / f"{level}-{seed}.z8"
    if not file.exists():
        options = textworld.GameOptions()
        options.nb_rooms, options.nb_objects, options.quest_length = LEVELS[level]
        options.seeds, options.path = seed, str(file)
        textworld.generator.compile_game(textworld.generator.make_game(options), options)
        for old in sorted(file.parent.iterdir(), key=os.path.getmtime)[:-MAX_FILES]:
            old.unlink()
    return str(file)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="picorl-textworld-")
