"""Data parallel: an update on 2 ranks and on 1, a CPU core each.

    python runs/benchmarks/scaling.py      # 4 minutes

`torchrun --nproc-per-node N train.py`, each rank on one CPU core, the same global batch. The time
of an update is time/rollout_s + time/train_s of metrics.jsonl, without the first update.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from pairs import ROOT, Rounds, alternate, of, publish, ratios, spread
from record import markdown, read_records
from workload import SHAPES, save_model
from workload import WORK as SAMPLED

TRAIN = ROOT / "train.py"
PINNED = 'exec taskset -c "$LOCAL_RANK" "$@"'  # one core per rank

WORK = SAMPLED | {"shape": "4M"}  # of the global batch
# the rewards of this environment differ within each group, so every rollout has a gradient
FLAGS = f"""--num-updates 5 --max-turns 1 --max-tokens-per-micro-batch 2048 --eval-num-tasks 0
    --microscope 0 --device cpu --save-every 0 --model-id ./model
    --env {Path(__file__).with_name("workload.py")}:Speed""".split()


def main(args: Rounds) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(f"{folder}/model", SHAPES["4M"])
        sides = {f"{number} rank(s)": partial(launch, number, Path(folder)) for number in (1, 2)}
        results = alternate(sides, args.rounds, "update_s")
    tokens = {a["sampled"] for answers in results.values() for a in answers}
    if len(tokens) != 1:
        raise RuntimeError(f"the global batches differ: {tokens} tokens per update")
    case = WORK | {"ranks": 2, "sampled": tokens.pop(), "sides": results}
    publish("scaling_ranks", [case], ranks_table, args.write)


def launch(number: int, folder: Path) -> dict[str, Any]:
    """Runs `torchrun --nproc-per-node N train.py FLAGS` and returns the times of an update."""
    name = f"ranks-{number}"
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    given = [*FLAGS, "--run-name", name]
    for flag, number_of in SAMPLED.items():
        given += [f"--{flag.replace('_', '-')}", f"{number_of}"]
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
    updates = [record for record in read_records(metrics) if record.get("update", 0) > 1]
    sampling, learning = of(updates, "time/rollout_s"), of(updates, "time/train_s")
    both = [a + b for a, b in zip(sampling, learning, strict=True)]
    return {
        "update_s": statistics.median(both),
        "sampling_s": statistics.median(sampling),
        "learning_s": statistics.median(learning),
        "sampled": sum(of(updates, "tokens/sampled")),
    }


def ranks_table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per number of ranks, as Markdown."""
    [case], rows = cases, []
    alone, together = case["sides"].values()
    gain = ratios(of(alone, "update_s"), of(together, "update_s"))
    for number, answers in (("1", alone), ("2", together)):
        times = [spread(of(answers, k)) for k in ("sampling_s", "learning_s", "update_s")]
        rows.append([number, *times, spread(gain) if answers is together else ""])
    head = "ranks | sampling, s | learning, s | update, s | speed-up over 1 rank"
    return [*markdown(head, rows), "", f"{case['shape']}, {case['num_prompts']} prompts, "
            f"{case['group_size']} completions of at most {case['max_tokens']} tokens each, for "
            f"all ranks together; one core per rank."]  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Rounds, description=__doc__))
