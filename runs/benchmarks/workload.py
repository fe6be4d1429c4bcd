"""The workload of all scripts here: a model with random weights, prompts, a reward.

The model never ends a completion, on any engine. One coordinate of the residual stream is 1 in the
embedding of every token, no layer writes to it, and the output row of the end token has `FAR`
there, so the logit of the end token is over 100 below all others, in any dtype and also after
thousands of steps of a learning rate of 2e-5: its probability is 0 in float32. Both sides of a
comparison therefore sample exactly the same number of tokens, and neither spends time on banning
the end token.

    save_model("folder", SHAPES["4M"])           # picoRL, TRL, transformers and vLLM can load it
    make("speed:prompt_tokens=50").reset(seed=3)

python runs/benchmarks/workload.py FOLDER 0.6B bfloat16 saves a model.
"""

import gc
import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]

from core.types import Message
from environments.base import Env, Step
from environments.plumbing.registry import register

DIGITS = "0123456789"  # one token each, for the tokenizers of tiny and of smollm2
TEMPLATE_TOKENS = {"tiny": 3, "smollm2": 30}  # of the chat template, by the tokenizer's model
WORK = {"num_prompts": 8, "group_size": 8, "max_tokens": 64}  # completions of exactly 64 tokens
PROMPT_TOKENS = (50, 200)  # one row of the table each
COORDINATE, FAR = 0, -1000.0  # logits stay finite in float16


@dataclass(frozen=True)
class Shape:
    """The shape of a Qwen3 with tied embeddings."""

    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 704  # at least the vocabulary of the tiny tokenizer


SHAPES = {
    "tiny": Shape(128, 384, 4, 4, 2, 32, 704),  # core/tiny.py
    "4M": Shape(256, 768, 5, 4, 2, 64),
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151936),
    "1.7B": Shape(2048, 6144, 28, 16, 8, 128, 151936),
    "4B": Shape(2560, 9728, 36, 32, 8, 128, 151936),
}


def save_model(folder: str, shape: Shape, dtype: str = "float32") -> int:
    """Saves a model with random weights and its tokenizer. Returns the number of weights."""
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


def save_smollm2(folder: str) -> int:
    """Saves `smollm2` in float32 with the embeddings of the end tokens set to 0.

    Their logits are then 0 too, far below those of likely tokens.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from core.files.smollm2 import smollm2_folder

    converted = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype="float32")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    model.get_input_embeddings().weight.data[ends] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def memory_used() -> float:
    """Returns the GiB in use on the GPU, or the resident memory of this process on a CPU."""
    import psutil
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return psutil.Process().memory_info().rss / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def prompt(seed: int, tokens: int, tokenizer: str = "tiny") -> list[Message]:
    """Returns a chat of exactly `tokens` tokens with the tokenizer and template of that model."""
    rng = random.Random(seed)
    text = "".join(rng.choices(DIGITS, k=tokens - TEMPLATE_TOKENS[tokenizer]))
    return [{"role": "user", "content": text}]


def reward(text: str) -> float:
    """Returns the fraction of vowels: cheap to compute, and different between completions."""
    return sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text))


@register("speed")
class Speed(Env):
    """One turn; `prompt_tokens`: tokens of the prompt with the `tokenizer` of that model."""

    def __init__(self, prompt_tokens: int = 50, tokenizer: str = "tiny"):
        self.prompt_tokens, self.tokenizer = prompt_tokens, tokenizer

    def reset(self, seed: int) -> list[Message]:
        return prompt(seed, self.prompt_tokens, self.tokenizer)

    def step(self, response: str) -> Step:
        return Step(None, reward(response), True, {"correct": False})


if __name__ == "__main__":
    folder, name, kind = sys.argv[1:]
    save_model(folder, SHAPES[name], kind)
