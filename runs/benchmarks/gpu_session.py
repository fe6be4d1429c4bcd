"""A quarter of an hour on a GPU: correctness, then speed, from a folder of wheels.

    python runs/benchmarks/gpu_session.py --out results --wheels wheels
    python runs/benchmarks/gpu_session.py --out results --only check learning   # five minutes
    python runs/benchmarks/gpu_session.py --out results --cpu --only learning   # tries the script

The machine needs PyTorch, and no network. The wheels, such as vLLM's, TRL's and those of tyro and
rich, are unpacked into `--site` without their dependencies. Each part is a process with a limit;
while it runs, the next one imports its libraries. Its result is a line of OUT/session.jsonl as soon
as it has ended; OUT/<part>.json has what it has measured so far, and OUT/<part>.log what it
printed, so that little is lost if the machine is taken away. Compiled code is kept in `--site`, so
later parts start warm.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from runpy import run_path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = "runs/benchmarks"
TRAIN = ("train.py --device {device} --sampler {sampler} --run-name {name}"
         " --gpu-memory-utilization 0.7")  # so that parts can run side by side  # fmt: skip
WITH_TORCH = TRAIN.replace("{sampler}", "torch")
START = "--model-id {model}-0.6B --num-updates 1 --num-prompts 8 --max-tokens 64 --eval-num-tasks 0"
COMPOSE = "--env compose:depth={depth},mixed=true --max-tokens 32 --max-turns 1"
NANOLLM = f"{BENCHMARKS}/nanollm.py --no-write --out {{out}} --folder {{model}}"
MODEL = f"{BENCHMARKS}/workload.py {{model}}-"


@dataclass
class Part:
    """One process: Python with `command`, in ROOT."""

    seconds: int  # at most
    command: str
    target: float = 0.0  # of train.py: the held-out accuracy whose time is noted
    ahead: bool = False  # imports its libraries while the part before it runs


def step(size: str, lora_rank: int, part: str, **options: Any) -> Part:
    """Four steps of one side of vs_trl.py; the first one is not measured."""
    settings = {"part": part, "folder": "{model}-" + size, "gpu": True, "lora_rank": lora_rank,
                "num_prompts": 8, "group_size": 8, "prompt_tokens": 200, "max_tokens": 512,
                "steps": 3} | options  # fmt: skip
    text = json.dumps(settings, separators=(",", ":"))
    return Part(120, f"{BENCHMARKS}/vs_trl.py --child {text}", ahead=True)


PARTS = {  # correctness, then speed
    "check": Part(250, f"{BENCHMARKS}/gpu_check.py --minutes 4 --out {{out}}"),
    "learning": Part(90, TRAIN, target=0.9),
    "learning_torch": Part(90, WITH_TORCH, target=0.9),
    "model_0.6B": Part(60, f"{MODEL}0.6B 0.6B bfloat16"),
    "model_4B": Part(120, f"{MODEL}4B 4B bfloat16"),
    "start": Part(120, f"{TRAIN} {START}"),
    "tokens": Part(200, f"{NANOLLM}-0.6B --sizes 0.6B --samplers nanollm vllm --parts"),
    "start_again": Part(60, f"{TRAIN} {START}"),
    "smollm2": Part(180, f"{TRAIN} --config runs/smollm2/sums.yaml", target=0.7),
    "step_0.6B": step("0.6B", 0, "picorl", tokens=8192),
    "step_0.6B_trl": step("0.6B", 0, "trl", rows=8),
    "step_0.6B_trl_sleep": step("0.6B", 0, "trl", rows=8, sleep=True),
    "step_4B_LoRA": step("4B", 32, "picorl", tokens=8192),
    "step_4B_LoRA_trl": step("4B", 32, "trl", rows=8),
    "step_4B_LoRA_trl_sleep": step("4B", 32, "trl", rows=8, sleep=True),
    "sync_4B": Part(120, f"{NANOLLM}-4B --sizes 4B --samplers --parts lora"),
    "memory_0.6B": Part(80, f"{NANOLLM}-0.6B --sizes 0.6B --samplers --parts full"),
    "compose_base": Part(150, f"{WITH_TORCH} {COMPOSE.replace('{depth}', '4')} --sft-steps 400"
                              " --sft-hasty 1 --sft-batch-size 64 --num-updates 0"),
    "compose_max_rl": Part(150, f"{WITH_TORCH} {COMPOSE.replace('{depth}', '2')} --eval-env compose"
                                " --lr 3e-4 --model-id {runs}/compose_base/model --num-updates 60"
                                " --eval-every 10 --grpo.loss-type max_rl"),
}  # fmt: skip


def main(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60 * args.minutes
    out, site = Path(args.out).resolve(), Path(args.site).resolve()
    out.mkdir(parents=True, exist_ok=True)
    site.mkdir(parents=True, exist_ok=True)
    if args.wheels:
        unpack(Path(args.wheels), site)
    failed, waiting = 0, dict[str, subprocess.Popen[str]]()
    for name, following in zip_longest(args.only, args.only[1:]):
        child = waiting.pop(name, None) or launch(name, args, out, site)
        if following and PARTS[following].ahead:
            waiting[following] = launch(following, args, out, site)
        line = run_part(name, child, args, out, site, deadline)
        failed += line["code"] != 0
        print(json.dumps(line), flush=True)
        with (out / "session.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return int(failed > 0)


def unpack(wheels: Path, site: Path) -> None:
    """Installs the wheels, and nothing that they depend on."""
    files = [str(file) for file in sorted(wheels.glob("*.whl"))]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--no-compile", "--upgrade", "--target", site, *files], check=True)


def launch(name: str, args: argparse.Namespace, out: Path, site: Path) -> subprocess.Popen[str]:
    """Starts a part; one that imports its libraries ahead then waits for a line on stdin."""
    part, runs = PARTS[name], site / "runs"
    shutil.rmtree(runs / name, ignore_errors=True)
    text = part.command
    values = {
        "device": "cpu" if args.cpu else "cuda", "sampler": "torch" if args.cpu else "vllm",
        "model": site / "model", "runs": runs, "name": name, "out": out / f"{name}.json",
    }  # fmt: skip
    for key, value in values.items():
        text = text.replace("{" + key + "}", str(value))
    script, *flags = text.split()
    flags = [str(ROOT / flag) if flag.endswith(".yaml") else flag for flag in flags]
    command = [sys.executable, *[__file__, "--ahead"] * part.ahead, str(ROOT / script), *flags]
    with (out / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=site,
            env=os.environ | variables(site), start_new_session=True, text=True,
        )  # fmt: skip


def run_part(
    name: str, child: subprocess.Popen[str], args: argparse.Namespace, out: Path, site: Path,
    deadline: float,
) -> dict[str, Any]:  # fmt: skip
    """Lets a part begin, and returns what it has found, also if it was stopped."""
    part, started = PARTS[name], time.monotonic()
    limit = max(0.0, min(part.seconds * (10 if args.cpu else 1), deadline - started))
    line: dict[str, Any] = {"part": name}
    assert child.stdin
    with suppress(BrokenPipeError):
        child.stdin.close()  # ends the wait of a part that has imported its libraries
    metrics = site / "runs" / name / "metrics.jsonl"
    while child.poll() is None and time.monotonic() < started + limit:
        time.sleep(0.1)
        seconds = time.monotonic() - started
        for mark, reached in marks(records_of(metrics), part.target).items():
            if reached:
                line.setdefault(mark, round(seconds, 1))
    stopped = child.poll() is None
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    line |= {"code": child.wait(), "seconds": round(time.monotonic() - started, 1)}
    if stopped:
        line["error"] = f"stopped after {limit:.0f} s"
    if found := results_of(out / f"{name}.json", out / f"{name}.log"):
        line["result"] = found
    if metrics.exists():
        shutil.copy(metrics, out / f"{name}.metrics.jsonl")
        shown = ("time/", "eval/", "gap/logprob_mean")
        line["records"] = [{k: v for k, v in record.items() if k == "update" or k.startswith(shown)}
                           for record in records_of(metrics)]  # fmt: skip
    return line


def results_of(file: Path, log: Path) -> list[Any]:
    """The JSON lines of a part's file, or of its log's lines that begin with "answer: "."""
    lines = log.read_text(errors="replace").splitlines()
    answers = [line.removeprefix("answer: ") for line in lines if line.startswith("answer: ")]
    return [
        json.loads(line) for line in (file.read_text().splitlines() if file.exists() else answers)
    ]


def run_ahead(script: str, *flags: str) -> None:
    """Imports what a part needs, waits for the end of stdin, and runs the script."""
    sys.path.insert(0, str(ROOT))
    for module in ("core.nanollm", "transformers", "vllm", "peft", "trl"):
        with suppress(ImportError):
            import_module(module)
    sys.stdin.read()
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    run_path(script, run_name="__main__")


def variables(site: Path) -> dict[str, str]:
    """Of the environment of a part: the packages in `site`, its caches, and no network."""
    caches = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    engine = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    return {name: str(site / "cache" / name.lower()) for name in caches} | offline | engine | own


def records_of(metrics: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [json.loads(line) for line in lines]


def marks(records: list[dict[str, Any]], target: float) -> dict[str, bool]:
    """What a run has reached: its first update, and the held-out accuracy `target`."""
    accuracies = [v for r in records for k, v in r.items() if k.endswith("/accuracy")]
    return {
        "seconds_to_first_update": any(record.get("update") == 1 for record in records),
        f"seconds_to_{target:g}": target > 0 and max(accuracies, default=0.0) >= target,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ahead"]:
        run_ahead(*sys.argv[2:])
        sys.exit()
    style = argparse.RawDescriptionHelpFormatter  # tyro may be among the wheels
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--out", default="results", help="folder of the results")
    parser.add_argument("--wheels", default="", help="folder of wheels to unpack first")
    parser.add_argument("--site", default="/tmp/picorl-site", help="where they are unpacked")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--minutes", type=float, default=14.0, help="then a part is stopped")
    parser.add_argument("--cpu", action="store_true", help="only for learning and compose")
    sys.exit(main(parser.parse_args()))
