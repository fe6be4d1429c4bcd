"""A run folder has a name, a config.yaml and a date, and one process writes it."""

import shutil
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import SMALL

from core.config import Config
from core.faults import UsageError
from core.files import run_folder
from core.files.run_folder import create_run, lock_run

SETTINGS = {"algo": "grpo"}


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path("runs")


@contextmanager
def opened(new=True):
    run = create_run("a", "", SETTINGS) if new else Path("runs/a")
    with lock_run(run, new):
        yield run


def test_a_usage_error_removes_a_new_folder_without_records(tmp_path):
    with pytest.raises(UsageError), opened() as run:
        (run / "metrics.jsonl").touch()  # the run has opened the file
        raise UsageError("no such model")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError), opened() as run:
        (run / "metrics.jsonl").write_text("{}\n{}\n")
        raise UsageError("9 of 12 episodes failed")
    for records, algo in (("{}\n", "grpo"), ("{}\n{}\n{}\n", "ppo")):  # dropped, and more
        with pytest.raises(UsageError), opened(new=False):
            (run / "config.yaml").write_text("algo: ppo\n")
            (run / "metrics.jsonl").write_text(records)
            raise UsageError("no reference")
        assert yaml.safe_load((run / "config.yaml").read_text()) == {"algo": algo}


def test_a_run_has_the_name_of_its_flag_or_the_next_number(runs):
    assert create_run("", "grpo-x", SETTINGS) == runs / "grpo-x-1"
    assert (runs / "grpo-x-1/config.yaml").read_bytes() == b"algo: grpo\n"
    assert [p.name for p in runs.iterdir()] == ["grpo-x-1"]
    for wrong in ("grpo-x-1", "..", "a/b", ".a", "x" * 101):
        with pytest.raises(UsageError, match="exists" if wrong == "grpo-x-1" else "plain"):
            create_run(wrong, "", SETTINGS)
    shutil.rmtree(runs)
    runs.touch()
    with pytest.raises(UsageError, match="is no folder"):
        create_run("a", "", SETTINGS)


def test_runs_that_start_together_have_numbers_of_their_own(runs, monkeypatch):
    """Both have found that runs/b-x-1 does not exist yet."""
    own, rivals = Path.rename, [{"seed": 2}]

    def rename(part, run):
        if rivals:
            create_run("", "b-x", rivals.pop())
        return own(part, run)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(run_folder.os, "getpid", iter((1, 2)).__next__)
    assert create_run("", "b-x", {"seed": 1}) == runs / "b-x-2"
    texts = [(runs / name / "config.yaml").read_text() for name in ("b-x-1", "b-x-2")]
    assert texts == ["seed: 2\n", "seed: 1\n"] and len([*runs.iterdir()]) == 2


def test_a_second_process_is_refused_and_what_killed_ones_left_is_removed():
    with opened() as run:
        with pytest.raises(UsageError, match="in use"), opened(new=False):
            raise AssertionError("locked twice")
        assert (run / "config.yaml").exists()
    (run / ".part-model").mkdir()
    (run / ".part-metrics.jsonl").touch()
    (run / "checkpoint/.part-000000-000001").mkdir(parents=True)
    with opened(new=False):
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
    cfg = Config(resume="runs/a", model_id=str(folder), template_options="brief=false")
    assert run_folder.begin(cfg)[0].template_options == "brief=false,today=2025-03-10"
