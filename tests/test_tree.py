"""A group packed as a tree: the same mathematics, with the prompt computed once."""

import pytest
import torch

import train
from algorithms import sft
from core import batching
from core.model import load_policy
from core.prefix_sharing import pack_groups
from core.types import Rollout, Turn

EVERYTHING = 10**9


def grouped(num_groups=3, size=4, prompt=30, longest=12, later_turns=0):
    """Rollouts of groups with prompts and completions of many lengths; more turns for some."""
    generator = torch.Generator().manual_seed(0)

    def ids(n):
        return torch.randint(5, 300, (n,), generator=generator).tolist()

    rollouts = []
    for group in range(num_groups):
        opening = ids(prompt + 7 * group)
        for member in range(size):
            turns, context = [], opening
            for _ in range(1 + later_turns * (member % 2)):
                written = ids(1 + (5 * member + group) % longest)
                turns.append(Turn(context, written, [-5.0] * len(written), "stop", float(member)))
                context = context + written + ids(3)
            rollouts.append(Rollout("test", "player", group, group, [], turns))
    return rollouts


def gradients_of(policy, update, max_tokens, trees):
    """(Log-probs [B, N], gradient of each weight, batches) of the supervised loss."""
    logprobs, batches = torch.zeros_like(update.rewards), []
    policy.model.zero_grad()
    for batch in batching.micro_batches(update.sequences, max_tokens, "cpu", trees):
        found, _, _ = train.forward(policy, batch, temperature=1.0)
        loss, _ = sft.compute_loss(found, batch.completion_mask, update.num_tokens)
        loss.backward()
        batching.put(found.detach(), batch, into=logprobs)
        batches.append(batch)
    return logprobs, [p.grad.clone() for p in policy.trainable().values()], batches


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("max_tokens", [EVERYTHING, 120])
@pytest.mark.parametrize("later_turns", [0, 2])
def test_packed_and_unpacked_gradients_are_equal(small_folder, lora_rank, max_tokens, later_turns):
    policy = load_policy(str(small_folder), device="cpu", lora_rank=lora_rank, seed=1)
    if lora_rank:
        for name, weight in policy.trainable().items():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(1))
    update = batching.to_rollout_batch(grouped(later_turns=later_turns))
    plain, expected, _ = gradients_of(policy, update, EVERYTHING, trees=False)
    packed, found, batches = gradients_of(policy, update, max_tokens, policy.packs_groups)
    if policy.causal_lm.config.model_type == "gemma3_text":  # some of its layers see a window only
        assert not policy.packs_groups and all(batch.tree is None for batch in batches)
    else:
        assert all(batch.tree is not None for batch in batches)
    assert (packed - plain).abs().max() < 1e-5
    largest = max(gradient.abs().max() for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * largest


def test_the_gradient_of_a_sum_over_a_group_is_the_sum_over_its_completions(small_folder):
    policy = load_policy(str(small_folder), device="cpu", seed=1)
    rollouts = grouped(num_groups=1, size=5, prompt=300)
    together = gradients_of(
        policy, batching.to_rollout_batch(rollouts), EVERYTHING, policy.packs_groups
    )
    alone = torch.zeros(5, together[0].shape[1])
    added = [torch.zeros_like(gradient) for gradient in together[1]]
    total = batching.to_rollout_batch(rollouts).num_tokens
    for row, rollout in enumerate(rollouts):
        update = batching.to_rollout_batch([rollout])
        logprobs, gradients, _ = gradients_of(policy, update, EVERYTHING, trees=False)
        alone[row, : logprobs.shape[1]] = logprobs[0]
        for sum_, gradient in zip(added, gradients, strict=True):
            sum_ += gradient * update.num_tokens / total
    assert (together[0] - alone).abs().max() < 1e-5
    largest = max(gradient.abs().max() for gradient in added)
    for ours, theirs in zip(together[1], added, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * largest


def test_a_prompt_is_computed_once_and_every_token_finds_its_place():
    update = batching.to_rollout_batch(grouped(num_groups=2, size=3, prompt=40))
    (batch,) = batching.micro_batches(update.sequences, EVERYTHING, trees=True)
    found = batch.tree.input_ids[0, batch.tree.places]
    real = torch.zeros_like(batch.input_ids, dtype=torch.bool)
    for row, ids in enumerate(batch.input_ids.tolist()):
        real[row, : len([token for token in ids if token != 0])] = True
    assert torch.equal(found[real], batch.input_ids[real])
    total = sum(len(s.token_ids) for s in update.sequences)
    shared = 2 * 40 + 2 * 47  # two of the three copies of each prompt are gone
    assert batch.tree.input_ids.numel() == len(batch.tree.places[real].unique()) == total - shared
    assert torch.equal(
        batch.tree.position_ids[0, batch.tree.places][real], real.cumsum(1)[real] - 1
    )


def test_a_branch_sees_its_prompt_and_itself_and_nothing_else():
    tree = pack_groups([[7, 7, 7], [8]], [(0, [1, 2]), (1, [3]), (-1, [4, 5])])
    assert tree.input_ids.tolist() == [[7, 7, 7, 8, 1, 2, 3, 4, 5]]
    assert tree.position_ids.tolist() == [[0, 1, 2, 0, 3, 4, 1, 0, 1]]
    assert tree.mask[:, 0].int().tolist() == [
        [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
        [[1, 0, 0, 1, 0], [1, 0, 0, 1, 1]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 1, 1]],
    ]
    assert tree.places.tolist() == [[0, 1, 2, 4, 5], [3, 6, 0, 0, 0], [7, 8, 0, 0, 0]]


def test_sequences_that_share_nothing_are_branches_of_nothing():
    update = batching.to_rollout_batch(grouped(num_groups=5, size=1))
    (batch,) = batching.micro_batches(update.sequences, EVERYTHING, trees=True)
    assert batch.tree.num_prompts == 0
    assert batch.tree.input_ids.numel() == sum(len(s.token_ids) for s in update.sequences)


@pytest.mark.parametrize("budget", [1, 70, 200, 1000, EVERYTHING])
def test_the_budget_counts_tokens_once_and_nothing_is_lost(budget):
    update = batching.to_rollout_batch(grouped(num_groups=6, size=8, prompt=40, later_turns=1))
    batches = list(batching.micro_batches(update.sequences, budget, trees=True))
    sizes = [batch.tree.input_ids.numel() for batch in batches]
    assert all(n <= budget or len(b.input_ids) == 1 for n, b in zip(sizes, batches, strict=True))
    count = torch.zeros_like(update.rewards)
    for batch in batches:
        count.view(-1)[batch.index[batch.completion_mask]] += 1
    assert torch.equal(count == 1, update.mask)
    if budget == EVERYTHING:
        prompts = sum(40 + 7 * group for group in range(6))
        assert sizes == [sum(len(s.token_ids) for s in update.sequences) - 7 * prompts]


def test_families_that_see_a_window_only_are_not_trained_on_trees(tmp_path):
    from conftest import save_small

    layers = ["full_attention", "sliding_attention"]
    changes = {"sliding_window": 8, "use_sliding_window": True, "layer_types": layers}
    folder = save_small("qwen2", tmp_path / "window", **changes)
    assert not load_policy(str(folder), device="cpu").packs_groups
    assert load_policy(str(save_small("qwen2", tmp_path / "full")), device="cpu").packs_groups
