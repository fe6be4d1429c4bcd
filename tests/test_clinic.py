"""Each fault of runs/clinic is named by its warning within three updates."""

import sys
from pathlib import Path

import pytest

from core.files.run_log import read_records

CLINIC = Path(__file__).parents[1] / "runs/clinic"
sys.path.insert(0, str(CLINIC))
from faults import FAULTS  # noqa: E402

SMALL = """--num-updates 3 --num-prompts 4 --eval-num-tasks 4 --eval-every 15 --save-every 0
    --device cpu --run-name a""".split()
NAMED = [name for name, fault in FAULTS.items() if fault.warning]
TOGETHER = [  # faults that do not hide one another, of all warnings
    "same_tasks end_token_masked evaluates_on_training groups_mixed micro_batch_mean stale_weights",
    "reference_moves high_rate value_head_left_out", "advantages_shifted",
    "whole_distribution", "reward_fails cut_answers", "steps_vanish",
]  # fmt: skip


def warnings(command, *flags):
    code, _, error = command(*flags)
    assert code == 0, error
    records = read_records(Path("runs/a/metrics.jsonl"))
    return {name: line for r in records for name, line in r.get("warnings", {}).items()}


@pytest.mark.parametrize(
    "names", [*TOGETHER, *(pytest.param(name, marks=pytest.mark.seeds) for name in NAMED)]
)
def test_faults_are_named_in_three_updates(names, command, monkeypatch):
    chosen = [FAULTS[name] for name in names.split()]
    flags = [*SMALL, "--eval-num-tasks", 0, "--num-prompts", 8]
    for fault in chosen:
        fault.install(monkeypatch.setattr)
        flags += fault.flags.split()
    found = warnings(command, *flags)
    assert all("; next: " in found[fault.warning] for fault in chosen)


def test_without_a_fault_no_task_is_repeated_or_evaluated(command):
    assert warnings(command, *SMALL) == {}
    records = read_records(Path("runs/a/metrics.jsonl"))
    assert [r["groups/repeated"] for r in records if r["update"] > 0] == [0.0] * 3
    assert {v for r in records for k, v in r.items() if k.endswith("/seen")} == {0.0}


MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.seeds) for seed in range(1, 10)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *MORE_SEEDS])
@pytest.mark.parametrize(
    "flags", ["", "--lora-rank 8", "--dtype bfloat16", "--algo ppo", "--num-minibatches 4"]
)
def test_a_healthy_run_raises_no_warning(flags, seed, command):
    five = [*SMALL, "--num-updates", "5", "--seed", seed]
    assert warnings(command, *five, *flags.split()) == {}
