"""Environments that fail: each failure is an error of its episode, and none is a reward of 0."""

import asyncio
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL
from test_episodes import PARAMS, Scripted

from core import evaluation, metrics
from core.config import Config
from core.episodes import RolloutCollector
from core.faults import UsageError
from core.selection import drop_failed
from core.tasks import Task
from environments.base import Env, EnvFailure, MultiAgentEnv, Step, checked_step
from environments.parsing import user
from environments.plumbing import registry


class OneTurn(Env):
    """Ends after one response with the Step that `result` returns."""

    result = staticmethod(lambda: Step(None, 1.0, True, {"correct": True}))

    def reset(self, seed):
        return [user(f"task {seed}")]

    def step(self, response):
        return self.result()


class Game(MultiAgentEnv):
    """Ann and Bob act twice."""

    left = 2

    def reset(self, seed):
        return {"ann": [user("go")], "bob": [user("go")]}

    def step(self, responses):
        self.left -= 1
        message = user("go on") if self.left else None
        return {name: Step(message, 1.0, not self.left) for name in responses}


def only_ann(self, responses):
    return {"ann": Game.step(self, responses)["ann"]}


def play(policy, *tasks, max_turns=3):
    collector = RolloutCollector(policy, max_turns, env_timeout=1.0)
    rollouts = collector.collect([*tasks], Scripted(policy), PARAMS)
    kept = {spec.name for spec, envs in collector.pool.idle.items() if envs}
    assert kept == {r.env for r in rollouts if not r.error}  # a failed one is not used again
    return rollouts


FAULTS = [  # what the environment for one agent does in `step`, a part of the error
    (lambda: 1 / 0, r"ZeroDivisionError: division by zero \(test_env_failures.py, line \d+\)"),
    (lambda: sys.exit(0), "SystemExit: 0"),
    (lambda: Step(None, float("nan"), True), "nan"),
    (lambda: Step(None, -1e20, True), "1e.15"),
    (lambda: Step(user("no! " * 250_000), 0.0, False), "500000"),
    (lambda: Step(user("read! " * 1_000), 0.0, False), "one message has 6"),
    (lambda: Step(None, 1.0, False), "no message"),
    (lambda: Step(None, 1.0, True, {"x": object()}), "JSON"),
    (lambda: Step(None, 1.0, True, {"x": float("inf")}), "info of player"),
    (lambda: Step(None, 1.0, "True"), "TypeError: done of player is 'True', not True or False"),
    (lambda: Step(None, 1.0, True, truncated=np.array([True, False])), "truncated"),
    (lambda: Step(None, 1.0, True, {"correct": "False"}), r'info\["correct"\]'),
    (lambda: Step("Go on.", 1.0, False), r'message to player is str, not user\("\.\."\)'),
    (lambda: Step(None, "1.0", True), "the reward of player is '1.0', not a number"),
    (lambda: ("done", 1.0, True), "returned tuple of str, float, bool for player, not a Step"),
    (lambda: asyncio.sleep(0), r"a coroutine \(an environment is not async: .asyncio.run"),
]  # fmt: skip
WRONG = [  # class, method, what it returns, a part of the error
    (OneTurn, "reset", [], "ValueError: reset.. returned no message"),
    (OneTurn, "reset", [user("read! " * 1_000)], "UsageError: one message has 6"),
    (OneTurn, "reset", "Say 1.", "TypeError: reset.. returned str for player, not a list of mess"),
    (OneTurn, "reset", ("Say 1.", {}), "returned tuple of str, dict for player"),  # Gymnasium's
    (Game, "reset", [user("Say 1.")], "reset.. returned list of dict, not a dict of messages"),
    (Game, "step", [Step(None, 1.0, True)], "step.. returned list of Step, not a dict of Steps"),
    (Game, "step", only_ann, "ValueError: step.. never returned a Step for bob"),
    (Game, "step", lambda *_: dict.fromkeys(("ann", "bob"), Step(None, 1.0, False)),
     "ValueError: step.. asks no agent to act, and done is False for all of them"),
]  # fmt: skip


@pytest.mark.filterwarnings("error")  # a coroutine that is never awaited
def test_a_fault_is_the_error_of_its_episode(policy, monkeypatch):
    rows = [(OneTurn, "result", staticmethod(fault), words) for fault, words in FAULTS] + WRONG
    names = [f"fault{number}" for number in range(len(rows))]
    for name, (kind, method, value, _) in zip(names, rows, strict=True):
        is_code = callable(value)
        does = value if is_code else lambda *_, value=value: value
        monkeypatch.setitem(registry.ENVIRONMENTS, name, type("Kind", (kind,), {method: does}))
    tasks = [Task(name, 1, i) for i, name in enumerate(["letter_counting", *names, "reverse"])]
    first, *faulty, last = play(policy, *tasks)
    assert not first.error and not last.error
    assert {r.env for r in faulty} == {*names}
    for rollout in faulty:
        words = rows[names.index(rollout.env)][3]
        assert re.search(words, rollout.error) and len(rollout.error) < 600
        assert not rollout.env_failure


def test_a_seat_without_a_step_is_no_error_where_the_episode_is_cut(policy, monkeypatch):
    monkeypatch.setitem(registry.ENVIRONMENTS, "cut", type("Kind", (Game,), {"step": only_ann}))
    whole = play(policy, Task("cut", 0, 0))
    assert [r.error for r in play(policy, Task("cut", 0, 0), max_turns=1)] == ["", ""]
    policy.max_length = len(whole[0].turns[1].prompt_ids)  # ann's second prompt does not fit
    assert [r.error for r in play(policy, Task("cut", 0, 0))] == ["", ""]


def test_numbers_of_numpy_are_those_of_python():
    info = {"correct": np.bool_(True), "score": np.float32(0.5), "grid": np.eye(2), "left": 3}
    no, yes = np.bool_(False), np.int64(1)
    plain = {"correct": True, "score": 0.5, "grid": [[1.0, 0.0], [0.0, 1.0]], "left": 3}
    step = checked_step(Step(None, np.float32(1), yes, info, no, yes), "player", is_single=True)
    assert repr(step) == repr(Step(None, 1.0, True, plain, False, True))


def test_an_episode_with_many_agents_is_one_failure(policy, monkeypatch):
    class Crowd(MultiAgentEnv):
        """Nine agents with an even seed, one with an odd seed, whose episode fails."""

        def reset(self, seed):
            self.fails = seed % 2
            return {name: [user("go")] for name in "abcdefghi"[: 1 if self.fails else 9]}

        def step(self, responses):
            return {name: Step(None, 1 / (not self.fails), True) for name in responses}

    monkeypatch.setitem(registry.ENVIRONMENTS, "crowd", Crowd)
    rollouts, said = play(policy, *(Task("crowd", seed, seed) for seed in (0, 1, 2, 3, 5))), []
    with pytest.raises(UsageError, match="3 of 5 episodes failed"):
        drop_failed(rollouts, said.append)
    assert len(drop_failed([r for r in rollouts if r.seed < 4], said.append)) == 18
    assert len(said) == 1 and said[0].startswith("2 of 4 episodes failed")
    assert metrics.rollout_metrics(Config(), rollouts)["episodes/failed"] == pytest.approx(0.6)
    assert evaluation.accuracy_metrics(rollouts)["eval/crowd/failed"] == 3


def test_a_server_that_dies_ends_the_run_which_a_new_server_continues(command, monkeypatch):
    """Update 1 has 4 episodes, which are judged twice; from the second on the server is down."""
    state = {"left": 8}

    class Served(OneTurn):
        def step(self, response):
            state["left"] -= 1
            if state["left"] < 0:
                raise EnvFailure("connection lost")
            return Step(None, float(len(response)), True)

    monkeypatch.setitem(registry.ENVIRONMENTS, "one", Served)
    flags = "--env one --eval-num-tasks 0 --num-updates 2 --run-name a --save-every 0".split()
    code, _, err = command(*SMALL, *flags)
    assert code == 2 and err.count("\n") == 1
    assert "4 of 4 episodes failed; the first one, one with seed" in err
    assert "EnvFailure: connection lost; resume with: train.execute(['--resume', 'runs/a'])" in err
    state["left"] = 4
    code, _, err = command("--resume", "runs/a")
    records = [json.loads(line) for line in Path("runs/a/metrics.jsonl").read_text().splitlines()]
    assert (code, [record["update"] for record in records]) == (0, [0, 1, 2])
