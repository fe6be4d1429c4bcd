"""The programs on a pretended Windows (pretend_windows.py), and what the real one lacks."""

import ast
import os
import re
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


LACKING = set(
    """
    fcntl resource termios pwd grp readline tty pty curses syslog posix os.fork os.setsid os.getsid
    os.killpg os.getpgid os.setpgid os.getuid os.geteuid os.getgid os.chown os.fchmod os.mkfifo
    os.nice os.waitid os.wait os.wait4 os.WNOHANG os.WNOWAIT os.WEXITED os.P_PID os.O_NOFOLLOW
    os.O_DIRECTORY os.O_CLOEXEC os.O_NONBLOCK os.sched_getaffinity os.pread os.pwrite os.sysconf
    os.statvfs os.uname os.getloadavg os.set_blocking os.openpty os.sendfile os.fdatasync os.EX_OK
    os.register_at_fork signal.SIGHUP signal.SIGKILL signal.SIGUSR1 signal.SIGUSR2 signal.SIGQUIT
    signal.SIGALRM signal.SIGVTALRM signal.setitimer
    signal.SIGCHLD signal.SIGPIPE signal.pause signal.pthread_kill signal.pthread_sigmask
""".split()
)
ASKS = re.compile(r"hasattr\((os|signal), |os\.name|sys\.platform|suppress\(.*ImportError")


def used(node):
    """The names that Windows lacks, but for those in a branch or a `with` that asks first."""
    asked = [node.test] if isinstance(node, (ast.If, ast.IfExp)) else getattr(node, "items", [])
    if any(ASKS.search(ast.unparse(expression)) for expression in asked):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield f"{node.value.id}.{node.attr}"
    for child in ast.iter_child_nodes(node):
        yield from used(child)


def test_what_windows_lacks_is_used_only_where_the_code_has_asked_for_it():
    folders = [ROOT / name for name in ("algorithms", "core", "environments")]
    code = [ROOT / "train.py", *(file for folder in folders for file in folder.rglob("*.py"))]
    found = {file: {*used(ast.parse(file.read_text(encoding="utf-8")))} & LACKING for file in code}
    assert not any(found.values()), {file: names for file, names in found.items() if names}


def test_the_threads_of_openmp_wait_in_a_short_loop_unless_the_user_says_otherwise():
    """What OpenMP finds in the environment when torch is imported."""
    code = "import core, os; print(os.environ['GOMP_SPINCOUNT'], os.environ.get('KMP_BLOCKTIME'))"
    ours = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    for given, expected in (({}, "3000 0"), ({"GOMP_SPINCOUNT": "7"}, "7 0")):
        done = subprocess.run([sys.executable, "-c", code], env=variables | given, cwd=ROOT,
                              capture_output=True, text=True)  # fmt: skip
        assert done.stdout.strip() == expected, done.stderr
