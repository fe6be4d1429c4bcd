"""What needs two GPUs, tried with one: vLLM's server beside the trainer, and torchrun with NCCL.

    python runs/scale/one_gpu.py adapters            # LoRA adapters, through a folder
    python runs/scale/one_gpu.py weights             # all weights, by NCCL
    python runs/scale/one_gpu.py ranks               # two processes under torchrun, and then one
    python runs/scale/one_gpu.py adapters --device cpu

Each prints a JSON line per run: what it recorded in each update. NCCL refuses two processes on one
GPU; NCCL_HOSTID makes them look like two machines, which talk through sockets. The times say
nothing about two GPUs.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Annotated, Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "core" / "tiny_weights"
ENGINE = """--host 127.0.0.1 --max-model-len 512 --enable-scale-out --generation-config vllm
    --logprobs-mode processed_logprobs"""
ON_GPU = "--dtype bfloat16 --gpu-memory-utilization 0.1 --kv-cache-memory-bytes 2000000000"
# vLLM's build for CPUs ends if it cuts the prompt of a request with a seed into chunks
ON_CPU = """--dtype float32 --enforce-eager --no-enable-chunked-prefill
    --max-num-batched-tokens 4096"""
SERVER = {
    "adapters": "--enable-lora --max-loras 1 --max-lora-rank 8",
    "weights": '--weight-transfer-config {"backend":"nccl"}',
}
TRAINER = {
    "adapters": "--lora-rank 8 --lr 1e-3 --num-updates 10 --adapter-folder adapters",
    "weights": "--num-updates 10",
}
SHOWN = ("reward/mean", "loss", "grad/norm", "gap/logprob_mean", "gap/logprob_max", "time/sync_s",
         "time/rollout_s", "time/train_s", "eval/letter_counting/accuracy")  # fmt: skip


@dataclass
class Args:
    """What to try."""

    what: Annotated[Literal["adapters", "weights", "ranks"], tyro.conf.Positional]
    device: str = "cuda"
    flags: str = ""  # more of train.py
    server_flags: str = ""  # more of vllm serve
    out: str = "runs/one_gpu"  # a folder for the runs and the server's log


def main(args: Args) -> None:
    os.makedirs(args.out, exist_ok=True)
    os.chdir(args.out)
    common = f"--device {args.device} --eval-every 0 {args.flags}"
    if args.what == "ranks":
        # float32, so that two ranks and one train the same but for rounding
        flags = f"--sampler torch --dtype float32 --num-updates 5 {common}"
        address = f"--master-addr 127.0.0.1 --master-port {free_port()}"
        torchrun = f"-m torch.distributed.run --nnodes 2 {address} --node-rank"
        second = f"{torchrun} 1 {ROOT}/train.py {flags} --run-name ranks"
        train(f"{torchrun} 0", flags, "ranks", beside=start(second, "second", "second.log"))
        train("", flags, "one_rank")
        return
    port = free_port()
    server = start(f"-m vllm.entrypoints.openai.api_server --model {TINY} --port {port} {ENGINE} "
                   f"{ON_CPU if args.device == 'cpu' else ON_GPU} {args.server_flags} "
                   + SERVER[args.what], "server", f"{args.what}-server.log")  # fmt: skip
    flags = f"--sampler server --base-url http://127.0.0.1:{port} --max-model-len 512 {common}"
    train("", f"{flags} {TRAINER[args.what]}", args.what, beside=server)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def start(command: str, machine: str, log: str) -> subprocess.Popen[bytes]:
    """Python with `command`, as if it ran on `machine`."""
    own = {"NCCL_HOSTID": machine, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
           "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}  # fmt: skip
    with open(log, "w") as file:
        return subprocess.Popen(
            [sys.executable, *command.split()], env=os.environ | own, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def train(
    launcher: str, flags: str, name: str, beside: subprocess.Popen[bytes] | None = None
) -> None:
    """One run of train.py, whose records it prints; it ends with the process `beside` it."""
    run = start(f"{launcher} {ROOT}/train.py {flags} --run-name {name}", "first", f"{name}.log")
    while run.poll() is None and not (beside and beside.poll()):
        sleep(0.1)
    for process in (run, beside) if beside else ():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = run.wait()
    metrics = Path("runs", name, "metrics.jsonl")
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    shown = [{key: r[key] for key in ("update", *SHOWN) if key in r} for r in records]
    print("answer: " + json.dumps({"run": name, "code": code, "records": shown}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
