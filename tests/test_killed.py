"""A run that is killed anywhere and resumed has the metrics of a run that nothing stopped."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from core.files.run_log import read_records

FLAGS = """--run-name a --sft-steps 2 --sft-batch-size 2 --num-updates 3 --num-prompts 2
    --group-size 2 --eval-num-tasks 2 --eval-every 2 --save-every 1 --max-tokens 10
    --max-model-len 256 --device cpu""".split()
SETTINGS = {
    "all weights": "--algo grpo --kl-coef 0.1 --filter-groups 1",
    "LoRA": "--algo reinforce --lora-rank 2 --kl-coef 0.1",
    "PPO": "--algo ppo --num-epochs 2 --num-minibatches 2",
}
ROOT = Path(__file__).parents[1]
CHILD = """
import os, signal, sys

changes = 0  # to files of the run

def count(event, arguments):  # an audit hook of Python
    global changes
    if event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
        return
    path, *how = map(str, arguments)
    if not (path.startswith("runs") or "/runs/" in path) or event == "open" and how[0] in "rb":
        return
    changes += 1
    if changes == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
import train
code = train.execute(sys.argv[2:])
open("changes", "w").write(str(changes))
sys.exit(code)
"""


def run(folder, killed_at, *flags):
    """Runs train.py, and kills it before the nth change to a file of the run; 0: not."""
    command = [sys.executable, "-c", CHILD, str(killed_at), *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, -9) and "Traceback" not in done.stderr, done.stderr
    return done.returncode


def metrics_of(folder):
    records = read_records(folder / "runs/a/metrics.jsonl")
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_killed_run_resumes_to_the_same_metrics(setting, tmp_path):
    whole, folder, draws = tmp_path / "whole", tmp_path / "killed", random.Random(1)
    whole.mkdir(), folder.mkdir()
    flags = [*FLAGS, *SETTINGS[setting].split()]
    assert run(whole, 0, *flags) == 0
    changes = int((whole / "changes").read_text())
    kills = [draws.randint(1, changes), draws.randint(1, changes // 2)]
    ends = []
    for killed_at in [*kills, 0]:
        again = ("--resume", "runs/a") if (folder / "runs/a").exists() else flags
        ends.append(run(folder, killed_at, *again))
    assert ends[0] == -9 and ends[-1] == 0
    assert metrics_of(folder) == metrics_of(whole)
    assert not list(folder.glob("runs/a/**/.part*"))
