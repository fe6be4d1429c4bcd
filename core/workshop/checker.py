"""Checks the exercises of scratch.py: each is right, wrong, or not written yet.

    python scratch.py [--hint N [STEP] | --solution N]

For a wrong answer the checker prints the first fact that fails, the inputs, the expected and the
actual answer, and the cause: a wrong type, or the typical mistake (core/workshop/mistakes.py) with
the same answers. If no typical mistake matches, it says what it observed. An exception or an
endless loop in one exercise does not stop the check of the others.
"""

import argparse
import copy
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from core.calls import in_thread
from core.faults import UsageError
from core.workshop import solutions
from core.workshop.exercises import EXERCISES, Exercise, Fact
from core.workshop.mistakes import advantages_as_given, changed_solution, mistakes_in
from environments.plumbing.registry import describe_error
from environments.plumbing.text import print_any_character

FILE = Path(__file__).parents[2] / "scratch.py"
TIME_LIMIT = 5.0  # seconds for one fact
State = Literal["right", "wrong", "not yet"]
LABELS = {"right": "[green]✓ right[/]", "wrong": "[red]✗ wrong[/]", "not yet": "[dim]· not yet[/]"}
STEPS = ("question", "idea", "line")


@dataclass(frozen=True)
class Verdict:
    """The state of an exercise. If it is not right, also the first fact that does not hold."""

    exercise: Exercise
    state: State
    statement: str = ""
    inputs: str = ""
    expected: str = ""
    actual: str = ""
    cause: str = ""  # what the participant did, if that is known
    observed: str = ""  # else: how the answer differs from the expected one


@dataclass
class Answer:
    """What a set of functions answers to a fact."""

    value: Any = None
    inputs: list[str] = field(default_factory=list)  # of the first call of the exercise's function
    returned: Any = None  # by its last call
    was_called: bool = False
    error: BaseException | None = None


def execute(args: list[str], file: Path = FILE) -> int:
    """What `python scratch.py ARGS` does.

    Returns the exit code: 0 if all exercises are right, 1 if not, 2 if the file cannot be imported.
    """
    parser = argparse.ArgumentParser("scratch.py", description="Check the exercises of scratch.py.")
    numbers = [exercise.number for exercise in EXERCISES]
    parser.add_argument(
        "--hint", type=int, nargs="+", metavar=("N", "STEP"),
        help="print a hint for exercise N. STEP 1 (default): a question, 2: the idea, 3: the line",
    )  # fmt: skip
    parser.add_argument(
        "--solution", type=int, choices=numbers, metavar="N", help="print a solution of exercise N"
    )
    options = parser.parse_args(args)
    print_any_character()
    if options.solution:
        name = EXERCISES[options.solution - 1].name
        print(inspect.getsource(getattr(solutions, name)))
        return 0
    if options.hint:
        number, step = (*options.hint, 1)[:2]
        if number not in numbers or step not in (1, 2, 3) or len(options.hint) > 2:
            parser.error("--hint takes an exercise, 1 to 10, and a step: 1, 2 or 3")
        print_hint(EXERCISES[number - 1], step)
        return 0
    torch.set_printoptions(precision=4, threshold=40, linewidth=90, sci_mode=False)
    try:
        verdicts = check_all(load(file))
    except UsageError as error:
        print(f"{file.name}: {error}", file=sys.stderr)
        return 2
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

    The exercises that it calls are those of the solutions, so that it is judged alone, and an error
    is shown in its own line. If it is wrong with them, it may still be right with the participant's
    own, which can accept more.
    """
    own = {name: vars(module)[name] for name in exercise.calls if name in vars(module)}
    vars(module).update({name: getattr(solutions, name) for name in own})
    try:
        verdict = _check(exercise, module)
    finally:
        vars(module).update(own)
    if own and verdict.state == "wrong":
        with_own = _check(exercise, module)
        return with_own if with_own.state == "right" else verdict
    return verdict


def ask(fact: Fact, functions: ModuleType | SimpleNamespace, name: str) -> Answer:
    """Returns the answer of `functions` to a fact, with the inputs of the function `name`.

    If one of them raises or exceeds the time limit, the answer has the error.
    """
    answer = Answer()

    def record(*args: Any, **kwargs: Any) -> Any:
        function = getattr(functions, name)
        args = tuple(map(_copy, args))  # a function may change its inputs in place
        if not answer.inputs:
            given = inspect.signature(getattr(solutions, name)).bind(*args, **kwargs).arguments
            texts = {key: _format(value) for key, value in given.items()}
            answer.inputs = [f"{k} =\n{v}" if "\n" in v else f"{k} = {v}" for k, v in texts.items()]
        answer.returned = function(*args, **kwargs)
        answer.was_called = True
        return answer.returned

    asked = in_thread(lambda: fact.ask(SimpleNamespace(**{**vars(functions), name: record})))
    futures.wait([asked], TIME_LIMIT)
    if not asked.done():
        return Answer(error=TimeoutError(f"still running after {TIME_LIMIT:g} s"))
    answer.error = asked.exception()  # also SystemExit
    answer.value = None if answer.error else asked.result()
    return answer


def agree(expected: Any, actual: Any, tolerance: float, equal_nan: bool = False) -> bool:
    """Returns whether two answers have the same shape and kind (bool or number) and close values.

    A Python number and a tensor do not agree.
    """
    if isinstance(expected, tuple):
        return isinstance(actual, (tuple, list)) and len(actual) == len(expected) and all(
            agree(a, b, tolerance, equal_nan) for a, b in zip(expected, actual, strict=True)
        )  # fmt: skip
    if isinstance(expected, Tensor) != isinstance(actual, Tensor):
        return False
    try:
        a, b = torch.as_tensor(expected), torch.as_tensor(actual)
    except (TypeError, ValueError, RuntimeError):
        return False
    if a.shape != b.shape or (a.dtype == torch.bool) != (b.dtype == torch.bool):
        return False
    return torch.allclose(b.double(), a.double(), tolerance, tolerance, equal_nan)


def wrong_type(expected: Any, actual: Any) -> str:
    """Returns what is wrong with the type of a result, "" if nothing. A list counts as a tuple.

    Does not compare shapes and values.
    """
    are_tuples = isinstance(expected, tuple) and isinstance(actual, (tuple, list))
    if are_tuples and len(expected) == len(actual):
        problems = enumerate(map(wrong_type, expected, actual), 1)
        return next((f"result {i}: {problem}" for i, problem in problems if problem), "")
    asked, got = _kind(expected), _kind(actual)
    if asked == got or (asked == "a float" and got == "an integer"):
        return ""
    return f"the function returned {got}; {asked} is asked for"


def find_causes(exercise: Exercise, module: ModuleType | SimpleNamespace) -> list[str]:
    """Returns the causes of the typical mistakes that have all answers of the participant."""
    name, facts = exercise.name, exercise.facts
    theirs = [ask(fact, module, name) for fact in facts]

    def is_theirs(change: Any) -> bool:
        wrong = changed_solution(name, change)
        return all(
            _same_answer(_answer(fact, name, wrong), answer, fact.tolerance)
            for fact, answer in zip(facts, theirs, strict=True)
        )

    return [cause for cause, changes in mistakes_in(name).items() if any(map(is_theirs, changes))]


def describe_difference(expected: Any, actual: Any) -> str:
    """Returns how an answer of the right type differs from the expected one: only what is seen."""
    if isinstance(expected, tuple):
        if isinstance(expected[0], int):
            return f"the shape is {list(actual)}, not {list(expected)}"
        pairs = enumerate(zip(expected, actual, strict=False), 1)
        return "; ".join(f"result {i}: {describe_difference(a, b)}" for i, (a, b) in pairs)
    a, b = (torch.as_tensor(x).detach().double() for x in (expected, actual))
    if a.shape != b.shape:
        return f"the shape is {list(b.shape)}, not {list(a.shape)}"
    if not b.isfinite().all():
        return f"{int((~b.isfinite()).sum())} of {b.numel()} numbers are nan or infinity"
    factors = (b / a)[a != 0]
    if len(factors) and agree(a * factors[0], b, 1e-3):
        return f"every number is {factors[0]:.4g} times the expected one"
    wrong = int((~torch.isclose(a, b, rtol=1e-3, atol=1e-3)).sum())
    return f"{wrong} of {b.numel()} numbers differ, by up to {(b - a).abs().max():.4g}"


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
    for v in verdicts:
        if v.state == "wrong":
            print_details(v, console)
    number = next((v.exercise.number for v in verdicts if v.state != "right"), None)
    lines = [f"\nAll right. Now train with your functions: {train}"]
    if number:
        lines = [f"\nNext: exercise {number}. For a hint: python {file} --hint {number}"]
        lines += [f"You can train with these already: {train}"] if number > 4 else []
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def print_details(verdict: Verdict, console: Console) -> None:
    """Prints the fact that fails: inputs, expected and actual answer, and the cause."""
    console.print(
        f"\n[bold]{verdict.exercise.number}. {verdict.exercise.name}[/] [red]✗[/] ", end=""
    )
    console.print(verdict.statement, markup=False, soft_wrap=True)
    rows = {"inputs": verdict.inputs, "expected": verdict.expected, "actual": verdict.actual}
    unknown = f"{verdict.observed} (no mistake that the checker knows has the same answers)"
    rows |= {"cause": verdict.cause} if verdict.cause else {"observed": unknown}
    for label, text in rows.items():
        for first, line in enumerate(text.splitlines()):
            console.print(f"   {'' if first else label:10}{line}", markup=False, soft_wrap=True)


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
    if not callable(vars(module).get(exercise.name)):
        return Verdict(exercise, "wrong", cause=f"there is no function {exercise.name}")
    if _is_as_given(vars(module)[exercise.name]):
        return Verdict(exercise, "not yet")
    for fact in exercise.facts:
        expected = _answer(fact, exercise.name, getattr(solutions, exercise.name))
        actual = ask(fact, module, exercise.name)
        if isinstance(actual.error, NotImplementedError):
            return Verdict(exercise, "not yet")
        cause = wrong_type(expected.returned, actual.returned) if actual.was_called else ""
        if not cause and agree(expected.value, actual.value, fact.tolerance):
            continue
        if not cause and not isinstance(actual.error, TimeoutError):
            cause = "; or: ".join(find_causes(exercise, module))
        observed = "the function raises an error"
        if not cause and not actual.error:
            observed = describe_difference(expected.value, actual.value)
        shown = describe_error(actual.error) if actual.error else _format(actual.value)
        return Verdict(
            exercise, "wrong", fact.statement, "\n".join(expected.inputs),
            _format(expected.value), shown, cause, observed,
        )  # fmt: skip
    return Verdict(exercise, "right")


def _is_as_given(function: Callable[..., Any]) -> bool:
    """Returns whether this is exercise 10 with its bug, apart from comments and spaces."""
    own, given = getattr(function, "__code__", None), advantages_as_given.__code__
    return own is not None and (own.co_code, own.co_names) == (given.co_code, given.co_names)


@cache
def _answer(fact: Fact, name: str, function: Callable[..., Any]) -> Answer:
    """Returns the answer of the solutions to a fact, with `function` as exercise `name`."""
    with warnings.catch_warnings(action="ignore"):  # those of the typical mistakes
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
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    names = {"NoneType": "None", "ndarray": "a NumPy array", "int": "an integer"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _same_answer(a: Answer, b: Answer, tolerance: float) -> bool:
    """Returns whether two answers are the same: values (nan agrees with nan) or errors."""
    if a.error and b.error:
        return (type(a.error), str(a.error)) == (type(b.error), str(b.error))
    return not a.error and not b.error and agree(a.value, b.value, tolerance, equal_nan=True)


def _format(value: Any) -> str:
    """Returns an input or an answer as text."""
    if isinstance(value, (tuple, list)):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(map(_format, value))}{right}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Tensor):
        return str(value.detach())
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.Generator)):
        return f"a {type(value).__name__}"
    return str(value)[:200]
