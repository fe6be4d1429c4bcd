"""Small models of many families with random weights."""

from pathlib import Path

import torch
import transformers

from core.optimizer import make_optimizer
from core.tiny import tiny_tokenizer

SHAPE = {  # head_dim 32 is the smallest for which vLLM has CPU kernels
    "vocab_size": 710, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.06,
    "max_position_embeddings": 512, "bos_token_id": None,
}  # fmt: skip
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
UNTIED = {"tie_word_embeddings": False}
FAMILIES = {  # by the prefix of transformers' class; settings
    "Llama": {**UNTIED, "attention_bias": True, "mlp_bias": True},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": UNTIED,
    "Gemma3": WINDOW,
    "Gemma2": WINDOW,
    "Phi3": UNTIED,
    "Granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.1},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}  # fmt: skip
CLASSES = {  # where the class is not named like the family
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Gemma3 with images": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
}


def save_model(family: str, folder: Path, **settings) -> Path:
    """Saves a small model of a family, with random biases too, and the tokenizer of `tiny`.

    `settings` of its config take the place of those above.
    """
    tokenizer = tiny_tokenizer()
    names = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    config_class, model_class = (getattr(transformers, name) for name in names)
    ends = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    default = config_class()
    known = default.to_dict().keys() | default.attribute_map.keys()
    settings = SHAPE | ends | FAMILIES.get(family, {}) | settings
    unknown = SHAPE.keys() - known  # such as a head_dim that follows from other settings
    config = config_class(**{k: v for k, v in settings.items() if k not in unknown})
    config.architectures = [model_class.__name__]
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(policy, steps: int = 2, lr: float = 1e-3) -> list[float]:
    """Takes optimizer steps that change every trainable weight. Returns the loss of each."""
    optimizer, losses = make_optimizer(policy, lr=lr), []
    ids = torch.tensor([[5, 77, 300, 12, 9, 41, 8] * 8], device=policy.device)
    for _ in range(steps):
        logits = policy.to_logits(policy.hidden_states(ids))[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
