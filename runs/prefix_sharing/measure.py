"""What the tree of prefixes saves: this checkout against an older one, paired and alternating.

    git worktree add ../before ea1b88e          # the commit before the tree
    python runs/prefix_sharing/measure.py --before ../before
    python runs/prefix_sharing/measure.py --before ../before --only prefill --rounds 1 --no-write

Every measurement is a fresh process, which imports one of the two checkouts. A run of train.py is
timed from the start of the process to its end. "sampling" rows are one call of
`TorchSampler.sample`, and "update" is the mean of three updates after the second. A token is
computed in training when the model looks up its embedding while gradients are on, and computed
backward when that embedding gets a gradient. Both sides must sample the same greedy tokens.
"""

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "benchmarks"))

import torch  # noqa: E402
import tyro  # noqa: E402
from pairs import alternate, in_child, ratios, run_child, spread  # noqa: E402
from record import commit, machine, write_table  # noqa: E402

SUMS = "--model-id smollm2 --env math_qa:level=1,style=plain --temperature 0.7 --max-tokens 12 "
SUMS += "--num-prompts 8 --group-size 8 --eval-every 0 --lr"
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: what the table says, part, settings
    "prefill": ("prefill of the distinct prompts of 128 sums", "sampling", {"max_tokens": 1}),
    "evaluation": ("greedy answers to 128 sums", "sampling", {"max_tokens": 12, "twice": True}),
    "update": ("an update of smollm2, LoRA of rank 16, 8 x 8", "training",
               {"flags": f"{SUMS} 1e-4 --lora-rank 16 --num-updates 5 --eval-num-tasks 0",
                "between": [2, 5]}),
    "tiny": ("the default run", "training", {"flags": "--num-updates 25"}),
    "smollm2": ("30 updates of smollm2, all weights, two evaluations", "training",
                {"flags": f"{SUMS} 1e-5 --num-updates 30 --eval-num-tasks 128"}),
}  # fmt: skip
RESULTS = HERE / "measured.json"


@dataclass
class Args:
    """What to measure."""

    before: Path  # another checkout
    rounds: int = 3  # pairs of fresh processes
    only: tuple[Literal["prefill", "evaluation", "update", "tiny", "smollm2"], ...] = ()
    write: bool = True  # save the results in measured.json and write the tables into README.md


def main(args: Args) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    folders = {"before": args.before.resolve(), "tree": HERE.parents[1]}
    for name in args.only or ROWS:
        print(f"{name}:", flush=True)
        sides = {side: side_of(folder, name) for side, folder in folders.items()}
        measured = alternate(sides, args.rounds, "s")
        ids = [answer.pop("ids", []) for answers in measured.values() for answer in answers]
        if any(other != ids[0] for other in ids):
            raise RuntimeError(f"{name}: the two sides sampled other tokens")
        results[name] = measured | {"commit": commit(), "machine": machine()}
    tables = {"seconds": seconds_table(results), "tokens": tokens_table(results)}
    for table, lines in tables.items():
        print("\n".join(["", *lines]))
        if args.write:
            write_table(HERE, lines, table)
    if args.write:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def side_of(folder: Path, name: str) -> Callable[[], dict[str, Any]]:
    """A measurement of a row with the checkout in `folder`: s, and cpu_s of all processes."""

    def measure() -> dict[str, Any]:
        os.environ["PYTHONPATH"], os.environ["CUDA_VISIBLE_DEVICES"] = str(folder), ""
        _, part, settings = ROWS[name]
        started, times = time.perf_counter(), os.times()
        result = in_child(__file__, part, **settings)
        seconds, after = time.perf_counter() - started, os.times()
        used = sum(after[2:4]) - sum(times[2:4])  # user and system time of children
        return {"s": seconds, "cpu_s": used} | result

    return measure


def sampling(max_tokens: int, twice: bool = False) -> dict[str, Any]:
    """Greedy completions of held-out prompts; `twice`: also of those that repeat."""
    from core.chat_template import prompt_ids
    from core.loading import load_policy
    from core.run.smollm2 import smollm2_folder
    from core.sampler import SamplingParams, TorchSampler
    from core.tasks import eval_tasks
    from environments.plumbing.registry import make

    policy = load_policy(str(smollm2_folder()), device="cpu")
    tasks = eval_tasks(["math_qa:level=1,style=plain"], 128)
    chats = [make(task.env).reset(task.seed) for task in tasks]
    prompts = [prompt_ids(policy.tokenizer, chat) for chat in chats]
    if not twice:
        prompts = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    sampler, params = TorchSampler(policy), SamplingParams(max_tokens, temperature=0.0)
    sampler.sample(prompts[:2], params)  # warm
    started, cpu = time.perf_counter(), time.process_time()
    completions = sampler.sample(prompts, params)
    spent = {"s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    return spent | {"prompts": len(prompts), "ids": [c.token_ids for c in completions]}


def training(flags: str, between: list[int] | None = None) -> dict[str, Any]:
    """train.py in this process; `between`: the time is that of one update between these two."""
    import train

    counts = count_tokens()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        marks: dict[int, tuple[float, float]] = {}
        threading.Thread(target=watch, args=(marks,), daemon=True).start()
        if train.run_command([*flags.split(), "--run-name", "a"]):
            raise RuntimeError("train.py failed")
        os.chdir("/")
    if between is None:
        return counts
    first, last = between
    spent = [(b - a) / (last - first) for a, b in zip(marks[first], marks[last], strict=True)]
    return dict(zip(("s", "cpu_s"), spent, strict=True))


def count_tokens() -> dict[str, int]:
    """Counts, from now on, the tokens that the model computes with gradients on."""
    counts = {"forward": 0, "backward": 0}
    look_up = torch.nn.Embedding.forward

    def counted(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        embedded = look_up(self, ids)
        if torch.is_grad_enabled():  # they are off while sampling
            counts["forward"] += ids.numel()

        def backward(gradient: torch.Tensor) -> None:
            counts["backward"] += ids.numel()

        if embedded.requires_grad:
            embedded.register_hook(backward)
        return embedded

    torch.nn.Embedding.forward = counted  # type: ignore[method-assign]
    return counts


def watch(marks: dict[int, tuple[float, float]]) -> None:
    """Notes the wall and processor time at which each update is in metrics.jsonl."""
    file = Path("runs/a/metrics.jsonl").absolute()
    while True:
        lines = file.read_text().split("\n")[:-1] if file.exists() else []  # complete lines
        for line in lines[len(marks) :]:
            marks.setdefault(json.loads(line)["update"], (time.perf_counter(), time.process_time()))
        time.sleep(0.02)


def seconds_table(results: dict[str, Any]) -> list[str]:
    """Wall and processor seconds of each row, as Markdown: median [lowest, highest]."""
    lines = ["| | before, s | tree, s | ratio | before, processor s | tree, processor s | ratio |"]
    lines.append("|" + " --- |" * 7)
    for name, (text, _, _) in ROWS.items():
        if name not in results:
            continue
        cells = [text]
        for key in ("s", "cpu_s"):
            before, tree = ([r[key] for r in results[name][side]] for side in ("before", "tree"))
            ratio = statistics.median(ratios(tree, before))
            cells += [spread(before, ".1f"), spread(tree, ".1f"), f"**{ratio:.2f}**"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def tokens_table(results: dict[str, Any]) -> list[str]:
    """Tokens computed in training by the runs of train.py, as Markdown."""
    lines = ["| tokens computed in training | before | tree |", "| --- | --- | --- |"]
    for name, (text, _, _) in ROWS.items():
        if "forward" not in results.get(name, {"tree": [{}]})["tree"][0]:
            continue
        for kind in ("forward", "backward"):
            cells = [f"{results[name][side][0][kind]:,}" for side in ("before", "tree")]
            lines.append(f"| {text}: {kind} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    if not run_child({"sampling": sampling, "training": training}):
        main(tyro.cli(Args, description=__doc__))
