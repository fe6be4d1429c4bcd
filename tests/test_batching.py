"""Every sampled token is trained once, in the context that it was sampled in."""

import pytest
import torch

from core.batching import micro_batches, minibatches, put, rows, to_rollout_batch
from core.types import Rollout, Turn


def rollout(*turns, group_id=0):
    made = [
        Turn(prompt, completion, [-0.5 * t for t in completion], "stop", reward)
        for prompt, completion, reward in turns
    ]
    return Rollout("env", "player", 0, group_id, turns=made)


def contexts(update):
    """All (context, token) pairs at which the sequences are trained."""
    return [
        (s.token_ids[:i], s.token_ids[i])
        for s in update.sequences
        for i, place in enumerate(s.places)
        if place >= 0
    ]


TWO_TURNS = rollout(([1, 2], [3, 9], 0.25), ([1, 2, 3, 9, 4], [5, 9], 1.0))
DROPPED = rollout(([1, 2], [3, 9], 0.0), ([1, 2, 9, 4], [5, 6, 9], 1.0))  # 3 left the context


def test_turns_that_continue_share_one_sequence():
    update = to_rollout_batch([TWO_TURNS])
    assert [s.token_ids for s in update.sequences] == [[1, 2, 3, 9, 4, 5, 9]]
    assert update.sequences[0].places == [-1, -1, 0, 1, -1, 2, 3]


def test_a_changed_context_starts_a_new_sequence():
    update = to_rollout_batch([DROPPED])
    assert [s.token_ids for s in update.sequences] == [[1, 2, 3, 9], [1, 2, 9, 4, 5, 6, 9]]
    assert [s.places for s in update.sequences] == [[-1, -1, 0, 1], [-1, -1, -1, -1, 2, 3, 4]]


@pytest.mark.parametrize("episode", [TWO_TURNS, DROPPED])
def test_tokens_trained_are_those_sampled_in_their_contexts_eos_included(episode):
    sampled = [
        (turn.prompt_ids + turn.completion_ids[:i], token)
        for turn in episode.turns
        for i, token in enumerate(turn.completion_ids)
    ]
    assert contexts(to_rollout_batch([episode])) == sampled


def test_rewards_stand_on_the_last_token_of_their_turn():
    update = to_rollout_batch([TWO_TURNS, rollout(([1], [7], 0.5), group_id=1)])
    assert update.rewards.tolist() == [[0, 0.25, 0, 1.0], [0.5, 0, 0, 0]]
    assert update.mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert update.sampler_logprobs[0].tolist() == [-1.5, -4.5, -2.5, -4.5]
    assert update.group_ids.tolist() == [0, 1]


@pytest.mark.parametrize("max_tokens", [1, 8, 10_000])
def test_rows_and_put_are_inverse_for_any_micro_batch_size(max_tokens):
    update = to_rollout_batch([TWO_TURNS, DROPPED, rollout(([1], [7], 0.5), group_id=1)])
    known = torch.arange(update.mask.numel(), dtype=torch.float32).view_as(update.mask) + 1
    back, seen = torch.zeros_like(known), 0
    for batch in micro_batches(update.sequences, max_tokens):
        here = rows(known, batch)
        assert (here[~batch.completion_mask] == 0).all()
        put(here, batch, into=back)
        seen += batch.num_tokens
    assert torch.equal(back, known * update.mask)
    assert seen == update.num_tokens == 10


def test_rows_align_the_logprob_with_the_token_that_it_predicts():
    update = to_rollout_batch([TWO_TURNS])
    (batch,) = micro_batches(update.sequences, 100)
    targets = batch.input_ids[:, 1:][batch.completion_mask]
    assert rows(update.sampler_logprobs, batch)[batch.completion_mask].tolist() == [
        -0.5 * t for t in targets.tolist()
    ]


def test_micro_batches_stay_under_the_budget_and_lose_nothing():
    update = to_rollout_batch(
        [rollout((list(range(1, n)), [3, 9], 0.0)) for n in (5, 50, 9, 20, 7)]
    )
    batches = list(micro_batches(update.sequences, 40))
    assert sum(len(b.input_ids) for b in batches) == 5
    assert all(b.input_ids.numel() <= 40 or len(b.input_ids) == 1 for b in batches)


def test_an_update_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no rollout"):
        to_rollout_batch([Rollout("env", "player", 0, 0)])


def test_turns_lengths_and_cut_off_completions_stand_where_their_tokens_do():
    turns = [
        Turn([1], [5, 6], [-1.0, -1.0], "stop", 0.5),
        Turn([1, 5, 6, 9], [7, 8, 4], [-1.0] * 3, "length", 2.0),
    ]
    update = to_rollout_batch([Rollout("e", "player", 0, 0, turns=turns)])
    assert update.turn_ids.tolist() == [[0, 0, 1, 1, 1]]
    assert update.lengths.tolist() == [[0, 2, 0, 0, 3]]
    assert update.hit_token_limit.tolist() == [[False, False, True, True, True]]
    assert update.rewards.tolist() == [[0.0, 0.5, 0.0, 0.0, 2.0]]


def test_each_epoch_takes_every_rollout_once_in_another_order():
    steps = minibatches(10, epochs=2, count=3, seed=4)
    assert [len(rows) for rows in steps] == [3, 4, 3] * 2
    for epoch in (steps[:3], steps[3:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(10))
    assert steps[:3] != steps[3:]
    assert steps == minibatches(10, 2, 3, seed=4) != minibatches(10, 2, 3, seed=5)
    assert minibatches(2, 1, 5, seed=0) in ([[0], [1]], [[1], [0]])  # no step without a rollout
