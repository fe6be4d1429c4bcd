"""Keep a list of names in alphabetical order while more names arrive, turn by turn.

The task of prime-rl's example `alphabet_sort` (https://github.com/PrimeIntellect-ai/prime-rl), with
names that are built from the lists below. An episode sorts by first name or by last name. One name
in eight is reserved for evaluation.

Observation: one user message per turn. The first one, for example:

    Sort these names by last name: DoraEngel, BenAdler. End with <answer>, one name per line, and
    </answer>.

The following ones:

    Add these names to the list: LeoDahl. Give the whole list in the same form, and write // new
    name! after each name that is new in this turn.

Reward of each response: similarity^power / turns, at most 1 in total. The similarity to the right
list is 0 to 1 (difflib's ratio of the two texts); `info["correct"]` is True if all lists are right.

>>> env = AlphabetSort(turns=2)
>>> env.reset(seed=1)[0]["content"].partition(". End")[0]
'Sort these names by last name: DoraEngel'
>>> env.step("<answer>DoraEngel</answer>").reward
0.5
"""

import difflib
import random

from environments.base import EVAL_SEEDS, Env, Message, Step, check_range, is_held_out
from environments.parsing import read_action, user

FIRST = """Ada Ben Carla Dario Elsa Felix Greta Hugo Ines Jonas Karin Leo Mara Nico Olga Paul Rosa
Stefan Tilda Uwe Vera Walter Xenia Yusuf Zoe Anton Bianca Cyril Dora Emil Fatima Gustav""".split()
LAST = """Abbott Berger Castro Dahl Eriksen Fischer Garcia Haddad Ivanov Jensen Keller Lopez Meyer
Novak Okafor Petrov Quinn Rossi Sato Tanaka Ueda Vogel Weber Xu Yamada Zhang Adler Bruno Costa
Duarte Engel Fontaine""".split()
MARK = " // new name!"
MAX_NAMES = 24  # of an episode; no two of them have the same key
MAX_ANSWER = 1000  # characters


class AlphabetSort(Env):
    """`turns`; `names`: the most names that arrive in a turn; `power` of the similarity."""

    def __init__(self, turns: int = 3, names: int = 4, power: int = 8):
        check_range("power", power, 1)
        check_range("turns", turns, 1, MAX_NAMES)
        check_range("names", names, 1, MAX_NAMES // turns)
        self.turns, self.names, self.power = turns, names, power

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(seed)
        self.by_last = rng.random() < 0.5
        counts = [rng.randint(1, self.names) for _ in range(self.turns)]
        drawn: dict[tuple[str, str], None] = {}  # in the order in which they arrive
        while len(drawn) < sum(counts):
            name = rng.choice(FIRST), rng.choice(LAST)
            taken = name[self.by_last] in (other[self.by_last] for other in drawn)
            if not taken and is_held_out("".join(name)) == (seed in EVAL_SEEDS):
                drawn[name] = None
        arriving = iter(drawn)
        self.arrivals = [[next(arriving) for _ in range(count)] for count in counts]
        self.turn, self.right = 0, 0
        key = "last" if self.by_last else "first"
        form = "End with <answer>, one name per line, and </answer>."
        return [user(f"Sort these names by {key} name: {self._new_names()}. {form}")]

    def step(self, response: str) -> Step:
        answer = read_action(response, "answer", lambda x: x if isinstance(x, str) else None) or ""
        given = "\n".join(line.strip() for line in answer.strip().splitlines())
        expected, similarity = self._solution(), 0.0
        if len(given) <= MAX_ANSWER:
            similarity = difflib.SequenceMatcher(None, expected, given, autojunk=False).ratio()
        self.right += given == expected
        self.turn += 1
        reward = similarity**self.power / self.turns
        info = {"correct": self.right == self.turns, "right": self.right}
        if self.turn == self.turns:
            return Step(None, reward, True, info)
        form = f"Give the whole list in the same form, and write{MARK} after each name"
        ask = f"Add these names to the list: {self._new_names()}. {form} that is new in this turn."
        return Step(user(ask), reward, False, info)

    def demonstrate(self, hasty: bool = False) -> str:
        """Gives the right list; `hasty`: the new names at the end of the list."""
        return f"<answer>\n{self._solution(in_order=not hasty)}\n</answer>"

    def trivial(self) -> str:
        """Appends the new names to the list."""
        return self.demonstrate(hasty=True)

    def _new_names(self) -> str:
        return ", ".join("".join(name) for name in self.arrivals[self.turn])

    def _solution(self, in_order: bool = True) -> str:
        """The list after this turn, one name per line."""
        names = [name for arrived in self.arrivals[: self.turn + 1] for name in arrived]
        if in_order:
            names.sort(key=lambda name: name[self.by_last])
        new = self.arrivals[self.turn] if self.turn else []
        return "\n".join("".join(name) + (MARK if name in new else "") for name in names)
