"""`make(SPEC)` builds an environment from its spec, NAME[:key=value,...].

NAME is one of

    snake                     a built-in environment, or one that `register` added
    my_envs.games:Maze        a class, or a function that returns an environment, of a module
    my_envs/games.py:Maze     the same of a file

Files are looked for in the current folder, modules on sys.path. The commands make a spec absolute
where they read it (`absolute`), so a run can be resumed from another folder: a module that they
find in the current folder becomes /that/folder/my_envs.games:Maze. `options.py` reads the options.

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
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from environments.base import Env, MultiAgentEnv, UsageError, restored_torch
from environments.plumbing.options import convert, key_value_pairs, unquoted

Constructor = Callable[..., Env | MultiAgentEnv]
C = TypeVar("C", bound=Constructor)
Change = Callable[[str, int, bool], str]

ENVIRONMENTS: dict[str, str | Constructor] = {
    "agent": "environments.adapters.agent:AgentProgram",
    "alphabet_sort": "environments.alphabet_sort:AlphabetSort",
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
# Opponents that are no option of an environment (core/extras/opponents.py): its own players, older
# copies of the policy, and folders
OPPONENT = re.compile(r"guess|demonstrate|older(:.*)?|[.~].*|.*[\\/].*")
# module:Class, FILE.py:Class or FOLDER/module:Class with an absolute folder, then the options
SOURCE = re.compile(
    r"([\w.-]+|[^=]*?\.py|(?:[A-Za-z]:)?[\\/].*?):([^\W\d]\w*)(?::(.*))?", re.DOTALL
)
# A word of an option that names code: FILE.py:name, module:name or FOLDER/module:name
CODE = re.compile(r"((?:[A-Za-z]:)?.+?):([^\W\d][\w/-]*)", re.DOTALL)
# A command of `remote` whose files are here, not in a container or on another machine
OWN_PROGRAM = re.compile(r"[./~]|python|[A-Za-z]:[\\/]")
# Of the value of an option: a text in quotes, or what stands between spaces, commas and brackets
WORD = re.compile(r""" "(?:[^"\\]|\\.)*" | '[^']*' | [^\s,\[\]{}"']+ """, re.DOTALL | re.VERBOSE)
IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([\w.]+)", re.MULTILINE)
HERE = str(Path(__file__).parent.parent)
NOT_OWN = (  # code in which a user does not look for the cause of an error
    "<frozen", os.path.join(os.path.dirname(HERE), "core"),
    *(os.path.join(HERE, name) for name in ("adapters", "plumbing")),
    *(os.path.join(HERE, f"{name}.py") for name in ("base", "math_qa", "rewarded")),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)  # fmt: skip
FOLDERS = set[str]()  # of the user's files that were imported by their path


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


class EnvSpec(str):
    """A spec as a value: the text, and what it says, read once and only where it is asked for.

    >>> spec = EnvSpec("C:/my/games.py:Maze:size=4,url=http://a")
    >>> spec.name, spec.options, spec.short
    ('C:/my/games.py:Maze', 'size=4,url=http://a', 'games.py:Maze:size=4,url=http://a')
    >>> EnvSpec("tic_tac_toe:opponent=runs/x").opponent, EnvSpec("reverse:length=7").values
    ('runs/x', {'kind': 'words', 'turns': 3, 'length': 7})
    """

    def __new__(cls, text: str) -> "EnvSpec":
        return text if isinstance(text, cls) else super().__new__(cls, text)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return EnvSpec, (str(self),)  # without what was read

    @cached_property
    def _parts(self) -> tuple[str, str]:
        name, _, options = self.partition(":")
        match = _source(self)
        return (f"{match[1]}:{match[2]}", match[3] or "") if match else (name, options)

    @property
    def name(self) -> str:
        """The name, module:Class if it is imported."""
        return self._parts[0]

    @property
    def only_in_python(self) -> bool:
        """Whether only this Python has it (`register`, `name_object`), so no command finds it."""
        return not isinstance(ENVIRONMENTS.get(self.name, ""), str)

    @property
    def options(self) -> str:
        """The text of the options."""
        return self._parts[1]

    @cached_property
    def pairs(self) -> dict[str, str]:
        """The options as they are written. Raises UsageError for another text."""
        return key_value_pairs(self.options, f"--env {self}")

    def with_pairs(self, pairs: dict[str, str]) -> "EnvSpec":
        """The same environment with other options."""
        return EnvSpec(":".join(filter(None, [self.name, ",".join(map("=".join, pairs.items()))])))

    @cached_property
    def constructor(self) -> Constructor:
        """The class or function that builds the environment.

        Raises UsageError for an unknown name, and if the module or file cannot be imported.
        """
        entry = ENVIRONMENTS.get(self.name, self.name)
        if not isinstance(entry, str):
            return entry
        if ":" not in entry:
            similar = difflib.get_close_matches(entry.lower(), list_envs(), n=1)
            hint = f"did you mean {similar[0]}? " if similar else ""
            raise UsageError(f"unknown environment {entry!r}; {hint}a class of yours is "
                             "FILE.py:Class, or train.run(.., env=Class) in Python; available: "
                             f"{', '.join(list_envs())}")  # fmt: skip
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

    @cached_property
    def _game_and_opponent(self) -> tuple["EnvSpec", str]:
        if "opponent" not in self.options:
            return self, ""
        pairs = dict(self.pairs)
        opponent = unquoted(pairs.pop("opponent", ""))
        if not OPPONENT.fullmatch(opponent):
            return self, ""
        if self.accepts("opponent"):
            pairs["opponent"] = "self"
        return self.with_pairs(pairs), opponent

    @property
    def game(self) -> "EnvSpec":
        """Of a game with an `opponent`: the game between agents; else the spec itself."""
        return self._game_and_opponent[0]

    @property
    def opponent(self) -> str:
        """The opponent that is no option of the environment; "" if there is none."""
        return self._game_and_opponent[1]

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every option of the environment with its value: from the spec, else its default.

        Raises UsageError for an unknown name or key, a repeated key, and a value of the wrong type.
        """
        spec = self.game
        try:
            parameters = inspect.signature(spec.constructor, eval_str=True).parameters.values()
        except NameError as error:  # of an annotation
            raise UsageError(f"--env {spec}: {describe_error(error)}") from error
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        others = [p for p in parameters if p.kind is p.VAR_KEYWORD]  # **kwargs
        values = {name: p.default for name, p in named.items() if p.default is not p.empty}
        for key, text in spec.pairs.items():
            if key not in named and not others:
                names = ", ".join(named) or "none"
                raise UsageError(f"--env {spec}: unknown key {key!r}; available keys: {names}")
            try:
                values[key] = convert(text, named[key] if key in named else others[0])
            except ValueError as error:
                raise UsageError(f"--env {spec}: {key} must be {error}, not {text!r}") from None
        return values

    @cached_property
    def short(self) -> str:
        """The spec without the folders of its absolute paths: its name in titles and metrics."""
        return _change_paths(self, lambda path, parts, _: short_path(path, parts))


def make(spec: str) -> Env | MultiAgentEnv:
    """Builds an environment from its spec.

    Raises UsageError for an unknown name or key, for a value that the option's type or the
    environment does not allow, and for any other exception of the constructor.
    """
    spec = EnvSpec(spec)
    env, opponent = _make(spec.game), spec.opponent
    if opponent:
        if not isinstance(env, MultiAgentEnv) or len({*env.agents}) < 2:
            raise UsageError(f"--env {spec}: an opponent needs an environment that names its "
                             '`agents`, such as agents = ("first", "second")')  # fmt: skip
        method = getattr(MultiAgentEnv, opponent, None)  # guess or demonstrate
        if method and getattr(type(env), opponent) is method:
            raise UsageError(f"--env {spec}: the environment has no `{opponent}`")
    return env


def runs_code(spec: str) -> bool:
    """Whether `make` would run code or a command that `spec` itself names. Imports nothing.

    >>> [runs_code(s) for s in ("snake", "gymnasium:id=CartPole-v1", "gymnasium:id=module:Env")]
    [False, False, True]
    """
    name = EnvSpec(spec).name
    if ":" in name or name == "rewarded":
        return True
    if not str(ENVIRONMENTS.get(name, "")).startswith("environments.adapters."):
        return False
    try:
        pairs = EnvSpec(spec).pairs
    except UsageError:
        return True
    named = {value for key, value in pairs.items() if key not in ("url", "opponent")}
    # a backslash: JSON may hide a colon
    return "command" in pairs or any({":", "\\"} & {*value} for value in named)


def absolute(spec: str) -> str:
    """The spec with absolute paths for the files, folders and modules in it that the current folder
    has. Imports nothing.
    """
    return _change_paths(spec, lambda path, _, is_code: _absolute(path, is_code))


def relative(spec: str) -> str:
    """The spec with paths from the current folder, for those that lie in it."""
    return spec.replace(f"{Path.cwd().as_posix()}/", "")


def checksums(spec: str) -> dict[str, str]:
    """SHA-256 of the files that a spec names, and of those beside them that these import, but for
    its data, by their names."""
    found, seen = dict[str, str](), set[str]()
    data = unquoted(EnvSpec(spec).pairs.get("data", ""))

    def add(path: str, *_: object) -> str:
        for file in (path, f"{path}.py"):  # a module is named without
            if path != data and file not in seen and os.path.isfile(file):
                seen.add(file)
                name, content = os.path.basename(file), Path(file).read_bytes()
                found[name] = found.get(name, "") + hashlib.sha256(content).hexdigest()
                for module in IMPORT.findall(content) if file.endswith(".py") else ():
                    beside = os.path.join(os.path.dirname(file), *module.decode().split("."))
                    add("" if beside.startswith(NOT_OWN) else beside)
        return path

    _change_paths(spec, add)
    return found


def short_path(path: str, parts: int = 2) -> str:
    """The last parts of an absolute path; any other text unchanged."""
    is_absolute = re.match(r"(?:[A-Za-z]:)?[\\/]", path)
    return "/".join(re.split(r"[\\/]", path)[-parts:]) if is_absolute else path


def variables_of_python() -> dict[str, str]:
    """Returns variables with which a new Python process imports this package."""
    paths = [os.path.dirname(HERE), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def meanings(specs: Iterable[str], trust: bool = False) -> dict[str, str]:
    """What the numbers are that these environments report, by their key in `Step.info`.

    `trust`: import the code that a spec names, too.

    >>> meanings(["letter_counting:difficulty=2", "no_such_environment"])
    {'worked': 'fraction that spell the word'}
    """
    found: dict[str, str] = {}
    for spec in specs:
        with suppress(UsageError):
            if trust or not runs_code(spec):
                found |= getattr(EnvSpec(spec).constructor, "meanings", {})
    return found


def import_attribute(name: str) -> Any:
    """Returns what FILE.py:NAME, module:NAME or FOLDER/module:NAME names. Raises UsageError."""
    source, _, attribute = name.rpartition(":")
    if not source or attribute.endswith(".py"):
        raise UsageError(f"{name} names no class or function: write FILE.py:NAME")
    module = import_source(source)
    if not hasattr(module, attribute):
        raise UsageError(f"{short_path(source, 1)} has no {attribute}")
    return getattr(module, attribute)


@restored_torch()
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


@restored_torch()
def _make(spec: EnvSpec) -> Env | MultiAgentEnv:
    options = spec.values
    try:
        env = spec.constructor(**options)
        if not isinstance(env, Env | MultiAgentEnv):
            is_gymnasium = any(kind.__module__ == "gymnasium.core" for kind in type(env).__mro__)
            hint = f"; write --env gymnasium:id={spec.name}" if is_gymnasium else ""
            raise UsageError(f"it returned {env!r:.80}, no Env and no MultiAgentEnv{hint}")
        return env
    except UsageError as error:
        raise UsageError(f"--env {spec}: {error}") from None
    except Exception as error:
        raise UsageError(f"--env {spec}: {describe_error(error)}") from error


def _change_paths(spec: str, change: Change) -> str:
    """The spec with `change` applied to its files, folders and modules, all else as written.

    The arguments of `change`: the path, how many parts of it are its name, and whether it is that
    of code, of a file or a module.
    """
    if match := _source(spec):
        spec = change(match[1], 1, True) + spec[match.end(1) :]
    read = EnvSpec(spec)
    with suppress(UsageError):  # `EnvSpec.values` says what is wrong
        pairs = read.pairs
        new = {key: _change_value(read.name, key, value, change) for key, value in pairs.items()}
        return read.with_pairs(new) if new != pairs else spec
    return spec


def _change_value(name: str, key: str, value: str, change: Change) -> str:
    """The value of an option with `change` applied to the paths in it."""
    if (name, key) == ("remote", "env"):  # a spec
        return _change_paths(value.replace(";", ","), change).replace(",", ";")
    if (name, key) == ("remote", "command") and not OWN_PROGRAM.match(value):
        return value
    parts = 2 if key == "opponent" else 1

    def change_word(match: re.Match[str]) -> str:
        word = unquoted(match[0])
        if code := CODE.fullmatch(word):
            new = f"{change(code[1], parts, True)}:{code[2]}"
        else:
            new = change(word, parts, False) if {".", "/", "\\"} & {*word} else word
        if new == word:
            return match[0]
        return json.dumps(new, ensure_ascii=False) if re.search(r"[\s,'\[\]{}]", new) else new

    # a path with spaces may be the whole value, without quotes
    words = re.compile(".+") if os.path.exists(value) else WORD
    return words.sub(change_word, value)


def _source(spec: str) -> re.Match[str] | None:
    name = spec.partition(":")[0]
    return None if name in ENVIRONMENTS else SOURCE.fullmatch(spec)


def _absolute(path: str, is_code: bool) -> str:
    found = os.path.abspath(os.path.expanduser(path))
    if is_code and not path.endswith(".py"):
        head, name = os.path.split(found)
        module = os.path.join(head, *name.split("."))
        exists = os.path.isfile(f"{module}.py") or os.path.isfile(f"{module}/__init__.py")
    else:
        exists = os.path.isfile(found) if is_code else os.path.exists(found)
    return Path(found).as_posix() if exists else path


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
    """Imports a file once. It can import the other modules of its folder.

    Its module is called like the file, so that processes which it starts can import it, too, unless
    Python finds another module of that name.
    """
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
