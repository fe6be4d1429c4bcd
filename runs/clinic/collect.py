"""Makes the runs of data/: every fault and many healthy runs, and keeps their metrics.

    python runs/clinic/collect.py faults            # data/faults.jsonl
    python runs/clinic/collect.py twins             # healthy runs with the flags of the faults
    python runs/clinic/collect.py healthy           # healthy runs with odd settings
    python runs/clinic/collect.py held_out          # faults that nobody knew who wrote the checks
    python runs/clinic/collect.py smollm2           # a few of both on a pretrained model

A line of a file is a run: its name, the fault ("": none), the seed, the flags of train.py, and the
metrics by name, each a list with a value for every record of metrics.jsonl, null where it has none,
in five digits. Without times and warnings: `score.py` asks detectors what they would warn of.
Runs that a file has already are not made again.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import faults

import train

HERE = Path(__file__).resolve().parent
ALL = {**faults.FAULTS, **faults.MORE, **faults.HELD_OUT}
KNOWN = {**faults.FAULTS, **faults.MORE}
SEEDS, WORKERS = range(3), 2
BASE = "--num-prompts 8 --device cpu --save-every 0 --run-name r"
LATE = ("kl_sign", "steps_vanish", "reward_for_length", "masters_made_again")  # visible later
ODD = """
--lora-rank 8 --lr 2e-4 | --lora-rank 1 --lr 1e-3 | --dtype bfloat16 --lr 1e-5
--dtype bfloat16 --lora-rank 8 --lr 2e-4 | --dtype float16 --lr 2e-5 | --algo ppo
--algo ppo --ppo.value-warmup 3 | --algo reinforce | --algo gspo | --algo cispo | --algo dppo
--algo sdpo
--grpo.loss-type dr_grpo | --grpo.loss-type lite_ppo
--grpo.loss-type max_rl | --grpo.loss-type grpo | --num-minibatches 4 | --num-epochs 3
--num-epochs 2 --num-minibatches 4 --algo ppo | --temperature 0.5 | --temperature 1.5 | --top-p 0.9
--top-k 5 | --kl-coef 0.5 | --kl-coef 5
--kl-coef 0.1 --kl-in reward --grpo.scale-rewards none | --kl-coef 0.5 --lora-rank 8 --sft-steps 20
--kl-coef 0.5 --sft-steps 20 | --entropy-coef 0.02 | --lr 1e-6 | --lr 1e-4 --warmup-updates 5
--lr-schedule linear | --lr-schedule cosine --warmup-updates 2 | --group-size 2
--group-size 32 --num-prompts 2 | --num-prompts 1 | --filter-groups 2 | --curriculum 0.8
--staleness 1 | --overlap | --mask-truncated-completions --max-tokens 24
--max-tokens-per-micro-batch 256 | --env iterated_game:opponent=self | --env tic_tac_toe
--env connect4 --max-turns 10 | --env reverse | --env math_qa:level=1 | --env calculator
--env letter_counting --env reverse
--env reward_hacking --max-turns 10 | --system-prompt Count.
--model-id tiny-random --sft-steps 60 | --tis-mode mask --tis-cap 1.5
--gamma 0.9 --env snake --max-turns 20 | --credit turn --env tic_tac_toe | --microscope 0
"""
ON_SMOLLM2 = ["", "stale_weights", "prompts_cut", "no_baseline", "one_seed", "rate_ends_early"]


def jobs_of(kind: str) -> list[dict[str, Any]]:
    """The runs of a file."""
    if kind == "faults":
        each = [
            (name, 30 if name in LATE else 12, 64, fault.flags) for name, fault in KNOWN.items()
        ]
        return [job(name, name, seed, updates, tasks, flags)
                for name, updates, tasks, flags in each for seed in SEEDS]  # fmt: skip
    if kind == "healthy":
        odd = [
            "",
            *(flags.strip() for line in ODD.strip().split("\n") for flags in line.split("|")),
        ]
        return [job(flags or "default", "", seed, 8, 32, flags) for flags in odd for seed in SEEDS]
    if kind == "held_out":
        return [job(name, name, 0, 12, 64, fault.flags) for name, fault in faults.HELD_OUT.items()]
    if kind == "twins":  # the healthy runs beside the faults
        each = dict.fromkeys(fault.flags for fault in KNOWN.values())
        return [job(flags or "default", "", 0, 30, 64, flags) for flags in each]
    flags = ("--model-id smollm2 --env math_qa:level=1,style=plain --temperature 0.7 --lr 1e-5 "
             "--max-tokens 12 --max-turns 1")  # fmt: skip
    return [job(f"{name or 'healthy'} on smollm2", name, 0, 6, 64, flags) for name in ON_SMOLLM2]


def job(
    name: str, fault: str, seed: int, updates: int, tasks: int, flags: str
) -> dict[str, Any]:  # fmt: skip
    often = f"--num-updates {updates} --eval-num-tasks {tasks} --eval-every 6"
    return {"name": name, "fault": fault, "seed": seed,
            "flags": f"{BASE} {often} {flags} --seed {seed}"}  # fmt: skip


def make(made: dict[str, Any]) -> dict[str, Any]:
    """Makes one run, in a process of its own, and adds its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the process makes this run only
        with open("log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            if made["fault"]:
                ALL[made["fault"]].install(setattr)
            code = train.execute(made["flags"].split())
        file = Path("runs/r/metrics.jsonl")
        lines = [] if code else file.read_text(encoding="utf-8").splitlines()
        os.chdir(HERE)
    records = [json.loads(line) for line in lines]
    names = dict.fromkeys(name for record in records for name in record)
    kept = [name for name in names if name != "warnings" and not name.startswith("time/")]
    return made | {"metrics": {n: [short(record.get(n)) for record in records] for n in kept}}


def short(value: Any) -> Any:
    """
    >>> short(0.123456), short(64), short(None), short(True)
    (0.12346, 64, None, True)
    """
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main(kinds: list[str]) -> None:
    for kind in kinds:
        file = HERE / f"data/{kind}.jsonl"
        file.parent.mkdir(exist_ok=True)
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        done = {(run["name"], run["seed"]) for run in map(json.loads, lines)}
        todo = [made for made in jobs_of(kind) if (made["name"], made["seed"]) not in done]
        with (
            multiprocessing.Pool(WORKERS, maxtasksperchild=1) as pool,
            file.open("a", encoding="utf-8", newline="\n") as out,
        ):
            for number, run in enumerate(pool.imap(make, todo, chunksize=1), 1):
                what = f"{number}/{len(todo)} {run['name']}, seed {run['seed']}"
                if run["metrics"]:
                    print(what, flush=True)
                    out.write(json.dumps(run, separators=(",", ":")) + "\n")
                    out.flush()
                else:
                    print(f"{what}: FAILED", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
