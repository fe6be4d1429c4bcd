"""The programs on a pretended Windows (pretend_windows.py), and with an output in ASCII."""

import json
import os
import subprocess
import sys
import time

import pytest
from pretend_windows import ROOT, environment

SMALL = "--num-prompts 4 --num-updates 2 --eval-num-tasks 16 --run-name a".split()
MAZE = '''"""Ein Labyrinth: żółw → ✓"""
from environments.base import Env, Step


class Maze(Env):
    def reset(self, seed):
        return [{"role": "user", "content": f"→ {seed}"}]

    def step(self, response):
        return Step(None, float(response == "left"), done=True, info={"correct": True})

    def demonstrate(self, hasty=False):
        return "left"
'''


@pytest.fixture
def windows(tmp_path_factory, tmp_path):
    """Starts `python ARGS` on a pretended Windows, in an empty folder."""
    variables = environment(tmp_path_factory.mktemp("site"))
    (tmp_path / "maze.py").write_text(MAZE, encoding="utf-8")

    def start(*args, typed=subprocess.DEVNULL):
        args = [str(ROOT / arg) if arg in ("train.py", "scratch.py") else arg for arg in args]
        return subprocess.Popen(
            [sys.executable, *args], env=variables, cwd=tmp_path, stdin=typed,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="cp1252",
        )  # fmt: skip

    return start


@pytest.fixture
def finished(windows):
    """The output of such a command, which must end with `code`."""

    def run(*args, typed="", code=0):
        process = windows(*args, typed=subprocess.PIPE)
        output, _ = process.communicate(typed, timeout=120)
        assert process.returncode == code, output
        return output

    return run


def metrics_of(run):
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines
    ]


def end_when(process, finished, end):
    """Calls `end` as soon as `finished()`; returns the exit code and the output."""
    deadline = time.monotonic() + 120
    while not finished() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    end()
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_own_environment_is_played_with_typed_answers(finished):
    output = finished("-m", "environments", "play", "maze.py:Maze", typed="left\n")
    assert "user: ? 0" in output and "reward +1" in output  # cp1252 has no →


def test_own_environment_is_checked(finished):
    finished("-m", "environments", "check", "letter_counting")


def test_exercises_are_checked(finished):
    assert "Next: exercise 1" in finished("scratch.py", code=1)


@pytest.mark.parametrize("args", [["train.py", "--help"], ["-m", "environments"]])
def test_output_in_ascii(args, tmp_path):
    variables = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, *args], env=variables, cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and b"?" in done.stdout, done.stderr
