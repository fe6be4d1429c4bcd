"""core/extras/opponents.py: seats by the seed, and older copies; test_killed.py resumes a run."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import load_small
from test_episodes import Scripted

from core.config import Config, resolve
from core.episodes import RolloutCollector
from core.extras.opponents import OlderCopy, Opponents, load_opponent
from core.faults import UsageError
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from environments.base import EVAL_SEEDS
from environments.plumbing import registry
from environments.plumbing.registry import EnvSpec
from environments.template import Nim

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, seed=5)


def older_by(interval, policy, run, update):
    return Opponents({f"older:{interval}"}, Config(), policy, run, {"update": update})


def test_the_seed_decides_the_seat_and_an_opponent_draws_at_temperature_1(
    policy, tmp_path, monkeypatch
):
    class Other(Scripted):
        def complete(self, request):
            asked.append((request.params.temperature, request.seed, request.stream))
            return super().complete(request)

    asked, made = [], Opponents(set(), Config(), policy, tmp_path, {})
    made.samplers["./a"] = Other(policy, "<move>1</move>")
    monkeypatch.setitem(registry.ENVIRONMENTS, "nim", Nim)
    collector = RolloutCollector(policy, max_turns=30, redirect=made.redirect)
    tasks = [Task("nim:opponent=./a", seed, seed) for seed in (4, 4, 7, 7, 10, 11)]
    rollouts = collector.collect(tasks, Scripted(policy, "<move>1</move>"), PARAMS)
    assert [(r.seed, r.agent, r.group_id) for r in rollouts] == [
        (4, "first", 0), (4, "first", 0), (7, "second", 1), (7, "second", 1),
        (10, "first", 2), (11, "second", 3),
    ]  # fmt: skip
    for r in rollouts:
        assert {m["content"] for m in r.messages if m["role"] == "assistant"} <= {"<move>1</move>"}
        other = {"first": "second", "second": "first"}[r.agent]
        assert r.for_log["opponents"][other]["player"] == "./a"
    assert len({*asked}) == len(asked) > 6 and {temperature for temperature, *_ in asked} == {1.0}


def test_the_opponents_of_an_environment_keep_their_meaning():
    spec = EnvSpec.read("tic_tac_toe:opponent=older:5")
    assert spec.opponent == "older:5"
    assert spec.values == EnvSpec.read("tic_tac_toe:opponent=self").values
    assert not EnvSpec.read("iterated_game:opponent=tit_for_tat").opponent


@pytest.mark.parametrize("update, copies", [
    (-1, [0]), (2, [0]), (3, [0, 3]), (8, [0, 3, 6]), (17, [6, 9, 12, 15]),
])  # fmt: skip
def test_copies_of_the_last_updates_are_drawn_evenly_and_evaluations_meet_the_first(
    tmp_path, update, copies
):
    made = older_by(3, None, tmp_path, update)
    drawn = Counter(made.copy_for(seed, "older:3", seed=1) for seed in range(4000))
    assert sorted(drawn) == copies
    assert all(abs(count - 4000 / len(copies)) < 130 for count in drawn.values())  # 4 sigma
    assert made.copy_for(EVAL_SEEDS[5], "older:3", seed=1) == 0


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_older_copy_samples_with_its_weights_and_the_policy_keeps_its_own(
    qwen3_folder, tmp_path, lora_rank
):
    policy, prompts = load_small(qwen3_folder, lora_rank=lora_rank), [[65, 66], [67]]
    made = older_by(2, policy, tmp_path, -1)
    made.save_copy()
    before = TorchSampler(policy).sample(prompts, PARAMS)
    weights = policy.trainable().values()
    with torch.no_grad():
        for weight in weights:
            weight.add_(0.1 * torch.randn_like(weight))
    now = [weight.detach().clone() for weight in weights]
    (tmp_path / "checkpoint/000000-000012").mkdir(parents=True)  # from which a run may go on
    for made.progress["update"] in range(1, 21):
        made.save_copy()
    kept = sorted(int(path.name) for path in (tmp_path / "opponents").iterdir())
    assert kept == [0, 4, 6, 8, 10, 14, 16, 18, 20]
    folder = tmp_path / "opponents/000000"
    copy = OlderCopy(policy, folder)
    assert copy.sample(prompts, PARAMS) == before != TorchSampler(policy).sample(prompts, PARAMS)
    assert all(map(torch.equal, weights, now))
    (folder / "weights.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot be read"):
        copy.sample(prompts, PARAMS)


def test_an_opponent_needs_the_tokens_and_the_context_of_the_policy(policy, qwen3_folder):
    cfg = resolve(Config(model_id=str(qwen3_folder), max_model_len=64))
    other = replace(policy, tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0}))
    longer = replace(policy, max_length=65)
    for unlike, reason in ((longer, "its context has 64"), (other, "its tokenizer differs")):
        with pytest.raises(UsageError, match=reason):
            load_opponent(qwen3_folder, cfg, unlike)
