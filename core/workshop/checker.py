"""`python scratch.py`: checks the exercises; and `--algo scratch`, which trains with them.

An exercise is right, wrong at a fact, or not yet written. A wrong answer is compared with those of
common mistakes, so that the hint speaks of what was done. Nothing that somebody's code raises or
waits for stops the others.

    python scratch.py [--hint N | --solution N]
"""

import argparse
import importlib.util
import inspect
import itertools
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from core.types import UsageError
from core.workshop import solutions as solutions
from core.workshop.exercises import EXERCISES, Exercise, Fact
from core.workshop.mistakes import MISTAKES, UNTOUCHED

FILE = Path(__file__).parents[2] / "scratch.py"
PATIENCE = 5.0  # seconds for one fact
COLUMNS = 12  # numbers of an answer that are shown
STATES = {"right": "[green]✓ right[/]", "wrong": "[red]✗ wrong[/]", "not yet": "[dim]· not yet[/]"}


@dataclass(frozen=True)
class Verdict:
    """How an exercise stands: "right", "wrong" or "not yet", and why it isn't right."""

    exercise: Exercise
    state: str
    fact: str = ""
    expected: str = ""
    actual: str = ""
    hint: str = ""


class Failed(Exception):
    """Somebody's function did not return: it raised, or it took too long. Says where and why."""


def run_command(args: list[str], file: Path = FILE) -> int:
    """What `python scratch.py ARGS` does. Returns 0 when all is right, 1 else, 2 for bad input."""
    parser = argparse.ArgumentParser("scratch.py", description="Check the exercises of scratch.py.")
    numbers = [exercise.number for exercise in EXERCISES]
    for flag, what in (("--hint", "a hint"), ("--solution", "an answer")):
        parser.add_argument(flag, type=int, choices=numbers, metavar="N", help=f"{what} for N")
    asked = parser.parse_args(args)
    if asked.hint:
        print(f"Exercise {asked.hint}: {EXERCISES[asked.hint - 1].hint}")
        return 0
    if asked.solution:
        name = EXERCISES[asked.solution - 1].name
        print(inspect.getsource(getattr(solutions, name)))
        return 0
    try:
        verdicts = check_all(load(file))
    except UsageError as error:
        print(f"scratch.py: {error}", file=sys.stderr)
        return 2
    show(verdicts, Console(highlight=False))
    return 0 if all(v.state == "right" for v in verdicts) else 1


def load(file: Path) -> ModuleType:
    """Somebody's scratch.py as a module. Raises UsageError in one line if it can't be imported."""
    spec = importlib.util.spec_from_file_location("scratch", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UsageError(f"{file.name}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        line = line_in(file, traceback.extract_tb(error.__traceback__))[0]
        raise UsageError(f"{file.name}, line {line}: {named(error)}") from None
    return module


def check_all(mine: ModuleType) -> list[Verdict]:
    """How each exercise stands, in order."""
    verdicts: list[Verdict] = []
    for exercise in EXERCISES:
        states = [verdicts[n - 1].state for n in exercise.needs]
        first = [n for n, s in zip(exercise.needs, states, strict=True) if s != "right"]
        verdict = check(exercise, mine)
        if first and verdict.state != "right":
            named = " and ".join(map(str, first))
            verdict = Verdict(exercise, "not yet", hint=f"needs exercise {named} first")
        verdicts.append(verdict)
    return verdicts


def check(exercise: Exercise, mine: ModuleType) -> Verdict:
    """The first fact that doesn't hold decides."""
    if not callable(vars(mine).get(exercise.name)):
        return Verdict(exercise, "wrong", hint=f"there is no function {exercise.name}")
    for fact in exercise.facts:
        expected = fact.of(solutions)
        try:
            actual = answer(fact, mine)
        except NotImplementedError:
            return Verdict(exercise, "not yet")
        except Failed as error:
            return Verdict(exercise, "wrong", fact.says, _short(expected), str(error), fact.hint)
        if not agree(expected, actual, fact.tolerance):
            mistake = find_mistake(exercise, fact, actual, mine)
            if mistake == UNTOUCHED:
                return Verdict(exercise, "not yet")
            hint = mistake or describe(fact, expected, actual)
            return Verdict(exercise, "wrong", fact.says, _short(expected), _short(actual), hint)
    return Verdict(exercise, "right")


def answer(fact: Fact, mine: ModuleType) -> Any:
    """What somebody's functions answer, within the time. Raises Failed, or NotImplementedError."""
    outcome: dict[str, Any] = {}

    def ask() -> None:
        try:
            outcome["answer"] = fact.of(mine)
        except BaseException as error:  # sys.exit() too
            outcome["error"] = error

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    file = Path(str(mine.__file__))
    if thread.is_alive():
        frame = sys._current_frames()[thread.ident or 0]
        line, _ = line_in(file, traceback.extract_stack(frame))
        raise Failed(f"{file.name}, line {line}: still running after {PATIENCE:g} s")
    error = outcome.get("error")
    if isinstance(error, NotImplementedError):
        raise error
    if error is not None:
        line, _ = line_in(file, traceback.extract_tb(error.__traceback__))
        raise Failed(f"{file.name}, line {line}: {named(error)}")
    return outcome["answer"]


def agree(expected: Any, actual: Any, tolerance: float) -> bool:
    """Same shape, same kind (bool or number), and all numbers near; NaN agrees with nothing."""
    if isinstance(expected, tuple):
        same = isinstance(actual, (tuple, list)) and len(actual) == len(expected)
        return same and all(map(agree, expected, actual, [tolerance] * len(expected)))
    if isinstance(expected, torch.Tensor) != isinstance(actual, torch.Tensor):
        return False  # a float is no tensor, nor the other way round
    try:
        want, have = torch.as_tensor(expected), torch.as_tensor(actual)
    except (TypeError, ValueError, RuntimeError):
        return False
    if want.shape != have.shape or (want.dtype == torch.bool) != (have.dtype == torch.bool):
        return False
    return torch.allclose(have.double(), want.double(), rtol=tolerance, atol=tolerance)


def find_mistake(exercise: Exercise, failed: Fact, actual: Any, mine: ModuleType) -> str:
    """The hint of the mistake with this answer to the fact that failed; "" if there is none.

    Of several, that which also answers most of the other facts as somebody's function does.
    """
    found = {}
    for hint, wrong in MISTAKES[exercise.name]:
        theirs = SimpleNamespace(**{**vars(solutions), exercise.name: wrong})
        if _alike(failed, theirs, actual):
            others = [fact for fact in exercise.facts if fact is not failed]
            found[hint] = sum(_alike(fact, theirs, _try(fact, mine)) for fact in others)
    return max(found, key=lambda hint: found[hint], default="")


def describe(fact: Fact, expected: Any, actual: Any) -> str:
    """What can be seen of a wrong answer, and the hint of its fact."""
    if actual is None:
        return "nothing came back: is there a `return`?"
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        if expected.shape != actual.shape:
            return f"the shape is {list(actual.shape)}, not {list(expected.shape)}: {fact.hint}"
        if agree(-1 * expected.double(), actual.double(), fact.tolerance):
            return f"the sign is the wrong way round: {fact.hint}"
        if actual.is_floating_point() and actual.isnan().any():
            return f"nan is not a number, from 0/0 or 0 · infinity: {fact.hint}"
    return fact.hint


def show(verdicts: list[Verdict], console: Console) -> None:
    """The table, then for each wrong one the first fact that fails."""
    table = Table("", "exercise", "", "read next", box=None, padding=(0, 2, 0, 0))
    for v in verdicts:
        after = v.exercise.read if v.state == "right" else v.hint if v.state == "not yet" else ""
        table.add_row(str(v.exercise.number), v.exercise.title, STATES[v.state], after)
    console.print(table)
    for v in verdicts:
        if v.state == "wrong":
            console.print(f"\n[bold]{v.exercise.number}. {v.exercise.name}[/] [red]✗[/] {v.fact}")
            rows = (("expected", v.expected), ("actual", v.actual), ("hint", v.hint))
            for label, text in rows:
                if text:
                    console.print(f"   {label:9}", end="")
                    console.print(text, markup=False, soft_wrap=True)
    open_ = [v for v in verdicts if v.state != "right"]
    if open_:
        number = open_[0].exercise.number
        console.print(f"\nNext: exercise {number}. Stuck? python scratch.py --hint {number}")
    else:
        console.print("\nAll right. Now train with it: python train.py --algo scratch")


def line_in(file: Path, frames: Any) -> tuple[int, str]:
    """(line, function) of the innermost of the frames that is in the file; (0, "") if none is."""
    inside = [f for f in frames if Path(f.filename).resolve() == file.resolve()]
    return (inside[-1].lineno, inside[-1].name) if inside else (0, "")


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].rstrip(": ")


def _try(fact: Fact, f: Any) -> Any:
    """The answer, or None if there is none."""
    try:
        return answer(fact, f) if isinstance(f, ModuleType) else fact.of(f)
    except (Failed, NotImplementedError, RuntimeError, ValueError, IndexError):
        return None


def _alike(fact: Fact, theirs: SimpleNamespace, actual: Any) -> bool:
    """Whether a mistake answers a fact so; infinity and NaN agree with their like here."""
    one, other = (
        x.detach().nan_to_num(777.0, 888.0, -888.0)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in (_try(fact, theirs), actual)
    )
    return agree(one, other, 1e-5)


def _short(value: Any) -> str:
    """An answer as people would write it down: four digits, not too many of them."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_short, value))})"
    if not isinstance(value, torch.Tensor):
        return f"{value:.4g}" if isinstance(value, float) else str(value)[:200]
    numbers = value.detach().flatten().tolist()
    if value.dim() == 0:
        return f"{numbers[0]:.4g}" if isinstance(numbers[0], float) else str(numbers[0])
    text = [f"{n:.4g}" if isinstance(n, float) else str(n) for n in itertools.islice(numbers, 12)]
    more = " .." if len(numbers) > COLUMNS else ""
    return f"[{' '.join(text)}{more}]" + (f" shape {list(value.shape)}" if value.dim() > 1 else "")
