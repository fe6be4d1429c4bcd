"""Files and folders are complete or absent, have checksums, and fail with the error number."""

import errno
import os
import resource
import signal
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core import checkpoint, files
from core.files import disk_errors, published, remove, scratch_folder, sealed, unseal
from core.model import load_policy
from core.optimizer import make_optimizer
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


def test_a_folder_that_cannot_be_replaced_is_there_with_all_its_files(tmp_path, monkeypatch):
    rename, path = os.rename, tmp_path / "a"
    with published(path) as part:
        part.mkdir()
        (part / "old").touch()

    def fail(source, target):
        if Path(source).name == ".part-a":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    for failing, left in ((True, "old"), (False, "new")):
        monkeypatch.setattr(os, "rename", fail if failing else rename)
        expected = pytest.raises(OSError) if failing else nullcontext()
        with expected, published(path) as part:
            part.mkdir()
            (part / "new").touch()
        assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == [
            "a", f"a/{left}"
        ]  # fmt: skip


def test_what_a_link_leads_to_is_not_written(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in ("a", ".part-a"):
        (tmp_path / name).symlink_to(outside)
    with published(tmp_path / "a") as part:
        part.write_text("new")
    assert outside.read_text() == "mine" and (tmp_path / "a").read_text() == "new"
    assert not (tmp_path / "a").is_symlink()


def test_weights_have_the_mode_that_the_umask_asks_for(tmp_path, policy):
    before = os.umask(0o027)
    try:
        model = checkpoint.export_model(tmp_path, policy)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in model.iterdir()} == {0o640}
    assert (model / "model.safetensors").exists()


def test_a_sealed_folder_knows_every_byte_of_its_files(tmp_path):
    folder = tmp_path / "a"
    with sealed(folder, {"number": 3}) as part:
        (part / "x").write_bytes(b"abc")
        (part / "y").write_bytes(b"")
    assert unseal(folder) == ({"number": 3}, "")
    for name in ("x", "y", "state.json"):
        whole = (folder / name).read_bytes()
        for damaged in (whole + b"x", whole[:-2], b"[" * 100_000, b"\xff", b"[]", None):
            if damaged == whole:
                continue
            (folder / name).unlink() if damaged is None else (folder / name).write_bytes(damaged)
            assert unseal(folder)[1] != "", (name, damaged)
            (folder / name).write_bytes(whole)
    text = (folder / "state.json").read_text()
    (folder / "state.json").write_text(text.replace('"number": 3', '"number": 4'))
    assert unseal(folder)[1] == "is damaged (state.json)"


def test_a_sealed_folder_has_no_other_files(tmp_path):
    """transformers would read them, too."""
    with sealed(tmp_path / "a", {}) as part:
        (part / "weights").write_bytes(b"0123")
    (tmp_path / "a/.DS_Store").touch()
    assert unseal(tmp_path / "a")[1] == ""
    (tmp_path / "a/added_tokens.json").write_text("{}")
    assert unseal(tmp_path / "a")[1] == "is damaged (added_tokens.json)"


def test_a_failed_write_of_a_library_has_the_number_of_its_error(tmp_path):
    tensors = {"x": torch.zeros(100_000)}
    for save in (torch.save, save_file):
        with (
            small_files(100_000),
            pytest.raises(OSError, match="File too large") as error,
            published(tmp_path / "x", 400_000) as part,
        ):
            save(tensors, part)
        assert error.value.errno == errno.EFBIG and not list(tmp_path.iterdir())
        assert error.value.filename in (str(tmp_path), str(tmp_path / "x"))


def test_an_error_without_a_name_gets_that_of_the_file(tmp_path):
    """As that of a write, whereas an open names its file."""
    path = tmp_path / "x"
    with small_files(9), pytest.raises(OSError) as error, published(path) as part:
        part.write_text("0123456789")
    assert error.value.filename == str(path) and not list(tmp_path.iterdir())


def test_an_error_of_the_device_inside_a_library_is_an_os_error(tmp_path):
    """As the limit is lifted before it is looked for, writing works again, as after an EIO."""
    tensors, tokenizer = {"x": torch.zeros(100_000)}, tiny_tokenizer()
    for save, number in (
        (lambda path: torch.save(tensors, path), errno.EIO),  # torch hides the number
        (lambda path: save_file(tensors, path), errno.EFBIG),
        (tokenizer.save_pretrained, errno.EFBIG),
    ):
        with pytest.raises(OSError) as error, disk_errors(tmp_path), small_files(10_000):
            save(tmp_path / "x")
        assert error.value.errno == number and "\n" not in error.value.strerror
        remove(tmp_path / "x")
    with pytest.raises(OSError), disk_errors(tmp_path):  # torch.save, if a short write fails
        raise RuntimeError("basic_ios::clear: iostream error")
    with pytest.raises(RuntimeError, match="a mistake"), disk_errors(tmp_path):
        raise RuntimeError("a mistake in the code")


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.ENOSPC])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path, qwen3_folder, monkeypatch, number
):
    """All is written, and the last step fails."""
    (tmp_path / "config.yaml").write_text("algo: grpo\n")
    policy = load_policy(str(qwen3_folder), device="cpu")
    optimizer, progress = make_optimizer(policy, 0.1), {"sft_step": 0, "update": 1}
    saved = checkpoint.save_checkpoint(tmp_path, policy, optimizer, progress)

    def fail(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "flush", fail)
    with pytest.raises(OSError) as error:
        checkpoint.save_checkpoint(tmp_path, policy, optimizer, progress | {"update": 2})
    assert error.value.errno == number
    assert list((tmp_path / "checkpoint").iterdir()) == [saved] and unseal(saved)[1] == ""


def test_a_scratch_folder_that_cannot_be_removed_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as folder:
        (folder / "x").touch()
    assert not folder.exists()

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with scratch_folder() as folder:
        (folder / "x").touch()
        monkeypatch.setattr(os, "unlink", refuse)
    assert (folder / "x").exists()
