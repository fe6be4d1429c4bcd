"""The command line of train.py.

Flags override the file of --config or --resume, which overrides the defaults of `core/config.py`.
tyro parses the flags, prints --help, and reports mistakes in a box with exit code 2.
"""

import argparse
import dataclasses
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from core.run import interrupt
from environments.plumbing.text import print_any_character

if interrupt.is_program():
    interrupt.set_hooks()  # before the slow imports
    print_any_character()

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from core import config
from core.algorithm import absolute_algorithm, name_of
from core.config import FREE_ON_RESUME, Config
from core.run.folder import (
    DISK_ERRORS,
    changed_settings,
    new_folder,
    read_config,
    read_run_config,
    with_algorithm,
)
from core.types import Fault, RankLost, Stopped, UsageError
from environments.plumbing.registry import ENVIRONMENTS
from environments.plumbing.text import one_line

GROUPS = tuple(reversed(Config.__bases__))  # in the order of --help
MAX_NAMES = 10  # of runs that a message lists


def parse(args: list[str]) -> Config:
    """The settings that `args` ask for. Raises UsageError for an invalid --config or --resume."""
    _check_words(args)
    named = _named_first(args)
    if named.config and named.resume:
        raise UsageError("give --config or --resume, not both: a run folder has its own config")
    saved, file, run = Config(), Path(), Path()
    if named.config:
        file = _config_file(named.config)
        saved = read_config(file)
    elif named.resume:
        run = _run_folder(named.resume)
        file = run / "config.yaml"
        saved = read_run_config(run)
    algo = absolute_algorithm(named.algo) or saved.algo
    if file != Path() and not named.algo and not named.trust:
        _check_trust_of_algorithm(algo, file)
    cfg = _parse_flags(args, with_algorithm(saved, algo))
    if file == Path():
        return cfg
    given = _parse_flags(args, with_algorithm(Config(), algo))
    if named.resume:
        cfg = replace(cfg, resume=str(run))
        _check_changes(cfg, saved, run)
    return _trusted(cfg, given, file)


def flags_of(cfg: Config) -> list[str]:
    """The command line of the settings that differ from the defaults; `parse` reads it."""
    default = Config()
    pairs = [(name, value, getattr(default, name)) for name, value in vars(cfg).items()]
    if cfg.options is not None:
        own, group = type(cfg.options)(), name_of(cfg.algo)
        pairs += [(f"{group}.{k}", v, getattr(own, k)) for k, v in vars(cfg.options).items()]
    words: list[str] = []
    for name, value, usual in pairs:
        if value == usual or name == "options":
            continue
        if isinstance(value, bool):
            words.append(config.flag(name if value else f"no_{name}"))
        elif isinstance(value, tuple):
            words += [config.flag(name), *value]
        else:
            words.append(f"{config.flag(name)}={value}")
    return words


def _named_first(args: list[str]) -> argparse.Namespace:
    """The flags that decide which other flags there are, and their defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("algo", "config", "resume", "run-name"):
        parser.add_argument(f"--{name}", nargs="?", default="", const="")
    parser.add_argument("--trust", action="store_true")
    return parser.parse_known_args(args)[0]


def _check_words(args: list[str]) -> None:
    """Raises UsageError for a word that is no flag and no value of one.

    The algorithm's own options, whose names have a dot, are left to tyro: to know them takes the
    import of torch.
    """
    defaults = {k: v for k, v in vars(Config()).items() if k not in ("options", "template_date")}
    switches = {f"no_{name}" for name, value in defaults.items() if isinstance(value, bool)}
    values: dict[str, list[str]] = {}
    name, takes = "", 0  # the last flag, and how many words it still takes; -1: any number
    for word in args:
        head, equals, value = word.partition("=")
        looks_like_flag = re.fullmatch(r"--?[A-Za-z][\w.-]*", head) is not None
        if takes == 1 or (takes and not looks_like_flag):
            values.setdefault(name, []).append(word)
            takes = min(takes, 0)
            continue
        if not looks_like_flag:
            hint = f": write --env {word}" if word.split(":")[0] in ENVIRONMENTS else ""
            raise UsageError(f"{word} follows no flag{hint or '; python train.py --help has all'}")
        name = head.lstrip("-").replace("-", "_")
        if "." in name or name.startswith("tyro_") or word in ("-h", "--help"):
            takes = -1
        elif not head.startswith("--") or name not in defaults.keys() | switches:
            meant = config.similar(name, defaults)
            advice = f"write {config.flag(meant)}" if meant else "python train.py --help has all"
            raise UsageError(f"{head} is no flag; {advice}")
        else:
            usual = defaults.get(name, True)
            takes = -1 if isinstance(usual, tuple) else 0 if isinstance(usual, bool) else 1
            if equals:
                values[name] = [value]
                takes = min(takes, 0)
    for name, words in values.items():
        for problem in config.problem_of_words(name, words) if name in ("env", "eval_env") else ():
            raise UsageError(problem)
    model, own = values.get("model_id", [""])[-1], (*config.TINY, config.SMOLLM2)
    meant = config.similar(model, own) if model not in own and not Path(model).exists() else ""
    if meant and "/" not in model:
        raise UsageError(f"--model-id {model}: there is no such folder; write --model-id {meant}, "
                         "or the name of a model of the Hub with its owner")  # fmt: skip


def _check_trust_of_algorithm(algo: str, file: Path) -> None:
    """Raises UsageError if `file` names an algorithm whose code needs --trust."""
    config.check_trust({"algo": algo}, file)
    in_its_folder = file.resolve().parent == Path.cwd() and Path("scratch.py").exists()
    if algo == "scratch" and in_its_folder:
        raise UsageError(f"{file} would run scratch.py beside it: if you trust it, add --trust")


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


def _run_folder(given: str) -> Path:
    """The run that --resume names, with or without runs/. Raises UsageError if there is none."""
    if run := find_run(given):
        return run
    if run := next((p for p in Path(given).parents if (p / "config.yaml").is_file()), None):
        raise UsageError(f"--resume {given}: this is inside a run, which continues from its newest "
                         f"checkpoint: write --resume {run}")  # fmt: skip
    what = "not the folder of a run (it has no config.yaml)"
    what = what if Path(given).exists() else "there is no such run"
    raise UsageError(f"--resume {given}: {what}; {known_runs()}")


def _config_file(given: str) -> Path:
    """The file that --config names; for a folder, or the name of a run, its config.yaml.

    Raises UsageError if there is none.
    """
    path, run = Path(given).expanduser(), find_run(given)
    if path.exists() and not path.is_dir():
        return path
    if run is None:
        what = "this folder has no config.yaml" if path.is_dir() else "there is no such file"
        raise UsageError(f"--config {given}: {what}; {known_runs()}")
    return run / "config.yaml"


def _check_changes(cfg: Config, saved: Config, run: Path) -> None:
    """Raises UsageError for a change that a resumed run may not make.

    It may change a model's folder, which may have moved: weights that do not fit are refused later.
    It may also name the device or the sampler where the run had auto.
    """
    for name, (before, now) in changed_settings(cfg, run).items():
        moved = name == "model_id" and before not in (*config.TINY, config.SMOLLM2)
        chosen = name in ("device", "sampler") and before == "auto" and now != "openai"
        if moved or chosen or cfg.allow_changes or name in FREE_ON_RESUME:
            continue
        group, _, key = name.rpartition(".")
        in_file = getattr(with_algorithm(saved, cfg.algo).options if group else saved, key)
        if in_file == now:
            raise UsageError(f"{run / 'config.yaml'} has {name} {now}, and the checkpoint is from "
                             f"{before}: change it back, or add --allow-changes")  # fmt: skip
        raise UsageError(f"--resume {run}: {name} is {before} in this run, not {now}: remove it, "
                         "or add --allow-changes")  # fmt: skip


def _trusted(cfg: Config, given: Config, file: Path) -> Config:
    """Raises UsageError if values of `file`, those that the flags `given` leave, need --trust."""
    if cfg.trust:
        return cfg
    own = {name for name in ("env", "eval_env", "base_url")
           if getattr(given, name) != getattr(Config, name)}  # fmt: skip
    own.add("algo")  # checked before it was imported
    from_file = {name: value for name, value in vars(cfg).items() if name not in own}
    config.check_trust(from_file, file)
    return cfg


def run(
    main: Callable[[Any], int],
    args: list[str],
    parse: Callable[[list[str]], Any] = parse,
    program: str = "train.py",
) -> int:
    """`main` with the parsed settings. Prints UsageError (code 2) and Fault (code 1) as a line.

    The error of a disk, outside the folder of a run too, is a Fault. Under torchrun the first rank
    of a machine prints that a run has stopped, and returns the code of it; the other ranks return
    0, as torchrun would end the first, which still writes the pages, if another had failed.
    """
    interrupt.end_start()
    return _run(main, args, parse, program)


def _run(
    main: Callable[[Any], int], args: list[str], parse: Callable[[list[str]], Any], program: str
) -> int:
    is_first = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["LOCAL_RANK"] == "0"
    try:
        _check_temporary_folder()
        code = main(parse(args))
        return code if is_first else 0
    except (UsageError, Fault, OSError) as error:
        if isinstance(error, OSError):
            if error.errno not in DISK_ERRORS:
                raise
            place = error.filename or "a file"
            error = Fault(f"{place}: {error.strerror}; fix this, then run the same command")
        # torchrun ends all ranks once one has ended. The first rank prints an error of all ranks;
        # ranks that only know that another one is gone wait until that one has printed why
        lost = isinstance(error, RankLost)
        if not is_first:
            time.sleep(12 if lost else 5)
        print(f"{program}: {one_line(error)}", file=sys.stderr)
        if lost:
            time.sleep(8)
        return 2 if isinstance(error, UsageError) else 1
    except Stopped as stopped:
        if not is_first:
            return 0
        print(f"{program}: {one_line(stopped)}")
        return 130
    except KeyboardInterrupt:  # before the run could save anything, or the second Ctrl-C
        return 130


def answer_at_once(args: list[str]) -> None:
    """Exit for --help and for all that `parse` rejects, before the slow imports."""
    use_expandable_segments()  # `parse` imports torch, for the algorithm

    def announced(args: list[str]) -> Config:
        _check_words(args)  # mistakes that are answered without torch
        named = _named_first(args)
        if named.run_name and not named.resume and "TORCHELASTIC_RUN_ID" not in os.environ:
            new_folder(config.RUNS, named.run_name, "")  # raises for a name that is taken
        say_loading()
        return parse(args)

    if code := _run(lambda _: 0, args, announced, "train.py"):
        sys.exit(code)


def say_loading() -> None:
    """Prints a line on stderr before imports that take seconds, on the first rank only."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("loading torch ..", file=sys.stderr, flush=True)


def need_temporary_folder(program: str) -> None:
    """Exit with a line if no place for temporary files is writable; before `import torch`."""
    if code := _run(lambda _: 0, [], lambda _: None, program):
        sys.exit(code)


def use_expandable_segments() -> None:
    """Makes PyTorch's blocks of GPU memory growable, against fragmentation; before `import torch`.

    vLLM switches the option off for its own pool.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _check_temporary_folder() -> None:
    """Raises UsageError if no place for temporary files is writable; torch may not import then."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise UsageError(f"{error.strerror}: set TMPDIR to a folder that is writable") from None


def _parse_flags(args: list[str], default: Config) -> Config:
    """tyro shows a box per nested dataclass, so nest the groups for it, and flatten its result."""
    nested = {"algorithm": default.options}
    for group in GROUPS:
        values = {f.name: getattr(default, f.name) for f in dataclasses.fields(group)}
        nested[group.__name__] = group(**values)
    command = _command(default.algo, type(default.options))
    with rules_for_numbers():
        parsed = vars(tyro.cli(command, prog="train.py", args=args, default=command(**nested)))
    flat = {"options": parsed["algorithm"]}
    for group in GROUPS:
        flat |= vars(parsed[group.__name__])
    return Config(**flat)


def _command(algo: str, options: type) -> Any:
    """The class that tyro parses: a field without a prefix per group, and one for the options of
    the algorithm, whose flags begin with its name."""
    fields: list[tuple[str, Any]] = []
    for group in GROUPS:  # WarmStartOptions: a box with the title "warm start options"
        title = re.sub("(?<=[a-z])(?=[A-Z])", " ", group.__name__.removesuffix("Options")).lower()
        kind = Annotated[tyro.conf.OmitArgPrefixes[group], tyro.conf.arg(name=title)]  # type: ignore
        fields.append((group.__name__, kind))
    fields.append(("algorithm", Annotated[options, tyro.conf.arg(name=name_of(algo))]))
    command = dataclasses.make_dataclass("Command", fields, namespace={"__doc__": Config.__doc__})
    command.__module__ = "builtins"  # tyro does not search the source of such a class for comments
    return command


def rules_for_numbers() -> ConstructorRegistry:
    """tyro's own rules, but the error about a text that is no number says what to write."""
    kinds: dict[Any, str] = {int: "a whole number", float: "a number"}
    kinds |= {kind | None: f"{what} or None" for kind, what in kinds.items()}
    specs: dict[Any, Any] = {
        kind: ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
        for kind in kinds
    }
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type not in kinds:
            return None
        spec, what = specs[info.type], kinds[info.type]

        def read(words: list[str]) -> Any:
            try:
                return spec.instance_from_str(words)
            except ValueError:
                raise ValueError(f"write {what}, not {words[0]!r}") from None

        return replace(spec, instance_from_str=read)

    return registry
