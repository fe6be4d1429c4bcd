"""The scripts of runs/benchmarks measure what they say."""

import subprocess
import sys

import pytest


@pytest.mark.seeds
def test_a_step_of_picorl_and_of_trl_samples_and_trains_the_same_tokens():
    """The script stops if a side samples others."""
    flags = "--num-prompts 2 --prompt-tokens 50 --max-tokens 8 --steps 2 --rounds 1 --no-write"
    done = subprocess.run([sys.executable, "runs/benchmarks/vs_trl.py", *flags.split()],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, theirs = [line.split(" | ") for line in done.stdout.splitlines() if "2 of 50" in line]
    assert (ours[2], ours[3], theirs[3]) == ("128", "picoRL", "TRL")
    assert "once per completion" not in done.stdout + done.stderr  # prefixes are shared
