"""How long a user waits for `--help` and for the first update of the default run.

    python runs/benchmarks/speed/startup.py  # 8 minutes on two cores
    python runs/benchmarks/speed/startup.py --rounds 1 --no-write

Runs `python train.py` in a fresh process and an empty folder, timed from its start until
metrics.jsonl has the first update: once with an empty cache, so that the run trains the warm start
of the tiny policy, and once reusing that warm start. The floor is the time of the matrix products
of the warm start (one forward, and a backward of twice the operations) at the rate measured here.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from floor import forward
from pairs import in_child, publish, run_child, spread, verdict
from workload import SHAPES

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
GOALS = {"`--help`": 1.5, "first update, warm start made": 60.0}  # seconds, at most
COUNTED_STEPS = 20  # warm-start steps whose tokens are counted


@dataclass
class Args:
    """What to measure."""

    rounds: int = 3  # runs with an empty cache, each followed by one that reuses it
    write: bool = True  # save the results as JSON and write the table into README.md


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    waits: dict[str, list[dict[str, float]]] = {"`--help`": [seconds_of_help() for _ in range(5)]}
    for turn in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("first update, warm start made", "first update, warm start reused"):
                wait = first_update(Path(folder))
                waits.setdefault(name, []).append(wait)
                print(f"round {turn + 1} of {args.rounds}: {name}: {wait}", flush=True)
    work = in_child(__file__, "warm_start")
    rates = in_child(str(Path(__file__).with_name("floor.py")), "measure_rates",
                     shape="tiny", rows=64, many=work.pop("micro_batch_tokens"))  # fmt: skip
    publish("startup", [{"waits": waits, "rate": rates["many"], **work}], table, args.write)


def seconds_of_help() -> dict[str, float]:
    started = time.perf_counter()
    subprocess.run([sys.executable, TRAIN, "--help"], stdout=subprocess.DEVNULL, check=True)
    return {"seconds": time.perf_counter() - started}


def first_update(folder: Path) -> dict[str, float]:
    """Returns the seconds until update 1 is in metrics.jsonl, and those of the warm start.

    Raises RuntimeError if the run fails.
    """
    run = folder / "runs" / str(time.time_ns())
    command = [sys.executable, TRAIN, "--num-updates", "2", "--run-name", run.name]
    env = {**os.environ, "PICORL_CACHE": str(folder / "cache")}
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)
    while not (records := updates(run)) and process.poll() is None:
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    if process.wait() or not (records := records or updates(run)):
        raise RuntimeError(f"train.py ended with {process.returncode} before its first update")
    return {"seconds": seconds, "warm_start": sum(r.get("time/sft_s", 0.0) for r in records)}


def updates(run: Path) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl once it has the first update, otherwise none."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # complete lines
    records = [json.loads(line) for line in lines]
    return records if any(record.get("update") == 1 for record in records) else []


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per wait, and the floor, as Markdown."""
    lines = ["| wait for | s | warm start, s | goal, s |", "| --- |" + " --- |" * 3]
    (case,) = cases
    for name, waits in case["waits"].items():
        seconds = [wait["seconds"] for wait in waits]
        warm = [wait.get("warm_start", 0.0) for wait in waits]
        goal = GOALS.get(name)
        cells = [
            spread(seconds, ".1f"),
            spread(warm, ".1f") if any(warm) else "",
            verdict(statistics.median(seconds), goal) if goal else "",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    operations, rate = case["operations"], case["rate"]
    return [*lines, "", f"The matrix products of the warm start alone, {operations / 1e9:,.0f} Gop "
            f"at {rate / 1e9:,.1f} Gop/s, take {operations / rate:.1f} s."]  # fmt: skip


# --- child process -------------------------------------------------------------------------------


def warm_start() -> dict[str, Any]:
    """Returns the operations in matrices of the default warm start, and its micro-batch size."""
    import train
    from core import tasks
    from core.batching import to_rollout_batch
    from core.model import load_policy
    from core.rollouts import RolloutCollector

    cfg = train.prepare(train.Config())
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy("tiny", device="cpu", tiny_folder=Path(folder) / "tiny")
    shape, operations = SHAPES["tiny"], 0.0
    collector = RolloutCollector(policy, cfg.max_turns)
    for step in range(COUNTED_STEPS):
        drawn = tasks.demo_tasks(cfg.env, cfg.seed, step, cfg.sft_batch_size, cfg.sft_hasty)
        batch = to_rollout_batch(collector.demonstrate(drawn))
        layers = sum(forward(shape, 0, len(s.token_ids)) for s in batch.sequences)
        operations += 3 * (layers + 2 * shape.width * shape.vocab * batch.num_tokens)
    operations *= cfg.sft_steps / COUNTED_STEPS
    return {"operations": operations, "micro_batch_tokens": cfg.max_tokens_per_micro_batch}


PARTS = {"warm_start": warm_start}

if __name__ == "__main__" and not run_child(PARTS):
    main(tyro.cli(Args, description=__doc__))
