"""A run folder is complete or absent, belongs to one process, and survives a full disk."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_files import small_files

from core import checkpoint
from core.config import Config
from core.run import Run
from core.run_dir import create_run, lock_run_dir, new_folder
from core.types import CannotWrite, Fault, UsageError

ROOT = Path(__file__).parent.parent
SETTINGS = {"algo": "grpo"}
SMALL = """--run-name a --sft-steps 4 --sft-batch-size 4 --num-updates 4 --num-prompts 2
    --group-size 4 --eval-num-tasks 4 --save-every 1 --max-tokens 16 --entropy-coef 0.01
    --device cpu""".split()


def test_a_new_folder_has_its_config_and_no_lock_file_afterwards(tmp_path):
    run = tmp_path / "runs" / "a"
    with lock_run_dir(run, SETTINGS, new=True):
        assert (run / "config.yaml").read_text() == "algo: grpo\n"
        assert [p.name for p in run.parent.iterdir()] == ["a"]
    assert [p.name for p in run.iterdir()] == ["config.yaml"]


def test_a_usage_error_removes_a_new_folder_without_records(tmp_path):
    run = tmp_path / "runs" / "a"
    with pytest.raises(UsageError), lock_run_dir(run, SETTINGS, new=True):
        raise UsageError("no such model")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError), lock_run_dir(run, SETTINGS, new=True):
        (run / "metrics.jsonl").touch()  # the run has opened the file
        raise UsageError("9 of 12 episodes failed")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError), lock_run_dir(run, SETTINGS, new=True):
        (run / "metrics.jsonl").write_text("{}\n")
        raise UsageError("9 of 12 episodes failed")
    with pytest.raises(UsageError), lock_run_dir(run, SETTINGS, new=False):
        raise UsageError("no intact checkpoint")
    assert sorted(p.name for p in run.iterdir()) == ["config.yaml", "metrics.jsonl"]


def test_an_existing_folder_is_not_used_for_a_new_run(tmp_path):
    create_run(tmp_path / "a", SETTINGS)
    with pytest.raises(UsageError, match="exists"):
        create_run(tmp_path / "a", SETTINGS)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(UsageError, match="exists"):
        new_folder(tmp_path, "a", "")
    create_run(tmp_path / "b-1", SETTINGS)
    assert new_folder(tmp_path, "", "b") == tmp_path / "b-2"


def test_a_second_process_is_refused_and_the_lock_ends_with_the_first(tmp_path):
    run = tmp_path / "a"
    code = f"""
import sys, time; from pathlib import Path; from core.run_dir import lock_run_dir
with lock_run_dir(Path({str(run)!r}), {{}}, new=True): print("locked", flush=True); time.sleep(60)
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert first.stdout.readline() == b"locked\n"
    with pytest.raises(UsageError, match="in use"), lock_run_dir(run, {}, new=False):
        raise AssertionError("locked twice")
    first.kill()
    first.wait()
    with lock_run_dir(run, {}, new=False):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch, number):
    def flock(handle, operation):
        raise OSError(number, os.strerror(number))

    create_run(tmp_path / "a", SETTINGS)
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UsageError, match="without locks"), lock_run_dir(tmp_path / "a", {}, False):
        raise AssertionError("two processes could be here")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["config.yaml"]


def test_what_killed_processes_left_is_removed(tmp_path):
    run = tmp_path / "a"
    for part in (".part-b-1", ".part-c-2"):  # of an old creation, and of one that may go on
        (tmp_path / part).mkdir()
    os.utime(tmp_path / ".part-b-1", (0, 0))
    with lock_run_dir(run, SETTINGS, new=True):
        assert sorted(p.name for p in tmp_path.iterdir()) == [".part-c-2", "a"]
    (run / ".part-model").mkdir()
    (run / ".part-metrics.jsonl").touch()
    (run / "checkpoint/.part-000000-000001").mkdir(parents=True)
    with lock_run_dir(run, {}, new=False):
        assert not list(run.glob("**/.part-*"))


def test_a_run_in_use_is_not_resumed(command):
    Path("runs").mkdir()
    create_run(Path("runs/a"), SETTINGS)
    with lock_run_dir(Path("runs/a"), {}, new=False):
        before = {p: p.read_bytes() for p in Path("runs/a").iterdir()}
        code, _, err = command("--resume", "runs/a", "--num-updates", "9")
        assert code == 2 and err.count("\n") == 1 and "runs/a is in use" in err
        assert before == {p: p.read_bytes() for p in Path("runs/a").iterdir()}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_error_is_one_line_with_the_command_to_resume(tmp_path, number):
    run = tmp_path / "a"
    with pytest.raises(CannotWrite) as error, lock_run_dir(run, SETTINGS, new=True):
        raise OSError(number, os.strerror(number), "runs/a/metrics.jsonl")
    assert os.strerror(number) in str(error.value) and f"--resume {run}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_whose_config_cannot_be_written_leaves_nothing(tmp_path):
    locked = lock_run_dir(tmp_path / "a", SETTINGS, new=True)
    with pytest.raises(CannotWrite) as error, small_files(9), locked:
        raise AssertionError("there is no folder")
    assert "config.yaml: File too large" in str(error.value)
    assert "run the same command" in str(error.value) and not list(tmp_path.iterdir())


def test_commands_quote_the_folder(tmp_path):
    run = tmp_path / "my run"
    with pytest.raises(CannotWrite) as error, lock_run_dir(run, SETTINGS, new=True):
        raise OSError(errno.ENOSPC, "no space")
    assert f"--resume '{run}'" in str(error.value)
    assert (
        Run.resume_command(SimpleNamespace(folder=run, cfg=Config()))
        == f"python train.py --resume '{run}'"
    )


def test_other_errors_are_raised_as_they_are(tmp_path):
    run = tmp_path / "a"
    with pytest.raises(ConnectionRefusedError), lock_run_dir(run, SETTINGS, new=True):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no")
    with pytest.raises(KeyError), lock_run_dir(run, SETTINGS, new=False):
        raise KeyError("a mistake in the code")
    assert [p.name for p in run.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("kind", ["file", "dangling link", "file above"])
def test_runs_that_is_no_folder_is_one_line(command, kind):
    if kind == "file":
        Path("runs").touch()
    elif kind == "dangling link":
        Path("runs").symlink_to("nowhere")
    else:
        Path("file").touch()
        Path("runs").symlink_to("file/runs")
    code, _, err = command(*SMALL)
    assert code == 2 and err.count("\n") == 1 and "runs is not a folder" in err


def test_no_place_for_temporary_files_is_one_line(command, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc", "/nowhere"])
    code, out, err = command(*SMALL)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "set TMPDIR" in err


WITHOUT_TEMPORARY = """
import runpy, sys, tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc", "/nowhere"]
sys.argv = sys.argv[1:]
run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
run(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("command", [
    "core.report.compare a", "core.league a guess", "core.chat tiny", "scratch.py",
    "environments show remote:env=snake",
])  # fmt: skip
def test_no_place_for_temporary_files_is_one_line_of_each_command(command):
    """Before the import of torch, which needs one."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_TEMPORARY, *command.split()],
                          cwd=ROOT, capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode in (1, 2) and done.stderr.count("\n") == 1, done.stderr
    assert "No usable temporary directory" in done.stderr


# Runs `python train.py` in a namespace of its own, in which it may mount a small or read-only disk.
MOUNTED = """
set -e
mkdir -p runs
mount -t tmpfs -o size=SIZEk,nr_inodes=INODES none runs
cp -r kept/. runs 2> /dev/null || true
[ SIZE = 0 ] || mount -o remount,MODE runs
python=$1; shift
set +e
"$python" "$@"; code=$?
mount -o remount,rw,size=200m runs 2> /dev/null
cp -r runs/. after
exit $code
"""


def run_mounted(tmp_path, size, mode, *args, inodes=0):  # 0: without a limit
    script = MOUNTED.replace("SIZE", str(size)).replace("MODE", mode)
    script = script.replace("INODES", str(inodes))
    (tmp_path / "after").mkdir(exist_ok=True)
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "-",
         sys.executable, str(ROOT / "train.py"), *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(  # a run needs 4 MB, and 10 MB per checkpoint
    "kib", [20_000, *(pytest.param(kib, marks=pytest.mark.seeds) for kib in (5_000, 30_000))]
)
def test_a_full_disk_stops_the_run_and_leaves_its_checkpoint(tmp_path, kib):
    code, err = run_mounted(tmp_path, kib, "rw", *SMALL)
    assert code == 1 and err.count("\n") == 1, err
    assert "No space left on device" in err and "Traceback" not in err
    left = tmp_path / "after" / "a"
    found = checkpoint.find_checkpoint(left)
    assert (found.folder is not None) == (kib > 5_000)
    assert not list(left.glob("checkpoint/.part*"))
    (tmp_path / "runs").rmdir()
    (tmp_path / "after").rename(tmp_path / "runs")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--resume", "runs/a"], cwd=tmp_path,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.seeds
def test_a_disk_without_inodes_stops_the_run_and_leaves_its_checkpoint(tmp_path):
    code, err = run_mounted(tmp_path, 50_000, "rw", *SMALL, inodes=26)
    assert code == 1 and err.count("\n") == 1 and "No space left on device" in err, err
    left = tmp_path / "after" / "a"
    assert checkpoint.find_checkpoint(left).folder is not None
    assert not list(left.glob("**/.part*"))


@pytest.mark.slow
def test_a_read_only_disk_is_one_line(tmp_path, command):
    (tmp_path / "kept").mkdir()
    code, err = run_mounted(tmp_path, 50_000, "ro", *SMALL)
    assert code == 1 and err.count("\n") == 1 and "Read-only file system" in err, err
    assert command(*SMALL)[0] == 0
    (tmp_path / "kept").rmdir()
    (tmp_path / "runs").rename(tmp_path / "kept")
    args = ("--resume", "runs/a", "--num-updates", "6")
    code, err = run_mounted(tmp_path, 50_000, "ro", *args)
    assert code == 1 and err.count("\n") == 1 and "Read-only file system" in err, err
    assert checkpoint.find_checkpoint(tmp_path / "after" / "a").progress["update"] == 4


def test_a_folder_that_is_removed_during_the_run_ends_it_with_a_line(tmp_path):
    run = tmp_path / "a"
    with pytest.raises(Fault, match="was removed"), lock_run_dir(run, {}, new=True):
        shutil.rmtree(run)
        (run / "metrics.jsonl").write_text("")
