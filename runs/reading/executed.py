"""How much of the second update of the default run is in the files of the sittings.

python runs/reading/executed.py
"""

import os
import re
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

import train  # noqa: E402
from core.loop.run import Run  # noqa: E402

ROW = re.compile(r"^\| (?:\*\*(an? \w+)[^|]*)?\| (\[.*?) \| \d+ \|", re.MULTILINE)


def sittings() -> dict[str, list[str]]:
    """The Python files of each sitting, from README.md."""
    found, sitting = defaultdict[str, list[str]](list), ""
    for name, files in ROW.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        sitting = name or sitting  # else that of the row above
        found[sitting] += re.findall(r"\]\(([^)]*\.py)\)", files)
    return found


def main() -> None:
    lines, functions = defaultdict[str, set[int]](set), defaultdict[str, set[str]](set)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if ROOT not in path.parents:
            return None
        file = path.relative_to(ROOT).as_posix()
        functions[file].add(frame.f_code.co_qualname)
        if event == "line":
            lines[file].add(frame.f_lineno)
        return trace

    updates = Run.updates

    def traced(run: Run) -> Any:
        for update, stats in updates(run):
            if update == 2:
                threading.settrace(trace)
                sys.settrace(trace)
                sys._getframe(1).f_trace = trace  # main, which waits for this update
            yield update, stats
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    Run.updates = traced  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        train.execute("--num-updates 3 --eval-every 50 --device cpu".split())
        os.chdir(ROOT)
    rest = set(lines)
    print(f"{sum(map(len, lines.values()))} lines of {len(rest)} files")
    for name, files in [*sittings().items(), ("elsewhere", [])]:
        files = files or sorted(rest)
        rest -= set(files)
        counts = [sum(len(found[f]) for f in files if f in found) for found in (lines, functions)]
        print(f"{name:12} {counts[0]:5} lines, {counts[1]:4} functions")


if __name__ == "__main__":
    main()
