"""Damage, attacks and nonsense end in one line, or change nothing: runs/faults, with few tries."""

import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "runs/faults"))
import reproduce

TRIES = {  # in CI; `pytest -m seeds` makes those of MORE
    "terminal": 20, "trust": 10,
    "kills": pytest.param(2, marks=pytest.mark.slow),
    "disks": pytest.param(3, marks=pytest.mark.slow),
}  # fmt: skip
MORE = {"terminal": 200, "trust": 100, "kills": 12, "disks": 30}


def check(area, tries, seed):
    if area == "disks" and not (sys.platform == "linux" and shutil.which("cc")):
        pytest.skip("disks needs Linux and a C compiler")
    result = reproduce.in_child(area, tries, seed)
    assert result["tries"] == tries and result["failures"] == []


@pytest.mark.parametrize(
    ("area", "tries"),
    [pytest.param(area, *getattr(n, "values", [n]), marks=getattr(n, "marks", ()))
     for area, n in TRIES.items()],
)  # fmt: skip
def test_faults_end_in_one_line_or_change_nothing(area, tries):
    check(area, tries, seed=0)


@pytest.mark.seeds
@pytest.mark.parametrize("area", MORE)
def test_many_faults_end_in_one_line_or_change_nothing(area):
    check(area, MORE[area], seed=random.SystemRandom().randrange(10**6))


def test_a_failure_is_counted():
    """The program that makes the tries notices a traceback, a hang and a wrong answer."""

    def broken():
        raise ValueError("x\ny")

    def endless():
        while True:
            pass

    assert reproduce.try_once(lambda: "", 1) == ""
    assert reproduce.try_once(lambda: "another result", 1) == "another result"
    assert reproduce.try_once(broken, 1).startswith("ValueError at test_faults.py")
    assert reproduce.try_once(endless, 0.1) == "no end after 0.1 seconds"
