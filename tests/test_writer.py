"""A write goes on beside the run; what waits for it shows how far it is, and gets its error."""

import io
from threading import Event

import pytest
from rich.console import Console

from core.loop import writer as writer_module
from core.loop.writer import Writer
from core.terminal.console import Display

FULL = OSError(28, "No space left on device")


@pytest.fixture
def shown(monkeypatch):
    """What the display of `writer` has printed."""
    monkeypatch.setattr(writer_module, "PATIENCE", 0.01)
    monkeypatch.setattr(writer_module, "POLL", 0.01)
    return io.StringIO()


@pytest.fixture
def writer(shown):
    return Writer(Display("x", Console(file=shown, width=100)))


def fail():
    raise FULL


def test_a_write_goes_on_beside_its_caller_who_then_sees_how_far_it_is(
    writer, shown, tmp_path, monkeypatch
):
    part, halves, polled = tmp_path / "part", Event(), Event()
    advance = writer_module.Display.phase

    def write():
        part.mkdir()
        (part / "a").write_bytes(bytes(2_000_000))
        halves.set()
        polled.wait(60)
        (part / "b").write_bytes(bytes(2_000_000))

    def is_polled(display, name, total, **unit):
        polled.set()
        return advance(display, name, total, **unit)

    monkeypatch.setattr(writer_module.Display, "phase", is_polled)
    writer.start(write, part, 4_000_000)
    assert halves.wait(60) and writer.thread.is_alive()  # `start` has returned
    writer.check()
    writer.wait()
    assert (part / "b").stat().st_size == 2_000_000 and writer.thread is None
    assert "waiting for the checkpoint to be written: 4 MB" in shown.getvalue()


def test_the_error_of_a_write_is_raised_once_by_the_next_check(writer, tmp_path):
    writer.start(fail, tmp_path, 1)
    writer.thread.join()
    with pytest.raises(OSError, match="No space"):
        writer.check()
    writer.wait()
    writer.start(fail, tmp_path, 1)
    with pytest.raises(OSError, match="No space"):
        writer.wait()


def test_the_end_of_a_run_waits_for_the_write_and_raises_its_error(writer, tmp_path):
    written = []
    with writer:
        writer.start(lambda: written.append(1), tmp_path, 1)
    assert written == [1]
    with pytest.raises(OSError, match="No space"), writer:
        writer.start(fail, tmp_path, 1)


def test_the_error_that_ends_a_run_is_not_hidden_by_that_of_its_write(writer, shown, tmp_path):
    written, go = [], Event()
    with pytest.raises(ZeroDivisionError), writer:
        writer.start(lambda: (go.wait(60), written.append(1)), tmp_path, 1)
        go.set()
        raise ZeroDivisionError
    assert written == [1]
    with pytest.raises(ZeroDivisionError), writer:
        writer.start(fail, tmp_path, 1)
        raise ZeroDivisionError
    assert "No space left on device" in shown.getvalue()


@pytest.mark.parametrize("program", [True, False], ids=["command", "notebook"])
def test_ctrl_c_while_a_write_is_waited_for_ends_a_command_at_once(
    writer, tmp_path, monkeypatch, program
):
    """A notebook goes on, where another run could meet the files of the write."""
    go = Event()
    monkeypatch.setattr(writer_module, "owns_process", lambda: program)

    def interrupted(thread):
        monkeypatch.setattr(writer, "_show", lambda thread: (go.set(), thread.join()))
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_show", interrupted)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.start(lambda: go.wait(60), tmp_path, 1)
        thread = writer.thread
        writer.wait()
    assert thread.daemon and thread.is_alive() == program
    go.set()
    thread.join()
