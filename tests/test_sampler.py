"""TorchSampler samples from the model's distribution and reports the log-probs it drew with."""

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from conftest import load_small

from core import canary, nanollm
from core import sampler as sampler_module
from core.batching import to_tokens
from core.config import Config, resolve
from core.faults import Fault, UsageError
from core.kv_cache import SharedPrefixCache
from core.loop.players import open_sampler
from core.sampler import (
    Request,
    SamplingParams,
    TorchSampler,
    draw,
    keep_likely,
    to_completion,
    uniforms,
)
from core.scoring import score_tokens
from core.types import Completion, Rollout, Turn

PROMPTS = [[65, 66, 67], [68] * 11, [65, 66, 67], [70, 71], [68] * 11, [65, 66, 67]]
EVERY_SIXTH = list(range(0, 704, 6))  # as stop ids: about every sixth token ends a completion


def trainer_gap(policy, completions, temperature, prompts=PROMPTS):
    """|log-prob of a plain forward pass - reported log-prob| of every sampled token."""
    pairs = zip(prompts, completions, strict=True)
    return torch.cat([canary.gaps(policy, *pair, temperature) for pair in pairs])


def test_sampled_log_probs_are_the_trainers_up_to_the_rounding_of_a_precision(qwen3_folder):
    mean, prompts = {}, PROMPTS * 8
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        policy = load_small(qwen3_folder, dtype=dtype)
        policy.stop_ids = EVERY_SIXTH  # so rows are dropped
        completions = TorchSampler(policy).sample(prompts, SamplingParams(10, 0.7, seed=3))
        check_ends(policy, completions, 10)
        gaps = trainer_gap(policy, completions, 0.7, prompts)
        mean[dtype] = gaps.mean().item()
        assert len(gaps) > 200 and (gaps.max() < 1e-4 or dtype.endswith("16"))
    assert mean["float64"] == 0 < mean["float32"] < 1e-6
    assert 1e-4 < mean["float16"] < mean["bfloat16"] / 4


def test_each_distinct_prefix_is_computed_once(policy, monkeypatch):
    params = SamplingParams(max_tokens=8, temperature=0.3, top_k=2, seed=1)
    prompts, sizes, policy.stop_ids = PROMPTS * 4, [], []
    decoder = policy.causal_lm.get_decoder()
    forward = decoder.forward

    @functools.wraps(forward)  # with its names of arguments
    def record(*args, input_ids, **rest):
        sizes.append(input_ids.numel())
        return forward(*args, input_ids=input_ids, **rest)

    monkeypatch.setattr(decoder, "forward", record)
    completions = TorchSampler(policy).sample(prompts, params)
    whole = [p + c.token_ids[:-1] for p, c in zip(prompts, completions, strict=True)]
    prefixes = {tuple(ids[: n + 1]) for ids in whole for n in range(len(ids))}
    assert sum(sizes) == len(prefixes) < 200


def staggered(sampler, prompts, params, gap):
    """The completions of requests that come one by one, every `gap` steps."""
    requests = [Request(prompt, params, params.seed, i) for i, prompt in enumerate(prompts)]
    ended = {}
    for request in requests:
        sampler.add(request)
        for _ in range(gap):
            ended |= sampler.step()
    while len(ended) < len(requests):
        ended |= sampler.step()
    return [ended[request] for request in requests]


def test_seed_and_stream_determine_a_completion(policy):
    """Also of requests that come while others are sampled."""
    sampler, params = TorchSampler(policy), SamplingParams(max_tokens=8, seed=3, top_k=5)
    together = sampler.sample(PROMPTS, params)
    found = zip(staggered(sampler, PROMPTS, params, gap=3), together, strict=True)
    assert all((a.token_ids, a.kept_ids) == (b.token_ids, b.kept_ids) for a, b in found)
    assert sampler.sample(PROMPTS, replace(params, seed=6)) != together
    assert together[0].token_ids != together[2].token_ids  # equal prompts, different streams


def test_the_settings_of_sampling_are_those_of_the_run():
    cfg = Config(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, stop=("x",))
    assert sampler_module.params_of(cfg, 3) == SamplingParams(9, 0.5, 0.9, 7, 3, ("x",))


def check_ends(policy, completions, limit):
    """Some of the completions end with the only stop token that they have, others at the limit."""
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        is_stop = [token in policy.stop_ids for token in c.token_ids]
        assert not any(is_stop[:-1])
        assert is_stop[-1] == (c.finish_reason == "stop")
        assert len(c.token_ids) == len(c.logprobs) <= limit
        assert is_stop[-1] or len(c.token_ids) == limit
        text_ids = c.token_ids[:-1] if is_stop[-1] else c.token_ids
        assert c.text == policy.tokenizer.decode(text_ids)


def test_completion_stays_within_the_context_length(qwen3_folder):
    policy = load_small(qwen3_folder, max_model_len=8)
    policy.stop_ids = []
    [completion] = TorchSampler(policy).sample([[65] * 5], SamplingParams(max_tokens=50))
    assert len(completion.token_ids) == 3
    with pytest.raises(UsageError, match="a prompt of 8 tokens does not fit into 8"):
        TorchSampler(policy).sample([[65] * 5, [65] * 8], SamplingParams(max_tokens=50))


@pytest.mark.parametrize(("options", "kept"), [
    ({}, [0, 1, 2, 3]), ({"temperature": 0.5}, [0, 1, 2, 3]), ({"top_k": 2}, [2, 3]),
    ({"top_p": 0.6}, [3]), ({"top_p": 0.65}, [2, 3]),  # the likeliest token has 0.64
])  # fmt: skip
def test_draw_follows_the_distribution_over_what_top_k_and_top_p_keep(options, kept):
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(30_000, 4)
    params = SamplingParams(max_tokens=1, **options)
    drawn, logprobs = draw(logits, params, uniforms(0, 0, 30_000))
    expected = torch.full((4,), -torch.inf)
    expected[kept] = (logits[0, kept] / params.temperature).log_softmax(-1)
    frequencies = torch.bincount(drawn, minlength=4) / len(drawn)
    assert torch.allclose(frequencies, expected.exp(), atol=0.01)
    assert torch.allclose(logprobs, expected[drawn])
    equal = keep_likely(torch.zeros(1, 4), SamplingParams(max_tokens=1, top_p=0.5))
    assert equal.isfinite().sum() == 2  # the fewest that have half the mass


def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(policy):
    """It is no cut; also where the engine samples on after it, as vLLM does."""
    policy.stop_ids, params = [], SamplingParams(max_tokens=20, seed=3)
    for prompt in PROMPTS[1:4]:
        [whole] = TorchSampler(policy).sample([prompt], params)
        ids, logprobs = whole.token_ids, whole.logprobs
        texts = [str(policy.tokenizer.decode(ids[:n])) for n in range(len(ids))]
        stop = ("never", texts[6][-2:])
        first = next(n for n, text in enumerate(texts) if stop[1] in text)
        [cut] = TorchSampler(policy).sample([prompt], replace(params, stop=stop))
        assert cut == Completion(ids[:first], logprobs[:first], texts[first], "stop")
        assert cut == to_completion(policy, ids, logprobs, stop=stop)


def test_draw_never_selects_a_token_of_probability_zero():
    logits = torch.tensor([-torch.inf, 0.1, 0.2, 0.3, -torch.inf]).expand(3, 5)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-24])  # both ends of [0, 1)
    drawn, logprobs = draw(logits, SamplingParams(max_tokens=1), uniform)
    assert drawn.tolist() == [1, 2, 3] and logprobs.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_overflowed_end_the_run_with_a_line(policy, temperature):
    """As after a diverging float16 step: NaN has no cumulative probability."""
    policy.model.get_decoder().norm.weight.data.fill_(torch.inf)
    with pytest.raises(Fault, match="logits are no longer finite"):
        TorchSampler(policy).sample(PROMPTS, SamplingParams(3, temperature, top_p=0.9))


def test_training_renormalizes_over_the_tokens_that_the_sampler_kept(policy):
    """So the importance weights are 1; over all tokens they would be the mass of the kept ones."""
    params, prompts = SamplingParams(12, 0.8, top_p=0.8, top_k=50, seed=2), PROMPTS[:4]
    completions = TorchSampler(policy).sample(prompts, params)
    turns = [Turn(p, c.token_ids, c.logprobs, c.finish_reason, kept_ids=c.kept_ids)
             for p, c in zip(prompts, completions, strict=True)]  # fmt: skip
    batch = to_tokens([Rollout("e", "p", 0, i, turns=[turn]) for i, turn in enumerate(turns)])
    trained = score_tokens(policy, batch, temperature=0.8)["logprobs"]
    assert (trained - batch.sampler_logprobs).abs().max() < 1e-4


def test_what_is_kept_for_the_trainer_is_what_16_bit_logits_were_drawn_from(
    qwen3_folder, monkeypatch
):
    """Not what quotients of 8 bits would keep: of these many are equal."""
    rounded, kept = load_small(qwen3_folder, dtype="bfloat16"), []
    rounded.stop_ids = []
    record = lambda *arguments: kept.append(keep_likely(*arguments)) or kept[-1]  # noqa: E731
    monkeypatch.setattr(sampler_module, "keep_likely", record)
    TorchSampler(rounded).sample(PROMPTS[:1], SamplingParams(40, 0.7, top_p=0.8, seed=2))
    drawn_from, for_trainer = kept[::2], kept[1::2]
    assert len(kept) == 80 and all(map(torch.equal, drawn_from, for_trainer))


def test_a_run_samples_with_torch_if_vllm_does_not_start(policy, monkeypatch):
    def open_(name):
        algorithm = SimpleNamespace(draw=None)
        return open_sampler(resolve(Config(sampler=name)), policy, algorithm, 0, Path("unused"))

    assert isinstance(open_("auto"), TorchSampler)  # on a CPU
    fails = create_autospec(nanollm.NanoLLM, side_effect=UsageError("no compiler"))
    monkeypatch.setattr(nanollm, "NanoLLM", fails)  # which checks the arguments
    monkeypatch.setattr(policy, "device", torch.device("cuda"))
    sampler = open_("auto")
    assert isinstance(sampler, TorchSampler) and "no compiler" in sampler.remark
    with pytest.raises(UsageError, match="no compiler"):
        open_("vllm")


def test_the_kv_cache_of_vllm_has_what_the_rollouts_need_of_the_memory_that_is_free():
    """A sequence needs 3 + 2 blocks in two kinds of layers; one of all blocks stays empty."""
    specs = [SimpleNamespace(max_memory_usage_bytes=lambda config, n=n: n, page_size_bytes=40)
             for n in (120, 79)]  # fmt: skip
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    plan = SimpleNamespace(kv_cache_groups=groups, num_blocks=nanollm.PLENTY // 64)

    def size(device, available, num_rollouts=0):
        policy = SimpleNamespace(device=torch.device(device), max_length=512)
        return nanollm._cache_bytes(policy, num_rollouts, None, plan, available)

    needed = 6 * 64
    assert size("cuda", 10_000) == 10_000 and size("cuda", 10_000, 3) == 3 * needed
    assert size("cuda", 10_000, 30) == 10_000 and size("cuda", needed) == needed
    assert size("cpu", 1) == needed and size("cpu", 10_000) == 10_000
    with pytest.raises(UsageError, match=r"^a sequence of 512 tokens needs .* --max-model-len"):
        size("cuda", needed - 1)


@pytest.mark.parametrize(("module", "name"), [
    (sampler_module, "prefill"), (SharedPrefixCache, "append"),  # or when they have begun
])  # fmt: skip
def test_out_of_memory_halves_the_batch_and_changes_no_draw(policy, monkeypatch, module, name):
    params, prompts = SamplingParams(max_tokens=4, seed=4), [[65, i] for i in range(66, 72)]
    expected = TorchSampler(policy).sample(prompts, params)
    sampler, lines, sizes, whole = TorchSampler(policy), [], [], getattr(module, name)
    sampler.say = lines.append

    def at_most_two(first, rows, *others, **options):
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(first, rows, *others, **options)

    monkeypatch.setattr(module, name, at_most_two)
    completions = sampler.sample(prompts, params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert [n for n in sizes if n > 2] == [6, 3] and max(sizes[2:]) == 1  # the smaller size stays
    assert len(lines) == 2 and lines[-1].endswith("continuing with 1")


def test_tokens_that_float32_sums_never_draw_can_be_drawn():
    """151,936 logits of standard deviation 2. Float32 uniforms are multiples of 2^-24."""
    logits = 2 * torch.randn(1, 151_936, generator=torch.Generator().manual_seed(0))
    sums = logits.log_softmax(-1).exp().cumsum(-1, dtype=torch.float64)[0]
    ends = (sums / sums[-1] * 2**24).ceil()
    never = (ends[1:] == ends[:-1]).nonzero().squeeze(1) + 1  # no multiple is in their interval
    assert len(never) > 5000
    chosen = never[::70]  # about 100 of them, each at the middle of its interval
    uniform = (sums[chosen] + sums[chosen - 1]) / 2 / sums[-1]
    assert [draw(logits, SamplingParams(1), u[None])[0].item() for u in uniform] == chosen.tolist()
