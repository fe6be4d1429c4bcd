"""A run's folder: its config.yaml, and its lock.

A new folder is complete, with its config.yaml, as soon as it exists: it is written under another
name and then renamed. It is removed again if invalid input ends the run before its first record.
"""

import dataclasses
import errno
import itertools
import json
import os
import reprlib
import shlex
import shutil
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

import filelock
import yaml
from tyro.constructors import ConstructorRegistry, PrimitiveTypeInfo

from algorithms.options import LoopOptions
from core.algorithm import algorithm_names, is_file, load_algorithm, name_of
from core.config import COMMAND_LINE_ONLY, Config, flag, similar, trust_flags
from core.run.files import PART, published, remove
from core.types import CannotWrite, Fault, UsageError
from environments.plumbing.registry import EnvSpec, absolute

DISK_ERRORS = {
    getattr(errno, e) for e in "ENOSPC EDQUOT EROFS EACCES EPERM EFBIG EIO EISDIR EXDEV".split()
}
NO_LOCKS = {getattr(errno, e) for e in "ENOSYS ENOLCK ENOTSUP EOPNOTSUPP".split()}
KINDS: dict[str, Any] = get_type_hints(Config)
MAX_CONFIG_BYTES = 1 << 20
BOOLS = yaml.SafeLoader.bool_values  # "yes": True, ..


def config_to_dict(cfg: Config) -> dict[str, Any]:
    """The settings as config.yaml stores them: the algorithm's options under its name."""
    left_out = {"options", "run_name", *COMMAND_LINE_ONLY}
    values = {k: v for k, v in vars(cfg).items() if k not in left_out}
    if cfg.options is not None:
        values[name_of(cfg.algo)] = dict(vars(cfg.options))
    return {k: [*map(str, v)] if isinstance(v, tuple) else v for k, v in values.items()}


def read_config(file: Path) -> Config:
    """Read a config.yaml. Raises UsageError, which names the file.

    Who then runs what the settings name calls `config.check_trust` first.
    """
    return _as_config(read_settings(file), file)


def with_algorithm(cfg: Config, algo: str) -> Config:
    """`cfg` with the algorithm, which this imports, and with options of the type that it has.

    Of a Config that was read from a file the options may still be texts. Those of another algorithm
    are the defaults. Raises UsageError.
    """
    cls = load_algorithm(algo).Options
    if cfg.algo != algo or cfg.options is None:
        return dataclasses.replace(cfg, algo=algo, options=cls())
    if isinstance(cfg.options, LoopOptions):
        return cfg
    values = _typed(cls, cfg.options, f"{name_of(algo)}.", skip_unknown=False)
    return dataclasses.replace(cfg, options=cls(**values))


def read_run_config(run: Path) -> Config:
    """As `read_config`, of a run: lines that its config.yaml lacks are those of its checkpoint."""
    values, trained = read_settings(run / "config.yaml"), trained_settings(run)
    both = trained | values
    name = name_of(both.get("algo", Config.algo))
    own = {name: trained.get(name, {}) | values.get(name, {})}
    return _as_config(both | own, run / "config.yaml")


def trained_settings(run: Path) -> dict[str, Any]:
    """The settings of a run's newest checkpoint, with the types of `Config`; {} if it has none."""
    for file in sorted(run.glob("checkpoint/[0-9]*/state.json"), reverse=True):
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError, UsageError):
            saved = yaml.safe_dump(json.loads(file.read_bytes())["settings"])
            values = yaml.load(saved, Loader=yaml.BaseLoader)  # noqa: S506
            return _read_values(values, f"{file}: ", skip_unknown=True)
    return {}


def changed_settings(cfg: Config, run: Path) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those of the newest checkpoint, or else of config.yaml: by
    name (grpo.clip_low), what they were and what they are."""
    saved = read_settings(run / "config.yaml") | trained_settings(run)
    own = saved.pop(name_of(cfg.algo), {})
    before = {name: value for name, value in saved.items() if not isinstance(value, dict)}
    now = {name: value for name, value in vars(cfg).items() if name != "run_name"}
    if is_file(cfg.algo):  # its options are texts
        own = _typed(type(cfg.options), own, "", skip_unknown=True)
    prefix = name_of(cfg.algo)
    before |= {f"{prefix}.{key}": value for key, value in own.items()}
    now |= {f"{prefix}.{key}": value for key, value in vars(cfg.options).items()}
    for values in (before, now):  # their files may have moved
        values |= {k: tuple(EnvSpec(env).short for env in values[k])
                   for k in ("env", "eval_env") if k in values}  # fmt: skip
        values |= {"algo": name_of(values["algo"])} if "algo" in values else {}
    return {
        name: (value, now[name])
        for name, value in before.items()
        if name in now and now[name] != value
    }


def read_settings(file: Path, skip_unknown: bool = False) -> dict[str, Any]:
    """The settings in a config.yaml, with the types of `Config`. Raises UsageError.

    `skip_unknown`: leave out the names that only another version knows, and leave its values texts.
    """
    try:
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_CONFIG_BYTES:
            raise OSError(errno.EFBIG, f"not a file, or over {MAX_CONFIG_BYTES} bytes")
        # BaseLoader only builds texts, lists and dicts; `1e-5` and `off` are read as in a flag
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = reprlib.repr(str(error))
        if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
            spaces = "; indent with spaces" if r"'\t'" in error.problem else ""
            reason = f"line {error.problem_mark.line + 1}: {error.problem}{spaces}"
        raise UsageError(f"{file}: not YAML in UTF-8: {reason}") from None
    if not isinstance(values, dict):
        shown = reprlib.repr(values)
        raise UsageError(f"{file}: must contain lines such as `algo: grpo`, with a colon and a "
                         f"space, not {shown}")  # fmt: skip
    return _read_values(values, f"{file}: ", skip_unknown)


def _as_config(values: dict[str, Any], file: Path) -> Config:
    """A Config with these settings of `file`; the options of a FILE.py stay texts.

    A FILE.py that is not there any more is taken from beside `file`, where a run keeps a copy.
    """
    algo = values.get("algo", Config.algo)
    options = values.pop(name_of(algo), None)
    if (
        is_file(algo)
        and not Path(algo).exists()
        and (copy := file.with_name(Path(algo).name)).exists()
    ):
        algo = str(copy.absolute())
    if options is not None and not is_file(algo):
        options = load_algorithm(algo).Options(**options)
    return Config(**(values | {"algo": algo, "options": options}))


def _read_values(values: dict[str, Any], prefix: str, skip_unknown: bool) -> dict[str, Any]:
    """Texts of a file as settings; `prefix` begins the messages."""
    folder = str(values.pop("env_path", ""))  # of older versions: where the files of --env are
    name = name_of(str(values.get("algo", Config.algo)))
    others = {*algorithm_names(), name}  # a file of an earlier version has those of all algorithms
    own = {key: values.pop(key) for key in others & {*values}}.get(name)
    typed = _typed(Config, values, prefix, skip_unknown)
    algo = typed.get("algo", Config.algo)
    if not is_file(algo) and algo not in algorithm_names() and not skip_unknown:
        raise UsageError(f"{prefix}algo: invalid value {reprlib.repr(algo)}")
    if isinstance(own, dict):
        if algo in algorithm_names():
            cls = load_algorithm(algo).Options
            own = _typed(cls, own, f"{prefix}{name}.", skip_unknown)
        typed[name] = own
    for name in {"env", "eval_env"} & {*typed}:
        typed[name] = tuple(absolute(spec, folder) for spec in typed[name])
    return typed


def train_command(*flags: str) -> str:
    """The command that starts train.py with `flags`, from wherever this process was started.

    Under torchrun on one machine it starts as many processes again; on several, one names them.
    """
    script = sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "train.py"
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1":
        here, all_ranks = os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"]
        launcher = ["torchrun", *(["--nproc-per-node", here] if here == all_ranks else [".."])]
    return quoted([*launcher, script, *flags])


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
    if Path(name).name != name or name.startswith("."):
        raise UsageError(f"--run-name {name!r} is not a plain folder name")
    if (runs / name).exists():
        raise UsageError(f"--run-name {name}: {runs / name} exists; use another, or --resume it")
    return runs / name


def create_run(run: Path, settings: dict[str, Any], take_next: bool = False) -> Path:
    """Creates the folder of a new run with its config.yaml, and returns it.

    If it exists, raises UsageError; with `take_next`, counts the number at the end of its name up.
    """
    part = run.with_name(f"{PART}{run.name}-{os.getpid()}")
    try:
        for left in run.parent.glob(f"{PART}*"):  # by a killed process
            with suppress(FileNotFoundError):  # that process has just finished its folder
                if left == part or time.time() - left.stat().st_mtime > 3600:
                    remove(left)
        part.mkdir(parents=True)
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise
        raise UsageError(f"{run.parent} is not a folder, and cannot be made: {error.strerror}; "
                         "remove what has its name") from None  # fmt: skip
    try:
        write_config(part, settings)
        while True:
            try:
                os.rename(part, run)  # fails if `run` is a folder that is not empty
                return run
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                if not take_next:
                    raise UsageError(
                        f"{run} exists; use another --run-name, or --resume it"
                    ) from None
            run = new_folder(run.parent, "", run.name.rpartition("-")[0])
    except BaseException:
        with suppress(OSError):  # the first error says more
            remove(part)
        raise


@contextmanager
def lock_run_dir(run: Path, settings: dict[str, Any], new: bool) -> Iterator[None]:
    """Holds the lock of the folder `run`, which has `settings`.

    Raises UsageError if another process holds the lock; CannotWrite if the disk is full or
    read-only; Fault if somebody removes the folder. If a UsageError ends a `new` run before its
    first record, removes the folder.
    """
    unused = False
    try:
        with _locked(run):
            for left in (*run.glob(f"{PART}*"), *run.glob(f"*/{PART}*")):  # by a killed process
                remove(left)
            try:
                yield
            except UsageError:
                metrics = run / "metrics.jsonl"  # empty from when the run opens it
                unused = new and not (metrics.exists() and metrics.stat().st_size)
                raise
    except OSError as error:
        if error.errno == errno.ENOENT and not run.exists():
            raise Fault(f"{run} was removed while the run was using it") from None
        if error.errno not in DISK_ERRORS:
            raise
        resume = train_command("--resume", str(run), *trust_flags(settings, run / "config.yaml"))
        raise CannotWrite(f"{error.filename or run}: {error.strerror}; earlier checkpoints are "
                          f"intact: fix this, then run {resume}") from None  # fmt: skip
    finally:
        if unused:  # after its lock is released: Windows removes no open file
            shutil.rmtree(run, ignore_errors=True)
            with suppress(OSError):  # runs/ contains other runs
                run.parent.rmdir()


def write_config(run: Path, settings: dict[str, Any]) -> None:
    """Replace config.yaml atomically."""
    with published(run / "config.yaml") as part:
        part.write_bytes(yaml.safe_dump(settings, sort_keys=False).encode())


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """The operating system releases the lock if this process dies; the file stays.

    Where a disk has no locks, filelock would take a file that exists for a lock, and a killed run
    would block its folder: this prints a warning instead.
    """
    lock, has_locks = filelock.FileLock(run / ".lock", timeout=0), True
    try:
        with warnings.catch_warnings(action="ignore"):
            lock.acquire()
        if isinstance(lock, filelock.SoftFileLock):
            has_locks = False
            lock.release()
    except filelock.Timeout:
        raise UsageError(f"{run} is in use by another process: wait until it ends, or use another "
                         "--run-name") from None  # fmt: skip
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        has_locks = False
    if not has_locks:
        print(f"warning: the disk of {run} has no locks: start no second process in this folder",
              file=sys.stderr)  # fmt: skip
    try:
        yield
    finally:
        lock.release()


def _typed(cls: Any, values: dict[Any, Any], prefix: str, skip_unknown: bool) -> dict[str, Any]:
    """The texts of a file as the fields of the dataclass `cls`; `prefix` begins the messages."""
    kinds, typed = get_type_hints(cls), {}
    for name, value in values.items():
        if name not in kinds or name in COMMAND_LINE_ONLY or name == "options":
            if skip_unknown:
                continue
            known = name in COMMAND_LINE_ONLY
            meant = similar(name, kinds)
            advice = f"write {meant}" if meant else "remove it"
            advice = f"give {flag(name)} on the command line" if known else advice
            text = reprlib.repr(name)[1:-1]
            raise UsageError(f"{prefix}{text} is not a setting for a file; {advice}")
        try:
            typed[name] = _from_words(kinds[name], value)
        except ValueError:
            if skip_unknown:  # a choice of another version
                typed[name] = value
                continue
            raise UsageError(f"{prefix}{name}: invalid value {reprlib.repr(value)}") from None
    return typed


def _from_words(kind: Any, value: Any) -> Any:
    """A text, or a list of texts, as the command line reads it. Raises ValueError."""
    if kind is bool and isinstance(value, str):
        value = str(BOOLS.get(value.lower(), value))
    words = value if isinstance(value, list) else [value]
    if dataclasses.is_dataclass(kind) or not all(isinstance(word, str) for word in words):
        raise ValueError
    spec: Any = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    if spec.nargs == 1:
        [word] = words
        words = ["None"] if type(None) in get_args(kind) and word in ("", "null") else words
    if spec.choices and not {*words} <= {*spec.choices}:
        raise ValueError
    return spec.instance_from_str(words)
