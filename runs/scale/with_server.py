"""train.py with one of vLLM's servers, which samples on the second GPU of this machine.

    python runs/scale/with_server.py --model-id Qwen/Qwen3-4B-Instruct-2507 --lora-rank 32 --overlap
    python runs/scale/with_server.py --device cpu --lora-rank 8 --lr 1e-3  # vLLM's build for CPUs

All flags are those of train.py. The server gets those that runs/scale/README.md explains, and ends
with the run. What it writes is in runs/server.log.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import Any

import httpx
from transformers import AutoConfig

sys.path.append(str(Path(__file__).resolve().parents[2]))

import train
from core.config import ADAPTERS_ONLY, RUNS, Config, is_installed, resolve
from core.faults import UsageError
from core.files.models import folder_of_model
from core.loading import pick_device
from core.terminal import cli
from environments.plumbing import processes

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, that vLLM takes
# vLLM's build for CPUs ends if it cuts the prompt of a request with a seed into chunks
ON_CPU = """--enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 4096
    --gpu-memory-utilization 0.2"""  # of this machine's memory


def main(args: list[str]) -> int:
    """Trains with a server of its own. Returns the exit code of train.py."""

    def with_server(_: Any) -> int:
        cfg = resolve(cli.parse(args))
        if not cfg.lora_rank:
            raise UsageError(ADAPTERS_ONLY)
        if not is_installed("vllm"):
            raise UsageError('vllm is not installed; pip install -e ".[vllm]"')
        flags = ["--sampler", "server"]
        if not cfg.adapter_folder:
            flags += ["--adapter-folder", str(RUNS.absolute() / "adapters")]
        RUNS.mkdir(exist_ok=True)
        print("starting vLLM's server ..", file=sys.stderr)
        with started(server_command(cfg), RUNS / "server.log", second_gpu()) as url:
            return train.execute([*args, *flags, "--base-url", url])

    return cli.execute(with_server, args, lambda _: None, "with_server.py")


def server_command(cfg: Config) -> list[str]:
    """vLLM's server for runs with these settings, complete but for its address."""
    model = folder_of_model(cfg.model_id)
    window = AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
    is_cuda = pick_device(cfg.device).type == "cuda"
    rank = next((rank for rank in RANKS if rank >= cfg.lora_rank), cfg.lora_rank)
    usual = "bfloat16" if is_cuda else "float32"
    flags = f"""--enable-scale-out --logprobs-mode processed_logprobs --generation-config vllm
        --max-model-len {min(window, cfg.max_model_len or window)}
        --dtype {usual if cfg.dtype == "auto" else cfg.dtype}
        --enable-lora --max-lora-rank {rank}
        {"" if is_cuda else ON_CPU} {"--trust-remote-code" if cfg.trust else ""}""".split()
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]


def second_gpu() -> dict[str, str]:
    """The variable that gives a program the second one of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[1]} if len(visible) > 1 else {}


def free_port() -> int:
    """A port of this machine that no program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def started(command: list[str], log: Path, variables: dict[str, str]) -> Iterator[str]:
    """The address of a server that ends with this context, once it answers.

    Raises UsageError, with the end of its `log`, if it ends before.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the server would stay
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with open(log, "wb") as file:
        process = processes.start(
            command, env=os.environ | own | variables, stdout=file, stderr=subprocess.STDOUT
        )
    url, answers = f"http://127.0.0.1:{port}", False
    try:
        while not answers:
            if processes.has_ended(process):
                with open(log, "rb") as file:
                    lines = processes.last_lines(file)
                reason = next((line for line in lines if "Error: " in line), lines[-1])
                raise UsageError(f"vLLM's server has ended, see {log}: {reason}")
            sleep(0.5)
            with suppress(httpx.HTTPError):
                answers = httpx.get(f"{url}/health", trust_env=False).is_success
        yield url
    finally:
        processes.kill(process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
