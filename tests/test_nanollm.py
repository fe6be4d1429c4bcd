"""NanoLLM against the trainer, on real vLLM: one set of weights, one set of log-probs.

These tests need vLLM and never skip: `pytest -m vllm`.
"""

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save_small
from test_process_state import state
from test_sampler import trainer_gap
from test_train import ROOT, metrics_of

from core import nanollm, weight_sharing
from core.model import load_policy
from core.nanollm import NanoLLM
from core.optimizer import make_optimizer
from core.sampler import SamplingParams, TorchSampler
from core.types import UsageError

pytestmark = pytest.mark.vllm

PROMPTS = [[65, 66, 67], [68] * 70, [70, 71]] * 8
DRAW = SamplingParams(max_tokens=64, temperature=0.8, seed=1)
# what vLLM must cope with: biases, tied and untied heads, padded vocabularies, sliding windows
SHAPES = {
    "qwen3": {"tie_word_embeddings": False, "vocab_size": 390},
    "qwen2": {"tie_word_embeddings": True, "hidden_size": 128},
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "gemma3": {"vocab_size": 401},
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    # 32 is the smallest head that vLLM's CPU kernels take; 0.06 is the scale of `tiny`
    shape = {"head_dim": 32, "initializer_range": 0.06, **SHAPES[request.param]}
    if request.param == "qwen2":
        del shape["head_dim"]
    return save_small(request.param, tmp_path_factory.mktemp("vllm"), **shape)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_small("qwen3", tmp_path_factory.mktemp("vllm"), head_dim=32)


@pytest.fixture
def start():
    """NanoLLM for a policy; shut down at the end of the test."""
    started = []

    def start_one(policy, **options):
        started.append(NanoLLM(policy, **options))
        return started[-1]

    yield start_one
    for sampler in started:
        sampler.close()


def gap(policy, sampler):
    """|trainer - sampler| of at least 1,000 sampled tokens, in nats."""
    with sampler:
        completions = sampler.sample(PROMPTS, DRAW)
    gaps = trainer_gap(policy, completions, DRAW.temperature, PROMPTS)
    assert len(gaps) >= 1000
    return gaps


def train(policy, steps, lr):
    """Steps of the run's own optimiser that change every weight a little."""
    optimizer = make_optimizer(policy, lr=lr)
    ids = torch.tensor([[5, 77, 300, 12, 9, 41, 8] * 8])
    for _ in range(steps):
        logits = policy.to_logits(policy.hidden_states(ids))[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(policy):
    named = policy.causal_lm.named_parameters()
    return {n: p for n, p in named if "lora_" not in n}


@pytest.mark.parametrize("lora_rank", [0, 8], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_log_probs_are_the_trainers_at_the_start_and_after_20_steps(
    folder, start, dtype, lora_rank
):
    policy = load_policy(str(folder), device="cpu", dtype=dtype, lora_rank=lora_rank)
    sampler = start(policy)
    before = {n: p.clone() for n, p in weights(policy).items()}
    found = [gap(policy, sampler)]
    train(policy, steps=20, lr=1e-2 if lora_rank else 1e-3)
    sampler.sync()
    found.append(gap(policy, sampler))
    for moment, gaps in zip(["at the start", "after 20 steps"], found, strict=True):
        how = "LoRA" if lora_rank else "full"
        print(f"| {type(policy.causal_lm).__name__} | {dtype} | {how} | {moment} "
              f"| {gaps.mean():.1e} | {gaps.max():.1e} | {len(gaps)} |")  # fmt: skip
    for gaps in found:
        assert gaps.mean() < (1e-5 if dtype == "float32" else 2e-2)
        assert gaps.max() < (1e-4 if dtype == "float32" else torch.inf)
    changed = [not torch.equal(p, before[n]) for n, p in weights(policy).items()]
    assert not any(changed) if lora_rank else all(changed)
    weight_sharing.check_bound(sampler.engine_model, sampler.shared)


def test_20_steps_move_the_log_probs_far_more_than_the_gap(qwen3, start):
    policy = load_policy(str(qwen3), device="cpu", lora_rank=4)
    sampler = start(policy)
    with sampler:
        stale = sampler.sample(PROMPTS, DRAW)
    train(policy, steps=20, lr=1e-2)
    assert trainer_gap(policy, stale, DRAW.temperature, PROMPTS).mean() > 0.1
    sampler.sync()
    assert gap(policy, sampler).mean() < 1e-5


def test_there_is_one_copy_of_every_weight(folder, start):
    policy = load_policy(str(folder), device="cpu")
    sampler = start(policy)
    with sampler:
        sampler.sample(PROMPTS, DRAW)
    ours = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    theirs = {p.untyped_storage().data_ptr() for p in sampler.engine_model.parameters()}
    assert ours == theirs
    for other in gc.get_objects():
        real = type(other) is torch.Tensor or issubclass(type(other), torch.nn.Parameter)
        if not real or other.untyped_storage().data_ptr() in ours:
            continue
        for name, weight in weights(policy).items():
            if other.numel() >= weight.numel() > 1000 and other.dtype == weight.dtype:
                rows = other.reshape(-1)[: weight.numel()]
                assert not torch.equal(rows, weight.reshape(-1)), name


def test_greedy_completions_are_torch_samplers_token_for_token(folder, start):
    policy = load_policy(str(folder), device="cpu")
    greedy = SamplingParams(max_tokens=64, temperature=0)
    sampler = start(policy)
    with sampler:
        ours = sampler.sample(PROMPTS, greedy)
    theirs = TorchSampler(policy).sample(PROMPTS, greedy)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    assert [(c.text, c.finish_reason) for c in ours] == [(c.text, c.finish_reason) for c in theirs]
    assert trainer_gap(policy, ours, 1.0, PROMPTS).max() < 1e-4


@pytest.mark.parametrize("rank", [1, 3, 256])
def test_any_rank_fits_a_slot(qwen3, start, rank):
    policy = load_policy(str(qwen3), device="cpu", lora_rank=rank)
    sampler = start(policy)
    assert len(sampler.slots) == 2 * 7  # all linear layers of both layers
    train(policy, steps=3, lr=1e-2)
    sampler.sync()
    assert gap(policy, sampler).max() < 1e-4


def test_completions_come_in_order_end_as_they_should_and_count_their_end(qwen3, start):
    policy = load_policy(str(qwen3), device="cpu")
    policy.stop_ids = list(range(0, 384, 3))  # a third of all tokens ends a completion
    sampler = start(policy)
    with sampler:
        completions = sampler.sample(PROMPTS, SamplingParams(max_tokens=3, seed=5))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        ended = completion.token_ids[-1] in policy.stop_ids
        assert completion.finish_reason == ("stop" if ended else "length")
        assert not set(completion.token_ids[:-1]) & set(policy.stop_ids)
        assert ended or len(completion.token_ids) == 3
        assert len(completion.logprobs) == len(completion.token_ids)
        spoken = completion.token_ids[:-1] if ended else completion.token_ids
        assert completion.text == policy.tokenizer.decode(spoken)
    assert trainer_gap(policy, completions, 1.0, PROMPTS).max() < 1e-4


def test_a_seed_decides_a_call_and_the_host_draws_on_undisturbed(qwen3, start):
    policy = load_policy(str(qwen3), device="cpu")
    sampler = start(policy)
    draws = []
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with sampler:
        for seed in (1, 2, 1):
            completions = sampler.sample(PROMPTS, SamplingParams(max_tokens=8, seed=seed))
            draws.append([c.token_ids for c in completions])
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert draws[0] == draws[2] != draws[1]
    assert draws[0][0] != draws[0][3]  # equal prompts draw on their own
    assert before == after


def test_a_prompt_that_comes_again_is_computed_once(qwen3, start, monkeypatch):
    policy = load_policy(str(qwen3), device="cpu")
    sampler = start(policy)
    cached = []
    step = sampler.engine.step

    def watch():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(sampler.engine, "step", watch)
    with sampler:
        sampler.sample([list(range(100))] * 4, SamplingParams(max_tokens=1))
    assert sorted(cached) == [0, 96, 96, 96]  # whole blocks of 32
    cached.clear()
    sampler.sync()
    with sampler:
        sampler.sample([list(range(100))], SamplingParams(max_tokens=1))
    assert cached == [0]  # new weights: nothing of the old ones is used


def test_top_k_reports_the_renormalised_log_probs_it_drew_from(qwen3, start):
    policy = load_policy(str(qwen3), device="cpu")
    sampler = start(policy)
    with sampler:
        completions = sampler.sample(PROMPTS, SamplingParams(max_tokens=32, top_k=1, seed=3))
    assert all(abs(p) < 1e-6 for c in completions for p in c.logprobs)
    with sampler:
        completions = sampler.sample(PROMPTS, SamplingParams(max_tokens=32, top_p=0.5, seed=3))
    assert trainer_gap(policy, completions, 1.0, PROMPTS).mean() > 0.1


def test_the_host_process_is_as_before(qwen3):
    policy = load_policy(str(qwen3), device="cpu")
    before = state()
    sampler = NanoLLM(policy)
    assert state() == before
    sampler.close()
    assert state() == before


def test_the_cache_is_there_only_while_sampling(qwen3, start):
    policy = load_policy(str(qwen3), device="cpu")
    sampler = start(policy)

    def held():
        return sum(storage.nbytes() for storage, _ in sampler.cpu_cache)

    assert sampler.cpu_cache
    assert held() == 0
    places = {n: p.data_ptr() for n, p in sampler.engine_model.named_parameters()}
    with sampler:
        assert held() >= nanollm.CPU_CACHE_BYTES / 2
        first = sampler.sample(PROMPTS, DRAW)
    assert held() == 0
    with pytest.raises(RuntimeError, match="only inside `with sampler:`"):
        sampler.sample(PROMPTS, DRAW)
    with sampler:
        assert sampler.sample(PROMPTS, DRAW) == first
    assert {n: p.data_ptr() for n, p in sampler.engine_model.named_parameters()} == places


def test_what_stops_a_sampling_leaves_an_engine_that_samples(qwen3, start):
    policy = load_policy(str(qwen3), device="cpu")
    sampler = start(policy)
    with sampler:
        expected = sampler.sample(PROMPTS, DRAW)
    calls = iter([None, None, None])
    with pytest.raises(StopIteration), sampler:
        sampler.sample(PROMPTS, DRAW, lambda: next(calls))
    sampler.sync()
    with sampler:
        assert sampler.sample(PROMPTS, DRAW) == expected


def test_sync_refuses_while_a_completion_is_being_written(qwen3, start):
    policy = load_policy(str(qwen3), device="cpu")
    sampler = start(policy)
    progress = iter([None, None, sampler.sync])
    with pytest.raises(RuntimeError, match="still being written"), sampler:
        sampler.sample(PROMPTS, DRAW, lambda: (next(progress) or (lambda: None))())


def test_a_prompt_too_long_is_refused_in_one_line(qwen3, start):
    policy = load_policy(str(qwen3), device="cpu", max_length=64)
    sampler = start(policy)
    with sampler, pytest.raises(UsageError, match="a prompt of 64 tokens does not fit"):
        sampler.sample([[65] * 64], DRAW)
    with sampler:
        [cut] = sampler.sample([[65] * 60], SamplingParams(max_tokens=64, temperature=0))
    assert len(cut.token_ids) <= 4


def test_a_start_that_fails_leaves_nothing_and_the_next_one_works(qwen3, monkeypatch, start):
    policy = load_policy(str(qwen3), device="cpu")
    folders = set(os.listdir("/tmp"))
    with monkeypatch.context() as patch:
        patch.setattr(weight_sharing, "FUSED_INTO", {})
        with pytest.raises(
            UsageError, match=r"vLLM could not start: weights without a counterpart"
        ):
            NanoLLM(policy)
    assert not multiprocessing.active_children()
    assert not torch.distributed.is_initialized()
    assert not {f for f in set(os.listdir("/tmp")) - folders if f.startswith("nanollm-")}
    assert gap(policy, start(policy)).max() < 1e-4


def test_too_little_memory_is_one_line_with_the_numbers(qwen3):
    policy = load_policy(str(qwen3), device="cpu")
    policy.max_length = 10**9
    with pytest.raises(UsageError, match=r"1000000000 tokens need \d+\.\d GiB.*--max-model-len"):
        NanoLLM(policy)


def test_auto_is_plain_pytorch_on_a_cpu_and_vllm_by_name(qwen3):
    policy = load_policy(str(qwen3), device="cpu")
    assert isinstance(nanollm.make_sampler("auto", policy), TorchSampler)
    sampler = nanollm.make_sampler("vllm", policy)
    assert isinstance(sampler, NanoLLM)
    sampler.close()


SMALL = """--sampler vllm --sft-steps 6 --sft-batch-size 4 --num-updates 4 --num-prompts 3
    --group-size 4 --eval-num-tasks 4 --eval-every 2 --save-every 2 --max-tokens 24 --device cpu
    """.split()


@pytest.mark.parametrize(
    "flags",
    [["--algo", "reinforce"], ["--algo", "grpo"], ["--algo", "ppo"], ["--lora-rank", "4"]],
    ids=["reinforce", "grpo", "ppo", "lora"],
)
def test_a_run_resumed_halfway_is_the_whole_run_and_its_gap_is_rounding(command, flags):
    whole = command(*flags, "--run-name", "whole", "--lr", "1e-3", *SMALL)
    assert (whole[0], whole[2]) == (0, "")
    records = metrics_of(Path("runs/whole"))
    updates = [r for r in records if r.get("update", 0) > 0]
    assert len(updates) == 4
    for record in updates:
        assert record["tokens/trained"] == record["tokens/sampled"] > 0
        assert record["gap/logprob_mean"] < 1e-5
        assert record["gap/logprob_max"] < 1e-4
    half = command(*flags, "--run-name", "half", "--lr", "1e-3", *SMALL, "--num-updates", "2")
    assert half[0] == 0
    assert command("--resume", "runs/half", "--num-updates", "4")[0] == 0
    assert metrics_of(Path("runs/half")) == records


def test_ctrl_c_while_vllm_samples_saves_and_the_run_goes_on(command, monkeypatch):
    from vllm.v1.engine.llm_engine import LLMEngine

    command("--run-name", "whole", *SMALL)
    steps = 0
    step = LLMEngine.step

    def interrupt_once(engine):
        nonlocal steps
        steps += 1
        if steps == 60:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupt_once)
    code, out, _ = command("--run-name", "stopped", *SMALL)
    assert code == 130
    assert "stopped and saved" in out
    assert command("--resume", "runs/stopped")[0] == 0
    assert metrics_of(Path("runs/stopped")) == metrics_of(Path("runs/whole"))


def test_top_p_warns_that_log_probs_are_renormalised(command):
    code, out, err = command("--run-name", "a", *SMALL, "--num-updates", "1", "--top-p", "0.9")
    assert (code, err) == (0, "")
    assert "renormalised" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights can't be shared"),
        ({"lora": 257}, "--lora-rank 257: vLLM's limit is 256"),
        ({"device": "cuda"}, "this vLLM is for cpu, not cuda"),
        ({"device": "cuda:2"}, "set CUDA_VISIBLE_DEVICES=2"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_to_do(qwen3, change, message):
    policy = load_policy(str(qwen3), device="cpu", lora_rank=change.get("lora", 0))
    if "quantization_config" in change:
        policy.causal_lm.config.quantization_config = change["quantization_config"]
    policy.device = torch.device(change.get("device", "cpu"))
    with pytest.raises(UsageError, match=message):
        NanoLLM(policy)


def test_a_family_that_was_not_tried_is_refused_by_name(tmp_path):
    policy = load_policy(str(save_small("phi3", tmp_path)), device="cpu")
    with pytest.raises(UsageError, match=r"Qwen2, Qwen3, Llama, Gemma3, not with Phi3ForCausalLM"):
        NanoLLM(policy)


@pytest.mark.slow
@pytest.mark.seeds
def test_the_default_run_learns_with_vllm_what_it_learns_without(tmp_path):
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
