"""Writes in a thread while the run goes on: training does not wait for the disk.

There is one write at a time. `wait` shows how far it is, if that takes more than a second. The next
call of `check` or `wait` raises what a write has raised, such as the OSError of a full disk.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

from core.terminal.console import Display
from core.terminal.interrupt import owns_process

PATIENCE, POLL = 1.0, 0.1  # seconds of waiting before there is a line, and between its updates
MB = 10**6


class Writer:
    """On exit from its context it waits for the write, but not if Ctrl-C ends the process."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.thread: Thread | None = None
        self.error: BaseException | None = None
        self.part, self.num_bytes = Path(), 0  # what is being written, and how much that will be

    def start(self, write: Callable[[], None], part: Path, num_bytes: int) -> None:
        """Calls `write`, which writes about `num_bytes` into the folder `part`, in a thread."""
        assert self.thread is None, "call wait() first"

        def work() -> None:
            try:
                write()
            except BaseException as error:
                self.error = error

        self.part, self.num_bytes = part, num_bytes
        # a daemon, as Ctrl-C while `wait` waits has to end the process
        self.thread = Thread(target=work, name="writer", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Raises the error of a write that has failed."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def wait(self) -> None:
        """Returns when nothing is being written. Raises as `check`."""
        if self.thread is not None:
            self.thread.join(PATIENCE)
            if self.thread.is_alive():
                self._show(self.thread)
            self.thread = None
        self.check()

    def _show(self, thread: Thread) -> None:
        total = max(1, self.num_bytes // MB)
        self.display.say(f"waiting for the checkpoint to be written: {total:,} MB")
        with self.display.phase("checkpoint", total, unit="MB") as phase:
            while thread.is_alive():
                thread.join(POLL)
                if phase.done == total:  # from now on the folder may get its name
                    continue
                with suppress(OSError):  # it does not exist yet, or is removed
                    written = sum(file.stat().st_size for file in self.part.iterdir()) // MB
                    phase.advance(steps=max(0, min(written, total) - phase.done))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif not (issubclass(kind, KeyboardInterrupt) and owns_process()):  # a notebook goes on
            try:
                self.wait()
            except OSError as error:  # the run has failed already
                self.display.say(f"the checkpoint could not be written: {error}")
