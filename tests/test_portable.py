"""The programs on a pretended Windows (pretend_windows.py), and with an output in ASCII."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import metrics_of
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
        output, _ = process.communicate(typed, timeout=600)
        assert process.returncode == code, output
        return output

    return run


@pytest.mark.slow
def test_ctrl_c_saves_a_run_and_chat_answers_with_it(windows, finished, tmp_path):
    process = windows("train.py", *SMALL, "--num-updates", "1000")
    log = tmp_path / "runs/a/rollouts.jsonl"
    while not (log.exists() and b'"kind": "train"' in log.read_bytes()) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and "--resume" in output
    chat = finished("-m", "core.chat", "runs/a", "--before", typed='How many r in "cherry"?\n')
    assert "trained:" in chat


@pytest.mark.slow
def test_own_and_remote_environments_train(finished, tmp_path):
    finished("train.py", *SMALL, "--env", "maze.py:Maze", "remote:env=letter_counting")
    last = metrics_of(tmp_path / "runs" / "a")[-1]
    assert {"eval/maze.py:Maze/accuracy", "eval/remote:env=letter_counting/accuracy"} <= last.keys()
    assert "compare.html" in finished("-m", "core.report.compare", "runs/a")


def test_own_environment_is_played_with_typed_answers(finished):
    output = finished("-m", "environments", "play", "maze.py:Maze", typed="left\n")
    assert "environment: ? 0" in output and "reward +1" in output  # cp1252 has no →


def test_the_threads_of_openmp_wait_in_a_short_loop_unless_the_user_says_otherwise():
    """What OpenMP finds in the environment when torch is imported."""
    code = "import core, os; print(os.environ['GOMP_SPINCOUNT'], os.environ.get('KMP_BLOCKTIME'))"
    ours = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    for given, expected in (({}, "3000 0"), ({"GOMP_SPINCOUNT": "7"}, "7 0")):
        done = subprocess.run([sys.executable, "-c", code], env=variables | given, cwd=ROOT,
                              capture_output=True, text=True)  # fmt: skip
        assert done.stdout.strip() == expected, done.stderr


def test_output_in_ascii():
    code = "from environments.plumbing import text; text.print_any_character(); print('é')"
    args, variables = ["-c", code], os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, *args], env=variables, cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and b"?" in done.stdout, done.stderr
