"""runs/which_model: the shapes and the terms of the memory, compared with PyTorch."""

import re
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from algorithms.common import token_logprobs
from core import cli, config
from core.optimizer import MasterAdamW
from core.piecewise_adamw import PIECE

FOLDER = Path(__file__).parent.parent / "runs/which_model"
sys.path.append(str(FOLDER))
import fit  # noqa: E402

README = (FOLDER / "README.md").read_text()
COMMANDS = re.findall(r"^    python train\.py(.*)$", README, re.MULTILINE)
PUBLISHED = {  # weights with tied embeddings counted once, as in the files of each model
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "google/gemma-3-1b-it": 999_885_952,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "Qwen/Qwen3-8B": 8_190_735_360,
}
SMALL = {
    f: fit.Model(f, f, 3, 64, 192, 4, 2, 16, 3000, tied=f in ("qwen2", "gemma3")) for f in FAMILIES
}
RANK = 16
pytestmark = pytest.mark.slow
both = pytest.mark.parametrize("rank", [0, RANK])
families = pytest.mark.parametrize("family", FAMILIES)


def build(m, rank=0, dtype=torch.float32):
    """The Hugging Face model of a shape, and its decoder."""
    config_class, model_class = FAMILIES[m.family]
    window = {"sliding_window": 32} if m.family == "gemma3" else {}  # shorter than a sequence
    shape = {
        "vocab_size": m.vocab, "hidden_size": m.width, "intermediate_size": m.mlp,
        "num_hidden_layers": m.layers, "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads, "head_dim": m.head_dim, "tie_word_embeddings": m.tied,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    model = model_class(config_class(**shape, **window)).to(dtype)
    if not rank:
        return model, model.get_decoder()
    options = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules="all-linear")
    model = get_peft_model(model, options)
    return model, model.get_base_model().get_decoder()


def saved_bytes(model, decoder, ids):
    """Bytes of all storages that a forward pass saves for its backward pass, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages, alive = {}, []

    def note(tensor):
        alive.append(tensor)  # otherwise its address could be reused
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        decoder(input_ids=ids, use_cache=False)
    return sum(n for pointer, n in storages.items() if pointer not in weights)


def peak_bytes(call):
    """Peak of the bytes that `call` allocated on the CPU."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_every_shape_has_the_published_number_of_weights():
    for m in fit.MODELS:
        with torch.device("meta"):
            model, _ = build(m)
        assert sum(p.numel() for p in model.parameters()) == PUBLISHED[m.model_id]
        assert fit.num_weights(m) == PUBLISHED[m.model_id]


@families
def test_adapter_weights_are_those_of_peft(family):
    model, _ = build(SMALL[family], RANK)
    adapters = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert fit.num_adapter_weights(SMALL[family], RANK) == adapters


@both
@families
@pytest.mark.parametrize(
    "dtype, fused",  # not fused: MPS, where weights are float32
    [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)],
)
def test_a_layer_saves_what_the_formula_says(family, rank, dtype, fused):
    m, ids = SMALL[family], torch.zeros(2, 48, dtype=torch.int64)
    measured = []
    for layers in (3, 4):  # their difference is one layer
        shape = fit.Model(**{**vars(m), "layers": layers})
        with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
            measured.append(saved_bytes(*build(shape, rank, dtype), ids))
    expected = fit.saved_per_token(m, dtype.itemsize, rank, ids.shape[1], fused)
    assert (measured[1] - measured[0]) / ids.numel() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("family, rank", [("qwen3", 0), ("gemma3", RANK)])
def test_training_peaks_at_the_sum_of_the_terms(family, rank):
    m, size = SMALL[family], (1, fit.LENGTH)
    model, decoder = build(m, rank)
    ids, mask = torch.zeros(size, dtype=torch.int64), torch.ones(1, fit.LENGTH - 1, dtype=bool)

    def train():
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        logprobs, _ = token_logprobs(hidden, ids, mask, model.get_output_embeddings())
        logprobs.sum().backward()

    train()  # allocates the gradients
    terms = fit.memory(m, "cpu", rank, 1024)
    expected = terms["training"] - terms["gradients"]
    assert 0.85 * expected < peak_bytes(train) / fit.GB < 1.02 * expected


@both
def test_the_optimizer_allocates_what_the_terms_say(rank):
    m = SMALL["qwen3"]
    model, _ = build(m, rank)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = MasterAdamW([{"params": parameters}], lr=0.1)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    terms = fit.memory(m, "cpu", rank, 1024)
    moments = [t for state in optimizer.adamw.state.values() for t in state.values() if t.ndim]
    assert sum(t.nbytes for t in moments) == pytest.approx(terms["moments"] * fit.GB)
    gradients = sum(p.grad.nbytes for p in parameters)
    assert gradients == optimizer.gradient_bytes() == pytest.approx(terms["gradients"] * fit.GB)
    optimizer.step()
    assert terms["step"] == 0 and peak_bytes(optimizer.step) < 100  # three numbers


@pytest.mark.parametrize(
    "kind, dtype", [("adamw8bit", torch.float32), ("adamw_bf16_sr", torch.bfloat16)]
)
def test_steps_in_pieces_allocate_what_the_terms_say(kind, dtype):
    pytest.importorskip("torchao")
    weight = torch.nn.Parameter(torch.zeros(PIECE + 4096, dtype=dtype))
    optimizer = MasterAdamW([{"params": [weight]}], kind=kind, lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert peak_bytes(optimizer.step) == pytest.approx(fit.TEMPORARIES[kind] * PIECE, rel=0.01)


def test_weights_below_float32_have_float32_masters_and_gradients():
    m = SMALL["qwen3"]
    model, _ = build(m, dtype=torch.bfloat16)
    optimizer = MasterAdamW([{"params": list(model.parameters())}], lr=0.1)
    sum(p.float().sum() for p in model.parameters()).backward()
    terms = fit.memory(m, "cuda", 0, 1024)
    for term, tensors in {
        "weights": list(model.parameters()),
        "masters": optimizer.masters,
        "gradients": [p.grad for p in optimizer.masters],
    }.items():
        assert sum(t.nbytes for t in tensors) == pytest.approx(terms[term] * fit.GB)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])
@both
def test_memory_grows_with_each_argument(device, rank):
    m = SMALL["qwen3"]
    peak = fit.memory(m, device, rank, 2048)["peak"]
    assert fit.memory(m, device, rank, 4096)["peak"] > peak
    assert rank == 0 or fit.memory(m, device, 2 * rank, 2048)["peak"] > peak
    for field in ("layers", "width", "mlp", "heads", "kv_heads", "head_dim", "vocab"):
        larger = fit.Model(**{**vars(m), field: 2 * getattr(m, field)})
        assert fit.memory(larger, device, rank, 2048)["peak"] > peak, field


WAYS = [(machine, *way[:2]) for machine in fit.MACHINES for way in fit.methods(machine)]


@pytest.mark.parametrize(("machine", "rank", "nf4"), WAYS, ids=lambda way: getattr(way, "name", ""))
def test_the_chosen_model_and_micro_batch_are_the_largest_that_fit(machine, rank, nf4):
    chosen = fit.largest_model(machine, rank, nf4)
    micro = fit.micro_batch(chosen, machine, rank, nf4)
    assert fit.peak(chosen, machine, rank, micro, nf4) <= machine.available
    if micro < 1024 * fit.MAX_MICRO_BATCH:
        assert fit.peak(chosen, machine, rank, micro + 1024, nf4) > machine.available
    for m in fit.MODELS:
        if fit.num_weights(m) > fit.num_weights(chosen):
            assert fit.peak(m, machine, rank, 1024, nf4) > machine.available


def test_4_bits_save_what_they_save_of_the_linear_weights():
    m = next(m for m in fit.MODELS if m.model_id == "Qwen/Qwen3-8B")
    bfloat16, nf4 = (fit.memory(m, "cuda", 32, 1024, nf4=n)["weights"] for n in (False, True))
    linear = 36 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288)  # 6.9e9 of 8.2e9 weights
    assert bfloat16 - nf4 == pytest.approx((2 - 0.5159) * linear / fit.GB, rel=1e-4)


def test_a_larger_gpu_computes_more_logits_at_a_time():
    m = next(m for m in fit.MODELS if m.vocab == 151_936)
    logits = [fit.memory(m, "cuda", 0, 4096, gpu)["logits"] for gpu in (8, 24, 80)]
    assert logits == [0.5, 1.5, 4.0]  # GB: four copies of a 64th, at most 1 GiB each


def test_the_readme_has_the_tables_of_the_script():
    table = README.split("<!-- table -->\n")[1].split("\n<!-- end of table -->")[0]
    assert table.splitlines() == fit.lines()


def test_the_readme_has_a_valid_command_for_each_machine():
    assert len(COMMANDS) == len(WAYS)
    for flags in COMMANDS:
        cfg = config.resolve(cli.parse(shlex.split(flags)))
        if find_spec("bitsandbytes") is None:  # an optional package
            cfg = replace(cfg, quantize="none")
        config.validate(cfg)
        assert cfg.max_model_len == fit.LENGTH
        assert cfg.num_prompts * cfg.group_size >= cfg.eval_num_tasks  # evaluation has no more rows
