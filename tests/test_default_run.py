"""`python train.py` with no flags: the claim of the README's first screen, for one seed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_default_run_learns_to_count_letters(tmp_path):
    finished = subprocess.run(
        [sys.executable, ROOT / "train.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    print(finished.stdout)
    lines = (tmp_path / "runs/grpo-letter_counting-1/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    accuracy = [
        r["eval/letter_counting/accuracy"] for r in records if "eval/letter_counting/accuracy" in r
    ]
    updates = [r for r in records if r.get("update", 0) > 0]
    assert accuracy[0] <= 0.60
    assert accuracy[-1] >= 0.90
    assert updates[-1]["length/mean"] > 1.5 * updates[0]["length/mean"]
    assert fmean(update["info/worked"] for update in updates[-5:]) > 0.85
