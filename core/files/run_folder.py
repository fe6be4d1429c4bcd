"""A run's folder: its config.yaml, and its lock.

A new folder is complete, with its config.yaml, as soon as it exists: it is written under another
name and then renamed. If invalid input ends a run before its first record, a new folder is removed
again, and a resumed run has its config.yaml of before.
"""

import dataclasses
import errno
import itertools
import json
import math
import os
import reprlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import filelock
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo

from algorithms.options import LoopOptions
from core.algorithm import absolute_algorithm, algorithm_names, is_file, name_of, options_of
from core.config import (
    COMMAND_LINE_ONLY,
    MAX_NAME_BYTES,
    Config,
    defaults_for,
    flag,
    similar,
)
from core.faults import CannotWrite, UsageError
from core.files.atomic import PART, published, remove
from core.other_names import advice_for
from environments.plumbing.registry import EnvSpec

DISK_ERRORS = {
    getattr(errno, e) for e in "ENOSPC EDQUOT EROFS EACCES EPERM EFBIG EIO EISDIR EXDEV".split()
}
BOOLS = yaml.SafeLoader.bool_values  # "yes": True, ..
# Settings that config.yaml of an older run may name; they are left out
REMOVED = """adapter_folder fp32_head lora_alpha microscope min_p offload_optimizer
    overlong_buffer patience shard_optimizer stop_on""".split()


def config_to_dict(cfg: Config) -> dict[str, Any]:
    """The settings as config.yaml stores them: the algorithm's options under its name."""
    left_out = {"options", "run_name", *COMMAND_LINE_ONLY}
    values = {k: v for k, v in vars(cfg).items() if k not in left_out}
    if cfg.options is not None:
        options = cfg.options.with_preset()
        values[name_of(cfg.algo)] = {k: _as_words(v) for k, v in vars(options).items()}
    return {k: [*map(str, v)] if isinstance(v, tuple) else v for k, v in values.items()}


def read_config(file: Path) -> Config:
    """The settings of a config.yaml. Imports the algorithm. Raises UsageError, as `as_config`."""
    return as_config(read_settings(file), file, {})


def as_config(settings: dict[str, Any], file: Path | None, given: dict[str, Any]) -> Config:
    """The `settings` of `file`, with the algorithm of those that the command line has `given`. An
    option is None where it is as its loss type sets it.

    Imports the algorithm. Raises UsageError if it cannot be used, and for options that it does not
    have.
    """
    own_algo = settings.get("algo", Config.algo)
    algo = absolute_algorithm(given.get("algo", own_algo))
    if file and "algo" not in given and is_file(algo) and not Path(algo).exists():
        copy = file.with_name(Path(algo).name).absolute()  # that a run keeps
        algo = str(copy) if copy.exists() else algo
    cls, name = options_of(algo), name_of(own_algo)
    texts = settings.get(name, {}) if name_of(algo) == name else {}
    options = cls(**_typed(cls, texts, f"{file}: {name}.")).without_preset()
    values = {key: value for key, value in settings.items() if key != name}
    return Config(**values | {"algo": algo, "options": options})


def read_settings(file: Path) -> dict[str, Any]:
    """The settings in a config.yaml, with the types of `Config`. Raises UsageError.

    Imports no algorithm: the options, under its name, stay texts.
    """
    try:
        # BaseLoader only builds texts, lists and dicts; `1e-5` and `off` are read as in a flag
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{file}: not YAML in UTF-8 (indented with spaces): {reason}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file}: must contain lines such as `algo: grpo`, with a colon")
    name = name_of(str(values.get("algo", Config.algo)))
    options = values.pop(name, {}) or {}
    typed = _typed(Config, values, f"{file}: ")
    algo = typed.get("algo", Config.algo)
    if not isinstance(options, dict) or not (is_file(algo) or algo in algorithm_names()):
        raise UsageError(f"{file}: algo, or its options: invalid value {reprlib.repr(algo)}")
    return typed | {name: options}


@cache
def say_removed(file: Path) -> None:
    """Prints, once in a process, which settings of an older run's config.yaml are left out."""
    names = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506
    if gone := [name for name in names if name in REMOVED and not hasattr(Config, name)]:
        print(f"{file}: picoRL no longer has {', '.join(gone)}: left out", file=sys.stderr)


def without_defaults(settings: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """The settings of `file` without those that follow from others (`defaults_for`), so that they
    follow from what a flag changes. A file that names only some of them has chosen these.

    Imports the algorithm, if it comes with picoRL.
    """
    algo = settings.get("algo", Config.algo)
    left_out = {"algo", name_of(algo)} if is_file(algo) else set()  # which could run code
    known = {key: value for key, value in settings.items() if key not in left_out}
    defaults = defaults_for(as_config(known, file, {}))
    if not defaults.keys() <= settings.keys():
        return settings
    if left_out:
        del defaults["credit"]
    return {k: v for k, v in settings.items() if k not in defaults or v != defaults[k]}


def given_settings(cfg: Config) -> dict[str, Any]:
    """The settings of `cfg` that differ from the defaults, as a flag has them: a tuple where a list
    was given, a number where its text was. Raises UsageError for what no flag could be."""
    values = {
        name: _as_texts(value)
        for name, value in vars(cfg).items()
        if name not in ("options", *COMMAND_LINE_ONLY) and value != getattr(Config, name)
    }
    return _typed(Config, values, "Config.")


def with_options(cfg: Config, given: LoopOptions | None) -> LoopOptions:
    """The options of `cfg`, with those that are `given` and differ from the defaults.

    Raises UsageError if they are those of another algorithm, or have a value that no flag could be.
    """
    if given is None:
        return cfg.options
    kind = type(cfg.options)
    if not isinstance(given, kind):
        raise UsageError(f"Config.options: give the Options of --algo {name_of(cfg.algo)}, "
                         f"{kind.__module__}.{kind.__name__}")  # fmt: skip
    usual = vars(kind())
    values = {k: _as_texts(v) for k, v in vars(given).items() if v != usual[k]}
    return kind(**vars(cfg.options) | _typed(kind, values, "Options."))


def changed_settings(cfg: Config, run: Path) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those of the newest checkpoint, or else of config.yaml: by
    name (grpo.clip_low), what they were and what they are."""
    file = run / "config.yaml"
    settings = read_settings(file)
    before = config_to_dict(as_config(settings, file, {"algo": cfg.algo}))
    before["algo"] = settings.get("algo", Config.algo)
    for file in sorted(run.glob("checkpoint/[0-9]*/state.json")):
        with suppress(OSError, ValueError, LookupError, TypeError):  # damaged
            before = json.loads(file.read_bytes())["settings"]
    if (alpha := before.get("lora_alpha", 0)) not in (0, 2 * before["lora_rank"]):
        raise UsageError(f"--resume {run}: its weights have lora_alpha {alpha:g}, and picoRL only "
                         "twice the rank now: resume it with the picoRL that made it")  # fmt: skip
    now = yaml.safe_load(yaml.safe_dump(config_to_dict(cfg)))  # lists, as in a file
    old, new = by_flag(before), by_flag(now)
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


def again(envs: Iterable[str | EnvSpec], *flags: str) -> str:
    """What starts train.py with `flags`, which name a run on `envs`: a command, or else a call for
    the Python that has them."""
    if any(EnvSpec.read(env).only_in_python for env in envs):
        return f"train.execute({[*flags]})"
    return quoted(["python", "train.py", *flags])


def train_command(*flags: str) -> str:
    """The command that starts train.py with `flags`, from wherever this process was started."""
    script = sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "train.py"
    several = os.environ.get("WORLD_SIZE", "1") != "1" and "TORCHELASTIC_RUN_ID" in os.environ
    return quoted([*(["torchrun", ".."] if several else ["python"]), script, *flags])


def quoted(words: list[str]) -> str:
    """A command for the shell of this system."""
    if os.name != "nt":
        return shlex.join(words)
    texts = [subprocess.list2cmdline([word]) for word in words]
    # PowerShell reads a,b as two words
    return " ".join(f'"{text}"' if "," in text and text[0] != '"' else text for text in texts)


def new_folder(runs: Path, name: str, stem: str) -> Path:
    """The path of a new run: runs/<name>, or the first free runs/<stem>-<number>."""
    if not name:
        return next(p for i in itertools.count(1) if not (p := runs / f"{stem}-{i}").exists())
    plain = Path(name).name == name.strip() and not name.startswith(".") and name.isprintable()
    if not plain or len(name.encode()) > MAX_NAME_BYTES:
        raise UsageError(f"--run-name {name!a} is not a plain folder name of at most "
                         f"{MAX_NAME_BYTES} bytes")  # fmt: skip
    if (runs / name).exists():
        raise UsageError(f"--run-name {name}: {runs / name} exists; use another, or --resume it")
    return runs / name


def create_run(run: Path, settings: dict[str, Any], take_next: bool = False) -> Path:
    """Creates the folder of a new run with its config.yaml, and returns it.

    If it exists, raises UsageError; with `take_next`, counts the number at the end of its name up.
    Raises UsageError for an option that could not be read again.
    """
    part = run.with_name(f"{PART}{run.name}-{os.getpid()}")
    try:
        remove(part)
        part.mkdir(parents=True)
    except (FileExistsError, NotADirectoryError):  # such as a link to a disk that is not there
        raise UsageError(f"{run.parent} is no folder; remove it") from None
    try:
        write_config(part, settings)
        as_config(read_settings(part / "config.yaml"), run / "config.yaml", {})
        while True:
            try:
                os.rename(part, run)  # fails if `run` is a folder that is not empty
                return run
            except OSError:
                if not run.exists():
                    raise
            stem = run.name.rpartition("-")[0]
            run = new_folder(run.parent, "" if take_next else run.name, stem)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def lock_run(run: Path, settings: dict[str, Any], new: bool) -> Iterator[None]:
    """Holds the lock of the folder `run`, which has `settings`.

    Raises UsageError if another process holds the lock; CannotWrite if the disk is full or
    read-only. If a UsageError ends the run before its next record, removes the folder of a `new`
    one, and restores the config.yaml of another.
    """
    metrics, unused = run / "metrics.jsonl", False
    try:
        with _locked(run):
            for left in (*run.glob(f"{PART}*"), *run.glob(f"*/{PART}*")):  # by a killed process
                remove(left)
            before, size = (run / "config.yaml").read_bytes(), _size(metrics)
            try:
                yield
            except UsageError:
                no_record = _size(metrics) <= size  # less, where a resume has dropped records
                unused = new and no_record
                if no_record and not new:
                    with published(run / "config.yaml") as part:
                        part.write_bytes(before)
                raise
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        resume = train_command("--resume", str(run))
        raise CannotWrite(f"{error.filename or run}: {error.strerror}; earlier checkpoints are "
                          f"intact: fix this, then run {resume}") from None  # fmt: skip
    finally:
        if unused:  # after its lock is released: Windows removes no open file
            shutil.rmtree(run, ignore_errors=True)
            with suppress(OSError):  # runs/ contains other runs
                run.parent.rmdir()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def write_config(run: Path, settings: dict[str, Any]) -> None:
    """Replace config.yaml atomically."""
    with published(run / "config.yaml") as part:
        part.write_bytes(yaml.safe_dump(settings, sort_keys=False).encode())


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """The operating system releases the lock if this process dies; the file stays."""
    lock = filelock.FileLock(run / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UsageError(f"{run} is in use by another process: wait until it ends, or use another "
                         "--run-name") from None  # fmt: skip
    try:
        yield
    finally:
        lock.release()


def _typed(cls: Any, values: dict[Any, Any], prefix: str) -> dict[str, Any]:
    """The texts of a file as the fields of the dataclass `cls`; `prefix` begins the messages."""
    kinds, typed = get_type_hints(cls), {}
    for name, value in values.items():
        if cls is Config and name in REMOVED and name not in kinds:
            continue
        if name not in kinds or name in COMMAND_LINE_ONLY or name == "options":
            near = similar(name, kinds)
            advice = advice_for(str(name)).replace("write --", "write ") or (
                f"did you mean {near}?" if near else "remove it"
            )
            if name in COMMAND_LINE_ONLY:
                advice = f"give {flag(name)} on the command line"
            text = reprlib.repr(name)[1:-1]
            raise UsageError(f"{prefix}{text} is not a setting for a file; {advice}")
        try:
            typed[name] = _from_words(kinds[name], value)
        except ValueError:
            raise UsageError(f"{prefix}{name}: invalid value {reprlib.repr(value)}") from None
    return typed


def _as_words(value: Any) -> Any:
    """The value of an option as `_from_words` reads it from a file."""
    if isinstance(value, Enum):  # which may be a text or a number, too
        return value.name
    if isinstance(value, float) and math.isfinite(value):
        return float(value)  # NumPy's, too
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, dict):
        value = [*itertools.chain(*value.items())]
    return [*map(str, value)] if isinstance(value, list | tuple | set) else str(value)


def _as_texts(value: Any) -> Any:
    """The value of a setting as the text, or the list of texts, that `_from_words` reads."""
    words = _as_words(value)
    return words if isinstance(words, list) else str(words)


def _from_words(kind: Any, value: Any) -> Any:
    """A text, or a list of texts, as the command line reads it. Raises ValueError."""
    if kind is bool and isinstance(value, str):
        value = str(BOOLS.get(value.lower(), value))
    words = value if isinstance(value, list) else [value]
    if dataclasses.is_dataclass(kind) or not all(isinstance(word, str) for word in words):
        raise ValueError
    spec: Any = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    if isinstance(spec, Exception):  # of a type that no flag has
        raise ValueError
    if spec.nargs == 1:
        [word] = words
        words = ["None"] if type(None) in get_args(kind) and word in ("", "null") else words
    if spec.choices and not {*words} <= {*spec.choices}:
        raise ValueError
    return spec.instance_from_str(words)
