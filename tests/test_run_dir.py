"""A run's folder is there whole or not at all, has one process, and survives a disk that won't."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core import checkpoint, run_dir
from core.run_dir import create_run, lock_run_dir, new_folder
from core.types import CannotWrite, UsageError

ROOT = Path(__file__).parent.parent
CONFIG = {"algo": "grpo"}
SMALL = """--run-name a --sft-steps 4 --sft-batch-size 4 --num-updates 4 --num-prompts 2
    --group-size 4 --eval-num-tasks 4 --save-every 1 --max-tokens 16 --device cpu
    --no-cache""".split()


def test_a_new_folder_appears_with_its_config(tmp_path):
    run = tmp_path / "runs" / "a"
    with lock_run_dir(run, CONFIG, new=True):
        assert {p.name for p in run.iterdir()} == {"config.yaml", ".lock"}
        assert [p.name for p in run.parent.iterdir()] == ["a"]


def test_what_can_not_begin_leaves_nothing(tmp_path):
    run = tmp_path / "runs" / "a"
    with pytest.raises(UsageError), lock_run_dir(run, CONFIG, new=True):
        raise UsageError("no such model")
    assert list(tmp_path.iterdir()) == []
    create_run(run, CONFIG)
    with pytest.raises(UsageError), lock_run_dir(run, CONFIG, new=False):
        raise UsageError("no whole checkpoint")
    assert (run / "config.yaml").exists()


def test_a_mistake_in_a_run_that_has_begun_leaves_it(tmp_path):
    run = tmp_path / "a"
    with pytest.raises(UsageError), lock_run_dir(run, CONFIG, new=True):
        (run / "metrics.jsonl").touch()
        raise UsageError("9 of 12 episodes failed")
    assert (run / "metrics.jsonl").exists()


def test_two_new_runs_of_one_name_are_not_mixed(tmp_path):
    create_run(tmp_path / "a", CONFIG)
    with pytest.raises(UsageError, match="exists"):
        create_run(tmp_path / "a", CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with pytest.raises(UsageError, match="exists"):
        new_folder(tmp_path, "a", "")


def test_a_second_process_is_refused_and_the_lock_falls_with_the_first(tmp_path):
    run = tmp_path / "a"
    code = f"""
import sys, time; from pathlib import Path; from core.run_dir import lock_run_dir
with lock_run_dir(Path({str(run)!r}), {{}}, new=True): print("mine", flush=True); time.sleep(60)
"""
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert first.stdout.readline() == b"mine\n"
    with (
        pytest.raises(UsageError, match="in use by another process"),
        lock_run_dir(run, {}, new=False),
    ):
        raise AssertionError("lock_run_dir twice")
    first.kill()
    first.wait()
    with lock_run_dir(run, {}, new=False):
        pass


def test_the_command_refuses_a_run_that_is_going_on(command):
    assert command(*SMALL)[0] == 0
    before = {p: p.stat().st_mtime_ns for p in Path("runs/a").rglob("*")}
    with lock_run_dir(Path("runs/a"), {}, new=False):
        code, _, err = command("--resume", "runs/a", "--num-updates", "9")
    assert code == 2 and err.count("\n") == 1 and "in use by another process" in err
    assert before == {p: p.stat().st_mtime_ns for p in Path("runs/a").rglob("*")}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_takes_no_more_is_one_line(tmp_path, number):
    with pytest.raises(CannotWrite) as told, lock_run_dir(tmp_path / "a", CONFIG, new=True):
        raise OSError(number, os.strerror(number), "runs/a/metrics.jsonl")
    assert os.strerror(number) in str(told.value) and "--resume" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_write_that_fails_inside_a_library_is_reported_with_its_cause(tmp_path):
    """torch and safetensors hide the error number: here the limit on the size of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        for save in (torch.save, save_file):
            with pytest.raises(OSError, match="File too large"), run_dir.disk_errors(tmp_path):
                save({"x": torch.zeros(100_000)}, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    with pytest.raises(ValueError, match="a mistake"), run_dir.disk_errors(tmp_path):
        raise ValueError("a mistake")
    assert not list(tmp_path.glob(".part*"))


def test_other_errors_pass(tmp_path):
    with pytest.raises(ConnectionRefusedError), lock_run_dir(tmp_path / "a", CONFIG, new=True):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no")


# Run `python train.py` in a namespace of its own, where it may mount: sizes in KiB, or read-only.
MOUNTED = """
set -e
mkdir -p runs
mount -t tmpfs -o size=SIZEk none runs
cp -r kept/. runs 2> /dev/null || true
[ SIZE = 0 ] || mount -o remount,MODE runs
python=$1; shift
set +e
"$python" "$@"; code=$?
mount -o remount,rw,size=200m runs 2> /dev/null
cp -r runs/. after
exit $code
"""


def run_mounted(tmp_path, size, mode, *args):
    script = MOUNTED.replace("SIZE", str(size)).replace("MODE", mode)
    (tmp_path / "after").mkdir(exist_ok=True)
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "-",
         sys.executable, str(ROOT / "train.py"), *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(  # 4 MB, and 10 MB a checkpoint
    "kib", [20_000, *(pytest.param(kib, marks=pytest.mark.seeds) for kib in (5_000, 30_000))]
)
def test_a_full_disk_stops_the_run_with_one_line_and_its_checkpoint(tmp_path, kib):
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


@pytest.mark.slow
def test_a_read_only_folder_is_one_line(tmp_path, command):
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


def test_the_known_disk_errors_are_those_of_this_system():
    assert {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG} <= run_dir.DISK_ERRORS
