"""`check_env` finds each mistake that an environment can make, and no mistake in a correct one."""

import inspect
import random
import time
from pathlib import Path

import pytest

from environments.__main__ import execute
from environments.base import EVAL_SEEDS, Env, MultiAgentEnv, Step
from environments.parsing import user
from environments.plumbing import registry
from environments.plumbing.check import check_env


class Echo(Env):
    """A correct environment: repeat a number."""

    def draw(self, seed):
        return 2 * random.Random(seed).randrange(10**6) + (seed in EVAL_SEEDS)

    def reset(self, seed):
        self.number = self.draw(seed)
        return [user(f"Repeat {self.number}.")]

    def step(self, response):
        correct = response == str(self.number)
        return Step(None, float(correct), True, {"correct": correct})

    def demonstrate(self, hasty=False):
        return "0" if hasty else str(self.number)


class Begun(Echo):
    """The answer begins with what the environment gives; `step` gets all of it."""

    def reset(self, seed):
        return [*super().reset(seed), {"role": "assistant", "content": "="}]

    def step(self, response):
        return super().step(response.partition("=")[2])


class Pair(MultiAgentEnv):
    """Two agents answer at once; `seats` get a Step."""

    seats: tuple[str, ...] = ("a", "b")

    def reset(self, seed):
        return {agent: [user(f"Say {seed}.")] for agent in ("a", "b")}

    def step(self, responses):
        return {agent: Step(None, 0.5, True, {"correct": True}) for agent in self.seats}


def ends(*step, **info):
    """`step` with this end."""
    return lambda self, response: Step(None, *step, info)


PROBLEMS = {
    "does not determine": (Echo, {"draw": lambda self, seed: time.perf_counter_ns()}),
    "reserve tasks": (Echo, {"draw": lambda self, seed: random.Random(seed).randrange(1000)}),
    "could not convert string": (Echo, {"step": lambda self, text: Step(None, float(text), True)}),
    "step() never returned a Step for b": (Pair, {"seats": ("a",)}),
    "chat template": (Echo, {"reset": lambda self, seed: [
        user("<|user|>" + Echo.reset(self, seed)[0]["content"] + "<|assistant|>")]}),
    "b acts, but is not one of a": (Pair, {"agents": ("a",)}),
    "none of 3 demonstrations succeeds": (Echo, {"step": ends(1.0, True, correct=False)}),
}  # fmt: skip
WARNINGS = {
    'without info["correct"]': (Echo, {"step": ends(0.0, True)}),
    "none of 3 episodes of guesses succeeds": (Echo, {
        "step": lambda self, response: Step(user("again"), 0.0, False, {"correct": False}),
        "demonstrate": lambda self, hasty=False: "0" if hasty else None,
    }),
    "2 of 2 right answers are right with a wrong one, too": (Echo, {
        "step": lambda self, text: Step(None, 1.0, True, {"correct": str(self.number) in text}),
    }),
    "none of 3 demonstrations": (Pair, {  # of the one that demonstrates; the other one is right
        "agents": ("a", "b"),
        "step": lambda self, texts: {
            a: Step(None, 0.0, True, {"correct": text != "best"}) for a, text in texts.items()},
        "demonstrate": lambda self, agent, hasty=False: "worse" if hasty else "best",
    }),
}  # fmt: skip


def report_of(environment, monkeypatch):
    monkeypatch.setitem(registry.ENVIRONMENTS, "checked", environment)
    return check_env("checked", num_seeds=3, other_process=False)


def test_a_correct_environment_has_no_problem_and_the_stated_figures(monkeypatch):
    report = report_of(Echo, monkeypatch)
    assert (report.problems, report.warnings) == ([], [])
    assert report.rewards == {0.0, 1.0} and report.longest == 1
    assert report.demonstrations == [(1.0, True)] * 3
    assert len(report.openings) > 595 and len(report.held_out) > 295
    pair = report_of(Pair, monkeypatch)
    assert pair.problems == [] and pair.rewards == {0.5}
    unjudged = type("Unjudged", (Echo,), {"step": ends(0.0, True, correct=None)})
    lines = [*report_of(unjudged, monkeypatch).lines()]
    assert "correct 0 of 0" in lines[2] and lines[-1] == "no problem(s), 0 warning(s)"
    assert report_of(Begun, monkeypatch).demonstrations == [(1.0, True)] * 3
    silent = type("Silent", (Echo,), {"demonstrate": lambda self, hasty=False: None})
    assert report_of(silent, monkeypatch).warnings == []  # every guess was "?"


@pytest.mark.parametrize("words", [*PROBLEMS, *WARNINGS])
def test_a_mistake_is_a_problem_and_what_limits_the_use_a_warning(words, monkeypatch):
    base, methods = (PROBLEMS | WARNINGS)[words]
    report = report_of(type("Wrong", (base,), methods), monkeypatch)
    lines = report.problems if words in PROBLEMS else report.warnings
    assert any(words in line for line in lines), report
    assert bool(report.problems) is (words in PROBLEMS)
    assert all("\n" not in line for line in report.lines())


def test_another_process_must_play_the_same_episodes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "import random\nfrom environments.base import *\nfrom environments.parsing import user\n"
    code += inspect.getsource(Echo)
    Path("good.py").write_text(code)
    Path("hashed.py").write_text(code.replace("Random(seed)", "Random(hash(str(seed)))"))
    for name, exit_code, words in (("good", 0, "no problem(s), 0"), ("hashed", 1, "hash()")):
        assert execute(["check", f"{name}.py:Echo"]) == exit_code
        assert words in capsys.readouterr().out
