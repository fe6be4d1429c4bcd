"""Writes a GRPO run that is wrong in three places, and says how many of them are repaired.

    python -m core.workshop.drill               # writes drill.py; --seed 7: with other faults
    python drill.py                             # runs it: ten updates, about a minute
    python -m core.workshop.drill --check       # how many are repaired, and what is newly broken
    python -m core.workshop.drill --hint 1      # what the first that is left does to a run;
                                                # 2: its function; 3: its line
    python -m core.workshop.drill --answers     # all three, with who reported them

The check calls the functions of the file and looks at what they do, so every right repair counts.
"""

import argparse
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType

from core.faults import UsageError
from core.workshop.checker import load
from core.workshop.drill_facts import FACTS, ask_all
from core.workshop.drill_faults import FAULTS, Fault

HERE = Path(__file__)
SOURCE = (HERE.parent / "drill_loop.py").read_text(encoding="utf-8")
RUNS = HERE.parents[2] / "runs/drill/runs.jsonl"  # with one fault each, and without
NUMBER_OF_FAULTS = 3
TASK = '''\
"""Drill {seed}: this GRPO run raises no error, and is wrong in three places. Repair them.
Keep all names; the docstrings are right. `python -m core.workshop.drill --help` lists help."""'''


def draw(seed: int) -> list[str]:
    """The names of three faults in different functions that break different facts, from the top."""
    chosen: list[str] = []
    for name in random.Random(seed).sample(list(FAULTS), len(FAULTS)):
        broken = {fact for other in chosen for fact in FAULTS[other].breaks}
        functions = {FAULTS[other].function for other in chosen}
        if not broken & set(FAULTS[name].breaks) and FAULTS[name].function not in functions:
            chosen.append(name)
    return sorted(chosen[:NUMBER_OF_FAULTS], key=lambda name: SOURCE.index(FAULTS[name].change[0]))


def with_faults(names: list[str]) -> str:
    """The source of the loop with the faults of these names."""
    text = SOURCE
    for name in names:
        change = FAULTS[name].change
        for old, new in zip(change[::2], change[1::2], strict=True):
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
    return text


def write(seed: int, file: Path) -> None:
    """Writes drill `seed`. Raises UsageError if there is a file."""
    text = re.sub(r'^""".*?"""', lambda _: TASK.format(seed=seed), with_faults(draw(seed)), count=1)
    try:
        with open(file, "x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"{file} is there: rename it, or write to another --file") from None


def seed_of(file: Path) -> int:
    """The seed of a drill, which its first line names."""
    try:
        found = re.match(r'"""Drill (\d+):', file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"there is no {file}: python -m core.workshop.drill writes a drill.py"
        ) from None
    if found is None:
        raise UsageError(f"the first line of {file} must begin with the drill's number")
    return int(found[1])


def check(file: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """Which of the faults are left, and sentences about what is newly broken.

    Raises UsageError if the file cannot be imported or lacks a function or constant of the loop.
    """
    module, constants = load(file), re.findall(r"^(\w[\w, ]*) = ", SOURCE, re.MULTILINE)
    functions = re.findall(r"^def (\w+)", SOURCE, re.MULTILINE)
    expected = [*functions, *", ".join(constants).split(", ")]
    if missing := [name for name in expected if not hasattr(module, name)]:
        raise UsageError(f"{file} lacks {', '.join(missing)}: keep the names that it was given")
    given, found = ask_all(as_module(with_faults(names))), ask_all(module)
    left = [name for name in names if set(FAULTS[name].breaks) & set(found)]
    new = [f"{FACTS[fact]}{f' ({error})' if error else ''}"
           for fact, error in found.items() if fact not in given]  # fmt: skip
    return left, new


def as_module(text: str) -> ModuleType:
    module = ModuleType("drill")
    exec(compile(text, "drill.py", "exec"), vars(module))  # noqa: S102  our own code
    return module


def hint(name: str, level: int) -> str:
    """1: what the fault does to a run, alone; 2: in which function it is; 3: its line."""
    fault = FAULTS[name]
    if level == 1:
        numbers = [list(measured(key)[0].items())[2:] for key in (name, "none")]
        lines = ["  ".join(f"{key} {number:.3g}" for key, number in row) for row in numbers]
        return ("A run with this fault alone, and one without a fault: accuracies, last update\n"
                f"   with it        {lines[0]}\n   without it     {lines[1]}")  # fmt: skip
    if level == 2:
        return f"It is in what `{fault.function}` does."
    return f"As it should be: {' .. '.join(right_lines(fault))}"


def measured(name: str) -> list[dict]:
    """The runs with the fault `name` alone, or with "none", by seed (runs/drill/measure.py)."""
    runs = map(json.loads, RUNS.read_text(encoding="utf-8").splitlines())
    return sorted((run for run in runs if run["fault"] == name), key=lambda run: run["seed"])


def right_lines(fault: Fault) -> list[str]:
    """The lines of the right loop in which the fault's changes begin."""
    starts = [SOURCE.index(old) + len(old) - len(old.lstrip()) for old in fault.change[::2]]
    return [SOURCE[SOURCE.rfind("\n", 0, start) + 1 : SOURCE.index("\n", start)].strip()
            for start in starts]  # fmt: skip


def execute(arguments: list[str]) -> int:
    """What the command does; returns the exit code: 0, 1 if a fault is left, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        "python -m core.workshop.drill", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="which three faults (default: 1)")
    parser.add_argument("--file", type=Path, default=Path("drill.py"), help="of the drill")
    parser.add_argument("--check", action="store_true", help="how many are repaired")
    parser.add_argument("--answers", action="store_true", help="what was wrong")
    parser.add_argument("--hint", type=int, choices=(1, 2, 3), help="about the first that is left")
    options = parser.parse_args(arguments)
    try:
        if not (options.check or options.hint or options.answers):
            write(options.seed, options.file)
            print(f"Wrote {options.file}, drill {options.seed}. Run it, read it, repair it; "
                  "--check says how many of its three faults are repaired.")  # fmt: skip
            return 0
        names = draw(seed_of(options.file))
        if options.answers:
            print_answers(names)
            return 0
        left, new = check(options.file, names)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if options.hint:
        print(hint(left[0], options.hint) if left else "No fault is left.")
        return 0
    print(f"{len(names) - len(left)} of {len(names)} repaired.")
    for sentence in new:
        print(f"No longer true: {sentence}.")
    if not left and not new:
        print("python -m core.workshop.drill --answers says who made these mistakes before you.")
    return 1 if left or new else 0


def print_answers(names: list[str]) -> None:
    for number, name in enumerate(names, 1):
        fault = FAULTS[name]
        print(f"{number}. {fault.function}: {fault.cause} Reported: {fault.source}.\n"
              f"   {hint(name, 3)}\n   {hint(name, 1)}\n")  # fmt: skip


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
