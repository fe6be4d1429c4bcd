"""core/extras/opponents.py: seats by the seed, one batch for each; test_train.py resumes a run."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load_small
from test_episodes import Scripted

import train
from core.config import Config, resolve
from core.episodes import RolloutCollector
from core.extras import opponents
from core.extras.opponents import Opponents, copies_at, load_opponent
from core.faults import UsageError
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from environments.base import EVAL_SEEDS, MultiAgentEnv
from environments.plumbing import registry
from environments.plumbing.registry import EnvSpec, make
from environments.template import Nim

PARAMS = SamplingParams(max_tokens=8, seed=5)


@pytest.fixture(autouse=True)
def nim(monkeypatch):
    monkeypatch.setattr(registry, "ENVIRONMENTS", registry.ENVIRONMENTS | {"nim": Nim})


def joined(policy, folder, *specs, samplers=None, progress=None):
    """A collector whose opponents are those of `specs`."""
    collector = RolloutCollector(policy, max_turns=30)
    made = Opponents(Config(env=()), policy, folder, progress or {"update": -1})
    collector.opponents = made
    made.samplers = samplers or {}
    made.intervals = {int(s.rpartition(":")[2]) for s in specs if "older" in s}
    return collector


@pytest.mark.parametrize(
    ("spec", "game", "opponent"),
    [
        ("tic_tac_toe:opponent=runs/x", "tic_tac_toe:opponent=self", "runs/x"),
        ("connect4:opponent=older:5,depth=2", "connect4:depth=2,opponent=self", "older:5"),
        ("nim:opponent=guess", "nim", "guess"),
        ("iterated_game:opponent=tit_for_tat", "iterated_game:opponent=tit_for_tat", ""),
    ],
)
def test_the_opponents_of_an_environment_keep_their_meaning(spec, game, opponent):
    assert EnvSpec.read(spec).opponent == opponent
    assert EnvSpec.read(spec).values == EnvSpec.read(game).values
    assert isinstance(make(spec), MultiAgentEnv) == bool(opponent)


def test_the_seed_decides_the_seat_and_a_group_shares_it(policy, tmp_path):
    collector = joined(policy, tmp_path)
    tasks = [Task("nim:opponent=demonstrate", seed, seed) for seed in (4, 4, 7, 7, 10, 11)]
    rollouts = collector.collect(tasks, Scripted(policy, "<move>1</move>"), PARAMS)
    assert [(r.seed, r.agent, r.group_id) for r in rollouts] == [
        (4, "first", 0), (4, "first", 0), (7, "second", 1), (7, "second", 1),
        (10, "first", 2), (11, "second", 3),
    ]  # fmt: skip
    for r in rollouts:
        other = {"first": "second", "second": "first"}[r.agent]
        assert list(r.for_log["opponents"]) == [other]
        assert r.for_log["opponents"][other]["player"] == "demonstrate"
        answers = [m for m in r.messages if m["role"] == "assistant"]
        assert answers and {m["content"] for m in answers} == {"<move>1</move>"}
        assert len(answers) == len(r.turns)


def test_draws_of_an_opponent_depend_on_the_seed_and_the_place_only(policy, tmp_path, monkeypatch):
    def play(seed, extra=()):
        collector = joined(policy, tmp_path, samplers={"./a": TorchSampler(policy)})
        tasks = [Task("nim:opponent=./a", s, i) for i, s in enumerate([1, 3, *extra])]
        sampler = Scripted(policy, "<move>1</move>")
        found = collector.collect(tasks, sampler, replace(PARAMS, seed=seed))
        return [r.for_log["opponents"] for r in found if r.seed in (1, 3)]

    step = Nim.step  # no answer is unreadable
    monkeypatch.setattr(
        Nim, "step", lambda self, told: step(self, dict.fromkeys(told, "<move>3</move>"))
    )
    assert play(5) == play(5, extra=[5, 9]) != play(6)


def test_copies_of_the_last_updates_are_drawn_evenly_and_evaluations_meet_the_first(
    policy, tmp_path
):
    assert copies_at(0, 3) == [0] and copies_at(2, 3) == [0] and copies_at(3, 3) == [0, 3]
    made = joined(policy, tmp_path, progress={"update": 17}).opponents
    tasks = [Task("nim:opponent=older:3", seed, 0) for seed in range(4000)]
    drawn = Counter(made.copy_for(task, "older:3", seed=1) for task in tasks)
    assert sorted(drawn) == [6, 9, 12, 15]
    assert all(abs(count - 1000) < 110 for count in drawn.values())  # 4 standard deviations
    assert made.copy_for(Task("nim", EVAL_SEEDS[5], 0), "older:3", seed=1) == 0
    assert made.copy_for(tasks[0], "guess", seed=1) == -1


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_older_copy_plays_with_its_weights_and_leaves_those_of_the_policy(
    qwen3_folder, tmp_path, lora_rank
):
    policy, progress = load_small(qwen3_folder, lora_rank=lora_rank), {"update": 0}
    collector = joined(policy, tmp_path, "older:1", progress=progress)
    made, tasks = collector.opponents, [Task("nim:opponent=older:1", 0, 0)]
    made.update_copies()
    first = {name: p.detach().clone() for name, p in policy.trainable().items()}
    if lora_rank:
        assert all("lora" in name for name in first)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.01)
    now = {name: p.detach().clone() for name, p in policy.trainable().items()}
    with pytest.raises(KeyError), made.weights_of(0):
        inside = policy.trainable()
        assert all(torch.equal(inside[name], p) for name, p in first.items())
        raise KeyError
    collector.collect(tasks, Scripted(policy, "<move>1</move>"), PARAMS)
    assert all(torch.equal(policy.trainable()[name], p) for name, p in now.items())
    assert all(p.grad is None for p in policy.trainable().values())


def test_copies_are_kept_as_long_as_a_checkpoint_may_need_them(policy, tmp_path):
    progress = {"update": 0}
    made = joined(policy, tmp_path, "older:2", progress=progress).opponents
    (tmp_path / "checkpoint/000000-000005").mkdir(parents=True)  # after update 4
    for progress["update"] in range(15):
        made.update_copies()
    kept = sorted(int(path.stem) for path in (tmp_path / "opponents").iterdir())
    assert kept == [0, 2, 4, 8, 10, 12, 14]


def test_an_opponent_needs_the_tokens_and_the_context_of_the_policy(
    policy, qwen3_folder, monkeypatch
):
    cfg = resolve(Config(model_id=str(qwen3_folder), max_model_len=64))
    with pytest.raises(UsageError, match="its context has 64 tokens"):
        load_opponent(Path(qwen3_folder), cfg, replace(policy, max_length=65))
    other = replace(policy, tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0}))
    monkeypatch.setattr(opponents, "load_exported", lambda *_: other)
    with pytest.raises(UsageError, match="its tokenizer differs from that of --model-id"):
        load_opponent(Path(qwen3_folder), cfg, policy)


def test_an_opponent_samples_at_temperature_1_in_evaluations_too(policy, tmp_path):
    class Other(Scripted):
        def complete(self, request):
            asked.append(request.params.temperature)
            return super().complete(request)

    asked = []
    collector = joined(policy, tmp_path, samplers={"./a": Other(policy, "<move>9</move>")})
    tasks = [Task("nim:opponent=./a", seed, seed) for seed in (0, 1)]
    params = replace(PARAMS, temperature=0.0)
    collector.collect(tasks, Scripted(policy, "<move>1</move>"), params)
    assert {*asked} == {1.0}


def test_an_older_copy_has_the_newest_weights_although_older_ones_sample(command, monkeypatch):
    copied, update_copies = [], Opponents.update_copies

    def take_step(run, *rest):
        with torch.no_grad():
            next(iter(run.policy.trainable().values())).fill_(run.next_update)
        return True

    def note(opponents):
        copied.append(next(iter(opponents.policy.trainable().values())).mean().item())
        update_copies(opponents)

    monkeypatch.setattr(train, "take_step", take_step)
    monkeypatch.setattr(Opponents, "update_copies", note)
    flags = "--env tic_tac_toe:opponent=older:1 --staleness 2 --num-updates 3 --group-size 2"
    flags += " --num-prompts 1 --max-tokens 6 --max-turns 1 --eval-num-tasks 0 --device cpu"
    assert command(*flags.split())[0] == 0
    assert copied[2:] == [1.0, 2.0]
