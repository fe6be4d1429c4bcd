"""Runs the workshop's commands as a new user would, in a clean clone and virtual environment.

    python runs/workshop_dry_run/dry_run.py     # about a quarter of an hour; writes README.md here

The commands are those of the README and of core/workshop/README.md. The script fills in the
exercises with the output of `python scratch.py --solution N`.
"""

import ast
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path += [str(HERE.parent), str(ROOT)]

from record import machine, write_table  # noqa: E402

from core.run_log import read_records  # noqa: E402

MAX_LINES = 14  # of a command's output in the report
PIP_NOISE = ("Looking in ", "  Stored in ", "WARNING: Location ")  # lines with local paths
COMMANDS = (
    "pip install -e .",
    "python train.py",
    "python scratch.py",
    "python scratch.py --hint 3",
    "FILL IN",
    "python scratch.py",
    "python train.py --run-name reference --eval-every 1 --max-sampled-tokens 20000",
    "python train.py --algo scratch --run-name mine --eval-every 1 --max-sampled-tokens 20000",
    "python -m core.report.compare runs/reference runs/mine",
    "python runs/what_goes_wrong/broken.py wrong_clip --num-epochs 4 --lr 3e-4 --num-updates 10",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home, venv = Path(folder, "picorl"), Path(folder, "venv")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(home)], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        env = os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "COLUMNS": "100"}
        start, report = time.monotonic(), list[str]()
        installed = risen = 0.0
        for command in COMMANDS:
            if command == "FILL IN":
                fill_in(home, env)
                report += ["", "*(The exercises now contain the output of `--solution N`.)*"]
                continue
            began = time.monotonic()
            lines, code, reward_rose = run(command, home, env)
            seconds = time.monotonic() - began
            if command == COMMANDS[0]:
                installed = time.monotonic() - start
            elif command == COMMANDS[1]:
                if reward_rose is None:
                    sys.exit("the reward did not rise")
                risen = reward_rose - start
            report += ["", f"**`{command}`** {seconds:.0f} s, exit code {code}", "", "```"]
            report += [*shorten(lines), "```"]
            print(f"{command}: {seconds:.0f} s, exit code {code}", flush=True)
        head = [
            f"From the clone to a higher reward: **{risen / 60:.1f} minutes**; cloning and "
            f"installing took the first {installed:.0f} s.",
            "",
            f"{machine()}. The packages came from a nearby cache; a slow connection takes longer.",
        ]
        text = "\n".join([*head, *report])
        text = text.replace(str(home), "~/picorl").replace(folder, "~")
        write_table(HERE, text.splitlines())


def run(command: str, home: Path, env: dict[str, str]) -> tuple[list[str], int, float | None]:
    """Returns the lines, the exit code, and the time at which the reward had risen by 0.1."""
    output, reward_rose = Path(home.parent, "output.txt"), None
    with output.open("w") as file:
        process = subprocess.Popen(
            command.split(), cwd=home, env=env, stdout=file, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            time.sleep(0.2)
            if reward_rose is None and has_risen(home):
                reward_rose = time.monotonic()
    lines = [line for line in output.read_text().splitlines() if not line.startswith(PIP_NOISE)]
    return lines, process.returncode, reward_rose


def has_risen(home: Path) -> bool:
    """Whether the reward of a run's latest update is 0.1 above that of its first."""
    for file in home.glob("runs/*/metrics.jsonl"):
        rewards = [r["reward/mean"] for r in read_records(file) if "reward/mean" in r]
        if rewards and rewards[-1] > rewards[0] + 0.1:
            return True
    return False


def fill_in(home: Path, env: dict[str, str]) -> None:
    """Replaces each function of scratch.py by the solution that `--solution N` prints."""
    file = home / "scratch.py"
    for number in range(1, 11):
        command = ["python", "scratch.py", "--solution", str(number)]
        solution = subprocess.check_output(command, cwd=home, env=env, text=True)
        name = next(n.name for n in ast.parse(solution).body if isinstance(n, ast.FunctionDef))
        lines = file.read_text().splitlines()
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                lines[node.lineno - 1 : node.end_lineno] = solution.rstrip().splitlines()
        file.write_text("\n".join(lines) + "\n")


def shorten(lines: list[str]) -> list[str]:
    """Returns the first 6 and the last lines, at most MAX_LINES in all."""
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[:6], f".. {len(lines) - MAX_LINES} lines ..", *lines[6 - MAX_LINES :]]


if __name__ == "__main__":
    main()
