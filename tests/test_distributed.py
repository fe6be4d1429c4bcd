"""Data parallel: N ranks are one, to rounding; real processes, started by torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PROGRAM, metrics_of, rollouts_of

from core import distributed
from core.batching import to_tokens
from core.faults import Stopped, UsageError
from core.files import run_folder
from core.scoring import score_tokens
from core.terminal import cli

ROOT = Path(__file__).parent.parent
SMALL = """--sft-steps 4 --sft-batch-size 8 --num-updates 3 --num-prompts 4 --group-size 4
    --eval-num-tasks 8 --eval-every 2 --save-every 1 --max-tokens 24 --device cpu --dtype float64
   """.split()  # in float32 Adam makes steps of rounding errors, which change a draw now and then


def launch(folder, *args, ranks=2):
    """The exit code, stdout and stderr of train.py under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*torchrun, str(ROOT / "train.py"), *args],
        cwd=folder, env=environment, text=True, capture_output=True, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def assert_alike(ours, theirs):
    assert [r.keys() for r in ours] == [r.keys() for r in theirs] and ours
    for a, b in zip(ours, theirs, strict=True):
        for name, value in a.items():
            if isinstance(value, dict):  # the warnings, with their numbers
                assert value.keys() == b[name].keys()
                continue
            # Adam's step of a weight whose gradient is nearly 0 is mostly rounding
            error = 1e-4 if name.startswith("update/") else 1e-5
            if value is not None:  # the interval of equal returns
                value = pytest.approx(value, rel=error, abs=error)
            assert b[name] == value, name


CASES = {
    "grpo": "--algo grpo",
    "several turns, filtered": "--env reverse:turns=2 --filter-groups 1 --max-turns 2",
    "ppo in minibatches": "--algo ppo --num-epochs 2 --num-minibatches 2",
    "kl, lora": "--algo reinforce --kl-coef 0.1 --lora-rank 4",
    "older copies": "--env tic_tac_toe:opponent=older:1 --sft-steps 2 --max-turns 2",
    "older weights sample": "--staleness 1",
    "a program": f"--env {PROGRAM} --sft-steps 0 --max-turns 2 --lr 1e-3",
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.seeds)])
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c == "grpo" else pytest.mark.seeds) for c in CASES],
)
def test_several_ranks_train_as_one(command, tmp_path, case, ranks):
    """And one rank goes on with what they saved."""
    flags = [*SMALL, *CASES[case].split()]
    assert command(*flags, "--run-name", "one")[0] == 0
    code, out, err = launch(tmp_path, *flags, "--run-name", "two", ranks=ranks)
    assert code == 0, err
    assert out.count("picoRL · ") == 1  # rank 0 alone speaks
    one, two = (tmp_path / "runs" / name for name in ("one", "two"))
    for run in (one, two):
        assert command("--resume", run, "--num-updates", "4")[0] == 0
    # `command` draws no curves
    assert {p.name for p in two.iterdir()} == {"curves.png", *(p.name for p in one.iterdir())}
    assert_alike(metrics_of(one), metrics_of(two))
    seen = [
        [(r["kind"], r["env"], r["agent"], r["seed"], r["group_id"], r["messages"]) for r in rows]
        for rows in (
            [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
            for run in (one, two)
        )
    ]
    assert seen[0] == seen[1]


def as_rank(monkeypatch, rank, num_ranks):
    monkeypatch.setenv(distributed.LAUNCHED, "test")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))


@pytest.mark.parametrize(("num_ranks", "items"), [(2, []), (3, [*range(1, 40)]), (8, [*range(12)])])
def test_shares_are_the_whole_in_order_and_weigh_alike(monkeypatch, num_ranks, items):
    parts = []
    for rank in range(num_ranks):
        as_rank(monkeypatch, rank, num_ranks)
        parts.append(distributed.shard(items, weight=lambda item: 1 + item % 5))
    assert [item for part in parts for item in part] == items
    weights = [sum(1 + item % 5 for item in part) for part in parts]
    assert max(weights) - min(weights) <= 2 * 5


def test_each_rank_scores_its_share_of_the_tokens_and_the_sum_is_the_whole(monkeypatch, policy):
    batch, shares = to_tokens(rollouts_of(2, 3, prompt=5)), []
    whole = score_tokens(policy, batch, 1.0)["logprobs"]
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda x: shares.append(x[0].clone()))
    for rank in (0, 1):
        as_rank(monkeypatch, rank, 2)
        score_tokens(policy, batch, 1.0)
    assert not (shares[0] * shares[1]).any() and all(share.any() for share in shares)
    torch.testing.assert_close(shares[0] + shares[1], whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_of_a_machine_says_that_a_run_stopped(monkeypatch, capsys, rank):
    """torchrun ends all ranks as soon as one has failed, so the others must not be sooner."""
    as_rank(monkeypatch, rank, 2)
    monkeypatch.setenv("LOCAL_RANK", str(rank))

    def interrupted(_):
        raise Stopped("stopped and saved")

    codes = [cli.execute(main, [], parse=lambda _: None) for main in (lambda _: 1, interrupted)]
    assert codes == ([1, 130] if rank == 0 else [0, 0])
    assert capsys.readouterr().out == ("train.py: stopped and saved\n" if rank == 0 else "")


def test_a_run_of_several_processes_is_resumed_with_torchrun(monkeypatch):
    for ranks, launcher in ((1, "python"), (4, "torchrun ..")):
        as_rank(monkeypatch, 0, ranks)
        assert run_folder.start_command([], "--resume", "a") == f"{launcher} train.py --resume a"


def test_more_processes_than_gpus_are_one_line(monkeypatch):
    as_rank(monkeypatch, 0, 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    message = "torchrun --nproc-per-node: at most 1,"
    with pytest.raises(UsageError, match=message), distributed.process_group("auto"):
        pass


def test_without_torchrun_there_is_one_rank(monkeypatch):
    monkeypatch.delenv(distributed.LAUNCHED, raising=False)
    monkeypatch.setenv("RANK", "3")  # as some clusters set it
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (distributed.rank(), distributed.num_ranks()) == (0, 1)
