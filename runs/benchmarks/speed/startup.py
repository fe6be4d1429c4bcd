"""How long a user waits: for `--help`, and for the first update of the default run.

    python runs/benchmarks/speed/startup.py  # about 8 minutes on two cores
    python runs/benchmarks/speed/startup.py --rounds 1 --no-write

Each is `python train.py` itself, in a fresh process and an empty folder, timed from its start until
the journal has the first update. Without the cache it makes the tiny policy's warm start; with it,
it reuses the one that the run before it made. The floor is the matrix products of the warm start
(floor.py: forward once and backward twice that), at the rate measured here.
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
from pairs import in_child, play_part, publish, spread, verdict
from workload import SHAPES

TRAIN = Path(__file__).resolve().parents[3] / "train.py"
GOALS = {"`--help`": 1.5, "first update, warm start made": 60.0}  # seconds, at most
SAMPLED = 20  # warm-start steps whose tokens are counted


@dataclass
class Args:
    """What to measure."""

    rounds: int = 3  # runs without the cache, each followed by one with it; --help is run 5 times
    write: bool = True  # keep the figures as JSON and put the table in the README


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    waits: dict[str, list[dict[str, float]]] = {"`--help`": [seconds_of_help() for _ in range(5)]}
    for turn in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("first update, warm start made", "first update, warm start reused"):
                found = first_update(Path(folder))
                waits.setdefault(name, []).append(found)
                print(f"round {turn + 1} of {args.rounds}: {name}: {found}", flush=True)
    work = in_child(__file__, "warm_start")
    rates = in_child(str(Path(__file__).with_name("floor.py")), "measure_rates",
                     shape="tiny", rows=64, many=work.pop("micro_batch_tokens"))  # fmt: skip
    publish("startup", [{"waits": waits, "rate": rates["many"], **work}], table, args.write)


def seconds_of_help() -> dict[str, float]:
    started = time.perf_counter()
    subprocess.run([sys.executable, TRAIN, "--help"], stdout=subprocess.DEVNULL, check=True)
    return {"seconds": time.perf_counter() - started}


def first_update(folder: Path) -> dict[str, float]:
    """Seconds until update 1 is in the journal, and of them in the warm start. Raises RuntimeError
    if the run fails."""
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
    """The journal's records, once it has the first update."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # whole ones
    records = [json.loads(line) for line in lines]
    return records if any(record.get("update") == 1 for record in records) else []


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Markdown lines."""
    lines = ["| wait for | s | of it the warm start, s | goal, s |", "| --- |" + " --- |" * 3]
    (case,) = cases
    for name, found in case["waits"].items():
        seconds = [one["seconds"] for one in found]
        warm = [one.get("warm_start", 0.0) for one in found]
        goal = GOALS.get(name)
        said = verdict(statistics.median(seconds), goal) if goal else ""
        lines.append(f"| {name} | {spread(seconds, '.1f')} | "
                     f"{spread(warm, '.1f') if any(warm) else ''} | {said} |")  # fmt: skip
    least = case["operations"] / case["rate"]
    return [*lines, "", "The matrix products of the warm start alone, "
            f"{case['operations'] / 1e9:,.0f} Gop at {case['rate'] / 1e9:,.1f} Gop/s, take "
            f"{least:.1f} s."]  # fmt: skip


# --- the child -----------------------------------------------------------------------------------


def warm_start() -> dict[str, Any]:
    """Operations of the default warm start's matrices, and tokens of its micro-batches."""
    import train
    from core import batching, config, tasks
    from core.model import load_policy
    from core.rollouts import RolloutCollector

    cfg = config.resolve(train.Config())
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy("tiny", device="cpu", tiny_folder=Path(folder) / "tiny")
    shape, operations = SHAPES["tiny"], 0.0
    players = RolloutCollector(policy, cfg.max_turns)
    for step in range(SAMPLED):
        drawn = tasks.demo_tasks(cfg.env, cfg.seed, step, cfg.sft_batch_size, cfg.sft_hasty)
        shown = batching.to_rollout_batch(players.demonstrate(drawn))
        each = sum(forward(shape, 0, batching.length(s)) for s in shown.sequences)
        operations += 3 * (each + 2 * shape.width * shape.vocab * shown.num_tokens)
    operations *= cfg.sft_steps / SAMPLED
    return {"operations": operations, "micro_batch_tokens": cfg.max_tokens_per_micro_batch}


PARTS = {"warm_start": warm_start}

if __name__ == "__main__":
    if not play_part(PARTS):
        main(tyro.cli(Args, description=__doc__))
