"""Which sources decide the numbers of a recorded run, and which of them changed since it was made.

    python runs/sources.py                    # the changed files of each recorded folder
    python runs/sources.py holds "REASON"     # write into the READMEs why their records still hold

`record.py` writes a hash of each such file into sources.json beside a record. Comments, docstrings
and empty lines do not count. After a change, tests/test_sources.py fails until the runs are made
again or the README names the file, its new hash and a reason.
"""

import ast
import hashlib
import io
import json
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DECISIVE = (
    "train.py", "algorithms/*.py", "core/tiny_weights/*.json",
    "core/tiny_weights/*.safetensors", "environments/base.py",
    "environments/parsing.py",
    *(f"core/{module}.py" for module in (
        "batching", "chat_template", "evaluation", "kv_cache", "model", "optimizer",
        "prefix_sharing", "rollouts", "sampler", "seeds", "selection", "tasks", "tiny",
    )),
)  # fmt: skip
SOURCES = "sources.json"
HEADING = "## Changes since the recording\n"


def hashes(environments: Iterable[str] = ()) -> dict[str, str]:
    """Returns path -> hash of the files that decide a run's numbers, with those of its tasks.

    `environments` are names as in `--env`, with or without options.
    """
    files = {file for pattern in DECISIVE for file in ROOT.glob(pattern)}
    if any("opponent=older" in name for name in environments):
        files.add(ROOT / "core/opponents.py")
    for name in environments:
        files |= modules_of(name.partition(":")[0])
    return {str(file.relative_to(ROOT)): hash_of(file) for file in sorted(files)}


def hash_of(file: Path) -> str:
    """Returns eight hex digits of SHA-256: of the code of a Python file, of all other bytes."""
    content = file.read_bytes()
    if file.suffix == ".py":
        content = code_of(content.decode()).encode()
    return hashlib.sha256(content).hexdigest()[:8]


def code_of(source: str) -> str:
    """Returns `source` without comments, docstrings and empty lines.

    >>> code_of('"Doc."\\nx = 1  # why\\n\\ny = "#"\\n')
    'x = 1\\ny = "#"'
    """
    lines: list[str] = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                for row in range(first.lineno - 1, first.end_lineno or first.lineno):
                    lines[row] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def modules_of(environment: str) -> set[Path]:
    """Returns the files of a built-in environment: its own and those of ours that it imports.

    Those of a copy of the template (my_envs.py) are the template's.
    """
    from environments.registry import ENVIRONMENTS

    if environment == "my_envs.py":
        return {ROOT / "environments/template.py"}
    waiting, found = [str(ENVIRONMENTS[environment]).partition(":")[0]], set[Path]()
    while waiting:
        file = ROOT / f"{waiting.pop().replace('.', '/')}.py"
        if file.is_file() and file not in found:
            found.add(file)
            imports = [
                n for n in ast.walk(ast.parse(file.read_text())) if type(n) is ast.ImportFrom
            ]
            waiting += [m for n in imports if (m := n.module or "").startswith("environments.")]
    return found


def environments_of(folder: Path) -> set[str]:
    """Returns the environments that the recorded runs of a folder were evaluated on."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    keys = {key for line in lines for key in json.loads(line)}
    return {key.split("/")[1] for key in keys if key.startswith("eval/")}


def write(folder: Path) -> None:
    """Writes folder/sources.json: with which sources the runs of the folder were made."""
    found = hashes(environments_of(folder))
    (folder / SOURCES).write_text(json.dumps(found, indent=1) + "\n")


def changed(folder: Path) -> dict[str, str]:
    """Returns path -> new hash of the sources that differ from the record's; "gone" for no file.

    A file whose new hash stands in the folder's README, where the reason belongs, is left out.
    """
    recorded = json.loads((folder / SOURCES).read_text())
    now = hashes(environments_of(folder))
    page = (folder / "README.md").read_text()
    files = [file for file in recorded | now if recorded.get(file) != now.get(file)]
    new = {file: now.get(file, "gone") for file in files}
    return {file: new[file] for file in files if f"`{file}` {new[file]}" not in page}


def folders() -> list[Path]:
    """Returns the folders that have a record with sources."""
    return sorted(file.parent for file in (ROOT / "runs").rglob(SOURCES))


def holds(folder: Path, reason: str) -> None:
    """Writes into folder/README.md what changed since its record was made, and why it holds.

    An earlier such section, always the last one of the page, is replaced.
    """
    page = folder / "README.md"
    text = page.read_text().partition(f"\n{HEADING}")[0]
    page.write_text(text)
    if names := ", ".join(f"`{file}` {new}" for file, new in changed(folder).items()):
        page.write_text(f"{text}\n{HEADING}\n{names}: {reason}\n")


def main(args: list[str]) -> int:
    if args and (args[0] != "holds" or len(args) != 2 or len(args[1].split()) < 4):
        print(__doc__)
        return 2
    for folder in folders():
        if args:
            holds(folder, args[1])
        for file, new in changed(folder).items():
            print(f"{folder.relative_to(ROOT)}: {file} {new}")
    return 0


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    sys.exit(main(sys.argv[1:]))
