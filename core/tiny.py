"""Two models that need no download: a Qwen3 with 0.88 million weights.

tiny          pretrained on demonstrations of the environments; core/tiny_weights/README.md says how
tiny-random   the same model with random weights: a warm start (--sft-steps 800) must come first;
              with the usual initializer_range of 0.02, not 0.06, it takes twice as long

The tokenizer has one token per byte, so that the model can spell, and common words of the
environments' texts (runs/pretrain_tiny).
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PRETRAINED = Path(__file__).parent / "tiny_weights"


def write_tiny(model_id: str, folder: str | os.PathLike[str], seed: int) -> None:
    """Writes the weights, config and tokenizer of "tiny" or "tiny-random" to `folder`.

    `seed` decides the random weights.
    """
    if model_id == "tiny":
        Path(folder).mkdir(parents=True, exist_ok=True)
        for file in PRETRAINED.iterdir():  # not copytree, whose error hides that of a full disk
            if file.name != "README.md":
                shutil.copyfile(file, Path(folder, file.name))
        return
    config = AutoConfig.from_pretrained(PRETRAINED)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def tiny_tokenizer() -> Any:
    """The tokenizer of both models, which encodes and decodes any text.

    >>> tiny_tokenizer().tokenize('How many r in "cherry"?')
    ['How', 'Ġmany', 'Ġ', 'r', 'Ġin', 'Ġ"', 'c', 'h', 'e', 'r', 'r', 'y', '"?']
    """
    return AutoTokenizer.from_pretrained(PRETRAINED)
