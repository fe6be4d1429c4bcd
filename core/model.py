"""Load a policy: a hub id, a local folder, or `tiny`, which core/tiny.py builds from code.

Weights are read from safetensors alone, and code that comes with a model runs only if asked for:
without, transformers' own is used where it has some for that type of model.

Precision. Weights have `dtype`; LoRA adapters and the value head are always float32. What full
fine-tuning below float32 needs besides is in core/optimizer.py.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.logging import disable_progress_bar

from core import prefix_sharing
from core.chat_template import end_of_turn_id
from core.model_files import check_folder, check_whole, in_one_line
from core.tiny import save_tiny
from core.types import UsageError

disable_progress_bar()  # it would draw over our display; downloads keep theirs
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOGITS = 2**25  # float32 ones that exist at one time: 128 MiB, and some copies in a softmax
TREES = ("llama", "qwen2", "qwen3")  # model types that are trained on trees, where tests hold it


@dataclass
class Policy:
    """A causal language model with what sampling and training need to know of it."""

    model: Any  # Hugging Face model, or a PeftModel around one
    tokenizer: Any
    device: torch.device
    stop_ids: list[int]  # any of these ends a completion
    end_of_turn_id: int  # the one that ends a demonstration
    max_length: int  # tokens of prompt and completion together
    value_head: nn.Linear | None = None  # PPO's; reads the trunk's last hidden state
    micro_batch_tokens: int = 2048  # of a micro-batch, padding included
    checkpointed_layers: list[nn.Module] = field(
        default_factory=list
    )  # layers that keep their input only
    may_checkpoint_layers: bool = True  # whether memory may ask for that
    trust_remote_code: bool = False  # whether the model's own code may run
    disables_adapters: bool = False  # compute without the LoRA adapters, as the reference does

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model; LoRA layers, if any, sit inside it."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights; adapters and the value head may have another."""
        return self.causal_lm.get_input_embeddings().weight.dtype

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters; 0 without."""
        return self.model.peft_config["default"].r if hasattr(self.model, "peft_config") else 0

    @property
    def packs_groups(self) -> bool:
        """Whether `hidden_states` can be given a tree; the batches are then made as such."""
        return self.causal_lm.config.get_text_config()._attn_implementation == prefix_sharing.TREES

    def hidden_states(
        self, input_ids: Tensor, tree: prefix_sharing.PackedGroups | None = None
    ) -> Tensor:
        """Last hidden states [B, T, D] of right-padded `input_ids` [B, T] int64.

        Causal attention never looks at the padding behind a token, so no mask is needed. With a
        `tree` of the same sequences, each of its tokens is computed once.
        """
        for layer in self.checkpointed_layers:  # the layer alone: dropout inside it stays off
            layer.training = torch.is_grad_enabled()
        with self.model.disable_adapter() if self.disables_adapters else nullcontext():
            return self._decode(input_ids, tree)

    def _decode(self, input_ids: Tensor, tree: prefix_sharing.PackedGroups | None) -> Tensor:
        decoder = self.causal_lm.get_decoder()
        if tree is None:
            return decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        hidden = decoder(
            input_ids=tree.input_ids,
            position_ids=tree.position_ids,
            attention_mask=tree.mask,  # of four dimensions, so none is made; `attend` has the tree
            use_cache=False,
            tree=tree,
        ).last_hidden_state
        return hidden[0, tree.places]

    @property
    def logits_chunk(self) -> int:
        """Tokens whose logits may exist at one time, in the few copies that a softmax takes."""
        return max(1, LOGITS // self.causal_lm.config.get_text_config().vocab_size)

    def to_logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [N, V] of hidden states [N, D], as the model itself makes them."""
        logits = self.causal_lm.get_output_embeddings()(hidden).float()
        cap = getattr(self.causal_lm.config, "final_logit_softcapping", None)  # Gemma 2
        return cap * torch.tanh(logits / cap) if cap else logits

    def size(self) -> str:
        """'0.84M weights, 0.84M trained, cpu', for a title."""
        weights = sum(p.numel() for p in self.model.parameters())
        trained = sum(p.numel() for p in self.trainable().values())
        return f"{weights / 1e6:.2f}M weights, {trained / 1e6:.2f}M trained, {self.device}"

    def trainable(self) -> dict[str, nn.Parameter]:
        """Every parameter that training changes, by name; the value head included."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if self.value_head is not None:
            named |= {f"value_head.{n}": p for n, p in self.value_head.named_parameters()}
        return named


def load_policy(
    model_id: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    lora_rank: int = 0,
    lora_alpha: float = 0.0,
    value_head: bool = False,
    max_length: int | None = None,
    seed: int = 0,
    tiny_folder: str | os.PathLike[str] = "tiny",
    trust_remote_code: bool = False,
) -> Policy:
    """Load `model_id` (hub id, folder or "tiny") for training on `device`.

    `lora_rank` 0 trains all weights; `lora_alpha` 0 means twice the rank. `max_length` limits the
    tokens of prompt and completion together, below the model's own limit. "tiny" is written to
    `tiny_folder` first, if it isn't there. The seed decides the weights of tiny, of the adapters
    and of nothing else. `trust_remote_code` runs the code that comes with a model. Raises
    UsageError when the model, the device or the precision is not there, or such code not trusted.
    """
    where = pick_device(device)
    precision = _pick_dtype(dtype, where)
    if model_id == "tiny":
        if not Path(tiny_folder).exists():
            part = Path(tiny_folder).with_name(".part-tiny")
            save_tiny(part, seed)
            os.rename(part, tiny_folder)  # whole or not at all
        model_id = str(tiny_folder)
    model, tokenizer = _from_pretrained(model_id, precision, trust_remote_code)
    torch.manual_seed(seed)
    if lora_rank > 0:
        from peft import LoraConfig, get_peft_model

        alpha: Any = lora_alpha or 2 * lora_rank  # PEFT takes a fraction as well
        config = LoraConfig(
            task_type="CAUSAL_LM", r=lora_rank, lora_alpha=alpha, target_modules="all-linear"
        )
        with in_one_line(f"--lora-rank {lora_rank}"):
            model = get_peft_model(model, config)  # in float32: PEFT's autocast_adapter_dtype
    model.to(where)
    with in_one_line(f"--model-id {model_id}"):
        closing = end_of_turn_id(tokenizer)
    limit = model.config.get_text_config().max_position_embeddings
    policy = Policy(
        model=model,
        tokenizer=tokenizer,
        device=where,
        stop_ids=_stop_ids(model, tokenizer, closing),
        end_of_turn_id=closing,
        max_length=min(limit, max_length or limit),
        trust_remote_code=trust_remote_code,
    )
    if value_head:
        width = model.config.get_text_config().hidden_size
        policy.value_head = nn.Linear(width, 1, device=where, dtype=torch.float32)
        nn.init.zeros_(policy.value_head.weight)  # the first values are 0, not noise
        nn.init.zeros_(policy.value_head.bias)
    return policy


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto": CUDA, else Apple's MPS, else the CPU."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next((d for d, is_there in there.items() if is_there), "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device is auto, cpu, cuda, cuda:N or mps, not {name!r}") from None
    if device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"--device is auto, cpu, cuda, cuda:N or mps, not {name!r}")
    if device.type in there and not there[device.type]:
        raise UsageError(f"--device {name}: there is none on this machine; use --device auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} GPU(s)")
    return device


def _pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def _from_pretrained(model_id: str, dtype: torch.dtype, trusted: bool) -> tuple[Any, Any]:
    check_folder(model_id)
    with in_one_line(f"--model-id {model_id}: can't be loaded", trusted):
        AutoConfig.from_pretrained(model_id, trust_remote_code=trusted)
        if not trusted and "auto_map" in get_tokenizer_config(model_id):
            raise ValueError("trust_remote_code")  # without it other ids might come, unsaid
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=trusted)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_id, dtype=dtype, trust_remote_code=trusted, use_safetensors=True,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    model, report = loaded
    check_whole(model_id, report, tokenizer)
    model.config.use_cache = False  # sampling passes a cache of its own
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    full = kinds == {"full_attention"} and model.config._attn_implementation == "sdpa"
    if full and model.config.model_type in TREES and not model._auto_class:  # not its own code
        model.set_attn_implementation(prefix_sharing.TREES)
    return model, tokenizer


def _stop_ids(model: Any, tokenizer: Any, closing: int) -> list[int]:
    """The union of what the model's files call the end, and what the chat template does."""
    listed = model.generation_config.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return sorted({i for i in [*listed, tokenizer.eos_token_id, closing] if i is not None})
