"""`check_env` finds each mistake that an environment can make, and no mistake in a correct one."""

import inspect
import random
import time

import pytest

from environments.__main__ import execute
from environments.base import EVAL_SEEDS, Env, MultiAgentEnv, Step
from environments.parsing import user
from environments.plumbing import registry
from environments.plumbing.check import check_env
from environments.plumbing.registry import ENVIRONMENTS, register
from environments.plumbing.web import Episode


class Echo(Env):
    """A correct environment: repeat a number."""

    def reset(self, seed):
        self.number = 2 * random.Random(seed).randrange(10**6) + (seed in EVAL_SEEDS)
        return [user(f"Repeat {self.number}.")]

    def step(self, response):
        correct = response == str(self.number)
        return Step(None, float(correct), True, {"correct": correct})

    def demonstrate(self, hasty=False):
        return "0" if hasty else str(self.number)


class Hashed(Echo):
    def reset(self, seed):
        self.number = hash(str(seed))
        return [user(f"Repeat {self.number}.")]


class Begun(Echo):
    """The answer begins with what the environment gives; `step` gets all of it."""

    def reset(self, seed):
        return [*super().reset(seed), {"role": "assistant", "content": "It is "}]

    def step(self, response):
        return super().step(response.removeprefix("It is ") * response.startswith("It is "))


def variant(base, name, **methods):
    return type(name, (base,), methods)


def repeat(number):
    """`reset` with the task that `number` gives."""

    def reset(self, seed):
        self.number = number(seed)
        return [user(f"Repeat {self.number}.")]

    return reset


def ends(reward=lambda response: 0.0, **info):
    return lambda self, response: Step(None, reward(response), True, {"correct": True} | info)


Clock = variant(Echo, "Clock", reset=repeat(lambda seed: time.perf_counter_ns()))
Shared = variant(Echo, "Shared", reset=repeat(lambda seed: random.Random(seed).randrange(1000)))
Raising = variant(Echo, "Raising", step=ends(lambda response: float(response or 0)))


Hopeless = variant(Echo, "Hopeless", step=ends(lambda response: 1.0, correct=False))
Unscored = variant(Echo, "Unscored", step=lambda self, response: Step(None, 0.0, True))


class Endless(Echo):
    def step(self, response):
        return Step(user("again"), 0.0, False, {"correct": False})

    def demonstrate(self, hasty=False):
        return None


class Pair(MultiAgentEnv):
    """Two agents answer at once; `seats` get a Step."""

    seats: tuple[str, ...] = ("a", "b")

    def reset(self, seed):
        return {agent: [user(f"Say {seed}.")] for agent in ("a", "b")}

    def step(self, responses):
        return {agent: Step(None, 0.5, True, {"correct": True}) for agent in self.seats}


class Forgetful(Pair):
    seats = ("a",)


class Duel(Pair):
    """The agent that demonstrates does its best and loses."""

    agents = ("a", "b")

    def step(self, responses):
        lost = {agent: text == "best" for agent, text in responses.items()}
        return {a: Step(None, -lost[a], True, {"correct": not lost[a]}) for a in responses}

    def demonstrate(self, agent, hasty=False):
        return "worse" if hasty else "best"


PROBLEMS = [
    (Clock, "does not determine"), (Shared, "reserve tasks"),
    (Raising, "could not convert string"), (Forgetful, "never returned a Step for b"),
    (Hopeless, "none of 3 demonstrations succeeds"),
    (variant(Echo, "Silent", reset=lambda self, seed: []), "returned no messages"),
]  # fmt: skip
WARNINGS = [
    (Unscored, 'without a bool info["correct"]'),
    (Endless, "none of 3 episodes of guesses succeeds"), (Duel, "none of 3 demonstrations"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def names(monkeypatch):
    monkeypatch.setattr(registry, "ENVIRONMENTS", dict(ENVIRONMENTS))


def report_of(environment):
    register(environment.__name__)(environment)
    return check_env(environment.__name__, num_seeds=3, other_process=False)


def test_a_correct_environment_has_no_problem_and_the_stated_figures():
    report = report_of(Echo)
    assert (report.problems, report.warnings) == ([], [])
    assert report.rewards == (0.0, 1.0) and report.longest == 1
    assert report.demonstrations == [(1.0, True)] * 3
    assert report.openings > 1390 and report.held_out > 690 and report.shared == 0
    pair = report_of(Pair)
    assert pair.problems == [] and pair.rewards == (0.5, 0.5)
    assert report_of(Begun).demonstrations == [(1.0, True)] * 3
    episode = Episode(Begun(), "begun", seed=7)
    episode.demonstrate("player")
    assert episode.returns == {"player": 1.0}


@pytest.mark.parametrize(("environment", "words"), PROBLEMS)
def test_a_mistake_is_a_problem(environment, words):
    report = report_of(environment)
    assert any(words in problem for problem in report.problems), report.problems
    assert all("\n" not in problem for problem in report.problems)


@pytest.mark.parametrize(("environment", "words"), WARNINGS)
def test_what_limits_the_use_is_a_warning(environment, words):
    report = report_of(environment)
    assert not report.problems
    assert any(words in warning for warning in report.warnings), report.warnings


def test_another_process_must_play_the_same_episodes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "import random\nfrom environments.base import *\nfrom environments.parsing import user\n"
    for environment, base in ((Echo, "Env"), (Hashed, "Echo")):
        code += inspect.getsource(environment).replace("(Echo)", f"({base})") + "\n"
    (tmp_path / "games.py").write_text(code)
    assert execute(["check", "games.py:Echo"]) == 0
    assert "no problem found" in capsys.readouterr().out
    assert execute(["check", "games.py:Hashed"]) == 1
    assert "another Python process" in capsys.readouterr().out
