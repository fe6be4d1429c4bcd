"""Facts about any settings: config.yaml and a command line give them back."""

import dataclasses
import typing
from functools import cache

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from algorithms import ppo
from core.algorithm import algorithm_names, load_algorithm
from core.config import COMMAND_LINE_ONLY, Config, resolve
from core.run import cli
from core.run.folder import config_to_dict, read_config

MANY = settings(
    max_examples=10, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([-0.0, 1e-6, 3e-5, 1])
WHOLE = st.integers(-3, 10) | st.integers(-(2**70), 2**70)
# The text of a flag has no NUL; a text that begins with "-" is parsed as a flag.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12) | (
    st.sampled_from(["None", "true", "1e-5", "null", "a: b", "x,y", "#", " ", "", "~", "é\n", "[]"])
)
WORDS = TEXT.filter(lambda text: not text.startswith("-"))


@cache
def values_of(cls):
    """A strategy for each field of a dataclass, by its annotation."""
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)} - {"algo", "options"}
    return {name: _values(hints[name]) for name in sorted(names)}


def _values(kind):
    simple = {bool: st.booleans(), int: WHOLE, float: NUMBERS, str: WORDS, type(None): st.none()}
    if kind in simple:
        return simple[kind]
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return st.lists(WORDS, max_size=3).map(tuple)
    return st.one_of(*(_values(part) for part in typing.get_args(kind)))


def some_of(cls, most=6):
    """Instances in which a few fields are drawn and the others are as they are by default."""
    fields = values_of(cls)
    drawn = st.lists(st.sampled_from([*fields]), unique=True, max_size=most).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )
    return drawn.map(lambda values: cls(**values))


def with_options(config, algo):
    return some_of(load_algorithm(algo).Options).map(
        lambda options: dataclasses.replace(config, algo=algo, options=options)
    )


configs = st.deferred(lambda: st.tuples(some_of(Config), st.sampled_from(algorithm_names())))
configs = configs.flatmap(lambda drawn: with_options(*drawn))


def written(config, file):
    file.write_text(yaml.safe_dump(config_to_dict(config)))
    return file


def as_saved(config):
    """The settings that config.yaml contains; the others have their defaults."""
    left_out = {name: getattr(Config(), name) for name in (*COMMAND_LINE_ONLY, "run_name")}
    options = config.options or load_algorithm(config.algo).Options()
    return dataclasses.replace(config, options=options, **left_out)


@MANY
@given(configs)
@example(Config(lr=1e-5, env=(), model_id="None", base_url="é\n: #"))
@example(Config(algo="ppo", options=ppo.Options(clip=0.3), env=("a:k=1", "b"), lora_alpha=8))
def test_yaml_gives_settings_back(tmp_path, config):
    file = written(config, tmp_path / "config.yaml")
    assert read_config(file) == as_saved(config)
    resolved = resolve(config)
    assert read_config(written(resolved, file)) == as_saved(resolved)


@MANY
@given(configs)
@example(Config(env=("a b", "c"), mask_truncated_completions=True, max_tokens=5, teacher="x=y"))
@example(Config(algo="ppo", options=ppo.Options(clip=0.3), stop_on=("any",)))
def test_a_command_line_gives_settings_back(config):
    options = config.options or load_algorithm(config.algo).Options()
    left_out = dict.fromkeys(("config", "resume", "template_date", "run_name"), "")
    config = dataclasses.replace(config, options=options, **left_out)
    assert cli.parse(cli.flags_of(config)) == config
