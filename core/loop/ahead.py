"""--overlap: while an update trains, a thread plays the episodes of the next one.

They are sampled with the adapters that the server of --sampler server has, those from before the
update. --staleness 1 does the same, first playing and then training, and has the same metrics, to
the bit where the server's answers are. --overlap saves at most the shorter of these times.
"""

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

from core.calls import in_thread
from core.canary import Canary
from core.terminal.interrupt import Interrupt
from core.types import Played


class Ahead:
    """The thread, and the rollouts that it has collected."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt  # of the run
        self.playing: Future[tuple[Played, Canary]] | None = None

    def start(self, collect: Callable[[], tuple[Played, Canary]]) -> None:
        """Calls `collect` in the thread."""
        self.playing = in_thread(collect)

    def wait(self) -> None:
        """Waits until no episode is open, as when the sampler is to have other weights."""
        if self.playing is not None:
            futures.wait([self.playing])

    def take(self) -> tuple[Played, Canary] | None:
        """What the thread has collected, or None if none was started. Raises what it raised."""
        self.wait()
        playing, self.playing = self.playing, None
        return playing.result() if playing else None

    def close(self) -> None:
        self.interrupt.requested = True  # the thread checks it, too
        self.wait()
