"""Two reward functions with TRL's signature, for rows with a prompt and an integer answer.

python runs/own_environments/rewards.py FILE    # writes 1,200 such rows: one letter is counted
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ANSWER = re.compile(r"<answer>(\d+)</answer>$")


def accuracy(prompts: list, completions: list[str], answer: list[int], **other: Any) -> list[float]:
    """1 for a completion that ends with the right answer, else 0."""
    matches = [ANSWER.search(text) for text in completions]
    completed = [int(match[1]) if match else None for match in matches]
    return [float(number == right) for number, right in zip(completed, answer, strict=True)]


def brief(prompts: list, completions: list[str], **other: Any) -> list[float]:
    """1 for an empty completion, less for each character, 0 from 60 on."""
    return [max(0.0, 1 - len(text) / 60) for text in completions]


def main(file: Path) -> None:
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from environments.letter_counting import LetterCounting

    env, rows, seed = LetterCounting(), dict[str, str](), 0
    while len(rows) < 1200:
        (message,), seed = env.reset(seed), seed + 1
        if len(env.counts) == 1:
            (answer,) = env.counts.values()
            row = {"prompt": message["content"], "answer": answer}
            rows[row["prompt"]] = json.dumps(row) + "\n"
    file.write_text("".join(rows.values()), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
