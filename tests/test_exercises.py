"""`--algo scratch`: somebody's own functions train, and what is wrong with them is told."""

import json
from pathlib import Path

import pytest
from test_workshop import STUBS, solved

from core import run
from core.sampler import TorchSampler
from core.workshop import as_algorithm, checker

SHORT = """--sft-steps 20 --sft-batch-size 4 --num-updates 2 --num-prompts 2 --group-size 4
    --eval-num-tasks 4 --eval-every 2 --max-tokens 12 --max-turns 2 --no-cache""".split()


def records(run):
    return [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("env", ["letter_counting", "reverse:turns=2"])
def test_the_solutions_train_exactly_as_grpo_does(command, env, monkeypatch):
    """On the same draws, which GRPO's run is given too."""
    Path("scratch.py").write_text(solved())
    draw = as_algorithm.drawing(checker.load(Path("scratch.py")))
    monkeypatch.setattr(run, "make_sampler", lambda _, policy, *rest: TorchSampler(policy, draw))
    assert command(*SHORT, "--env", env, "--algo", "scratch", "--run-name", "mine")[0] == 0
    same = ["--grpo.loss-type", "grpo", "--grpo.aggregation", "token", "--tis-cap", "0"]
    assert command(*SHORT, "--env", env, *same, "--run-name", "ours")[0] == 0
    ours, mine = records("ours"), records("mine")
    assert [r["sft/loss"] for r in mine if "sft/loss" in r] == [
        r["sft/loss"] for r in ours if "sft/loss" in r
    ]
    updates = [(a, b) for a, b in zip(ours, mine, strict=True) if a.get("update", 0) > 0]
    assert len(updates) == 2
    for a, b in updates:
        for name in ("reward/mean", "loss", "policy/entropy", "length/mean", "tokens/trained"):
            assert b[name] == pytest.approx(a[name], abs=1e-4), name
        assert b["gap/logprob_mean"] < 1e-5
    assert Path("runs/mine/scratch.py").read_text() == solved()


def test_unfinished_exercises_are_named_before_anything_begins(command):
    Path("scratch.py").write_text(STUBS.read_text())
    code, _, err = command("--algo", "scratch")
    assert (code, err.count("\n")) == (2, 1)
    assert "3 (group_advantages)" in err and "9 (training_step)" in err
    assert "4 (" not in err  # not needed for training
    assert not Path("runs").exists()


def test_what_somebodys_code_raises_in_a_run_names_exercise_and_line(command):
    text = solved().replace(
        "    loss.backward()", "    assert len(input_ids) < 5\n    loss.backward()"
    )
    Path("scratch.py").write_text(text)
    code, _, err = command(*SHORT, "--algo", "scratch", "--run-name", "mine")
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "< 5" in line)
    assert (code, err.count("\n")) == (2, 1)
    assert f"scratch.py, line {number} (exercise 9): AssertionError" in err
    assert Path("runs/mine/checkpoint").exists()  # the warm start isn't lost


def test_a_loss_that_is_not_finite_stops_the_run(command):
    Path("scratch.py").write_text(solved().replace("return loss.item()", "return float('nan')"))
    code, _, err = command(*SHORT, "--algo", "scratch", "--run-name", "mine")
    assert code == 2 and "training_step returned nan" in err


def test_an_exercise_that_is_wrong_trains_as_it_is_and_is_told(command):
    text = solved().replace("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(1 - clip)")
    Path("scratch.py").write_text(text)
    code, out, _ = command(*SHORT, "--algo", "scratch", "--run-name", "mine")
    assert code == 0 and "exercise 5 (clipped_loss) is not what was asked for" in out


@pytest.mark.parametrize(
    "flags", ["--gamma 0.9", "--kl-coef 0.1", "--num-epochs 2", "--top-p 0.9", "--sampler openai"]
)
def test_settings_that_the_exercises_decide_are_refused(command, flags):
    Path("scratch.py").write_text(solved())
    code, _, err = command("--algo", "scratch", *flags.split())
    assert (code, err.count("\n")) == (2, 1)
    assert f"{flags.split()[0]} has no effect with --algo scratch" in err


def test_scratch_has_its_place_in_the_journal(command):
    Path("scratch.py").write_text(solved())
    assert command(*SHORT, "--algo", "scratch")[0] == 0
    assert "algo: scratch" in Path("runs/scratch-letter_counting-1/config.yaml").read_text()
    assert command("--resume", "runs/scratch-letter_counting-1", "--num-updates", "3")[0] == 0
    assert records("scratch-letter_counting-1")[-1]["update"] == 3
