"""TorchSampler draws what the model says, once for each prompt, and reports its log-probs."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from algorithms.common import token_logprobs
from core import sampler as sampler_module
from core.batching import micro_batches, put, to_rollout_batch
from core.kv_cache import make_context
from core.model import load_policy
from core.nanollm import make_sampler
from core.sampler import SamplingParams, TorchSampler, draw, uniforms
from core.types import OutOfMemory, Rollout, Turn, UsageError

PROMPTS = [[65, 66, 67], [68] * 11, [65, 66, 67], [70, 71], [68] * 11, [65, 66, 67]]


def trainer_gap(policy, completions, temperature, prompts=PROMPTS):
    """|log-prob of a plain forward pass - reported|, over all sampled tokens."""
    rollouts = [
        Rollout("e", "p", 0, 0, turns=[Turn(p, c.token_ids, c.logprobs, c.finish_reason)])
        for p, c in zip(prompts, completions, strict=True)
    ]
    update = to_rollout_batch(rollouts)
    found = torch.zeros_like(update.rewards)
    with torch.no_grad():
        for batch in micro_batches(update.sequences, 64):
            logprobs, _ = token_logprobs(
                policy.hidden_states(batch.input_ids), batch.input_ids, batch.completion_mask,
                policy.to_logits, temperature,
            )  # fmt: skip
            put(logprobs, batch, into=found)
    return (found - update.sampler_logprobs)[update.mask].abs()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_trainer(small_folder, temperature):
    policy = load_policy(str(small_folder), device="cpu")
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=1)
    completions = TorchSampler(policy).sample(PROMPTS, params)
    assert trainer_gap(policy, completions, temperature).max() < 1e-4


def test_greedy_is_what_generate_writes(small_folder):
    policy = load_policy(str(small_folder), device="cpu")
    params = SamplingParams(max_tokens=20, temperature=0)
    ours = TorchSampler(policy).sample(PROMPTS, params)
    for prompt, completion in zip(PROMPTS, ours, strict=True):
        theirs = policy.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=20,
            eos_token_id=policy.stop_ids, pad_token_id=0, use_cache=True,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert completion.token_ids == theirs


def test_each_distinct_prompt_is_prefilled_once(policy, monkeypatch):
    prefilled = []
    forward = policy.causal_lm.forward

    def count(*args, input_ids, **rest):
        if input_ids.shape[1] > 1:
            prefilled.append(input_ids.shape)
        return forward(*args, input_ids=input_ids, **rest)

    monkeypatch.setattr(policy.causal_lm, "forward", count)
    TorchSampler(policy).sample(PROMPTS, SamplingParams(max_tokens=3))
    assert prefilled == [(3, 11)]  # 3 distinct of 6 prompts, the longest of 11 tokens


def test_equal_prompts_draw_different_completions_and_a_seed_repeats_them(policy):
    sampler = TorchSampler(policy)
    params = SamplingParams(max_tokens=12, seed=5)
    first, again = sampler.sample(PROMPTS, params), sampler.sample(PROMPTS, params)
    other = sampler.sample(PROMPTS, SamplingParams(max_tokens=12, seed=6))
    assert first == again
    assert first != other
    assert first[0].token_ids != first[2].token_ids


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(policy):
    policy.stop_ids = list(range(0, 384, 6))  # about every sixth token ends a completion
    completions = TorchSampler(policy).sample(PROMPTS * 8, SamplingParams(max_tokens=10))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        stops = [t in policy.stop_ids for t in c.token_ids]
        assert not any(stops[:-1])
        assert stops[-1] == (c.finish_reason == "stop")
        assert len(c.token_ids) == len(c.logprobs) <= 10
        assert stops[-1] or len(c.token_ids) == 10


def test_dropping_finished_rows_keeps_the_others_exact(policy):
    policy.stop_ids = list(range(0, 384, 6))
    params = SamplingParams(max_tokens=30, seed=3)
    completions = TorchSampler(policy).sample(PROMPTS, params)
    assert len({len(c.token_ids) for c in completions}) > 2  # rows ended at different times
    assert trainer_gap(policy, completions, 1.0).max() < 1e-4


def test_text_leaves_out_the_stop_token(policy):
    policy.stop_ids = list(range(384))
    (completion,) = TorchSampler(policy).sample([[65]], SamplingParams(max_tokens=5))
    assert (len(completion.token_ids), completion.text) == (1, "")


def test_a_completion_keeps_within_the_models_length(policy):
    policy.max_length = 8
    (completion,) = TorchSampler(policy).sample([[65] * 5], SamplingParams(max_tokens=50))
    assert len(completion.token_ids) <= 3
    with pytest.raises(UsageError, match="does not fit"):
        TorchSampler(policy).sample([[65] * 8], SamplingParams(max_tokens=50))


def test_no_prompts_give_no_completions(policy):
    assert TorchSampler(policy).sample([], SamplingParams(max_tokens=5)) == []


def test_sampling_can_be_stopped(policy):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TorchSampler(policy).sample(PROMPTS, SamplingParams(max_tokens=5), stop)


def test_draw_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(30_000, 3)
    params = SamplingParams(max_tokens=1, temperature=0.5)
    drawn, logprobs = draw(logits, params, uniforms(0, [0], 30_000)[0])
    expected = torch.tensor([0.0, 2.0, 4.0]).softmax(-1)
    share = torch.bincount(drawn, minlength=3) / len(drawn)
    assert torch.allclose(share, expected, atol=0.01)
    assert torch.allclose(logprobs, expected.log()[drawn])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(max_tokens=1, top_k=2), [2, 3]),
        (SamplingParams(max_tokens=1, top_p=0.6), [3]),  # the best alone has 0.64
        (SamplingParams(max_tokens=1, top_p=0.65), [2, 3]),
        (SamplingParams(max_tokens=1, top_k=99), [0, 1, 2, 3]),
    ],
)
def test_top_k_and_top_p_keep_the_head_and_renormalise(params, kept):
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    drawn, logprobs = draw(logits.expand(4000, 4), params, uniforms(0, [0], 4000)[0])
    assert sorted(set(drawn.tolist())) == kept
    expected = logits[kept].log_softmax(-1)
    for token, value in zip(kept, expected, strict=True):
        assert torch.allclose(logprobs[drawn == token], value)


def test_draw_never_picks_what_has_no_probability():
    """Not even at the ends of the interval, or where what can be drawn adds up to less than 1."""
    logits = torch.tensor([-torch.inf, 0.1, 0.2, 0.3, -torch.inf]).expand(3, 5)
    chance = torch.tensor([0.0, 0.5, 1 - 2**-24])
    drawn, logprobs = draw(logits, SamplingParams(max_tokens=1), chance)
    assert drawn.tolist() == [1, 2, 3] and logprobs.isfinite().all()


def test_a_completion_is_the_same_whatever_is_sampled_beside_it(policy):
    params = SamplingParams(max_tokens=12, seed=5)
    together = TorchSampler(policy).sample(PROMPTS, params)
    for i, prompt in enumerate(PROMPTS):
        (alone,) = TorchSampler(policy).sample([prompt], replace(params, streams=(i,)))
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=1e-4)


def test_streams_and_seeds_draw_apart():
    rows = torch.cat([uniforms(seed, range(50), 20) for seed in range(20)])
    assert len(rows.unique(dim=0)) == 1000
    assert (torch.corrcoef(rows.T) - torch.eye(20)).abs().max() < 0.15
    assert rows.min() >= 0 and rows.max() < 1 and abs(rows.mean() - 0.5) < 0.02


def test_auto_is_plain_pytorch_without_a_gpu(policy):
    assert isinstance(make_sampler("auto", policy), TorchSampler)
    assert isinstance(make_sampler("torch", policy), TorchSampler)


def test_auto_says_why_it_samples_in_plain_pytorch_on_a_gpu(policy, monkeypatch):
    policy.device = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sampler = make_sampler("auto", policy)
    assert isinstance(sampler, TorchSampler)
    assert sampler.remark.startswith("sampling in plain PyTorch: vLLM is not installed")
    with pytest.raises(UsageError, match=r'pip install -e "\.\[vllm\]"'):
        make_sampler("vllm", policy)


def test_a_length_limit_below_the_models_own_holds(qwen3_folder):
    policy = load_policy(str(qwen3_folder), device="cpu", max_length=16)
    [cut] = TorchSampler(policy).sample([[65] * 12], SamplingParams(max_tokens=40, temperature=0))
    assert len(cut.token_ids) <= 4
    assert load_policy(str(qwen3_folder), device="cpu", max_length=10**6).max_length == 512


def test_prompts_are_kept_once_and_dropped_with_their_last_row(small_folder):
    policy = load_policy(str(small_folder), device="cpu")
    if not policy.packs_groups:
        return
    with torch.no_grad():
        context = make_context(policy, [[65, 66, 67], [70], [65, 66, 67], [65, 66, 67]], room=4)
        assert [len(keys) for keys, _ in context.prompts] == [2, 2]
        context.write(torch.tensor([65, 66, 67, 68]))
        expected = context.logits[torch.tensor([0, 3])]
        context.keep(torch.tensor([0, 3]))  # the second prompt has no row left
        assert [len(keys) for keys, _ in context.prompts] == [1, 1]
        context.write(torch.tensor([71, 72]))
        whole = torch.tensor([[65, 66, 67, 65, 71], [65, 66, 67, 68, 72]])
        logits = policy.causal_lm(whole).logits
        assert torch.allclose(expected, logits[:, -2], atol=1e-5)
        assert torch.allclose(context.logits, logits[:, -1], atol=1e-5)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS * 5])
def test_fewer_are_written_at_one_time_when_memory_runs_out(policy, monkeypatch, prompts):
    """Those already written stay, and each draws what it would have drawn among all."""
    params = SamplingParams(max_tokens=12, seed=4)
    expected = TorchSampler(policy).sample(prompts, params)
    sampler, said, sizes = TorchSampler(policy), [], []
    sampler.say = said.append
    plain = sampler_module.make_context

    def scarce(policy, some, room):
        sizes.append(len(some))
        if len(some) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(policy, some, room)

    monkeypatch.setattr(sampler_module, "make_context", scarce)
    found = sampler.sample(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert said and "at one time: from here on" in said[-1]
    before = len(sizes)
    assert len(sampler.sample(prompts, params)) == len(prompts)
    assert max(sizes[before:]) <= 2  # it is remembered


def test_one_completion_that_does_not_fit_is_one_line(policy, monkeypatch):
    def never(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(sampler_module, "make_context", never)
    sampler = TorchSampler(policy)
    sampler.say = lambda line: None
    with pytest.raises(OutOfMemory, match="one completion of 12 tokens behind a prompt of"):
        sampler.sample(PROMPTS, SamplingParams(max_tokens=12))
