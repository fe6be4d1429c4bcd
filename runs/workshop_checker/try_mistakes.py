"""Writes what the checker of scratch.py says about each mistake of tests/test_workshop_mistakes.py.

    python runs/workshop_checker/try_mistakes.py

It takes half a minute, and writes README.md here.
"""

import sys
from pathlib import Path

from core.workshop.checker import Verdict, check
from core.workshop.exercises import EXERCISES

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parents[1] / "tests"))
from test_workshop_mistakes import MISTAKES, scratch_with  # noqa: E402


def page(trials: list[tuple[str, Verdict]]) -> str:
    """Returns README.md: the counts, and tables of mistakes, causes and hints."""
    caught = [(what, v) for what, v in trials if v.state == "wrong"]
    named = [(what, v) for what, v in caught if v.cause]
    described = [(what, v) for what, v in caught if not v.cause]
    return f"""\
# What the checker of scratch.py says about mistakes

    python runs/workshop_checker/try_mistakes.py

{len(trials)} mistakes, tried as a new user would make them: {len(caught)} are caught, \
{len(named)} with their true cause, as `tests/test_workshop_mistakes.py` checks.

Hints come in three steps. `python scratch.py` prints the cause and a question, `--hint N 2` the
idea, `--hint N 3` the line of the solution.

| exercise | mistake | cause | question | idea | line |
| --- | --- | --- | --- | --- | --- |
{rows(named)}

## Mistakes that the checker does not know

If no known mistake gives the same answers, the checker says how the answer differs and names no
cause: {len(described)} of these mistakes.

| exercise | mistake | the checker says | question | idea | line |
| --- | --- | --- | --- | --- | --- |
{rows(described)}
"""


def rows(trials: list[tuple[str, Verdict]]) -> str:
    """Returns the rows of a table."""
    cells = (
        [f"{v.exercise.number}", what, v.cause or f"observed: {v.observed}", *v.hints]
        for what, v in trials
    )
    return "\n".join(f"| {' | '.join(row[:-1])} | `{row[-1]}` |" for row in cells)


if __name__ == "__main__":
    trials = [
        (what, check(exercise, scratch_with(exercise.name, tuple(changes))))
        for exercise in EXERCISES
        for what, _, *changes in MISTAKES[exercise.name]
    ]
    (FOLDER / "README.md").write_text(page(trials), encoding="utf-8")
