"""Damaged files end in one line, or change nothing: runs/faults, with few tries."""

import itertools
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "runs/faults"))
import files


@pytest.mark.seeds
def test_damaged_files_end_in_one_line_or_change_nothing():
    cases = files.cases(random.Random(0))
    try:
        failures = {
            name: failure
            for name, call in itertools.islice(cases, 160)
            if (failure := files.try_once(call))
        }
    finally:
        cases.close()
    assert failures == {}
