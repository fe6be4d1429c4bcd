"""Checks the exercises of scratch.py: each is right, wrong, or not written yet.

    python scratch.py [--hint N | --solution N]

A wrong answer is compared with the answers of typical mistakes (core/workshop/mistakes.py), so that
the hint explains what the participant did. An exception or an endless loop in one exercise does not
stop the check of the others.
"""

import argparse
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from core.types import UsageError
from core.workshop import solutions
from core.workshop.exercises import EXERCISES, Exercise, Fact
from core.workshop.mistakes import MISTAKES, UNCHANGED

FILE = Path(__file__).parents[2] / "scratch.py"
TIME_LIMIT = 5.0  # seconds for one fact
MAX_NUMBERS = 12  # of an answer that are printed
State = Literal["right", "wrong", "not yet"]
LABELS = {"right": "[green]✓ right[/]", "wrong": "[red]✗ wrong[/]", "not yet": "[dim]· not yet[/]"}


@dataclass(frozen=True)
class Verdict:
    """The state of an exercise. If it is wrong, also the first fact that does not hold."""

    exercise: Exercise
    state: State
    statement: str = ""
    expected: str = ""
    actual: str = ""
    hint: str = ""


class AnswerError(Exception):
    """The participant's function raised or exceeded the time limit; says where and why."""


def run_command(args: list[str], file: Path = FILE) -> int:
    """Runs `python scratch.py ARGS`.

    Returns the exit code: 0 if all exercises are right, 1 if not, 2 if the file cannot be imported.
    """
    parser = argparse.ArgumentParser("scratch.py", description="Check the exercises of scratch.py.")
    numbers = [exercise.number for exercise in EXERCISES]
    for flag, what in (("--hint", "a hint for"), ("--solution", "a solution of")):
        parser.add_argument(
            flag, type=int, choices=numbers, metavar="N", help=f"print {what} exercise N"
        )
    options = parser.parse_args(args)
    if options.hint:
        print(f"Exercise {options.hint}: {EXERCISES[options.hint - 1].hint}")
        return 0
    if options.solution:
        name = EXERCISES[options.solution - 1].name
        print(inspect.getsource(getattr(solutions, name)))
        return 0
    try:
        verdicts = check_all(load(file))
    except UsageError as error:
        print(f"scratch.py: {error}", file=sys.stderr)
        return 2
    print_verdicts(verdicts, Console(highlight=False))
    return 0 if all(v.state == "right" for v in verdicts) else 1


def load(file: Path) -> ModuleType:
    """Imports a scratch.py. Raises UsageError, one line, if that fails."""
    spec = importlib.util.spec_from_file_location("scratch", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UsageError(f"{file.name}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        line, _ = innermost_line(file, traceback.extract_tb(error.__traceback__))
        raise UsageError(f"{file.name}, line {line}: {describe_error(error)}") from None
    return module


def check_all(module: ModuleType) -> list[Verdict]:
    """Returns the verdict on each exercise, in order."""
    verdicts: list[Verdict] = []
    for exercise in EXERCISES:
        verdict = check(exercise, module)
        open_ = [str(n) for n in exercise.needs if verdicts[n - 1].state != "right"]
        if open_ and verdict.state != "right":
            hint = f"first: exercise {', '.join(open_)}"
            verdict = Verdict(exercise, "not yet", hint=hint)
        verdicts.append(verdict)
    return verdicts


def check(exercise: Exercise, module: ModuleType) -> Verdict:
    """Returns the verdict on one exercise; the first fact that does not hold decides."""
    if not callable(vars(module).get(exercise.name)):
        return Verdict(exercise, "wrong", hint=f"there is no function {exercise.name}")
    for fact in exercise.facts:
        expected = fact.ask(solutions)
        try:
            actual = ask(fact, module)
        except NotImplementedError:
            return Verdict(exercise, "not yet")
        except AnswerError as error:
            shown = (_format(expected), str(error))
            return Verdict(exercise, "wrong", fact.statement, *shown, fact.hint)
        if not agree(expected, actual, fact.tolerance):
            mistake = find_mistake(exercise, fact, actual, module)
            if mistake == UNCHANGED:
                return Verdict(exercise, "not yet")
            shown = (_format(expected), _format(actual))
            hint = mistake or describe_answer(fact, expected, actual)
            return Verdict(exercise, "wrong", fact.statement, *shown, hint)
    return Verdict(exercise, "right")


def ask(fact: Fact, module: ModuleType) -> Any:
    """Returns the answer of the participant's functions to a fact.

    Raises NotImplementedError for an exercise that is not written yet; AnswerError if the function
    raised anything else or exceeded the time limit.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["answer"] = fact.ask(module)
        except BaseException as error:  # also SystemExit
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIME_LIMIT)
    file = Path(str(module.__file__))
    if thread.is_alive():
        frame = sys._current_frames()[thread.ident or 0]
        line, _ = innermost_line(file, traceback.extract_stack(frame))
        raise AnswerError(f"{file.name}, line {line}: still running after {TIME_LIMIT:g} s")
    error = outcome.get("error")
    if isinstance(error, NotImplementedError):
        raise error
    if error is not None:
        line, _ = innermost_line(file, traceback.extract_tb(error.__traceback__))
        raise AnswerError(f"{file.name}, line {line}: {describe_error(error)}")
    return outcome["answer"]


def agree(expected: Any, actual: Any, tolerance: float) -> bool:
    """Returns whether two answers have the same shape and kind (bool or number) and close values.

    NaN agrees with nothing. A Python number and a tensor do not agree.
    """
    if isinstance(expected, tuple):
        same = isinstance(actual, (tuple, list)) and len(actual) == len(expected)
        return same and all(map(agree, expected, actual, [tolerance] * len(expected)))
    if isinstance(expected, Tensor) != isinstance(actual, Tensor):
        return False
    try:
        a, b = torch.as_tensor(expected), torch.as_tensor(actual)
    except (TypeError, ValueError, RuntimeError):
        return False
    if a.shape != b.shape or (a.dtype == torch.bool) != (b.dtype == torch.bool):
        return False
    return torch.allclose(b.double(), a.double(), rtol=tolerance, atol=tolerance)


def find_mistake(exercise: Exercise, failed: Fact, actual: Any, module: ModuleType) -> str:
    """Returns the hint of the typical mistake that gives the same wrong answer, or "".

    If several do, returns the one that agrees with the participant on most of the other facts.
    """
    matches: dict[str, int] = {}
    for hint, wrong in MISTAKES[exercise.name]:
        functions = SimpleNamespace(**{**vars(solutions), exercise.name: wrong})
        if _same_answer(_try(failed, functions), actual):
            others = (fact for fact in exercise.facts if fact is not failed)
            matches[hint] = sum(_same_answer(_try(f, functions), _try(f, module)) for f in others)
    return max(matches, key=lambda hint: matches[hint], default="")


def describe_answer(fact: Fact, expected: Any, actual: Any) -> str:
    """Returns what is visibly wrong with an answer, and the hint of its fact."""
    if actual is None:
        return "the function returned None: is there a `return`?"
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if expected.shape != actual.shape:
            return f"the shape is {list(actual.shape)}, not {list(expected.shape)}: {fact.hint}"
        if agree(-1 * expected.double(), actual.double(), fact.tolerance):
            return f"the sign is wrong: {fact.hint}"
        if actual.is_floating_point() and actual.isnan().any():
            return f"the answer contains nan, from 0/0 or 0 · infinity: {fact.hint}"
    return fact.hint


def print_verdicts(verdicts: list[Verdict], console: Console) -> None:
    """Prints the table, the first failing fact of each wrong exercise, and what to do next."""
    table = Table("", "exercise", "", "next", box=None, padding=(0, 2, 0, 0))
    for v in verdicts:
        note = {"right": f"read {v.exercise.read}", "wrong": "", "not yet": v.hint}[v.state]
        table.add_row(str(v.exercise.number), v.exercise.title, LABELS[v.state], note)
    console.print(table)
    for v in verdicts:
        if v.state == "wrong":
            console.print(f"\n[bold]{v.exercise.number}. {v.exercise.name}[/] [red]✗[/] ", end="")
            console.print(v.statement, markup=False)
            for label in ("expected", "actual", "hint"):
                if text := getattr(v, label):
                    console.print(f"   {label:9}", end="")
                    console.print(text, markup=False, soft_wrap=True)
    number = next((v.exercise.number for v in verdicts if v.state != "right"), None)
    if number:
        console.print(f"\nNext: exercise {number}. For a hint: python scratch.py --hint {number}")
    else:
        console.print("\nAll right. Now train with your functions: python train.py --algo scratch")


def innermost_line(file: Path, frames: Iterable[traceback.FrameSummary]) -> tuple[int, str]:
    """Returns line and function of the innermost frame that is in `file`; (0, "") if none is."""
    inside = [frame for frame in frames if Path(frame.filename).resolve() == file.resolve()]
    return (inside[-1].lineno or 0, inside[-1].name) if inside else (0, "")


def describe_error(error: BaseException) -> str:
    """Returns the type and the message of an error in one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].rstrip(": ")


def _try(fact: Fact, functions: ModuleType | SimpleNamespace) -> Any:
    """Returns the answer, or None if there is none."""
    try:
        return ask(fact, functions) if isinstance(functions, ModuleType) else fact.ask(functions)
    except (AnswerError, NotImplementedError, RuntimeError, ValueError, IndexError):
        return None


def _same_answer(a: Any, b: Any) -> bool:
    """Like `agree`, but nan agrees with nan and infinity with infinity."""

    def finite(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.detach().nan_to_num(777.0, 888.0, -888.0)
        return x

    return agree(finite(a), finite(b), 1e-5)


def _format(value: Any) -> str:
    """Returns an answer as text, with four digits and at most MAX_NUMBERS numbers."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_format, value))})"
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, Tensor):
        return str(value)[:200]
    numbers = value.detach().flatten().tolist()
    if value.dim() == 0:
        return _format(numbers[0])
    more = " .." if len(numbers) > MAX_NUMBERS else ""
    text = f"[{' '.join(map(_format, numbers[:MAX_NUMBERS]))}{more}]"
    return f"{text} shape {list(value.shape)}" if value.dim() > 1 else text
