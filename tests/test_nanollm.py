"""NanoLLM against the trainer, on real vLLM: one set of weights, one set of log-probs.

These tests need vLLM: `pytest -m vllm`, or on a GPU `pytest -m vllm --device cuda`. There LoRA is
tested in bfloat16 only, because vLLM's LoRA kernels take no float32 on a GPU.
"""

import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import save_small
from test_process_state import state
from test_sampler import stream_staggered, trainer_gap
from test_train import ROOT, metrics_of

from core import load_trace, nanollm, weight_sharing
from core.model import load_policy
from core.nanollm import NanoLLM
from core.optimizer import make_optimizer
from core.sampler import SamplingParams, TorchSampler
from core.types import UsageError

pytestmark = pytest.mark.vllm

PROMPTS = [[65, 66, 67], [68] * 70, [70, 71]] * 8
PARAMS = SamplingParams(max_tokens=64, temperature=0.8, seed=1)
# biases, tied and untied heads, padded vocabularies, sliding windows
SHAPES = {
    "qwen3": {"tie_word_embeddings": False, "vocab_size": 710},
    "qwen2": {"tie_word_embeddings": True, "hidden_size": 128},
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "gemma3": {"vocab_size": 721},
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    # 32 is the smallest head that vLLM's CPU kernels support; 0.06 is the scale of `tiny`
    shape = {"head_dim": 32, "initializer_range": 0.06, **SHAPES[request.param]}
    if request.param == "qwen2":
        del shape["head_dim"]
    return save_small(request.param, tmp_path_factory.mktemp("vllm"), **shape)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_small("qwen3", tmp_path_factory.mktemp("vllm"), head_dim=32)


@pytest.fixture(scope="session")
def load(device):
    """`load_policy`, in float32 unless a GPU has no kernels for it."""

    def load_one(folder, **options):
        in_16_bits = device == "cuda" and options.get("lora_rank", 0)
        dtype = "bfloat16" if in_16_bits else "float32"
        return load_policy(folder, **{"device": device, "dtype": dtype, **options})

    return load_one


@pytest.fixture
def start():
    """Start NanoLLM for a policy; the test's end closes it."""
    samplers = []

    def start_one(policy):
        samplers.append(NanoLLM(policy))
        return samplers[-1]

    yield start_one
    for sampler in samplers:
        sampler.close()


def sample(sampler, prompts=PROMPTS, params=PARAMS):
    with sampler:
        return sampler.sample(prompts, params)


def gap(policy, completions):
    """|trainer - sampler| of at least 1,000 sampled tokens, in nats."""
    gaps = trainer_gap(policy, completions, PARAMS.temperature, PROMPTS)
    assert len(gaps) >= 1000
    return gaps


def is_rounding(gaps, dtype):
    """In float32 each gap is below 1e-4 nats, in bfloat16 their mean is below 5e-2."""
    return gaps.max() < 1e-4 if dtype == torch.float32 else gaps.mean() < 5e-2


def train(policy, steps, lr):
    """Take optimizer steps that change every trainable weight a little."""
    optimizer = make_optimizer(policy, lr=lr)
    ids = torch.tensor([[5, 77, 300, 12, 9, 41, 8] * 8], device=policy.device)
    for _ in range(steps):
        logits = policy.to_logits(policy.hidden_states(ids))[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def engine_model(sampler):
    [model] = sampler.engine.apply_model(lambda model: model)
    return model


def base_weights(policy):
    named = policy.causal_lm.named_parameters()
    return {name: parameter for name, parameter in named if "lora_" not in name}


MINUTES = pytest.mark.seeds  # that CI has not got


@pytest.mark.parametrize(("dtype", "lora_rank"), [
    ("float32", 0), ("bfloat16", 8), pytest.param("float32", 8, marks=MINUTES),
    pytest.param("bfloat16", 0, marks=MINUTES),
])  # fmt: skip
def test_logprobs_are_the_trainers_before_and_after_20_steps(
    folder, start, dtype, lora_rank, load, device
):
    if dtype == "float32" and lora_rank and device == "cuda":
        pytest.skip("vLLM has no LoRA kernels for float32 on a GPU, and NanoLLM refuses it")
    policy = load(str(folder), dtype=dtype, lora_rank=lora_rank)
    sampler = start(policy)
    before = {name: parameter.clone() for name, parameter in base_weights(policy).items()}
    old_completions = sample(sampler)
    old_gaps = gap(policy, old_completions)
    train(policy, steps=20, lr=1e-2 if lora_rank else 1e-3)
    sampler.sync()
    new_gaps = gap(policy, sample(sampler))
    method = "LoRA" if lora_rank else "full"
    for moment, gaps in {"at the start": old_gaps, "after 20 steps": new_gaps}.items():
        print(f"| {type(policy.causal_lm).__name__} | {dtype} | {method} | {moment} "
              f"| {gaps.mean():.1e} | {gaps.max():.1e} | {len(gaps)} |")  # fmt: skip
        assert is_rounding(gaps, policy.dtype)
        assert device == "cuda" or gaps.mean() < (1e-5 if dtype == "float32" else 2e-2)
    # a sampler with the old weights would have been seen
    assert gap(policy, old_completions).mean() > 0.1
    changed = [not torch.equal(p, before[name]) for name, p in base_weights(policy).items()]
    assert not any(changed) if lora_rank else all(changed)
    weight_sharing.check_bound(engine_model(sampler), sampler.weights.shared)


def test_fp32_head_is_the_engines_too(qwen3, start, load):
    policy = load(str(qwen3), dtype="bfloat16", fp32_head=True)
    sampler = start(policy)
    assert engine_model(sampler).logits_processor.head_dtype == torch.float32
    gaps = gap(policy, sample(sampler))
    print(f"bfloat16, --fp32-head: mean {gaps.mean():.1e}, max {gaps.max():.1e} nats")
    assert gaps.mean() < 2e-2
    weight_sharing.check_bound(engine_model(sampler), sampler.weights.shared)


def test_a_policy_in_4_bits_is_refused(qwen3, load):
    pytest.importorskip("bitsandbytes")
    policy = load(str(qwen3), dtype="bfloat16", lora_rank=8, quantize="nf4")
    with pytest.raises(UsageError, match="leave --quantize out"):
        NanoLLM(policy)


class TestEachFamily:
    """Facts that need only one engine per family."""

    @pytest.fixture(scope="class")
    def engine(self, folder, load):
        policy = load(str(folder))
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.01)  # unlike the weights of other tests that are still in memory
        sampler = NanoLLM(policy)
        yield sampler
        sampler.close()

    def test_there_is_no_second_copy_of_a_weight(self, engine):
        sample(engine)
        policy = engine.policy
        ours = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
        theirs = {p.untyped_storage().data_ptr() for p in engine_model(engine).parameters()}
        assert ours == theirs
        gc.unfreeze()  # vLLM freezes its objects, which get_objects leaves out
        num_compared = 0
        for other in gc.get_objects():
            is_tensor = type(other) is torch.Tensor or issubclass(type(other), torch.nn.Parameter)
            if not is_tensor or other.device.type != policy.device.type:
                continue
            if not other.untyped_storage().nbytes():
                continue
            num_compared += 1
            if other.untyped_storage().data_ptr() in ours:
                continue
            for name, weight in base_weights(policy).items():
                if other.numel() >= weight.numel() > 1000 and other.dtype == weight.dtype:
                    start = other.reshape(-1)[: weight.numel()]
                    assert not torch.equal(start, weight.reshape(-1)), name
        assert num_compared > 50

    def test_greedy_completions_equal_those_of_torch_sampler(self, engine):
        greedy = SamplingParams(max_tokens=64, temperature=0)
        completions = sample(engine, PROMPTS, greedy)
        expected = TorchSampler(engine.policy).sample(PROMPTS, greedy)
        assert [(c.token_ids, c.text, c.finish_reason) for c in completions] == [
            (c.token_ids, c.text, c.finish_reason) for c in expected
        ]
        assert trainer_gap(engine.policy, completions, 1.0, PROMPTS).max() < 1e-4


class TestOneEngine:
    """Facts that share one engine."""

    @pytest.fixture(scope="class")
    def engine(self, qwen3, load):
        policy = load(str(qwen3), max_length=160)
        sampler = nanollm.make_sampler("vllm", policy)
        assert isinstance(sampler, NanoLLM)
        yield sampler
        sampler.close()

    def test_completion_ends_with_a_stop_token_or_at_the_limit(self, engine, monkeypatch):
        stop_ids = list(range(0, 704, 3))  # a third of all tokens ends a completion
        monkeypatch.setattr(engine.policy, "stop_ids", stop_ids)
        completions = sample(engine, PROMPTS, SamplingParams(max_tokens=3, seed=5))
        assert {c.finish_reason for c in completions} == {"stop", "length"}
        for completion in completions:
            stopped = completion.token_ids[-1] in stop_ids
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert not set(completion.token_ids[:-1]) & set(stop_ids)
            assert stopped or len(completion.token_ids) == 3
            assert len(completion.logprobs) == len(completion.token_ids)
            text_ids = completion.token_ids[:-1] if stopped else completion.token_ids
            assert completion.text == engine.policy.tokenizer.decode(text_ids)
        assert trainer_gap(engine.policy, completions, 1.0, PROMPTS).max() < 1e-4

    def test_seed_determines_a_call_and_the_process_keeps_its_random_state(self, engine):
        before = state()
        draws = [
            [c.token_ids for c in sample(engine, PROMPTS, SamplingParams(max_tokens=8, seed=seed))]
            for seed in (1, 2, 1)
        ]
        assert draws[0] == draws[2] != draws[1]
        assert draws[0][0] != draws[0][3]  # equal prompts
        assert state() == before

    def test_prefix_cache_serves_equal_prompts_until_sync(self, engine, monkeypatch):
        num_cached = []
        step = engine.engine.step

        def record():
            outputs = step()
            num_cached.extend(output.num_cached_tokens for output in outputs)
            return outputs

        monkeypatch.setattr(engine.engine, "step", record)
        prompt, one_token = list(range(100)), SamplingParams(max_tokens=1)
        with engine:
            engine.sample([prompt] * 4, one_token)
            engine.sync()
            engine.sample([prompt], one_token)
        assert sorted(num_cached[:4]) == [0, 96, 96, 96]  # whole blocks of 32
        assert num_cached[4:] == [0]

    def test_logprobs_are_renormalised_over_what_top_k_and_top_p_keep(self, engine):
        completions = sample(engine, PROMPTS, SamplingParams(max_tokens=32, top_k=1, seed=3))
        assert all(abs(p) < 1e-6 for c in completions for p in c.logprobs)
        completions = sample(engine, PROMPTS, SamplingParams(max_tokens=32, top_p=0.5, seed=3))
        assert trainer_gap(engine.policy, completions, 1.0, PROMPTS).mean() > 0.1

    def test_kept_ids_come_from_vllm_and_greedy_stays_greedy(self, engine, monkeypatch):
        """vLLM checks the requests; its CPU build returns no masks, so each is the token itself."""
        prompts, step, checked = PROMPTS[:3], engine.engine.step, []
        greedy = sample(engine, prompts, SamplingParams(max_tokens=8, temperature=0))

        def step_with_masks():
            outputs = step()
            for output in outputs:
                for completion in output.outputs:
                    kept = [[token_id] for token_id in completion.token_ids]
                    completion.sampling_mask = vllm.outputs.SamplingMask(kept)
                    checked.append(kept)
            return outputs

        import vllm.outputs

        monkeypatch.setattr(engine, "with_kept_ids", True)
        monkeypatch.setattr(engine.engine.model_config, "return_sampling_mask", True)
        monkeypatch.setattr(engine.engine, "step", step_with_masks)
        for params in (
            SamplingParams(max_tokens=8, temperature=0),
            SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9),
            SamplingParams(max_tokens=8, top_k=5),
        ):
            completions = sample(engine, prompts, params)
            assert [c.kept_ids for c in completions] == [
                [[i] for i in c.token_ids] for c in completions
            ]
            if params.temperature == 0:
                assert [c.token_ids for c in completions] == [c.token_ids for c in greedy]
        assert len(checked) == 9

    def test_kv_cache_is_allocated_only_inside_with(self, engine):
        on_gpu = engine.policy.device.type == "cuda"
        free_asleep = torch.cuda.mem_get_info()[0] if on_gpu else 0
        spare = 16 << 20 if on_gpu else 0  # buffers of kernels

        def cache_bytes():
            if on_gpu:
                return free_asleep - torch.cuda.mem_get_info()[0]
            return sum(storage.nbytes() for storage, _ in engine.cpu_cache)

        def addresses():
            return {name: p.data_ptr() for name, p in engine_model(engine).named_parameters()}

        assert (on_gpu or engine.cpu_cache) and cache_bytes() == 0
        before = addresses()
        with engine:
            assert cache_bytes() >= nanollm.CPU_CACHE_BYTES / 2
            completions = engine.sample(PROMPTS, PARAMS)
        assert cache_bytes() <= spare
        with pytest.raises(RuntimeError, match="only inside `with sampler:`"):
            engine.sample(PROMPTS, PARAMS)
        assert sample(engine) == completions
        assert addresses() == before

    @pytest.mark.parametrize(("window", "length"), [(None, 64), (40, 104), (100, 144), (300, 64)])
    def test_probe_is_longer_than_the_window(self, engine, monkeypatch, window, length):
        """At most 144 tokens, so that 16 more fit; a window beyond the context has no effect."""
        monkeypatch.setattr(engine.policy.causal_lm.config, "sliding_window", window)
        lengths, sample = [], engine.sample
        monkeypatch.setattr(
            engine,
            "sample",
            lambda prompts, *a: lengths.extend(map(len, prompts)) or sample(prompts, *a),
        )
        with engine:
            assert engine._measure_gap() < 1e-5
        assert lengths == [8, length]

    def test_engine_samples_again_after_an_exception_in_on_progress(self, engine):
        expected = sample(engine)
        ticks = iter([None, None, None])
        with pytest.raises(StopIteration), engine:
            engine.sample(PROMPTS, PARAMS, lambda: next(ticks))
        assert sample(engine) == expected

    @pytest.mark.parametrize("num_ticks", [None, 3, 0], ids=["finished", "stopped", "unscheduled"])
    def test_engine_accepts_that_its_cache_is_freed(self, engine, monkeypatch, num_ticks):
        """vLLM refuses it while a request is left, finished ones included."""
        ticks = iter(range(10**6) if num_ticks is None else range(num_ticks))
        with suppress(StopIteration), engine:
            engine.sample(PROMPTS, PARAMS, lambda: next(ticks))
        if engine.policy.device.type == "cuda":
            return  # leaving the context has freed it
        discarded = []  # the CPU build cannot free it, but checks the same conditions
        executor = engine.engine.engine_core.engine_core.model_executor
        monkeypatch.setattr(executor, "discard", discarded.append)
        engine.engine.sleep(level=0)
        engine.engine.release_kv_cache_memory()
        assert discarded == [("kv_cache",)]
        assert engine.engine.wake_up()

    def test_sync_raises_while_a_completion_is_being_sampled(self, engine):
        calls = iter([lambda: None, lambda: None, engine.sync])
        with pytest.raises(RuntimeError, match="still being sampled"), engine:
            engine.sample(PROMPTS, PARAMS, lambda: next(calls)())

    def test_completion_stays_within_the_context_length(self, engine):
        with engine, pytest.raises(UsageError, match="a prompt of 160 tokens does not fit"):
            engine.sample([[65] * 160], PARAMS)
        greedy = SamplingParams(max_tokens=64, temperature=0)
        [completion] = sample(engine, [[65] * 156], greedy)
        assert len(completion.token_ids) <= 4


def test_requests_that_come_while_others_are_sampled_have_the_same_tokens(qwen3, start, load):
    """Greedy ones those of `sample`; drawn ones those of their own seeds, whenever they come."""
    policy = load(str(qwen3))
    policy.stop_ids = sorted({*range(0, 704, 40), *policy.stop_ids})
    sampler, greedy = start(policy), SamplingParams(max_tokens=24, temperature=0)
    drawn = SamplingParams(max_tokens=24, seed=3)
    prompts = PROMPTS[:6]
    with sampler:
        expected = sampler.sample(prompts, greedy)
        found = stream_staggered(sampler, prompts, greedy, gap=3)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        by_gap = [stream_staggered(sampler, prompts, drawn, gap) for gap in (1, 4)]
    assert [c.token_ids for c in by_gap[0]] == [c.token_ids for c in by_gap[1]]
    assert by_gap[0][0].token_ids != by_gap[0][3].token_ids  # equal prompts, different streams
    assert trainer_gap(policy, by_gap[1], 1.0, prompts).max() < 1e-4


@pytest.mark.parametrize("rank", [1, 256])  # 4 and 8 are in other tests
def test_smallest_and_largest_lora_rank(qwen3, start, rank, load):
    policy = load(str(qwen3), lora_rank=rank)
    sampler = start(policy)
    assert len(sampler.slots) == 2 * 7  # all linear layers of both layers
    train(policy, steps=3, lr=1e-2)
    sampler.sync()
    assert is_rounding(gap(policy, sample(sampler)), policy.dtype)


def test_sync_copies_adapters_only_while_the_engine_is_awake(qwen3, start, load):
    """Asleep, the slots of a GPU may have no memory; entering copies what was missed."""
    policy = load(str(qwen3), lora_rank=4)
    sampler = start(policy)
    before = [slot.engine_B.clone() for slot in sampler.slots]
    train(policy, steps=1, lr=1e-2)
    sampler.sync()
    assert all(torch.equal(s.engine_B, B) for s, B in zip(sampler.slots, before, strict=True))
    with sampler:
        scaled = [(s.engine_B, (s.scaling * s.B).to(s.engine_B.dtype)) for s in sampler.slots]
        assert all(torch.equal(engine_B, B) for engine_B, B in scaled)
    assert not any(torch.equal(s.engine_B, B) for s, B in zip(sampler.slots, before, strict=True))


def test_start_measures_the_gap_of_trained_adapters_and_changes_nothing(qwen3, start, load):
    policy = load(str(qwen3), lora_rank=4)
    before, random_state = {n: p.clone() for n, p in policy.trainable().items()}, state()
    sampler = start(policy)
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable().items())
    with sampler:
        rounding = sampler._measure_gap()
        assert rounding < (1e-5 if policy.dtype == torch.float32 else 5e-2)
        assert all(torch.equal(p, before[n]) for n, p in policy.trainable().items())
        [slot, *_] = sampler.slots
        sampler.slots[0] = slot._replace(engine_B=slot.engine_B.clone())
        slot.engine_B.zero_()  # an adapter that is not copied
        assert sampler._measure_gap() > max(1e-3, 2 * rounding)
    assert state() == random_state


def test_model_that_vllm_computes_differently_is_refused_with_the_gap(qwen3, load):
    policy = load(str(qwen3))
    for layer in policy.causal_lm.model.layers:
        layer.self_attn.scaling *= 2
    with pytest.raises(UsageError, match=r"Qwen3\w+: .* differ by \d\.\de-0\d .* --sampler torch"):
        NanoLLM(policy)


class Recorder:
    """Stands for a vLLM engine on a GPU; records which of its methods are called."""

    def __init__(self, num_scheduled):
        self.calls, self.engine_core, self.scheduler = [], self, self
        self.batch_queue = list(range(num_scheduled))

    def __getattr__(self, name):
        return lambda *args, **options: self.calls.append((name, *args, *options.values()))

    def has_requests(self):
        return bool(self.batch_queue)

    def step(self):
        self.calls.append(("step", self.batch_queue.pop()))


def test_calls_that_free_and_allocate_the_cache_of_a_gpu(qwen3, load):
    sampler = object.__new__(NanoLLM)
    sampler.policy = load(str(qwen3))
    sampler.policy.device = torch.device("cuda")
    sampler.engine, sampler.slots, sampler.cpu_cache = Recorder(2), [], []
    sampler.copies_weights, sampler.weights, sampler.awake = False, SimpleNamespace(), True
    engine = sampler.engine
    sampler.__exit__()
    assert engine.calls[:2] == [("step", 1), ("step", 0)]  # what vLLM had scheduled ahead
    assert engine.calls[2:] == [("sleep", 0), ("release_kv_cache_memory",)]
    engine.calls.clear()
    sampler.sync()
    assert engine.calls == []
    sampler.close()  # asleep: unmapped memory would be freed twice
    assert engine.calls == [("wake_up",), ("shutdown",)]


def test_failed_start_start_and_close_leave_the_process_unchanged(
    qwen3, monkeypatch, start, load, request
):
    policy = load(str(qwen3))
    request.addfinalizer(partial(torch.set_float32_matmul_precision, "highest"))
    torch.set_float32_matmul_precision("high")  # vLLM's default is highest
    folders, before = set(os.listdir(tempfile.gettempdir())), state()
    with monkeypatch.context() as patch:
        patch.setattr(load_trace._Trace, "record", lambda *args: None)
        with pytest.raises(UsageError, match=r"vLLM could not start: vLLM loads no weight into"):
            NanoLLM(policy)
    assert state() == before
    assert not multiprocessing.active_children()
    assert not torch.distributed.is_initialized()
    assert not {
        f for f in set(os.listdir(tempfile.gettempdir())) - folders if f.startswith("nanollm-")
    }
    sampler = start(policy)
    assert state() == before
    assert gap(policy, sample(sampler)).max() < 1e-4
    sampler.close()
    assert state() == before
    assert torch.get_float32_matmul_precision() == "high"


def test_too_little_memory_is_one_line_with_the_numbers(qwen3, load, monkeypatch):
    policy = load(str(qwen3))
    free = psutil.virtual_memory()._replace(available=2**18)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    if policy.device.type == "cuda":
        monkeypatch.setattr(nanollm, "_memory_arguments", lambda *_: {"kv_cache_memory_bytes": 1})
    with pytest.raises(UsageError, match=r"^a sequence of 512 tokens needs .* --max-model-len"):
        NanoLLM(policy)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_cache_has_the_bytes_that_vllm_specifies_for_each_layer(
    family, tmp_path, start, load, monkeypatch
):
    """Both layers of qwen3 keep 16,384 tokens; one of gemma3 keeps a window and what is computed
    at once. A block has 32 tokens, 2 heads of keys and values, and 32 numbers per head."""
    policy = load(str(save_small(family, tmp_path, head_dim=32, max_position_embeddings=16384)))
    if policy.device.type == "cuda":
        pytest.skip("on a GPU the cache gets all memory that is free")
    monkeypatch.setattr(nanollm, "CPU_CACHE_BYTES", 1)
    sampler = start(policy)
    at_once = sampler.engine.vllm_config.scheduler_config.max_num_batched_tokens
    block = 32 * 2 * 2 * 32 * 4
    blocks = 16384 // 32
    if family == "qwen3":
        expected = 2 * (blocks + 1) * block  # one block stays empty
    else:
        expected = (blocks + -(-(8 - 1 + at_once) // 32) + 1 + 1) * block
        assert expected < 0.8 * 2 * blocks * block
    assert sum(num_bytes for _, num_bytes in sampler.cpu_cache) == expected
    [completion] = sample(sampler, [[65] * 4096], SamplingParams(max_tokens=4))
    assert len(completion.token_ids) <= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "leave --quantize out"),
        ({"lora": 257}, "--lora-rank 257: vLLM's limit is 256"),
        ({"lora": 4, "device": "cuda"}, "no LoRA kernels for float32 on a GPU"),
        ({"device": "mps"}, r"the installed vLLM is for (cpu|cuda), not mps"),
        ({"device": "cuda:2"}, "CUDA_VISIBLE_DEVICES=2"),
    ],
)
def test_policy_that_vllm_cannot_share_is_refused(qwen3, change, message, load):
    policy = load(str(qwen3), lora_rank=change.get("lora", 0), dtype="float32")
    if "quantization_config" in change:
        policy.causal_lm.config.quantization_config = change["quantization_config"]
    policy.device = torch.device(change.get("device", policy.device))
    with pytest.raises(UsageError, match=message):
        NanoLLM(policy)


def test_multimodal_model_is_refused_by_name(qwen3, load, monkeypatch):
    policy = load(str(qwen3))
    config = policy.causal_lm.config
    monkeypatch.setattr(config, "get_text_config", lambda: type(config)(), raising=False)
    with pytest.raises(UsageError, match=r"supports no multimodal models such as Qwen3ForCausalLM"):
        NanoLLM(policy)


SMALL = """--sampler vllm --sft-steps 6 --sft-batch-size 4 --num-updates 4 --num-prompts 3
    --group-size 4 --eval-num-tasks 4 --eval-every 2 --save-every 2 --max-tokens 24
    """.split()


@pytest.mark.parametrize(
    "flags",
    [["--algo", "grpo"], ["--algo", "ppo"], ["--lora-rank", "4"]],
    ids=["grpo", "ppo", "lora"],
)
def test_resumed_run_equals_the_whole_run_and_its_gap_is_rounding(command, flags, device):
    dtype = "bfloat16" if device == "cuda" and "--lora-rank" in flags else "float32"
    flags = [*flags, "--device", device, "--dtype", dtype]
    whole = command(*flags, "--run-name", "whole", "--lr", "1e-3", *SMALL)
    assert (whole[0], whole[2]) == (0, "")
    records = metrics_of(Path("runs/whole"))
    updates = [r for r in records if r.get("update", 0) > 0]
    assert len(updates) == 4
    for record in updates:
        assert record["tokens/trained"] == record["tokens/sampled"] > 0
        assert record["gap/logprob_mean"] < (1e-5 if dtype == "float32" else 5e-2)
        assert record["gap/logprob_max"] < (1e-4 if dtype == "float32" else math.inf)
    half = command(*flags, "--run-name", "half", "--lr", "1e-3", *SMALL, "--num-updates", "2")
    assert half[0] == 0
    assert command("--resume", "runs/half", "--num-updates", "4")[0] == 0
    assert metrics_of(Path("runs/half")) == records


def test_ctrl_c_while_vllm_samples_saves_and_the_resumed_run_is_the_same(
    command, monkeypatch, device
):
    from vllm.v1.engine.llm_engine import LLMEngine

    flags = ["--device", device, "--dtype", "float32", *SMALL]
    command("--run-name", "whole", *flags)
    steps = 0
    step = LLMEngine.step

    def interrupt_once(engine):
        nonlocal steps
        steps += 1
        if steps == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupt_once)
    code, out, _ = command("--run-name", "stopped", *flags)
    assert code == 130
    assert "stopped and saved" in out
    assert command("--resume", "runs/stopped")[0] == 0
    assert metrics_of(Path("runs/stopped")) == metrics_of(Path("runs/whole"))


@pytest.mark.slow
@pytest.mark.seeds
def test_default_run_learns_with_vllm(tmp_path):
    finished = subprocess.run(
        [sys.executable, ROOT / "train.py", "--sampler", "vllm", "--num-updates", "20"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    print(finished.stdout)
    records = metrics_of(tmp_path / "runs/grpo-letter_counting-1")
    name = "eval/letter_counting/accuracy"
    accuracy = [r[name] for r in records if name in r]
    assert accuracy[0] <= 0.60
    assert accuracy[-1] >= 0.90
    assert max(r.get("gap/logprob_max", 0) for r in records) < 1e-4


def test_without_a_gpu_kept_ids_are_refused_before_the_engine_starts(qwen3, load):
    policy = load(str(qwen3))
    if policy.device.type == "cpu":
        with pytest.raises(UsageError, match="--top-k and --top-p with --sampler vllm"):
            NanoLLM(policy, with_kept_ids=True)
