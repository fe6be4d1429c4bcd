"""AdamW with less memory: moments of 8 bits, or bfloat16 weights without float32 masters.

    pip install -e ".[memory]"
    python train.py --optimizer adamw8bit
    python train.py --optimizer adamw_bf16_sr --dtype bfloat16

adamw8bit: a moment is a code for one of 256 values, times the float32 scale of its block of 256
weights (arXiv:2110.02861): 1 + 4/256 bytes instead of 4. Tensors with fewer than 4,096 weights, or
with a number of weights that 256 does not divide, keep float32 moments.

adamw_bf16_sr: computes the new weight in float32 and rounds it to one of the two bfloat16 numbers
beside it, to each with the probability that makes the expected value exact (arXiv:2010.06192). So
small updates are not lost, although there are no masters. The first moment has the dtype of the
weight. The second moment is float32: with beta2 = 0.999 a bfloat16 number changes by less than half
a rounding step when the gradients get smaller, so it would never fall.

The equations and the 8-bit format are torchao's. torchao compiles its step for every shape, for
which it needs a C++ compiler or Triton. Here the step runs without compilation, on pieces of
tensors, so its temporaries are as small and every machine computes the same operations.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.seeds import ROUNDING, derive_seed

BLOCK = 256  # weights that share the scale of an 8-bit moment
MIN_QUANTIZED = 4096  # weights; torchao's limit, so that biases and norms stay in float32
PIECE = 2**22  # weights computed at a time, with about 50 bytes of temporaries for each
MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_options(kind: str, seed: int) -> dict[str, Any]:
    """The options of MasterAdamW for adamw8bit or adamw_bf16_sr; `seed`: of the rounding."""
    make = partial(PiecewiseAdamW, kind=kind, seed=seed)
    return {"make_adamw": make, "has_masters": kind == "adamw8bit"}


class PiecewiseAdamW(torch.optim.Optimizer):
    """torchao's AdamW on flat pieces of the parameters, with plain tensors as its state.

    `kind` is adamw8bit (float32 parameters) or adamw_bf16_sr (bfloat16 ones are rounded
    stochastically, with random numbers derived from `seed` and the number of the step).
    """

    def __init__(
        self, groups: list[dict[str, Any]], kind: str, seed: int, lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01,
    ):  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)
        from torchao.optim import adam, subclass_8bit  # an optional package

        self.update, self.format, self.seed = adam.single_param_adam, subclass_8bit, seed
        for p in self._parameters():
            self.state[p] = {"step": torch.zeros(()), **self._zeros(p, kind)}

    def _zeros(self, p: Tensor, kind: str) -> dict[str, Tensor]:
        n = p.numel()
        if kind == "adamw8bit" and n >= MIN_QUANTIZED and n % BLOCK == 0:
            codes = {name: torch.zeros(n, dtype=torch.uint8, device=p.device) for name in MOMENTS}
            scales = {f"{x}_scale": torch.zeros(n // BLOCK, device=p.device) for x in MOMENTS}
            return codes | scales
        dtypes = zip(MOMENTS, (p.dtype, torch.float32), strict=True)
        return {name: torch.zeros(n, dtype=dtype, device=p.device) for name, dtype in dtypes}

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step with every parameter that has a gradient."""
        taken = max(int(state["step"]) for state in self.state.values())
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(gpus):  # afterwards the generators are as before
            torch.manual_seed(derive_seed(self.seed, ROUNDING, taken))
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self._step(p, p.grad.reshape(-1), group)

    def _step(self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, weights = self.state[p], p.detach().reshape(-1)
        state["step"] += 1
        for start in range(0, len(weights), PIECE):
            piece = slice(start, start + PIECE)
            m, v = (self._moment(state, name, piece) for name in MOMENTS)
            self.update(
                weights[piece], gradient[piece], state["step"], m, v, None, group["lr"],
                *group["betas"], group["weight_decay"], group["eps"],
                True, p.dtype == torch.bfloat16,
            )  # fmt: skip
        if weights.data_ptr() != p.data_ptr():  # p is not contiguous: `weights` is a copy
            p.copy_(weights.view_as(p))

    def _moment(self, state: dict[str, Tensor], name: str, piece: slice) -> Tensor:
        if f"{name}_scale" not in state:
            return state[name][piece]
        signed = name == "exp_avg"
        table = self.format.get_qmap_signed() if signed else self.format.get_qmap_unsigned()
        codes = state[name][piece]
        scale = state[f"{name}_scale"][piece.start // BLOCK : piece.stop // BLOCK]
        qmap = torch.tensor(table, device=codes.device)
        return self.format.OptimState8bit(codes, scale, qmap, signed, dtype=torch.float32)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the saved state into the tensors that are there, whatever their device."""
        for number, p in enumerate(self._parameters()):
            for name, tensor in self.state[p].items():
                tensor.copy_(state_dict["state"][number][name])
