"""Which model fits which machine: memory that a run needs, computed from the shapes.

    python runs/which_model/fit.py    # writes the tables into README.md

L layers of width D; A = heads * head size of the queries, K of the keys (and of the values); MLP of
width F; vocabulary V; N weights, R adapter weights; t tokens in a micro-batch; T = 1,280 tokens in
the longest sequence (a longer sequence than t is a micro-batch of its own); B rollouts; s bytes per
weight; GB = 2^30 bytes. Bytes of each term:

    weights       s N               s = 2 on CUDA (bfloat16), 4 on CPU and MPS: core/policy.py
    masters       4 N               only full fine-tuning with s = 2: core/optimizer.py
    adapters      4 R (+ s R)       float32; on CUDA vLLM has a copy in its adapter slots
    moments       8 N or 8 R        the two moments of AdamW for what is trained, float32
    gradients     4 N or 4 R        float32 also with s = 2: they are summed in the masters
    one gradient  (s + 4) V D       full: the gradient of the embedding before it is added
    activations   (L + 1) saved t   saved by each layer; one more for the gradients of a layer
                  + (4 + 3s) D t    the last norm, its output, and its rows that predict a token
    logits        16 min(V t, l)    at most 4 float32 copies of one chunk, in the backward pass;
                                    l = 2^25, on a GPU 1/256 of its bytes (at most 2^28)
    cache         2 K L s B T       keys and values of all tokens (prefill needs less than this)
                  + 2 (K + A) s B T one layer more while the cache grows, repeated for all heads
    drawing       16 V B            logits of the next token and the temporaries of sampling

With nf4 a weight of the layers has 0.516 bytes, one of the embeddings s, and the layer that is
dequantized takes s D F; with --sampler torch. runs/optimizer_memory has more options.

Weights, masters, adapters and moments are always in memory. Gradients, activations and logits are
added while training; cache and drawing while sampling. The larger of these two phases counts.
What a decoder layer saves per token, in bytes:

    norms         (4 + s) D         the input in float32, and the normalized input; 2 per layer.
                                    Gemma: 4 per layer, 8 D. Frozen weights (LoRA): 4 D
    of q and k    the same with     Qwen3 and Gemma 3
                  A + K for D
    linear inputs 2 s D             of q, k, v, and of gate, up. LoRA with s = 2: a float32 copy for
                                    each of five adapters, 20 D, and one for o, 4 A
    attention     s (2A + 2K)       q, k, v, output; 4 bytes per head for the softmax
    - of Gemma    s (4A + T)        masked by its window: keys and values of all heads, and a mask
    - on MPS      s (4A + heads T)  not fused: keys and values of all heads, and all weights
    MLP           4 s F             gate, its activation, up, their product (LoRA: 4 F for the last)
    adapters      28 rank           the outputs of the seven A matrices
"""

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from record import markdown, write_table  # noqa: E402

from core.policy import max_logits  # noqa: E402

GB = 2**30
NORMS = {"llama": (2, False), "qwen2": (2, False), "qwen3": (2, True), "gemma3": (4, True)}
LENGTH = 1280  # tokens of prompt and completions: --max-model-len
NUM_PROMPTS, GROUP_SIZE = 8, 8  # 64 rollouts at a time, and 64 held-out tasks
RANK = 32
RESERVE = 1.0  # GB for Python, PyTorch and the environments, on a CPU or Mac
NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8  # bytes of a weight with scales: core/quantize.py
MAX_MICRO_BATCH = 16  # times 1,024 tokens; larger micro-batches are hardly faster


@dataclass(frozen=True)
class Model:
    """The shape of a decoder, as in its config.json."""

    model_id: str
    family: str
    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Machine:
    name: str
    device: str  # cpu, mps, cuda
    available: float  # GB for the terms above: what the run may use, minus a reserve
    gpu: int = 0  # GB of the GPU; 0: none


MODELS = [
    Model("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", 30, 576, 1536, 9, 3, 64, 49152, True),
    Model("HuggingFaceTB/SmolLM2-360M-Instruct", "llama", 32, 960, 2560, 15, 5, 64, 49152, True),
    Model("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 24, 896, 4864, 14, 2, 64, 151936, True),
    Model("Qwen/Qwen3-0.6B", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True),
    Model("google/gemma-3-1b-it", "gemma3", 26, 1152, 6912, 4, 1, 256, 262144, True),
    Model("meta-llama/Llama-3.2-1B-Instruct", "llama", 16, 2048, 8192, 32, 8, 64, 128256, True),
    Model("Qwen/Qwen2.5-1.5B-Instruct", "qwen2", 28, 1536, 8960, 12, 2, 128, 151936, True),
    Model("Qwen/Qwen3-1.7B", "qwen3", 28, 2048, 6144, 16, 8, 128, 151936, True),
    Model("Qwen/Qwen2.5-3B-Instruct", "qwen2", 36, 2048, 11008, 16, 2, 128, 151936, True),
    Model("meta-llama/Llama-3.2-3B-Instruct", "llama", 28, 3072, 8192, 24, 8, 128, 128256, True),
    Model("Qwen/Qwen3-4B-Instruct-2507", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True),
    Model("Qwen/Qwen2.5-7B-Instruct", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False),
    Model("meta-llama/Llama-3.1-8B-Instruct", "llama", 32, 4096, 14336, 32, 8, 128, 128256, False),
    Model("Qwen/Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False),
]
MACHINES = [
    Machine("laptop CPU, 10 of 16 GB free", "cpu", 10 - RESERVE),
    Machine("Mac, 16 GB, 70% usable", "mps", 0.7 * 16 - RESERVE),
    Machine("Mac, 32 GB, 70% usable", "mps", 0.7 * 32 - RESERVE),
    *(Machine(f"GPU, {size} GB", "cuda", 0.9 * size - 1.5, size) for size in (8, 16, 24, 48, 80)),
]


def num_weights(m: Model) -> int:
    """Returns N, with tied embeddings counted once."""
    biases = m.queries + 2 * m.keys if m.family == "qwen2" else 0
    per_layer, of_heads = NORMS[m.family]
    norms = per_layer * m.width + 2 * m.head_dim * of_heads
    embeddings = m.vocab * m.width * (1 if m.tied else 2)
    return embeddings + num_linear_weights(m) + m.layers * (biases + norms) + m.width


def num_linear_weights(m: Model) -> int:
    """Returns the number of weights of q, k, v, o, gate, up and down in all layers."""
    return m.layers * (2 * m.width * (m.queries + m.keys) + 3 * m.width * m.mlp)


def num_adapter_weights(m: Model, rank: int) -> int:
    """Returns R: A and B of q, k, v, o, gate, up and down in each layer."""
    ends = 2 * (m.width + m.queries) + 2 * (m.width + m.keys) + 3 * (m.width + m.mlp)
    return rank * m.layers * ends


def saved_per_token(m: Model, size: int, rank: int, fused: bool) -> int:
    """Returns the bytes that a layer saves per token for its backward pass.

    `size`: bytes per weight; `fused`: the attention does not save its weights.
    """
    copies = rank > 0 and size < 4  # adapters read float32 copies of their inputs
    per_layer, of_heads = NORMS[m.family]
    normed = 4 if rank else 8 if m.family == "gemma3" else 4 + size
    norms = normed * (per_layer * m.width + of_heads * (m.queries + m.keys))
    inputs = 20 * m.width + 4 * m.queries if copies else 2 * size * m.width
    attention = 2 * (m.queries + m.keys) if fused and m.family != "gemma3" else 4 * m.queries
    attention += m.heads * LENGTH if not fused else LENGTH if m.family == "gemma3" else 0
    mlp = (3 * size + (4 if rank else size)) * m.mlp
    return norms + inputs + size * attention + 4 * m.heads + mlp + 28 * rank


def memory(
    m: Model, device: str, rank: int, micro: int, gpu: int = 0, nf4: bool = False
) -> dict[str, float]:
    """Returns the GB of each term and phase.

    `rank` 0: no LoRA; `micro`: tokens in a micro-batch; `gpu`: GB of the GPU, which decide the size
    of a chunk of logits.
    """
    cuda = device == "cuda"
    size, rollouts = 2 if cuda else 4, NUM_PROMPTS * GROUP_SIZE
    weights, adapters = num_weights(m), num_adapter_weights(m, rank)
    trained, largest = adapters if rank else weights, m.vocab * m.width
    tokens = max(micro, LENGTH)
    layer = saved_per_token(m, size, rank, fused=device != "mps")
    in_nf4 = num_linear_weights(m) if nf4 else 0
    terms = {
        "weights": size * (weights - in_nf4) + NF4 * in_nf4,
        "masters": 4 * weights if size < 4 and not rank else 0,
        "adapters": (4 + size * cuda) * adapters,
        "moments": 8 * trained,
        "gradients": 4 * trained,
        "one gradient": 0 if rank else (size + 4) * largest,
        "activations": ((m.layers + 1) * layer + (4 + 3 * size) * m.width) * tokens,
        "dequantized": size * m.width * m.mlp * nf4,
        "logits": 16 * min(m.vocab * tokens, max_logits(gpu * GB)),
        "cache": 2 * (m.keys * (m.layers + 1) + m.queries) * size * LENGTH * rollouts,
        "drawing": 16 * m.vocab * rollouts,
    }
    gb = {name: num_bytes / GB for name, num_bytes in terms.items()}
    gb["always"] = sum(gb[n] for n in ("weights", "masters", "adapters", "moments"))
    during = ("gradients", "one gradient", "activations", "dequantized", "logits")
    gb["training"] = sum(gb[n] for n in during)
    gb["sampling"] = gb["cache"] + gb["drawing"]
    gb["peak"] = gb["always"] + max(gb["training"], gb["sampling"])
    return gb


def micro_batch(m: Model, machine: Machine, rank: int, nf4: bool = False) -> tuple[int, float]:
    """Returns the tokens of the largest micro-batch that fits, a multiple of 1,024, and the GB that
    it needs; 0 tokens: none fits.
    """
    for n in range(1024 * MAX_MICRO_BATCH, 0, -1024):
        needed = memory(m, machine.device, rank, n, machine.gpu, nf4)["peak"]
        if needed <= machine.available:
            return n, needed
    return 0, 0.0


def largest(machine: Machine, rank: int, nf4: bool) -> str:
    """Returns the model with the most weights that fits on the machine, and its micro-batch."""
    if nf4 and machine.device != "cuda":
        return ""
    fitting = [m for m in MODELS if micro_batch(m, machine, rank, nf4)[0]]
    m = max(fitting, key=num_weights)
    tokens, needed = micro_batch(m, machine, rank, nf4)
    return f"{m.model_id.partition('/')[2]}, {tokens}, {needed:.1f} GB"


def lines() -> list[str]:
    machines, models = [], []
    for machine in MACHINES:
        fitting = [largest(machine, *way) for way in ((0, False), (RANK, False), (RANK, True))]
        machines.append([machine.name, f"{machine.available:.1f} GB", *fitting])
    for m in MODELS:
        needs = [memory(m, d, r, 1024)["peak"] for d in ("cuda", "cpu", "mps") for r in (0, RANK)]
        needs.insert(2, memory(m, "cuda", RANK, 1024, nf4=True)["peak"])
        models.append([m.model_id, f"{num_weights(m) / 1e9:.3f}B", *(f"{x:.1f}" for x in needs)])
    by_machine = "machine | available | all weights | LoRA, rank 32 | QLoRA, rank 32"
    note = "GB with the smallest micro-batch, one sequence, and 2^25 logits at a time:"
    by_model = "model | weights | GPU, all | GPU, LoRA | GPU, QLoRA | CPU, all | CPU, LoRA"
    table = markdown(f"{by_model} | Mac, all | Mac, LoRA", models)
    return [*markdown(by_machine, machines), "", note, "", *table]


if __name__ == "__main__":
    write_table(HERE, lines())
