"""Whatever the settings are: a run's config.yaml gives them back, and what can't be meant is one
line."""

import dataclasses
import typing
from functools import cache

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from algorithms import grpo
from core import cli
from core.config import check, resolve
from core.types import UsageError
from train import ALGORITHMS, Config

FEW = settings(
    max_examples=50, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
FEWER = settings(FEW, max_examples=20)  # tyro takes a while
NUMBERS = st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 1e-6, 3e-5, 0.5, 1.0, -1.0])
WHOLE = st.integers(-3, 10) | st.integers(-(2**70), 2**70)
# a flag's text: no line of a shell holds NUL, and one that begins with "-" is taken for a flag
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12) | (
    st.sampled_from(["None", "true", "1e-5", "null", "a: b", "x,y", "#", " ", "", "~", "é\n", "[]"])
)
WORDS = TEXT.filter(lambda text: not text.startswith("-"))


@cache
def values_of(cls):
    """A strategy for each field of a dataclass, by its annotation."""
    hints = typing.get_type_hints(cls)
    return {field.name: _values(hints[field.name]) for field in dataclasses.fields(cls)}


def _values(kind):
    simple = {bool: st.booleans(), int: WHOLE, float: NUMBERS, str: WORDS, type(None): st.none()}
    if kind in simple:
        return simple[kind]
    if dataclasses.is_dataclass(kind):
        return st.just(kind()) | some_of(kind)
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


configs = st.deferred(lambda: some_of(Config))


def written(config, file):
    file.write_text(yaml.safe_dump(cli.to_dict(config, ALGORITHMS)))
    return file


def as_kept(config):
    """Without what config.yaml doesn't hold: its own path, and options that aren't used."""
    unused = {n: type(getattr(config, n))() for n in ALGORITHMS if n != config.algo}
    return dataclasses.replace(config, config="", resume="", run_name="", **unused)


@FEWER
@given(configs)
@example(Config(lr=1e-5, env=(), model_id="None", base_url="é\n: #"))
def test_settings_come_back_from_yaml_as_they_were(tmp_path, config):
    file = written(config, tmp_path / "config.yaml")
    assert cli.from_yaml(Config, file) == as_kept(config)
    resolved = resolve(config)
    assert cli.from_yaml(Config, written(resolved, file)) == as_kept(resolved)


@FEWER
@given(configs, configs)
def test_each_flag_that_is_given_wins_over_the_file_and_no_other(tmp_path, config, flags):
    names = {f.name for f in dataclasses.fields(Config)} - {"config", "resume", *ALGORITHMS}
    given_ = {name: getattr(flags, name) for name in sorted(names)}
    given_ = {name: value for name, value in given_.items() if value != getattr(Config, name)}
    args = []
    for name, value in given_.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            args.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            args += [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]
    file = written(config, tmp_path / "config.yaml")
    chosen = cli.parse(Config, ["--config", str(file), *args])
    assert chosen == dataclasses.replace(as_kept(config), config=str(file), **given_)


@FEW
@given(configs)
def test_any_settings_are_taken_or_refused_in_one_line(config):
    config = resolve(config)
    try:
        check(config, ALGORITHMS)
    except UsageError as error:
        assert str(error) and len(str(error).splitlines()) == 1 and len(str(error)) < 200
    else:
        assert config.lr > 0 and config.num_prompts > 0 and 0 <= config.gamma <= 1 and config.env


@FEW
@given(configs)
def test_what_is_filled_in_once_stays(config):
    resolved = resolve(config)
    assert resolve(resolved) == resolved
    assert None not in (resolved.lr, resolved.max_tokens, resolved.sft_steps, resolved.credit)
    named = grpo.with_loss_type(resolved.grpo)
    assert grpo.with_loss_type(named) == named and None not in dataclasses.astuple(named)
    for field in dataclasses.fields(Config):  # and what was given is not touched
        given_ = getattr(config, field.name)
        if given_ is not None and field.name != "dtype":
            assert getattr(resolved, field.name) == given_


keys = st.sampled_from([field.name for field in dataclasses.fields(Config)]) | TEXT.filter(
    lambda text: len(text.splitlines()) == 1
)
yamls = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@FEW
@given(st.dictionaries(keys, yamls, max_size=3) | yamls)
def test_any_yaml_is_read_or_refused(tmp_path, capsys, values):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    try:
        read = cli.from_yaml(Config, file)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    except SystemExit as exit_:  # tyro's own way: it has said which flag
        assert exit_.code == 2 and capsys.readouterr().err
    else:
        assert isinstance(read, Config)


@FEW
@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(tmp_path, values):
    file = tmp_path / "config.yaml"
    file.write_bytes(values)
    try:
        cli.from_yaml(Config, file)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
    except SystemExit as exit_:
        assert exit_.code == 2
