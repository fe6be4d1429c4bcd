"""The workshop as a new user would try it: a clean clone and environment, commands as written.

    python runs/workshop_dry_run/dry_run.py     # about a quarter of an hour; writes README.md here

Each command is one that the README or runs/README.md gives. Two things are done for the user: the
exercises are filled in with what `--solution N` prints, and report.html is not looked at.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE.parent))

from record import machine, write_table  # noqa: E402

LINES = 14  # of a command's output that are shown
COMMANDS = (
    "pip install -e .",
    "python train.py",
    "python scratch.py",
    "python scratch.py --hint 3",
    "FILL IN",
    "python scratch.py",
    "python train.py --run-name reference",
    "python train.py --algo scratch --run-name mine",
    "python -m core.report.compare runs/reference runs/mine",
    "python runs/what_goes_wrong/broken.py wrong_clip --num-epochs 4 --lr 3e-4 --num-updates 10",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home, venv = Path(folder, "picorl"), Path(folder, "venv")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(home)], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        env = os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "COLUMNS": "100"}
        env["PICORL_CACHE"] = str(Path(folder, "cache"))  # as on a machine that has none yet
        begun, out, rising = time.monotonic(), [], None
        for command in COMMANDS:
            if command == "FILL IN":
                fill_in(home, env)
                out += ["", "*(Each exercise is now filled in with what `--solution N` prints.)*"]
                continue
            started = time.monotonic()
            lines, code, first = run(command, home, env)
            seconds = time.monotonic() - started
            if command == "python train.py" and first is not None:
                rising = first - begun
            out += ["", f"**`{command}`** {seconds:.0f} s, exit code {code}", "", "```"]
            out += [*shorten(lines), "```"]
            print(f"{command}: {seconds:.0f} s, exit code {code}", flush=True)
        assert rising is not None, "the reward did not rise"
        head = [
            f"From the clone to a reward that has risen: **{rising / 60:.1f} minutes**, of them "
            f"the packages' installation the first {out[1].split('** ')[1].split(',')[0]}.",
            "",
            f"Machine: {machine()}. The download of packages depends on the line; here they "
            "came from a cache nearby.",
        ]
        text = [line.replace(str(home), "~/picorl").replace(folder, "~") for line in [*head, *out]]
        write_table(HERE, text)


def run(command: str, home: Path, env: dict[str, str]) -> tuple[list[str], int, float | None]:
    """The lines, the exit code, and when the reward first was a tenth above that of update 1."""
    process = subprocess.Popen(command.split(), cwd=home, env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    lines, first, begin = [], None, None
    for line in process.stdout or ():
        if not re.match(r"Looking in |  Stored in ", line):  # where pip finds and keeps packages
            lines.append(line.rstrip())
        found = re.match(r"update +\d+ +reward (-?[\d.]+)", line)
        if found:
            reward = float(found[1])
            begin = reward if begin is None else begin
            if first is None and reward > begin + 0.1:
                first = time.monotonic()
    return lines, process.wait(), first


def fill_in(home: Path, env: dict[str, str]) -> None:
    """Put the printed solutions where the stubs stand."""
    file = home / "scratch.py"
    for number in range(1, 11):
        command = ["python", "scratch.py", "--solution", str(number)]
        answer = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True,
                                check=True).stdout  # fmt: skip
        name = re.match(r"def (\w+)", answer)[1]  # type: ignore[index]
        text = file.read_text()
        begin = text.index(f"def {name}(")
        end = re.compile(r"^(# ---|if __name__)", re.MULTILINE).search(text, begin).start()  # type: ignore[union-attr]
        file.write_text(f"{text[:begin]}{answer.rstrip()}\n\n\n{text[end:]}")


def shorten(lines: list[str]) -> list[str]:
    if len(lines) <= LINES:
        return lines
    return [*lines[:6], f".. {len(lines) - LINES} lines ..", *lines[6 - LINES :]]


if __name__ == "__main__":
    main()
