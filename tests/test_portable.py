"""What Windows lacks, and a run from its start to Ctrl-C and a chat, in processes of their own."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = "--num-prompts 4 --num-updates 1000 --eval-num-tasks 16 --run-name a".split()


@pytest.mark.slow
def test_ctrl_c_saves_a_run_and_chat_answers_with_it(tmp_path):
    def start(*args):
        return subprocess.Popen(
            [sys.executable, *args], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    run = start(str(ROOT / "train.py"), *SMALL)
    log = tmp_path / "runs/a/rollouts.jsonl"
    while not (log.exists() and b'"kind": "train"' in log.read_bytes()) and run.poll() is None:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 130 and "--resume" in output
    chat = start("-m", "core.chat", "runs/a", "--before")
    output, _ = chat.communicate('How many r in "cherry"?\n', timeout=600)
    assert chat.returncode == 0 and "trained:" in output


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
    """The names that Windows lacks, but for those in a branch, a `with` or a file that asks."""
    firsts = node.body if isinstance(node, ast.Module) else []
    checks = [n.test for n in firsts if isinstance(n, ast.If) and isinstance(n.body[0], ast.Raise)]
    if any(ASKS.search(ast.unparse(check)) for check in checks):  # it cannot be imported otherwise
        return
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
