"""NanoLLM against the trainer, on real vLLM: one set of weights, one set of log-probs.

These tests need vLLM's build for CPUs: `pytest -m vllm`. runs/benchmarks/gpu_check.py is for GPUs.
"""

import multiprocessing
import os
import tempfile
from collections import Counter
from dataclasses import replace

import psutil
import pytest
import torch
from conftest import FAMILIES, save_small
from small_models import save_model, train
from test_process_state import state
from test_sampler import check_ends, check_first_tokens, staggered, trainer_gap

from core import nanollm, weight_sharing
from core.config import Config
from core.faults import UsageError
from core.loading import load_policy
from core.nanollm import NanoLLM
from core.sampler import Request, SamplingParams, TorchSampler

pytestmark = pytest.mark.vllm

PROMPTS = [[65, 66, 67], [68] * 70, [70, 71]] * 8
PARAMS = SamplingParams(max_tokens=64, temperature=0.8, seed=1)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Biases, tied and untied heads, padded vocabularies, sliding windows."""
    return save_model(request.param, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_small("Qwen3", tmp_path_factory.mktemp("vllm"), head_dim=32)


def load(folder, **options):
    return load_policy(Config(**{"device": "cpu", "dtype": "float32", **options}), str(folder))


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
    """The parameters of the engine are those of the policy, in the same memory."""
    policy = sampler.policy
    ours = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    theirs = {p.untyped_storage().data_ptr() for p in engine_model(sampler).parameters()}
    assert ours == theirs


def test_both_models_have_one_set_of_weights_before_and_after_20_steps(folder, start):
    policy = load(folder)
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
    ("lora_rank", "dtype"),
    [(3, "bfloat16"), (256, "float32")],  # vLLM's slots have rank 8 and 256
)
def test_adapters_are_copied_when_the_engine_wakes_up(qwen3, start, lora_rank, dtype):
    policy = load(qwen3, lora_rank=lora_rank, dtype=dtype)
    trainable, random_state = {n: p.clone() for n, p in policy.trainable().items()}, state()
    sampler = start(policy)
    assert all(torch.equal(p, trainable[n]) for n, p in policy.trainable().items())
    assert state() == random_state
    assert len(sampler.slots) == 2 * 7  # all linear layers of both layers
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
        sampler = nanollm.make_sampler("vllm", load(qwen3, max_model_len=160))
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

    def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(self, engine):
        greedy = SamplingParams(max_tokens=24, temperature=0.0)
        checked = []
        tokenizer, wholes = engine.policy.tokenizer, sample(engine, PROMPTS[:3], greedy)
        for prompt, whole in zip(PROMPTS, wholes, strict=False):
            texts = [tokenizer.decode(whole.token_ids[:n]) for n in range(len(whole.token_ids))]
            if not (stop := texts[len(texts) // 2][-2:]):
                continue  # it ended at once
            checked.append(stop)
            first = next(n for n, text in enumerate(texts) if stop in text)
            [cut] = sample(engine, [prompt], replace(greedy, stop=(stop,)))
            assert cut.token_ids == whole.token_ids[:first] and cut.finish_reason == "stop"
            assert cut.text == texts[first]
        assert checked

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
