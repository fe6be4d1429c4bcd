"""Ctrl-C before the run handles it: it ends the program with code 130 and without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAIN = f"{ROOT}/train.py"
# Python imports this first. MODULE is that at whose import Ctrl-C arrives. Python drops what a
# callback of a weak reference raises; libraries catch exceptions.
SITE = """
import os, signal, sys, weakref

class Target: pass

def interrupt(_=None):
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MODULE"]:
            sys.meta_path.remove(self)
            print("Ctrl-C", flush=True)
            if os.environ["HOW"] == "dropped":
                target = Target()
                reference = weakref.ref(target, interrupt)
                del target
                return
            try:
                interrupt()
            except KeyboardInterrupt:
                if os.environ["HOW"] == "raised":
                    raise

sys.meta_path.insert(0, Finder())
"""
SMALL = """--device cpu --run-name a --sft-steps 0 --num-updates 1 --eval-num-tasks 2
    --lora-rank 2""".split()


def interrupted(tmp_path, module, command, how):
    """Output of Python with `command`; Ctrl-C arrives at the import of `module`."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path, "MODULE": module, "HOW": how},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "")
    return done.stdout


@pytest.mark.parametrize(("module", "command", "how"), [
    ("tyro", [TRAIN], "raised"),
    ("tyro", [TRAIN], "dropped"),
    ("tyro", [TRAIN], "caught"),
    ("tyro", ["-m", "core.league", "guess"], "raised"),
    ("rich", ["-m", "core.chat", "tiny"], "raised"),
    ("torch", [TRAIN], "raised"),
    ("torch", [TRAIN], "dropped"),
    ("torch", ["-m", "core.chat", "tiny"], "dropped"),
    ("torch", ["-m", "core.league", "guess"], "dropped"),
])  # fmt: skip
def test_ctrl_c_in_the_start_ends_without_a_traceback(tmp_path, module, command, how):
    assert interrupted(tmp_path, module, command, how) == "Ctrl-C\n"


@pytest.mark.slow
def test_a_run_whose_start_loses_ctrl_c_stops_at_its_first_safe_point(tmp_path):
    output = interrupted(tmp_path, "peft", [TRAIN, *SMALL], "caught")
    assert "stopped and saved; resume with" in output
    assert "held-out accuracy at update 1" not in output
