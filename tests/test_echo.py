"""ECHO: its gradient against float64 loops, and which tokens it predicts."""

import random

import pytest
import torch
from conftest import SMALL, metrics_of
from test_float64_step import folder, models, states  # noqa: F401
from test_sdpo import TEMPERATURE, gradients

import train
from algorithms.variants import echo
from core import config
from core.batching import to_tokens
from core.chat_template import ids_after_completion, prompt_ids
from core.episodes import RolloutCollector
from core.observations import observed_in
from core.policy import Policy
from core.tasks import Task
from core.tiny import tiny_tokenizer
from core.types import Rollout, Turn

TURN_TOKENS = ["<|end|>", "<|user|>", "<|assistant|>"]
END, USER, ASSISTANT = tiny_tokenizer().convert_tokens_to_ids(TURN_TOKENS)


def draw_rollouts():
    """Three groups of two, of which one has equal returns; one to three turns, of which one begins
    a fresh context. Also the number of observation tokens that end each turn's prompt."""
    draw, rollouts, observed = random.Random(0), [], {}
    for i in range(6):
        prompt, turns = [65, 66, 67 + i // 2], []
        for k in range(1 + i % 3):
            ids = [draw.randrange(256) for _ in range(draw.randint(1, 4))] + [END] * (i % 2)
            sampler = [draw.uniform(-6.5, -4.5) for _ in ids]
            turns.append(Turn(prompt, ids, sampler, "stop", float(i in (0, 3))))
            message = [draw.randrange(256) for _ in range(draw.randint(1, 6))]
            fresh = (i, k) == (5, 0)
            context = [] if fresh else prompt + ids + [END] * (1 - i % 2)
            prompt = [*context, USER, *message, END, ASSISTANT]
            observed[i, k + 1] = 0 if fresh else len(message)
        rollouts.append(Rollout("test", "player", i // 2, i // 2, turns=turns))
    return rollouts, observed


def plain_gradient(model):
    """The gradient of the mean cross-entropy of all observations, flat, and this mean."""
    rollouts, observed = draw_rollouts()
    cross_entropies = []
    for i, rollout in enumerate(rollouts):
        for k, turn in enumerate(rollout.turns):
            logprobs = model(torch.tensor([turn.prompt_ids])).logits[0].log_softmax(-1)
            end = len(turn.prompt_ids) - 2  # <|end|><|assistant|> follow the message
            for t in range(end - observed.get((i, k), 0), end):
                cross_entropies.append(-logprobs[t - 1, turn.prompt_ids[t]])
    mean = sum(cross_entropies) / len(cross_entropies)
    parts = torch.autograd.grad(mean, [p for _, p in sorted(model.named_parameters())])
    return torch.cat([part.flatten() for part in parts]), mean.item()


@pytest.mark.parametrize("micro_batch_tokens", [2048, 20])
def test_its_gradient_is_that_of_grpo_and_of_a_cross_entropy(
    micro_batch_tokens, folder, states, models, monkeypatch  # noqa: F811
):  # fmt: skip
    if micro_batch_tokens == 20:
        monkeypatch.setattr(Policy, "logits_chunk", 3)
    found = []
    for algo, options in (("echo", echo.Options(coef=0.3)), ("grpo", None)):
        cfg = config.resolve(train.Config(
            algo=algo, temperature=TEMPERATURE, num_epochs=2, max_grad_norm=0.0, num_prompts=3,
            group_size=2, options=options,
        ))  # fmt: skip
        found.append(gradients(cfg, folder, states, draw_rollouts()[0], micro_batch_tokens))
    (ours, metrics), (rewards, of_grpo) = found
    theirs = [plain_gradient(models[name]) for name in ("old", "new")]
    for mine, reward, (wanted, _) in zip(ours, rewards, theirs, strict=True):
        assert reward.norm() > 0.01 * mine.norm()
        assert (mine - reward - 0.3 * wanted).norm() < 2e-5 * mine.norm()
    assert metrics["loss/echo"] == pytest.approx(theirs[1][1], rel=1e-4)
    assert metrics["loss"] - of_grpo["loss"] == pytest.approx(0.3 * theirs[1][1], rel=1e-4)


def observed_texts(policy, turns):
    """What is to be predicted, in one text for each stretch of tokens; never a sampled token."""
    [sequence] = to_tokens([Rollout("test", "player", 0, 0, turns=turns)]).sequences
    observed = observed_in(policy.tokenizer, sequence)
    assert all(sequence.numbers[i] < 0 for i in observed)
    seen = enumerate(sequence.token_ids)
    text = "".join(policy.tokenizer.decode(x) if i in observed else "\0" for i, x in seen)
    return [part for part in text.split("\0") if part]


def test_only_what_the_messages_say_is_predicted(policy):
    tasks = [Task("iterated_game:rounds=3", seed=3, group_id=0)]
    [rollout] = RolloutCollector(policy, max_turns=8).demonstrate(tasks)
    said = [m["content"] for m in rollout.messages if m["role"] == "user"]
    assert len(said) == 3 and observed_texts(policy, rollout.turns) == said[1:]


def test_an_answer_that_was_not_sampled_is_not_predicted(policy):
    question, answer = ({"role": role, "content": "7"} for role in ("user", "assistant"))
    prompt, ids = prompt_ids(policy.tokenizer, [question]), [7, END]
    for num_new, texts in ((1, ["7"]), (3, [])):
        chat = [question, answer] * 2 + [question]
        between = ids_after_completion(policy.tokenizer, chat, True, num_new)
        contexts = [prompt, prompt + ids + between]
        turns = [Turn(context, ids, [0.0, 0.0], "stop") for context in contexts]
        assert observed_texts(policy, turns) == texts


def test_a_run_with_one_turn_says_that_nothing_is_predicted(command, tmp_path):
    code, out, err = command(*SMALL, "--algo", "echo", "--run-name", "one")
    assert code == 0 and "nothing to predict" in " ".join(f"{out} {err}".split())
    assert not any("loss/echo" in record for record in metrics_of(tmp_path / "runs/one"))
