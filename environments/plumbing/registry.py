"""`make(SPEC)` builds an environment from its spec, NAME[:key=value,...].

NAME is one of

    snake                     a built-in environment, or one that `register` added
    my_envs.games:Maze        a class, or a function that returns an environment, of a module
    my_envs/games.py:Maze     the same of a file

Files are looked for in the current folder, modules on sys.path. The commands make a spec absolute
where they read it, so a run can be resumed from another folder: a module that they find in the
current folder becomes /that/folder/my_envs.games:Maze. `options.py` reads the options.

The table maps each built-in name to "module:class". The module is imported when the environment is
first used, so the libraries of the other environments are not loaded.

>>> make("letter_counting:difficulty=2").reset(seed=7)[0]["role"]
'user'
"""

import copy
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from environments.base import Env, MultiAgentEnv, RunInfo, UsageError
from environments.plumbing.options import convert, key_value_pairs, map_words, unquoted

Constructor = Callable[..., Env | MultiAgentEnv]
C = TypeVar("C", bound=Constructor)

ENVIRONMENTS: dict[str, str | Constructor] = {
    "agent": "environments.adapters.agent:Program",
    "calculator": "environments.calculator:Calculator",
    "compose": "environments.compose:Compose",
    "connect4": "environments.connect4:connect4",
    "countdown": "environments.countdown:Countdown",
    "gymnasium": "environments.adapters.gymnasium:Gymnasium",
    "iterated_game": "environments.iterated_game:iterated_game",
    "letter_counting": "environments.letter_counting:LetterCounting",
    "math_qa": "environments.math_qa:MathQA",
    "openenv": "environments.adapters.openenv:OpenEnv",
    "reasoning_gym": "environments.adapters.reasoning_gym:ReasoningGym",
    "remote": "environments.adapters.remote:Remote",
    "reverse": "environments.reverse:Reverse",
    "reverse_echo": "environments.reverse:ReverseEcho",
    "reward_hacking": "environments.reward_hacking:RewardHacking",
    "rewarded": "environments.rewarded:Rewarded",
    "snake": "environments.snake:Snake",
    "textarena": "environments.adapters.textarena:TextArena",
    "textworld": "environments.adapters.textworld:TextWorld",
    "tic_tac_toe": "environments.tic_tac_toe:tic_tac_toe",
    "wikipedia_maze": "environments.wikipedia_maze:WikipediaMaze",
}
# Opponents that are no option of an environment (core/extras/opponents.py): older copies of the
# policy, and folders
OPPONENT = re.compile(r"older(:.*)?|[.~].*|.*[\\/].*")
# module:Class, FILE.py:Class or FOLDER/module:Class with an absolute folder, then the options
SOURCE = re.compile(
    r"((?:[\w.-]+|[^=]*?\.py|(?:[A-Za-z]:)?[\\/].*?):[^\W\d]\w*)(?::(.*))?", re.DOTALL
)
# PLACE:name in an option, where a name may be one of gymnasium
CODE = re.compile(r"(.+)(:[^\W\d][\w/-]*)", re.DOTALL)
# A command of `remote` whose files are here, not in a container or on another machine
OWN_PROGRAM = re.compile(r"[./~]|python|[A-Za-z]:[\\/]")
HERE = str(Path(__file__).parent.parent)
NOT_OWN = (  # code in which a user does not look for the cause of an error
    "<frozen", os.path.join(os.path.dirname(HERE), "core"),
    *(os.path.join(HERE, name) for name in ("adapters", "plumbing")),
    *(os.path.join(HERE, f"{name}.py") for name in ("base", "math_qa", "rewarded")),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)  # fmt: skip
OBJECTS: dict[str, Any] = {}  # what python:NAME means, such as the rows of a notebook
FOLDERS = set[str]()  # of the user's files that were imported by their path
IMPORTING = threading.RLock()  # held while a file is imported: no other thread may see half of it


def register(name: str) -> Callable[[C], C]:
    """Class decorator: registers a class, or a function that returns an environment, under `name`.

    >>> from environments.base import Step
    >>> @register("silence")
    ... class Silence(Env):
    ...     def reset(self, seed):
    ...         return [{"role": "user", "content": "Say nothing."}]
    ...     def step(self, response):
    ...         return Step(message=None, reward=float(response == ""), done=True)
    >>> make("silence").step("").reward
    1.0
    >>> del ENVIRONMENTS["silence"]
    """

    def add(constructor: C) -> C:
        if isinstance(ENVIRONMENTS.get(name), str):  # one of ours
            raise UsageError(f"an environment {name!r} exists already; choose another name")
        ENVIRONMENTS[name] = constructor
        return constructor

    return add


def name_object(env: Any) -> str:
    """Gives an environment that Python has, not a file, a name that `make` knows; returns the name.

    `env`: a class, an object, which is copied for every episode, or a function that returns a new
    one; a name is returned as it is. Raises UsageError for anything else.
    """
    if isinstance(env, str):
        return env
    build, name = env, getattr(env, "__name__", type(env).__name__)
    if isinstance(env, Env | MultiAgentEnv):

        def build() -> Env | MultiAgentEnv:
            try:
                return copy.deepcopy(env)
            except Exception as error:  # of a lock, a connection or a generator in it
                raise UsageError(f"{error}: an object is copied for every episode; give a "
                                 "function that returns a new one") from error  # fmt: skip

        build.heavy = env.heavy  # type: ignore[attr-defined]
    elif not callable(env):
        raise UsageError(f"env={env!r:.80}: give a class derived from Env or MultiAgentEnv, an "
                         "object of one, or a function that returns one")  # fmt: skip
    name = name if name.isidentifier() else "env"  # of a lambda
    register(name)(build)
    return name


def list_envs() -> list[str]:
    """Returns the names of all environments, sorted."""
    return sorted(ENVIRONMENTS)


def unknown_name(name: str) -> UsageError:
    """The error about a name that no environment has."""
    similar = difflib.get_close_matches(name.lower(), list_envs(), n=1)
    hint = f"did you mean {similar[0]}? " if similar else ""
    names = ", ".join(list_envs())
    return UsageError(f"unknown environment {name!r}; {hint}a class of yours is FILE.py:Class, or "
                      f"train.run(.., env=Class) in Python; available: {names}")  # fmt: skip


@dataclass(frozen=True)
class EnvSpec:
    """Which environment, and its options as they are written: what a spec says.

    To read one imports nothing, since it may come from another person's file. What needs the
    environment's code imports it, and raises UsageError if that fails.

    >>> spec = EnvSpec.read("C:/my/games.py:Maze:size=4,url=http://a")
    >>> spec.name, spec.options, spec.short
    ('C:/my/games.py:Maze', {'size': '4', 'url': 'http://a'}, 'games.py:Maze:size=4,url=http://a')
    >>> EnvSpec.read("reverse:length=7").values
    {'kind': 'words', 'turns': 3, 'length': 7}
    """

    name: str
    options: Mapping[str, str] = field(hash=False)

    @classmethod
    def read(cls, spec: "str | EnvSpec") -> "EnvSpec":
        """What a text says; a value unchanged. Raises UsageError for options that are no such."""
        if isinstance(spec, EnvSpec):
            return spec
        name, _, options = spec.partition(":")
        if name not in ENVIRONMENTS and (match := SOURCE.fullmatch(spec)):
            name, options = match.groups("")
        try:
            return cls(name, key_value_pairs(options, f"--env {spec}"))
        except UsageError as error:  # such as of games:Maze in a folder
            raise error if ":" in name or name in ENVIRONMENTS else unknown_name(name) from None

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    @cached_property
    def short(self) -> str:
        """Its name in titles and metrics: what `name=` says, or the text without the folders of
        absolute paths."""
        if self.name == "rewarded" and (name := self.options.get("name")):
            return str(unquoted(name))
        return str(self.with_paths(lambda path, key: short_path(path, 1 + (key == "opponent"))))

    def with_paths(self, change: Callable[[str, str], str]) -> "EnvSpec":
        """The spec with `change` applied to what may be a path or PLACE:name, and its option."""

        def changed(key: str, text: str) -> str:
            if (self.name, key) == ("remote", "env"):  # a spec
                served = EnvSpec.read(text.replace(";", ",")).with_paths(change)
                return str(served).replace(",", ";")
            if (self.name, key) == ("remote", "command") and not OWN_PROGRAM.match(text):
                return text
            return map_words(text, lambda word: change(word, key))

        name = change(self.name, "") if ":" in self.name else self.name
        return EnvSpec(name, {key: changed(key, text) for key, text in self.options.items()})

    @property
    def opponent(self) -> str:
        """The opponent that is no option of the environment; "" if there is none."""
        opponent = str(unquoted(self.options.get("opponent", "")))
        return opponent if OPPONENT.fullmatch(opponent) else ""

    @property
    def only_in_python(self) -> bool:
        """Whether only this Python has it (`register`, `name_object`) or what it names (`OBJECTS`),
        so no command finds it."""
        is_own = self.name == "rewarded" and "python:" in " ".join(self.options.values())
        return is_own or not isinstance(ENVIRONMENTS.get(self.name, ""), str)

    @cached_property  # the file of a run may change or go
    def constructor(self) -> Constructor:
        """The class or function that builds the environment."""
        entry = ENVIRONMENTS.get(self.name, self.name)
        if not isinstance(entry, str):
            return entry
        if ":" not in entry:
            raise unknown_name(entry)
        try:
            found = import_attribute(entry)
        except UsageError as error:
            raise UsageError(f"--env {self}: {error}") from error
        if not callable(found):
            raise UsageError(f"--env {self.name} is no class and no function")
        return found

    def accepts(self, key: str) -> bool:
        """Whether the environment has an option `key`."""
        return key in inspect.signature(self.constructor).parameters

    def declares(self, name: str) -> Any:
        """What the environment's class says, such as whether it is `heavy`; False if unknown."""
        with suppress(UsageError):
            return getattr(self.constructor, name, False)
        return False

    @property
    def values(self) -> dict[str, Any]:
        """Every option of the environment with its value: from the spec, else its default.

        Raises UsageError for an unknown key, and a value of the wrong type.
        """
        try:
            parameters = inspect.signature(self.constructor, eval_str=True).parameters.values()
        except NameError as error:  # of an annotation
            raise UsageError(f"--env {self}: {describe_error(error)}") from error
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        others = [p for p in parameters if p.kind is p.VAR_KEYWORD]  # **kwargs
        values = {name: p.default for name, p in named.items() if p.default is not p.empty}
        for key, text in self.options.items():
            if key == "opponent" and self.opponent:  # plays against the agent that the game asks
                values |= {key: "self"} if key in named else {}
                continue
            if key not in named and not others:
                names = ", ".join(named) or "none"
                raise UsageError(f"--env {self}: unknown key {key!r}; available keys: {names}")
            try:
                values[key] = convert(text, named[key] if key in named else others[0])
            except ValueError as error:
                raise UsageError(f"--env {self}: {key} must be {error}, not {text!r}") from None
        return values


def make(spec: str | EnvSpec) -> Env | MultiAgentEnv:
    """Builds an environment from its spec.

    Raises UsageError for an unknown name or key, for a value that the option's type or the
    environment does not allow, and for any other exception of the constructor.
    """
    spec = EnvSpec.read(spec)
    values, opponent = spec.values, spec.opponent
    try:
        env = spec.constructor(**values)
        if not isinstance(env, Env | MultiAgentEnv):
            is_gymnasium = any(kind.__module__ == "gymnasium.core" for kind in type(env).__mro__)
            hint = f"; write --env gymnasium:id={spec.name}" if is_gymnasium else ""
            raise UsageError(f"it returned {env!r:.80}, no Env and no MultiAgentEnv{hint}")
        if opponent and (not isinstance(env, MultiAgentEnv) or len({*env.agents}) < 2):
            raise UsageError("an opponent needs an environment that names its `agents`, such as "
                             'agents = ("first", "second")')  # fmt: skip
        return env
    except UsageError as error:
        raise UsageError(f"--env {spec}: {error}") from None
    except Exception as error:
        raise UsageError(f"--env {spec}: {describe_error(error)}") from error


def absolute(spec: str | EnvSpec) -> EnvSpec:
    """A spec with absolute paths for the files, folders and modules in it that the current folder
    has. Imports nothing. Raises UsageError as `EnvSpec.read`."""
    return EnvSpec.read(spec).with_paths(lambda path, _: absolute_path(path))


def relative(text: str) -> str:
    """The text of a spec with paths from the current folder, for those that lie in it."""
    return text.replace(f"{Path.cwd().as_posix()}/", "")


def short_names(specs: Iterable[str | EnvSpec]) -> str:
    """The environments of a run in its title."""
    return " ".join(EnvSpec.read(spec).short for spec in specs)


def checksums(spec: EnvSpec) -> dict[str, str]:
    """SHA-256 of the FILE.py of an absolute spec and of those of `reward=`, by their names."""
    found: dict[str, str] = {}

    def add(word: str) -> str:
        place, _ = split_place(word)
        if place.endswith(".py") and os.path.isfile(place):
            name, content = os.path.basename(place), Path(place).read_bytes()
            found[name] = found.get(name, "") + hashlib.sha256(content).hexdigest()
        return word

    add(spec.name)
    map_words(spec.options.get("reward", ""), add)
    return found


def split_place(text: str) -> tuple[str, str]:
    """FILE.py and :name of FILE.py:name, so too of a module; any other text, and ""."""
    match = CODE.fullmatch(text)
    return (match[1], match[2]) if match else (text, "")


def absolute_path(text: str) -> str:
    """A path or PLACE:name as other folders name it, if this one has it; else the text unchanged.

    A text without a dot and a slash is no path.
    """
    place, name = split_place(text)
    found = os.path.abspath(os.path.expanduser(place))
    if name and not place.endswith(".py"):
        head, module = os.path.split(found)
        module = os.path.join(head, *module.split("."))
        exists = os.path.isfile(f"{module}.py") or os.path.isfile(f"{module}/__init__.py")
    else:
        exists = bool({".", "/", "\\"} & {*place}) and os.path.exists(found)
    return Path(found).as_posix() + name if exists else text


def short_path(text: str, parts: int = 2) -> str:
    """The last parts of an absolute path or PLACE:name; any other text unchanged."""
    place, name = split_place(text)
    is_absolute = re.match(r"(?:[A-Za-z]:)?[\\/]", place)
    return "/".join(re.split(r"[\\/]", place)[-parts:]) + name if is_absolute else text


def variables_of_python() -> dict[str, str]:
    """Returns variables with which a new Python process imports this package."""
    paths = [os.path.dirname(HERE), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def begin_run(info: RunInfo) -> None:
    """Tells the classes of a run's environments about it: see `Instance.begin_run`."""
    specs = map(EnvSpec.read, (*info.train_envs, *info.eval_envs))
    for begin in dict.fromkeys(spec.declares("begin_run") for spec in specs):
        if begin:
            begin(info)


def meanings(specs: Iterable[str | EnvSpec]) -> dict[str, str]:
    """What the numbers are that these environments report, by their key in `Step.info`.

    >>> meanings(["letter_counting:difficulty=2", "no_such_environment"])
    {'worked': 'fraction that spell the word'}
    """
    found: dict[str, str] = {}
    for spec in map(EnvSpec.read, specs):
        found |= spec.declares("meanings") or {}
    return found


def import_attribute(name: str) -> Any:
    """Returns what FILE.py:NAME, module:NAME or FOLDER/module:NAME names, or python:NAME, which is
    in OBJECTS. Raises UsageError."""
    source, _, attribute = name.rpartition(":")
    if source == "python":
        if attribute not in OBJECTS:
            raise UsageError(f"{name} is an object that this Python does not have: give it again, "
                             "train.run(.., data=.., reward=..)")  # fmt: skip
        return OBJECTS[attribute]
    if not source or attribute.endswith(".py"):
        raise UsageError(f"{name} names no class or function: write FILE.py:NAME")
    module = import_source(source)
    if not hasattr(module, attribute):
        hint = f": write `made = {attribute}` in it, and name made" if "(" in attribute else ""
        raise UsageError(f"{short_path(source, 1)} has no {attribute}{hint}")
    return getattr(module, attribute)


def import_source(source: str) -> ModuleType:
    """Imports a module, FOLDER/module, or a file that ends in .py. Raises UsageError."""
    try:
        if source.endswith(".py"):
            return import_file(find_file(source))
        folder, _, name = source.rpartition("/")
        _add_to_path(folder)
        return importlib.import_module(name)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(describe_error(error)) from error


def describe_error(error: BaseException) -> str:
    """The error in one line, with the file and the line of code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return text if isinstance(error, SyntaxError) else text + place_of(error)  # it names both


def place_of(error: BaseException) -> str:
    """Where the user's code raised the error, such as ` (games.py, line 7)`; "" if it did not.

    A line in the current folder, or beside a file that is imported by its path, comes before one of
    a library that is installed elsewhere, such as an editable one.
    """
    frames = [frame for e in (error, error.__cause__) if e
              for frame in traceback.extract_tb(e.__traceback__)]  # fmt: skip
    others = [f for f in frames if not f.filename.startswith(NOT_OWN)]
    folders = {str(Path.cwd()), *FOLDERS}
    own = [f for f in others if folders & {*map(str, Path(f.filename).parents)}] or others
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def find_file(path: str) -> Path:
    """Returns the absolute path of a file."""
    if (file := Path(os.path.expanduser(path))).is_file():
        return file.resolve()
    hint = "; if it moved, name it again" if os.path.isabs(path) else f" in {Path.cwd()}"
    raise UsageError(f"there is no file {path}{hint}")


def _add_to_path(folder: str) -> None:
    FOLDERS.add(folder)
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)  # the modules of the same name elsewhere are other ones


def _finds(file: Path) -> bool:
    """Whether Python imports this file by its name alone."""
    if "." in file.stem:
        return False
    if file.stem in sys.modules:
        found = getattr(sys.modules[file.stem], "__file__", "")
    else:
        importlib.invalidate_caches()
        found = getattr(importlib.util.find_spec(file.stem), "origin", "")
    return bool(found and os.path.exists(found) and os.path.samefile(found, file))


def import_file(file: Path) -> ModuleType:
    """Imports a file once, though agents of several threads name it. It can import the other
    modules of its folder.

    Its module is called like the file, so that processes which it starts can import it, too, unless
    Python finds another module of that name.
    """
    with IMPORTING:
        _add_to_path(str(file.parent))
        name = file.stem if _finds(file) else str(file).replace(".", "_")
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec and spec.loader
            sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
