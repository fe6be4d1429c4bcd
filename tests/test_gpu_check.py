"""runs/benchmarks/gpu_check.py: two of its steps, on vLLM's CPU build."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "runs/benchmarks"))
from gpu_check import Args, main


@pytest.mark.vllm
def test_two_steps_pass_on_the_cpu(tmp_path):
    out = tmp_path / "lines"
    code = main(Args(cpu=True, only=("attention", "eager"), minutes=30, out=str(out)))
    *lines, verdict = map(json.loads, out.read_text().splitlines())
    eager, attention = sorted(lines, key=lambda line: line["step"], reverse=True)
    assert (code, verdict["verdict"]) == (0, "passed")
    assert attention["gap_tree_max"] < 1e-4
    assert eager["equal"] == "16 of 16"
    assert eager["gap_max"] < 1e-4
