"""Checks the exercises of scratch.py: each is right, wrong, or not written yet.

    python scratch.py [--hint N [STEP] | --solution N]

For a wrong answer the checker prints the inputs, the expected and the actual answer, and the cause:
a wrong type, or the typical mistake (core/workshop/mistakes.py) with the same answers. If no
typical mistake matches, it says what it observed. Hints come in three steps: a question, the idea,
the line. An exception or an endless loop in one exercise does not stop the check of the others.
"""

import argparse
import copy
import dis
import importlib.util
import inspect
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from core.types import UsageError
from core.workshop import solutions
from core.workshop.exercises import EXERCISES, Exercise, Fact
from core.workshop.mistakes import (
    Mistake,
    advantages_as_given,
    changed_solution,
    mistakes_in,
)
from environments.plumbing.text import print_any_character

FILE = Path(__file__).parents[2] / "scratch.py"
TIME_LIMIT = 5.0  # seconds for one fact
MAX_NUMBERS = 40  # of a tensor that are printed; of a larger one its first 3 entries
WIDTH = 90  # characters of a tensor that are printed on one line
State = Literal["right", "wrong", "differs", "not yet"]
LABELS = {"right": "[green]✓ right[/]", "wrong": "[red]✗ wrong[/]",
          "differs": "[yellow]≈ differs[/]", "not yet": "[dim]· not yet[/]"}  # fmt: skip
FINE = "differs from the reference, which is fine here"
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
    hints: tuple[str, str, str] = ("", "", "")  # question, idea, line


@dataclass
class Answer:
    """What a set of functions answers to a fact."""

    value: Any = None
    inputs: list[str] = field(default_factory=list)  # of the first call of the exercise's function
    returned: Any = None  # by its last call
    was_called: bool = False
    error: BaseException | None = None
    where: str = ""  # file and line of the error


def run_command(args: list[str], file: Path = FILE) -> int:
    """Runs `python scratch.py ARGS`.

    Returns the exit code: 0 if all exercises are right (or changed on purpose), 1 if not, 2 if the
    file cannot be imported.
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
    try:
        module = load(file)
        if options.hint:
            print_hint(check_all(module)[number - 1], step)
            return 0
        verdicts = check_all(module)
    except UsageError as error:
        print(f"scratch.py: {error}", file=sys.stderr)
        return 2
    print_verdicts(verdicts, Console(highlight=False))
    return 0 if all(v.state in ("right", "differs") for v in verdicts) else 1


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
    return [check(exercise, module) for exercise in EXERCISES]


def check(exercise: Exercise, module: ModuleType | SimpleNamespace) -> Verdict:
    """Returns the verdict on one exercise; the first fact that does not hold decides.

    The exercises that it calls are those of the solutions, so that it is judged alone, and an error
    is shown in its own line. If it is wrong with them, it may still be right with the participant's
    own, which can accept more.

    An exercise whose number is in CHANGED of scratch.py "differs" instead of being wrong, as long
    as it runs and returns finite numbers of the right type and shape.
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

    If a function of a module raises or exceeds the time limit, the answer has the error and its
    place. The functions of a namespace are trusted: they run without a time limit.
    """
    answer = Answer()

    def record(*args: Any, **kwargs: Any) -> Any:
        function = getattr(functions, name)
        args = tuple(map(_copy, args))  # a function may change its inputs in place
        if not answer.inputs:
            given = inspect.signature(getattr(solutions, name)).bind(*args, **kwargs).arguments
            answer.inputs = [f"{key} = {_format(value)}" for key, value in given.items()]
        answer.returned = function(*args, **kwargs)
        answer.was_called = True
        return answer.returned

    recording = SimpleNamespace(**{**vars(functions), name: record})

    def run() -> None:
        try:
            answer.value = fact.ask(recording)
        except BaseException as error:  # also SystemExit
            answer.error = error

    if isinstance(functions, SimpleNamespace):
        run()
        return answer
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIME_LIMIT)
    file = Path(str(functions.__file__))
    if thread.is_alive():
        frame = sys._current_frames()[thread.ident or 0]
        line, _ = innermost_line(file, traceback.extract_stack(frame))
        late = TimeoutError(f"still running after {TIME_LIMIT:g} s")
        return Answer(error=late, where=f"{file.name}, line {line}: {late}")
    if answer.error is not None:
        line, _ = innermost_line(file, traceback.extract_tb(answer.error.__traceback__))
        place = f"{file.name}, line {line}: " if line else ""
        answer.where = place + describe_error(answer.error)
    return answer


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


def wrong_type(expected: Any, actual: Any) -> tuple[str, str] | None:
    """Returns what is wrong with the type of a result, and how to get the right one; or None.

    Does not compare shapes and values. A list counts as a tuple.
    """
    if actual is None:
        return "the function returned None", "Is there a `return` at the end of the function?"
    if isinstance(expected, tuple) and isinstance(actual, (tuple, list)):
        if len(expected) != len(actual):
            return (f"the function returned {len(actual)} results, not {len(expected)}",
                    "Return all of them: return ids, logprobs")  # fmt: skip
        for number, (a, b) in enumerate(zip(expected, actual, strict=True), 1):
            if problem := wrong_type(a, b):
                return f"result {number}: {problem[0]}", problem[1]
        return None
    asked, got = _kind(expected), _kind(actual)
    if asked == got or (asked == "a float" and got == "an integer"):
        return None
    advice = {
        "a list": "torch.tensor(numbers) makes a tensor from a list of numbers, "
        "torch.stack(tensors) from a list of tensors.",
        "a NumPy array": "Stay with torch: NumPy carries no gradient.",
        "an integer tensor": "Make the tensor with dtype=torch.float32; one that was made like "
        "group_ids or of whole numbers holds integers.",
        "a float": "Do not use item() or float() here.",
        "a float tensor": "Use a dtype of integers.",
    }.get(got, "See the docstring of the function.")
    if asked == "a bool tensor":
        advice = "Use dtype=torch.bool: 0 and 1 as an index select the rows 0 and 1."
    if asked == "a float":
        advice = "loss.item() gives the number without the graph behind it."
    if asked == "a tuple":
        advice = "Return both: return ids, logprobs"
    return f"the function returned {got}; {asked} is asked for", advice


def find_mistakes(
    exercise: Exercise, failed: Fact, actual: Answer, module: ModuleType | SimpleNamespace
) -> list[Mistake]:
    """Returns the typical mistakes that have the same answers as the participant's function.

    A mistake must agree on the failed fact, and on every fact to which the participant's function
    gives a finite answer. If several do, those that agree on most facts are returned.
    """
    if isinstance(actual.error, TimeoutError):
        return []
    name, facts = exercise.name, exercise.facts
    theirs = [actual if fact is failed else ask(fact, module, name) for fact in facts]
    agreed: dict[Mistake, int] = {}
    for mistake in mistakes_in(name):
        for change in mistake.changes:
            wrong = changed_solution(name, change)
            if not _same_answer(_answer(failed, name, wrong), actual, failed.tolerance):
                continue
            same = [
                _same_answer(_answer(fact, name, wrong), answer, fact.tolerance)
                for fact, answer in zip(facts, theirs, strict=True)
            ]
            if all(s or not _is_finite(answer) for s, answer in zip(same, theirs, strict=True)):
                agreed[mistake] = max(sum(same), agreed.get(mistake, 0))
    return [mistake for mistake, count in agreed.items() if count == max(agreed.values())]


def describe_difference(expected: Any, actual: Any) -> str:
    """Returns how an answer of the right type differs from the expected one: only what is seen."""
    if isinstance(expected, tuple) and isinstance(actual, tuple):
        if expected and isinstance(expected[0], int):
            return f"the shape is {list(actual)}, not {list(expected)}"
        pairs = zip(expected, actual, strict=False)
        seen = [
            f"result {number}: {describe_difference(a, b)}"
            for number, (a, b) in enumerate(pairs, 1)
            if not agree(a, b, 1e-3)
        ]
        return "; ".join(seen)
    try:
        a, b = (torch.as_tensor(x).detach().double() for x in (expected, actual))
    except (TypeError, ValueError, RuntimeError):
        return ""
    if a.shape != b.shape:
        same = a.numel() == b.numel() and agree(a.flatten(), b.flatten(), 1e-3)
        numbers = ", but the numbers are right" if same else ""
        return f"the shape is {list(b.shape)}, not {list(a.shape)}{numbers}"
    if not b.isfinite().all():
        count = int((~b.isfinite()).sum())
        return f"{count} of {b.numel()} numbers are nan or infinity"
    first = b.flatten()[0]
    if b.numel() > 1 and (b == first).all() and (first == 0 or (a != a.flatten()[0]).any()):
        return f"all entries are {_format(actual.flatten()[0])}"
    if a.numel() > 1 and agree(a.flatten().sort().values, b.flatten().sort().values, 1e-3):
        return "the numbers are right, but in another order"
    if a.numel() == 1 and b.item() == 0:
        return "the number is 0"
    factors = (b / a)[a != 0]
    if len(factors) and agree(a * factors[0], b, 1e-3):
        every = "the number" if a.numel() == 1 else "every number"
        return f"{every} is {factors[0]:.4g} times the expected one"
    if a.numel() > 1 and agree(a + (b - a).flatten()[0], b, 1e-3):
        return f"every number is the expected one plus {(b - a).flatten()[0]:.4g}"
    wrong = ~torch.isclose(a, b, rtol=1e-3, atol=1e-3)
    if a.dim() == 0 or not wrong.any():
        return f"the difference is {(b - a).abs().max():.4g}"
    place = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers differ, the first at {place}: "
        f"{_format(actual[tuple(place)])} instead of {_format(expected[tuple(place)])}"
    )


def print_verdicts(verdicts: list[Verdict], console: Console) -> None:
    """Prints the table, the first failing fact of each wrong exercise, and what to do next."""
    table = Table("", "exercise", "", "next", box=None, padding=(0, 2, 0, 0))
    for v in verdicts:
        notes = {"right": f"read {v.exercise.read}", "differs": FINE}
        table.add_row(
            str(v.exercise.number), v.exercise.title, LABELS[v.state], notes.get(v.state, "")
        )
    console.print(table)
    for v in verdicts:
        if v.state in ("wrong", "differs"):
            print_details(v, console)
    states = [v.state for v in verdicts]
    if "wrong" in states and "not yet" not in states:
        console.print(
            "\nIf you changed an exercise on purpose, add its number to CHANGED at the end of "
            "scratch.py."
        )
    number = next((v.exercise.number for v in verdicts if v.state in ("wrong", "not yet")), None)
    if number:
        console.print(f"\nNext: exercise {number}. For a hint: python scratch.py --hint {number}")
        if number > 4:
            console.print("You can train with these already: python train.py --algo scratch")
    else:
        console.print("\nAll right. Now train with your functions: python train.py --algo scratch")


def print_details(verdict: Verdict, console: Console) -> None:
    """Prints the fact that fails: inputs, expected and actual answer, cause, and the question."""
    number = verdict.exercise.number
    mark = "[red]✗[/]" if verdict.state == "wrong" else "[yellow]≈[/]"
    console.print(f"\n[bold]{number}. {verdict.exercise.name}[/] {mark} ", end="")
    console.print(verdict.statement, markup=False, soft_wrap=True)
    rows = {"inputs": verdict.inputs, "expected": verdict.expected, "actual": verdict.actual}
    if verdict.state == "wrong":
        unknown = f"{verdict.observed} (no mistake that the checker knows has the same answers)"
        rows |= {"cause": verdict.cause} if verdict.cause else {"observed": unknown}
        rows |= {"question": verdict.hints[0]}
    for label, text in rows.items():
        for first, line in enumerate(text.splitlines()):
            console.print(f"   {'' if first else label:10}{line}", markup=False, soft_wrap=True)
    if verdict.state == "wrong" and verdict.hints[1]:
        commands = f"python scratch.py --hint {number} 2, then --hint {number} 3"
        console.print(f"   {'more':10}the idea, then the line: {commands}", soft_wrap=True)


def print_hint(verdict: Verdict, step: int) -> None:
    """Prints one step of the hints for an exercise, and how to get the next one."""
    number = verdict.exercise.number
    if verdict.state == "right":
        print(f"Exercise {number} is right.")
    hints = verdict.hints if verdict.hints[0] else _hints(verdict.exercise)
    print(f"Exercise {number}, the {STEPS[step - 1]}: {hints[step - 1]}")
    if step < 3:
        print(f"The {STEPS[step]}: python scratch.py --hint {number} {step + 1}")
    else:
        print(f"The whole function: python scratch.py --solution {number}")


def innermost_line(file: Path, frames: Iterable[traceback.FrameSummary]) -> tuple[int, str]:
    """Returns line and function of the innermost frame that is in `file`; (0, "") if none is."""
    inside = [frame for frame in frames if Path(frame.filename).resolve() == file.resolve()]
    return (inside[-1].lineno or 0, inside[-1].name) if inside else (0, "")


def describe_error(error: BaseException) -> str:
    """Returns the type and the message of an error in one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].rstrip(": ")


def _check(exercise: Exercise, module: ModuleType | SimpleNamespace) -> Verdict:
    """Returns the verdict on one exercise, with the other functions of `module` as they are."""
    if not callable(vars(module).get(exercise.name)):
        return Verdict(exercise, "wrong", cause=f"there is no function {exercise.name}")
    if _is_as_given(vars(module)[exercise.name]):
        return Verdict(exercise, "not yet", hints=_hints(exercise))
    changed = exercise.number in _changed(module)
    differs = None
    for fact in exercise.facts:
        expected = _answer(fact, exercise.name, getattr(solutions, exercise.name))
        actual = ask(fact, module, exercise.name)
        if isinstance(actual.error, NotImplementedError):
            return Verdict(exercise, "not yet", hints=_hints(exercise))
        kind = wrong_type(expected.returned, actual.returned) if actual.was_called else None
        if not kind and agree(expected.value, actual.value, fact.tolerance):
            continue
        failed = Verdict(
            exercise,
            "wrong",
            fact.statement,
            "\n".join(expected.inputs),
            _format(expected.value),
            actual.where or _format(actual.returned if kind else actual.value),
            hints=_hints(exercise, fact),
        )
        if kind:
            hints = ("Which type does the docstring ask for?", kind[1], failed.hints[2])
            return replace(failed, cause=kind[0], hints=hints)
        if changed and _is_sane(expected, actual):
            differs = differs or replace(failed, state="differs")
            continue
        if found := find_mistakes(exercise, fact, actual, module):
            cause = "; or: ".join(mistake.cause for mistake in found)
            return replace(failed, cause=cause, hints=_hints(exercise, fact, found[0]))
        raised = actual.error and "the function raises an error"
        return replace(failed, observed=raised or describe_difference(expected.value, actual.value))
    return differs or Verdict(exercise, "right", hints=_hints(exercise))


def _is_as_given(function: Callable[..., Any]) -> bool:
    """Returns whether this is exercise 10 with its bug, apart from comments and spaces."""
    if not hasattr(function, "__code__"):
        return False
    own, given = (
        [(step.opname, step.argval) for step in dis.get_instructions(f.__code__)]
        for f in (function, advantages_as_given)
    )
    return own == given


@cache
def _answer(fact: Fact, name: str, function: Callable[..., Any]) -> Answer:
    """Returns the answer of the solutions to a fact, with `function` as exercise `name`."""
    with warnings.catch_warnings(action="ignore"):  # those of the typical mistakes
        return ask(fact, SimpleNamespace(**{**vars(solutions), name: function}), name)


def _hints(
    exercise: Exercise, fact: Fact | None = None, mistake: Mistake | None = None
) -> tuple[str, str, str]:
    """Returns question, idea and line: those of the mistake, else of the fact, else of all."""
    question = (mistake and mistake.question) or (fact or exercise).question
    idea = (mistake and mistake.idea) or (fact or exercise).idea
    change = mistake.changes[0] if mistake else ()
    code = change[0].strip().splitlines()[0] if isinstance(change, tuple) and change else ""
    part = code or (fact and fact.line) or exercise.line
    source = inspect.getsource(getattr(solutions, exercise.name)).splitlines()
    return question, idea, next(line.strip() for line in source if part in line)


def _changed(module: ModuleType | SimpleNamespace) -> tuple[int, ...]:
    """Returns the numbers in CHANGED of scratch.py; a single number is allowed too."""
    changed = getattr(module, "CHANGED", ())
    return (changed,) if isinstance(changed, int) else tuple(changed)


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
    if type(value).__module__ == "numpy":
        return "a NumPy array"
    names = {bool: "a bool", int: "an integer", float: "a float"}
    return names.get(type(value), f"a {type(value).__name__}")


def _is_sane(expected: Answer, actual: Answer) -> bool:
    """Returns whether an answer is finite, and what was returned has the expected shape."""
    return _is_finite(actual) and _shapes(expected.returned) == _shapes(actual.returned)


def _shapes(returned: Any) -> list[torch.Size]:
    parts = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [part.shape for part in parts if isinstance(part, Tensor)]


def _is_finite(answer: Answer) -> bool:
    """Returns whether there was no error and all numbers are finite."""
    parts = answer.value if isinstance(answer.value, (tuple, list)) else (answer.value,)
    tensors = (x for x in parts if isinstance(x, Tensor))
    return answer.error is None and all(bool(x.isfinite().all()) for x in tensors)


def _same_answer(a: Answer, b: Answer, tolerance: float) -> bool:
    """Returns whether two answers are the same: values (nan agrees with nan) or errors."""
    errors = [describe_error(x.error) for x in (a, b) if x.error]
    if errors:
        return len(errors) == 2 and errors[0] == errors[1]

    def finite(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return tuple(map(finite, x))
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.detach().nan_to_num(777.0, 888.0, -888.0)
        return x

    return agree(finite(a.value), finite(b.value), tolerance)


def _format(value: Any) -> str:
    """Returns an input or an answer as text, with four digits.

    A tensor of more than MAX_NUMBERS numbers is cut after its first 3 entries.
    """
    if isinstance(value, (tuple, list)):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(map(_format, value))}{right}"
    if isinstance(value, float):
        return f"{value + 0.0:.4g}"  # -0.0 + 0.0 is 0.0
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}: token ids in, logits out"
    if isinstance(value, torch.optim.Optimizer):
        return f"{type(value).__name__} with learning rate {value.defaults['lr']:g}"
    if isinstance(value, torch.Generator):
        return "a generator"
    if not isinstance(value, Tensor):
        return str(value)[:200]
    numbers = value.detach()
    shape = f"  shape {list(value.shape)}" if value.dim() > 1 else ""
    if value.numel() > MAX_NUMBERS:
        first = " ".join(map(_nested, numbers[:3].tolist()))
        return f"[{first} ..]  shape {list(value.shape)}"
    text = _nested(numbers.tolist())
    if len(text) > WIDTH:
        return "[" + "\n   ".join(map(_nested, numbers.tolist())) + f"]{shape}"
    return text + shape


def _nested(numbers: Any) -> str:
    """Returns nested lists of numbers as text."""
    if isinstance(numbers, list):
        return f"[{' '.join(map(_nested, numbers))}]"
    return _format(numbers)
