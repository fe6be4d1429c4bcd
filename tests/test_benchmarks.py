"""The scripts of runs/benchmarks measure what they say."""

import json
import subprocess
import sys

import pytest

SETTINGS = {"part": "picorl", "tokens": 2048, "gpu": False, "lora_rank": 0, "num_prompts": 2,
            "group_size": 2, "prompt_tokens": 50, "max_tokens": 8, "steps": 2}  # fmt: skip


@pytest.mark.slow
def test_a_step_of_picorl_samples_and_trains_the_budget(tmp_path):
    folder, scripts = str(tmp_path), "runs/benchmarks"
    subprocess.run(
        [sys.executable, f"{scripts}/workload.py", folder, "tiny", "float32"], check=True
    )
    child = [sys.executable, f"{scripts}/vs_trl.py", "--child"]
    done = subprocess.run([*child, json.dumps(SETTINGS | {"folder": folder})],
                          capture_output=True, text=True, check=True)  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("answer: "))
    answer = json.loads(line.removeprefix("answer: "))
    assert set(answer["sampled"]) == {2 * 2 * 8} and answer["prompt_tokens"] == 50
    assert answer["step_s"] > answer["sampling_s"] > 0
    assert "once per completion" not in done.stdout + done.stderr  # prefixes are shared
