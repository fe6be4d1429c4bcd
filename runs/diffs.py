"""Writes the diffs of algorithms/README.md, from one algorithm to the next: runs/diffs.py"""

import ast
import difflib
import re
from pathlib import Path

ALGORITHMS = Path(__file__).resolve().parents[1] / "algorithms"
PAGE = ALGORITHMS / "README.md"
PAIRS = [("reinforce.py", "grpo.py", "compute_advantages")]  # file, file, function
PAIRS += [("reinforce.py", "grpo.py", "compute_loss")]
PAIRS += [("grpo.py", f"variants/{name}.py", "compute_loss") for name in ("gspo", "cispo", "dppo")]
PAIRS += [("grpo.py", "ppo.py", "compute_loss")]


def formula(file: str, name: str) -> list[str]:
    """The lines of a function up to its loss, without docstring and comments."""
    tree = ast.parse((ALGORITHMS / file).read_text(encoding="utf-8"))
    (function,) = (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name)
    lines = "\n".join(ast.unparse(statement) for statement in function.body[1:]).splitlines()
    losses = [i for i, line in enumerate(lines) if line.startswith("loss = ")]
    return lines[: losses[0] + 1] if losses else lines


def diffs() -> str:
    """A block of the page for each pair."""
    blocks = []
    for old, new, name in PAIRS:
        changes = difflib.unified_diff(formula(old, name), formula(new, name), n=99, lineterm="")
        text = "\n".join([*changes][3:])  # after the names of the files and the place
        blocks.append(f"`{name}`, {old} → [{new}]({new}):\n\n```diff\n{text}\n```\n")
    return "\n".join(blocks)


def with_diffs(page: str) -> str:
    """The page with the present diffs between its two marks."""
    start, end = "<!-- runs/diffs.py -->\n", "<!-- end -->"
    return re.sub(f"{start}.*{end}", lambda _: f"{start}{diffs()}{end}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_diffs(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
