"""SDPO: its gradient against float64 loops, and the prompt of its teacher."""

import copy
import random

import pytest
import torch
from conftest import SMALL, load_small
from single_update import gradients_of_update
from test_episodes import PARAMS, Scripted, message
from test_float64_step import draw_rollouts, folder, models, states  # noqa: F401

import train
from algorithms.variants import sdpo
from core import config
from core.batching import micro_batches, to_tokens
from core.chat_template import prompt_ids
from core.episodes import RolloutCollector
from core.policy import Policy
from core.scoring import predict
from core.tasks import Task
from core.types import Rollout, Turn
from environments.base import EVAL_SEEDS, Env, Step
from environments.plumbing import registry

TEMPERATURE = 0.7


def settings(algo="sdpo", **options):
    chosen = sdpo.Options(**options.pop("own")) if algo == "sdpo" else None
    cfg = train.Config(
        algo=algo, temperature=TEMPERATURE, num_epochs=2, max_grad_norm=0.0, num_prompts=3,
        group_size=2, tis_cap=1.2, options=chosen, mask_truncated_completions=True, **options,
    )  # fmt: skip
    return config.resolve(cfg)


@pytest.fixture(scope="module")
def rollouts(models):  # noqa: F811
    """Two thirds of the turns have feedback."""
    found, draw = draw_rollouts(models, TEMPERATURE), random.Random(1)
    for number, turn in enumerate(turn for rollout in found for turn in rollout.turns):
        turn.feedback_ids = [draw.randrange(256) for _ in range(4 + number)] * (number % 3 > 0)
    return found


def without_reward(rollouts):
    """So GRPO's term is 0."""
    found = copy.deepcopy(rollouts)
    for turn in (turn for rollout in found for turn in rollout.turns):
        turn.reward = 0.0
    return found


def gradients(cfg, folder, states, rollouts, micro_batch_tokens=2048):  # noqa: F811
    """Those of the two steps of an update by the real loop, and the metrics."""
    policy = load_small(folder)
    policy.micro_batch_tokens = micro_batch_tokens
    return gradients_of_update(cfg, policy, rollouts, states["new"])


def all_logprobs(model, context, ids):
    logits = model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1] / TEMPERATURE
    return logits - logits.logsumexp(-1, keepdim=True)


def plain_gradient(cfg, rollouts, model, sampled_by):
    """The gradient of the divergence alone, one turn and one token after another."""
    loss, divergences = torch.zeros((), dtype=torch.float64), 0.0
    turns = [turn for rollout in rollouts for turn in rollout.turns if turn.finish_reason == "stop"]
    count = sum(len(turn.completion_ids) for turn in turns)
    for turn in (turn for turn in turns if turn.feedback_ids):
        ids = turn.completion_ids
        policy = all_logprobs(model, turn.prompt_ids, ids)
        with torch.no_grad():
            old = all_logprobs(sampled_by, turn.prompt_ids, ids)
            teacher = all_logprobs(model, turn.feedback_ids, ids)
        for t, token in enumerate(ids):
            p, q = policy[t].exp(), teacher[t].exp()
            m = (p + q) / 2
            d = {
                "forward": (q * (q / p).log()).sum(),
                "reverse": (p * (p / q).log()).sum(),
                "jsd": ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2,
            }[cfg.options.kind]
            weight = min(cfg.tis_cap, (old[t, token] - turn.sampler_logprobs[t]).exp().item())
            ratio = (policy[t, token] - old[t, token]).exp().item()
            loss = loss + cfg.options.coef * weight * ratio * d / count
            divergences += d.item() / count
    named = sorted(model.named_parameters())
    parts = torch.autograd.grad(loss, [p for _, p in named])
    return torch.cat([part.flatten() for part in parts]), divergences


@pytest.mark.parametrize(
    "kind, micro_batch_tokens", [("forward", 2048), ("reverse", 2048), ("jsd", 20)]
)
def test_the_gradients_equal_float64_loops(
    kind, micro_batch_tokens, folder, states, models, rollouts, monkeypatch  # noqa: F811
):  # fmt: skip
    if micro_batch_tokens == 20:
        monkeypatch.setattr(Policy, "logits_chunk", 3)
    cfg = settings(own={"kind": kind, "coef": 0.5})
    ours, metrics = gradients(cfg, folder, states, without_reward(rollouts), micro_batch_tokens)
    theirs = [plain_gradient(cfg, rollouts, models[name], models["old"]) for name in ("old", "new")]
    for mine, (wanted, _) in zip(ours, theirs, strict=True):
        assert (mine - wanted).norm() < 2e-5 * wanted.norm()
    assert metrics["sdpo/divergence"] == pytest.approx(theirs[1][1], rel=1e-4)  # the last epoch


def test_the_loss_is_that_of_grpo_and_the_divergence(folder, states, rollouts):  # noqa: F811
    both, divergence, rewards = (
        gradients(cfg, folder, states, of)[0]
        for cfg, of in (
            (settings(own={}), rollouts),
            (settings(own={}), without_reward(rollouts)),
            (settings("grpo"), rollouts),
        )
    )
    for whole, of_divergence, of_rewards in zip(both, divergence, rewards, strict=True):
        assert of_rewards.norm() > 0
        assert (whole - of_divergence - of_rewards).norm() < 1e-5 * whole.norm()


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
    assert found["divergence"][micro.numbers.argsort()].tolist() == [0, 0, 3]


class Capital(Env):
    """Two turns; the second one has feedback of its own."""

    def reset(self, seed):
        self.turn = 0
        return [message("Capital of France?")]

    def step(self, response):
        self.turn += 1
        if self.turn == 1:
            return Step(message("Of Spain?"), 0.0, False)
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


def test_the_teacher_reads_the_right_answer_and_the_question_once_more(policy, play):
    first, second = play(seed=3)
    france, spain = message("Capital of France?"), message("Of Spain?")

    def answer(text):
        return {"role": "assistant", "content": text}

    chat = [france, answer("Paris"), france]
    assert first.feedback_ids == prompt_ids(policy.tokenizer, chat)
    chat = [france, answer("hm"), spain, answer("Madrid"), spain]
    assert second.feedback_ids == prompt_ids(policy.tokenizer, chat)
    assert first.feedback_ids[: len(first.prompt_ids)] == first.prompt_ids


def test_evaluation_and_other_algorithms_have_no_teacher(play):
    silent = [*play(seed=3, shows_right=False), *play(seed=EVAL_SEEDS.start)]
    assert not any(turn.feedback_ids for turn in silent)


def test_no_teacher_where_its_prompt_exceeds_the_context(policy, play, monkeypatch):
    first = play(seed=3)[0]
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
