"""The command line of train.py.

Flags override the file of --config or --resume, which overrides the defaults of `core/config.py`.
tyro parses the flags, prints --help, and reports mistakes in a box with exit code 2.
"""

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

from core.terminal import interrupt
from environments.plumbing.text import print_any_character

if interrupt.owns_process():
    interrupt.set_hooks()  # before the slow imports
    print_any_character()

import tyro

from core import config
from core.algorithm import before_torch, is_file, name_of
from core.config import Config
from core.faults import Fault, RankLost, Stopped, UsageError
from core.files.run_folder import (
    DISK_ERRORS,
    as_config,
    changed_settings,
    given_settings,
    new_folder,
    read_settings,
    say_removed,
    with_options,
    without_defaults,
)
from core.other_names import advice_for
from environments.plumbing.registry import ENVIRONMENTS
from environments.plumbing.text import one_line

GROUPS = tuple(reversed(Config.__bases__))  # in the order of --help
MAX_NAMES = 10  # of runs that a message lists
HELP = "python train.py --help has all"


def parse(args: list[str]) -> Config:
    """The settings that `args` ask for. Raises UsageError for what tyro does not check.

    Two passes: the first leaves out the options of the algorithm, which a file may name, and
    raises what is wrong whatever these are.
    """
    args = _as_tyro_has_it(args)
    flags = _check_words(args)
    words = [w.partition("=")[0][2:].replace("-", "_") for w in args if w.startswith("--")]
    given = {name: vars(flags)[name] for name in words if name in vars(flags)}
    file = _check_names(flags)
    is_restart = "TORCHELASTIC_RUN_ID" in os.environ
    if flags.run_name and not flags.resume and not is_restart:
        new_folder(config.RUNS, flags.run_name, "")  # raises for a name that is taken
    settings = read_settings(file) if file else {"algo": flags.algo}
    if file:
        say_removed(file)
    algo = given.get("algo", settings.get("algo", ""))
    if algo == "scratch" or is_file(algo):  # these are imported
        say_loading()
    settings = without_defaults(settings, file) if flags.config else settings
    cfg, _ = _parse_flags(args, as_config(settings, file, given))
    return _with_file(cfg, file)


def complete(cfg: Config) -> Config:
    """The settings that Python gives, read and checked as flags are: over the file of `config` or
    `resume`, which they override where they differ from the defaults.

    What `parse` returns stays as it is. Raises UsageError.
    """
    if cfg.has_file:
        return cfg
    given = given_settings(cfg)
    cfg = replace(cfg, **given)
    file = _check_names(cfg)
    settings = read_settings(file) if file else {}
    settings = without_defaults(settings, file) if cfg.config else settings
    saved = as_config(settings | given, file, given)
    own = {name: getattr(cfg, name) for name in config.COMMAND_LINE_ONLY}
    return _with_file(replace(saved, options=with_options(saved, cfg.options), **own), file)


def _with_file(cfg: Config, file: Path | None) -> Config:
    """`cfg`, which has the settings of `file`. Raises UsageError for a change that a resumed run
    may not make."""
    if file and cfg.resume:
        cfg = replace(cfg, resume=str(file.parent))
        _check_changes(cfg, file.parent)
    return replace(cfg, has_file=True)


def _check_names(cfg: Config) -> Path | None:
    """The file of `config_file`. Raises UsageError for names that do not go together, or that mean
    another one: of environments that a shell has cut, and of a model that comes with picoRL."""
    for name, specs in (("env", cfg.env), ("eval_env", cfg.eval_env)):
        if any(re.match(r"\w+ *=", spec) for spec in specs[1:]):
            text = re.sub(r",? +(?=\w+ *=)", ",", " ".join(specs))  # PowerShell drops commas
            meant = (s if "=" in s.partition(",")[0] else s.replace(",", ":", 1)
                     for s in text.split(" "))  # fmt: skip
            words = " ".join(f'"{s}"' if "=" in s else s for s in meant)
            raise UsageError(f"{config.flag(name)} {' '.join(specs)}: write {words}")
    model, own = cfg.model_id, (*config.TINY, config.SMOLLM2)
    near = "" if model in own or Path(model).exists() else config.similar(model, own)
    if near and "/" not in model:
        raise UsageError(f"--model-id {model}: there is no such folder; write --model-id {near}, "
                         "or the name of a model of the Hub with its owner")  # fmt: skip
    if cfg.config and cfg.resume:
        raise UsageError("give --config or --resume, not both: a run folder has its own config")
    if cfg.resume and cfg.run_name not in ("", Path(cfg.resume).name):
        raise UsageError(f"--run-name {cfg.run_name}: a resumed run keeps its folder; remove it")
    return config_file(cfg)


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


def _check_words(args: list[str]) -> Config:
    """The settings of the flags but for those of the algorithm, by the rules of tyro.

    Raises UsageError for a word that is no flag and no value of one.
    """
    flags, others = _parse_flags([word for word in args if word not in ("-h", "--help")], Config())
    word = next(iter(others), "--.")
    if word[:1] != "-":
        hint = f"write --env {word}" if word.split(":")[0] in ENVIRONMENTS else HELP
        raise UsageError(f"{word} follows no flag; {hint}")
    word = word.partition("=")[0]
    if "." not in word:
        name = word.lstrip("-")
        near = config.similar(name, vars(flags).keys() - {"options", "has_file"})
        advice = advice_for(name) or (f"did you mean {config.flag(near)}?" if near else HELP)
        raise UsageError(f"{word} is no flag; {advice}")
    return flags


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


def config_file(flags: Config) -> Path | None:
    """The config.yaml that --config or --resume names, of a run with or without runs/, or any file
    of --config; None without the two. Raises UsageError if there is none."""
    if not (given := flags.config or flags.resume):
        return None
    if flags.config and (file := Path(given).expanduser()).is_file():
        return file
    if run := find_run(given):
        return run / "config.yaml"
    what = f"--config {given}: no file and no" if flags.config else f"--resume {given}: no"
    raise UsageError(f"{what} run has this name; {known_runs()}")


def _check_changes(cfg: Config, run: Path) -> None:
    """Raises UsageError for a change that a resumed run may not make: the folder has the weights of
    tiny, and the optimizer's state. Other weights that do not fit are refused as they are read."""
    for name, (before, now) in changed_settings(cfg, run).items():
        if name == "optimizer" or (name == "model_id" and {before, now} & {*config.TINY}):
            raise UsageError(f"--resume {run}: {name} is {before} in this run, and stays so: start "
                             f"another run for {now}")  # fmt: skip


def execute(
    main: Callable[[Any], int],
    args: list[str],
    parse: Callable[[list[str]], Any] = parse,
    program: str = "train.py",
    starting: bool = False,
) -> int:
    """`main` with the parsed settings. Prints UsageError (code 2) and Fault (code 1) as a line.

    The error of a disk, outside the folder of a run too, is a Fault. Under torchrun the first rank
    of a machine prints that a run has stopped, and returns the code of it; the other ranks return
    0, as torchrun would end the first, which still writes the pages, if another had failed.
    `starting`: slow imports follow, which Ctrl-C ends at once.
    """
    if not starting:
        interrupt.end_start()
    is_first = "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["LOCAL_RANK"] == "0"
    try:
        try:
            tempfile.gettempdir()  # without one torch cannot be imported
        except OSError as error:
            raise UsageError(f"{error.strerror}: set TMPDIR to a folder that is writable") from None
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
    """Exit for --help and for settings that are wrong, before the slow imports."""
    use_expandable_segments()  # `parse` imports torch for an algorithm of the user's
    try:
        with before_torch():
            code = execute(_check, args, starting=True)
    except BrokenPipeError:  # --help | head
        os._exit(0)  # at its usual exit Python would write once more
    if code:
        sys.exit(code)
    say_loading()


def _check(cfg: Config) -> int:
    cfg = config.resolve(cfg)
    config.validate(cfg)
    for spec in (*cfg.env, *cfg.eval_env):
        _ = spec.values  # raises UsageError for an option that the environment has not
    return 0


def say_loading() -> None:
    """Prints a line on stderr before the import of torch takes seconds, on the first rank only."""
    if "torch" not in sys.modules and os.environ.get("LOCAL_RANK", "0") == "0":
        print("loading torch ..", file=sys.stderr, flush=True)


def need_temporary_folder(program: str) -> None:
    """Exit with a line if no place for temporary files is writable; before `import torch`."""
    if code := execute(lambda _: 0, [], lambda _: None, program, starting=True):
        sys.exit(code)


def use_expandable_segments() -> None:
    """Makes PyTorch's blocks of GPU memory growable, against fragmentation; before `import torch`.

    vLLM switches the option off for its own pool.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


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
