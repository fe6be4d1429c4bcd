"""runs/smollm2: every run has valid settings, and the control flips a coin for each reward."""

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from core import cli, config, tasks
from environments.math_qa import MathQA

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "runs"), str(ROOT / "runs/smollm2")]


def script(name):
    spec = importlib.util.spec_from_file_location(
        f"smollm2_{name}", ROOT / f"runs/smollm2/{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reproduce = script("reproduce")


@pytest.mark.parametrize("name", reproduce.RUNS)
def test_every_run_has_valid_settings_and_its_environment_exists(name):
    path, flags = reproduce.RUNS[name]
    assert (ROOT / path).exists()
    cfg = config.resolve(cli.parse(shlex.split(f"{reproduce.SHARED} {flags}")))
    config.validate(cfg)
    tasks.training_envs(cfg.env, 0)
    if cfg.sft_steps:
        tasks.check_demonstrations(cfg.env)


def test_random_rewards_do_not_depend_on_the_response_and_correct_stays_true():
    class Sums(MathQA):
        pass

    script("random_rewards").flip_rewards(Sums)
    env = Sums(style="plain")
    env.reset(713)
    right, wrong = ([env.step(text) for _ in range(400)] for text in ("9", "10"))
    for steps in (right, wrong):
        assert {step.reward for step in steps} == {0.0, 1.0}
        assert 140 < sum(step.reward for step in steps) < 260  # 200 are expected
    assert all(step.info["correct"] for step in right)
    assert not any(step.info["correct"] for step in wrong)


def test_a_question_that_repeats_counts_once(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "HERE", tmp_path)
    rows = [
        {"update": update, "asked": [question], "said": ["9"], "correct": right, "lenient": True}
        for update, question, right in (
            (0, "a", False), (0, "a", False), (0, "b", True), (7, "a", True), (7, "b", True),
            (7, "a", True),
        )
    ]  # fmt: skip
    (tmp_path / "run.answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before, after = reproduce.evaluations("run")
    assert reproduce.accuracy(before) == "0.50 [0.09, 0.91]"  # Wilson: 1 of 2
    assert reproduce.accuracy(after) == "1.00 [0.34, 1.00]"
    assert reproduce.share(before, "lenient") == "1.00"


def test_training_with_all_answers_writes_every_greedy_answer(tmp_path):
    flags = "--eval-num-tasks 12 --num-updates 1 --num-prompts 1 --group-size 2 --max-tokens 4"
    subprocess.run(
        [sys.executable, ROOT / "runs/smollm2/all_answers.py", *flags.split(), "--run-name", "a"],
        cwd=tmp_path, check=True,
    )  # fmt: skip
    rows = map(json.loads, (tmp_path / "runs/a/rollouts.jsonl").read_text().splitlines())
    evaluated = [row["update"] for row in rows if row["kind"] == "eval"]
    assert evaluated == [0] * 12 + [1] * 12
