"""A run that is stopped anywhere and resumed has the metrics of a run that nothing stopped.

pytest -m slow tests/test_killed.py      # each way once
python runs/faults/reproduce.py          # many times
"""

import random
import sys

import pytest

from runs.faults.reproduce import Faults


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "setting"), [
    ("write", "full"), ("kill", "lora"), ("power", "reference"), ("full", "ppo"),
])  # fmt: skip
def test_a_stopped_run_resumes_to_the_same_metrics(faults, way, setting):
    if way == "full" and sys.platform != "linux":
        pytest.skip("a small disk is mounted as in Linux")
    assert faults.try_once(way, setting, random.Random(1)) == ""
