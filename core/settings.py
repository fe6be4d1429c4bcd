"""Settings from the words of a command line, and from the file of --config or --resume.

A config.yaml is flags that are written down. `parse` makes words of it, puts those of the command
line behind them, and tyro reads all of them: of a flag that is there twice, the last one counts.
tyro prints --help, and reports mistakes in a box with exit code 2.
"""

import dataclasses
import math
import re
import reprlib
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typeguard
import tyro
import yaml

from algorithms.options import LoopOptions
from core import config
from core.algorithm import absolute_algorithm, is_file, name_of, options_of
from core.config import COMMAND_LINE_ONLY, Config, flag, similar
from core.faults import UsageError
from core.other_names import advice_for
from environments.plumbing.registry import ENVIRONMENTS, EnvSpec

GROUPS = tuple(reversed(Config.__bases__))  # in the order of --help
MAX_NAMES = 10  # of runs that a message lists
HELP = "python train.py --help has all"
BOOLS = yaml.SafeLoader.bool_values  # "yes": True, ..
# Settings that config.yaml of an older run may name; they are left out
REMOVED = """adapter_folder eval_samples fp32_head lora_alpha microscope min_p offload_optimizer
    overlong_buffer patience shard_optimizer stop_on template_date""".split()


class Parsed(Config):
    """A Config that has the settings of the file of `config` or `resume` already."""


def parse(args: list[str]) -> Config:
    """The settings that `args` ask for. Raises UsageError for what tyro does not check."""
    args = _as_tyro_has_it(args)
    flags = _check_words(args, Config())
    resume, file = flags.resume, config_file(flags)
    if file:
        saved = read_file(file, bool(resume))
        flags = _check_words(args, saved.cfg)
        args = [*saved.words_with(flags.algo), *args]
        resume = str(file.parent) if resume else ""
    cfg, _ = _parse_flags(args, _with_options(flags.algo))
    return Parsed(**vars(cfg) | {"resume": resume})


def complete(cfg: Config) -> Config:
    """The settings that Python gives, over those of the file of `config` or `resume`, which they
    override where they differ from the defaults.

    What `parse` returns stays as it is. Raises UsageError, for a value of another type, too.
    """
    if isinstance(cfg, Parsed):
        return cfg
    cfg = _check_types(cfg)
    given = {k: v for k, v in vars(cfg).items() if v != getattr(Config, k)}
    if file := config_file(cfg):
        saved = read_file(file, bool(cfg.resume))
        algo = given.get("algo", saved.cfg.algo)
        base, _ = _parse_flags(saved.words_with(algo), _with_options(algo))
        if cfg.resume:
            given["resume"] = str(file.parent)
        cfg = replace(base, **given | {"options": _merged(base.options, cfg.options)})
    kind = options_of(absolute_algorithm(cfg.algo))
    if not isinstance(cfg.options, kind | None):
        raise UsageError(f"Config.options: give the Options of --algo {name_of(cfg.algo)}, "
                         f"{kind.__module__}.{kind.__name__}")  # fmt: skip
    return Parsed(**vars(cfg))


def read_config(file: Path) -> Config:
    """The settings of a config.yaml. Imports the algorithm. Raises UsageError."""
    return read_file(file).cfg


def config_to_dict(cfg: Config) -> dict[str, Any]:
    """The settings as config.yaml stores them: the algorithm's options under its name."""
    left_out = {"options", "run_name", *COMMAND_LINE_ONLY}
    values = {k: v for k, v in vars(cfg).items() if k not in left_out}
    if cfg.options is not None:
        options = vars(cfg.options.with_preset())
        values[name_of(cfg.algo)] = {k: _plain(v) for k, v in options.items()}
    return {k: [*map(str, v)] if isinstance(v, tuple) else v for k, v in values.items()}


def as_words(settings: dict[str, Any], cls: type, prefix: str = "") -> Iterator[str]:
    """The texts of a config.yaml, settings of the dataclass `cls`, as words of a command line.

    >>> [*as_words({"lr": "1e-5", "env": ["a", "b"], "keep_best": "no"}, Config)]
    ['--lr=1e-5', '--env=a', 'b', '--no-keep-best']
    """
    kinds = get_type_hints(cls)
    for name, value in settings.items():
        kind, text = kinds.get(name), str(value).lower()
        if kind is bool and text in BOOLS:
            yield flag(f"{prefix}{'' if BOOLS[text] else 'no-'}{name}")
        elif isinstance(value, dict):  # an option of this type has a flag for each key
            yield from as_words(value, object, f"{prefix}{name}.")
        elif isinstance(value, list) and value:  # with "=", as the first may begin with a hyphen
            yield from (f"{flag(prefix + name)}={value[0]}", *map(str, value[1:]))
        elif isinstance(value, list):
            yield flag(prefix + name)
        elif type(None) in get_args(kind) and text in ("", "~", "null"):
            yield f"{flag(prefix + name)}=None"
        else:
            yield f"{flag(prefix + name)}={value}"


@dataclass(frozen=True)
class Saved:
    """What a config.yaml says."""

    cfg: Config
    # without what follows from other settings, so that it follows from what a flag changes
    words: list[str]
    option_words: list[str]  # of the algorithm's options

    def words_with(self, algo: str) -> list[str]:
        """The words for a run with this algorithm."""
        same = name_of(algo) == name_of(self.cfg.algo)
        return [*self.words, *(self.option_words if same else [])]


def read_file(file: Path, resume: bool = False) -> Saved:
    """Reads a config.yaml. Imports the algorithm that it names. Raises UsageError, with `resume`
    for adapters of an older run with another alpha, too."""
    texts = _load(file, yaml.BaseLoader)  # the parser of the command line makes values of them
    algo = str(texts.get("algo", Config.algo))
    name, options = name_of(algo), texts.pop(name_of(algo), None) or {}
    removed = {name: texts.pop(name) for name in REMOVED if name in texts}
    if removed:
        _say_removed(file, ", ".join(removed))
    copy = file.with_name(Path(algo).name).absolute()  # that a run keeps
    if is_file(algo) and not Path(absolute_algorithm(algo)).exists() and copy.exists():
        texts["algo"] = algo = str(copy)
    try:
        default = _with_options(algo)
        _check_names(texts, Config)
        _check_names(options, type(default.options), f"{name}.")
        words = [*as_words(texts, Config), *as_words(options, type(default.options), f"{name}.")]
        cfg = _values(words, default)
        alpha = float(str(removed.get("lora_alpha", 0)))
        if resume and alpha not in (0, 2 * cfg.lora_rank):
            raise UsageError(f"lora_alpha is {alpha:g}, and picoRL takes twice the rank now: start "
                             "another run")  # fmt: skip
    except (UsageError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from None
    preset = cfg.options.presets.get(cfg.options.loss_type, {})
    options = {k: v for k, v in options.items() if getattr(cfg.options, k) != preset.get(k, ...)}
    follows = config.defaults_for(cfg)
    if follows.keys() <= texts.keys():  # a file that names only some of these has chosen them
        texts = {k: v for k, v in texts.items() if getattr(cfg, k) != follows.get(k, ...)}
    own = [*as_words(options, type(cfg.options), f"{name}.")]
    return Saved(cfg, [*as_words(texts, Config)], own)


def read_settings(file: Path) -> dict[str, Any]:
    """The settings in a run's config.yaml, as `config_to_dict` made them. Raises UsageError."""
    return _load(file, yaml.SafeLoader)


def changed_settings(cfg: Config, run: Path) -> dict[str, tuple[Any, Any]]:
    """The settings of a resolved `cfg` that differ from those in the run's folder: by name
    (grpo.clip_low), what they were and what they are."""
    saved = config.resolve(read_config(run / "config.yaml"))
    old, new = (by_flag(config_to_dict(settings)) for settings in (saved, cfg))
    return {k: (old[k], new[k]) for k in old if k in new and old[k] != new[k]}


def by_flag(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the options of the algorithm beside them, and without the folders of files,
    which may have moved."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": option for key, option in value.items()}
        elif name in ("env", "eval_env"):
            found[name] = [EnvSpec.read(env).short for env in value]
        else:
            found[name] = name_of(value) if name == "algo" else value
    return found


def find_run(given: str) -> Path | None:
    """The folder of the run that `given` names, with or without runs/; None if there is none."""
    folders = (Path(given).expanduser(), config.RUNS / given)
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def known_runs() -> str:
    """Which runs there are, the newest first, for the message about one that there is not."""
    files = [file for file in config.RUNS.glob("*/config.yaml") if file.parent.name[0] != "."]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    names = [file.parent.name for file in files[:MAX_NAMES]]
    if not names:
        return f"there are no runs in {config.RUNS.absolute()}"
    return f"{config.RUNS}/ has {', '.join(names)}{', ..' if len(files) > MAX_NAMES else ''}"


def config_file(cfg: Config) -> Path | None:
    """The config.yaml that --config or --resume names, of a run with or without runs/, or any file
    of --config; None without the two.

    Raises UsageError if there is none, and for names that do not go together or mean another one:
    of environments that a shell has cut, and of a model that comes with picoRL.
    """
    for name, specs in (("env", cfg.env), ("eval_env", cfg.eval_env)):
        if any(re.match(r"\w+ *=", spec) for spec in map(str, specs[1:])):
            text = re.sub(r",? +(?=\w+ *=)", ",", " ".join(specs))  # PowerShell drops commas
            meant = (s if "=" in s.partition(",")[0] else s.replace(",", ":", 1)
                     for s in text.split(" "))  # fmt: skip
            words = " ".join(f'"{s}"' if "=" in s else s for s in meant)
            raise UsageError(f"{flag(name)} {' '.join(specs)}: write {words}")
    model, own = cfg.model_id, (*config.TINY, config.SMOLLM2)
    near = "" if model in own or Path(model).exists() else similar(model, own)
    if near and "/" not in model:
        raise UsageError(f"--model-id {model}: there is no such folder; write --model-id {near}, "
                         "or the name of a model of the Hub with its owner")  # fmt: skip
    if cfg.config and cfg.resume:
        raise UsageError("give --config or --resume, not both: a run folder has its own config")
    if cfg.resume and cfg.run_name not in ("", Path(cfg.resume).name):
        raise UsageError(f"--run-name {cfg.run_name}: a resumed run keeps its folder; remove it")
    if not (given := cfg.config or cfg.resume):
        return None
    if cfg.config and (file := Path(given).expanduser()).is_file():
        return file
    if run := find_run(given):
        return run / "config.yaml"
    what = f"--config {given}: no file and no" if cfg.config else f"--resume {given}: no"
    raise UsageError(f"{what} run has this name; {known_runs()}")


def _with_options(algo: str) -> Config:
    """The defaults for a run with this algorithm, which is imported."""
    return Config(algo=algo, options=options_of(absolute_algorithm(algo))())


def _merged(saved: LoopOptions, given: LoopOptions | None) -> LoopOptions:
    """The saved options, with those that are given and differ from the defaults."""
    if given is None or type(given) is not type(saved):
        return given or saved
    usual = vars(type(given)())
    return replace(saved, **{k: v for k, v in vars(given).items() if v != usual[k]})  # type: ignore


def _check_types(cfg: Config) -> Config:
    """`cfg` with tuples where lists or single texts were given. Raises UsageError for a value that
    has another type than its setting."""
    tuples: dict[str, Any] = {
        name: (value,) if isinstance(value, str) else tuple(value)
        for name, value in vars(cfg).items()
        if isinstance(getattr(Config, name), tuple) and isinstance(value, list | str)
    }
    cfg = replace(cfg, **tuples)
    values: list[tuple[str, str, type, Any]]
    values = [("Config", name, Config, value) for name, value in vars(cfg).items()]
    options = {} if cfg.options is None else vars(cfg.options)
    values += [("Options", name, type(cfg.options), value) for name, value in options.items()]
    for prefix, name, cls, value in values:
        if name in ("env", "eval_env"):  # of a resolved one they are no texts
            value = tuple(map(str, value))
        try:
            if name != "options":
                typeguard.check_type(value, get_type_hints(cls)[name])
        except typeguard.TypeCheckError as error:
            raise UsageError(f"{prefix}.{name}={value!r:.80}: {error}") from None
    return cfg


def _load(file: Path, loader: Any) -> dict[str, Any]:
    """What a YAML file says. Raises UsageError unless it is settings with their values."""
    try:
        settings = yaml.load(file.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file}: not YAML in UTF-8 (indented with spaces): {reason}") from None
    if not isinstance(settings, dict):
        raise UsageError(f"{file}: must contain lines such as `algo: grpo`, with a colon")
    return settings


@cache  # as a command reads its file twice
def _say_removed(file: Path, names: str) -> None:
    print(f"{file}: picoRL no longer has {names}: left out", file=sys.stderr)


def _check_names(settings: Any, cls: type, prefix: str = "") -> None:
    """Raises UsageError for a name that is no setting of `cls`, or none for a file."""
    kinds = get_type_hints(cls).keys() - {"options"}
    if not isinstance(settings, dict):
        raise UsageError(f"{prefix[:-1]}: write its options as `name: value`, one a line, indented")
    for name in settings:
        near, text = similar(str(name), kinds), reprlib.repr(name)[1:-1]
        advice = advice_for(str(name)).replace("write --", "write ") or (
            f"did you mean {near}?" if near else "remove it"
        )
        if name in COMMAND_LINE_ONLY:
            advice = f"give {flag(name)} on the command line"
        if name in COMMAND_LINE_ONLY or name not in kinds:
            raise UsageError(f"{prefix}{text} is not a setting for a file; {advice}")


def _values(words: list[str], default: Config) -> Config:
    """The settings that the words of a file give. Raises UsageError for a value that is invalid."""
    starts = [i for i, word in enumerate(words) if word[:2] == "--"]
    with redirect_stderr(StringIO()):  # tyro's box does not name the file
        with suppress(SystemExit):
            return _parse_flags(words, default)[0]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            try:
                _parse_flags(words[start:end], default)
            except SystemExit:
                name, _, value = " ".join(words[start:end]).partition("=")
                name = name[2:].replace("-", "_")
                raise UsageError(f"{name}: invalid value {reprlib.repr(value)}") from None
    raise AssertionError(words)  # tyro reads each setting, but not all


def _plain(value: Any) -> Any:
    """The value of an option as a file has it."""
    if isinstance(value, Enum):  # which may be a text or a number, too
        return value.name
    if isinstance(value, float) and math.isfinite(value):
        return float(value)  # NumPy's, too
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [*map(str, value)] if isinstance(value, list | tuple | set) else str(value)


def _as_tyro_has_it(args: list[str]) -> list[str]:
    """The arguments without two forms that tyro does not read as they are meant: --overlap=true, as
    sweeps write it, and --env A --env B, of which only B would count.

    >>> _as_tyro_has_it("--env a --overlap=False --env b --lr 1".split())
    ['--no-overlap', '--env', 'a', 'b', '--lr', '1']
    """
    found: list[list[str]] = [[]]  # a flag and its values
    for word in args:
        flag, _, value = word.partition("=")
        name = flag[2:].replace("-", "_") if flag[:2] == "--" else ""
        usual = getattr(Config, name, None)
        if type(usual) is bool and value.lower() in ("true", "false"):
            found.append([flag if value.lower() == "true" else f"--no-{flag[2:]}"])
        elif type(usual) is tuple and (first := [group for group in found if group[:1] == [flag]]):
            found.remove(first[0])
            found.append(first[0] + ([value] if value else []))
        elif type(usual) is tuple and value:
            found.append([flag, value])
        elif word[:2] == "--":
            found.append([word])
        else:
            found[-1].append(word)
    return [word for group in found for word in group]


def _check_words(args: list[str], default: Config) -> Config:
    """The settings of the flags, and the `default` of others, without those of the algorithm.

    Raises UsageError for a word that is no flag and no value of one.
    """
    words = [word for word in args if word not in ("-h", "--help")]
    flags, others = _parse_flags(words, replace(default, options=Config.options))
    word = next(iter(others), "--.")
    if word[:1] != "-":
        hint = f"write --env {word}" if word.split(":")[0] in ENVIRONMENTS else HELP
        raise UsageError(f"{word} follows no flag; {hint}")
    word = word.partition("=")[0]
    if "." not in word:
        name = word.lstrip("-")
        near = similar(name, vars(flags).keys() - {"options"})
        advice = advice_for(name) or (f"did you mean {flag(near)}?" if near else HELP)
        raise UsageError(f"{word} is no flag; {advice}")
    return flags


def _parse_flags(args: list[str], default: Config) -> tuple[Config, list[str]]:
    """tyro shows a box per nested dataclass, so nest the groups for it, and flatten its result.

    Without `default.options` the options of the algorithm are not parsed, and what is no other
    flag, or no value of one, is returned.
    """
    whole = default.options is not None
    fields: list[tuple[str, Any]] = []
    nested: dict[str, Any] = {}
    for group in GROUPS:  # WarmStartOptions: a box with the title "warm start options"
        title = re.sub("(?<=[a-z])(?=[A-Z])", " ", group.__name__.removesuffix("Options")).lower()
        kind: Any = Annotated[tyro.conf.OmitArgPrefixes[group], tyro.conf.arg(name=title)]  # type: ignore
        fields.append((group.__name__, kind))
        values = {f.name: getattr(default, f.name) for f in dataclasses.fields(group)}
        nested[group.__name__] = group(**values)
    if whole:  # their flags begin with the algorithm's name
        kind = Annotated[type(default.options), tyro.conf.arg(name=name_of(default.algo))]
        fields.append(("options", kind))
        nested["options"] = default.options
    command: Any = dataclasses.make_dataclass("Command", fields)
    command.__module__ = "builtins"  # tyro does not search the source of such a class for comments
    found: Any = tyro.cli(  # type: ignore[call-overload]
        command, prog="train.py", description=Config.__doc__, args=args, default=command(**nested),
        add_help=whole, return_unknown_args=not whole,
    )  # fmt: skip
    parsed, others = (found, []) if whole else found
    flat = {k: v for group in GROUPS for k, v in vars(getattr(parsed, group.__name__)).items()}
    return Config(**flat, options=parsed.options if whole else Config.options), others
