"""core/prefix_sharing.py: packed groups give the results of separate sequences."""

import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, ids_of, load_small, rollouts_of, save_small

import core.loading as loading
from core import batching, prefix_sharing
from core.loading import load_policy
from core.prefix_sharing import pack_groups

sys.path.append(str(Path(__file__).parent.parent / "runs/families"))
from families import save_model

UNLIMITED = 10**9


def suffix_logprob(policy, hidden, ids, start):
    """Sum of the log-probs of ids[start:], from the last hidden states [T, D]."""
    logprobs = policy.to_logits(hidden[: len(ids)]).log_softmax(-1)
    places = torch.arange(start, len(ids))
    return logprobs[places - 1, torch.tensor(ids)[places]].sum()


def flash_attention(q, k, v, query_ends, key_ends, max_queries, max_keys, **options):
    """varlen_attn, which needs a GPU, part by part: the last query is at the last key."""
    assert options["enable_gqa"] and options["window_size"] == (-1, 0)
    query_counts, key_counts = query_ends.diff().tolist(), key_ends.diff().tolist()
    assert (max(query_counts), max(key_counts)) == (max_queries, max_keys)
    outputs = []
    parts = (q.split(query_counts), k.split(key_counts), v.split(key_counts))
    for queries, keys, values in zip(*parts, strict=True):
        mask = torch.ones(len(queries), len(keys), device=q.device, dtype=torch.bool)
        mask = mask.tril(len(keys) - len(queries))
        output = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (queries, keys, values)), attn_mask=mask,
            scale=options["scale"], enable_gqa=True,
        )  # fmt: skip
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("family", "lora_rank"), [("qwen3", 4), ("qwen2", 0), ("llama", 0), ("Granite", 4),
    ("SmolLM3", 4), ("GPT2", 0), ("OPT", 0)],
)  # fmt: skip
def test_packed_gradients_equal_those_of_separate_sequences(family, lora_rank, tmp_path):
    save = save_small if family in FAMILIES else save_model
    policy = load_policy(str(save(family, tmp_path)), device="cpu", lora_rank=lora_rank)
    assert policy.packs_groups and not policy.remark
    check_packed_gradients(policy)


def test_packed_gradients_of_flash_attention(qwen3_folder, monkeypatch):
    monkeypatch.setattr(prefix_sharing, "takes_varlen", lambda query: True)
    monkeypatch.setattr(prefix_sharing, "varlen_attn", flash_attention)
    check_packed_gradients(load_small(qwen3_folder, lora_rank=4, seed=1))


def check_packed_gradients(policy):
    generator = torch.Generator().manual_seed(0)
    for name, weight in policy.trainable().items():
        if "lora_B" in name:  # zero at first, and then lora_A would have no gradient
            torch.nn.init.normal_(weight, std=0.1, generator=generator)
    prompts = [ids_of(30, generator), ids_of(37, generator)]
    suffixes = [(i, ids_of(length, generator)) for i in (0, 1) for length in (1, 6, 12, 23)]
    suffixes.append((-1, ids_of(17, generator)))
    sequences = [((prompts[i] if i >= 0 else []) + ids, ids) for i, ids in suffixes]
    starts = [max(1, len(whole) - len(ids)) for whole, ids in sequences]
    parameters = list(policy.trainable().values())

    separate = torch.stack([
        suffix_logprob(policy, policy.hidden_states(torch.tensor([whole]))[0], whole, start)
        for (whole, _), start in zip(sequences, starts, strict=True)
    ])  # fmt: skip
    expected = torch.autograd.grad(separate.sum(), parameters)
    padded = torch.zeros(len(sequences), max(len(whole) for whole, _ in sequences)).long()
    hidden = policy.hidden_states(padded, pack_groups(prompts, suffixes))
    packed = torch.stack([
        suffix_logprob(policy, row, whole, start)
        for row, (whole, _), start in zip(hidden, sequences, starts, strict=True)
    ])  # fmt: skip
    actual = torch.autograd.grad(packed.sum(), parameters)
    assert torch.allclose(packed, separate, rtol=1e-5)
    largest = max(gradient.abs().max() for gradient in expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * largest


def test_pack_groups_layout():
    packed = pack_groups([[7, 7, 7], [8]], [(0, [1, 2]), (1, [3]), (-1, [4, 5])])
    assert packed.input_ids.tolist() == [[7, 7, 7, 8, 1, 2, 3, 4, 5]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 3, 4, 1, 0, 1]]
    assert packed.suffix_mask[:, 0].int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 1, 1]],
    ]
    assert packed.sequence_index.tolist() == [[0, 1, 2, 4, 5], [3, 6, 0, 0, 0], [7, 8, 0, 0, 0]]


def test_micro_batches_contain_each_prompt_once():
    batch = batching.to_rollout_batch(rollouts_of(num_groups=2, size=3, prompt=40))
    (micro,) = batching.cut(batch.sequences, UNLIMITED, pack=True)
    packed = micro.packed
    assert packed.num_prompts == 2
    real = micro.input_ids != 0
    places = packed.sequence_index[real]
    assert torch.equal(packed.input_ids[0, places], micro.input_ids[real])
    assert torch.equal(packed.position_ids[0, places], real.cumsum(1)[real] - 1)
    all_tokens = sum(len(s.token_ids) for s in batch.sequences)
    saved = 2 * 40 + 2 * 47  # two of the three copies of each prompt
    assert packed.input_ids.numel() == len(places.unique()) == all_tokens - saved


@pytest.mark.parametrize("budget", [1, 200, UNLIMITED])
def test_packed_micro_batches_keep_the_budget_and_every_sampled_token(budget):
    batch = batching.to_rollout_batch(rollouts_of(num_groups=6, size=8, prompt=40))
    micros = list(batching.cut(batch.sequences, budget, pack=True))
    sizes = [micro.packed.input_ids.numel() for micro in micros]
    assert all(n <= budget or len(m.input_ids) == 1 for n, m in zip(sizes, micros, strict=True))
    count = torch.zeros_like(batch.rewards)
    for micro in micros:
        count.view(-1)[micro.index[micro.completion_mask]] += 1
    assert torch.equal(count == 1, batch.completion_mask)
    if budget == UNLIMITED:
        prompts = sum(40 + 7 * group for group in range(6))
        assert sizes == [sum(len(s.token_ids) for s in batch.sequences) - 7 * prompts]


def test_models_with_sliding_windows_shorter_than_their_context_are_not_packed(tmp_path):
    layers = ["full_attention", "sliding_attention"]
    changes = {"sliding_window": 64, "use_sliding_window": True, "layer_types": layers}
    folder = save_small("qwen2", tmp_path / "window", **changes)
    policy = load_small(folder)
    assert not policy.packs_groups
    assert "window of 64 tokens is shorter" in policy.remark
    policy = load_small(folder, max_length=64)
    assert policy.packs_groups and not policy.remark
    assert load_small(save_small("qwen2", tmp_path / "full")).packs_groups


def test_models_that_cannot_be_packed_train_unpacked_with_a_remark(tmp_path):
    policy = load_policy(str(save_model("StableLm", tmp_path)), device="cpu")
    assert not policy.packs_groups
    assert policy.causal_lm.config._attn_implementation == "sdpa"
    assert policy.remark.startswith("computing each prompt once per completion, as its layers")


def test_a_model_whose_packed_log_probs_differ_is_not_packed(qwen3_folder, monkeypatch):
    def shifted(prompts, suffixes):
        packed = pack_groups(prompts, suffixes)
        packed.position_ids[:, -3:] += 1
        return packed

    monkeypatch.setattr(loading, "pack_groups", shifted)
    policy = load_policy(str(qwen3_folder), device="cpu")
    assert not policy.packs_groups
    assert re.search(r"log-probs would be \S+ nats off", policy.remark)
