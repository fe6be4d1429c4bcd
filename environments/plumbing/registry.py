"""`make(SPEC)` builds an environment from its spec, NAME[:key=value,...].

NAME is a name of the table below, or one that `register` added; my_envs.games:Maze, a class or a
function of a module that returns an environment; or my_envs/games.py:Maze, the same of a file.
Files are looked for in the current folder, modules there and on sys.path. The commands make the
paths of files absolute where they read a spec, so a run can be resumed from another folder.

The module of a built-in name, "module:class", is imported when the environment is first used, so
the libraries of the other environments are not loaded.

>>> make("letter_counting:difficulty=2").reset(seed=7)[0]["role"]
'user'
"""

import copy
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from environments.base import Env, EnvFailure, MultiAgentEnv, RunInfo, UsageError
from environments.plumbing.options import convert, key_value_pairs, unquoted

Constructor = Callable[..., Env | MultiAgentEnv]
C = TypeVar("C", bound=Constructor)

ENVIRONMENTS: dict[str, str | Constructor] = {
    "agent": "environments.adapters.agent:Program",
    "calculator": "environments.calculator:Calculator",
    "compose": "environments.compose:Compose",
    "gymnasium": "environments.adapters.gymnasium:Gymnasium",
    "iterated_game": "environments.iterated_game:iterated_game",
    "letter_counting": "environments.letter_counting:LetterCounting",
    "math_qa": "environments.math_qa:MathQA",
    "reasoning_gym": "environments.adapters.reasoning_gym:ReasoningGym",
    "remote": "environments.adapters.remote:Remote",
    "reverse": "environments.reverse:Reverse",
    "reverse_echo": "environments.reverse:ReverseEcho",
    "reward_hacking": "environments.reward_hacking:RewardHacking",
    "rewarded": "environments.rewarded:Rewarded",
    "tic_tac_toe": "environments.tic_tac_toe:tic_tac_toe",
    "wikipedia_maze": "environments.wikipedia_maze:WikipediaMaze",
}
# Opponents that no environment has as an option: older copies of the policy, and folders
OPPONENT = re.compile(r"older(:.*)?|[.~].*|.*[\\/].*")
# module:Class or FILE.py:Class, then the options
SOURCE = re.compile(r"((?:[\w.-]+|[^=]*?\.py):[^\W\d]\w*)(?::(.*))?", re.DOTALL)
FILE = re.compile(r"(.+?\.py)((?::.*)?)", re.DOTALL)  # FILE.py or FILE.py:name
# Of an option: a text in quotes, or what stands between spaces, commas and brackets
WORD = re.compile(r"""(?s)"[^"]*"|'[^']*'|[^\s,\[\]{}"']+""")
HERE = str(Path(__file__).parent.parent)
OF_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__", "__wrapped__")
OF_FOLDER = (".json", ".jsonl", ".csv", ".parquet")  # files with data
OUR_FILES = ("../core", "adapters", "plumbing", "base.py", "math_qa.py", "rewarded.py")
# Beginnings of the paths of code in which a user does not look for the cause of an error
NOT_OF_USER = (
    "<frozen",
    *(os.path.normpath(os.path.join(HERE, name)) for name in OUR_FILES),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
OBJECTS: dict[str, Any] = {}  # what python:NAME names, such as the rows of a notebook


def register(name: str) -> Callable[[C], C]:
    """Class decorator: registers a class, or a function that returns an environment, under `name`.
    Raises UsageError for the name of a built-in one."""

    def add(constructor: C) -> C:
        if isinstance(ENVIRONMENTS.get(name), str):
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
    build: Any = env
    if isinstance(env, Env | MultiAgentEnv):
        build = lambda: copy.deepcopy(env)  # noqa: E731
        build.heavy = env.heavy
    elif not callable(env):
        needed = "a class derived from Env or MultiAgentEnv, its object, or a function"
        raise UsageError(f"env={env!r:.80}: give {needed} that returns one")
    name = getattr(env, "__name__", type(env).__name__)
    name = name if name.isidentifier() else "env"  # of a lambda
    register(name)(build)
    return name


def list_envs() -> list[str]:
    """Returns the names of all environments, sorted."""
    return sorted(ENVIRONMENTS)


@dataclass(frozen=True)
class EnvSpec:
    """A spec: the name of an environment, and its options as texts.

    `read` imports nothing, since a spec may come from another person's file. Properties that need
    the environment's code import it, and raise UsageError if that fails.

    >>> spec = EnvSpec.read("C:/my/games.py:Maze:size=4,url=http://a")
    >>> spec.name, spec.options, spec.short
    ('C:/my/games.py:Maze', {'size': '4', 'url': 'http://a'}, 'games.py:Maze:size=4,url=http://a')
    >>> EnvSpec.read("reverse:length=7").values
    {'turns': 3, 'length': 7}
    """

    name: str
    options: Mapping[str, str] = field(hash=False)

    @classmethod
    def read(cls, spec: "str | EnvSpec") -> "EnvSpec":
        """Reads a spec from a text. Raises UsageError for options that are not key=value."""
        if isinstance(spec, EnvSpec):
            return spec
        name, _, options = spec.partition(":")
        source = SOURCE.fullmatch(spec)
        if source and name not in ENVIRONMENTS:
            name, options = source.groups("")
        return cls(name, key_value_pairs(options, f"--env {spec}"))

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    @cached_property
    def without_folders(self) -> str:
        """The spec without the folders of absolute paths: the same after its files have moved."""
        return str(self.with_paths(lambda path, key: short_path(path, 1 + (key == "opponent"))))

    @property
    def short(self) -> str:
        """The name in titles and metrics: the option `name` of `rewarded`, or `without_folders`."""
        name = self.options.get("name") if self.name == "rewarded" else ""
        return unquoted(name) if name else self.without_folders

    def with_paths(self, change: Callable[[str, str], str]) -> "EnvSpec":
        """Replaces each path by `change(path, option)`: each FILE.py but those in `command=`, and
        the whole value of `data=` and of `opponent=`."""

        def in_word(word: str, key: str) -> str:
            file = FILE.fullmatch(unquoted(word))
            if not file:
                return word
            new = change(file[1], key) + file[2]
            return f'"{new}"' if key and re.search(r"[\s,'\[\]{}]", new) else new

        def in_words(text: str, key: str) -> str:
            return WORD.sub(lambda word: in_word(word[0], key), text)

        options = dict(self.options)
        for key, text in options.items():
            if key in ("data", "opponent"):
                options[key] = change(unquoted(text), key)
            elif key != "command":
                options[key] = in_words(text, key)
        return EnvSpec(in_word(self.name, ""), options)

    def checksum(self) -> int:
        """A checksum of the options, and of the files and the code that they name."""
        files = list[Path]()
        codes = [self.without_folders, code_of(ENVIRONMENTS.get(self.name))]

        def note(path: str, key: str) -> str:
            files.append(Path(path))
            if key == "data" and path:  # of a folder; its state.json stands for .arrow files
                files.extend(f for f in sorted(Path(path).rglob("*")) if f.suffix in OF_FOLDER)
            return path

        self.with_paths(note)
        for source, name in re.findall(r"([\w.]+):(\w+)", str(self)):
            module = sys.modules.get(source)
            value = OBJECTS.get(name) if source == "python" else getattr(module, name, None)
            codes.append(code_of(value) if callable(value) else "")
            if source != "__main__":
                files.append(Path(getattr(module, "__file__", None) or ""))
        checksum = zlib.crc32(repr(codes).encode())
        for file in filter(Path.is_file, files):
            with file.open("rb") as lines:
                for line in lines:
                    checksum = zlib.crc32(line, checksum)
        return checksum

    @property
    def opponent(self) -> str:
        """The opponent that is no option of the environment; "" if there is none."""
        opponent = unquoted(self.options.get("opponent", ""))
        return opponent if OPPONENT.fullmatch(opponent) else ""

    @property
    def only_in_python(self) -> bool:
        """Whether a part of the environment is known to this Python alone, by `register`,
        `name_object` or `OBJECTS`, so that no other command finds it."""
        return "=python:" in str(self) or not isinstance(ENVIRONMENTS.get(self.name, ""), str)

    @cached_property  # the file of a run may change or go
    def constructor(self) -> Constructor:
        """The class or function that builds the environment."""
        entry = ENVIRONMENTS.get(self.name, self.name)
        if not isinstance(entry, str):
            return entry
        if ":" not in entry:
            similar = difflib.get_close_matches(entry.lower(), list_envs(), n=1)
            hint = f"did you mean {similar[0]}? " if similar else ""
            hint += "a class of yours is FILE.py:Class, or train.run(.., env=Class) in Python"
            names = ", ".join(list_envs())
            raise UsageError(f"unknown environment {entry!r}; {hint}; available: {names}")
        try:
            constructor = import_attribute(entry)
            if callable(constructor):
                return constructor
            raise UsageError("it is no class and no function")
        except UsageError as error:
            raise UsageError(f"--env {self}: {error}") from error

    def declares(self, name: str) -> Any:
        """The value of an attribute of the environment's class, such as `heavy`; or False."""
        with suppress(UsageError):
            return getattr(self.constructor, name, False)
        return False

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The options of the environment, with their types and defaults."""
        try:
            return inspect.signature(self.constructor, eval_str=True).parameters
        except NameError as error:  # of an annotation
            raise UsageError(f"--env {self}: {describe_error(error)}") from error

    @property
    def values(self) -> dict[str, Any]:
        """Every option of the environment with its value: from the spec, else its default.

        Raises UsageError for an unknown key, and a value of the wrong type.
        """
        parameters = self.parameters.values()
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        keywords = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)  # **kwargs
        values = {name: p.default for name, p in named.items() if p.default is not p.empty}
        for key, text in self.options.items():
            parameter = named.get(key, keywords)
            if key == "opponent" and self.opponent:  # takes a seat of a game for several agents
                if key in named:
                    values[key] = "self"
            elif parameter is None:
                names = ", ".join(named) or "none"
                raise UsageError(f"--env {self}: unknown key {key!r}; available keys: {names}")
            else:
                try:
                    values[key] = convert(text, parameter)
                except ValueError as error:
                    raise UsageError(f"--env {self}: {key} must be {error}, not {text!r}") from None
        return values


def make(spec: str | EnvSpec) -> Env | MultiAgentEnv:
    """Builds an environment from its spec.

    Raises UsageError for an unknown name or key, for a value that the option's type or the
    environment does not allow, and for any other exception of the constructor.
    """
    spec = EnvSpec.read(spec)
    values = spec.values
    try:
        env = spec.constructor(**values)
        if not isinstance(env, Env | MultiAgentEnv):
            is_gymnasium = any(base.__module__ == "gymnasium.core" for base in type(env).__mro__)
            hint = f"; write --env gymnasium:id={spec.name}" if is_gymnasium else ""
            raise UsageError(f"it returned {env!r:.80}, no Env and no MultiAgentEnv{hint}")
        if spec.opponent and len({*getattr(env, "agents", ())}) < 2:
            example = 'agents = ("first", "second")'
            raise UsageError(f"an opponent needs an environment that names its `agents`: {example}")
        return env
    except Exception as error:
        raise UsageError(f"--env {spec}: {describe_error(error)}") from error


def absolute(spec: str | EnvSpec) -> EnvSpec:
    """A spec with absolute paths for the files in it that the current folder has. Imports nothing.
    Raises UsageError as `EnvSpec.read`."""

    def make_absolute(path: str, key: str) -> str:
        file = os.path.abspath(os.path.expanduser(path))
        is_path = {".", "/", "\\"} & {*path}  # `data=math` is a name, even if a folder has it, too
        return Path(file).as_posix() if is_path and os.path.exists(file) else path

    return EnvSpec.read(spec).with_paths(make_absolute)


def short_names(specs: Iterable[str | EnvSpec]) -> str:
    """The environments of a run in its title."""
    return " ".join(EnvSpec.read(spec).short for spec in specs)


def short_path(path: str, parts: int = 2) -> str:
    """The last parts of an absolute path; any other text unchanged."""
    is_absolute = re.match(r"(?:[A-Za-z]:)?[\\/]", path)
    return "/".join(re.split(r"[\\/]", path)[-parts:]) if is_absolute else path


def begin_run(info: RunInfo) -> None:
    """Tells the classes of a run's environments about it: see `Instance.begin_run`."""
    specs = map(EnvSpec.read, (*info.train_envs, *info.eval_envs))
    for begin in dict.fromkeys(spec.declares("begin_run") for spec in specs):
        if begin:
            begin(info)


def meanings(specs: Iterable[str | EnvSpec]) -> dict[str, str]:
    """The `meanings` of these environments: texts by key of `Step.info`."""
    texts: dict[str, str] = {}
    for spec in map(EnvSpec.read, specs):
        texts |= spec.declares("meanings") or {}
    return texts


def import_attribute(name: str) -> Any:
    """Returns the object that FILE.py:NAME or module:NAME names, or python:NAME, which is in
    OBJECTS. Raises UsageError."""
    source, _, attribute = name.rpartition(":")
    if source == "python":
        if attribute in OBJECTS:
            return OBJECTS[attribute]
        hint = "give it again, train.run(.., data=.., reward=..)"
        raise UsageError(f"{name} is an object that this Python does not have: {hint}")
    if not source or attribute.endswith(".py"):
        raise UsageError(f"{name} names no class or function: write FILE.py:NAME")
    module = import_source(source)
    if not hasattr(module, attribute):
        raise UsageError(f"{short_path(source, 1)} has no {attribute}")
    return getattr(module, attribute)


def import_source(source: str) -> ModuleType:
    """Imports a module, also of the current folder, or a file that ends in .py. Raises
    UsageError."""
    try:
        if source.endswith(".py"):
            return import_file(find_file(source))
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        return importlib.import_module(source)
    except (Exception, SystemExit) as error:
        text = describe_error(error)
        if "relative import" in text and source.endswith(".py"):
            file = Path(source).resolve()
            dots = re.findall(r"(?m)^\s*from +(\.+)", file.read_text("utf-8"))
            root = -len(max(dots, default=".")) - 1
            module = ".".join([*file.parts[root:-1], file.stem])
            text += f"; in {Path(*file.parts[:root])}, name {module}:NAME in its place"
        raise UsageError(text) from error


def code_of(value: Any) -> str:
    """What a function, or the methods of a class or of a callable object, do: a text that is the
    same in each process."""
    parts: list[Any] = [getattr(value, key) for key in OF_FUNCTION if hasattr(value, key)]
    if isinstance(value, CodeType):
        parts = [value.co_code, value.co_names, *value.co_consts]
    elif isinstance(value, type):
        parts = [part for part in vars(value).values() if inspect.isroutine(part)]
    elif isinstance(value, partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, tuple | list | dict):
        parts = [*(value.items() if isinstance(value, dict) else value)]
    elif callable(value) and not inspect.isroutine(value):
        parts.append(type(value))
    return repr([*map(code_of, parts)] or content_of(value))


def content_of(value: Any) -> Any:
    """An object as JSON can have it, the same in each process: a set in order, no address."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    text = re.sub(" at 0x[0-9a-fA-F]+", "", repr(value))
    return value.tolist() if hasattr(value, "tolist") else text  # of an array


def describe_error(error: BaseException) -> str:
    """The error in one line, with the file and line that raised it unless it speaks for itself."""
    if isinstance(error, UsageError | EnvFailure):
        return str(error)
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return text if isinstance(error, SyntaxError) else text + place_of(error)  # it has its place


def place_of(error: BaseException) -> str:
    """Where the user's code raised the error, such as ` (games.py, line 7)`; "" if it did not."""
    frames = [*traceback.extract_tb(error.__traceback__)]
    if error.__cause__:
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(NOT_OF_USER)]
    return f" ({Path(of_user[-1].filename).name}, line {of_user[-1].lineno})" if of_user else ""


def find_file(path: str) -> Path:
    """Returns the absolute path of a file."""
    file = Path(os.path.expanduser(path))
    if file.is_file():
        return file.resolve()
    hint = "; if it moved, name it again" if os.path.isabs(path) else f" in {Path.cwd()}"
    raise UsageError(f"there is no file {path}{hint}")


def import_file(file: Path) -> ModuleType:
    """Imports a file once. It can import the other modules of its folder.

    The module has the name of the file, so that processes which the file starts can import it, too;
    unless Python finds another module of that name.
    """
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # before folders with modules of the same names
    importlib.invalidate_caches()
    name = file.stem
    importable = importlib.util.find_spec(name) if name.isidentifier() else None
    if importable is None or os.path.realpath(importable.origin or "") != str(file):
        name = str(file).replace(".", "_")
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
