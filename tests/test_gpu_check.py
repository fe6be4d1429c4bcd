"""runs/benchmarks/gpu_check.py: what it does with steps that pass, fail, crash and hang."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "runs/benchmarks"))
import gpu_check
from gpu_check import Args, main, run_step


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_failed_step_is_repeated_in_three_variants_and_the_others_still_run(
    monkeypatch, tmp_path
):
    def run(args, name, variant, left):
        works = name != "lora" or variant == "Model Runner V1"
        return {"step": name} | ({} if works else {"error": f"broken {variant}"})

    monkeypatch.setattr(gpu_check, "run_step", run)
    out = tmp_path / "lines"
    assert main(Args(only=("sleep", "lora", "updates"), out=str(out))) == 1
    *steps, verdict = lines_of(out)
    repeated = {
        "eager mode": "broken eager mode",
        "Model Runner V1": "passed",
        "Triton attention": "broken Triton attention",
    }
    assert steps == [
        {"step": "sleep"},
        {"step": "lora", "error": "broken ", "repeated": repeated},
        {"step": "updates"},
    ]
    assert (verdict["verdict"], verdict["failed"]) == ("failed", ["lora"])
    assert main(Args(only=("sleep",))) == 0


def test_no_other_step_runs_without_the_packages_or_after_the_time(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "run_step", lambda args, name, *_: {"step": name, "error": "no"})
    out = tmp_path / "lines"
    assert main(Args(out=str(out))) == 1
    assert [line.get("step") for line in lines_of(out)] == ["versions", None]
    out.unlink()
    assert main(Args(out=str(out), only=("lora",), minutes=0)) == 1
    assert lines_of(out)[0] == {"step": "lora", "error": "no time"}


def test_no_variant_runs_after_the_time(monkeypatch, tmp_path):
    def run(args, name, variant, left):
        time.sleep(left)
        return {"step": name, "error": f"broken {variant}"}

    monkeypatch.setattr(gpu_check, "run_step", run)
    out = tmp_path / "lines"
    assert main(Args(only=("lora", "updates"), minutes=0.001, out=str(out))) == 1
    lora, updates, _ = lines_of(out)
    assert lora["repeated"] == dict.fromkeys(gpu_check.VARIANTS, "no time")
    assert updates == {"step": "updates", "error": "no time"}


@pytest.mark.parametrize(
    ("script", "seconds", "expected"),
    [
        ("print('answer: {\"a\": 1}')", 60, {"a": 1}),
        ("print('answer: {}'); raise SystemExit(3)", 60, {"error": "exit code 3 | answer: {}"}),
        ("import os; print('last'); os.abort()", 60, {"error": "exit code -6 | last"}),
        ("import time; time.sleep(60)", 1, {"error": "stopped after 1 s"}),
    ],
    ids=["passes", "fails at the end", "crashes", "hangs"],
)
def test_result_of_a_step(monkeypatch, tmp_path, script, seconds, expected):
    monkeypatch.setattr(gpu_check, "SCRIPT", tmp_path / "step.py")
    gpu_check.SCRIPT.write_text(
        f"import sys; sys.stdout.reconfigure(line_buffering=True)\n{script}"
    )
    line = run_step(Args(), "lora", "", seconds)
    assert line.pop("seconds") < 30
    assert line == {"step": "lora", **expected}


@pytest.mark.vllm
def test_two_steps_pass_on_the_cpu(tmp_path):
    out = tmp_path / "lines"
    code = main(Args(cpu=True, only=("attention", "eager"), minutes=30, out=str(out)))
    attention, eager, verdict = lines_of(out)
    assert (code, verdict["verdict"]) == (0, "passed")
    assert attention["gap_packed_max"] < 1e-4
    assert eager["equal"] == "16 of 16"
    assert eager["gap_max"] < 1e-4
