"""The reference policy of `--kl-coef`: the policy before RL, or the model without its adapters.

With LoRA the reference is the base model with the adapters switched off; it does not contain what a
warm start taught them. Full fine-tuning needs a frozen copy of all weights, which is saved in the
run's folder, so that a resumed run has the same reference.
"""

import copy
import os
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from core import distributed
from core.model import Policy
from core.types import UsageError

FILE = "reference.safetensors"


def freeze_reference(policy: Policy, run_dir: Path, next_update: int) -> Policy:
    """The reference of a run: copied from `policy` before update 1, loaded from then on.

    Raises UsageError if `next_update` is a later one and the file of the reference is missing.
    """
    if policy.lora_rank:
        return replace(policy, value_head=None, disables_adapters=True)
    frozen = copy.deepcopy(policy.model).requires_grad_(False)
    if (run_dir / FILE).exists():
        frozen.load_state_dict(load_file(run_dir / FILE), strict=False)
    elif next_update > 1:
        raise UsageError(f"--resume {run_dir}: {FILE}, the reference of the KL, is missing")
    elif distributed.rank() == 0:
        parameters = dict(frozen.named_parameters())  # tied ones once
        part = run_dir / f".part-{FILE}"
        save_file({name: p.detach().cpu().contiguous() for name, p in parameters.items()}, part)
        os.replace(part, run_dir / FILE)
    return replace(policy, model=frozen, value_head=None)


def reference_bytes(policy: Policy) -> int:
    """Bytes that `freeze_reference` will allocate."""
    if policy.lora_rank:
        return 0
    return sum(p.numel() * p.element_size() for p in policy.model.parameters())
