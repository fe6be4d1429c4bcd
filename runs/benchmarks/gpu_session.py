"""A quarter of an hour on a GPU: correctness, then speed, from a folder of wheels.

    python runs/benchmarks/gpu_session.py --out results --wheels wheels
    python runs/benchmarks/gpu_session.py --out results --only check learning   # five minutes
    python runs/benchmarks/gpu_session.py --out results --cpu --only start      # tries the script

The machine needs PyTorch, and no network. The wheels, such as vLLM's, TRL's and those of tyro and
rich, are unpacked into `--site` without their dependencies. Parts come in the order of their worth.
Each is a process with a limit. Its result is a line of OUT/session.jsonl as soon as it has ended;
OUT/<part>.json has what it has measured so far, and OUT/<part>.log what it printed, so that little
is lost if the machine is taken away. Compiled code is kept in `--site`, so later parts start warm.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = "runs/benchmarks"
TRAIN = "train.py --device {device} --sampler {sampler} --run-name {name}"
START = "--model-id {model} --num-updates 1 --num-prompts 8 --max-tokens 64 --eval-num-tasks 0"
PAIR = f"{BENCHMARKS}/vs_trl.py --gpu --rounds 1 --steps 3 --no-write --out {{out}}"
COMPOSE = "--env compose:depth={depth},mixed=true --max-tokens 32 --max-turns 1"


@dataclass
class Part:
    """One process: Python with `command`, in ROOT."""

    seconds: int  # at most
    command: str
    target: float = 0.0  # of train.py: the held-out accuracy whose time is noted


PARTS = {  # correctness, then speed
    "check": Part(250, f"{BENCHMARKS}/gpu_check.py --minutes 4 --out {{out}}"),
    "learning": Part(90, TRAIN, target=0.9),
    "tokens": Part(170, f"{BENCHMARKS}/nanollm.py --sizes 0.6B --samplers nanollm vllm --parts"
                   " --no-write --out {out}"),
    "model": Part(40, f"{BENCHMARKS}/gpu_session.py --save-model {{model}}"),
    "start": Part(90, f"{TRAIN} {START}"),
    "start_again": Part(60, f"{TRAIN} {START}"),
    "step_0.6B": Part(200, f"{PAIR} --sizes 0.6B --ranks 0"),
    "attention": Part(60, f"{BENCHMARKS}/attention.py --out {{out}}"),
    "smollm2": Part(120, f"{TRAIN} --config runs/smollm2/sums.yaml", target=0.7),
    "sync_4B": Part(80, f"{BENCHMARKS}/nanollm.py --sizes 4B --samplers --parts lora"
                    " --no-write --out {out}"),
    "memory_0.6B": Part(80, f"{BENCHMARKS}/nanollm.py --sizes 0.6B --samplers --parts full"
                        " --no-write --out {out}"),
    "step_4B_LoRA": Part(230, f"{PAIR} --sizes 4B --ranks 32"),
    "compose_base": Part(150, f"{TRAIN} {COMPOSE.format(depth=4)} --sft-steps 400 --sft-hasty 1"
                         " --sft-batch-size 64 --num-updates 0"),
    "compose_max_rl": Part(150, f"{TRAIN} {COMPOSE.format(depth=2)} --eval-env compose --lr 3e-4"
                           " --model-id {runs}/compose_base/model --num-updates 60 --eval-every 10"
                           " --grpo.loss-type max_rl"),
}  # fmt: skip


def main(args: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60 * args.minutes
    out, site = Path(args.out).resolve(), Path(args.site).resolve()
    out.mkdir(parents=True, exist_ok=True)
    site.mkdir(parents=True, exist_ok=True)
    if args.wheels:
        unpack(Path(args.wheels), site)
    failed = 0
    for name in args.only:
        line = run_part(name, args.cpu, out, site, deadline)
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


def run_part(name: str, cpu: bool, out: Path, site: Path, deadline: float) -> dict[str, Any]:
    """Runs a part, and returns what it has found, also if it was stopped."""
    part, started = PARTS[name], time.monotonic()
    limit = min(part.seconds * (10 if cpu else 1), deadline - started)
    line: dict[str, Any] = {"part": name, "code": -1, "seconds": 0.0}
    if limit <= 0:
        return line | {"error": "no time"}
    result, runs = out / f"{name}.json", site / "runs"
    shutil.rmtree(runs / name, ignore_errors=True)
    text = part.command.format(
        device="cpu" if cpu else "cuda", sampler="torch" if cpu else "vllm", name=name, out=result,
        runs=runs, model="tiny" if cpu else site / "model",
    )  # fmt: skip
    script, *flags = text.split()
    flags = [str(ROOT / flag) if flag.endswith(".yaml") else flag for flag in flags]
    flags += ["--cpu"] * (cpu and "attention.py" in script)
    with (out / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            [sys.executable, ROOT / script, *flags], stdout=log, stderr=subprocess.STDOUT, cwd=site,
            env=os.environ | variables(site), start_new_session=True,
        )  # fmt: skip
        metrics = runs / name / "metrics.jsonl"
        while child.poll() is None and time.monotonic() < started + limit:
            time.sleep(0.1)
            seconds = time.monotonic() - started
            for mark, reached in marks(records_of(metrics), part.target).items():
                if reached:
                    line.setdefault(mark, round(seconds, 1))
        stopped = child.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        code = child.wait()
    line |= {"code": code, "seconds": round(time.monotonic() - started, 1)}
    if stopped:
        line["error"] = f"stopped after {limit:.0f} s"
    if result.exists():
        lines = result.read_text().splitlines()
        line["result"] = [json.loads(x) for x in lines] if len(lines) > 1 else json.loads(lines[0])
    if metrics.exists():
        shutil.copy(metrics, out / f"{name}.metrics.jsonl")
        shown = ("time/", "eval/", "gap/logprob_mean")
        line["records"] = [{k: v for k, v in record.items() if k == "update" or k.startswith(shown)}
                           for record in records_of(metrics)]  # fmt: skip
    return line


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


def save_model(folder: str) -> None:
    """Writes a model of the shape of Qwen3-0.6B with random weights in bfloat16."""
    sys.path.append(str(ROOT / BENCHMARKS))
    from workload import SHAPES
    from workload import save_model as save

    save(folder, SHAPES["0.6B"], "bfloat16")


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter  # tyro may be among the wheels
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--out", default="results", help="folder of the results")
    parser.add_argument("--wheels", default="", help="folder of wheels to unpack first")
    parser.add_argument("--site", default="/tmp/picorl-site", help="where they are unpacked")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--minutes", type=float, default=14.0, help="then a part is stopped")
    parser.add_argument("--cpu", action="store_true", help="with --only start, learning, attention")
    parser.add_argument("--save-model", default="", help="internal: a folder for a random model")
    arguments = parser.parse_args()
    if arguments.save_model:
        save_model(arguments.save_model)
    else:
        sys.exit(main(arguments))
