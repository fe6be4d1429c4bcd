"""Trains in a folder outside the repository, stops the run half way, and resumes it from /.

    python runs/own_environments/outside.py --env my_envs.py:Parity --num-updates 8 --run-name a

Copies environments/template.py as my_envs.py and rewards.py into a temporary folder, and
writes letters.jsonl there: 1,200 questions with their answers. The flags are those of train.py.
Moves the run's folder to runs/ at its end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))

from core.files.run_log import read_records  # noqa: E402
from environments.letter_counting import LetterCounting  # noqa: E402


def main(flags: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, name = Path(place), flags[flags.index("--run-name") + 1]
        shutil.copy(ROOT / "environments/template.py", folder / "my_envs.py")
        shutil.copy(HERE / "rewards.py", folder)
        (folder / "letters.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions()))
        run = folder / "runs" / name
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "train", *flags]
        process = subprocess.Popen(command, cwd=folder, env=environment)
        half = int(flags[flags.index("--num-updates") + 1]) // 2
        while process.poll() is None and half not in updates(run):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, "the run was not stopped by Ctrl-C"
        resume = [sys.executable, "-m", "train", "--resume", str(run)]
        subprocess.run(resume, cwd="/", env=environment, check=True)
        assert updates(run) == list(range(2 * half + 1)), updates(run)
        shutil.move(run, ROOT / "runs" / name)


def updates(run: Path) -> list[int]:
    """The updates whose metrics are written."""
    records = read_records(run / "metrics.jsonl")
    return [record["update"] for record in records if "update" in record]


def questions() -> list[dict[str, object]]:
    """1,200 different questions about one letter, with the answer."""
    env, rows, seed = LetterCounting(), dict[str, dict[str, object]](), 0
    while len(rows) < 1200:
        (message,), seed = env.reset(seed), seed + 1
        if len(env.counts) == 1:
            (answer,) = env.counts.values()
            rows[message["content"]] = {"prompt": message["content"], "answer": answer}
    return list(rows.values())


if __name__ == "__main__":
    if "--run-name" not in sys.argv or "--num-updates" not in sys.argv:
        sys.exit(__doc__)
    main(sys.argv[1:])
