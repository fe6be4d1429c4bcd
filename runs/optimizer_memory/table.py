"""Bytes a weight of each optimizer: computed, measured, and which model then fits which GPU. Linux.

    python runs/optimizer_memory/table.py           # measures tiny and smollm2: four minutes
    python runs/optimizer_memory/table.py --draw    # only the computed table, one second

Counted are the weights, and the masters, gradients and moments of what is trained. Computed are the
terms of runs/which_model/fit.py. Measured are the bytes of all these tensors after a step and
another backward pass on the CPU. For smollm2 also the resident memory of the process: each row is a
fresh one, and what it had before it loaded the model is subtracted. "Offloaded" runs on the CPU
too: the tensors are those that would be in host memory, but both memories are the same.
"""

import ctypes
import gc
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "benchmarks"), str(HERE.parent / "which_model")]

import fit  # noqa: E402
from measure import MODELS as MEASURED  # noqa: E402
from pairs import in_child, run_child, status  # noqa: E402
from record import commit, machine, markdown, write_table  # noqa: E402

QWEN3 = {
    **{m.model_id.split("-")[1]: m for m in fit.MODELS if m.family == "qwen3"},
    "14B": fit.Model("Qwen/Qwen3-14B", "qwen3", 40, 5120, 17408, 40, 8, 128, 151936, False),
    "32B": fit.Model("Qwen/Qwen3-32B", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936, False),
}
GPUS = (16, 24, 48, 80)  # GB
STATE = ("weights", "masters", "adapters", "moments", "gradients")  # terms of fit.py


@dataclass(frozen=True)
class Combination:
    """One way to train: the flags of train.py, and the arguments of fit.memory."""

    flags: str
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    offload: bool = False
    rank: int = 0  # of LoRA
    nf4: bool = False
    ranks: int = 1

    def memory(self, m: fit.Model, device: str, gpu: int = 0, **options: bool) -> dict[str, float]:
        """Returns the terms of fit.py, with a micro-batch of one sequence."""
        return fit.memory(
            m, device, self.rank, fit.LENGTH, gpu, size=4 if self.dtype == "float32" else 2,
            optimizer=self.optimizer, offload=self.offload, ranks=self.ranks, nf4=self.nf4,
            **options,
        )  # fmt: skip

    def bytes_a_weight(self, m: fit.Model, device: str = "cpu") -> float:
        """Returns the computed bytes of all tensors on the GPU, over the number of weights."""
        terms = self.memory(m, device)
        return sum(terms[name] for name in STATE) * fit.GB / fit.num_weights(m)

    def on_host(self, m: fit.Model) -> float:
        """Returns the computed bytes a weight in host memory."""
        if not self.offload:
            return 0.0
        weights, trained = fit.num_weights(m), fit.num_adapter_weights(m, self.rank) or None
        return (4 + 4 + fit.MOMENTS[self.optimizer]) * (trained or weights) / weights


COMBINATIONS = [
    Combination("adamw", dtype="float32"),
    Combination("adamw8bit", dtype="float32", optimizer="adamw8bit"),
    Combination("adamw, offloaded", dtype="float32", offload=True),
    Combination("LoRA, rank 32", dtype="float32", rank=fit.RANK),
    Combination("adamw"),
    Combination("adamw8bit", optimizer="adamw8bit"),
    Combination("adamw_bf16_sr", optimizer="adamw_bf16_sr"),
    Combination("adamw, offloaded", offload=True),
    Combination("adamw8bit, offloaded", optimizer="adamw8bit", offload=True),
    Combination("LoRA, rank 32", rank=fit.RANK),
    Combination("LoRA, rank 32, nf4", rank=fit.RANK, nf4=True),
]
SHARDED = Combination("adamw, 8 ranks", ranks=8)  # core/extras/sharded_optimizer.py


def main() -> None:
    write_table(HERE, computed_lines(), "computed")
    print("\n".join(computed_lines()))
    if "--draw" in sys.argv:
        return
    rows = []
    for name in MEASURED:
        for number, combination in enumerate(COMBINATIONS):
            found = in_child(__file__, "measure", name=name, number=number)
            rows.append(measured_row(name, combination, found))
            print(rows[-1], flush=True)
    table = markdown(
        "model | weights | trained with | computed | measured | difference | of that "
        "in host memory | resident | first step, ns a trained weight",
        rows,
    )
    made_with = ", ".join(f"{package} {version(package)}" for package in ("torch", "torchao"))
    measured_on = f"Measured at commit {commit()} on {machine()}; {made_with}."
    write_table(HERE, [*table, "", measured_on], "measured")


def computed_lines() -> list[str]:
    """Returns the table of what fits where, for bfloat16 weights on GPUs."""
    rows = []
    for c in [*(c for c in COMBINATIONS if c.dtype == "bfloat16"), SHARDED]:
        host = f"{c.on_host(QWEN3['8B']):.2f}" if c.offload else "0"
        cells = [c.flags, f"{c.bytes_a_weight(QWEN3['8B'], 'cuda'):.2f}", host]
        rows.append([*cells, *(smallest_gpu(c, m) for m in QWEN3.values())])
    return markdown(f"trained with | bytes a weight, GPU | host | {' | '.join(QWEN3)}", rows)


def smallest_gpu(c: Combination, m: fit.Model) -> str:
    """Returns the GB at the peak and the smallest GPU that has them; c: with checkpointing."""
    count = f"{c.ranks} x " if c.ranks > 1 else ""
    for gpu in GPUS:
        for checkpointing in (False, True):
            peak = c.memory(m, "cuda", gpu, checkpointing=checkpointing)["peak"]
            if peak <= 0.9 * gpu - 1.5:  # as in runs/which_model
                return f"{peak:.1f}: {count}{gpu}{' c' * checkpointing}"
    return f"{peak:.0f}: none"


def measured_row(name: str, c: Combination, found: dict[str, int]) -> list[str]:
    """A row of the measured table; `found`: bytes, as `measure` returns them."""
    m = MEASURED[name]
    weights = fit.num_weights(m)
    computed = c.bytes_a_weight(m) + c.on_host(m)
    measured = (found["device"] + found["host"]) / weights
    trained = fit.num_adapter_weights(m, c.rank) if c.rank else weights
    resident_and_time = [
        f"{found['resident'] / weights:.2f}", f"{found['nanoseconds'] / trained:.1f}"
    ]  # fmt: skip
    return [
        name, c.dtype, c.flags, f"{computed:.3f}", f"{measured:.3f}",
        f"{100 * (measured / computed - 1):+.2f}%", f"{found['host'] / weights:.3f}",
        *(2 * [""] if name == "tiny" else resident_and_time),
    ]  # fmt: skip


def measure(name: str, number: int) -> dict[str, int]:
    """Returns the bytes of a policy and its optimizer after a step and another backward pass.

    device: weights, gradients, moments and masters that are not offloaded; host: those that are;
    resident: by how much the memory of this process has grown; nanoseconds: of the step.
    """
    from core.config import Config
    from core.extras.piecewise_adamw import optimizer_options
    from core.optimizer import make_optimizer
    from core.run.models import load_policy

    c, before = COMBINATIONS[number], status("VmRSS")
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy(
            Config(device="cpu", dtype=c.dtype), name, Path(folder, "tiny"),
            "nf4" if c.nf4 else "none", lora_rank=c.rank,
        )  # fmt: skip
    options = {} if c.optimizer == "adamw" else optimizer_options(c.optimizer, seed=0)
    optimizer = make_optimizer(policy, 1e-6, offload=c.offload, **options)
    backward(policy, optimizer)
    started = perf_counter_ns()
    assert optimizer.clip_and_step(1.0)[1]
    nanoseconds = perf_counter_ns() - started
    backward(policy, optimizer)
    device, host = state_bytes(policy, optimizer)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    grown = status("VmRSS") - before
    return {"device": device, "host": host, "resident": grown, "nanoseconds": nanoseconds}


def backward(policy, optimizer) -> None:
    """Adds the gradient of a short sequence, with a loss whose gradient reaches every weight."""
    import torch

    hidden = policy.hidden_states(torch.arange(3, 19)[None])[0]
    optimizer.backward(-policy.to_logits(hidden).log_softmax(-1)[:, 5].mean())


def state_bytes(policy, optimizer) -> tuple[int, int]:
    """Returns the bytes of all weights, masters, gradients and moments: of the device, the host."""
    from core.run.quantize import num_bytes

    weights = sum(num_bytes(p) for p in policy.model.parameters())
    shared = {p.data_ptr() for p in policy.model.parameters()}
    states = [x for s in optimizer.adamw.state.values() for x in s.values()]
    gradients = [p.grad for p in [*policy.model.parameters(), *optimizer.masters]]
    tensors = [p for p in optimizer.masters if p.data_ptr() not in shared] + states
    rest = {g.data_ptr(): g.nbytes for g in [*tensors, *gradients] if g is not None}
    total = sum(rest.values())
    return (weights, total) if optimizer.offload else (weights + total, 0)


if __name__ == "__main__" and not run_child({"measure": measure}):
    main()
