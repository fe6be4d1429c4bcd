"""Checks in four minutes that training and sampling work on this GPU, before anything is measured.

    python runs/benchmarks/gpu_check.py                     # on a GPU with 40 GB or more
    python runs/benchmarks/gpu_check.py --only lora updates # some of the steps of gpu_steps.py
    python runs/benchmarks/gpu_check.py --cpu --minutes 60  # all steps on vLLM's CPU build

Each step is a process of its own with a time limit, so the crash of one engine does not end the
others. The steps of a round run side by side; on a CPU one after the other. Each prints one JSON
line: what it found, its seconds, and the memory of the device. A step that fails is repeated in
eager mode, with Model Runner V1, and with the Triton attention backend; its line says which of
these work. The last line is the verdict. Exit code 0 if all steps passed, else 1. All models but
`tiny` have random weights; nothing is downloaded.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.append(str(Path(__file__).resolve().parents[2]))

from core.terminal import cli

SCRIPT = Path(__file__).resolve().with_name("gpu_steps.py")
ANSWER = "answer: "  # begins the line in which a step prints what it found
SECONDS = {  # limit of each step on a GPU; ten times that with --cpu
    "versions": 90,
    "eager": 120,  # the first step that compiles vLLM's kernels
    "attention": 90,
    "graphs": 150,
    "lora": 150,
    "reopen": 150,
    "updates": 150,
    "learns": 150,
    "sleep": 60,
}
ROUNDS = (("versions", "eager"), ("attention", "graphs", "lora", "reopen", "updates", "learns"),
          ("sleep",))  # the last one measures the memory of the whole device  # fmt: skip
NO_ENGINE = ("versions", "attention")  # steps that are not repeated
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
    minutes: float = 4.0  # a step that is running then is stopped
    out: str = ""  # also append the lines to this file


CHILDREN: set[subprocess.Popen[bytes]] = set()  # that are running


def main(args: Args) -> int:
    started, lines = time.perf_counter(), list[dict[str, Any]]()
    deadline = started + 60 * args.minutes
    if unknown := set(args.only) - set(SECONDS):
        raise SystemExit(f"no such step: {', '.join(sorted(unknown))}; choose {', '.join(SECONDS)}")
    for names in ROUNDS:
        chosen = [name for name in names if name in (args.only or SECONDS)]
        with ThreadPoolExecutor(1 if args.cpu else len(names)) as pool:
            for done in as_completed([pool.submit(check, args, n, deadline) for n in chosen]):
                lines.append(done.result())
                show(args, lines[-1])
        if any(line["step"] == "versions" and "error" in line for line in lines):
            break  # nothing else can work
    failed = sorted(line["step"] for line in lines if "error" in line)
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
        with ThreadPoolExecutor(1 if args.cpu else len(VARIANTS)) as pool:
            found = dict(zip(VARIANTS, pool.map(run, VARIANTS), strict=True))
        repeated = {variant: again.get("error", "passed") for variant, again in found.items()}
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
        CHILDREN.add(child)
        limit = min(left, SECONDS[name] * (10 if args.cpu else 1))
        try:
            reason = "" if child.wait(timeout=limit) == 0 else f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit:.0f} s"
        finally:
            end(child)
            CHILDREN.discard(child)
        output.seek(0)
        printed = output.read().splitlines()
    line = {"step": name, "seconds": round(time.perf_counter() - started, 1)}
    answers = [text.removeprefix(ANSWER) for text in printed if text.startswith(ANSWER)]
    if answers and not reason:
        return line | json.loads(answers[-1])
    last = [text for text in printed if text.strip()][-5:]
    return line | {"error": " | ".join([reason, *last])[-1000:]}


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a step with all its processes: an engine that is left would keep its memory."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def stop(number: int, _: Any) -> None:
    """After Ctrl-C or SIGTERM: ends all steps."""
    for child in [*CHILDREN]:
        end(child)
    os._exit(128 + number)  # the threads would start the next steps


def show(args: Args, line: dict[str, Any]) -> None:
    text = json.dumps(line, ensure_ascii=False)
    print(text, flush=True)
    if args.out:
        with open(args.out, "a") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    cli.use_expandable_segments()  # as train.py does
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    sys.exit(main(tyro.cli(Args, description=__doc__)))
