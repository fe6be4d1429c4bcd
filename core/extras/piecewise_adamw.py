"""AdamW with less memory: moments of 8 bits, or bfloat16 weights without float32 masters.

    pip install -e ".[quantize]"
    python train.py --optimizer adamw8bit
    python train.py --optimizer adamw_bf16_sr --dtype bfloat16

adamw8bit: a moment is a code for one of 256 values, times the float32 scale of its block of 256
weights (arXiv:2110.02861): 1 + 4/256 bytes instead of 4. The step is bitsandbytes'. Tensors with
fewer than 4,096 weights, or with a number of weights that 256 does not divide, keep float32
moments.

adamw_bf16_sr: computes the new weight in float32 and rounds it to one of the two bfloat16 numbers
beside it, to each with the probability that makes the expected value exact (arXiv:2010.06192). So
small updates are not lost, although there are no masters. The first moment has the dtype of the
weight. The second moment is float32: with beta2 = 0.999 a bfloat16 number changes by less than half
a rounding step when the gradients get smaller, so it would never fall.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from core.seeds import ROUNDING, derive_seed

BLOCK = 256  # weights that share the scale of an 8-bit moment
MIN_QUANTIZED = 4096  # weights; as bitsandbytes, so that biases and norms stay in float32
PIECE = 2**22  # weights computed at a time, with about 30 bytes of temporaries for each


def optimizer_options(kind: str, seed: int) -> dict[str, Any]:
    """The options of MasterAdamW for adamw8bit or adamw_bf16_sr; `seed`: of the rounding."""
    make = partial(PiecewiseAdamW, kind=kind, seed=seed)
    return {"make_adamw": make, "has_masters": kind == "adamw8bit"}


class PiecewiseAdamW(torch.optim.Optimizer):
    """AdamW whose state is flat tensors that exist from the start.

    `kind` is adamw8bit (float32 parameters) or adamw_bf16_sr (bfloat16 ones are rounded
    stochastically, with random numbers derived from `seed` and the number of the step).
    """

    def __init__(self, groups: list[dict[str, Any]], kind: str, seed: int, weight_decay: float):
        super().__init__(groups, {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay})
        self.seed = seed
        if kind == "adamw8bit":
            from bitsandbytes import functional  # an optional package

            self.update_8bit: Any = functional.optimizer_update_8bit_blockwise
            self.maps = [functional.create_dynamic_map(signed) for signed in (True, False)]
        for p in (p for group in self.param_groups for p in group["params"]):
            n, zeros = p.numel(), partial(torch.zeros, device=p.device)
            state = self.state[p] = {"step": torch.zeros(())}
            if kind == "adamw8bit" and n >= MIN_QUANTIZED and n % BLOCK == 0:
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = zeros(n, dtype=torch.uint8)
                    state[f"{name}_scale"] = zeros(n // BLOCK)
            else:
                state |= {"exp_avg": zeros(n, dtype=p.dtype), "exp_avg_sq": zeros(n)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step with every parameter that has a gradient."""
        taken = max(int(state["step"]) for state in self.state.values())
        generator = torch.Generator(self.param_groups[0]["params"][0].device)
        generator.manual_seed(derive_seed(self.seed, ROUNDING, taken))
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad.reshape(-1), group, generator)

    def _step(
        self, p: nn.Parameter, gradient: Tensor, group: dict[str, Any], generator: torch.Generator
    ) -> None:
        state, weights = self.state[p], p.detach().reshape(-1)
        m, v, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
        lr, (beta1, beta2), eps, decay = (group[k] for k in ("lr", "betas", "eps", "weight_decay"))
        if "exp_avg_scale" in state:
            self.maps = [table.to(p.device) for table in self.maps]
            self.update_8bit(
                "adam", gradient, weights, m, v, beta1, beta2, 0.0, 0.0, eps, int(step) + 1, lr,
                *self.maps, state["exp_avg_scale"], state["exp_avg_sq_scale"], decay,
            )  # fmt: skip
        else:
            for piece in zip(*(x.split(PIECE) for x in (weights, gradient, m, v)), strict=True):
                w, g, average, square = (x.float() for x in piece)  # float32 ones are no copies
                adamw(
                    [w], [g], [average], [square], [], [step.clone()], amsgrad=False, beta1=beta1,
                    beta2=beta2, lr=lr, weight_decay=decay, eps=eps, maximize=False,
                )  # fmt: skip
                if p.dtype == torch.bfloat16:
                    piece[0].copy_(round_stochastically(w, generator))
                    piece[2].copy_(average)
        step += 1
        if weights.data_ptr() != p.data_ptr():  # p is not contiguous: `weights` is a copy
            p.copy_(weights.view_as(p))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the saved state into the tensors that are there, whatever their device."""
        for number, state in enumerate(self.state.values()):
            for name, tensor in state.items():
                tensor.copy_(state_dict["state"][number][name])


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """Float32 `x`, rounded to bfloat16 with the probabilities that make the expected value exact.

    Adds a random number below one step of bfloat16, and then rounds towards 0.
    """
    noise = torch.randint(2**16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    return (x.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32)
