"""Data parallel: an update on 2 ranks and on 1, a CPU core each.

    python runs/benchmarks/scaling.py      # 4 minutes

`torchrun --nproc-per-node N train.py`, each rank on one CPU core, the same global batch. The time
of an update is time/rollout_s + time/train_s of metrics.jsonl, without the first update.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from pairs import Side, alternate, in_child, publish, ratios, spread

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
VS_TRL = str(Path(__file__).with_name("vs_trl.py"))
PINNED = 'exec taskset -c "$LOCAL_RANK" "$@"'  # one core per rank


@dataclass
class Args:
    """What to measure."""

    rounds: int = 5  # pairs of launches
    updates: int = 5  # per launch; the first is left out
    ranks: int = 2  # compared with 1
    num_prompts: int = 8  # in the global batch
    group_size: int = 8
    max_tokens: int = 64  # per completion
    shape: str = "4M"  # see workload.py
    write: bool = True  # save the results as JSON and write the table into README.md


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_child(VS_TRL, "make", folder=f"{folder}/model", size=args.shape, dtype="float32")
        work = {k: getattr(args, k) for k in ("shape", "max_tokens", "num_prompts", "group_size")}
        publish("scaling_ranks", [work | ranks(args, folder)], ranks_table, args.write)


def ranks(args: Args, folder: str) -> dict[str, Any]:
    """Runs 1 rank and N ranks in turn. Raises ValueError if there are fewer cores than ranks."""
    if not 1 < args.ranks <= len(os.sched_getaffinity(0)):
        raise ValueError(f"--ranks {args.ranks}: use 2 or more, and at most one per core")
    flags = {
        "model-id": f"{folder}/model", "num-updates": args.updates, "num-prompts": args.num_prompts,
        "group-size": args.group_size, "max-tokens": args.max_tokens, "max-turns": 1,
        "max-tokens-per-micro-batch": 2048, "eval-num-tasks": 0, "microscope": 0, "device": "cpu",
        "save-every": 0,
        # its rewards differ within each group, so every rollout has a gradient
        "env": f"{Path(__file__).with_name('workload.py')}:Speed",
    }  # fmt: skip

    def side(number: int) -> Side:
        return lambda: launch(number, flags, Path(folder))

    sides = {f"{number} rank(s)": side(number) for number in (1, args.ranks)}
    results = alternate(sides, args.rounds, "update_s")
    tokens = {a["sampled"] for answers in results.values() for a in answers}
    if len(tokens) != 1:
        raise RuntimeError(f"the global batches differ: {tokens} tokens per update")
    return {"ranks": args.ranks, "sampled": tokens.pop(), "sides": results}


def launch(number: int, flags: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs `torchrun --nproc-per-node N train.py FLAGS` and returns the times of an update."""
    name = f"ranks-{number}"
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    given = [f"--{flag}={value}" for flag, value in (flags | {"run-name": name}).items()]
    # "rank" is $0 of the shell
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={number}", "--no-python",
        "bash", "-c", PINNED, "rank", sys.executable, str(TRAIN), *given,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{number} rank(s) ended with {done.returncode}: {done.stderr[-2000:]}")
    return read_times(folder / "runs" / name / "metrics.jsonl")


def read_times(metrics: Path) -> dict[str, Any]:
    """Returns the medians over all updates but the first, which warms up."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    updates = [record for record in records if record.get("update", 0) > 1]
    sampling = [record["time/rollout_s"] for record in updates]
    learning = [record["time/train_s"] for record in updates]
    both = [a + b for a, b in zip(sampling, learning, strict=True)]
    return {
        "update_s": statistics.median(both),
        "sampling_s": statistics.median(sampling),
        "learning_s": statistics.median(learning),
        "sampled": sum(record["tokens/sampled"] for record in updates),
    }


def ranks_table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per number of ranks, as Markdown."""
    lines = ["| ranks | sampling, s | learning, s | update, s | speed-up over 1 rank |",
             "| --- |" + " --- |" * 4]  # fmt: skip
    for case in cases:
        alone, together = case["sides"].values()
        gain = ratios([a["update_s"] for a in alone], [a["update_s"] for a in together])
        for number, answers in ((1, alone), (case["ranks"], together)):
            cells = [spread([answer[name] for answer in answers])
                     for name in ("sampling_s", "learning_s", "update_s")]  # fmt: skip
            cells.append(spread(gain) if number > 1 else "")
            lines.append(f"| {number} | {' | '.join(cells)} |")
        lines += ["", f"{case['shape']}, {case['num_prompts']} prompts, {case['group_size']} "
                  f"completions of at most {case['max_tokens']} tokens each, for all ranks "
                  f"together; one core per rank."]  # fmt: skip
    return lines


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
