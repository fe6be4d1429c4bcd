"""Environments of the user: of files, modules and Python's objects, in every command."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
import yaml
from conftest import SMALL

import train
from core import tasks
from core.config import Config, resolve, validate
from core.faults import UsageError
from core.files.run_log import read_records
from core.report.summary import repeat_command
from core.settings import read_settings
from environments.base import Env, RunInfo, Step
from environments.plumbing import registry
from environments.plumbing.registry import EnvSpec, absolute, import_attribute, make, register
from environments.rewarded import of_objects

GAMES = """
from words import WORD  # a file beside this one
from environments import Env, Step

class Maze(Env):
    def __init__(self, size: int = 3, level: int = 1):
        self.size = {3: 3, 4: 4}[size]

    def reset(self, seed):
        return [{"role": "user", "content": f"{WORD} {seed} {self.size}"}]

    def step(self, response):
        return Step(None, float(len(response) % 2), True, {"correct": len(response) % 2 == 1})

def small() -> Env:
    return Maze(3)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, command):
    """A folder with games.py and the package my_envs."""
    home = tmp_path / "home"
    (home / "my_envs").mkdir(parents=True)
    for folder in (home, home / "my_envs"):
        (folder / "words.py").write_text("WORD = 'go'\n")
        (folder / "games.py").write_text(
            GAMES.replace("from words", "from my_envs.words", folder != home)
        )
    monkeypatch.chdir(home)
    monkeypatch.setattr(registry, "ENVIRONMENTS", dict(registry.ENVIRONMENTS))
    register("typed")(typed)
    registry.OBJECTS.clear()
    return home


@pytest.mark.parametrize(("spec", "name", "options"), [
    ("my_envs.games:Maze:size=4, level=2", "my_envs.games:Maze", {"level": "2", "size": "4"}),
    (r"C:\my envs\x.py:Maze", r"C:\my envs\x.py:Maze", {}),
    ("/a:b/x.py:Maze:size=4", "/a:b/x.py:Maze", {"size": "4"}),
])  # fmt: skip
def test_a_spec_is_a_name_and_options_in_any_order(spec, name, options):
    read = EnvSpec.read(spec)
    assert read == EnvSpec(name, options) and EnvSpec.read(str(read)) == read


def test_a_class_or_function_of_a_file_or_module_is_an_environment(place):
    specs = ["games.py:Maze:size=4", "my_envs/games.py:Maze:size=4", "my_envs.games:Maze:size=4"]
    for spec in [*specs, f"{place}/games.py:Maze:size=4"]:
        assert make(spec).reset(7)[0]["content"] == "go 7 4"
        assert EnvSpec.read(spec).values == {"size": 4, "level": 1}
    assert make("games.py:small").size == 3
    spec = EnvSpec.read("games.py:Maze:level=2,size=4")
    assert spec.constructor is EnvSpec.read("games.py:Maze").constructor
    assert str(tasks.with_difficulty(spec, 5)) == "games.py:Maze:size=4,level=5"
    assert str(tasks.harder(EnvSpec.read("my_envs.games:Maze"), 2)) == "my_envs.games:Maze:level=3"
    (place / "games.py").unlink()
    assert make(spec).size == 4  # a class stays with its spec


@pytest.mark.parametrize(("spec", "full"), [
    ("games:Maze", "games:Maze"),
    ("rewarded:data=rows.jsonl,reward=games.py:a games:b,weights=1 0.3",
     "rewarded:data={0}/rows.jsonl,reward={0}/games.py:a games:b,weights=1 0.3"),
    ("remote:env=games.py:Maze:size=4;level=2", "remote:env={}/games.py:Maze:size=4;level=2"),
    ("tic_tac_toe:opponent=runs/x", "tic_tac_toe:opponent={}/runs/x"),
    ("math_qa:data=math", "math_qa:data=math"),  # a name, whatever folder there is
    ("gymnasium:id=games.py:Cut-v0,words=none.py:GAME",
     "gymnasium:id={0}/games.py:Cut-v0,words=none.py:GAME"),
    ("games.py:Maze:all=[games.py, 0.5],end=rows.jsonl",
     "{0}/games.py:Maze:all=[{0}/games.py, 0.5],end=rows.jsonl"),
    ("~/games.py:Maze:map=\"größe x.py:a\",start='a b'",
     "{0}/games.py:Maze:map=\"{0}/größe x.py:a\",start='a b'"),
])  # fmt: skip
def test_a_spec_is_made_absolute_and_its_short_name_is_what_was_typed(
    place, spec, full, monkeypatch
):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(place))
    Path("runs/x").mkdir(parents=True)
    Path("math").mkdir()
    for name in ("rows.jsonl", "größe x.py"):
        Path(name).touch()
    found, full = absolute(spec), full.format(place)
    assert str(found) == full == str(absolute(full))
    assert found.short == full.replace(f"{place.as_posix()}/", "") == spec.removeprefix("~/")


def test_paths_with_spaces_are_quoted_so_that_every_option_reads_them(tmp_path, monkeypatch):
    folder = tmp_path / "my, folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("my rows.jsonl", "rewards.py"):
        Path(name).touch()
    found = absolute("rewarded:data=my rows.jsonl,reward=rewards.py:one rewards.py:two")
    assert found == absolute(str(found)) and "/" not in found.short
    assert found.values["data"] == f"{folder}/my rows.jsonl"
    assert found.values["reward"] == tuple(f"{folder}/rewards.py:{x}" for x in ("one", "two"))


def test_files_are_modules_of_their_own(place):
    (place / "other").mkdir()
    files = [place / "judges.py", place / "other" / "judges.py", place / "numpy.py"]
    for number, file in enumerate(files):
        file.write_text(f"NUMBER = {number}")
    assert [import_attribute(f"{file}:NUMBER") for file in files * 2] == [0, 1, 2] * 2
    assert sys.modules["judges"].NUMBER == 0  # which other processes import, too
    assert hasattr(sys.modules["numpy"], "array")


@pytest.mark.parametrize(("spec", "words"), [
    ("none.py:Maze", "no file none.py"), ("games.py", "FILE.py:Class"),
    ("games.py:Maze:bad", "key=value"), ("games.py:Labyrinth", "no Labyrinth"),
    ("pathlib:PurePath", "no Env"), ("Reverse", "did you mean reverse?"),
    ("games.py:Maze:size=9", "KeyError: 9 (games.py, line 7)"), ("broken.py:Maze", ".py, line 2"),
    ("my_envs/inside.py:Maze", "name my_envs.inside:NAME"),
    ("my_envs/parts/c.py:Maze", "/home, name my_envs.parts.c:NAME"),
    ("games.py:Maze:plain=5", "size, level"),
    ("typed:depth=1,depth=1", "key=value"), ("typed:mode=medium", "easy, hard"),
    ("typed:sizes=[3,x]", "list[int]"), ("typed:loud=5", "bool"), ("typed:rate=nan", "float"),
    *[(spec, spec) for spec in """letter_counting:difficulty=11 tic_tac_toe:opponent=human
        reverse:length=51 iterated_game:rounds=0 math_qa:data=gsm9k calculator:digits=10
        reward_hacking:proxy_weight=2 wikipedia_maze:n_hops=7""".split()],
])  # fmt: skip
def test_a_wrong_spec_is_one_line(place, spec, words):
    (place / "broken.py").write_text("x = 1\ndef f(:\n")
    (place / "my_envs/parts").mkdir()
    for file, dots in (("inside", "."), ("parts/c", "..")):
        (place / f"my_envs/{file}.py").write_text(f"from {dots}games import Maze\n")
    with pytest.raises(UsageError) as error:
        make(spec)
    assert "\n" not in str(error.value) and words in str(error.value)


def test_a_run_is_resumed_from_another_folder_and_after_its_environment_moved(
    place, command, tmp_path, monkeypatch
):
    code, _, err = command("--env", "games.py:Maze:size=4", *SMALL, "--run-name", "a")
    assert code == 0, err
    spec = f"{place}/games.py:Maze:size=4"
    assert yaml.safe_load((place / "runs/a/config.yaml").read_text())["env"] == [spec]
    place.rename(tmp_path / "moved")
    other = tmp_path / "other"
    other.mkdir()
    (other / "games.py").write_text("raise OSError('the wrong file')\n")
    monkeypatch.chdir(other)
    again = ["--resume", tmp_path / "moved/runs/a", "--num-updates", "2"]
    code, _, err = command(*again)
    assert code == 2 and "no file" in err and "name it again" in err
    code, _, err = command(*again, "--env", f"{tmp_path}/moved/games.py:Maze:size=4")
    assert code == 0, err
    records = read_records(tmp_path / "moved/runs/a/metrics.jsonl")
    assert records[-1]["update"] == 2 and "changed_code" not in records[-1].get("warnings", {})


def test_names_are_of_one_environment_each():
    with pytest.raises(UsageError, match="the same file name"):
        validate(resolve(Config(env=("games.py:Maze", "my_envs/games.py:Maze"))))
    with pytest.raises(UsageError, match="'reverse' exists already"):
        register("reverse")(type("Other", (Env,), {}))
    first, second = [type("Mine", (Env,), {}) for _ in range(2)]  # a notebook cell, run twice
    register("mine")(first)
    assert register("mine")(second) is second


def typed(
    start: str = "",
    depth: int | None = 3,
    mode: Literal["easy", "hard"] = "easy",
    sizes: list[int] = [],  # noqa: B006
    names: tuple[str, ...] = (),
    size: tuple[int, float] = (1, 1.0),
    grid: list[list[int]] = [],  # noqa: B006
    loud: bool | None = None,
    rate: float = 1.0,
    plain=5,
    anything: Any = None,
    weights: dict[str, float] = {},  # noqa: B006
    **others,
):
    """An environment with options of all types."""


@pytest.mark.parametrize(("text", "key", "value"), [
    ("start=Washington, D.C.", "start", "Washington, D.C."), ('start="5"', "start", "5"),
    ("start=no", "start", "no"), ("names=[no, 010]", "names", ("no", "010")),
    ("depth=7", "depth", 7), ("depth=None", "depth", None), ("mode=hard", "mode", "hard"),
    ("sizes=3 4 -5", "sizes", [3, 4, -5]), ("names='New York' b", "names", ("New York", "b")),
    ("names=[New York, 'a, b', 5]", "names", ("New York", "a, b", "5")),
    ("size=[3, 1e-3]", "size", (3, 0.001)), ("grid=[[1, 2], [3]]", "grid", [[1, 2], [3]]),
    ("loud=TRUE", "loud", True),
    ("plain=6", "plain", 6), ('weights={"a":1,b: 0.5}', "weights", {"a": 1.0, "b": 0.5}),
    ('anything=[1, "1", true, null, {"a": 1e-3}]', "anything", [1, "1", True, None, {"a": 0.001}]),
])  # fmt: skip
def test_an_option_is_converted_by_its_whole_annotation(text, key, value):
    converted = EnvSpec.read(f"typed:{text},last=5").values
    assert converted[key] == value and type(converted[key]) is type(value)
    assert converted["last"] == 5


class Turns(Env):
    """Counts the turns of its episodes, in a shared list too."""

    def __init__(self, difficulty: int = 1):
        self.difficulty, self.turns, self.shared = difficulty, 0, []

    def reset(self, seed):
        return [{"role": "user", "content": f"{seed} {self.difficulty}"}]

    def step(self, response):
        self.turns += 1
        self.shared.append(response)
        return Step(None, float(self.difficulty), True, {"correct": True})


SETTINGS = Config(
    sft_steps=0, num_prompts=2, group_size=2, eval_num_tasks=2, max_tokens=4, max_turns=1,
    device="cpu", num_updates=2, eval_every=1,
)  # fmt: skip


def test_an_environment_is_given_as_an_object_of_python_and_told_of_its_run(place, capsys):
    env, told = Turns(2), []
    copies = [make(registry.name_object(env)) for _ in range(2)]
    assert [copy.step("a").reward for copy in copies] == [2.0, 2.0]
    assert env.turns == 0 and env.shared == []  # episodes are played with copies

    class Rows(Turns):
        @classmethod
        def begin_run(cls, info):
            told.append([info])

        def reset(self, seed):
            told[-1].append(told[-1][0].updates_done)
            return super().reset(seed)

    cfg = replace(SETTINGS, run_name="a", train_difficulty=3)
    assert train.run(cfg, env=Rows) == 0
    [[info, *seen]] = told
    assert info == RunInfo(["Rows"], ["Rows"], num_updates=2, num_prompts=2, updates_done=2)
    assert [*dict.fromkeys(seen)] == [0, 1, 2] and seen == sorted(seen)
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["env"] == ["Rows"]
    repeat = repeat_command(Path("runs/a"), read_settings(Path("runs/a/config.yaml")))
    assert eval(repeat, {"train": train}) == 0 and len(told) == 2
    rollout = json.loads(Path("runs/again/rollouts.jsonl").read_text().splitlines()[0])
    assert rollout["return"] == 3.0
    capsys.readouterr()
    registry.ENVIRONMENTS.pop("Rows")  # the same resume rule as for `register`
    assert train.execute(["--resume", "runs/a", "--num-updates", "3"]) == 2
    assert "train.run" in capsys.readouterr().err


ROWS = [{"prompt": f"Say {n}.", "answer": f"{n}"} for n in range(20)]


def length(least):
    def brief(completions, answer, **columns):
        assert {*answer} <= {row["answer"] for row in ROWS}
        return [max(least, 1 - len(text) / 9) for text in completions]

    return brief


class Judge:
    def __call__(self, completions, **columns):
        return [0.5] * len(completions)


def test_rows_and_reward_functions_are_given_as_objects_of_python(place):
    functions = [length(0.5), length(0.75), Judge(), lambda completions: [0.25] * len(completions)]
    options = {"reward": functions, "weights": [1, 0, 2, 4], "correct": functions[2]}
    spec = of_objects(ROWS, **options, threshold=0.5)
    name = spec.partition("data=")[2].partition(",")[0]
    assert spec == (f"rewarded:data={name},reward=python:brief python:brief_2 python:Judge "
                    "python:reward,weights=1 0 2 4,correct=python:Judge,threshold=0.5")  # fmt: skip
    assert spec == of_objects([*map(dict, ROWS)], **options, threshold=0.5)  # the same rows
    first, same, other = ([{"by": Judge(), "of": numpy.arange(2000) == n}] for n in (900, 900, 901))
    assert of_objects(first, "") == of_objects(same, "") != of_objects(other, "")
    env = make(spec)
    env.reset(0)
    step = env.step("12345678")
    assert step.reward == 0.5 + 0 + 1.0 + 1.0
    assert step.info["correct"] and step.info["reward_brief_2"] == 0.75
    registry.OBJECTS.clear()  # as another Python
    with pytest.raises(UsageError, match="give it again"):
        make(spec)


LOCKED = Turns()
LOCKED.lock = threading.Lock()


@pytest.mark.parametrize(("given", "words"), [
    *[({"data": data, "reward": length(0)}, "list of dicts")
      for data in ({"train": ROWS}, iter(ROWS), 5, None)],
    ({"data": ROWS}, "reward="), ({"env": Turns, "data": ROWS, "reward": length(0)}, "not both"),
    ({"env": 5}, "a class derived from Env"), ({"env": LOCKED}, "cannot pickle"),
])  # fmt: skip
def test_what_is_no_environment_is_refused_in_one_line(given, words, capsys):
    assert train.run(SETTINGS, **given) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not Path("runs").exists()
