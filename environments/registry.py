"""`make(SPEC)` builds an environment from its spec, NAME[:key=value,...].

NAME is one of

    snake                     a built-in environment, or one that `register` or a package added
    my_envs.games:Maze        a class, or a function that returns an environment, of a module
    my_envs/games.py:Maze     the same of a file

Files are looked for in the current folder, modules on sys.path. The commands make a spec absolute
where they read it (`absolute`), so a run can be resumed from another folder: a module that they
find in the current folder becomes /that/folder/my_envs.games:Maze. Installed packages add names
with entry points of the group `picorl.environments`. A name that is defined twice is an error.

A value is converted to the type of its option: `size=4`, `depth=none`, `words=one two`. Write a
value with a comma as JSON: `start="Washington, D.C."`. Options of `**kwargs` are read as JSON if
they are JSON, such as true or 0.5, else as text.

The table maps each built-in name to "module:class". The module is imported when the environment is
first used, so the libraries of the other environments are not loaded.

>>> make("letter_counting:difficulty=2").reset(seed=7)[0]["role"]
'user'
"""

import difflib
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import shlex
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args, get_type_hints

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from environments.base import Env, MultiAgentEnv, UsageError

Constructor = Callable[..., Env | MultiAgentEnv]
C = TypeVar("C", bound=Constructor)

ENVIRONMENTS: dict[str, str | Constructor] = {
    "alphabet_sort": "environments.alphabet_sort:AlphabetSort",
    "calculator": "environments.calculator:Calculator",
    "connect4": "environments.connect4:connect4",
    "countdown": "environments.countdown:Countdown",
    "gymnasium": "environments.adapters.gymnasium:Gymnasium",
    "iterated_game": "environments.iterated_game:iterated_game",
    "letter_counting": "environments.letter_counting:LetterCounting",
    "math_qa": "environments.math_qa:MathQA",
    "openenv": "environments.adapters.openenv:OpenEnv",
    "pettingzoo": "environments.adapters.pettingzoo:PettingZoo",
    "reasoning_gym": "environments.adapters.reasoning_gym:ReasoningGym",
    "remote": "environments.adapters.remote:remote",
    "reverse": "environments.reverse:Reverse",
    "reverse_echo": "environments.reverse:ReverseEcho",
    "reward_hacking": "environments.reward_hacking:RewardHacking",
    "rewarded": "environments.rewarded:Rewarded",
    "snake": "environments.snake:Snake",
    "textarena": "environments.adapters.textarena:TextArena",
    "textworld": "environments.adapters.textworld:TextWorld",
    "tic_tac_toe": "environments.tic_tac_toe:tic_tac_toe",
    "wiki_search": "environments.wiki_search:WikiSearch",
    "wikipedia_maze": "environments.wikipedia_maze:WikipediaMaze",
}
GROUP = "picorl.environments"  # of the entry points of packages
# Opponents that are no option of an environment (core/extras/opponents.py): its own players,
# policies on a server, older copies of the policy, and folders
OPPONENT = re.compile(r"guess|demonstrate|(older|openai)(:.*)?|[.~].*|.*[\\/].*")
OPPONENTS = "guess, demonstrate, older:UPDATES, openai:MODEL, or a folder such as runs/x or ./x"
# module:Class, FILE.py:Class or FOLDER/module:Class with an absolute folder, then the options
SOURCE = re.compile(
    r"([\w.-]+|[^=]*?\.py|(?:[A-Za-z]:)?[\\/].*?):([^\W\d]\w*)(?::(.*))?", re.DOTALL
)
FOLDER = re.compile(r"[.~]|[^:]*[\\/]|[A-Za-z]:[\\/]")  # how the folder of an opponent begins
PATHS = [  # options of environments that name files, folders or modules
    ("", "opponent"), ("rewarded", "data"), ("rewarded", "reward"), ("remote", "env"),
    ("math_qa", "data"),
    ("gymnasium", "words"), ("pettingzoo", "words"),
]  # fmt: skip
PAIR = re.compile(r'([^,=]*)=\s*("(?:[^"\\]|\\.)*"\s*(?=,|$)|[^,]*)(,|$)')
WORDS = {"true": "True", "false": "False", "none": "None"}  # in any case, for tyro
KINDS = {int: "an integer", float: "a number", bool: "true or false"}


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
        before = ENVIRONMENTS.get(name, constructor)
        if _origin(before) != _origin(constructor) or name in _installed():
            raise UsageError(f"an environment {name!r} exists already; register another name")
        ENVIRONMENTS[name] = constructor
        return constructor

    return add


def list_envs() -> list[str]:
    """Returns the names of all environments, sorted."""
    return sorted({*ENVIRONMENTS, *_installed()})


def make(spec: str) -> Env | MultiAgentEnv:
    """Builds an environment from its spec.

    Raises UsageError for an unknown name or key, for a value that the option's type or the
    environment does not allow, and for any other exception of the constructor.
    """
    game, opponent = split_opponent(spec)
    env = _make(game)
    if opponent:
        agents, several = getattr(env, "agents", ()), isinstance(env, MultiAgentEnv)
        method = getattr(MultiAgentEnv, opponent, None)  # guess or demonstrate
        if not several:
            raise UsageError(f"--env {spec}: it has one player, so it has no opponent")
        if len(agents) < 2 or len({*agents}) < len(agents):
            raise UsageError(f"--env {spec}: an opponent needs an environment that names its "
                             '`agents`, such as agents = ("first", "second")')  # fmt: skip
        if method and getattr(type(env), opponent) is method:
            raise UsageError(f"--env {spec}: the environment has no `{opponent}`")
    return env


def split_opponent(spec: str) -> tuple[str, str]:
    """Splits off an opponent that is no option of the environment: the spec of the game between
    agents, and the opponent; "" if there is none.

    >>> split_opponent("tic_tac_toe:opponent=runs/x")
    ('tic_tac_toe:opponent=self', 'runs/x')
    >>> split_opponent("tic_tac_toe:opponent=perfect")
    ('tic_tac_toe:opponent=perfect', '')
    """
    name, options = split_spec(spec)
    if "opponent" not in options:
        return spec, ""
    pairs = key_value_pairs(options, f"--env {spec}")
    opponent = pairs.pop("opponent", "")
    with suppress(ValueError):
        opponent = str(json.loads(opponent)) if opponent.startswith('"') else opponent
    if not OPPONENT.fullmatch(opponent):
        return spec, ""
    if accepts(spec, "opponent"):
        pairs["opponent"] = "self"
    game = ":".join(filter(None, [name, ",".join(f"{k}={v}" for k, v in pairs.items())]))
    if "opponent" in pairs and not _plays_itself(constructor(spec), game):
        return spec, ""  # an opponent of its own, such as the file of an engine
    return game, opponent


def accepts(spec: str, key: str) -> bool:
    """Whether the environment of `spec` has an option `key`."""
    return key in inspect.signature(constructor(spec)).parameters


def options_of(spec: str) -> dict[str, Any]:
    """Returns every option of the environment with its value: from `spec`, else its default.

    Raises UsageError for an unknown name or key, a missing or repeated key, and a value of the
    wrong type.

    >>> options_of("reverse:length=7")
    {'kind': 'words', 'turns': 3, 'length': 7}
    """
    spec = split_opponent(spec)[0]
    build = constructor(spec)
    try:
        parameters = dict(inspect.signature(build, eval_str=True).parameters)
    except Exception as error:  # an annotation that Python cannot evaluate
        raise UsageError(f"--env {spec}: {describe_error(error)}") from error
    several = [k for k, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    other = [p for k in several if (p := parameters.pop(k)).kind is p.VAR_KEYWORD]  # **kwargs
    given: dict[str, Any] = {}
    for key, text in key_value_pairs(split_spec(spec)[1], f"--env {spec}").items():
        if key not in parameters and not (other and key.isidentifier()):
            names = ", ".join(parameters) or "none"
            hint = f"; opponents of any game: {OPPONENTS}" if key == "opponent" else ""
            raise UsageError(f"--env {spec}: unknown key {key!r}; available keys: {names}{hint}")
        try:
            given[key] = _convert(text, parameters[key] if key in parameters else other[0])
        except ValueError as error:
            raise UsageError(f"--env {spec}: {key} must be {error}, not {text!r}") from None
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in given]
    if missing:
        raise UsageError(f"--env {spec}: set {', '.join(f'{key}=..' for key in missing)}")
    return {key: p.default for key, p in parameters.items()} | given


def split_spec(spec: str) -> tuple[str, str]:
    """Returns the name in `spec` (module:Class if it is imported) and the text of the options.

    >>> split_spec("snake:size=5"), split_spec("C:/my/games.py:Maze:size=4,url=http://a")
    (('snake', 'size=5'), ('C:/my/games.py:Maze', 'size=4,url=http://a'))
    """
    name, _, options = spec.partition(":")
    match = _source(spec)
    return (f"{match[1]}:{match[2]}", match[3] or "") if match else (name, options)


def is_imported(spec: str) -> bool:
    """Whether `spec` names a class, or functions, of a module or of a file."""
    name = split_spec(spec)[0]
    return ":" in name or name == "rewarded"


def runs_code(spec: str) -> bool:
    """Whether `make` would run code or a command that `spec` itself names. Imports nothing.

    >>> [runs_code(s) for s in ("snake", "gymnasium:id=CartPole-v1", "gymnasium:id=module:Env")]
    [False, False, True]
    """
    name, options = split_spec(spec)
    adapter = str(ENVIRONMENTS.get(name, "")).startswith("environments.adapters.")
    try:
        pairs = key_value_pairs(options, spec) if adapter else {}
    except UsageError:
        return True
    named = {value for key, value in pairs.items() if key not in ("url", "opponent")}
    # a backslash: JSON may hide a colon
    return is_imported(spec) or "command" in pairs or any({":", "\\"} & {*v} for v in named)


def absolute(spec: str, folder: str = "") -> str:
    """The spec with absolute paths for the files, folders and modules in it that `folder` has.

    Imports nothing. `folder`: by default the current one.
    """
    return _change_paths(spec, lambda path, _: _absolute(path, folder))


def relative(spec: str) -> str:
    """The spec with paths from the current folder, for those that lie in it."""
    here = f"{Path.cwd().as_posix()}/"
    return _change_paths(spec, lambda path, _: path.removeprefix(here))


def short(spec: str) -> str:
    """The spec without the folders of its absolute paths: the name in titles, tables and metrics.

    >>> short("/home/me/games.py:Maze:size=4"), short("tic_tac_toe:opponent=/home/me/runs/x")
    ('games.py:Maze:size=4', 'tic_tac_toe:opponent=runs/x')
    """
    return _change_paths(spec, short_path)


def short_path(path: str, parts: int = 2) -> str:
    """The last parts of an absolute path; any other text unchanged."""
    is_absolute = re.match(r"(?:[A-Za-z]:)?[\\/]", path)
    return "/".join(re.split(r"[\\/]", path)[-parts:]) if is_absolute else path


def variables_of_python() -> dict[str, str]:
    """Returns variables with which a new Python process imports this package."""
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def key_value_pairs(text: str, subject: str) -> dict[str, str]:
    """Splits `key=value,...`. Raises UsageError, which begins with `subject`, for other texts.

    A value in double quotes may contain commas. It keeps its quotes.

    >>> key_value_pairs('length=7, start="Washington, D.C."', "--env")
    {'length': '7', 'start': '"Washington, D.C."'}
    """
    pairs: dict[str, str] = {}
    position, comma = 0, ""
    while position < len(text) or comma:
        match = PAIR.match(text, position)
        if match is None:
            item = text[position:].partition(",")[0]
            if not item.strip():
                raise UsageError(f"{subject}: remove the extra comma")
            raise UsageError(f"{subject}: write options as key=value, not {item!r}")
        key, value, comma = match[1].strip(), match[2].strip(), match[3]
        if key in pairs:
            raise UsageError(f"{subject}: the key {key!r} is given twice")
        pairs[key], position = value, match.end()
    return pairs


def split_words(text: str) -> list[str]:
    """As shlex.split, but a backslash stands for itself. Raises ValueError for an open quote.

    >>> split_words(r"C:\\me\\rewards.py:accuracy 'my rewards.py:brief'")
    ['C:\\\\me\\\\rewards.py:accuracy', 'my rewards.py:brief']
    """
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""
    return list(lexer)


def read_literal(text: str) -> Any:
    """Returns the value of a JSON text, such as a number or a boolean; any other text unchanged.

    >>> [read_literal(text) for text in ("8", "true", "False", "8x8")]
    [8, True, False, '8x8']
    """
    try:
        return json.loads({"True": "true", "False": "false"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def constructor(spec: str) -> Constructor:
    """Returns the class or function that builds the environment of `spec`.

    Raises UsageError for an unknown name, and if the module or file cannot be imported.
    """
    name, points = split_spec(spec)[0], _installed().get(split_spec(spec)[0], [])
    if len(points) + (name in ENVIRONMENTS) > 1:
        packages = ", ".join(point.dist.name for point in points if point.dist)
        raise UsageError(f"--env {spec}: several environments have the name {name!r}, also in "
                         f"{packages}; write module:Class")  # fmt: skip
    entry = points[0].value if points else ENVIRONMENTS.get(name, name)
    if not isinstance(entry, str):
        return entry
    source, _, attribute = entry.rpartition(":")
    if name in ENVIRONMENTS:
        return getattr(importlib.import_module(source), attribute)
    if not source and re.match(r"[^=]*\.py\b", spec):
        raise UsageError(f"--env {spec}: write FILE.py:Class or FILE.py:Class:key=value,..")
    if not source:
        similar = difflib.get_close_matches(name.strip().lower(), list_envs(), n=1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        names = ", ".join(list_envs())
        raise UsageError(f"unknown environment {name!r}; {hint}available: {names}")
    try:
        return import_attribute(source, attribute, Env, MultiAgentEnv)
    except UsageError as error:
        raise UsageError(f"--env {spec}: {error}") from error


def import_attribute(source: str, attribute: str, *bases: type) -> Any:
    """Returns `attribute` of a module, FOLDER/module, or a file that ends in .py.

    Raises UsageError if it cannot be imported, or if `bases` are given and it is neither a class
    derived from one of them nor a function annotated to return one.
    """
    try:
        folder, _, name = source.rpartition("/")
        if source.endswith(".py"):
            module = import_file(find_file(source))
        else:
            _add_to_path(folder)
            module = importlib.import_module(name)
        found = getattr(module, attribute)
        returned = found
        if bases and inspect.isroutine(found):
            returned = get_type_hints(found).get("return")
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(describe_error(error)) from error
    types = [kind for kind in get_args(returned) or [returned] if isinstance(kind, type)]
    if bases and not any(issubclass(kind, bases) for kind in types):
        names = " or ".join(base.__name__ for base in bases)
        raise UsageError(f"{attribute} must be a class derived from {names}, or a function with "
                         "such a return annotation")  # fmt: skip
    return found


def describe_error(error: BaseException) -> str:
    """The error in one line, with the file and the line of code that raised it."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    if isinstance(error, SyntaxError) or not own:
        return text  # a SyntaxError names both
    return f"{text} ({Path(own[-1].filename).name}, line {own[-1].lineno})"


def find_file(path: str) -> Path:
    """Returns the absolute path of a file."""
    if (file := Path(os.path.expanduser(path))).is_file():
        return file.resolve()
    hint = "; if it moved, name it again" if os.path.isabs(path) else f" in {Path.cwd()}"
    raise UsageError(f"there is no file {path}{hint}")


def _make(spec: str) -> Env | MultiAgentEnv:
    options = options_of(spec)
    try:
        return constructor(spec)(**options)
    except UsageError as error:
        raise UsageError(f"--env {spec}: {error}") from None
    except Exception as error:
        raise UsageError(f"--env {spec}: {describe_error(error)}") from error


@cache
def _plays_itself(build: Constructor, game: str) -> bool:
    """Whether the environment has agents that opponents can play; builds it once."""
    try:
        return isinstance(_make(game), MultiAgentEnv)
    except UsageError:
        return False


def _change_paths(spec: str, change: Callable[[str, int], str]) -> str:
    """The spec with `change` applied to its files, folders and modules, all else as written.

    The second argument of `change`: how many parts of the path name it.
    """
    spec = _change_source(spec, change)
    name, options = split_spec(spec)
    keys, new = {key for environment, key in PATHS if environment in (name, "")}, {}
    try:
        pairs = key_value_pairs(options, spec) if options else {}
        for key in keys & {*pairs}:
            value = pairs[key]
            with suppress(ValueError):
                value = str(json.loads(value)) if value.startswith('"') else value
            if key == "opponent":
                changed = change(value, 2) if FOLDER.match(value) else value
            elif key == "data":
                is_path = name == "rewarded" or "." in value  # math_qa:data=math is a name
                changed = change(value, 1) if is_path else value
            elif key == "reward":
                words = [_change_source(word, change) for word in split_words(value)]
                changed = " ".join(map(shlex.quote, words))
            else:
                changed = _change_source(value, change)
            if changed != value:
                new[key] = json.dumps(changed, ensure_ascii=False) if "," in changed else changed
    except ValueError:  # `options_of` says what is wrong
        return spec
    return f"{name}:{','.join(f'{k}={v}' for k, v in (pairs | new).items())}" if new else spec


def _change_source(text: str, change: Callable[[str, int], str]) -> str:
    match = _source(text)
    return change(match[1], 1) + text[match.end(1) :] if match else text


def _source(spec: str) -> re.Match[str] | None:
    name = spec.partition(":")[0]
    return None if name in ENVIRONMENTS or name in _installed() else SOURCE.fullmatch(spec)


def _absolute(path: str, folder: str) -> str:
    found = Path(folder, os.path.expanduser(path))
    package = found.parent / found.name.partition(".")[0]  # of a module
    if found.exists() or package.is_dir() or package.with_suffix(".py").is_file():
        return Path(os.path.abspath(found)).as_posix()
    return path


def _add_to_path(folder: str) -> None:
    if folder and folder not in sys.path:
        sys.path.append(folder)


def import_file(file: Path) -> ModuleType:
    """Imports a file once. It can import the other modules of its folder."""
    name = str(file).replace(".", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader
        _add_to_path(str(file.parent))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


@cache
def _installed() -> dict[str, list[EntryPoint]]:
    """The entry points of installed packages by name."""
    found: dict[str, list[EntryPoint]] = defaultdict(list)
    for point in entry_points(group=GROUP):
        found[point.name].append(point)
    return dict(found)


def _origin(entry: str | Constructor) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"


def _convert(text: str, parameter: inspect.Parameter) -> Any:
    """Returns a value as its parameter's type; for a type without a text form the text itself.

    Raises ValueError with a description of the type.
    """
    kind, quoted = parameter.annotation, False
    if kind is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
        has_type = parameter.default not in (None, parameter.empty)
        kind = type(parameter.default) if has_type else str
    with suppress(ValueError):
        text, quoted = (json.loads(text), True) if text.startswith('"') else (text, False)
    if kind in (Any, parameter.empty):
        return text if quoted else read_literal(text)
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    if not isinstance(spec, PrimitiveConstructorSpec):
        return text
    words = [text] if spec.nargs == 1 else split_words(text)
    for choice in (words, [WORDS.get(word.lower(), word) for word in words]):
        if spec.choices is None or set(choice) <= set(spec.choices):
            with suppress(ValueError, IndexError, AssertionError):
                value = spec.instance_from_str(choice)
                if not isinstance(value, float) or math.isfinite(value):
                    return value
    choices = f"one of {', '.join(spec.choices)}" if spec.choices else f"of type {kind}"
    raise ValueError(KINDS.get(kind, choices))
