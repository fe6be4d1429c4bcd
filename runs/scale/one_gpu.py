"""What needs two GPUs, tried with one: vLLM's server beside the trainer, and torchrun with NCCL.

    python runs/scale/one_gpu.py adapters            # LoRA adapters, through a folder
    python runs/scale/one_gpu.py ranks               # two processes under torchrun, and then one
    python runs/scale/one_gpu.py adapters --device cpu

Each prints a JSON line per run: what it recorded in each update. NCCL refuses two processes on one
GPU; NCCL_HOSTID makes them look like two machines, which talk through sockets. The times say
nothing about two GPUs.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

sys.path.append(str(Path(__file__).resolve().parents[2]))

from core.config import resolve
from core.terminal import cli
from environments.plumbing import processes
from runs.scale.with_server import free_port, server_command, started

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = "--gpu-memory-utilization 0.1 --kv-cache-memory-bytes 2000000000"
ADAPTERS = "--lora-rank 8 --lr 1e-3 --num-updates 10 --adapter-folder adapters"
SHOWN = ("reward/mean", "loss", "grad/norm", "gap/logprob_mean", "gap/logprob_max", "time/sync_s",
         "time/rollout_s", "time/train_s", "eval/letter_counting/accuracy")  # fmt: skip


@dataclass
class Args:
    """What to try."""

    what: Annotated[Literal["adapters", "ranks"], tyro.conf.Positional]
    device: str = "cuda"
    flags: str = ""  # more of train.py
    server_flags: str = ""  # more of vllm serve
    out: str = "runs/one_gpu"  # a folder for the runs and the server's log


def main(args: Args) -> None:
    os.makedirs(args.out, exist_ok=True)
    os.chdir(args.out)
    common = f"--device {args.device} --eval-every 0 --max-model-len 512 {args.flags}"
    if args.what == "ranks":
        # float32, so that two ranks and one train the same but for rounding
        flags = f"--sampler torch --dtype float32 --num-updates 5 {common}"
        address = f"--master-addr 127.0.0.1 --master-port {free_port()}"
        torchrun = f"-m torch.distributed.run --nnodes 2 {address} --node-rank"
        second = start(f"{torchrun} 1 {ROOT}/train.py {flags} --run-name ranks", "second")
        train(f"{torchrun} 0", flags, "ranks")
        processes.kill(second)
        train("", flags, "one_rank")
        return
    flags = f"{common} {ADAPTERS}"
    command = server_command(resolve(cli.parse(flags.split())))
    command += [*("" if args.device == "cpu" else ON_GPU).split(), *args.server_flags.split()]
    with started(command, Path("server.log"), network("server")) as url:
        train("", f"{flags} --sampler server --base-url {url}", args.what)


def network(machine: str) -> dict[str, str]:
    """The variables with which NCCL takes a process for one on `machine`."""
    return {"NCCL_HOSTID": machine, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}


def start(command: str, machine: str) -> subprocess.Popen:
    """Python with `command`, as if it ran on `machine`."""
    with open(f"{machine}.log", "w") as file:
        return processes.start(
            [sys.executable, *command.split()], env=os.environ | network(machine), stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def train(launcher: str, flags: str, name: str) -> None:
    """One run of train.py, whose records it prints."""
    run = start(f"{launcher} {ROOT}/train.py {flags} --run-name {name}", name)
    code = processes.wait(run)
    metrics = Path("runs", name, "metrics.jsonl")
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    shown = [{key: r[key] for key in ("update", *SHOWN) if key in r} for r in records]
    print("answer: " + json.dumps({"run": name, "code": code, "records": shown}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
