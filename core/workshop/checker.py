"""Checks the exercises of scratch.py: each is right, wrong, or not written yet.

    python scratch.py [--hint N [STEP] | --solution N]

For a wrong answer the checker prints the first fact that fails, the inputs, the expected and the
actual answer, what differs first, and the cause, if it knows a mistake (core/workshop/mistakes.py)
with the same answers. An exception in one exercise does not stop the check of the others. After
ten seconds the terminal shows which line is at work, and Ctrl-C ends an endless loop.
"""

import argparse
import faulthandler
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from core.faults import UsageError
from core.workshop import solutions
from core.workshop.exercises import EXERCISES, Exercise, Fact
from core.workshop.mistakes import NOT_REPAIRED, changed_solution, mistakes_in
from environments.plumbing.registry import describe_error
from environments.plumbing.text import print_any_character

FILE = Path(__file__).parents[2] / "scratch.py"
SLOW = 10.0  # seconds
LABELS = {"right": "[green]✓ right[/]", "wrong": "[red]✗ wrong[/]", "not yet": "[dim]· not yet[/]"}


@dataclass(frozen=True)
class Verdict:
    """The state of an exercise. If it is wrong, also the first fact that does not hold."""

    exercise: Exercise
    state: Literal["right", "wrong", "not yet"]
    statement: str = ""
    rows: dict[str, str] = field(default_factory=dict)  # inputs, expected, actual, differs, cause


def execute(args: list[str], file: Path = FILE) -> int:
    """What `python scratch.py ARGS` does.

    Returns the exit code: 0 if all exercises are right, 1 if not, 2 if the file cannot be imported.
    """
    parser = argparse.ArgumentParser("scratch.py", description="Check the exercises of scratch.py.")
    add = partial(parser.add_argument, type=int, choices=range(1, 11))
    hint = "print a hint for exercise N. STEP 1 (default): a question, 2: the idea, 3: the line"
    add("--hint", nargs="+", metavar=("N", "STEP"), help=hint)
    add("--solution", metavar="N", help="print a solution of exercise N")
    options = parser.parse_args(args)
    print_any_character()
    if options.solution:
        print(source_of(EXERCISES[options.solution - 1]))
        return 0
    if options.hint:
        number, *steps = options.hint
        if len(steps) > 1 or not {*steps} <= {1, 2, 3}:
            parser.error("the step of a hint is 1, 2 or 3")
        print_hint(EXERCISES[number - 1], *steps)
        return 0
    torch.set_printoptions(precision=4, threshold=40, linewidth=90, sci_mode=False)
    faulthandler.dump_traceback_later(SLOW, file=sys.__stderr__ or sys.stderr)
    try:
        verdicts = check_all(load(file))
    except UsageError as error:
        print(f"{file.name}: {error}", file=sys.stderr)
        return 2
    finally:
        faulthandler.cancel_dump_traceback_later()
    print_verdicts(verdicts, name_of(file))
    return 0 if all(v.state == "right" for v in verdicts) else 1


def name_of(file: Path) -> str:
    """A participant's file, which may be a copy of scratch.py, as a command names it."""
    return file.name if file.absolute().parent == Path.cwd() else str(file)


def source_of(exercise: Exercise) -> str:
    """The code of the solution."""
    return inspect.getsource(getattr(solutions, exercise.name))


def load(file: Path) -> ModuleType:
    """Imports a scratch.py. Raises UsageError, one line, if that fails."""
    spec = importlib.util.spec_from_file_location("scratch", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(describe_error(error)) from None
    return module


def check_all(module: ModuleType) -> list[Verdict]:
    """Returns the verdict on each exercise, in order.

    An exercise is judged alone: in place of those that are not right, it calls the solutions.
    """
    own, verdicts = {**vars(module)}, list[Verdict]()
    for exercise in EXERCISES:
        verdicts.append(check(exercise, module))
        if verdicts[-1].state != "right" and exercise.name in own:
            vars(module)[exercise.name] = getattr(solutions, exercise.name)
    vars(module).update(own)
    return verdicts


def check(exercise: Exercise, module: ModuleType) -> Verdict:
    """Returns the verdict on one exercise; the first fact that does not hold decides."""
    name = exercise.name
    if not callable(vars(module).get(name)):
        return Verdict(exercise, "wrong", f"there is no function {name}")
    answers = [fact.answer(vars(module)[name]) for fact in exercise.facts]
    if any(isinstance(answer, NotImplementedError) for answer in answers):
        return Verdict(exercise, "not yet")

    def differences(function: Callable[..., Any]) -> Iterator[str]:
        for fact, answer in zip(exercise.facts, answers, strict=True):
            yield difference(_answer(fact, function), answer, fact.tolerance)

    solution = getattr(solutions, name)
    found = [*differences(solution)]
    if not any(found):
        return Verdict(exercise, "right")
    causes = [
        cause for cause, changes in mistakes_in(name).items()
        if any(not any(differences(changed_solution(name, change))) for change in changes)
    ]  # fmt: skip
    if NOT_REPAIRED in causes:
        return Verdict(exercise, "not yet")
    i = next(i for i, differs in enumerate(found) if differs)
    fact, actual = exercise.facts[i], answers[i]
    named = zip(inspect.signature(solution).parameters, map(_format, fact.inputs), strict=False)
    rows = {"inputs": "\n".join(f"{k} =\n{v}" if "\n" in v else f"{k} = {v}" for k, v in named)}
    rows |= {"expected": _format(_answer(fact, solution)), "actual": _format(actual)}
    rows["differs"] = "" if isinstance(actual, Exception) else found[i]
    rows["cause"] = "; or: ".join(causes)
    return Verdict(exercise, "wrong", fact.statement, rows)


def difference(expected: Any, actual: Any, tolerance: float | None) -> str:
    """Returns what differs first in an answer: type, shape or a number; "" if nothing does.

    A list counts as a tuple; int32 and int64 are one type, float32 and float64 too. nan equals nan.
    `tolerance` is absolute and relative; without one, numbers do not matter.
    """
    if isinstance(actual, Exception):
        return "" if repr(expected) == repr(actual) else describe_error(actual)
    if _kind(expected) != _kind(actual):
        return f"the type is {_kind(actual)}, not {_kind(expected)}"
    if isinstance(expected, tuple):
        parts = (difference(a, b, tolerance) for a, b in zip(expected, actual, strict=True))
        return next((f"result {i}: {text}" for i, text in enumerate(parts, 1) if text), "")
    a, b = (torch.as_tensor(x).detach().double() for x in (expected, actual))
    if a.shape != b.shape:
        return f"the shape is {[*b.shape]}, not {[*a.shape]}"
    if tolerance is None:
        return ""
    places = torch.isclose(b, a, tolerance, tolerance, equal_nan=True).logical_not().nonzero()
    if not len(places):
        return ""
    first = tuple(places[0].tolist())
    return f"the number{f' at {[*first]}' if first else ''} is {b[first]:.4g}, not {a[first]:.4g}"


def print_verdicts(verdicts: list[Verdict], file: str) -> None:
    """Prints the table, the first failing fact of each wrong exercise, and what to do next.

    `file`: the participant's, as `name_of` names it.
    """
    console = Console(highlight=False)
    train = f"python train.py --algo {'scratch' if file == 'scratch.py' else file}"
    table = Table("", "exercise", "", "next", box=None, padding=(0, 2, 0, 0))
    for v in verdicts:
        note = f"read {v.exercise.read}" if v.state == "right" else ""
        table.add_row(str(v.exercise.number), v.exercise.title, LABELS[v.state], note)
    console.print(table)
    say = partial(console.print, markup=False, soft_wrap=True)
    for v in verdicts:
        if v.state == "wrong":
            say(f"\n{v.exercise.number}. {v.exercise.name} ✗ {v.statement}", style="red")
        for label, text in v.rows.items():
            if text:
                say(indent(text, " " * 13).replace(" " * 13, f"   {label:10}", 1))
    number = next((v.exercise.number for v in verdicts if v.state != "right"), None)
    if number is None:
        say(f"\nAll right. Now train with your functions: {train}")
    else:
        say(f"\nNext: exercise {number}. For a hint: python {file} --hint {number}")
        if number > 4:
            say(f"You can train with these already: {train}")


def print_hint(exercise: Exercise, step: int = 1) -> None:
    """Prints one step of the hints for an exercise, and how to get the next one."""
    lines = source_of(exercise).splitlines()
    line = next(line.strip() for line in lines if exercise.line in line)
    print((exercise.question, exercise.idea, line)[step - 1])
    more = f"--hint {exercise.number} {step + 1}" if step < 3 else f"--solution {exercise.number}"
    print(f"More: python scratch.py {more}")


@cache
def _answer(fact: Fact, function: Callable[..., Any]) -> Any:
    """Returns the answer of a solution, or of one with a mistake."""
    with warnings.catch_warnings(action="ignore"):  # those of the mistakes
        return fact.answer(function)


def _kind(value: Any) -> str:
    """Returns the type of a result in words."""
    if isinstance(value, tuple | list):
        return f"a tuple of {len(value)}"
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    number = "a float" if value.is_floating_point() else "an integer"
    return f"{'a bool' if value.dtype == torch.bool else number} tensor"


def _format(value: Any) -> str:
    """Returns an input or an answer as text."""
    if isinstance(value, Exception):
        return describe_error(value)
    if isinstance(value, tuple | list):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(map(_format, value))}{right}"
    if isinstance(value, Tensor | str):
        return str(value.detach() if isinstance(value, Tensor) else value)
    return f"{value:.4g}" if isinstance(value, int | float) else _kind(value)
