"""runs/on_flyte.py: the runs of a sweep, failed runs, and the table, here and on Flyte."""

import sys
from pathlib import Path

import pytest

from core.files.run_log import read_records
from core.results import accuracy_of
from core.terminal import cli

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "runs"))
import on_flyte  # noqa: E402

TINY = """--num-updates 1 --sft-steps 2 --sft-batch-size 4 --num-prompts 2 --eval-num-tasks 4
    --max-tokens 8 --microscope 0 --device cpu""".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table_of(name):
    lines = Path("runs", name, "table.md").read_text().splitlines()[2:]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def test_sweep_runs_all_combinations(folder):
    labels, runs = on_flyte.plan(["seed=0,1", "grpo.clip-high=0.2,0.3"], ["--lr", "1e-3"])
    assert labels == [
        "seed=0 grpo.clip-high=0.2", "seed=0 grpo.clip-high=0.3",
        "seed=1 grpo.clip-high=0.2", "seed=1 grpo.clip-high=0.3",
    ]  # fmt: skip
    assert [run[-1] for run in runs] == ["sweep-1-1", "sweep-1-2", "sweep-1-3", "sweep-1-4"]
    cfg = cli.parse(runs[1])
    assert (cfg.seed, cfg.options.clip_high, cfg.lr) == (0, 0.3, 1e-3)


@pytest.mark.slow
def test_a_sweep_trains_and_evaluates_each_run_in_flytes_local_mode(folder):
    pytest.importorskip("flyte", reason="needs picorl[flyte]")
    assert on_flyte.main(["--flyte-local", "--sweep", "group-size=1,2", "--", *TINY]) == 1
    rows = table_of("sweep-1")
    assert [row[0] for row in rows] == ["group-size=1", "group-size=2"]
    assert rows[0][2].startswith("failed: train.py: --group-size 1")
    for _, env, before, after, minutes, run in rows[1:]:
        records = read_records(Path(run) / "metrics.jsonl")
        assert env == "letter_counting" and float(minutes) >= 0
        assert (before, after) == (accuracy_of(env, records[-2]), accuracy_of(env, records[-1]))
        assert (Path(run) / "report.html").exists()
