"""A group packed as a tree: the same mathematics, with the prompt computed once."""

import pytest
import torch

import train
from algorithms import sft
from core import batching
from core.model import load_policy
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


def gradients_of(policy, update, max_tokens, pair_cost):
    """(Log-probs [B, N], gradient of each weight, batches) of the supervised loss."""
    logprobs, batches = torch.zeros_like(update.rewards), []
    policy.model.zero_grad()
    for batch in batching.micro_batches(update.sequences, max_tokens, "cpu", pair_cost):
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
    update = batching.to_update(grouped(later_turns=later_turns))
    plain, expected, _ = gradients_of(policy, update, EVERYTHING, None)
    packed, found, batches = gradients_of(policy, update, max_tokens, policy.pair_cost)
    if policy.causal_lm.config.model_type == "gemma3_text":  # some of its layers see a window only
        assert policy.pair_cost is None and all(batch.tree is None for batch in batches)
    else:
        assert any(batch.tree is not None for batch in batches)
    assert (packed - plain).abs().max() < 1e-5
    largest = max(gradient.abs().max() for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * largest


def test_a_prompt_is_computed_once_and_every_token_finds_its_place():
    update = batching.to_update(grouped(num_groups=2, size=3, prompt=40))
    (batch,) = batching.micro_batches(update.sequences, EVERYTHING, "cpu", pair_cost=0.001)
    assert batch.tree.input_ids.shape[0] == 2
    found = batch.tree.input_ids.flatten()[batch.tree.places]
    real = torch.zeros_like(batch.input_ids, dtype=torch.bool)
    for row, sequence in enumerate(sorted_like(batch, update)):
        real[row, : len(sequence.token_ids)] = True
    assert torch.equal(found[real], batch.input_ids[real])
    where = batch.tree.places[real]
    lengths = [len(s.token_ids) for s in update.sequences]
    shared = 2 * 40 + 2 * 47  # two of the three copies of each prompt are gone
    assert len(where.unique()) == sum(lengths) - shared


def sorted_like(batch, update):
    """The sequences of the update in the order of the batch's rows."""
    by_ids = {tuple(s.token_ids): s for s in update.sequences}
    rows = [[t for t in row if t != 0] for row in batch.input_ids.tolist()]
    return [by_ids[tuple(row)] for row in rows]


def test_a_branch_sees_its_prompt_and_itself_and_nothing_else():
    turns = [Turn([7, 7], [1, 2], [0.0] * 2, "stop"), Turn([7, 7], [3], [0.0], "stop")]
    rollouts = [Rollout("test", "player", 0, 0, [], [turn]) for turn in turns]
    update = batching.to_update(rollouts)
    (batch,) = batching.micro_batches(update.sequences, EVERYTHING, "cpu", pair_cost=0.0)
    assert batch.tree.input_ids.tolist() == [[7, 7, 1, 2, 3]]
    assert batch.tree.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.tree.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert batch.tree.places.tolist() == [[0, 1, 2, 3], [0, 1, 4, 0]]


def test_packing_is_chosen_where_it_costs_less():
    """2 sequences of 10 + 10: 40 tokens and 2·20²/2 pairs apart, 30 tokens and 30² together."""
    turns = [Turn(list(range(10)), [i] * 10, [0.0] * 10, "stop") for i in (1, 2)]
    rollouts = [Rollout("test", "player", 0, 0, [], [turn]) for turn in turns]
    sequences = batching.to_update(rollouts).sequences

    def is_packed(pair_cost, max_tokens=EVERYTHING):
        batches = list(batching.micro_batches(sequences, max_tokens, "cpu", pair_cost))
        return batches[0].tree is not None

    equal = (40 - 30) / (30**2 - 2 * 20**2 / 2)  # 0.02
    assert is_packed(0.99 * equal) and not is_packed(1.01 * equal)
    assert not is_packed(None)
    assert is_packed(0.0, max_tokens=30) and not is_packed(0.0, max_tokens=29)


def test_the_budget_counts_packed_tokens():
    update = batching.to_update(grouped(num_groups=6, size=8, prompt=40))
    batches = list(batching.micro_batches(update.sequences, 200, "cpu", pair_cost=0.001))
    assert all(batch.tree is None or batch.tree.input_ids.numel() <= 200 for batch in batches)
    rows = torch.zeros_like(update.rewards)
    for batch in batches:
        batching.put(torch.ones_like(batch.index, dtype=torch.float32), batch, into=rows)
    assert torch.equal(rows == 1, update.mask)


def test_a_learning_update_packs_by_itself(policy):
    update = batching.to_update(grouped(prompt=60, size=8))
    batches = list(train.micro_batches(policy, update.sequences))
    assert all(batch.tree is not None for batch in batches)
