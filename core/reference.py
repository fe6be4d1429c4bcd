"""The policy that `--kl-coef` holds on to: as it was when RL began, or without its adapters.

Under LoRA the reference is the base with the adapters switched off while it scores: no copy, and
what a warm start taught them is not in it. In full fine-tuning it is a frozen copy of all weights,
as much memory again; it is written to the run's folder, so that a resumed run has the same one.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from core import distributed
from core.model import Policy
from core.types import UsageError

FILE = "reference.safetensors"


def make_reference(policy: Policy, run: Path, update: int) -> Policy:
    """The reference of a run that has done `update` updates: made at its beginning, read later.

    Raises UsageError if RL has begun and the reference's file is gone.
    """
    if policy.lora_rank:
        return policy
    frozen = copy.deepcopy(policy.model).requires_grad_(False)
    if (run / FILE).exists():
        frozen.load_state_dict(load_file(run / FILE), strict=False)
    elif update > 0:
        raise UsageError(f"--resume {run}: {FILE} is gone, and without it KL has no reference")
    elif distributed.rank() == 0:
        names = dict(frozen.named_parameters())  # tied ones once
        part = run / f".part-{FILE}"
        save_file({name: p.detach().cpu().contiguous() for name, p in names.items()}, part)
        os.replace(part, run / FILE)
    return replace(policy, model=frozen, value_head=None)


@contextmanager
def as_reference(reference: Policy) -> Iterator[Policy]:
    """Inside, the policy computes as the reference: under LoRA, without its adapters."""
    with torch.no_grad():
        if not reference.lora_rank:
            yield reference
            return
        with reference.model.disable_adapter():
            yield replace(reference, value_head=None)


def reference_memory(policy: Policy) -> int:
    """Bytes that a reference will take besides the policy."""
    if policy.lora_rank:
        return 0
    return sum(p.numel() * p.element_size() for p in policy.model.parameters())
