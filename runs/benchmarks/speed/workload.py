"""What all scripts here measure with: a model of random weights, prompts of a length, a reward.

The model never ends a completion, by construction and on any engine: one coordinate of the residual
stream is 1 in every token's embedding, no layer writes to it, and the row of the end token has
`FAR` there, so its logit is far below all others. So both sides sample exactly as many tokens, and
neither pays for a ban on the end.

    save_model("folder", SHAPES["4M"])           # read by picoRL, TRL, transformers and vLLM alike
    make("speed:prompt_tokens=50").reset(seed=3)
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[i]) for i in (2, 3)]

from core.types import Message
from environments.base import Env, Step
from environments.registry import register

LETTERS = "bcdfghjklm"  # no word of the tiny tokenizer can be spelt with them: a token each
TEMPLATE_TOKENS = 3  # <|user|> .. <|end|><|assistant|>
COORDINATE, FAR = 0, -1000.0


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with tied embeddings."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 384  # at least what the tokenizer of `tiny` has

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices; each token is multiplied with each of them once."""
        attention = 2 * self.width * (self.queries + self.keys)
        return self.layers * (attention + 3 * self.width * self.mlp)


SHAPES = {
    "minute": Shape(32, 64, 2, 4, 2, 8),
    "tiny": Shape(128, 384, 4, 4, 2, 32),  # core/tiny.py
    "4M": Shape(256, 768, 5, 4, 2, 64),
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936),
    "1.7B": Shape(2048, 6144, 28, 16, 8, 128, 151936),
    "4B": Shape(2560, 9728, 36, 32, 8, 128, 151936),
}


def save_model(folder: str, shape: Shape, dtype: str = "float32") -> int:
    """Write a model of random weights that never ends, and its tokenizer. Returns its weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from core.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[COORDINATE] = 0
            layer.mlp.down_proj.weight[COORDINATE] = 0
        model.model.embed_tokens.weight[:, COORDINATE] = 1
        model.model.embed_tokens.weight[tokenizer.eos_token_id, COORDINATE] = FAR
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def prompt(seed: int, tokens: int) -> list[Message]:
    """A chat that is exactly so many tokens long with the template of `tiny`."""
    rng = random.Random(seed)
    text = "".join(rng.choices(LETTERS, k=tokens - TEMPLATE_TOKENS))
    return [{"role": "user", "content": text}]


def reward(text: str) -> float:
    """Share of vowels: cheap, and not the same for all."""
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))


@register("speed")
class Speed(Env):
    """One turn; `prompt_tokens`: the length of its prompt."""

    def __init__(self, prompt_tokens: int = 50):
        self.prompt_tokens = prompt_tokens

    def reset(self, seed: int) -> list[Message]:
        return prompt(seed, self.prompt_tokens)

    def step(self, response: str) -> Step:
        return Step(None, reward(response), True, {"correct": False})


def grouped(policy: Any, num_prompts: int, group_size: int, tokens: int) -> list[list[int]]:
    """Token ids of P distinct prompts, each G times, side by side."""
    from core.chat_template import prompt_ids

    distinct = [prompt_ids(policy.tokenizer, prompt(seed, tokens)) for seed in range(num_prompts)]
    return [ids for ids in distinct for _ in range(group_size)]
