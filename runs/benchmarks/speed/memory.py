"""Peak memory of a training pass, forward and backward: picoRL's beside one with all logits.

    python runs/benchmarks/speed/memory.py  # about 8 minutes on two cores; needs 16 GB
    python runs/benchmarks/speed/memory.py --vocab 384 8000 --completion-tokens 32 --no-write

One group, one micro-batch, the same token ids on both sides, a small trunk so that the vocabulary
weighs what it does in a large model. Ours is `train.micro_batches` and `train.forward`, the loss
that follows a stand-in: the mean log-prob of the sampled tokens. The plain pass is
`model(ids).logits` of every position, `log_softmax`, `gather`. Memory is the peak while the pass
runs less what was in use before it: resident memory of a fresh process on the CPU (Linux), what
PyTorch allocated on a GPU. The gradients of the weights are in it, on both sides.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from pairs import in_child, in_turn, play_part, publish, ratios, spread, verdict

GOAL, GOAL_VOCAB = 0.35, 150_000  # share of the plain pass's memory, at so many tokens
MB = 2**20


@dataclass
class Args:
    """What to measure: one thing is changed at a time, the others stay at their first value."""

    rounds: int = 5  # pairs of fresh processes at the first values of all
    other_rounds: int = 1  # pairs at the rest: memory hardly varies
    vocab: tuple[int, ...] = (150_000, 384, 8_000, 32_000)
    group_size: tuple[int, ...] = (8, 4, 16)
    completion_tokens: tuple[int, ...] = (64, 128, 256)
    prompt_tokens: tuple[int, ...] = (200, 50)
    write: bool = True  # keep the figures as JSON and put the table in the README


def main(args: Args) -> None:
    cases = []
    for number, case in enumerate(grid(args)):
        print(case, flush=True)
        sides: dict[str, Callable[[], dict]] = {
            name: lambda kind=name, case=case: in_child(__file__, "measure", kind=kind, **case)
            for name in ("picoRL", "plain")
        }
        found = in_turn(sides, args.other_rounds if number else args.rounds, "peak_mb")
        loss = {round(a["loss"], 3) for answers in found.values() for a in answers}
        if len(loss) != 1:
            raise RuntimeError(f"the two passes computed different losses: {loss}")
        cases.append(case | {"sides": found})
    publish("memory", cases, table, args.write)


def grid(args: Args) -> list[dict[str, int]]:
    """The first values of all, then each other value of one with the first of the rest."""
    names = ("vocab", "group_size", "completion_tokens", "prompt_tokens")
    first = {name: getattr(args, name)[0] for name in names}
    others = [first | {name: value} for name in names for value in getattr(args, name)[1:]]
    return [first, *others]


def table(cases: list[dict[str, Any]]) -> list[str]:
    """Markdown lines."""
    lines = ["| vocabulary | group | prompt | completion | picoRL, MB | all logits, MB | "
             "picoRL takes | goal |", "| --- |" + " --- |" * 7]  # fmt: skip
    for case in cases:
        ours, plain = ([answer["peak_mb"] for answer in case["sides"][name]]
                       for name in ("picoRL", "plain"))  # fmt: skip
        share = ratios(ours, plain)
        said = case["vocab"] >= GOAL_VOCAB
        cells = [
            f"{case['vocab']:,}", str(case["group_size"]), str(case["prompt_tokens"]),
            str(case["completion_tokens"]), spread(ours, ",.0f"), spread(plain, ",.0f"),
            f"{spread(share)} of it", verdict(sorted(share)[len(share) // 2], GOAL) if said else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# --- the children --------------------------------------------------------------------------------


def measure(
    kind: str, vocab: int, group_size: int, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """MB of one pass at its peak, over what was in use before it; and its loss."""
    import tempfile

    from workload import Shape, save_model

    from core.model import load_policy

    shape = Shape(64, 192, 2, 4, 2, 16, max(384, vocab))
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, shape)
        policy = load_policy(folder)
    run = ours if kind == "picoRL" else plain
    whole = group_size * (prompt_tokens + completion_tokens)
    policy.micro_batch_tokens = whole
    run(policy, rollouts(2, 3, 3, shape.vocab))  # loads what has to be loaded
    policy.model.zero_grad(set_to_none=True)
    group = rollouts(group_size, prompt_tokens, completion_tokens, shape.vocab)
    before = start_watching()
    loss = run(policy, group)
    return {"peak_mb": (peak() - before) / MB, "loss": loss}


def rollouts(group_size: int, prompt_tokens: int, completion_tokens: int, vocab: int) -> list[Any]:
    """One group of random ids; the same for the same numbers."""
    import random

    from core.types import Rollout, Turn

    rng = random.Random(0)
    opening = [rng.randrange(vocab) for _ in range(prompt_tokens)]
    made = []
    for _ in range(group_size):
        ids = [rng.randrange(vocab) for _ in range(completion_tokens)]
        turn = Turn(opening, ids, [-1.0] * completion_tokens, "length", reward=1.0)
        made.append(Rollout("speed", "player", seed=0, group_id=0, turns=[turn]))
    return made


def ours(policy: Any, group: list[Any]) -> float:
    import train
    from core.batching import to_rollout_batch

    update, total = to_rollout_batch(group), 0.0
    for batch in train.micro_batches(policy, update.sequences):
        logprobs, _, _ = train.forward(policy, batch, temperature=1.0)
        loss = -logprobs.sum() / update.num_tokens
        loss.backward()
        total += loss.item()
    return total


def plain(policy: Any, group: list[Any]) -> float:
    """Logits of all positions, as a loop with `labels` makes them."""
    import torch

    turns = [rollout.turns[0] for rollout in group]
    ids = torch.tensor([t.prompt_ids + t.completion_ids for t in turns], device=policy.device)
    logits = policy.causal_lm(input_ids=ids, use_cache=False).logits.float()
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    loss = -logprobs[:, len(turns[0].prompt_ids) - 1 :].mean()
    loss.backward()
    return loss.item()


def start_watching() -> int:
    """Bytes in use now; the peak is counted from here."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # 5: the peak of resident memory begins anew
    return status("VmRSS")


def peak() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else status("VmHWM")


def status(name: str) -> int:
    """Bytes, from Linux's account of this process."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(name))


PARTS = {"measure": measure}

if __name__ == "__main__":
    if not play_part(PARTS):
        main(tyro.cli(Args, description=__doc__))
