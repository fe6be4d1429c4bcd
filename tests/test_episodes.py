"""core/episodes.py: exact contexts, one task per group, failures cost only their own episode."""

import itertools
from dataclasses import replace

import pytest

from core.batching import to_tokens
from core.episodes import RolloutCollector, with_lowest_return
from core.sampler import Sampler, SamplingParams
from core.seeds import derive_seed
from core.tasks import Task
from core.types import Completion, Rollout, Turn
from environments.base import Env, MultiAgentEnv, Step
from environments.parsing import user
from environments.plumbing import registry
from environments.plumbing.registry import register
from environments.template import Nim

PARAMS = SamplingParams(max_tokens=4)


class Scripted(Sampler):
    """Answers with the texts in turn, then with the last one; records the requests."""

    def __init__(self, policy, *texts, closed=True):
        self.policy, self.texts, self.closed = policy, list(texts or ["ab"]), closed
        self.waiting, self.prompts, self.chats = [], [], []
        self.draws = []  # seed and stream of each request of each batch

    def add(self, request):
        self.waiting.append(request)

    def step(self):
        requests, self.waiting = self.waiting, []
        self.draws.append([(request.seed, request.stream) for request in requests])
        return [(request, self.complete(request)) for request in requests]

    def complete(self, request):
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        self.prompts.append(request.prompt)
        self.chats.append(list(request.chat))
        ids = self.policy.tokenizer.encode(text, add_special_tokens=False)
        ids += [self.policy.end_of_turn_id] * self.closed
        return Completion(ids, [-1.0] * len(ids), text, "stop" if self.closed else "length")

    def clear(self):
        self.waiting = []


def play(policy, tasks, sampler=None, max_turns=9, **options):
    collector = RolloutCollector(policy, max_turns, **options)
    return collector.collect(tasks, sampler or Scripted(policy), PARAMS)


@pytest.fixture(autouse=True)
def example_environments(monkeypatch):
    monkeypatch.setattr(registry, "ENVIRONMENTS", dict(registry.ENVIRONMENTS))

    @register("countdown")
    class Countdown(Env):
        """An episode of `seed` turns with reward 1 each."""

        def reset(self, seed):
            self.left = seed
            return [user(f"{seed} turns")]

        def step(self, response):
            self.left -= 1
            return Step(user(f"{self.left} left") if self.left else None, 1.0, self.left == 0)

    @register("forgetful")
    class Forgetful(Countdown):
        """A countdown whose second message starts a new context."""

        def step(self, response):
            return replace(super().step(response), fresh=self.left == 1)

    @register("pair")
    class Pair(MultiAgentEnv):
        """Ann acts; Bob joins, reads Ann's text and acts. Each has rewards of its own."""

        def reset(self, seed):
            return {"ann": [user("begin")]}

        def step(self, responses):
            if "ann" in responses:
                bob = Step(user(f"ann said {responses['ann']}"), 0.0, False)
                return {"ann": Step(None, 1.0, False, {"asked": 1}), "bob": bob}
            return {"ann": Step(None, 0.5, True), "bob": Step(None, -1.0, True)}


@pytest.mark.parametrize("closed", [True, False])
def test_each_prompt_begins_with_the_ids_sampled_before_or_with_a_fresh_message(policy, closed):
    tasks = [Task("countdown", 3, 0), Task("forgetful", 3, 1)]
    whole, fresh = play(policy, tasks, Scripted(policy, closed=closed))
    prompts = ["<|user|>3 turns<|end|><|assistant|>"]
    prompts += [f"{prompts[0]}ab<|end|><|user|>2 left<|end|><|assistant|>"]
    for rollout, last in (
        (whole, f"{prompts[1]}ab<|end|><|user|>1 left<|end|><|assistant|>"),
        (fresh, "<|user|>1 left<|end|><|assistant|>"),
    ):
        found = [policy.tokenizer.decode(turn.prompt_ids) for turn in rollout.turns]
        assert found == [*prompts, last]
        assert len(rollout.messages) == 6  # the rollout keeps all messages
    for before, after in itertools.pairwise(whole.turns):
        context = before.prompt_ids + before.completion_ids
        assert after.prompt_ids[: len(context)] == context
    batch = to_tokens([fresh])
    assert [s.token_ids for s in batch.sequences] == [
        turn.prompt_ids + turn.completion_ids for turn in fresh.turns[1:]
    ]
    assert len(batch) == 3 * len(fresh.turns[0].completion_ids)


def test_episodes_of_all_lengths_are_kept_and_sampled_in_one_batch(policy):
    sampler = Scripted(policy)
    tasks = [Task("countdown", seed, i) for i, seed in enumerate([3, 1, 2])]
    rollouts = play(policy, tasks, sampler)
    assert [r.episode_return for r in rollouts] == [3.0, 1.0, 2.0]
    assert [len(draws) for draws in sampler.draws] == [3, 2, 1]
    # each turn has a seed of its own; an episode keeps its stream when others have ended
    streams = [(0, 1000, 2000), (0, 2000), (0,)]
    assert sampler.draws == [
        [(derive_seed(PARAMS.seed, turn), stream) for stream in streams[turn]] for turn in range(3)
    ]
    assert not any(r.episode_truncated for r in rollouts)


def test_max_turns_counts_the_turns_of_one_agent_and_a_full_context_truncates(policy):
    for env, max_turns in [("pair", 1), ("countdown", 2), ("countdown", 3)]:
        rollouts = play(policy, [Task(env, 3, 0)], max_turns=max_turns)
        assert {len(r.turns) for r in rollouts} == {max_turns}
        assert {(r.episode_truncated, r.error) for r in rollouts} == {(max_turns == 2, "")}
    policy.max_length = 60
    (rollout,) = play(policy, [Task("countdown", 50, 0)], max_turns=99)
    assert rollout.episode_truncated and 1 < len(rollout.turns) < 10
    assert all(len(turn.prompt_ids) < 60 for turn in rollout.turns)


def test_each_agent_has_its_own_rollout_rewards_and_group(policy):
    sampler = Scripted(policy)
    tasks = [Task("pair", 5, 0), Task("pair", 5, 0), Task("countdown", 1, 1), Task("pair", 6, 2)]
    rollouts = play(policy, tasks, sampler)
    assert [(r.group_id, r.seed, r.agent, r.episode_return) for r in rollouts] == [
        (0, 5, "ann", 1.5), (1, 5, "bob", -1.0), (0, 5, "ann", 1.5), (1, 5, "bob", -1.0),
        (2, 1, "player", 1.0), (3, 6, "ann", 1.5), (4, 6, "bob", -1.0),
    ]  # fmt: skip
    ann, bob, *_ = rollouts
    assert ann.info == {"asked": 1} and len(ann.turns) == len(bob.turns) == 1  # her last has none
    assert bob.messages[0]["content"] == "ann said ab"
    streams = [(0, 1000, 2000, 3000), (1, 1001, 3001)]
    assert sampler.draws == [
        [(derive_seed(PARAMS.seed, turn), stream) for stream in streams[turn]] for turn in range(2)
    ]


def test_a_broken_program_earns_the_lowest_return_of_its_environment_that_counts():
    def paid(env, reward, error="", **info):
        turn = Turn([1], [2], [0.0], "stop", reward)
        return Rollout(env, "player", 0, 0, [], [turn], info=info, error=error)

    broken = paid("a", 0.8, agent_error=1)
    with_lowest_return([paid("a", 0.5), broken, paid("a", 0.0, "EnvFailure"), paid("b", -1.0)])
    assert broken.episode_return == 0.5


def test_a_demonstration_has_the_end_of_turn_and_one_agent_gives_it(policy, monkeypatch):
    """The others guess."""
    monkeypatch.setitem(registry.ENVIRONMENTS, "nim", Nim)
    tasks = [Task("letter_counting", 7, 0), Task("letter_counting", 7, 1, hasty=True)]
    games = [Task("nim", seed, 2 + seed, hasty=seed > 3) for seed in range(6)]
    worked, hasty, *rollouts = RolloutCollector(policy, 9).demonstrate(tasks + games)
    assert worked.info == {"correct": True, "worked": True} and hasty.info["worked"] is False
    for rollout in (worked, hasty):
        *ids, end = rollout.turns[0].completion_ids
        assert end == policy.end_of_turn_id
        assert policy.tokenizer.decode(ids) == rollout.messages[-1]["content"]
    assert [(r.agent, r.seed) for r in rollouts] == [
        ("first" if seed % 2 == 0 else "second", seed) for seed in range(6)
    ]
    for rollout in rollouts:
        shown = [" = " in m["content"] for m in rollout.messages if m["role"] == "assistant"]
        assert shown == [rollout.seed <= 3] * len(shown) and not rollout.error and shown
