"""AdamW that loses no update, whatever the precision of the weights.

Below float32, each weight has a float32 master here: bfloat16 has 8 bits of mantissa, so an update
smaller than |w|/256 is rounded away; at a learning rate of 1e-6 that is nearly every update.

In float16, gradients below 6e-8 become 0. So losses are multiplied by `loss_scale` before the
backward pass, and gradients divided by it afterwards (arXiv:1710.03740). A gradient that overflows
skips its step and halves the scale, which doubles after 200 steps without overflow.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from core import distributed
from core.model import Policy

FIRST_SCALE, MIN_SCALE, GROWTH_INTERVAL = 2.0**16, 1.0, 200  # loss scale of float16; steps


class MasterAdamW:
    """AdamW over float32 masters of low-precision weights; plain AdamW for float32 weights."""

    def __init__(self, groups: list[dict[str, Any]], loss_scale: float = 1.0, **options: Any):
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (weight, its master)
        self.hooks: list[Any] = []
        groups = [{**g, "params": [self._master(p) for p in g["params"]]} for g in groups]
        self.masters = [p for g in groups for p in g["params"]]
        self.adamw = torch.optim.AdamW(groups, fused=True, **options)
        for p in self.masters:  # before vLLM takes the memory
            zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[p] = {"step": torch.zeros((), device=p.device), **zeros}
        self.scales_loss = loss_scale != 1
        self.loss_scale, self.steps_at_scale = loss_scale, 0

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype in (torch.float32, torch.float64):
            return weight
        master = nn.Parameter(weight.detach().float())
        self.pairs.append((weight, master))

        def collect(p: Tensor) -> None:  # adds the gradients of micro-batches up in float32
            grad = p.grad.float()  # type: ignore[union-attr]
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            p.grad = None

        self.hooks.append(weight.register_post_accumulate_grad_hook(collect))
        return master

    def release(self) -> None:
        """Removes the hooks and the moments, so that another optimizer can take over."""
        for hook in self.hooks:
            hook.remove()
        self.adamw.state.clear()

    def set_lr(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss` to the gradients of the current step."""
        (loss * self.loss_scale).backward()

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for weight, master in self.pairs:
            weight.copy_(master)  # in place: the sampler may share the tensor

    def clip_and_step(
        self, max_norm: float, finite_loss: bool = True, only_value_head: bool = False
    ) -> tuple[float, bool]:
        """Sums the gradients over all ranks, clips them to `max_norm` (0: no clipping), and steps.

        Skips the step if the loss or a gradient is not finite, and if all gradients are 0: AdamW's
        moments would move the weights all the same. `only_value_head`: step the value head alone.
        Drops the gradients. Returns (norm before clipping, whether a step was taken).
        """
        if only_value_head:
            for p in self.adamw.param_groups[0]["params"]:
                p.grad = None
        distributed.all_reduce_gradients(self.masters)
        if self.loss_scale != 1:
            for p in self.masters:
                p.grad = None if p.grad is None else p.grad / self.loss_scale
        norm = float(clip_grad_norm_(self.masters, max_norm or math.inf))
        finite = finite_loss and math.isfinite(norm)
        stepped = finite and norm > 0
        if stepped:
            self.step()
        if self.scales_loss and finite_loss:
            self._adapt_loss_scale(overflow=not finite)
        self.zero_grad()
        return norm, stepped

    def _adapt_loss_scale(self, overflow: bool) -> None:
        self.steps_at_scale += 1
        if overflow:
            self.loss_scale, self.steps_at_scale = max(MIN_SCALE, self.loss_scale / 2), 0
        elif self.steps_at_scale == GROWTH_INTERVAL:
            self.loss_scale, self.steps_at_scale = self.loss_scale * 2, 0

    def gradient_bytes(self) -> int:
        """Bytes of the float32 gradients, which exist only during training."""
        return sum(4 * p.numel() for p in self.masters)

    def zero_grad(self) -> None:
        """Drops all gradients, those of an interrupted backward pass included."""
        self.adamw.zero_grad()
        for weight, _ in self.pairs:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """AdamW's state, the masters, and the loss scale with its number of steps."""
        return {
            "adamw": self.adamw.state_dict(),
            "masters": [master.data for _, master in self.pairs],
            "scale": [self.loss_scale, self.steps_at_scale],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned, and copies the masters into the weights."""
        self.adamw.load_state_dict(state["adamw"])
        for (weight, master), saved in zip(self.pairs, state["masters"], strict=True):
            master.copy_(saved)
            weight.copy_(master)
        self.loss_scale, self.steps_at_scale = state["scale"]


def make_optimizer(policy: Policy, lr: float, value_lr: float = 0.0) -> MasterAdamW:
    """AdamW without weight decay over all that `policy` trains; `value_lr` 0: `lr` for the head."""
    head = [] if policy.value_head is None else list(policy.value_head.parameters())
    rest = [p for p in policy.model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": lr}]
    if head:
        groups.append({"params": head, "lr": value_lr or lr})
    loss_scale = FIRST_SCALE if policy.dtype == torch.float16 else 1.0
    return MasterAdamW(groups, loss_scale, weight_decay=0.0)
