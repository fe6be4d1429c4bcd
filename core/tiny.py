"""`tiny`: a Qwen3 model with 0.8 million random weights, which needs no download.

Its tokenizer has one token per byte, so that the model can spell, plus some common words.
"""

import os

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = """
How What Which Count Reply Write Play Move Find Answer The You Your Work it is are the an of in on
to by for from with and or not out then end many much your you that this as at one two three each
all letter letters word words number answer page link board row column turn game choose move left
right up down state reward count reply write reverse order next start target
""".split()
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny(folder: str | os.PathLike[str], seed: int) -> None:
    """Writes tiny's weights (determined by `seed`), config and tokenizer to `folder`."""
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,  # rounded up to a multiple of 64
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.06,  # with 0.02, the usual value for large models, SFT is half as fast
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of all 256 bytes and of WORDS, which encodes and decodes any text.

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.tokenize('How many r in "cherry"?')
    ['How', 'Ġmany', 'Ġ', 'r', 'Ġin', 'Ġ', '"', 'c', 'h', 'e', 'r', 'r', 'y', '"', '?']
    """
    words = [w if w[0].isupper() else f"Ġ{w}" for w in WORDS]  # Ġ is the space before a word
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    ids = {token: i for i, token in enumerate(tokens)}
    # There are no merges: a word that is no token of its own is split into bytes.
    core = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tags = ["<answer>", "</answer>", "<think>", "</think>"]
    core.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
