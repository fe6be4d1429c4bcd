"""What a training pass holds is counted, and layers are computed twice when it is too much."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_tree import EVERYTHING, gradients_of, grouped

import train
from core import batching, memory, settings
from core.memory import fit, kept_bytes, recompute_layers
from core.model import load_policy


def test_kept_bytes_are_those_of_a_linear_map_and_its_activation(policy):
    """Of x [T, 32] -> silu(x W) [T, 32]: x and x W are kept, 256 bytes a token, W is not."""
    policy.model.weight = torch.nn.Parameter(torch.randn(32, 32))

    def one_layer(ids):
        x = torch.randn(1, ids.shape[1], 32, requires_grad=True) * 1.0
        return torch.nn.functional.silu(x @ policy.model.weight)

    policy.hidden_states = one_layer
    assert kept_bytes(policy) == 2 * 32 * 4


def test_kept_bytes_grow_with_the_layers_and_not_with_the_vocabulary(policy, tmp_path):
    from conftest import save_small

    deep = save_small("qwen3", tmp_path / "deep", num_hidden_layers=4)
    wide = save_small("qwen3", tmp_path / "wide", vocab_size=4096)
    two, four, more_words = (
        kept_bytes(p) for p in (policy, *(load_policy(str(f), device="cpu") for f in (deep, wide)))
    )
    assert 1.7 < four / two < 2.0  # beside the layers there are an embedding and a norm
    assert more_words == pytest.approx(two, rel=0.01)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_layers_computed_again_keep_less_and_give_the_same_gradients(small_folder, lora_rank):
    policy = load_policy(str(small_folder), device="cpu", lora_rank=lora_rank, seed=1)
    update = batching.to_update(grouped(later_turns=1))
    plain, expected, _ = gradients_of(policy, update, EVERYTHING, policy.takes_trees)
    before = kept_bytes(policy)
    recompute_layers(policy)
    assert len(policy.recomputed) == 2
    assert kept_bytes(policy) < 0.8 * before  # its inputs, and one of its two layers at a time
    again, found, _ = gradients_of(policy, update, EVERYTHING, policy.takes_trees)
    assert torch.equal(again, plain)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-6


def test_sampling_is_not_computed_twice(policy):
    recompute_layers(policy)
    with torch.no_grad():
        policy.hidden_states(torch.zeros(1, 4, dtype=torch.int64))
    assert not any(layer.training for layer in policy.recomputed)


@pytest.mark.parametrize(
    ("free", "asked", "mode", "at_once", "again"),
    [
        (None, None, "auto", memory.ON_CPU, False),  # nothing is known of the memory
        (None, 100, "auto", 100, False),
        (None, None, "on", memory.ON_CPU, True),
        (10**12, None, "auto", memory.MOST, False),
        (10**12, 5000, "auto", 5000, False),
        (10**12, None, "on", memory.MOST, True),
        (1.1e9, None, "auto", "fits", False),
        (0.7e9, None, "auto", "fits", True),  # the longest episode wouldn't fit
        (0.7e9, None, "off", "fits", False),
        (0.7e9, 3000, "auto", 3000, True),
        (0, None, "auto", memory.LEAST, True),
    ],
)
def test_micro_batches_fit_into_what_is_free(
    policy, monkeypatch, free, asked, mode, at_once, again
):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    cfg = settings.resolve(
        train.Config(model_id="x", max_tokens_per_micro_batch=asked, gradient_checkpointing=mode)
    )
    assert cfg.max_model_len == 8 * 1024 + 4096
    said = fit(policy, SimpleNamespace(**vars(cfg)), to_come=0)
    assert bool(policy.recomputed) == again
    if at_once == "fits":
        room = free - 4 * memory.LOGIT_COPIES * memory.LOGITS
        assert memory.LEAST < policy.tokens_at_once < memory.MOST
        assert policy.tokens_at_once * kept_bytes(policy) == pytest.approx(0.7 * room, rel=0.01)
    else:
        assert policy.tokens_at_once == at_once
    assert bool(said) == (free is not None)


def test_what_is_still_to_come_is_left_free(policy, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2 * 10**9)
    cfg = settings.resolve(train.Config(model_id="x"))
    fit(policy, cfg, to_come=0)
    most = policy.tokens_at_once
    fit(policy, cfg, to_come=10**9)
    assert policy.tokens_at_once < most


def test_a_run_with_gradient_checkpointing_is_the_same_run(command):
    small = """--sft-steps 4 --sft-batch-size 4 --num-updates 2 --num-prompts 2 --group-size 4
        --eval-num-tasks 2 --max-tokens 12 --device cpu --no-cache""".split()
    losses = []
    for mode in ("off", "on"):
        assert command(*small, "--gradient-checkpointing", mode, "--run-name", mode)[0] == 0
        lines = Path(f"runs/{mode}/metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1] and losses[0][-1] is not None
