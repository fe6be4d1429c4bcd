"""Files and folders that are complete as soon as they exist.

with published(run / "config.yaml") as part:     # also for a folder, which the body makes
    part.write_text(text)
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from environments.plumbing.text import one_line

PART = ".part-"  # begins the name of everything that is not complete yet


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Yields a path to write to, whose file or folder then replaces `path` as a whole.

    The files are flushed to the disk before they get their name. If anything fails, nothing is left
    and `path` is unchanged. Raises OSError for a failed write, also of a library.
    """
    part, old = path.with_name(f"{PART}{path.name}"), path.with_name(f"{PART}old-{path.name}")
    remove(part)  # left by a killed process
    try:
        yield part
        for file in (part, *part.rglob("*")):
            if file.is_file():
                with file.open("rb+") as handle:
                    os.fsync(handle.fileno())
        if part.is_dir() and os.path.lexists(path):  # no folder replaces another that has files
            remove(old)
            os.rename(path, old)
        os.replace(part, path)
        remove(old)
    except BaseException as error:
        with suppress(OSError):  # the first error says more
            remove(part)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch.save hides the file's error behind its own
        if isinstance(error, SafetensorError) or type(error) is Exception:  # tokenizers raises that
            raise OSError(errno.EIO, one_line(error), str(path)) from None
        raise


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
