"""Ctrl-C and a terminal that is gone: a run is saved at a safe point."""

import os
import signal

import pytest

from core.calls import in_thread
from core.faults import Stopped
from core.terminal.interrupt import Interrupt

NAMES = [name for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


@pytest.mark.parametrize("name", NAMES)
def test_a_signal_stops_at_the_next_check_and_one_that_is_ignored_stays_so(name):
    """Of Ctrl-C, of a cluster, and of a terminal that is closed; nohup ignores the last."""
    number, said = getattr(signal, name), []
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        interrupt.say = said.append
        interrupt.check()
        signal.raise_signal(number)
        assert interrupt.requested and len(said) == (name == "SIGINT")
        with pytest.raises(Stopped):
            interrupt.check()
        if name == "SIGINT":
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    assert signal.getsignal(number) is before
    try:
        signal.signal(number, signal.SIG_IGN)
        with Interrupt() as interrupt:
            signal.raise_signal(number)
            interrupt.check()
    finally:
        signal.signal(number, before)


def test_a_run_whose_terminal_is_gone_goes_on_until_it_is_saved():
    """The kernel sends SIGHUP, and every write to the terminal would fail from then on."""
    pty = pytest.importorskip("pty")
    (master, slave), own = pty.openpty(), os.dup(1)
    os.dup2(slave, 1)
    try:
        with Interrupt() as interrupt:
            os.close(master)
            with pytest.raises(OSError):
                os.write(1, b"lost")
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.requested and os.write(1, b"lost") == 4
    finally:
        os.dup2(own, 1)
        os.close(own)
        os.close(slave)


def test_in_a_thread_signals_act_as_usual():
    """As where a program or a notebook runs train.py beside its own work."""

    def work():
        with Interrupt() as interrupt:
            interrupt.check()
            return signal.getsignal(signal.SIGINT)

    assert in_thread(work).result() == signal.default_int_handler
