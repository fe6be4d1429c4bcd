"""What the reproduce.py of the folders here share: train once, keep the metrics and the time.

With --missing on its command line, a run that is recorded already is not run again.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def record(
    here: Path, name: str, flags: str, keep: dict[str, Path] | None = None, script: str = "train.py"
) -> None:
    """`python train.py FLAGS`: its metrics to here/name.jsonl, its seconds to here/seconds.json.

    `keep` says what else of the run's folder to copy where; `script` is run instead of train.py.
    """
    if "--missing" in sys.argv and (here / f"{name}.jsonl").exists():
        return
    folder = ROOT / "runs" / f"{here.name}-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        sys.executable,
        *script.split(),
        *flags.split(),
        "--no-cache",
        "--run-name",
        folder.name,
    ]
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True)
    seconds = round(time.monotonic() - started)
    shutil.copy(folder / "metrics.jsonl", here / f"{name}.jsonl")
    for inside, target in (keep or {}).items():
        copy = shutil.copytree if (folder / inside).is_dir() else shutil.copy
        copy(folder / inside, target)
    note(here, name, seconds)
    shutil.rmtree(folder)


def warm_policy(here: Path, seed: int) -> Path:
    """The policy that the default warm start of a seed makes; made once, for runs to begin with."""
    policy = ROOT / "build" / "warm" / f"seed{seed}"
    if not policy.exists():
        record(here, f"warm-seed{seed}", f"--num-updates 0 --seed {seed}", {"model": policy})
    return policy


def note(here: Path, name: str, seconds: int) -> None:
    """Add a run's time to here/seconds.json, which other processes may be writing too."""
    part = here / f".part-{name}"
    part.write_text(json.dumps(read_seconds(here) | {name: seconds}, indent=1) + "\n")
    os.replace(part, here / "seconds.json")


def read_seconds(here: Path) -> dict[str, int]:
    file = here / "seconds.json"
    return json.loads(file.read_text()) if file.exists() else {}


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, no GPU, {time.strftime('%Y-%m-%d')}"


def write_table(here: Path, lines: list[str]) -> None:
    """Put the lines between the marks of here/README.md."""
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    text = (here / "README.md").read_text()
    head, tail = text.split(begin)[0], text.split(end)[1]
    (here / "README.md").write_text(head + begin + "\n".join(lines) + "\n" + end + tail)
