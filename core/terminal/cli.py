"""Runs a command: its settings, its errors as one line each, its exit code."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from core.terminal import interrupt
from environments.plumbing.text import print_any_character

if interrupt.owns_process():
    sys.excepthook = interrupt.show_error  # before the slow imports
    print_any_character()

from core import settings
from core.faults import DISK_ERRORS, Fault, RankLost, Stopped, UsageError
from environments.plumbing.text import one_line


def execute(
    main: Callable[[Any], int],
    args: list[str],
    parse: Callable[[list[str]], Any] = settings.parse,
    program: str = "train.py",
) -> int:
    """Calls `main` with the parsed settings, and returns the exit code.

    Prints UsageError (code 2) and Fault (code 1) as one line; the error of a disk is a Fault. Under
    torchrun only the first rank of a machine prints that the run has stopped, and returns the code:
    if another rank did, torchrun would end the first one, which still writes the pages.
    """
    is_first = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["LOCAL_RANK"] == "0"
    try:
        code = main(parse(args))
        return code if is_first else 0
    except (UsageError, Fault, OSError) as error:
        if isinstance(error, OSError):
            if error.errno not in DISK_ERRORS:
                raise
            problem = f"{error.filename or 'a file'}: {error.strerror}"
            advice = "what was saved is complete: fix this, then run again, or --resume the run"
            error = Fault(f"{problem}; {advice}")
        # torchrun ends all ranks once one has ended. So a rank other than the first waits, as all
        # may have this error; and a rank that lost another waits until that one has printed why
        lost = isinstance(error, RankLost)
        if not is_first:
            time.sleep(12 if lost else 5)
        print(f"{program}: {one_line(error)}", file=sys.stderr)
        if lost:
            time.sleep(8)
        return 2 if isinstance(error, UsageError) else 1
    except Stopped as stopped:
        if not is_first:
            return 0
        print(f"{program}: {one_line(stopped)}")
        return 130
    except KeyboardInterrupt:  # before the run could save anything, or the second Ctrl-C
        return 130


def answer_at_once(args: list[str]) -> None:
    """Exits for --help and for wrong settings, before the slow imports."""
    use_expandable_segments()  # `parse` imports torch with the algorithm
    if sys.stderr.isatty() and not {"-h", "--help"} & {*args}:
        say_loading()
    try:
        code = execute(lambda _: 0, args)
    except BrokenPipeError:  # --help | head
        os._exit(0)  # at its usual exit Python would write once more
    if code:
        sys.exit(code)


def say_loading() -> None:
    """Prints a line on stderr before the import of torch takes seconds, on the first rank only."""
    if "torch" not in sys.modules and os.environ.get("LOCAL_RANK", "0") == "0":
        print("loading torch ..", file=sys.stderr, flush=True)


def use_expandable_segments() -> None:
    """Makes PyTorch's blocks of GPU memory growable, against fragmentation; before `import torch`.

    vLLM switches the option off for its own pool.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
