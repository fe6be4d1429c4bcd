"""The reference policy of `--kl-coef`: the policy before RL, its base model, or a teacher.

With LoRA the reference is the base model with the adapters switched off; it does not contain what a
warm start, or the run whose adapters are trained on, taught them. Full fine-tuning needs a frozen
copy of all weights, which is saved in the run's folder, so that a resumed run has the same
reference. `--teacher` is another model with the same tokens: the KL then pulls the policy toward it
on the policy's own samples, which is on-policy distillation (arXiv:2306.13649).
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core import distributed
from core.config import Config
from core.faults import UsageError
from core.loading import reads_cache
from core.policy import Policy
from core.run.checkpoint import copy_weights, save_weights
from core.run.files import sealed, unseal
from core.run.models import folder_of, load_policy

FOLDER = "reference"


def freeze_reference(policy: Policy, run_dir: Path, next_update: int) -> Policy:
    """The reference of a run: copied from `policy` before update 1 ends, loaded from then on.

    Raises UsageError if `next_update` is a later one and its folder is missing or damaged.
    """
    if policy.lora_rank:
        return replace(policy, value_head=None, disables_adapters=True)
    frozen = copy.deepcopy(policy.model).requires_grad_(False)
    folder, weights = run_dir / FOLDER, dict(frozen.named_parameters())  # tied ones once
    if next_update > 1:
        if fault := unseal(folder)[1]:
            raise UsageError(f"--resume: {folder}, the reference of the KL, {fault}: restore the "
                             "folder, or start again with another --run-name")  # fmt: skip
        copy_weights(folder, weights)
    elif distributed.rank() == 0:
        with sealed(folder, {}) as part:
            save_weights(part, weights)
    return replace(policy, model=frozen, value_head=None)


def load_teacher(cfg: Config, policy: Policy) -> Policy:
    """The model of `--teacher`. Raises UsageError if its token ids differ from the policy's."""
    settings: dict[str, Any] = {
        "device": str(policy.device), "dtype": str(policy.dtype).removeprefix("torch."),
        "template_options": "", "template_date": "",  # it reads no messages
    }  # fmt: skip
    teacher = load_policy(replace(cfg, **settings), cfg.teacher, flag="--teacher")
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UsageError(f"--teacher {cfg.teacher}: its tokenizer differs from that of --model-id")
    teacher.model.requires_grad_(False)
    return replace(teacher, micro_batch_tokens=policy.micro_batch_tokens)


def reference_bytes(cfg: Config, policy: Policy) -> int:
    """Bytes that the reference will allocate."""
    if not cfg.kl_coef or (policy.lora_rank and not cfg.teacher):
        return 0
    model = policy.model
    if cfg.teacher:
        teacher, trusted = folder_of(cfg.teacher), cfg.trust
        from_cache = reads_cache(teacher, "--teacher")
        try:
            config = AutoConfig.from_pretrained(
                teacher, trust_remote_code=trusted, local_files_only=from_cache
            )
            with torch.device("meta"):  # the shapes without the weights
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"--teacher {cfg.teacher}: can't be loaded: {reason}") from error
    return sum(p.numel() for p in model.parameters()) * policy.dtype.itemsize
