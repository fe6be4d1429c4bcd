"""A base model in 4 bits under float32 LoRA adapters: QLoRA, arXiv:2305.14314.

    pip install -e ".[quantize]"
    python train.py --lora-rank 16 --quantize nf4

bitsandbytes stores each weight w of a linear layer as the nearest of 16 levels, and one scale for
each block of 64 weights. The scales have 8 bits themselves (double quantization):

    w ~ level[code] * scale(block)        4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits per weight

Each product dequantizes the weights of its layer to the policy's dtype and drops that copy
afterwards. Embedding, norms, output layer and what is not an `nn.Linear`, such as fused experts,
keep their dtype. The base is never trained, so a resumed run quantizes it to the same codes again.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def load_in_4_bits(
    model_id: str, *, dtype: torch.dtype, device: torch.device, **options: Any
) -> Any:
    """AutoModelForCausalLM.from_pretrained, which quantizes each layer as it loads it to `device`.

    Quantized layers compute without gradients as they do with them: on CPUs with AVX512-BF16 the
    first pass without gradients would store the weights in another order and multiply in bfloat16
    from then on, in training too. `options` has output_loading_info.
    """
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_id, dtype=dtype, quantization_config=config, device_map={"": device}, **options
    )
    for layer in loaded[0].modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return loaded
