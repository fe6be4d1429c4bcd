"""The reference policy of `--kl-coef`: the policy before RL, its base model, or a teacher.

With LoRA the reference is the base model with the adapters switched off; it does not contain what a
warm start taught them. Full fine-tuning needs a frozen copy of all weights, which is saved in the
run's folder, so that a resumed run has the same reference. `--teacher` is another model with the
same tokens: the KL then pulls the policy toward it on the policy's own samples, which is on-policy
distillation (arXiv:2306.13649).
"""

import copy
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from core import distributed
from core.config import SMOLLM2, Config
from core.model import Policy, load_policy
from core.smollm2 import smollm2_folder
from core.tiny import PRETRAINED
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


def load_teacher(cfg: Config, policy: Policy) -> Policy:
    """The model of `--teacher`. Raises UsageError if its token ids differ from the policy's."""
    dtype = str(policy.dtype).removeprefix("torch.")
    teacher = load_policy(
        _teacher_path(cfg), device=str(policy.device), dtype=dtype, max_length=cfg.max_model_len,
        trust_remote_code=cfg.trust_remote_code, fp32_head=cfg.fp32_head, flag="--teacher",
    )  # fmt: skip
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
        trusted = cfg.trust_remote_code
        try:
            config = AutoConfig.from_pretrained(_teacher_path(cfg), trust_remote_code=trusted)
            with torch.device("meta"):  # the shapes without the weights
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UsageError(f"--teacher {cfg.teacher}: can't be loaded: {reason}") from error
    return sum(p.numel() for p in model.parameters()) * policy.dtype.itemsize


def _teacher_path(cfg: Config) -> str:
    """A Hub id or a folder, which transformers can load."""
    if cfg.teacher == SMOLLM2:
        return str(smollm2_folder())
    return str(PRETRAINED) if cfg.teacher == "tiny" else cfg.teacher
