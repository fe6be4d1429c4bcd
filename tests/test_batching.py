"""Every sampled token is trained once, in the context that it was sampled in."""

from types import SimpleNamespace

import pytest
import torch

from algorithms import grpo
from core.batching import add_advantages, cut, micro_batches, minibatches, shape_rewards, to_tokens
from core.config import Config
from core.faults import UsageError
from core.types import Rollout, Turn


def rollout(*turns, group_id=0):
    made = [
        Turn(prompt, completion, [-0.5 * t for t in completion], "stop", reward)
        for prompt, completion, reward in turns
    ]
    return Rollout("env", "player", 0, group_id, turns=made)


def cut_into(sequences, max_tokens=100, share=False):
    policy = SimpleNamespace(micro_batch_tokens=max_tokens, shares_prefixes=share, device="cpu")
    return [*cut(sequences, policy)]


TWO_TURNS = rollout(([1, 2], [3, 9], 0.25), ([1, 2, 3, 9, 4], [5, 9], 1.0))
DROPPED = rollout(([1, 2], [3, 9], 0.0), ([1, 2, 9, 4], [5, 6, 9], 1.0))  # 3 left the context


def test_advantages_have_the_shape_of_the_batch_and_numbers_are_logged():
    batch = to_tokens([DROPPED, DROPPED])
    given = torch.ones(10)
    add_advantages(batch, {"advantages": given, "returns": given * 2, "mine/mean": given.mean()})
    assert batch.advantages is given and batch.advantage_metrics["mine/mean"] == 1.0
    add_advantages(batch, given.double())
    assert batch.advantages.dtype == torch.float32
    for wrong in (given[None], given[:9], given.view(2, 5)):
        with pytest.raises(UsageError, match=r"returns has the shape .*, not \[10\]"):
            add_advantages(batch, {"advantages": given, "returns": wrong})
    for wrong in ({"returns": given}, {"advantages": 1.0}, [1.0] * 10, given.sum()):
        with pytest.raises(UsageError, match=r"advantages has the shape .*, not \[10\]"):
            add_advantages(batch, wrong)
    with pytest.raises(UsageError, match="token_weights is a vector of the loop"):
        add_advantages(batch, {"advantages": given, "token_weights": given})


@pytest.mark.parametrize("turns, token_ids, numbers", [
    ([([1, 2], [3, 9], 0.0), ([1, 2, 9, 4], [5, 6, 9], 1.0)],  # a changed context
     [[1, 2, 3, 9], [1, 2, 9, 4, 5, 6, 9]], [[-1, -1, 0, 1], [-1, -1, -1, -1, 2, 3, 4]]),
    ([([1, 2], [3], 0.0), ([1, 5, 3, 4], [6], 0.0)],  # whose third token is the same
     [[1, 2, 3], [1, 5, 3, 4, 6]], [[-1, -1, 0], [-1, -1, -1, -1, 1]]),
    # two contexts in turn, such as an agent and the one that it asks; then a branch
    ([([1], [2], 0.0), ([5], [6], 0.0), ([1, 2, 3], [4], 0.0), ([5, 6, 7], [8], 0.0),
      ([1, 2, 9], [4], 0.0), ([1, 2, 3, 4], [2], 1.0)],
     [[1, 2, 3, 4, 2], [5, 6, 7, 8], [1, 2, 9, 4]],
     [[-1, 0, -1, 2, 5], [-1, 1, -1, 3], [-1, -1, -1, 4]]),
    # the last prompt begins with both
    ([([1, 2, 3], [4], 0.0), ([1], [2], 0.0), ([1, 2, 3, 4, 5], [6], 0.0)],
     [[1, 2, 3, 4, 5, 6], [1, 2]], [[-1, -1, -1, 0, -1, 2], [-1, 1]]),
], ids=range(4))  # fmt: skip
def test_a_turn_continues_the_longest_sequence_that_its_prompt_begins_with(
    turns, token_ids, numbers
):
    sequences = to_tokens([rollout(*turns)]).sequences
    assert [s.token_ids for s in sequences] == token_ids
    assert [s.indices for s in sequences] == numbers


def test_kept_ids_are_those_of_each_token_in_the_order_of_turns():
    one = rollout(([1], [2, 3], 0.0), ([1, 2, 3], [4], 0.0), ([1, 2, 3, 4], [5, 6], 0.0))
    one.turns[0].kept_ids, one.turns[2].kept_ids = [[2, 9], [3]], [[5], [6, 9]]
    [micro] = cut_into(to_tokens([one]).sequences)
    assert micro.kept_ids == [[2, 9], [3], None, [5], [6, 9]]
    assert cut_into(to_tokens([TWO_TURNS]).sequences)[0].kept_ids is None


def test_rollouts_without_an_advantage_have_micro_batches_of_their_own(policy):
    batch = to_tokens([TWO_TURNS, DROPPED, TWO_TURNS])
    batch.advantages = torch.tensor([-1.0] * 4 + [0.0] * 9)  # a negative advantage, too, is one
    learning, others = micro_batches(policy, batch)
    assert [s.rollout for s in learning.sequences] == [0]
    assert sorted(s.rollout for s in others.sequences) == [1, 1, 2]


@pytest.mark.parametrize("max_tokens", [1, 8, 10_000])
@pytest.mark.parametrize("share", [False, True])
def test_micro_batches_keep_their_budget_and_every_sampled_token(max_tokens, share):
    alike = [rollout(([1, 2, 3, 4, 5, 6], [i], 0.0)) for i in range(7, 12)]
    batch = to_tokens([TWO_TURNS, DROPPED, rollout(([1], [7], 0.5), group_id=1), *alike])
    expected = {  # number: the token before, the token
        number: (s.token_ids[t - 1], s.token_ids[t])
        for s in batch.sequences for t, number in enumerate(s.indices) if number >= 0
    }  # fmt: skip
    seen = []
    for micro in cut_into(batch.sequences, max_tokens, share):
        computed = micro.tree.input_ids if share else micro.input_ids
        assert computed.numel() <= max_tokens or len(micro.input_ids) == 1
        before = computed.flatten()[micro.predictors].tolist()
        for number, *tokens in zip(micro.indices, before, micro.targets.tolist(), strict=True):
            seen.append(int(number))
            assert expected[seen[-1]] == tuple(tokens)
            assert batch[number].sampler_logprobs == -0.5 * tokens[1]
    assert sorted(seen) == sorted(expected) == [*range(15)]


def test_a_batch_without_tokens():
    for rollouts in ([], [Rollout("env", "player", 0, 0)]):
        batch = to_tokens(rollouts)
        shape_rewards(Config(), batch)
        assert len(batch) == len(grpo.compute_advantages(batch, grpo.Options())) == 0
        assert batch.sequences == []
    assert list(minibatches(Config(num_epochs=2, num_minibatches=4), 0, 1)) == []


def test_what_is_known_of_a_turn_stands_at_its_tokens():
    batch = to_tokens([TWO_TURNS, DROPPED, TWO_TURNS])
    assert batch.sequence.tolist() == [0] * 4 + [1] * 2 + [2] * 3 + [3] * 4
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
    steps = [*minibatches(cfg, 10, update=4)]
    sizes = [(epoch, len(rollouts)) for epoch, rollouts in steps]
    assert sizes == [(0, 3), (0, 4), (0, 3), (1, 3), (1, 4), (1, 3)]
    first, second = ([r for _, rows in half for r in rows] for half in (steps[:3], steps[3:]))
    assert sorted(first) == sorted(second) == [*range(10)] and first != second
    assert steps == [*minibatches(cfg, 10, 4)] != [*minibatches(cfg, 10, 5)]


def test_rewards_are_discounted_by_the_episode_or_at_the_end_of_each_turn():
    batch = to_tokens([TWO_TURNS])
    shape_rewards(Config(credit="episode", gamma=0.5), batch)
    assert batch.rewards.tolist() == [0, 0.25, 0, 0.5] and batch.turn.tolist() == [0] * 4
    assert batch.discounts.tolist() == [1] * 4
    shape_rewards(Config(credit="turn", gamma=0.5), batch)
    assert batch.rewards.tolist() == [0, 0.25, 0, 1] and batch.turn.tolist() == [0, 0, 1, 1]
    assert batch.discounts.tolist() == [1, 0.5, 1, 0.5]
