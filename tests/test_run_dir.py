"""A run folder is complete or absent, belongs to one process, and survives a full disk."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_files import small_files

from core.run_dir import create_run, lock_run_dir, new_folder, read_config
from core.types import CannotWrite, Fault, UsageError

ROOT = Path(__file__).parent.parent
SETTINGS = {"algo": "grpo"}
SMALL = """--run-name a --sft-steps 4 --sft-batch-size 4 --num-updates 4 --num-prompts 2
    --group-size 4 --eval-num-tasks 4 --save-every 1 --max-tokens 16 --entropy-coef 0.01
    --device cpu""".split()


def test_a_new_folder_has_its_config_and_nothing_else_is_made(tmp_path):
    run = tmp_path / "runs" / "a"
    assert create_run(run, SETTINGS) == run
    assert (run / "config.yaml").read_bytes() == b"algo: grpo\n"
    assert [p.name for p in run.parent.iterdir()] == ["a"]


@contextmanager
def opened(run, new=True):
    if new:
        create_run(run, SETTINGS)
    with lock_run_dir(run, SETTINGS, new):
        yield


def test_a_usage_error_removes_a_new_folder_without_records(tmp_path):
    run = tmp_path / "runs" / "a"
    with pytest.raises(UsageError), opened(run):
        (run / "metrics.jsonl").touch()  # the run has opened the file
        raise UsageError("no such model")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError), opened(run):
        (run / "metrics.jsonl").write_text("{}\n")
        raise UsageError("9 of 12 episodes failed")
    with pytest.raises(UsageError), opened(run, new=False):
        raise UsageError("no intact checkpoint")
    assert (run / "config.yaml").exists() and (run / "metrics.jsonl").exists()


def test_an_existing_folder_is_not_used_for_a_new_run(tmp_path):
    create_run(tmp_path / "a", SETTINGS)
    with pytest.raises(UsageError, match="exists"):
        create_run(tmp_path / "a", SETTINGS)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(UsageError, match="exists"):
        new_folder(tmp_path, "a", "")


def test_runs_without_a_name_that_start_together_have_numbers_of_their_own(tmp_path):
    chosen = [new_folder(tmp_path, "", "b-x") for _ in range(3)]  # before any of them is made
    made = [create_run(run, {"seed": n}, take_next=True) for n, run in enumerate(chosen)]
    assert made == [tmp_path / f"b-x-{number}" for number in (1, 2, 3)]
    assert [(run / "config.yaml").read_text() for run in made] == [f"seed: {n}\n" for n in range(3)]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_second_process_is_refused_and_the_lock_ends_with_the_first(tmp_path):
    run = create_run(tmp_path / "a", SETTINGS)
    code = f"""
import sys, time; from pathlib import Path; from core.run_dir import lock_run_dir
with lock_run_dir(Path({str(run)!r}), {{}}, new=True): print("locked", flush=True); time.sleep(60)
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert first.stdout.readline() == b"locked\n"
    with pytest.raises(UsageError, match="in use"), opened(run, new=False):
        raise AssertionError("locked twice")
    assert (run / "config.yaml").exists()
    first.kill()
    first.wait()
    with opened(run, new=False):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, capsys, number):
    def flock(handle, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    for new in (True, False):  # nothing that stays says that the folder is in use
        with opened(tmp_path / "a", new):
            pass
        assert capsys.readouterr().err.count("no locks") == 1


def test_what_killed_processes_left_is_removed(tmp_path):
    run = tmp_path / "a"
    for part in (".part-b-1", ".part-c-2"):  # of an old creation, and of one that may go on
        (tmp_path / part).mkdir()
    os.utime(tmp_path / ".part-b-1", (0, 0))
    create_run(run, SETTINGS)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".part-c-2", "a"]
    (run / ".part-model").mkdir()
    (run / ".part-metrics.jsonl").touch()
    (run / "checkpoint/.part-000000-000001").mkdir(parents=True)
    with opened(run, new=False):
        assert not list(run.glob("**/.part-*"))


def test_a_run_in_use_is_not_resumed(command):
    with opened(Path("runs/a")):
        code, _, err = command("--resume", "runs/a", "--num-updates", "9")
        assert code == 2 and err.count("\n") == 1 and "runs/a is in use" in err
        assert (Path("runs/a/config.yaml")).read_text() == "algo: grpo\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_error_is_one_line_with_the_command_to_resume(tmp_path, number):
    run = tmp_path / "my run"
    with pytest.raises(CannotWrite) as error, opened(run):
        raise OSError(number, os.strerror(number), "runs/a/metrics.jsonl")
    assert os.strerror(number) in str(error.value) and f"--resume '{run}'" in str(error.value)
    assert "\n" not in str(error.value)


def test_other_errors_are_raised_as_they_are(tmp_path):
    with pytest.raises(ConnectionRefusedError), opened(tmp_path / "a"):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no")


def test_a_run_whose_config_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match=r"File too large.*config\.yaml"), small_files(9):
        create_run(tmp_path / "a", SETTINGS)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_removed_during_the_run_ends_it_with_a_line(tmp_path):
    run = tmp_path / "a"
    with pytest.raises(Fault, match="was removed"), opened(run):
        shutil.rmtree(run)
        (run / "metrics.jsonl").write_text("")


def test_settings_of_others_that_grow_or_nest_are_one_line(tmp_path):
    levels = ["a: &a0 [x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 99)
    ]
    file = tmp_path / "config.yaml"
    texts = ["\n".join([*levels, "env: *a98"]), "env:\n- &e [*e]", "env: " + "[" * 50_000,
             "<<: &m {<<: [*m, *m]}", "#" * 2**21]  # fmt: skip
    for text in texts:
        file.write_text(text)
        with pytest.raises(UsageError, match=f"^{file}: ") as error:
            read_config(file)
        assert len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_runs_that_is_no_folder_is_one_line(command):
    Path("runs").touch()
    code, _, err = command(*SMALL)
    assert code == 2 and err.count("\n") == 1 and "runs is not a folder" in err


def test_no_place_for_temporary_files_is_one_line(command, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc", "/nowhere"])
    code, out, err = command(*SMALL)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "set TMPDIR" in err


def test_a_resumed_run_does_not_write_through_a_link(tmp_path, command):
    """A `checkpoint` on another disk, and what else the user has in the folder, stays."""
    assert command(*SMALL, "--save-every", "2", "--num-updates", "2")[0] == 0
    run, outside, scratch = Path("runs/a"), tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir()
    (run / "checkpoint").rename(scratch)
    for name in ("checkpoint", "best"):
        (run / name).symlink_to(scratch)
    for name in ("prompts.txt", "exported.model"):
        (run / name).mkdir()
    os.mknod(run / "socket", stat.S_IFSOCK | 0o600)
    for name in ("README.md", "metrics.jsonl", "rollouts.jsonl", "model"):
        (run / name).rename(outside / name)
        (run / name).symlink_to(outside / name)

    def contents():
        return {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}

    before = contents()
    assert command("--resume", "runs/a", "--num-updates", "3")[0] == 0
    assert contents() == before and len(before) > 4
    assert (run / "checkpoint").is_symlink() and len(list(scratch.iterdir())) == 2
