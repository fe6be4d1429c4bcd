"""AdamW that loses no update, whatever the precision of the weights.

Below float32, each weight has a float32 master here: bfloat16 has 8 bits of mantissa, so an update
smaller than |w|/256 would be rounded away, and at a learning rate of 1e-6 nearly all are.

float16 has the bits but not the range: gradients below 6e-8 would be 0. So its losses are
multiplied by `scale` before the backward, and gradients divided by it after (arXiv:1710.03740).
When one overflowed, the scale is halved and the pass made again; it doubles in quiet times.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from core import distributed
from core.model import Policy

SCALE, LEAST_SCALE, PATIENCE = 2.0**16, 2.0, 200  # of float16, to begin with; steps


class MasterAdamW:
    """AdamW whose float32 masters stand behind low-precision weights; plain AdamW for float32 ones.

    Gradients of low-precision weights are summed in float32 as each micro-batch's backward makes
    them; `step` updates the masters and copies them into the weights in place, so that whoever
    shares the tensors sees the new values at once.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any):
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (weight, its master)
        self.hooks: list[Any] = []
        groups = [{**g, "params": [self._master(p) for p in g["params"]]} for g in groups]
        self.adamw = torch.optim.AdamW(groups, fused=True, **options)  # without temporaries
        self.param_groups = self.adamw.param_groups
        self.masters = [p for g in self.param_groups for p in g["params"]]
        self.scale, self.steps_at_scale = 1.0, 0
        self.finite = True  # all losses since the last step

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype == torch.float32:
            return weight
        master = nn.Parameter(weight.detach().float())
        self.pairs.append((weight, master))

        def collect(p: Tensor) -> None:
            grad = p.grad.float()  # type: ignore[union-attr]
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            p.grad = None

        self.hooks.append(weight.register_post_accumulate_grad_hook(collect))
        return master

    def release(self) -> None:
        """Leave the weights to another optimiser."""
        for hook in self.hooks:
            hook.remove()

    def backward(self, loss: Tensor) -> None:
        """Add up the gradients of a loss, `scale` times as large until `clip_and_step`."""
        self.finite = self.finite and (self.scale == 1 or bool(loss.isfinite()))
        (loss * self.scale).backward()

    def overflowed(self) -> bool:
        """Whether some rank's gradients grew too large for float16; they are dropped then, and the
        next ones half as large. A loss that isn't finite is no fault of the scale."""
        if self.scale <= LEAST_SCALE:  # or 1, where it isn't needed
            return False
        finite = all(bool(p.grad.isfinite().all()) for p in self.masters if p.grad is not None)
        told = {"overflows": float(not finite), "lost": float(not self.finite)}
        told = distributed.all_reduce_metrics(told)
        if told["overflows"] == 0 or told["lost"] > 0:
            return False
        self.zero_grad()
        self.scale, self.steps_at_scale = self.scale / 2, 0
        return True

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for weight, master in self.pairs:
            weight.copy_(master)

    def clip_and_step(
        self, max_norm: float, finite: bool = True, head_only: bool = False
    ) -> tuple[float, bool]:
        """Scale the gradients down to `max_norm` (0: don't) and step, then drop them.

        The gradients of all ranks are added up first. No step is taken unless the loss was `finite`
        and the gradients are. `head_only`: of the value head alone. Returns (norm before clipping,
        whether a step was taken).
        """
        if head_only:
            for p in self.param_groups[0]["params"]:
                p.grad = None
        distributed.all_reduce_gradients(self.masters)
        if self.scale != 1:
            for p in self.masters:
                p.grad = None if p.grad is None else p.grad / self.scale
        norm = float(clip_grad_norm_(self.masters, max_norm or math.inf))
        stepped = finite and math.isfinite(norm)
        if stepped:
            self.step()
            self.steps_at_scale += 1
        if self.scale > 1 and self.steps_at_scale == PATIENCE:
            self.scale, self.steps_at_scale = self.scale * 2, 0
        self.zero_grad()
        return norm, stepped

    def memory_to_come(self) -> int:
        """Bytes of moments that the first step will allocate: two float32 for each weight."""
        return sum(8 * p.numel() for p in self.masters if p not in self.adamw.state)

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for weight, _ in self.pairs:
            weight.grad = None  # of a backward that broke off
        self.finite = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "adamw": self.adamw.state_dict(),
            "masters": [m.data for _, m in self.pairs],
            "scale": [self.scale, self.steps_at_scale],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.param_groups = self.adamw.param_groups
        for (weight, master), saved in zip(self.pairs, state["masters"], strict=True):
            master.copy_(saved)
            weight.copy_(master)
        self.scale, self.steps_at_scale = state["scale"]


def make_optimizer(policy: Policy, lr: float, value_lr: float = 0.0) -> MasterAdamW:
    """AdamW (0.9, 0.999; no weight decay) over all that is trainable; the value head at `value_lr`.

    Raises RuntimeError if a trainable parameter would be left out.
    """
    trainable = policy.trainable()
    head = [p for n, p in trainable.items() if n.startswith("value_head.")]
    rest = [p for n, p in trainable.items() if not n.startswith("value_head.")]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": lr}]
    if head:
        groups.append({"params": head, "lr": value_lr or lr})
    if sum(len(g["params"]) for g in groups) != len(trainable):
        raise RuntimeError("a trainable parameter is missing from the optimiser")
    optimizer = MasterAdamW(groups, weight_decay=0.0)
    if policy.dtype == torch.float16:
        optimizer.scale = SCALE
    return optimizer
