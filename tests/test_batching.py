"""Every sampled token is trained once, in the context that it was sampled in."""

import pytest
import torch

from algorithms import grpo
from core.batching import (
    add_advantages,
    cut,
    micro_batches,
    minibatches,
    shape_rewards,
    to_tokens,
)
from core.config import Config
from core.faults import UsageError
from core.types import Rollout, Turn


def rollout(*turns, group_id=0):
    made = [
        Turn(prompt, completion, [-0.5 * t for t in completion], "stop", reward)
        for prompt, completion, reward in turns
    ]
    return Rollout("env", "player", 0, group_id, turns=made)


TWO_TURNS = rollout(([1, 2], [3, 9], 0.25), ([1, 2, 3, 9, 4], [5, 9], 1.0))
DROPPED = rollout(([1, 2], [3, 9], 0.0), ([1, 2, 9, 4], [5, 6, 9], 1.0))  # 3 left the context


def test_advantages_have_the_shape_of_the_batch_and_numbers_are_logged():
    batch = to_tokens([DROPPED, DROPPED])
    given = torch.ones(10)
    add_advantages(batch, {"advantages": given, "returns": given * 2, "mine/mean": given.mean()})
    assert batch.advantages is given and batch.numbers_to_log["mine/mean"] == 1.0
    add_advantages(batch, given.double())
    assert batch.advantages.dtype == torch.float32
    for wrong in (given[None], given[:9], given.view(2, 5)):
        with pytest.raises(UsageError, match=r"returns has the shape .*, not \[10\]"):
            add_advantages(batch, {"advantages": given, "returns": wrong})


def test_a_changed_context_starts_a_new_sequence():
    batch = to_tokens([DROPPED])
    assert [s.token_ids for s in batch.sequences] == [[1, 2, 3, 9], [1, 2, 9, 4, 5, 6, 9]]
    assert [s.numbers for s in batch.sequences] == [[-1, -1, 0, 1], [-1, -1, -1, -1, 2, 3, 4]]
    early = rollout(([1, 2], [3], 0.0), ([1, 5, 3, 4], [6], 0.0))  # its third token is the same
    assert [s.token_ids for s in to_tokens([early]).sequences] == [[1, 2, 3], [1, 5, 3, 4, 6]]
    batch = to_tokens([TWO_TURNS, DROPPED, TWO_TURNS])
    assert batch.sequence.tolist() == [0] * 4 + [1] * 2 + [2] * 3 + [3] * 4
    assert batch.env_turn.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1]


def test_kept_ids_are_those_of_each_token_in_the_order_of_turns():
    one = rollout(([1], [2, 3], 0.0), ([1, 2, 3], [4], 0.0), ([1, 2, 3, 4], [5, 6], 0.0))
    one.turns[0].kept_ids, one.turns[2].kept_ids = [[2, 9], [3]], [[5], [6, 9]]
    [micro] = cut(to_tokens([one]).sequences, 100)
    assert micro.kept_ids == [[2, 9], [3], None, [5], [6, 9]]
    assert next(cut(to_tokens([TWO_TURNS]).sequences, 100)).kept_ids is None


def test_rollouts_without_an_advantage_have_micro_batches_of_their_own(policy):
    batch = to_tokens([TWO_TURNS, DROPPED, TWO_TURNS])
    batch.advantages = torch.tensor([-1.0] * 4 + [0.0] * 9)  # a negative advantage, too, is one
    learning, others = micro_batches(policy, batch)
    assert [s.rollout for s in learning.sequences] == [0]
    assert sorted(s.rollout for s in others.sequences) == [1, 1, 2]


def test_a_turn_continues_the_longest_sequence_that_its_prompt_begins_with():
    """Two contexts in turn, such as an agent and the one that it asks; then a branch."""
    batch = to_tokens([rollout(
        ([1], [2], 0.0), ([5], [6], 0.0), ([1, 2, 3], [4], 0.0), ([5, 6, 7], [8], 0.0),
        ([1, 2, 9], [4], 0.0), ([1, 2, 3, 4], [2], 1.0),
    )])  # fmt: skip
    assert [s.token_ids for s in batch.sequences] == [[1, 2, 3, 4, 2], [5, 6, 7, 8], [1, 2, 9, 4]]
    numbers = [[-1, 0, -1, 2, 5], [-1, 1, -1, 3], [-1, -1, -1, 4]]
    assert [s.numbers for s in batch.sequences] == numbers
    begun = [([1, 2, 3], [4], 0.0), ([1], [2], 0.0)]  # the next prompt begins with both
    batch = to_tokens([rollout(*begun, ([1, 2, 3, 4, 5], [6], 0.0))])
    assert [s.token_ids for s in batch.sequences] == [[1, 2, 3, 4, 5, 6], [1, 2]]


@pytest.mark.parametrize("max_tokens", [1, 8, 10_000])
@pytest.mark.parametrize("share", [False, True])
def test_micro_batches_keep_their_budget_and_every_sampled_token(max_tokens, share):
    alike = [rollout(([1, 2, 3, 4, 5, 6], [i], 0.0)) for i in range(7, 12)]
    batch = to_tokens([TWO_TURNS, DROPPED, rollout(([1], [7], 0.5), group_id=1), *alike])
    seen = []
    for micro in cut(batch.sequences, max_tokens, share=share):
        size = len(micro.tree) if share else micro.input_ids.numel()
        assert size <= max_tokens or len(micro.input_ids) == 1
        seen += zip(micro.numbers.tolist(), micro.targets.tolist(), strict=True)
        if share:
            real = micro.input_ids != 0
            assert torch.equal(micro.tree.input_ids[0, micro.nodes[real]], micro.input_ids[real])
    assert sorted(seen) == sorted(
        (number, token) for s in batch.sequences
        for number, token in zip(s.numbers, s.token_ids, strict=True) if number >= 0
    )  # fmt: skip
    assert [number for number, _ in sorted(seen)] == [*range(15)]


def test_what_is_known_of_a_token_stands_at_its_number():
    batch = to_tokens([TWO_TURNS])
    (micro,) = cut(batch.sequences, 100)
    known = batch[micro.numbers]
    assert known.sampler_logprobs.tolist() == [-0.5 * t for t in micro.targets.tolist()]
    states = micro.input_ids.flatten()[micro.predictors]  # of the token before each
    assert states.tolist() == [2, 3, 4, 5] and micro.targets.tolist() == [3, 9, 5, 9]


def test_a_batch_without_tokens():
    for rollouts in ([], [Rollout("env", "player", 0, 0)]):
        batch = to_tokens(rollouts)
        shape_rewards(Config(), batch)
        assert len(batch) == len(grpo.compute_advantages(batch, grpo.Options())) == 0
        assert batch.sequences == []
    assert list(minibatches(Config(num_epochs=2, num_minibatches=4), 0, 1)) == []


def test_turn_ids_lengths_and_token_limits_are_at_the_tokens_of_their_turn():
    turns = [
        Turn([1], [5, 6], [-1.0, -1.0], "stop", 0.5),
        Turn([1, 5, 6, 9], [7, 8, 4], [-1.0] * 3, "length", 2.0),
    ]
    batch = to_tokens([Rollout("e", "player", 0, 0, turns=turns)])
    assert batch.env_turn.tolist() == [0, 0, 1, 1, 1]
    assert batch.completion_lengths.tolist() == [0, 2, 0, 0, 3]
    assert batch.hit_token_limit.tolist() == [False, False, True, True, True]
    assert batch.env_rewards.tolist() == [0.0, 0.5, 0.0, 0.0, 2.0]


def test_each_epoch_splits_all_rollouts_in_another_order():
    cfg = Config(num_epochs=2, num_minibatches=3)
    steps = [(m.epoch, m.rollouts) for m in minibatches(cfg, 10, update=4)]
    assert [(epoch, len(rows)) for epoch, rows in steps] == [
        (0, 3), (0, 4), (0, 3), (1, 3), (1, 4), (1, 3),
    ]  # fmt: skip
    for epoch in (0, 1):
        assert sorted(row for e, rows in steps if e == epoch for row in rows) == list(range(10))
    assert [rows for _, rows in steps[:3]] != [rows for _, rows in steps[3:]]
    again, other = ([(s.epoch, s.rollouts) for s in minibatches(cfg, 10, u)] for u in (4, 5))
    assert steps == again != other


def test_rewards_are_discounted_by_the_episode_or_at_the_end_of_each_turn():
    batch = to_tokens([TWO_TURNS])
    shape_rewards(Config(credit="episode", gamma=0.5), batch)
    assert batch.rewards.tolist() == [0, 0.25, 0, 0.5] and batch.turn.tolist() == [0] * 4
    assert batch.discounts.tolist() == [1] * 4
    shape_rewards(Config(credit="turn", gamma=0.5), batch)
    assert batch.rewards.tolist() == [0, 0.25, 0, 1] and batch.turn.tolist() == [0, 0, 1, 1]
    assert batch.discounts.tolist() == [1, 0.5, 1, 0.5]
