"""train.py, but rollouts.jsonl keeps every greedy answer of an evaluation, not the first eight.

    python runs/smollm2/all_answers.py --model-id smollm2 --env math_qa:style=plain

The single-digit sums of an evaluation repeat: 128 seeds ask 57 different questions. reproduce.py
counts each question once, so it needs all answers.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

import train
from core import evaluation


def run_command(args: list[str]) -> int:
    evaluation.LOGGED_ROLLOUTS = 10**6
    return train.run_command(args)


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
