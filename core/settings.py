"""Settings from the words of a command line, from the file of --config or --resume, and of Python.

All of them are flags: a config.yaml is flags that are written down, and a `Config` of Python says
with its fields what flags would. `parse` puts those of the command line behind those of the file,
and tyro reads all of them: of a flag that is there twice, the last one counts. tyro prints --help,
and a box about words that are no settings; then it exits with code 2.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from core import config
from core.algorithm import absolute_algorithm, is_file, name_of, options_of
from core.config import COMMAND_LINE_ONLY, Config, flag
from core.faults import UsageError
from core.other_names import ADVICE
from environments.plumbing.registry import EnvSpec

GROUPS = tuple(reversed(Config.__bases__))  # in the order of --help
MAX_NAMES = 10  # of runs that a message lists
SEVERAL = [name for name, value in vars(Config()).items() if type(value) is tuple]
# Settings that config.yaml of an older run may name; they are left out
REMOVED = """adapter_folder env_instances eval_samples fp32_head gradient_checkpointing keep_best
    kl_in lora_alpha microscope min_p offload_optimizer overlong_buffer patience reward_coef
    shard_optimizer stop_on template_date thinking vllm_eager""".split()
# reads the settings that decide which other settings there are
FIRST = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
for word in ("--algo", "--config", "--resume"):
    FIRST.add_argument(word, default="")


def parse(args: list[str]) -> Config:
    """The settings that `args` ask for. Raises UsageError for what tyro does not check."""
    for name in SEVERAL:  # tyro takes the last one alone, which may follow those of a file
        if [word.partition("=")[0] for word in args].count(flag(name)) > 1:
            raise UsageError(f"give {flag(name)} once, with all its values behind it")
    for word in args:
        name = word.partition("=")[0]
        advice = ADVICE.get(name[2:].lower().replace("-", "_"))
        if advice and name.startswith("--"):
            write = "write " if advice.startswith("--") else ""
            raise UsageError(f"{name} is no flag; {write}{advice}")
    first, _ = FIRST.parse_known_args([word for word in args if word not in ("-h", "--help")])
    file = config_file(first.config, first.resume)
    if file is None:
        return _parse_flags(args, first.algo or Config.algo)
    alpha, rank = (read_settings(file).get(name, 0) for name in ("lora_alpha", "lora_rank"))
    if first.resume and alpha not in (0, 2 * rank):
        raise UsageError(f"{file}: lora_alpha is {alpha:g}, not twice the rank: start another run")
    chosen, saved = read_file(file)
    if first.algo and name_of(first.algo) != name_of(saved.algo):
        chosen.pop(name_of(saved.algo), None)
    cfg = _parse_flags([*as_words(chosen), *args], first.algo or saved.algo)
    if not first.resume:
        return cfg
    if cfg.run_name not in ("", file.parent.name):
        raise UsageError(f"--run-name {cfg.run_name}: a resumed run keeps its folder; remove it")
    return replace(cfg, resume=str(file.parent))


def complete(cfg: Config) -> Config:
    """The settings in which `cfg` differs from the defaults, over those of the file of its `config`
    or `resume`. Raises UsageError."""
    usual = vars(Config())
    changed = {name: value for name, value in vars(cfg).items() if value != usual[name]}
    for name in changed.keys() & {*SEVERAL}:
        value = changed[name]
        changed[name] = (value,) if isinstance(value, str) else tuple(value)
    first = [name for name in ("algo", "config", "resume") if name in changed]
    base = parse([f"{flag(name)}={changed[name]}" for name in first])
    if "options" in changed and (cfg.config or cfg.resume):
        usual = vars(type(cfg.options)())
        chosen = {name: value for name, value in vars(cfg.options).items() if value != usual[name]}
        changed["options"] = replace(base.options, **chosen)  # type: ignore[type-var]
    return replace(base, **changed | {"resume": base.resume})


def config_to_dict(cfg: Config) -> dict[str, Any]:
    """The settings as config.yaml stores them: the algorithm's options under its name."""
    left_out = {"options", "run_name", *COMMAND_LINE_ONLY}
    values = {k: _plain(v) for k, v in vars(cfg).items() if k not in left_out}
    if cfg.options is not None:
        options = vars(cfg.options.with_preset())
        values[name_of(cfg.algo)] = {k: _plain(v) for k, v in options.items()}
    return values


def as_words(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings of a config.yaml as words of a command line.

    >>> [*as_words({"lr": "1e-5", "env": ["a", "b"], "overlap": False, "ppo": {"clip_low": 0.1}})]
    ['--lr=1e-5', '--env=a', 'b', '--no-overlap', '--ppo.clip-low=0.1']
    """
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from as_words(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield flag(f"{prefix}{'' if value else 'no-'}{name}")
        elif isinstance(value, list) and value:  # with "=", as the first may begin with a hyphen
            yield from (f"{flag(f'{prefix}{name}')}={value[0]}", *map(str, value[1:]))
        elif isinstance(value, list):
            yield flag(f"{prefix}{name}")
        elif value is not None or prefix:  # None is the default of those that may be None
            yield f"{flag(f'{prefix}{name}')}={value}"


def read_file(file: Path) -> tuple[dict[str, Any], Config]:
    """The settings that a config.yaml chooses, and all of its settings. Imports the algorithm.

    A setting with the default that follows from others is not chosen, so that it follows from
    those that a flag changes. Raises UsageError.
    """
    settings = read_settings(file)
    if removed := [name for name in REMOVED if settings.pop(name, None) is not None]:
        _say_removed(file, ", ".join(removed))
    if never := settings.keys() & {"options", *COMMAND_LINE_ONLY}:
        raise UsageError(f"{file}: {never.pop()!r} is not a setting for a file; remove it")
    algo = str(settings.get("algo", Config.algo))
    copy = file.with_name(Path(algo).name).absolute()  # of a file of the user's, in the run folder
    if is_file(algo) and not Path(absolute_algorithm(algo)).exists() and copy.exists():
        settings["algo"] = algo = str(copy)
    try:
        cfg = _parse_flags([*as_words(settings)], algo)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except SystemExit:  # tyro has said why
        raise UsageError(f"{file}: these settings cannot be read as flags") from None
    follows = config.defaults_for(cfg)
    if follows.keys() <= settings.keys():  # a file that has only some of them chooses these
        settings = {k: v for k, v in settings.items() if getattr(cfg, k, v) != follows.get(k, ...)}
    preset = cfg.options.presets.get(cfg.options.loss_type, {})
    options = (settings.get(name_of(algo)) or {}).items()
    chosen = {k: v for k, v in options if getattr(cfg.options, k) != preset.get(k, ...)}
    return settings | {name_of(algo): chosen}, cfg


def read_settings(file: Path) -> dict[str, Any]:
    """The content of a config.yaml. Raises UsageError unless it is settings with their values."""
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file}: not YAML in UTF-8 (indented with spaces): {reason}") from None
    if not isinstance(settings, dict):
        raise UsageError(f"{file}: must contain lines such as `algo: grpo`, with a colon")
    return settings


def by_flag(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the options of the algorithm beside them (grpo.clip_low), and without the
    folders of files, which may have moved."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": option for key, option in value.items()}
        elif name in ("env", "eval_env"):
            flat[name] = [EnvSpec.read(env).without_folders for env in value]
        else:
            flat[name] = name_of(value) if name == "algo" else value
    return flat


def find_run(name: str) -> Path | None:
    """The folder of a run, whose `name` may begin with runs/; None if there is no such run."""
    folders = (Path(name).expanduser(), config.RUNS / name)
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def known_runs() -> str:
    """Names of existing runs, for the message about a run that does not exist."""
    names = sorted(file.parent.name for file in config.RUNS.glob("[!.]*/config.yaml"))[:MAX_NAMES]
    return f"{config.RUNS}/ has {', '.join(names)}" if names else f"{config.RUNS}/ has no runs"


def config_file(config: str, resume: str) -> Path | None:
    """The config.yaml that --config or --resume names, of a run with or without runs/, or any file
    of --config; None without the two. Raises UsageError if there is none."""
    if config and resume:
        raise UsageError("give --config or --resume, not both: a run folder has its own config")
    if not config and not resume:
        return None
    file = Path(config).expanduser()
    if config and file.is_file():
        return file
    if run := find_run(config or resume):
        return run / "config.yaml"
    start = f"--config {config}: no file and no" if config else f"--resume {resume}: no"
    raise UsageError(f"{start} run has this name; {known_runs()}")


@cache  # as a command reads its file twice
def _say_removed(file: Path, names: str) -> None:
    print(f"{file}: picoRL no longer has {names}: left out", file=sys.stderr)


def _plain(value: Any) -> Any:
    """A setting, or the value of an option, as a file has it."""
    if isinstance(value, list | tuple | set):
        return [*map(str, value)]
    return value if value is None or isinstance(value, int | float | str | dict) else str(value)


def _parse_flags(args: list[str], algo: str) -> Config:
    """tyro shows a box per nested dataclass, so nest the groups for it, and flatten its result.

    Imports the algorithm, whose options have flags that begin with its name.
    """
    options = options_of(absolute_algorithm(algo))()
    fields: list[tuple[str, Any]] = []
    for group in GROUPS:  # MainOptions: a box with the title "main options"
        title = group.__name__.removesuffix("Options").lower()
        kind: Any = Annotated[tyro.conf.OmitArgPrefixes[group], tyro.conf.arg(name=title)]  # type: ignore
        fields.append((group.__name__, kind))
    kind = Annotated[type(options), tyro.conf.arg(name=name_of(algo))]
    command: Any = dataclasses.make_dataclass("Command", [*fields, ("options", kind)])
    command.__module__ = "builtins"  # tyro does not search the source of such a class for comments
    default = command(*(group() for group in GROUPS), options)
    nested = tyro.cli(
        command, prog="train.py", description=Config.__doc__, args=args, default=default
    )
    flat: dict[str, Any] = {}
    for group in GROUPS:
        flat |= vars(getattr(nested, group.__name__))
    return Config(**flat, options=nested.options)
