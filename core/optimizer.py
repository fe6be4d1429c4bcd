"""AdamW that loses no update, whatever the precision of the weights.

Below float32, each weight has a float32 master here: bfloat16 has 8 bits of mantissa, so an update
smaller than |w|/256 is rounded away; at a learning rate of 1e-6 that is nearly every update.

Bytes a weight, for bfloat16 weights that are all trained (more: runs/optimizer_memory):

    --optimizer   weight   master   gradient (float32)   moments   sum
    adamw         2        4        4                    8         18
    adamw8bit     2        4        4                    2.03      12.03

adamw8bit is bitsandbytes' AdamW8bit (pip install -e ".[quantize]"): a moment is a code for one of
256 values, times the float32 scale of its block of 256 weights (arXiv:2110.02861). Tensors with
fewer than 4,096 weights have float32 moments.

In float16, gradients below 6e-8 become 0. So losses are multiplied by `loss_scale` before the
backward pass, and gradients divided by it afterwards (arXiv:1710.03740). A gradient that overflows
skips its step and halves the scale, which doubles after 200 steps without overflow.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from core import distributed
from core.config import Config
from core.faults import UsageError
from core.policy import Policy

Groups = list[dict[str, Any]]  # parameter groups of an optimizer
MakeAdamW = Callable[[Groups], torch.optim.Optimizer]
FIRST_SCALE, MIN_SCALE = 2.0**16, 1.0  # loss scale of float16
GROWTH_INTERVAL = 200  # steps without overflow after which the loss scale doubles


def fused_adamw(groups: Groups) -> torch.optim.Optimizer:
    """PyTorch's AdamW. Its moments exist from the start, before vLLM takes the memory."""
    adamw = torch.optim.AdamW(groups, fused=True, weight_decay=0.0)
    for group in groups:
        for p in group["params"]:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            adamw.state[p] = {"step": torch.zeros((), device=p.device), **moments}
    return adamw


def adamw_8bit(groups: Groups) -> torch.optim.Optimizer:
    """AdamW8bit of bitsandbytes, an optional package. Its moments exist from the start, too."""
    from bitsandbytes.optim import AdamW8bit

    adamw = AdamW8bit(groups, weight_decay=0.0)
    for group_index, group in enumerate(adamw.param_groups):
        for index, p in enumerate(group["params"]):
            adamw.init_state(group, p, group_index, index)
    return adamw


class MasterAdamW:
    """AdamW, without weight decay, over float32 masters of low-precision weights, or over float32
    weights themselves. `make_adamw` makes the optimizer of these."""

    def __init__(
        self, groups: Groups, loss_scale: float = 1.0, make_adamw: MakeAdamW = fused_adamw
    ):
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (weight, its master)
        self.hooks: list[Any] = []
        groups = [{**g, "params": [*map(self._master, g["params"])]} for g in groups]
        self.masters = [p for g in groups for p in g["params"]]
        self.adamw = make_adamw(groups)
        self.scales_loss = loss_scale != 1
        self.loss_scale, self.steps_at_scale = loss_scale, 0

    def _master(self, weight: nn.Parameter) -> nn.Parameter:
        if weight.dtype == dtype_of_master(weight):
            return weight
        master = nn.Parameter(weight.detach().float())
        self.pairs.append((weight, master))

        def collect(p: Tensor) -> None:  # adds up the gradients of micro-batches, in float32
            assert p.grad is not None
            if master.grad is None:
                master.grad = torch.empty_like(master).copy_(p.grad)
            else:
                master.grad.add_(p.grad)
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

    def scale_lr(self, factor: float) -> None:
        """Sets the learning rates to this fraction of those that the optimizer was made with."""
        for group in self.adamw.param_groups:
            group["lr"] = factor * group["initial_lr"]

    def backward(self, loss: Tensor, outputs: Iterable[Tensor | None] = ()) -> None:
        """Adds the gradient of `loss` to the gradients of the current step.

        `outputs` are those of the model. If the gradient with respect to all of them is 0, as where
        all advantages are 0, the backward pass through the model is left out.
        """
        loss = loss * self.loss_scale
        with_graph = [x for x in outputs if x is not None and x.requires_grad]
        if not with_graph:
            loss.backward()
            return
        gradients = torch.autograd.grad(loss, with_graph, allow_unused=True, materialize_grads=True)
        for output, gradient in zip(with_graph, gradients, strict=True):
            output.grad = gradient  # for report.html
        if any(gradient.any() for gradient in gradients):
            torch.autograd.backward(with_graph, gradients)

    def sum_gradients(self) -> None:
        """Replaces the gradients by their sums over the ranks."""
        distributed.all_reduce_gradients(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        """A step of AdamW on the masters, and its result in the weights."""
        for group in self.adamw.param_groups:
            if "fused" in group:  # takes elements in the order of their memory; vLLM may change it
                group["fused"] = all(p.is_contiguous() for p in group["params"])
        memory = [p.data for p in self.masters]
        self.adamw.step()
        for p, data in zip(self.masters, memory, strict=True):
            if p.data_ptr() != data.data_ptr():  # bitsandbytes has laid it out in another order
                p.data = data.copy_(p.data)
        for weight, master in self.pairs:  # in place: the sampler may share the tensor
            weight.copy_(master)

    def clip_and_step(
        self, max_norm: float, finite_loss: bool = True, only_value_head: bool = False
    ) -> tuple[float, bool]:
        """Clips the gradients to `max_norm` (0: no clipping), and steps.

        Skips the step if the loss or a gradient is not finite, and if all gradients are 0: AdamW's
        moments would move the weights all the same. `only_value_head`: step the value head alone.
        Drops the gradients. Returns (norm before clipping, whether a step was taken).
        """
        if only_value_head:
            for p in self.adamw.param_groups[0]["params"]:
                p.grad = None
        if self.loss_scale != 1:
            for p in self.masters:
                p.grad = None if p.grad is None else p.grad / self.loss_scale
        total_norm = get_total_norm([p.grad for p in self.masters if p.grad is not None])
        clip_grads_with_norm_(self.masters, max_norm or math.inf, total_norm)
        norm = float(total_norm)
        finite = finite_loss and math.isfinite(norm)
        stepped = finite and norm > 0
        if stepped:
            self.step()
        if self.scales_loss and finite_loss:
            self.steps_at_scale += 1
            if not finite:
                self.loss_scale, self.steps_at_scale = max(MIN_SCALE, self.loss_scale / 2), 0
            elif self.steps_at_scale == GROWTH_INTERVAL:
                self.loss_scale, self.steps_at_scale = self.loss_scale * 2, 0
        self.zero_grad()
        return norm, stepped

    def gradient_bytes(self) -> int:
        """Bytes of the gradients, which exist only during training."""
        return sum(p.nbytes for p in self.masters)

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
        """Restores what `state_dict` returned, and copies the masters into the weights.

        The learning rates stay as they are: those of the settings, which a resume may change.
        Weights as precise as their masters must have been restored before.
        """
        groups = self.adamw.state_dict()["param_groups"]
        self.adamw.load_state_dict(state["adamw"] | {"param_groups": groups})
        for moments in self.adamw.state.values():  # may come from weights in another layout
            tensors = {name: x for name, x in moments.items() if isinstance(x, Tensor)}
            moments |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        for (weight, master), saved in zip(self.pairs, state["masters"], strict=True):
            master.copy_(saved)
            weight.copy_(master)
        self.loss_scale, self.steps_at_scale = state["scale"]


def dtype_of_master(weight: Tensor) -> torch.dtype:
    """float32, or the dtype of the weight if that is more precise."""
    return torch.promote_types(weight.dtype, torch.float32)


def make_optimizer(
    policy: Policy, lr: float, value_lr: float = 0.0, make_adamw: MakeAdamW = fused_adamw
) -> MasterAdamW:
    """An optimizer of all that `policy` trains; `value_lr` 0: `lr` for the head."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    groups: Groups = [{"params": trained, "lr": lr, "initial_lr": lr}]
    if policy.value_head is not None:
        head = [*policy.value_head.parameters()]
        value_lr = value_lr or lr
        groups.append({"params": head, "lr": value_lr, "initial_lr": value_lr})
    loss_scale = FIRST_SCALE if policy.dtype == torch.float16 else 1.0
    return MasterAdamW(groups, loss_scale, make_adamw)


def optimizer_for(cfg: Config, policy: Policy) -> MasterAdamW:
    """The optimizer of a run, with the learning rates of RL.

    Raises UsageError if it does not suit the device.
    """
    if cfg.optimizer == "adamw8bit" and policy.device.type == "mps":
        reason = "bitsandbytes has no 8-bit step for MPS"
        raise UsageError(f"--optimizer adamw8bit: {reason}; add --device cpu")
    make_adamw = adamw_8bit if cfg.optimizer == "adamw8bit" else fused_adamw
    return make_optimizer(policy, cfg.lr, cfg.options.value_lr, make_adamw)
