"""`make("name:key=value,...")`: what it builds, and the one line that it says otherwise."""

from itertools import pairwise

import pytest

from core.types import UsageError
from environments import base
from environments.base import (
    DEMO_SEEDS,
    EVAL_SEEDS,
    TRAIN_SEEDS,
    Env,
    Step,
    accepts,
    list_envs,
    make,
    register,
)


@pytest.fixture
def echo(monkeypatch):
    """An environment "echo" with one option of each kind, gone after the test."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))

    @register("echo")
    class Echo(Env):
        def __init__(self, times: int = 1, price: float = 0.5, loud: bool = False, text: str = ""):
            if times < 0:
                raise UsageError(f"times is 0 or more, not {times}")
            self.options = (times, price, loud, text)

        def reset(self, seed):
            return [{"role": "user", "content": str(seed)}]

        def step(self, response):
            return Step(None, 0.0, True)

    return Echo


def refused(spec):
    """The message of the UsageError that `spec` earns; it fits one line."""
    with pytest.raises(UsageError) as error:
        make(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_make_without_options_takes_the_defaults(echo):
    assert type(make("echo")) is echo
    assert make("echo").options == make("echo:").options == (1, 0.5, False, "")


def test_make_reads_each_value_by_the_option_s_type(echo):
    made = make("echo:times=3,price=2,loud=true,text=12").options
    assert made == (3, 2.0, True, "12")
    assert [type(option) for option in made] == [int, float, bool, str]


@pytest.mark.parametrize("text, value", [("true", True), ("False", False), ("FALSE", False)])
def test_make_reads_true_and_false_in_any_case(echo, text, value):
    assert make(f"echo:loud={text}").options[2] is value


def test_make_keeps_colons_equals_signs_and_inner_spaces_of_a_text(echo):
    assert make("echo: text = http://a b?c=d ,times=2").options == (
        2, 0.5, False, "http://a b?c=d",
    )  # fmt: skip


def test_make_builds_a_new_environment_each_time(echo):
    assert make("echo") is not make("echo")


def test_make_refuses_an_unknown_name_and_lists_the_known(echo):
    message = refused("ecko:times=3")
    assert "'ecko'" in message and "echo" in message and "letter_counting" in message


@pytest.mark.parametrize(
    "spec, words",
    [
        ("echo:time=3", ["'time'", "times, price, loud, text"]),
        ("echo:=3", ["''"]),
        ("echo:times=1,price=1,times=1", ["'times'", "twice"]),
        ("echo:times", ["key=value", "'times'"]),
        ("echo:times=x", ["times", "whole number", "'x'"]),
        ("echo:times=1.5", ["times", "whole number", "'1.5'"]),
        ("echo:times=", ["times", "whole number", "''"]),
        ("echo:price=cheap", ["price", "number", "'cheap'"]),
        ("echo:loud=1", ["loud", "true or false", "'1'"]),
        ("echo:loud=", ["loud", "true or false"]),
        ("echo:times=-1", ["times is 0 or more, not -1"]),  # the environment's own refusal
        ("letter_counting:difficulty=0", ["1 to 10, not 0"]),
        ("letter_counting:difficulty=11", ["1 to 10, not 11"]),
    ],
)
def test_make_refuses_a_bad_option_and_says_which(echo, spec, words):
    message = refused(spec)
    assert f"--env {spec}" in message
    assert all(word in message for word in words), message


def test_list_envs_is_sorted_and_has_what_was_registered(echo):
    assert list_envs() == sorted(list_envs())
    assert {"echo", "letter_counting"} <= set(list_envs())


def test_accepts_tells_whether_there_is_such_an_option(echo):
    assert accepts("echo", "times") and accepts("echo:price=1", "times")
    assert not accepts("echo:price=1", "difficulty")
    assert accepts("letter_counting", "difficulty")
    with pytest.raises(UsageError, match="ecko"):
        accepts("ecko", "times")


def test_an_environment_shows_nothing_unless_it_says_so(echo):
    assert make("echo").demonstrate() is None and make("echo").demonstrate(hasty=True) is None


def test_seed_ranges_are_disjoint_and_not_empty():
    ranges = [TRAIN_SEEDS, DEMO_SEEDS, EVAL_SEEDS]
    assert all(len(seeds) >= 1_000_000 and seeds.step == 1 for seeds in ranges)
    for before, after in pairwise(ranges):
        assert before.stop <= after.start


def test_an_option_without_a_default_must_be_given():
    known = dict(base._REGISTRY)
    try:

        @base.register("needy")
        class Needy(base.Env):
            def __init__(self, path: str):
                self.path = path

            def reset(self, seed):
                return []

            def step(self, response):
                return base.Step(None, 0.0, True)

        with pytest.raises(UsageError, match="it needs path="):
            base.make("needy")
        assert base.make("needy:path=x").path == "x"
    finally:
        base._REGISTRY.clear()
        base._REGISTRY.update(known)
