"""`tiny`, the policy that needs no download: a Qwen3 of 0.8 million random weights.

Its tokenizer has every byte as a token (so it can spell) besides some common words. It is saved to
a folder and loaded from there, by the same `from_pretrained` as any other model.
"""

import os

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TINY_WORDS = """
How What Which Count Reply Write Play Move Find Answer The You Your Work it is are the an of in on
to by for from with and or not out then end many much your you that this as at one two three each
all letter letters word words number answer page link board row column turn game choose move left
right up down state reward count reply write reverse order next start target
""".split()
TINY_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny(folder: str | os.PathLike[str], seed: int) -> None:
    """Write the embedded policy to `folder`, as `save_pretrained` does; the seed decides it all."""
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        # 0.02, right for a width of thousands, is so small at 128 that learning takes twice as long
        initializer_range=0.06,
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
    """Every byte is a token, so any text can be written and read back; so are some whole words.

    >>> tok = tiny_tokenizer()
    >>> tok.tokenize('How many r in "cherry"?')
    ['How', 'Ġmany', 'Ġ', 'r', 'Ġin', 'Ġ', '"', 'c', 'h', 'e', 'r', 'r', 'y', '"', '?']
    """
    words = [w if w[0].isupper() else f"Ġ{w}" for w in TINY_WORDS]  # Ġ: the space before it
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    ids = {token: i for i, token in enumerate(vocab)}
    # without merges, a stretch of text is either a whole word of the vocabulary or single bytes
    core = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tags = ["<answer>", "</answer>", "<think>", "</think>"]
    core.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    core.add_special_tokens([AddedToken(t, special=True) for t in ["<|pad|>", "<|end|>", *roles]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
