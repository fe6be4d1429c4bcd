"""Whole runs of a few small updates: files, repetition, resuming, skipped updates."""

import contextlib
import io
import itertools
import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import metrics_of
from safetensors.torch import load_file

import train
from core.faults import UsageError
from core.files import checkpoint
from core.loop import before as before_rl
from core.optimizer import MasterAdamW
from environments import base
from environments.base import Env, Step
from environments.plumbing import registry

SMALL = """--sft-steps 3 --sft-batch-size 2 --num-updates 4 --num-prompts 2 --group-size 4
    --eval-num-tasks 2 --eval-every 2 --save-every 2 --max-tokens 8 --device cpu
   """.split()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of a finished run with the settings `SMALL`, what it printed, and its report.html
    in each update; tests must not change it."""
    pages, score, output = [], train.score_first, io.StringIO()

    def look(run, batch):
        pages.append((run.folder / "report.html").read_text(encoding="utf-8"))
        score(run, batch)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(train, "score_first", look)
        patch.chdir(tmp_path_factory.mktemp("whole"))
        assert train.execute(["--run-name", "whole", *SMALL]) == 0
        return Path("runs/whole").absolute(), output.getvalue(), pages


@pytest.fixture
def pays(monkeypatch):
    """Registers the environment `task`: any answer is right, and earns what a function of it and of
    the number of the episode returns."""
    monkeypatch.setattr(base, "MAX_REWARD", math.inf)  # more would be refused

    def register(reward):
        episodes = itertools.count()

        class Task(Env):
            def __init__(self, level: int = 1):
                if level > 4:
                    raise UsageError("level is 1 to 4")

            def reset(self, seed):
                self.number = next(episodes)
                return [{"role": "user", "content": f"{seed}"}]

            def step(self, response):
                return Step(None, reward(response, self.number), True, {"correct": True})

        monkeypatch.setitem(registry.ENVIRONMENTS, "task", Task)

    return register


def test_a_run_writes_all_its_files(whole_run):
    folder, out, pages = whole_run
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "config.yaml", "metrics.jsonl", "rollouts.jsonl", "curves.png", "README.md",
        "report.html", "checkpoint", "model", "base",
    }  # fmt: skip
    records = metrics_of(folder)
    evaluated = ["eval/letter_counting/accuracy" in r for r in records if "update" in r]
    assert evaluated == [True, False, True, False, True]
    for record in records[-4:]:
        assert record["tokens/trained"] == record["tokens/sampled"] > 0
        assert record["gap/logprob_max"] < 1e-4
    rollouts = (folder / "rollouts.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "train" for line in rollouts) == 4 * 8
    assert "held-out accuracy" in out and "next: " in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[1] for row in rows if row[:1] == ["update"]] == ["1", "2", "3", "4"]
    # the report is there before update 1, and evaluations write it again, here after update 2
    assert [int(page.partition('"num_updates":')[2][0]) for page in pages] == [0, 0, 2, 2]


def test_a_run_that_is_stopped_and_crashes_resumes_to_the_same_metrics(
    command, monkeypatch, whole_run
):
    """It stops in its warm start and crashes in update 3."""
    updates = []

    def stop(*args, step=before_rl.sft_step):
        signal.raise_signal(signal.SIGTERM)
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(before_rl, "sft_step", stop)
        code, out, err = command("--run-name", "cut", *SMALL)
    assert (code, err) == (130, "") and "python train.py --resume runs/cut" in out
    assert checkpoint.find_checkpoint(Path("runs/cut"))[1]["sft_step"] == 1

    def die_in_update_3(cfg, batch, shape=train.shape_rewards):
        updates.append(batch)
        if len(updates) == 3:
            raise ZeroDivisionError  # an error that nothing catches
        return shape(cfg, batch)

    with monkeypatch.context() as patch:
        patch.setattr(train, "shape_rewards", die_in_update_3)
        with pytest.raises(ZeroDivisionError):
            command("--resume", "runs/cut")
    assert command("--resume", "runs/cut")[0] == 0
    assert "4 updates are done: a higher --num-updates" in command("--resume", "runs/cut")[1]
    assert metrics_of("runs/cut") == metrics_of(whole_run[0])


def test_many_skipped_updates_in_a_row_stop_the_run_and_keep_the_checkpoint(
    command, pays, monkeypatch
):
    pays(lambda *_: 3e38)
    monkeypatch.setattr("core.loop.run.MAX_SKIPPED", 3)
    flags = """--sft-steps 0 --env task --num-updates 30 --num-prompts 1 --group-size 2
        --eval-num-tasks 0 --save-every 1 --algo reinforce --reinforce.baseline none
        --max-tokens 2""".split()
    code, _, err = command("--run-name", "a", *SMALL, *flags)
    assert code == 1 and err.count("\n") == 1 and "3 updates in a row" in err
    assert [r["update/skipped"] for r in metrics_of("runs/a")[1:]] == [1] * 3
    saved, progress = checkpoint.find_checkpoint(Path("runs/a"))
    assert progress["update"] == 1
    weights = load_file(saved / "weights.safetensors").values()
    assert all(torch.isfinite(weight).all() for weight in weights)


def test_groups_of_equal_returns_are_no_step_and_the_curriculum_leaves_evaluation(command, pays):
    """Any answer is right and earns 1, so the tasks of training get harder."""
    pays(lambda *_: 1.0)
    flags = """--sft-steps 0 --env task:level=3 --num-updates 3 --num-prompts 2 --group-size 2
        --max-tokens 6 --filter-groups 2 --curriculum 0.9""".split()
    code, out, _ = command("--run-name", "a", *SMALL, *flags)
    assert code == 0 and "update 1: no gradient step: " in out
    updates = metrics_of("runs/a")[1:]
    assert [r["groups/level"] for r in updates] == [0, 1, 1]  # 4: the top
    for r in updates:
        assert (r["update/steps"], r["update/skipped"], r["tokens/trained"]) == (0, 1, 0)
        assert r["groups/zero_std_fraction"] == 1 and "loss" not in r
    rollouts = [json.loads(x) for x in Path("runs/a/rollouts.jsonl").read_text().splitlines()]
    envs = {(r["kind"], r["update"]): r["env"] for r in rollouts}
    assert {e for (kind, _), e in envs.items() if kind == "eval"} == {"task:level=3"}
    assert [envs["train", u][-1] for u in (1, 2, 3)] == ["3", "4", "4"]


def test_filtered_groups_are_replaced_by_other_tasks(command, pays):
    """Of three groups two have equal returns, of two others one, the next one has, too."""
    first, later = [0, 0, 1, 0, 2, 2], [0, 1, 3, 3, 4, 4]
    paid = first + first + later  # the answers of the first round are judged again
    pays(lambda _, number: float(paid[number]))
    flags = """--sft-steps 0 --env task --num-updates 1 --num-prompts 3 --group-size 2
        --eval-num-tasks 0 --filter-groups 2""".split()
    assert command("--run-name", "a", *SMALL, *flags)[0] == 0
    rows = [json.loads(x) for x in Path("runs/a/rollouts.jsonl").read_text().splitlines()]
    assert [row["return"] for row in rows] == first + later
    groups, seeds = ([row[name] for row in rows] for name in ("group_id", "seed"))
    for found in (groups, seeds):
        assert found[::2] == found[1::2] and len({*found}) == 6
    trained = sum(row["tokens"] for row in [*rows[2:4], *rows[6:8]])
    assert metrics_of("runs/a")[-1]["tokens/trained"] == trained


def test_the_learning_rate_rises_and_falls_and_goes_on_so_after_a_resume(command, monkeypatch):
    rates, clip_and_step = [], MasterAdamW.clip_and_step

    def step(optimizer, *rest, **given):
        rates.append([group["lr"] for group in optimizer.adamw.param_groups])
        return clip_and_step(optimizer, *rest, **given)

    monkeypatch.setattr(MasterAdamW, "clip_and_step", step)
    flags = """--algo ppo --ppo.value-lr 1.0 --lr 0.5 --warmup-updates 2 --lr-schedule linear
        --num-updates 3 --sft-steps 0 --eval-num-tasks 0 --run-name a""".split()
    assert command(*SMALL, *flags)[0] == 0
    assert command("--resume", "runs/a", "--num-updates", 4)[0] == 0
    assert rates == [[0.25, 0.5], [0.5, 1.0], [0.5, 1.0], [0.25, 0.5]]
    logged = [r["update/lr"] for r in metrics_of("runs/a") if "update/lr" in r]
    assert logged == [0.25, 0.5, 0.5, 0.25]


def test_a_budget_of_tokens_ends_a_run_with_an_evaluation_and_a_checkpoint(command):
    """An update samples 4 tokens, so 7 are spent in the second, and 12 with the third."""
    flags = [*SMALL, "--sft-steps", "0", "--eval-every", "0", "--save-every", "0"]
    flags += "--num-prompts 1 --max-tokens 1 --eval-num-tasks 1 --num-updates 9".split()
    begin, go_on = [*flags, "--run-name", "a"], ["--resume", "a"]
    for start, budget, last in ((begin, 7, 2), (go_on, 12, 3)):
        assert command(*start, "--max-sampled-tokens", budget)[0] == 0
        records = metrics_of("runs/a")
        assert [r["update"] for r in records] == [*range(last + 1)]
        assert "eval/letter_counting/accuracy" in records[-1] and Path("runs/a/model").exists()


def test_after_a_warm_start_in_bfloat16_another_optimizer_has_the_gradients(command):
    flags = "--dtype bfloat16 --sft-steps 1 --num-updates 1 --eval-num-tasks 0 --run-name a"
    assert command(*SMALL, *flags.split())[0] == 0
    assert metrics_of("runs/a")[-1]["update/steps"] == 1


def test_a_model_that_moved_is_resumed_from_its_new_place_and_a_change_is_said(
    command, qwen3_folder
):
    shutil.copytree(qwen3_folder, "model")
    flags = [*SMALL, "--sft-steps", "0", "--eval-num-tasks", "0", "--run-name", "a"]
    assert command("--model-id", "./model", *flags, "--num-updates", "1")[0] == 0
    Path("model").rename("moved")
    assert command("--resume", "a")[0] == 2
    new = ["--model-id", "./moved", "--lr", "0.001", "--num-updates", "2"]
    code, out, _ = command("--resume", "a", *new)
    said = "model_id ./model -> ./moved, num_updates 1 -> 2, lr 1e-06 -> 0.001"
    assert code == 0 and said in out
