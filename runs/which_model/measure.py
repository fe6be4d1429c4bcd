"""The memory of one update on the CPU, as measured, beside what fit.py computes. Linux.

    python runs/which_model/measure.py    # tiny and smollm2, all weights and LoRA: four minutes

Each row is a fresh process: it loads the model, samples completions that never end early, trains on
all of them and takes an optimizer step. Measured is the peak of the resident memory of the whole
process; computed are the terms of fit.py and its reserve.
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "benchmarks")]

import fit  # noqa: E402
from pairs import in_child, run_child, status  # noqa: E402
from record import commit, machine, markdown, write_table  # noqa: E402

TINY = fit.Model("tiny", "qwen3", 4, 128, 384, 4, 2, 32, 704, True)
MODELS = {"tiny": TINY, "smollm2": fit.MODELS[0]}
PROMPT = 32  # tokens of the prompt that a group shares
SETTINGS = {  # tokens of a sequence, rollouts, tokens of a micro-batch
    "tiny": (512, 64, 4096),
    "smollm2": (128, 16, 512),
}


def main() -> None:
    rows = []
    for name in MODELS:
        for rank in (0, fit.RANK):
            rows.append(row(name, rank, in_child(__file__, "update", name=name, rank=rank)))
            print(rows[-1], flush=True)
    table = markdown("model | trained | tokens of a sequence | rollouts | micro-batch | computed | "
                     "measured | measured / computed", rows)  # fmt: skip
    measured_on = f"Measured at commit {commit()} on {machine()}; torch {version('torch')}."
    write_table(HERE, [*table, "", measured_on], "measured")


def row(name: str, rank: int, measured: dict[str, int]) -> list[str]:
    """A row of the table."""
    gb = measured["peak"] / fit.GB
    length, rollouts, micro = SETTINGS[name]
    terms = fit.memory(MODELS[name], "cpu", rank, micro, 0, length, rollouts)
    expected = terms["peak"] + fit.RESERVE
    return [
        name, f"LoRA, rank {rank}" if rank else "all weights", f"{length:,}", str(rollouts),
        f"{micro:,}", f"{expected:.2f} GB", f"{gb:.2f} GB", f"{gb / expected:.2f}",
    ]  # fmt: skip


def update(name: str, rank: int) -> dict[str, int]:
    """Computes one update. Returns the peak of this process's resident memory in bytes."""
    import train
    from core.batching import micro_batches, to_rollout_batch
    from core.loading import load_policy
    from core.optimizer import make_optimizer
    from core.run.models import folder_of
    from core.sampler import SamplingParams, TorchSampler
    from core.types import Rollout, Turn

    length, num_rollouts, micro = SETTINGS[name]
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy(folder_of(name, Path(folder, "tiny")), device="cpu", lora_rank=rank)
    policy.stop_ids, policy.micro_batch_tokens = [], micro
    optimizer = make_optimizer(policy, lr=1e-5)
    groups = [i // fit.GROUP_SIZE for i in range(num_rollouts)]
    prompts = [[100 + group] * PROMPT for group in groups]
    completions = TorchSampler(policy).sample(prompts, SamplingParams(length - PROMPT))
    batch = to_rollout_batch([
        Rollout("", "", 0, group, turns=[Turn(prompt, c.token_ids, c.logprobs, c.finish_reason)])
        for group, prompt, c in zip(groups, prompts, completions, strict=True)
    ])  # fmt: skip
    for part in micro_batches(policy, batch):
        logprobs, _, _ = train.forward(policy, part, temperature=1.0)
        optimizer.backward(-logprobs.sum() / batch.num_tokens)
    assert batch.num_tokens == num_rollouts * (length - PROMPT)
    assert optimizer.clip_and_step(max_norm=1.0)[1]
    return {"peak": status("VmHWM")}


if __name__ == "__main__" and not run_child({"update": update}):
    main()
