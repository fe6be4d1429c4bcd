"""Checks the exercises of scratch.py: each is right, wrong, or not written yet.

    python scratch.py [--hint N [STEP] | --solution N]

For a wrong answer the checker prints the first fact that fails, the inputs, the expected and the
actual answer, what differs first, and the cause, if it knows a mistake (core/workshop/mistakes.py)
with the same answers. An exception in one exercise does not stop the check of the others. After
ten seconds the terminal shows which line is at work, and Ctrl-C ends an endless loop.
"""

import argparse
import copy
import faulthandler
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from textwrap import indent
from types import ModuleType, SimpleNamespace
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
State = Literal["right", "wrong", "not yet"]
LABELS = {"right": "[green]✓ right[/]", "wrong": "[red]✗ wrong[/]", "not yet": "[dim]· not yet[/]"}
STEPS = ("question", "idea", "line")


@dataclass(frozen=True)
class Verdict:
    """The state of an exercise. If it is wrong, also the first fact that does not hold."""

    exercise: Exercise
    state: State
    statement: str = ""
    rows: dict[str, str] = field(default_factory=dict)  # inputs, expected, actual, differs, cause


def execute(args: list[str], file: Path = FILE) -> int:
    """What `python scratch.py ARGS` does.

    Returns the exit code: 0 if all exercises are right, 1 if not, 2 if the file cannot be imported.
    """
    parser = argparse.ArgumentParser("scratch.py", description="Check the exercises of scratch.py.")
    hint = "print a hint for exercise N. STEP 1 (default): a question, 2: the idea, 3: the line"
    parser.add_argument("--hint", type=int, nargs="+", metavar=("N", "STEP"), help=hint)
    parser.add_argument("--solution", type=int, metavar="N", help="print a solution of exercise N")
    options = parser.parse_args(args)
    asks_solution = options.solution is not None
    given: list[int] = [options.solution] if asks_solution else options.hint or [1]
    number, step, *more = [*given, 1, 1]
    if number not in range(1, 11) or step not in (1, 2, 3) or len(more) > 2:
        parser.error("an exercise is 1 to 10, the step of a hint 1, 2 or 3")
    print_any_character()
    if asks_solution:
        print(inspect.getsource(getattr(solutions, EXERCISES[number - 1].name)))
        return 0
    if options.hint:
        print_hint(EXERCISES[number - 1], step)
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
    print_verdicts(verdicts, Console(highlight=False), name_of(file))
    return 0 if all(v.state == "right" for v in verdicts) else 1


def name_of(file: Path) -> str:
    """A participant's file, which may be a copy of scratch.py, as a command names it."""
    return file.name if file.absolute().parent == Path.cwd() else str(file)


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
    """Returns the verdict on each exercise, in order."""
    return [check(exercise, module) for exercise in EXERCISES]


def check(exercise: Exercise, module: ModuleType | SimpleNamespace) -> Verdict:
    """Returns the verdict on one exercise; the first fact that does not hold decides.

    It is judged alone: the exercises that it calls are those of the solutions. If it is wrong with
    them, it may still be right with the participant's own, which can accept more.
    """
    own = {e.name: vars(module)[e.name] for e in EXERCISES if e.name in vars(module)}
    others = {name: getattr(solutions, name) for name in own if name != exercise.name}
    vars(module).update(others)
    try:
        verdict = _check(exercise, module)
    finally:
        vars(module).update(own)
    if verdict.state == "wrong" and _check(exercise, module).state == "right":
        return Verdict(exercise, "right")
    return verdict


def ask(fact: Fact, functions: ModuleType | SimpleNamespace, name: str) -> tuple[Any, str]:
    """Returns the answer of `functions` to a fact, and the inputs of the first call of the function
    `name`. If one of them raises an exception, this is the answer."""
    inputs: list[str] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_copy, args))  # a function may change its inputs in place
        if not inputs:
            given = inspect.signature(getattr(solutions, name)).bind(*args, **kwargs).arguments
            texts = {key: _format(value) for key, value in given.items()}
            inputs.extend(f"{k} =\n{v}" if "\n" in v else f"{k} = {v}" for k, v in texts.items())
        return getattr(functions, name)(*args, **kwargs)

    try:
        answer = fact.ask(SimpleNamespace(**{**vars(functions), name: record}))
    except Exception as error:
        answer = error
    return answer, "\n".join(inputs)


def difference(expected: Any, actual: Any, tolerance: float | None) -> str:
    """Returns what differs first in an answer: type, shape or a number; "" if nothing does.

    A list counts as a tuple; int32 and int64 are one type, float32 and float64 too. nan equals nan.
    `tolerance` is absolute and relative; without one, numbers do not matter.
    """
    if isinstance(expected, Exception) or isinstance(actual, Exception):
        return "" if repr(expected) == repr(actual) else "an exception"
    if isinstance(expected, tuple):
        if not isinstance(actual, tuple | list) or len(actual) != len(expected):
            return f"{_kind(actual)}; a tuple of {len(expected)} is asked for"
        found = [difference(a, b, tolerance) for a, b in zip(expected, actual, strict=True)]
        return next((f"result {i}: {text}" for i, text in enumerate(found, 1) if text), "")
    if _kind(expected) != _kind(actual):
        return f"{_kind(actual)}; {_kind(expected)} is asked for"
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


def find_causes(exercise: Exercise, module: ModuleType | SimpleNamespace) -> list[str]:
    """Returns the causes of the mistakes that have all answers of the participant."""
    name = exercise.name
    theirs = [(fact, ask(fact, module, name)[0]) for fact in exercise.facts]

    def is_theirs(change: Any) -> bool:
        wrong = changed_solution(name, change)
        return not any(
            difference(_answer(fact, name, wrong)[0], answer, fact.tolerance)
            for fact, answer in theirs
        )

    return [cause for cause, changes in mistakes_in(name).items() if any(map(is_theirs, changes))]


def print_verdicts(verdicts: list[Verdict], console: Console, file: str) -> None:
    """Prints the table, the first failing fact of each wrong exercise, and what to do next.

    `file`: the participant's, as `name_of` names it.
    """
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


def print_hint(exercise: Exercise, step: int) -> None:
    """Prints one step of the hints for an exercise, and how to get the next one."""
    source = inspect.getsource(getattr(solutions, exercise.name)).splitlines()
    line = next(line.strip() for line in source if exercise.line in line)
    number, hint = exercise.number, (exercise.question, exercise.idea, line)[step - 1]
    print(f"Exercise {number}, the {STEPS[step - 1]}: {hint}")
    if step < 3:
        print(f"The {STEPS[step]}: python scratch.py --hint {number} {step + 1}")
    else:
        print(f"The whole function: python scratch.py --solution {number}")


def _check(exercise: Exercise, module: ModuleType | SimpleNamespace) -> Verdict:
    """Returns the verdict on one exercise, with the other functions of `module` as they are."""
    name = exercise.name
    if not callable(vars(module).get(name)):
        return Verdict(exercise, "wrong", f"there is no function {name}")
    for fact in exercise.facts:
        expected, inputs = _answer(fact, name, getattr(solutions, name))
        actual, _ = ask(fact, module, name)
        if isinstance(actual, NotImplementedError):
            return Verdict(exercise, "not yet")
        differs = difference(expected, actual, fact.tolerance)
        if not differs:
            continue
        causes = find_causes(exercise, module)
        if NOT_REPAIRED in causes:
            return Verdict(exercise, "not yet")
        rows = {"inputs": inputs, "expected": _format(expected), "actual": _format(actual)}
        if not isinstance(actual, Exception):
            rows["differs"] = differs
        rows["cause"] = "; or: ".join(causes)
        return Verdict(exercise, "wrong", fact.statement, rows)
    return Verdict(exercise, "right")


@cache
def _answer(fact: Fact, name: str, function: Callable[..., Any]) -> tuple[Any, str]:
    """Returns what `ask` returns for the solutions, with `function` as exercise `name`."""
    with warnings.catch_warnings(action="ignore"):  # those of the mistakes
        return ask(fact, SimpleNamespace(**{**vars(solutions), name: function}), name)


def _copy(value: Any) -> Any:
    """Returns a copy of a tensor, with its gradient, or of a list; anything else as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.deepcopy(value) if isinstance(value, list) else value


def _kind(value: Any) -> str:
    """Returns the type of a result in words."""
    if isinstance(value, Tensor):
        number = "a float" if value.is_floating_point() else "an integer"
        return f"{'a bool' if value.dtype == torch.bool else number} tensor"
    return "None" if value is None else f"a {type(value).__name__}"


def _format(value: Any) -> str:
    """Returns an input or an answer as text."""
    if isinstance(value, Exception):
        return describe_error(value)
    if isinstance(value, tuple | list):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(map(_format, value))}{right}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Tensor):
        return str(value.detach())
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.Generator):
        return f"a {type(value).__name__}"
    return str(value)[:200]
