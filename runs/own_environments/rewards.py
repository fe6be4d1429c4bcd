"""Two reward functions with TRL's signature, for rows with a prompt and an integer answer."""

import re
from typing import Any

ANSWER = re.compile(r"<answer>(\d+)</answer>$")


def accuracy(prompts: list, completions: list[str], answer: list[int], **other: Any) -> list[float]:
    """1 for a completion that ends with the right answer, else 0."""
    found = [ANSWER.search(text) for text in completions]
    return [float(m is not None and int(m[1]) == a) for m, a in zip(found, answer, strict=True)]


def brief(prompts: list, completions: list[str], **other: Any) -> list[float]:
    """1 for an empty completion, less for each character, 0 from 60 on."""
    return [max(0.0, 1 - len(text) / 60) for text in completions]
