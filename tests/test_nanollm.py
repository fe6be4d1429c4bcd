"""NanoLLM against the trainer, on real vLLM: one set of weights, one set of log-probs.

These tests need vLLM's build for CPUs: `pytest -m vllm`. runs/benchmarks/gpu_check.py is for GPUs.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_models import save_model, train
from test_process_state import state
from test_sampler import check_ends, staggered, trainer_gap

from core.config import Config, resolve
from core.faults import UsageError
from core.loading import load_policy
from core.loop.players import open_sampler
from core.nanollm import NanoLLM
from core.sampler import SamplingParams, TorchSampler

pytestmark = pytest.mark.vllm

PROMPTS = [[65, 66, 67], [68] * 70, [70, 71]] * 4
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=1)
GREEDY = SamplingParams(max_tokens=24, temperature=0)
ENGINES = {  # biases, tied and untied heads, padded vocabularies, sliding windows; slots of LoRA
    "Qwen3": {},
    "Gemma3": {},
    "Llama": {"lora_rank": 256},
    "Qwen2": {"lora_rank": 3, "dtype": "bfloat16"},  # a slot of vLLM has rank 8
}


def load(family, folder, **options):
    cfg = Config(**{"device": "cpu", "dtype": "float32", "sampler": "vllm", **options})
    return resolve(cfg), load_policy(cfg, str(save_model(family, folder)))


@pytest.fixture(scope="module")
def engine(request, tmp_path_factory):
    """The sampler of a run with a small model of a family; it starts once for all tests of it."""
    cfg, policy = load(request.param, tmp_path_factory.mktemp("vllm"), **ENGINES[request.param])
    trainable, before = {n: p.clone() for n, p in policy.trainable().items()}, state()
    sampler = open_sampler(cfg, policy, SimpleNamespace(draw=None), 0, Path("unused"))
    assert isinstance(sampler, NanoLLM) and state() == before
    assert all(torch.equal(p, trainable[n]) for n, p in policy.trainable().items())
    yield sampler
    before = state()
    sampler.close()
    assert state() == before


only_qwen3 = pytest.mark.parametrize("engine", ["Qwen3"], indirect=True)


def sample(sampler, prompts=PROMPTS, params=PARAMS):
    with sampler:
        return sampler.sample(prompts, params)


def gap(policy, completions):
    """The mean of |trainer - sampler| of at least 200 sampled tokens, in nats."""
    gaps = trainer_gap(policy, completions, PARAMS.temperature, PROMPTS)
    assert len(gaps) >= 200
    return gaps.mean()


@only_qwen3
def test_requests_that_come_while_others_are_sampled_have_the_same_tokens(engine, monkeypatch):
    """Greedy ones those of `sample`; drawn ones those of their own seeds."""
    monkeypatch.setattr(engine.policy, "stop_ids", list(range(0, 704, 40)))
    prompts, drawn = PROMPTS[:6], replace(GREEDY, temperature=1.0)
    with engine:
        expected = engine.sample(prompts, GREEDY)
        found = staggered(engine, prompts, GREEDY, gap=3)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        by_gap = [staggered(engine, prompts, drawn, gap) for gap in (1, 4)]
    assert [c.token_ids for c in by_gap[0]] == [c.token_ids for c in by_gap[1]]
    assert by_gap[0][0].token_ids != by_gap[0][3].token_ids  # equal prompts, different streams
    check_ends(engine.policy, by_gap[1], 24)
    assert trainer_gap(engine.policy, by_gap[1], 1.0, prompts).max() < 1e-4


@only_qwen3
def test_draws_have_the_probabilities_of_the_policy(engine):
    """A χ² test of the 16 likeliest tokens and all others; 39.3 is exceeded once in 1,000 seeds."""
    params = SamplingParams(max_tokens=1, temperature=0.5, seed=3)
    drawn = [c.token_ids[0] for c in sample(engine, [[65, 66, 67]] * 2000, params)]
    with torch.no_grad():
        hidden = engine.policy.hidden_states(torch.tensor([[65, 66, 67]]))
    probs, ids = (engine.policy.to_logits(hidden[0, -1:])[0] / 0.5).softmax(-1).topk(16)
    expected = 2000 * torch.cat([probs, 1 - probs.sum(0, keepdim=True)])
    counts = [drawn.count(i) for i in ids.tolist()]
    found = torch.tensor([*counts, 2000 - sum(counts)])
    assert expected.min() > 5 and ((found - expected) ** 2 / expected).sum() < 39.3


@only_qwen3
def test_prefix_cache_serves_equal_prompts_until_sync(engine, monkeypatch):
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
    sample(engine, [prompt], one_token)
    assert sorted(num_cached[:4]) == [0, 96, 96, 96]  # whole blocks of 32
    assert num_cached[4:] == [0, 0]
    with pytest.raises(RuntimeError, match="only inside `with sampler:`"):
        engine.sample([prompt], one_token)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_both_models_have_one_set_of_weights_before_and_after_steps(engine):
    """And the adapters are copied when the engine wakes up."""
    policy, slots = engine.policy, engine.slots
    assert len(slots) == (2 * 7 if policy.lora_rank else 0)  # all linear layers of both layers
    base = {n: p for n, p in policy.causal_lm.named_parameters() if "lora_" not in n}
    before, old = {n: p.clone() for n, p in base.items()}, sample(engine)
    [model] = engine.engine.apply_model(lambda model: model)
    ours = {p.untyped_storage().data_ptr() for p in base.values()}
    assert ours == {p.untyped_storage().data_ptr() for p in model.parameters()}
    rounding = 2e-5 if policy.dtype == torch.float32 else 5e-2
    assert gap(policy, old) < rounding
    if policy.dtype == torch.float32:
        found = sample(engine, PROMPTS, GREEDY)
        expected = TorchSampler(policy).sample(PROMPTS, GREEDY)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    adapters = [slot.engine_B.clone() for slot in slots]
    train(policy, steps=20, lr=2e-3)
    engine.sync()  # asleep: the slots of a GPU may have no memory
    assert all(torch.equal(s.engine_B, B) for s, B in zip(slots, adapters, strict=True))
    new = gap(policy, sample(engine))
    assert new < rounding < 0.1 < gap(policy, old)  # that of a sampler with the old weights
    assert all(torch.equal(p, before[name]) == bool(slots) for name, p in base.items())
    assert ours == {p.untyped_storage().data_ptr() for p in model.parameters()}
    if slots:
        slot = slots[0]
        slots[0] = slot._replace(engine_B=slot.engine_B.clone())
        slot.engine_B.zero_()  # an adapter that is not copied
        assert gap(policy, sample(engine)) > max(1e-3, 2 * new)


@pytest.mark.parametrize(("family", "words"), [
    ("Qwen3", r"differ by \d\.\de-0\d .* --sampler torch"),  # vLLM computes it differently
    ("Qwen3Moe", r"steps in its copy of model\.layers\.0\.mlp\.experts.* --sampler torch"),
])  # fmt: skip
def test_a_model_that_cannot_be_shared_is_refused_and_leaves_no_trace(family, words, tmp_path):
    _, policy = load(family, tmp_path)
    for layer in policy.causal_lm.model.layers:
        layer.self_attn.scaling *= 2
    before = state()
    with pytest.raises(UsageError, match=words):
        NanoLLM(policy)
    assert state() == before and not torch.distributed.is_initialized()
