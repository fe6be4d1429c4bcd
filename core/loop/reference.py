"""The reference policy of `--kl-coef`: the policy before RL, its base model, or a teacher.

With LoRA the reference is the base model with the adapters switched off. It lacks what the adapters
learnt in a warm start, or in an earlier run whose adapters go on training. Full fine-tuning needs a
frozen copy of all weights, which is saved in the run's folder, so that a resumed run has the same
reference. `--teacher` is another model with the same tokens: the KL then pulls the policy toward it
on the policy's own samples, which is on-policy distillation (arXiv:2306.13649).
"""

import copy
from dataclasses import replace
from pathlib import Path

from core.config import Config
from core.faults import UsageError
from core.files.checkpoint import copy_weights, publish_weights
from core.files.models import folder_of_model, settings_beside
from core.loading import load_policy
from core.policy import Policy


def freeze_reference(policy: Policy, run_folder: Path, next_update: int) -> Policy:
    """The reference of a run: copied from `policy` before update 1 ends, loaded from then on.

    Raises UsageError if `next_update` is a later one and its folder cannot be read.
    """
    if policy.lora_rank:
        return replace(policy, value_head=None, disables_adapters=True)
    frozen = copy.deepcopy(policy.model).requires_grad_(False)
    folder = run_folder / "reference"
    weights = dict(frozen.named_parameters())  # tied weights once
    if next_update > 1:
        copy_weights(folder, weights)
    else:
        publish_weights(folder, weights)
    return replace(policy, model=frozen, value_head=None)


def load_teacher(cfg: Config, policy: Policy) -> Policy:
    """The model of `--teacher`. Raises UsageError if its token ids differ from the policy's."""
    settings = replace(settings_beside(cfg, policy), template_options="")
    teacher = load_policy(settings, folder_of_model(cfg.teacher), flag="--teacher")
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UsageError(f"--teacher {cfg.teacher}: its tokenizer differs from that of --model-id")
    teacher.model.requires_grad_(False)
    return teacher


def reference_bytes(cfg: Config, policy: Policy) -> int:
    """Bytes that `freeze_reference` will allocate for its copy of the policy."""
    if not cfg.kl_coef or cfg.teacher or policy.lora_rank:
        return 0
    return sum(p.numel() for p in policy.model.parameters()) * policy.dtype.itemsize
