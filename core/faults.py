"""The errors that end a run, in one line each."""

import errno

from environments.base import UsageError  # invalid input: exit code 2

DISK_ERRORS = {
    getattr(errno, e) for e in "ENOSPC EDQUOT EROFS EACCES EPERM EFBIG EIO EISDIR EXDEV".split()
}
# in the messages of PyTorch's allocators for GPUs, CPUs and Apple's GPUs
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class Fault(RuntimeError):
    """Ends a run for a reason other than its input. Printed as one line; exit code 1."""


class OutOfMemory(Fault):
    """GPU or host memory ran out."""


def ran_out(error: BaseException) -> bool:
    """Whether the error says that GPU or host memory ran out."""
    says_so = any(words in str(error).lower() for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or says_so


class NoServer(Fault):
    """The server of --sampler server does not answer, or not as vLLM does."""


class RankLost(Fault):
    """Another process of torchrun ended; it may know why."""


class EpisodesFailed(UsageError):
    """The environment of more than half of the episodes failed."""


class Stopped(BaseException):
    """Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 stopped the run at a safe point; exit code 130.

    Raised in the midst of a user's function, it must pass `except Exception`."""
