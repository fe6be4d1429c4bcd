"""Signals: saved at a safe point, also when the terminal is gone."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.interrupt import Interrupt
from core.types import Stopped

ROOT = Path(__file__).parent.parent
PROGRAM = """
import pathlib, sys, time
from core.interrupt import Interrupt
from core.types import Stopped
print("\\n".join("0" * 40), flush=True)
try:
    with Interrupt() as interrupt:
        pathlib.Path("ready").touch()
        while True:
            time.sleep(0.01)
            interrupt.check_alone()
            if pathlib.Path("hung-up").exists():
                print("an update", flush=True)
except Stopped:
    print("stopped", flush=True)
    print("stopped", file=sys.stderr, flush=True)
    pathlib.Path("saved").touch()
"""


def test_a_run_whose_terminal_is_gone_is_saved(tmp_path):
    """The kernel sends SIGHUP, and every write to the terminal fails from then on."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its terminal
    )  # fmt: skip
    os.close(slave)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.close(master)
    assert process.wait(30) == 0
    assert (tmp_path / "saved").exists()


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            interrupt.check()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Stopped):
                interrupt.check()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
