"""NanoLLM against the trainer, on real vLLM: one set of weights, one set of log-probs.

These tests need vLLM's build for CPUs: `pytest -m vllm`. runs/benchmarks/gpu_check.py is for GPUs.
"""

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from conftest import metrics_of, save_small
from test_process_state import state
from test_sampler import check_ends, check_first_tokens, staggered, trainer_gap

from core import nanollm, weight_sharing
from core.faults import UsageError
from core.loading import load_policy
from core.nanollm import NanoLLM
from core.sampler import Request, SamplingParams, TorchSampler

sys.path.append(str(Path(__file__).parents[1] / "runs/families"))
from families import train

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


def load(folder, **options):
    return load_policy(str(folder), **{"device": "cpu", "dtype": "float32", **options})


@pytest.fixture
def start():
    """Start NanoLLM for a policy; the test's end closes it."""
    samplers = []

    def start_one(policy, **options):
        samplers.append(NanoLLM(policy, **options))
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


def engine_model(sampler):
    [model] = sampler.engine.apply_model(lambda model: model)
    return model


def base_weights(policy):
    named = policy.causal_lm.named_parameters()
    return {name: parameter for name, parameter in named if "lora_" not in name}


def assert_no_second_copy(sampler):
    """No tensor in this process has the values of a weight in other memory."""
    policy = sampler.policy
    ours = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    theirs = {p.untyped_storage().data_ptr() for p in engine_model(sampler).parameters()}
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


def test_both_models_have_one_set_of_weights_before_and_after_20_steps(folder, start):
    policy = load(folder)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.01)  # unlike the weights of other tests that are still in memory
    sampler = start(policy)
    old_completions = sample(sampler)
    assert_no_second_copy(sampler)
    greedy = SamplingParams(max_tokens=64, temperature=0)
    completions = sample(sampler, PROMPTS, greedy)
    expected = TorchSampler(policy).sample(PROMPTS, greedy)
    assert [(c.token_ids, c.text, c.finish_reason) for c in completions] == [
        (c.token_ids, c.text, c.finish_reason) for c in expected
    ]
    before = {name: parameter.clone() for name, parameter in base_weights(policy).items()}
    old_gaps = gap(policy, old_completions)
    train(policy, steps=20, lr=1e-3)
    sampler.sync()
    for gaps in (old_gaps, gap(policy, sample(sampler))):
        assert is_rounding(gaps, policy.dtype)
        assert gaps.mean() < 1e-5
    # a sampler with the old weights would have been seen
    assert gap(policy, old_completions).mean() > 0.1
    assert not any(torch.equal(p, before[name]) for name, p in base_weights(policy).items())
    weight_sharing.check_bound(engine_model(sampler), sampler.weights.shared)


@pytest.mark.parametrize(
    ("lora_rank", "options"),
    [(3, {"dtype": "bfloat16", "fp32_head": True}), (256, {})],  # vLLM's slots have rank 8 and 256
)
def test_adapters_are_copied_when_the_engine_wakes_up(qwen3, start, lora_rank, options):
    policy = load(qwen3, lora_rank=lora_rank, **options)
    trainable, random_state = {n: p.clone() for n, p in policy.trainable().items()}, state()
    sampler = start(policy)
    assert all(torch.equal(p, trainable[n]) for n, p in policy.trainable().items())
    assert state() == random_state
    assert len(sampler.slots) == 2 * 7  # all linear layers of both layers
    if "fp32_head" in options:
        assert engine_model(sampler).logits_processor.head_dtype == torch.float32
    base = {name: parameter.clone() for name, parameter in base_weights(policy).items()}
    old_completions = sample(sampler)
    assert is_rounding(gap(policy, old_completions), policy.dtype)
    before = [slot.engine_B.clone() for slot in sampler.slots]
    train(policy, steps=20, lr=1e-2)
    sampler.sync()  # asleep: the slots of a GPU may have no memory
    assert all(torch.equal(s.engine_B, B) for s, B in zip(sampler.slots, before, strict=True))
    gaps = gap(policy, sample(sampler))
    assert is_rounding(gaps, policy.dtype)
    assert gap(policy, old_completions).mean() > 0.1
    assert all(torch.equal(p, base[name]) for name, p in base_weights(policy).items())
    weight_sharing.check_bound(engine_model(sampler), sampler.weights.shared)
    [slot, *_] = sampler.slots
    sampler.slots[0] = slot._replace(engine_B=slot.engine_B.clone())
    slot.engine_B.zero_()  # an adapter that is not copied
    assert gap(policy, sample(sampler)).mean() > max(1e-3, 2 * gaps.mean())


class TestOneEngine:
    """Facts that share one engine."""

    @pytest.fixture(scope="class")
    def engine(self, qwen3):
        sampler = nanollm.make_sampler("vllm", load(qwen3, max_length=160))
        assert isinstance(sampler, NanoLLM)
        yield sampler
        before = state()
        sampler.close()
        assert state() == before

    def test_completion_ends_with_a_stop_token_or_at_the_limit(self, engine, monkeypatch):
        monkeypatch.setattr(engine.policy, "stop_ids", list(range(0, 704, 3)))  # a third of all
        completions = sample(engine, PROMPTS, SamplingParams(max_tokens=3, seed=5))
        check_ends(engine.policy, completions, 3)
        assert trainer_gap(engine.policy, completions, 1.0, PROMPTS).max() < 1e-4

    def test_requests_that_come_while_others_are_sampled_have_the_same_tokens(
        self, engine, monkeypatch
    ):
        """Greedy ones those of `sample`; drawn ones those of their own seeds."""
        monkeypatch.setattr(engine.policy, "stop_ids", list(range(0, 704, 40)))
        greedy = SamplingParams(max_tokens=24, temperature=0)
        drawn, prompts = SamplingParams(max_tokens=24, seed=3), PROMPTS[:6]
        with engine:
            expected = engine.sample(prompts, greedy)
            found = staggered(engine, prompts, greedy, gap=3)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
            by_gap = [staggered(engine, prompts, drawn, gap, alone=True) for gap in (1, 4)]
        assert [c.token_ids for c in by_gap[0]] == [c.token_ids for c in by_gap[1]]
        assert by_gap[0][0].token_ids != by_gap[0][3].token_ids  # equal prompts, different streams
        assert trainer_gap(engine.policy, by_gap[1], 1.0, prompts).max() < 1e-4

    def test_seed_determines_a_call_and_the_process_keeps_its_random_state(self, engine):
        before = state()
        draws = [
            [c.token_ids for c in sample(engine, PROMPTS, SamplingParams(max_tokens=8, seed=seed))]
            for seed in (1, 2, 1)
        ]
        assert draws[0] == draws[2] != draws[1]
        assert draws[0][0] != draws[0][3]  # equal prompts
        assert state() == before
        with engine:  # environments draw, too
            params = SamplingParams(max_tokens=8, seed=1)
            completions = engine.sample(PROMPTS, params, lambda: torch.rand(1))
        assert [c.token_ids for c in completions] == draws[0]
        assert state() != before

    @pytest.mark.parametrize("alone", [False, True], ids=["one generator", "a seed per request"])
    def test_draws_have_the_probabilities_of_the_policy(self, engine, alone):
        prompt, params = [65, 66, 67], SamplingParams(max_tokens=1, temperature=0.5)
        requests = [Request(prompt, params, 3, i, alone=alone) for i in range(2000)]
        drawn = Counter()
        with engine:
            for request in requests:
                engine.add(request)
            while sum(drawn.values()) < len(requests):
                drawn.update(c.token_ids[0] for _, c in engine.step())
        check_first_tokens(engine.policy, prompt, params.temperature, drawn)

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

    def test_kv_cache_is_allocated_only_inside_with(self, engine):
        def cache_bytes():
            return sum(storage.nbytes() for storage, _ in engine.cpu_cache)

        def addresses():
            return {name: p.data_ptr() for name, p in engine_model(engine).named_parameters()}

        assert engine.cpu_cache and cache_bytes() == 0
        before = addresses()
        with engine:
            assert cache_bytes() >= nanollm.CPU_CACHE_BYTES / 2
            completions = engine.sample(PROMPTS, PARAMS)
        assert cache_bytes() == 0
        with pytest.raises(RuntimeError, match="only inside `with sampler:`"):
            engine.sample(PROMPTS, PARAMS)
        assert sample(engine) == completions
        assert addresses() == before


def test_a_model_that_vllm_computes_differently_is_refused_and_leaves_no_trace(qwen3):
    policy = load(qwen3)
    for layer in policy.causal_lm.model.layers:
        layer.self_attn.scaling *= 2
    folders, before = set(os.listdir(tempfile.gettempdir())), state()
    with pytest.raises(UsageError, match=r"Qwen3\w+: .* differ by \d\.\de-0\d .* --sampler torch"):
        NanoLLM(policy)
    assert state() == before
    assert not multiprocessing.active_children()
    assert not torch.distributed.is_initialized()
    new = set(os.listdir(tempfile.gettempdir())) - folders
    assert not [folder for folder in new if folder.startswith("nanollm-")]


def test_too_little_memory_is_one_line_with_the_numbers(qwen3, monkeypatch):
    policy = load(qwen3)
    free = psutil.virtual_memory()._replace(available=2**18)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(UsageError, match=r"^a sequence of 512 tokens needs .* --max-model-len"):
        NanoLLM(policy)


@pytest.mark.parametrize("num_rollouts", [3, 10**6])
def test_cache_has_at_most_the_bytes_of_all_rollouts_at_full_length(qwen3, start, num_rollouts):
    """A token of qwen3 has 2 layers, 2 heads of keys and values, and 32 numbers per head."""
    policy = load(qwen3)
    sampler = start(policy, num_rollouts=num_rollouts)
    config = policy.causal_lm.config
    per_token = 4 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    blocks = policy.max_length // nanollm.CPU_BLOCK_SIZE + 1  # one stays empty
    needed = num_rollouts * blocks * nanollm.CPU_BLOCK_SIZE * per_token
    found = sum(num_bytes for _, num_bytes in sampler.cpu_cache)
    assert found == min(needed, nanollm.CPU_CACHE_BYTES // per_token // 32 * 32 * per_token)
    greedy = SamplingParams(max_tokens=8, temperature=0)
    expected = TorchSampler(policy).sample(PROMPTS, greedy)
    assert [c.token_ids for c in sample(sampler, PROMPTS, greedy)] == [
        c.token_ids for c in expected
    ]  # also of more prompts than were announced


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "leave --quantize out"),
        ({"adapters": {"use_dora": True}}, "not .*lora_magnitude_vector"),
        ({"adapters": {"modules_to_save": ["lm_head"]}}, "not .*lm_head.modules_to_save"),
        ({"device": "mps"}, r"the installed vLLM is for (cpu|cuda), not mps"),
    ],
)
def test_policy_that_vllm_cannot_share_is_refused(qwen3, change, message):
    from peft import LoraConfig, get_peft_model

    policy = load(qwen3)
    if "quantization_config" in change:
        policy.causal_lm.config.quantization_config = change["quantization_config"]
    if "adapters" in change:
        policy.model = get_peft_model(policy.model, LoraConfig(r=2, **change["adapters"]))
    policy.device = torch.device(change.get("device", policy.device))
    with pytest.raises(UsageError, match=message):
        NanoLLM(policy)


def test_without_a_gpu_kept_ids_are_refused_before_the_engine_starts(qwen3):
    with pytest.raises(UsageError, match="--top-k and --top-p with --sampler vllm"):
        NanoLLM(load(qwen3), with_kept_ids=True)


SMALL = """--sampler vllm --algo ppo --sft-steps 6 --sft-batch-size 4 --num-updates 4
    --num-prompts 3 --group-size 4 --eval-num-tasks 4 --eval-every 2 --save-every 2 --max-tokens 24
    --lr 1e-3 --dtype float32""".split()


def test_a_run_stopped_while_vllm_samples_and_resumed_equals_the_whole_run(command, monkeypatch):
    from vllm.v1.engine.llm_engine import LLMEngine

    code, _, err = command("--run-name", "whole", "--device", "cpu", *SMALL)
    assert (code, err) == (0, "")
    records = metrics_of("runs/whole")
    updates = [r for r in records if r.get("update", 0) > 0]
    assert len(updates) == 4
    for record in updates:
        assert record["tokens/trained"] == record["tokens/sampled"] > 0
        assert record["gap/logprob_mean"] < 1e-5 and record["gap/logprob_max"] < 1e-4
    steps, step = 0, LLMEngine.step

    def interrupt_once(engine):
        nonlocal steps
        steps += 1
        if steps == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupt_once)
    code, out, _ = command("--run-name", "stopped", "--device", "cpu", *SMALL)
    assert code == 130
    assert "stopped and saved" in out
    assert command("--resume", "runs/stopped")[0] == 0
    assert metrics_of("runs/stopped") == records
