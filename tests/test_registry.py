"""`make("name:key=value,...")`: what it builds and which input it rejects."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from core.types import UsageError
from environments import registry
from environments.base import DEMO_SEEDS, EVAL_SEEDS, TRAIN_SEEDS, Env, Step
from environments.registry import ENVIRONMENTS, make, register

ROOT = Path(__file__).parent.parent


@pytest.fixture
def echo(monkeypatch):
    """Registers an environment "echo" with one option of each type for the length of a test."""
    monkeypatch.setattr(registry, "ENVIRONMENTS", dict(ENVIRONMENTS))

    @register("echo")
    class Echo(Env):
        def __init__(self, times: int = 1, price: float = 0.5, loud: bool = False, text: str = ""):
            if times < 0:
                raise UsageError(f"times must be at least 0, not {times}")
            self.options = (times, price, loud, text)

        def reset(self, seed):
            return [{"role": "user", "content": str(seed)}]

        def step(self, response):
            return Step(None, 0.0, True)

    return Echo


def error_of(spec):
    with pytest.raises(UsageError) as error:
        make(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_import_of_the_registry_imports_no_task():
    code = "import sys, environments; print(*(m for m in sys.modules if 'environments.' in m))"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert set(output.split()) == {"environments.base", "environments.registry"}


def test_make_without_options_uses_the_defaults(echo):
    assert type(make("echo")) is echo and make("echo") is not make("echo")
    assert make("echo").options == make("echo:").options == (1, 0.5, False, "")


def test_make_converts_each_value_to_the_type_of_its_option(echo):
    options = make("echo:times=3,price=2,loud=true,text=12").options
    assert options == (3, 2.0, True, "12")
    assert [type(option) for option in options] == [int, float, bool, str]
    assert make("echo:loud=FALSE").options[2] is False


def test_make_keeps_colons_equals_signs_and_inner_spaces_of_a_text(echo):
    options = make("echo: text = http://a b?c=d ,times=2").options
    assert options == (2, 0.5, False, "http://a b?c=d")


def test_an_unknown_name_lists_the_available_names(echo):
    message = error_of("ecko:times=3")
    assert "'ecko'" in message and "did you mean echo" in message and "letter_counting" in message


@pytest.mark.parametrize("spec, words", [
    ("echo:time=3", ["'time'", "times, price, loud, text"]), ("echo:times=1,times=1", ["twice"]),
    ("echo:times", ["key=value", "'times'"]), ("echo:times=1.5", ["times", "integer", "'1.5'"]),
    ("echo:price=inf", ["price", "number", "'inf'"]), ("echo:loud=1", ["loud", "true or false"]),
    ("echo:times=-1", ["at least 0, not -1"]),  # raised by the environment
])  # fmt: skip
def test_an_invalid_option_is_named_in_the_error(echo, spec, words):
    message = error_of(spec)
    assert f"--env {spec}" in message
    assert all(word in message for word in words), message


def test_seed_ranges_are_disjoint_and_large():
    ranges = [TRAIN_SEEDS, DEMO_SEEDS, EVAL_SEEDS]
    assert all(len(seeds) >= 1_000_000 and seeds.step == 1 for seeds in ranges)
    assert all(before.stop <= after.start for before, after in pairwise(ranges))
