"""A run folder has a name, a config.yaml and a date, and one process writes it."""

import shutil
import subprocess
import sys
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import SMALL

from core.faults import UsageError
from core.files import run_folder
from core.files.run_folder import create_run, lock_run, new_folder

ROOT = Path(__file__).parent.parent
SETTINGS = {"algo": "grpo"}


@contextmanager
def opened(run, new=True):
    if new:
        create_run(run, SETTINGS)
    with lock_run(run, new):
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
    assert (run / "metrics.jsonl").exists()
    (run / "metrics.jsonl").unlink()


def test_a_refused_resume_leaves_the_settings_as_they_were(tmp_path):
    run = tmp_path / "a"
    with opened(run):
        (run / "metrics.jsonl").write_text("{}\n{}\n")
    for records, algo in (("{}\n", "grpo"), ("{}\n{}\n{}\n", "ppo")):
        with pytest.raises(UsageError), opened(run, new=False):
            (run / "config.yaml").write_text("algo: ppo\n")
            (run / "metrics.jsonl").write_text(records)
            raise UsageError("no reference")
        assert yaml.safe_load((run / "config.yaml").read_text()) == {"algo": algo}


def test_a_run_has_the_name_of_its_flag_or_the_next_number(tmp_path):
    run = create_run(new_folder(tmp_path / "runs", "", "grpo-x"), SETTINGS)
    assert run.name == "grpo-x-1" and (run / "config.yaml").read_bytes() == b"algo: grpo\n"
    assert [p.name for p in run.parent.iterdir()] == ["grpo-x-1"]
    assert new_folder(run.parent, "", "grpo-x").name == "grpo-x-2"
    with pytest.raises(UsageError, match="exists"):
        new_folder(run.parent, "grpo-x-1", "")
    with pytest.raises(UsageError, match="exists"):
        create_run(run, SETTINGS)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no folder"):
        create_run(tmp_path / "file/a", SETTINGS)


def test_runs_without_a_name_that_start_together_have_numbers_of_their_own(tmp_path):
    chosen = [new_folder(tmp_path, "", "b-x") for _ in range(3)]  # before any of them is made
    made = [create_run(run, {"seed": n}, take_next=True) for n, run in enumerate(chosen)]
    assert made == [tmp_path / f"b-x-{number}" for number in (1, 2, 3)]
    assert [(run / "config.yaml").read_text() for run in made] == [f"seed: {n}\n" for n in range(3)]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_second_process_is_refused_and_the_lock_ends_with_the_first(tmp_path):
    run = create_run(tmp_path / "a", SETTINGS)
    code = f"""
import sys, time; from pathlib import Path; from core.files.run_folder import lock_run
with lock_run(Path({str(run)!r}), new=True): print("locked", flush=True); time.sleep(60)
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


def test_what_killed_processes_left_is_removed(tmp_path):
    run = tmp_path / "a"
    create_run(run, SETTINGS)
    (run / ".part-model").mkdir()
    (run / ".part-metrics.jsonl").touch()
    (run / "checkpoint/.part-000000-000001").mkdir(parents=True)
    with opened(run, new=False):
        assert not list(run.glob("**/.part-*"))


def test_a_run_keeps_the_date_and_the_options_of_its_chat_template(
    command, qwen3_folder, monkeypatch
):
    folder = Path(shutil.copytree(qwen3_folder, "dated"))
    template = folder / "chat_template.jinja"
    shown = "{{ strftime_now('%d %B') }}{{ ', brief' if brief else '' }}"
    template.write_text(shown + template.read_text())
    flags = f"--run-name a --model-id {folder} --template-options brief=true".split()
    for day, started in ((9, [*SMALL, *flags]), (10, ["--resume", "runs/a", "--num-updates", 2])):
        monkeypatch.setattr(
            run_folder, "date", SimpleNamespace(today=lambda day=day: date(2025, 3, day))
        )
        code, _, stderr = command(*started)
        assert code == 0, stderr
        saved = yaml.safe_load(Path("runs/a/config.yaml").read_text())
        assert saved["template_options"] == "brief=true,today=2025-03-09"
