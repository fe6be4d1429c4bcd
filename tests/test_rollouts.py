"""Many episodes at once: contexts exact, groups on one task, every episode kept."""

import contextlib
import time
from dataclasses import replace

import pytest

from core.batching import to_rollout_batch
from core.rollouts import BatchedEnv
from core.sampler import Sampler, SamplingParams, TorchSampler
from core.selection import without_failed
from core.tasks import Task, train_tasks
from core.types import Completion, UsageError
from environments import registry
from environments.base import Env, MultiAgentEnv, Step
from environments.registry import register

PARAMS = SamplingParams(max_tokens=4)


class Scripted(Sampler):
    """Writes the prompts' lengths down and answers "ab", ended or cut off by turns."""

    def __init__(self, policy, ended=True):
        self.policy, self.ended, self.batches = policy, ended, []

    def sample(self, prompts, params, on_progress=lambda: None, chats=None):
        self.batches.append(prompts)
        ids = self.policy.tokenizer.encode("ab", add_special_tokens=False)
        ids = [*ids, self.policy.end_of_turn_id] if self.ended else ids
        reason = "stop" if self.ended else "length"
        return [Completion(list(ids), [-1.0] * len(ids), "ab", reason) for _ in prompts]


@pytest.fixture(autouse=True)
def own_environments():
    known = dict(registry.ENVIRONMENTS)

    @register("countdown")
    class Countdown(Env):
        """Lasts `seed` turns and pays 1 for each."""

        def reset(self, seed):
            self.left = seed
            return [{"role": "user", "content": f"{seed} turns"}]

        def step(self, response):
            self.left -= 1
            message = {"role": "user", "content": f"{self.left} left"}
            return Step(message if self.left else None, 1.0, self.left == 0)

    @register("forgetful")
    class Forgetful(Countdown):
        """The same, but its second message begins a new context."""

        def step(self, response):
            step = super().step(response)
            return replace(step, fresh=self.left == 2)

    @register("pair")
    class Pair(MultiAgentEnv):
        """Ann speaks, then Bob hears it and speaks; each is paid by name."""

        def reset(self, seed):
            return {"ann": [{"role": "user", "content": "begin"}]}

        def step(self, responses):
            if "ann" in responses:
                heard = {"role": "user", "content": f"ann said {responses['ann']}"}
                return {"ann": Step(None, 1.0, False), "bob": Step(heard, 0.0, False)}
            return {"ann": Step(None, 0.5, True), "bob": Step(None, -1.0, True)}

    yield
    registry.ENVIRONMENTS.clear()
    registry.ENVIRONMENTS.update(known)


def test_a_group_shares_one_opening_prompt_and_groups_differ(policy):
    tasks = train_tasks(["letter_counting"], seed=0, update=1, num_prompts=4, group_size=3)
    rollouts = BatchedEnv(policy, max_turns=2).collect(tasks, TorchSampler(policy), PARAMS)
    openings = {}
    for rollout in rollouts:
        openings.setdefault(rollout.group_id, set()).add(tuple(rollout.turns[0].prompt_ids))
    assert [len(prompts) for prompts in openings.values()] == [1, 1, 1, 1]
    assert len(set.union(*openings.values())) == 4


@pytest.mark.parametrize("ended", [True, False])
def test_each_turn_continues_from_exactly_what_was_sampled(policy, ended):
    sampler = Scripted(policy, ended)
    (rollout,) = BatchedEnv(policy, max_turns=9).collect([Task("countdown", 3, 0)], sampler, PARAMS)
    assert len(rollout.turns) == 3
    for before, after in zip(rollout.turns, rollout.turns[1:], strict=False):
        context = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(context)] == context
    text = policy.tokenizer.decode(rollout.turns[2].prompt_ids)
    assert text == (
        "<|user|>3 turns<|end|><|assistant|>ab<|end|><|user|>2 left<|end|>"
        "<|assistant|>ab<|end|><|user|>1 left<|end|><|assistant|>"
    )


def test_a_fresh_message_begins_a_context_without_the_turns_before(policy):
    batched = BatchedEnv(policy, max_turns=9)
    (rollout,) = batched.collect([Task("forgetful", 4, 0)], Scripted(policy), PARAMS)
    seen = [policy.tokenizer.decode(turn.prompt_ids) for turn in rollout.turns]
    assert seen == [
        "<|user|>4 turns<|end|><|assistant|>",
        "<|user|>4 turns<|end|><|assistant|>ab<|end|><|user|>3 left<|end|><|assistant|>",
        "<|user|>2 left<|end|><|assistant|>",
        "<|user|>2 left<|end|><|assistant|>ab<|end|><|user|>1 left<|end|><|assistant|>",
    ]
    assert len(rollout.messages) == 8  # what is looked at later is whole
    update = to_rollout_batch([rollout])
    assert [s.token_ids for s in update.sequences] == [
        turn.prompt_ids + turn.completion_ids for turn in (rollout.turns[1], rollout.turns[3])
    ]
    assert update.num_tokens == 4 * 3


def test_short_and_long_episodes_are_all_kept_and_sampled_together(policy):
    sampler = Scripted(policy)
    tasks = [Task("countdown", seed, i) for i, seed in enumerate([3, 1, 2])]
    rollouts = BatchedEnv(policy, max_turns=9).collect(tasks, sampler, PARAMS)
    assert [r.episode_return for r in rollouts] == [3.0, 1.0, 2.0]
    assert [len(prompts) for prompts in sampler.batches] == [3, 2, 1]
    assert not any(r.episode_truncated for r in rollouts)


def test_max_turns_cuts_an_episode_and_says_so(policy):
    batched = BatchedEnv(policy, max_turns=2)
    (rollout,) = batched.collect([Task("countdown", 5, 0)], Scripted(policy), PARAMS)
    assert (len(rollout.turns), rollout.episode_truncated) == (2, True)


def test_an_episode_that_outgrows_the_context_is_cut(policy):
    policy.max_length = 60
    batched = BatchedEnv(policy, max_turns=99)
    (rollout,) = batched.collect([Task("countdown", 50, 0)], Scripted(policy), PARAMS)
    assert rollout.episode_truncated
    assert 1 < len(rollout.turns) < 10
    assert all(len(turn.prompt_ids) < 60 for turn in rollout.turns)


def test_each_agent_has_a_rollout_of_its_own_with_its_own_reward(policy):
    sampler = Scripted(policy)
    tasks = [Task("pair", 0, 0), Task("countdown", 1, 1)]
    ann, bob, solo = BatchedEnv(policy, max_turns=4).collect(tasks, sampler, PARAMS)
    assert (ann.agent, ann.episode_return, len(ann.turns)) == ("ann", 1.5, 1)
    assert (bob.agent, bob.episode_return, len(bob.turns)) == ("bob", -1.0, 1)
    assert bob.messages[0]["content"] == "ann said ab"
    assert solo.episode_return == 1.0
    assert [len(prompts) for prompts in sampler.batches] == [2, 1]


def test_environments_are_built_once_and_used_again(policy):
    batched = BatchedEnv(policy, max_turns=4)
    tasks = [Task("countdown", 1, i) for i in range(3)]
    batched.collect(tasks, Scripted(policy), PARAMS)
    first = set(map(id, batched.idle["countdown"]))
    batched.collect(tasks, Scripted(policy), PARAMS)
    assert set(map(id, batched.idle["countdown"])) == first
    assert len(first) == 3


def test_a_demonstration_is_the_environments_own_text_and_ends_its_turn(policy):
    tasks = [Task("letter_counting", 7, 0), Task("letter_counting", 7, 1, hasty=True)]
    worked, hasty = BatchedEnv(policy, max_turns=4).demonstrate(tasks)
    assert worked.info == {"correct": True, "worked": True}
    assert hasty.info["worked"] is False
    for rollout in (worked, hasty):
        ids = rollout.turns[0].completion_ids
        assert ids[-1] == policy.end_of_turn_id
        assert policy.tokenizer.decode(ids[:-1]) == rollout.messages[-1]["content"]


def test_an_environment_without_demonstrations_says_so(policy):
    (rollout,) = BatchedEnv(policy, max_turns=4).demonstrate([Task("countdown", 1, 0)])
    assert "no demonstration to give" in rollout.error


def test_each_seat_of_a_game_is_compared_with_its_like(policy):
    tasks = [Task("pair", 5, 0), Task("pair", 5, 0), Task("countdown", 1, 1), Task("pair", 6, 2)]
    rollouts = BatchedEnv(policy, 4).collect(tasks, Scripted(policy), PARAMS)
    groups = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, set()).add((rollout.env, rollout.seed, rollout.agent))
    assert sorted(groups) == [0, 1, 2, 3, 4]
    assert all(len(who) == 1 for who in groups.values())
    assert [r.group_id for r in rollouts] == [0, 1, 0, 1, 2, 3, 4]


def stubborn():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)
            return


MISDEEDS = {
    "raises": lambda: 1 / 0,
    "no step": lambda: (None, 1.0, True),
    "infinite": lambda: Step(None, float("inf"), True),
    "not a number": lambda: Step(None, float("nan"), True),
    "no reward": lambda: Step(None, None, True),
    "a word for a reward": lambda: Step(None, "much", True),
    "no text": lambda: Step({"role": "user", "content": 5}, 0.0, False),
    "no message": lambda: Step("hello", 0.0, False),
    "a megabyte": lambda: Step({"role": "user", "content": "no! " * 250_000}, 0.0, False),
    "what no journal can hold": lambda: Step(None, 1.0, True, {"board": object()}),
    "a megabyte of info": lambda: Step(None, 1.0, True, {"board": "x" * 1_000_000}),
    "no info": lambda: Step(None, 1.0, True, None),
    "hangs": lambda: time.sleep(60),
    "hangs and won't be told": stubborn,
}


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_an_environment_that_fails_costs_its_own_episode(policy, misdeed):
    @register("faulty")
    class Faulty(Env):
        def reset(self, seed):
            return [{"role": "user", "content": "?"}]

        def step(self, response):
            return MISDEEDS[misdeed]()

    tasks = [Task("countdown", 3, 0), Task("faulty", 1, 1), Task("countdown", 3, 0)]
    table = BatchedEnv(policy, 4, patience=0.2)
    rollouts = table.collect(tasks, Scripted(policy), PARAMS)
    assert [bool(r.error) for r in rollouts] == [False, True, False]
    assert len(rollouts[1].error) < 600
    assert [r.episode_return for r in rollouts] == [3.0, 0.0, 3.0]
    assert not table.idle["faulty"]  # it is not used again
    kept, told = without_failed(rollouts)
    assert kept == [rollouts[0], rollouts[2]]
    assert told == [
        f"1 of 3 episodes failed; the first, of faulty with seed 1: {rollouts[1].error}"
    ]


def no_disk():
    raise OSError("no disk")


@pytest.mark.parametrize(
    ("begin", "error"),
    [
        (no_disk, "OSError: no disk"),
        (lambda: time.sleep(60), "TimeoutError: no answer in 0.2 seconds (--env-timeout)"),
        (lambda: [{"role": "user", "content": "read! " * 200_000}], "tokens at once"),
        (lambda: None, "TypeError"),
        (lambda: [{"role": "user"}], "Error"),
    ],
)
def test_an_environment_that_cannot_begin_is_counted_too(policy, begin, error):
    @register("unborn")
    class Unborn(Env):
        def reset(self, seed):
            return begin()

        def step(self, response):
            raise AssertionError

    table = BatchedEnv(policy, 4, patience=0.2)
    rollouts = table.collect([Task("unborn", 1, 0)], Scripted(policy), PARAMS)
    assert len(rollouts) == 1 and error in rollouts[0].error
    with pytest.raises(UsageError, match="1 of 1 episodes failed"):
        without_failed(rollouts)


def test_without_thoughts_a_later_turn_sees_what_was_said_and_trains_on_what_was_written(policy):
    thought = policy.tokenizer.encode("<think>hm</think>yes", add_special_tokens=False)
    thought.append(policy.end_of_turn_id)

    class Thinker(Scripted):
        def sample(self, prompts, params, on_progress=lambda: None, chats=None):
            self.batches.append(prompts)
            return [Completion(thought, [-1.0] * len(thought), "", "stop") for _ in prompts]

    kept, dropped = Thinker(policy), Thinker(policy)
    BatchedEnv(policy, 4).collect([Task("countdown", 3, 0)], kept, PARAMS)
    [rollout] = BatchedEnv(policy, 4, drop_thinking=True).collect(
        [Task("countdown", 3, 0)], dropped, PARAMS
    )
    said = [*policy.tokenizer.encode("yes", add_special_tokens=False), policy.end_of_turn_id]
    opening = kept.batches[0][0]
    assert kept.batches[1][0][: len(opening + thought)] == opening + thought
    assert dropped.batches[1][0][: len(opening + said)] == opening + said
    assert [turn.completion_ids for turn in rollout.turns] == [thought] * 3
    update = to_rollout_batch([rollout])
    assert len(update.sequences) == 3  # each turn in the context that it was written in
    assert update.num_tokens == 3 * len(thought)
    for sequence, prompts in zip(update.sequences, dropped.batches, strict=True):
        assert sequence.token_ids == prompts[0] + thought
