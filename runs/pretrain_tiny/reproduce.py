"""Pretrain `tiny`: supervised steps on demonstrations of the environments, from random weights.

    python runs/pretrain_tiny/reproduce.py      # writes core/tiny_weights: 40 minutes

It is the warm start of train.py with several environments at once. Three demonstrations in five
are hasty guesses in the right format; the others work the answer out. So tiny guesses by default,
can do better, and RL has something to find. Demonstrations never show a held-out task, except in
the environments that have a few openings only (environments/README.md).
"""

import hashlib
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from tokenizer import make_tokenizer  # noqa: E402

from core.tiny import PRETRAINED  # noqa: E402

DEMONSTRATIONS = {  # in each step
    "letter_counting": 12,
    "reverse": 6,
    "math_qa:level=1": 10,
    "tic_tac_toe": 4,
    "gymnasium:id=Blackjack-v1": 4,
    "gymnasium:id=CartPole-v1,repeat=3,max_steps=90,memory=false": 2,
    "wikipedia_maze:n_hops=2,brief=true": 5,
    "iterated_game": 2,
    "reward_hacking": 2,
    "reward_hacking:world=fragile": 1,
    "reward_hacking:world=renewable": 1,
    "snake": 2,
    "connect4": 1,
}
STEPS = 2400


def main() -> None:
    make_tokenizer().save_pretrained(PRETRAINED)
    specs = [spec for spec, number in DEMONSTRATIONS.items() for _ in range(number)]
    flags = f"""--model-id tiny-random --env {" ".join(specs)} --sft-steps {STEPS}
        --sft-batch-size {len(specs)} --num-updates 0 --eval-num-tasks 0 --max-tokens 112"""
    run, seconds = record.train(flags, HERE.name + "-run")
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(run / "model" / file, PRETRAINED / file)
    shutil.copy(run / "metrics.jsonl", HERE / "metrics.jsonl")
    (HERE / "seconds.json").write_text(f'{{"pretraining": {seconds}}}\n')
    record.write_recorded(HERE)
    shutil.rmtree(run)
    record.write_table(HERE, table())


def table() -> list[str]:
    """The hash of the weights, and when they were made."""
    digest = hashlib.sha256((PRETRAINED / "model.safetensors").read_bytes()).hexdigest()
    minutes = record.read_seconds(HERE)["pretraining"] / 60
    return [
        f"`core/tiny_weights/model.safetensors` has the SHA-256 `{digest}`.", "",
        f"{record.recorded_with(HERE)} It took {minutes:.0f} minutes, beside other work.",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
