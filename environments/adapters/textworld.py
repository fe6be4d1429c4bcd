"""TextWorld: a text adventure made anew for each seed, won by doing what its first lines ask.

It is generated and compiled here, in about a second, in a folder that ends with the process.

Observation: the task, the room and the form; then what the game says to each command, like

    Make sure that the chest is shut. -= Studio =- You see a chest. Reply with one command.

Command: the value of {"command": ..}, else between <command> tags, else the last line. Reward:

    score gained    the game's own, in all 1
    -0.1            no command, or one about the program (save, quit, ..), twice; then -1, the end

"correct": won.

>>> [read_command(text) for text in ("The chest is open.\\n\\nclose chest\\n", "save", " ")]
['close chest', None, None]
"""

import random
import re
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from core.types import Message, UsageError
from environments.base import Env, Step
from environments.parsing import Retries, read_action, user

# level: rooms, objects, commands on the shortest way to win
LEVELS = {1: (1, 3, 1), 2: (2, 4, 2), 3: (3, 6, 3), 4: (4, 8, 4), 5: (6, 10, 6)}
FORM = "Reply with one command."
LONGEST_COMMAND = 100  # characters
MOST_GAMES = 300  # kept in the folder, 0.4 MB each
PROGRAM = set("q quit restart save restore undo script recording replay version restrict".split())


class TextWorld(Env):
    """`level`: 1 to 5; `hints`: show the commands that the game would understand."""

    def __init__(self, level: int = 1, hints: bool = False):
        if level not in LEVELS:
            raise UsageError(f"level is 1 to {max(LEVELS)}, not {level}")
        try:
            import textworld
        except ImportError:
            raise UsageError('textworld needs textworld: pip install -e ".[envs]"') from None
        self.textworld, self.level, self.hints = textworld, level, hints
        self.game: Any = None

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(seed)
        self.retries = Retries()
        if self.game is not None:
            self.game.close()
        wanted = "admissible_commands description feedback objective policy_commands score won"
        infos = self.textworld.EnvInfos(**dict.fromkeys(wanted.split(), True))
        file = _make_game(self.textworld, self.level, seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Jericho, that it doesn't know the game
            self.game = self.textworld.start(file, infos)
        self.state = self.game.reset()
        task = f"{self.state.objective} {self.state.description}"
        return [user(f"{self._tell(task)}\n{FORM}")]

    def step(self, response: str) -> Step:
        command = read_command(response)
        if command is None:
            return self.retries.refuse(FORM)
        before = self.state.score
        self.state, score, done = self.game.step(command)
        message = None if done else user(self._tell(self.state.feedback))
        return Step(message, float(score - before), done, {"correct": bool(self.state.won)})

    def demonstrate(self, hasty: bool = False) -> str | None:
        """The next command on the shortest way, None off it; `hasty`: any that is understood."""
        if hasty:
            return self.guess
        return self.state.policy_commands[0] if self.state.policy_commands else None

    def _tell(self, text: str) -> str:
        commands = sorted(self.state.admissible_commands)
        self.guess = self.rng.choice(commands)
        text = " ".join(text.partition("\n>")[0].split()) or "Nothing happens."  # no status line
        return f"{text}\nCommands: {'; '.join(commands)}" if self.hints else text


def read_command(response: str) -> str | None:
    """The command in a response, in plain characters; None if there is none to give the game."""
    marked = read_action(response, "command", lambda v: v if isinstance(v, str) else None)
    lines = (response[-2000:] if marked is None else marked).strip().splitlines()
    # the interpreter takes a backslash for a command to itself, and may then never return
    plain = re.sub("[^a-z0-9',.-]", " ", lines[-1].lower() if lines else "")
    words = plain[:LONGEST_COMMAND].split()
    if not words or PROGRAM & set(re.findall("[a-z]+", plain)):
        return None
    return " ".join(words)


def _make_game(textworld: Any, level: int, seed: int) -> str:
    file = Path(_folder().name) / f"{level}-{seed}.z8"
    if not file.exists():
        options = textworld.GameOptions()
        options.nb_rooms, options.nb_objects, options.quest_length = LEVELS[level]
        options.seeds, options.path = seed, str(file)
        textworld.generator.compile_game(textworld.generator.make_game(options), options)
        games = sorted(file.parent.glob("*.z8"), key=lambda game: game.stat().st_mtime_ns)
        for part in [p for old in games[:-MOST_GAMES] for p in old.parent.glob(f"{old.stem}.*")]:
            part.unlink()
    return str(file)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="picorl-textworld-")
