"""Files and folders are complete or absent, and fail with the error of the disk."""

import errno
import itertools
import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from core.files.atomic import published
from core.tiny import tiny_tokenizer


@contextmanager
def small_files(num_bytes):
    """Inside, a write beyond `num_bytes` of a file fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_is_not_complete_leaves_nothing_and_changes_nothing(tmp_path):
    for name, write in (("file", lambda p: p.write_text("new")), ("folder", lambda p: p.mkdir())):
        path = tmp_path / name
        with published(path) as part:
            write(part)
        assert path.exists() and not part.exists()
        for error in (OSError, KeyboardInterrupt):
            with pytest.raises(error), published(path) as part:
                write(part)
                raise error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    (tmp_path / ".part-file").mkdir()  # left by a killed process
    with published(tmp_path / "file") as part:
        part.write_text("newer")
    assert (tmp_path / "file").read_text() == "newer"


def test_a_failed_write_is_the_error_of_the_disk_also_in_a_library(tmp_path):
    """torch, safetensors and tokenizers raise errors of their own."""
    tensors = {"x": torch.zeros(100_000)}

    def save(path):
        with path.open("wb") as file:
            torch.save(tensors, file)

    writes = (lambda path: path.write_text("x" * 90_000), lambda path: save_file(tensors, path),
              tiny_tokenizer().save_pretrained, save)  # fmt: skip
    for write, limit in itertools.product(writes, (0, 10_000)):
        failure = pytest.raises(OSError, match="File too large")
        with failure as error, small_files(limit), published(tmp_path / "x") as part:
            write(part)
        assert error.value.errno in (errno.EFBIG, errno.EIO) and not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="a mistake"), published(tmp_path / "x"):
        raise RuntimeError("a mistake in the code")
