"""Checks in ten minutes that training and sampling work on this GPU, before anything is measured.

    python runs/benchmarks/gpu_check.py                     # on a GPU
    python runs/benchmarks/gpu_check.py --only lora updates # some of the steps of gpu_steps.py
    python runs/benchmarks/gpu_check.py --cpu --minutes 60  # all steps on vLLM's CPU build

Each step is a process of its own with a time limit, so the crash of one engine does not end the
others. It prints one JSON line: what it found, its seconds, and the memory of the device. A step
that fails is repeated in eager mode, with Model Runner V1, and with the Triton attention backend;
its line says which of these work. The last line is the verdict. Exit code 0 if all steps passed,
else 1. All models have random weights; nothing is downloaded.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.append(str(Path(__file__).resolve().parents[2]))

from core.run import cli

SCRIPT = Path(__file__).resolve().with_name("gpu_steps.py")
ANSWER = "answer: "  # begins the line in which a step prints what it found
SECONDS = {  # limit of each step on a GPU; ten times that with --cpu
    "versions": 120,
    "attention": 90,
    "eager": 180,  # the first step that compiles vLLM's kernels
    "sleep": 120,
    "graphs": 240,
    "lora": 240,
    "reopen": 300,
    "updates": 300,
    "table": 400,
}
NO_ENGINE = ("versions", "attention", "table")  # steps that are not repeated
VARIANTS = {  # what a failed step is repeated with, one at a time: environment variables
    "eager mode": {},
    "Model Runner V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "Triton attention": {},
}


@dataclass
class Args:
    """Which steps to run, and where."""

    cpu: bool = False  # run on vLLM's CPU build with tiny models
    only: tuple[str, ...] = ()  # names of steps; none: all
    minutes: float = 10.0  # a step that is running then is stopped
    out: str = ""  # also append the lines to this file


def main(args: Args) -> int:
    started, lines = time.perf_counter(), []
    deadline = started + 60 * args.minutes
    if unknown := set(args.only) - set(SECONDS):
        raise SystemExit(f"no such step: {', '.join(sorted(unknown))}; choose {', '.join(SECONDS)}")
    for name in args.only or SECONDS:
        lines.append(check(args, name, deadline))
        show(args, lines[-1])
        if name == "versions" and "error" in lines[-1]:
            break  # nothing else can work
    failed = [line["step"] for line in lines if "error" in line]
    seconds = round(time.perf_counter() - started, 1)
    show(args, {"verdict": "failed" if failed else "passed", "failed": failed, "seconds": seconds})
    return 1 if failed else 0


def check(args: Args, name: str, deadline: float) -> dict[str, Any]:
    """Runs a step; if it fails, also all variants of it. Returns its line."""
    too_late = {"step": name, "error": "no time"}

    def run(variant: str) -> dict[str, Any]:
        left = deadline - time.perf_counter()
        return run_step(args, name, variant, left) if left > 0 else too_late

    line = run("")
    if "error" in line and line != too_late and name not in NO_ENGINE:
        repeated = {variant: run(variant).get("error", "passed") for variant in VARIANTS}
        return line | {"repeated": repeated}
    return line


def run_step(args: Args, name: str, variant: str, left: float) -> dict[str, Any]:
    """Runs a step in a process of its own. Returns its results, or the reason why it failed."""
    command = [sys.executable, str(SCRIPT), name, "cpu" if args.cpu else "cuda", variant]
    environment = os.environ | VARIANTS.get(variant, {}) | {"HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    # a file, because a pipe stays open as long as any process that the step has started
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        limit = min(left, SECONDS[name] * (10 if args.cpu else 1))
        try:
            reason = "" if child.wait(timeout=limit) == 0 else f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit:.0f} s"
        finally:  # after Ctrl-C or SIGTERM too: an engine that is left would keep its memory
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        printed = output.read().splitlines()
    line = {"step": name, "seconds": round(time.perf_counter() - started, 1)}
    answers = [text.removeprefix(ANSWER) for text in printed if text.startswith(ANSWER)]
    if answers and not reason:
        return line | json.loads(answers[-1])
    last = [text for text in printed if text.strip()][-5:]
    return line | {"error": " | ".join([reason, *last])[-1000:]}


def show(args: Args, line: dict[str, Any]) -> None:
    text = json.dumps(line, ensure_ascii=False)
    print(text, flush=True)
    if args.out:
        with open(args.out, "a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    cli.use_expandable_segments()  # as train.py does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the `finally` of run_step
    sys.exit(main(tyro.cli(Args, description=__doc__)))
