"""Checks the exercises of scratch.py: each is right, wrong, or not written yet.

    python scratch.py [--hint N [STEP] | --solution N]

For a wrong answer the checker prints the first fact that fails, the inputs, the expected and the
actual answer, the first difference, and the cause, if a mistake of core/workshop/mistakes.py gives
the same answers. An exception in one exercise does not stop the check of the others. After ten
seconds the terminal shows the line that runs, and Ctrl-C ends an endless loop.
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
from core.workshop.mistakes import NOT_REPAIRED, Change, changed_solution, mistakes_in
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
    print_verdicts(verdicts, path_in_command(file))
    return 0 if all(verdict.state == "right" for verdict in verdicts) else 1


def path_in_command(file: Path) -> str:
    """The path of a participant's file, which may be a copy of scratch.py, for a command."""
    return file.name if file.absolute().parent == Path.cwd() else str(file)


def source_of(exercise: Exercise) -> str:
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

    An exercise is judged alone: it calls the solutions in place of exercises that are not right.
    """
    participant, verdicts = {**vars(module)}, list[Verdict]()
    for exercise in EXERCISES:
        verdicts.append(check(exercise, module))
        if verdicts[-1].state != "right" and exercise.name in participant:
            vars(module)[exercise.name] = getattr(solutions, exercise.name)
    vars(module).update(participant)
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
            yield difference(cached_answer(fact, function), answer, fact.tolerance)

    def gives_the_answers(change: Change) -> bool:
        return not any(differences(changed_solution(name, change)))

    solution = getattr(solutions, name)
    checked = zip(exercise.facts, answers, differences(solution), strict=True)
    failing = next((row for row in checked if row[-1]), None)
    if failing is None:
        return Verdict(exercise, "right")
    mistakes = mistakes_in(name)
    causes = [cause for cause in mistakes if any(map(gives_the_answers, mistakes[cause]))]
    if NOT_REPAIRED in causes:
        return Verdict(exercise, "not yet")
    fact, actual, differs = failing
    inputs = list[str]()
    for parameter, value in zip(inspect.signature(solution).parameters, fact.inputs, strict=False):
        text = _format(value)
        inputs.append(f"{parameter} =\n{text}" if "\n" in text else f"{parameter} = {text}")
    rows = {"inputs": "\n".join(inputs), "expected": _format(cached_answer(fact, solution))}
    rows["actual"] = _format(actual)
    rows["differs"] = "" if isinstance(actual, Exception) else differs
    rows["cause"] = "; or: ".join(causes)
    return Verdict(exercise, "wrong", fact.statement, rows)


def difference(expected: Any, actual: Any, tolerance: float | None) -> str:
    """Returns the first difference of an answer: its type, its shape or a number; "" if none.

    A list counts as a tuple; int32 and int64 are one type, float32 and float64 too. nan equals nan.
    `tolerance` is absolute and relative; None: numbers are not compared.
    """
    if isinstance(actual, Exception):
        return "" if repr(expected) == repr(actual) else describe_error(actual)
    if _kind(expected) != _kind(actual):
        return f"the type is {_kind(actual)}, not {_kind(expected)}"
    if isinstance(expected, tuple):
        parts = (difference(a, b, tolerance) for a, b in zip(expected, actual, strict=True))
        return next((f"result {i}: {text}" for i, text in enumerate(parts, 1) if text), "")
    right = torch.as_tensor(expected).detach().double()
    answer = torch.as_tensor(actual).detach().double()
    if right.shape != answer.shape:
        return f"the shape is {[*answer.shape]}, not {[*right.shape]}"
    if tolerance is None:
        return ""
    is_close = torch.isclose(answer, right, tolerance, tolerance, equal_nan=True)
    if is_close.all():
        return ""
    first = tuple(is_close.logical_not().nonzero()[0].tolist())
    place = f" at {[*first]}" if first else ""
    return f"the number{place} is {answer[first]:.4g}, not {right[first]:.4g}"


def print_verdicts(verdicts: list[Verdict], file: str) -> None:
    """Prints the table, the first failing fact of each wrong exercise, and what to do next."""
    console = Console(highlight=False)
    train = f"python train.py --algo {'scratch' if file == 'scratch.py' else file}"
    table = Table("", "exercise", "", "next", box=None, padding=(0, 2, 0, 0))
    for verdict in verdicts:
        exercise = verdict.exercise
        note = f"read {exercise.read}" if verdict.state == "right" else ""
        table.add_row(str(exercise.number), exercise.title, LABELS[verdict.state], note)
    console.print(table)
    say = partial(console.print, markup=False, soft_wrap=True)
    for verdict in verdicts:
        if verdict.state == "wrong":
            exercise = verdict.exercise
            say(f"\n{exercise.number}. {exercise.name} ✗ {verdict.statement}", style="red")
        for label, text in verdict.rows.items():
            if text:
                say(indent(text, " " * 13).replace(" " * 13, f"   {label:10}", 1))
    unfinished = [verdict.exercise.number for verdict in verdicts if verdict.state != "right"]
    if unfinished:
        number = unfinished[0]
        say(f"\nNext: exercise {number}. For a hint: python {file} --hint {number}")
        if number > 4:
            say(f"You can train with these already: {train}")
    else:
        say(f"\nAll right. Now train with your functions: {train}")


def print_hint(exercise: Exercise, step: int = 1) -> None:
    """Prints one step of the hints for an exercise, and how to get the next one."""
    lines = source_of(exercise).splitlines()
    line = next(line.strip() for line in lines if exercise.line in line)
    print((exercise.question, exercise.idea, line)[step - 1])
    more = f"--hint {exercise.number} {step + 1}" if step < 3 else f"--solution {exercise.number}"
    print(f"More: python scratch.py {more}")


@cache
def cached_answer(fact: Fact, function: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # the mistakes raise some
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
    if isinstance(value, Exception):
        return describe_error(value)
    if isinstance(value, tuple | list):
        parts = ", ".join(map(_format, value))
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if isinstance(value, Tensor):
        return str(value.detach())
    if isinstance(value, int | float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else _kind(value)
