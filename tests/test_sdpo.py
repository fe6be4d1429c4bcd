"""SDPO: what its teacher reads and chooses among; test_float64_step.py has its gradient."""

import pytest
import torch
from conftest import SMALL
from test_episodes import PARAMS, Scripted

from core.batching import micro_batches, to_tokens
from core.chat_template import prompt_ids
from core.episodes import RolloutCollector
from core.scoring import predict
from core.tasks import Task
from core.types import Rollout, Turn
from environments.base import EVAL_SEEDS, Env, Step
from environments.parsing import user
from environments.plumbing import registry


@torch.no_grad()
def test_the_teacher_chooses_among_the_ids_that_were_kept(policy):
    """Three for the only token with feedback; the tokens before it had two and one."""
    turns = [
        Turn([65], [70, 71], [0.0, 0.0], "stop", kept_ids=[[70, 72], [71]]),
        Turn([66], [72], [0.0], "stop", kept_ids=[[72, 73, 74]], feedback_ids=[67, 68]),
    ]
    batch = to_tokens([Rollout("e", "player", 0, 0, turns=[turn]) for turn in turns])
    [micro] = micro_batches(policy, batch)

    def number_of_ids(logprobs, teacher):
        return (teacher > -1e9).sum(-1).float()

    found = predict(policy, micro, 1.0, divergence=number_of_ids)
    assert found["divergence"][micro.indices.argsort()].tolist() == [0, 0, 3]


class Capital(Env):
    """Two turns; the second one has feedback of its own."""

    def reset(self, seed):
        self.turn = 0
        return [user("Capital of France?")]

    def step(self, response):
        self.turn += 1
        if self.turn == 1:
            return Step(user("Of Spain?"), 0.0, False)
        return Step(None, 0.0, True, feedback="Madrid")

    def demonstrate(self, hasty=False):
        return "Paris" if self.turn == 0 else "unknown"


@pytest.fixture
def play(policy, monkeypatch):
    monkeypatch.setitem(registry.ENVIRONMENTS, "capital", Capital)

    def play(seed, shows_right=True):
        collector = RolloutCollector(policy, max_turns=2)
        collector.shows_right = shows_right
        task = Task(registry.EnvSpec.read("capital"), seed, group_id=0)
        [rollout] = collector.collect([task], Scripted(policy, "hm"), PARAMS)
        assert not rollout.error
        return rollout.turns

    return play


def test_the_teacher_reads_the_right_answer_and_the_question_once_more(policy, play, monkeypatch):
    first, second = play(seed=3)
    france, spain = user("Capital of France?"), user("Of Spain?")
    paris, hm, madrid = ({"role": "assistant", "content": x} for x in ("Paris", "hm", "Madrid"))
    assert first.feedback_ids == prompt_ids(policy.tokenizer, [france, paris, france])
    chat = [france, hm, spain, madrid, spain]
    assert second.feedback_ids == prompt_ids(policy.tokenizer, chat)
    assert first.feedback_ids[: len(first.prompt_ids)] == first.prompt_ids
    # evaluation and other algorithms have no teacher
    silent = [*play(seed=3, shows_right=False), *play(seed=EVAL_SEEDS.start)]
    assert not any(turn.feedback_ids for turn in silent)
    # nor has a turn whose prompt would exceed the context
    length = len(first.feedback_ids) + len(first.completion_ids)
    for context, expected in ((length, first.feedback_ids), (length - 1, [])):
        monkeypatch.setattr(policy, "max_length", context)
        assert play(seed=3)[0].feedback_ids == expected


class Silent(Capital):
    def demonstrate(self, hasty=False):
        return None

    def step(self, response):
        return Step(None, 0.0, True)


def test_an_environment_without_feedback_ends_the_run(command, monkeypatch):
    monkeypatch.setitem(registry.ENVIRONMENTS, "silent", Silent)
    code, _, err = command(*SMALL, "--algo", "sdpo", "--env", "silent")
    assert code == 2 and "silent never says what would have been right" in err
