"""runs/on_flyte.py: the runs of a sweep, and its table, here and on Flyte."""

import sys
from pathlib import Path

import pytest

from core import settings
from core.files.run_log import read_records
from core.results import accuracy_of

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "runs"))
import on_flyte  # noqa: E402

TINY = """--num-updates 1 --sft-steps 2 --sft-batch-size 4 --num-prompts 2 --eval-num-tasks 4
    --max-tokens 8 --device cpu""".split()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_sweep_runs_all_combinations():
    Path("runs/sweep-2").mkdir(parents=True)
    sweep = [["seed", "0", "1"], ["grpo.clip-high", "0.2", "0.3"], ["trust-remote-code", "true"]]
    runs = on_flyte.plan(sweep, ["--lr", "1e-3"])
    assert [*runs] == [f"--seed {seed} --grpo.clip-high {clip} --trust-remote-code"
                       for seed in (0, 1) for clip in (0.2, 0.3)]  # fmt: skip
    names = [run[-1] for run in runs.values()]
    assert names == ["sweep-1", "sweep-3", "sweep-4", "sweep-5"]
    cfg = settings.parse(runs["--seed 0 --grpo.clip-high 0.3 --trust-remote-code"])
    assert (cfg.seed, cfg.options.clip_high, cfg.lr, cfg.trust_remote_code) == (0, 0.3, 1e-3, True)


@pytest.mark.slow
def test_a_sweep_trains_and_evaluates_each_run():
    pytest.importorskip("flyte", reason="needs picorl[flyte]")
    found = on_flyte.run_on_flyte(
        [*on_flyte.plan([["group-size", "1", "2"]], TINY).values()], "local"
    )
    assert found[0][0].startswith("failed: train.py: --group-size 1")
    result, run = found[1]
    records = read_records(Path(run) / "metrics.jsonl")
    env, *both = "letter_counting", records[-2], records[-1]
    assert result == f"{env}: {', '.join(accuracy_of(env, record) for record in both)}"
    assert (Path(run) / "report.html").exists()
