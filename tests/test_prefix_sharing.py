"""core/prefix_sharing.py: the tree of prefixes gives the results of separate sequences."""

import random
from functools import partial

import pytest
import torch
from conftest import load_small, save_small
from torch.nn.functional import rms_norm

import core.loading as loading
from core.config import Config
from core.prefix_sharing import make_tree


def random_sequences(seed):
    """Token ids that branch anywhere; some are equal, or begin others, or have one token."""
    draw = random.Random(seed)
    found = [[draw.randrange(5, 300) for _ in range(draw.choice([1, 2, 30, 150]))]]
    for _ in range(draw.randrange(12)):
        stem = draw.choice(found)
        kept = stem[: draw.choice([0, len(stem), draw.randrange(len(stem) + 1)])]
        new = [draw.randrange(5, 8) for _ in range(draw.choice([0, 1, 5, 80]))]
        found.append(kept + new or [5])
    draw.shuffle(found)
    return found


def results(policy, sequences, tree):
    """The hidden states of all tokens, and the gradient of an uneven function of them."""
    if tree is None:
        rows = [policy.hidden_states(torch.tensor([ids]))[0] for ids in sequences]
    else:
        hidden = policy.hidden_states(torch.zeros(1, 1), tree)[0]
        rows = [hidden[n[: len(ids)]] for n, ids in zip(tree.nodes, sequences, strict=True)]
    hidden = torch.cat(rows)
    pull = torch.linspace(-1, 2, hidden.numel(), dtype=hidden.dtype).view(hidden.shape)
    parameters = list(policy.trainable().values())
    gradients = torch.autograd.grad((hidden * pull).sum(), parameters, allow_unused=True)
    return hidden, torch.cat([g.flatten() for g in gradients if g is not None])


def norm_in_float64(module, x):
    return rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


@pytest.mark.parametrize(("family", "lora_rank", "seeds"), [
    ("Qwen3", 0, range(10)), ("Granite", 4, [3]), ("GPT2", 0, [3]),
])  # fmt: skip
def test_trees_give_the_results_of_separate_sequences(family, lora_rank, seeds, tmp_path):
    """By blocks, as on a CPU; runs/benchmarks/gpu_check.py compares FlashAttention with these."""
    policy = load_small(save_small(family, tmp_path), lora_rank=lora_rank)
    assert policy.shares_prefixes and not policy.remarks
    policy.model.double()
    for module in policy.model.modules():
        if hasattr(module, "variance_epsilon"):  # transformers computes these in float32
            module.forward = partial(norm_in_float64, module)
    for name, weight in policy.trainable().items():
        if "lora_B" in name:  # zero at first, and then lora_A would have no gradient
            torch.nn.init.normal_(weight, std=0.1)
    for seed in seeds:
        sequences = random_sequences(seed)
        distinct = {tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)}
        tree = make_tree(sequences)
        assert len(tree) == len(distinct)
        found, expected = results(policy, sequences, tree), results(policy, sequences, None)
        for ours, theirs in zip(found, expected, strict=True):  # hidden states, then gradients
            assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max(), seed


def test_models_with_sliding_windows_shorter_than_their_context_are_not_shared(tmp_path):
    layers = ["full_attention", "sliding_attention"]
    changes = {"sliding_window": 64, "use_sliding_window": True, "layer_types": layers}
    folder = save_small("Qwen2", tmp_path / "window", **changes)
    policy = load_small(folder)
    assert not policy.shares_prefixes
    assert "window of 64 tokens is shorter" in policy.remarks[0]
    policy = load_small(folder, max_model_len=64)
    assert policy.shares_prefixes and not policy.remarks
    assert load_small(save_small("Qwen2", tmp_path / "full")).shares_prefixes


def test_a_model_whose_log_probs_would_differ_shares_no_prefixes(qwen3_folder, monkeypatch):
    def shifted(sequences):
        tree = make_tree(sequences)
        tree.position_ids[:, -3:] += 1
        return tree

    monkeypatch.setattr(loading, "make_tree", shifted)
    policy = loading.load_policy(Config(device="cpu"), str(qwen3_folder))
    assert not policy.shares_prefixes and "nats off" in policy.remarks[0]


def test_the_rounding_of_a_token_that_is_never_sampled_refuses_nothing():
    """Its logit rounds by more than the limit, and its probability is 0."""
    expected = torch.tensor([[-0.1, -2.0, -29.0, -900.0]])
    found = expected + torch.tensor([[0.0, 0.02, -0.01, 3.0]])
    assert loading._gaps(found, expected).tolist() == pytest.approx([0, 0.02, 0.01], abs=5e-3)
