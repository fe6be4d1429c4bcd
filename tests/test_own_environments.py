"""Environments of the user: of files, modules and installed packages, in every command."""

import hashlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from conftest import SMALL

import train
from core import tasks
from core.config import Config, resolve, validate
from core.faults import UsageError
from core.files.run_log import read_records
from core.report.summary import repeat_command
from core.settings import config_to_dict, read_settings
from environments.base import Env, Step
from environments.plumbing import registry
from environments.plumbing.registry import (
    ENVIRONMENTS,
    EnvSpec,
    absolute,
    checksums,
    import_attribute,
    make,
    register,
    relative,
)

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
    monkeypatch.setattr(registry, "ENVIRONMENTS", dict(ENVIRONMENTS))
    return home


@pytest.mark.parametrize(("spec", "name", "options"), [
    ("snake", "snake", {}), ("my_envs.games:Maze:size=4", "my_envs.games:Maze", {"size": "4"}),
    (r"C:\my envs\x.py:Maze", r"C:\my envs\x.py:Maze", {}),
    ("/a:b/c=d/x.py:Maze:size=4", "/a:b/c=d/x.py:Maze", {"size": "4"}),
])  # fmt: skip
def test_a_spec_is_read_as_a_name_and_options_and_written_as_it_was(spec, name, options):
    read = EnvSpec.read(spec)
    assert (read.name, read.options) == (name, options)
    assert str(read) == spec and EnvSpec.read(read) is read


def test_a_built_in_name_stays_the_built_in_environment():
    with pytest.raises(UsageError, match="write options as key=value, each once, not 'Maze'"):
        EnvSpec.read("snake:Maze")


def test_specs_are_equal_if_they_say_the_same():
    one, same, other = map(
        EnvSpec.read, ("snake:size=4, fruits=2", "snake:fruits=2,size=4", "snake")
    )
    assert one == same != other and {one: 1}[same] == 1
    assert str(one) == "snake:size=4,fruits=2"


def test_a_class_or_function_of_a_file_or_module_is_an_environment(place, monkeypatch):
    monkeypatch.syspath_prepend(place)
    specs = ["games.py:Maze:size=4", "my_envs/games.py:Maze:size=4", "my_envs.games:Maze:size=4"]
    for spec in [*specs, f"{place}/games.py:Maze:size=4"]:
        assert (
            make(spec).reset(7)[0]["content"] == "go 7 4" and EnvSpec.read(spec).values["size"] == 4
        )
    assert make("games.py:small").size == 3
    build = EnvSpec.read("games.py:Maze").constructor
    assert build is EnvSpec.read("games.py:Maze:size=4").constructor
    spec = EnvSpec.read("games.py:Maze:level=2,size=4")
    assert str(tasks.with_difficulty(spec, 5)) == "games.py:Maze:size=4,level=5"
    assert str(tasks.harder(EnvSpec.read("my_envs.games:Maze"), 2)) == "my_envs.games:Maze:level=3"


@pytest.mark.parametrize(("spec", "full"), [
    ("games.py:Maze:size=4", "{}/games.py:Maze:size=4"),
    ("my_envs.games:Maze", "{}/my_envs.games:Maze"),  # the folder to import from, and the module
    ("rewarded:data=rows.jsonl,reward=games.py:a games:b,weights=1 0.3",
     "rewarded:data={0}/rows.jsonl,reward={0}/games.py:a {0}/games:b,weights=1 0.3"),
    ("remote:env=games.py:Maze:size=4;level=2", "remote:env={}/games.py:Maze:size=4;level=2"),
    ("tic_tac_toe:opponent=runs/x", "tic_tac_toe:opponent={}/runs/x"),
    ("math_qa:data=math", "math_qa:data=math"),  # a name, whatever folder there is
    ("gymnasium:id=games:Cut-v0,words=games.py:GAME",
     "gymnasium:id={0}/games:Cut-v0,words={0}/games.py:GAME"),
    ("remote:command=python -u games.py --file rows.jsonl",
     "remote:command=python -u {0}/games.py --file {0}/rows.jsonl"),
    ("remote:command=docker run -i math games.py", "remote:command=docker run -i math games.py"),
    ("games.py:Maze:map=rows.jsonl,all=[rows.jsonl, 0.5],end=.",
     "{0}/games.py:Maze:map={0}/rows.jsonl,all=[{0}/rows.jsonl, 0.5],end={0}"),
])  # fmt: skip
def test_a_spec_is_made_absolute_and_its_short_name_is_what_was_typed(place, spec, full):
    Path("runs/x").mkdir(parents=True)
    Path("math").mkdir()
    Path("rows.jsonl").touch()
    found, full = absolute(spec), full.format(place)
    assert str(found) == full == str(absolute(full))
    if not spec.endswith("end=."):
        assert found.short == relative(full) == spec


def test_the_home_folder_and_names_with_accents_are_paths_and_other_quotes_stay(place, monkeypatch):
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("USERPROFILE", str(place))
    (place / "größe x.jsonl").touch()
    found = absolute('~/games.py:Maze:map="größe x.jsonl",start=\'a b\',end="./none"')
    assert str(found) == (
        f'{place}/games.py:Maze:map="{place}/größe x.jsonl",start=\'a b\',end="./none"'
    )


def test_settings_have_specs_as_values_and_their_file_as_texts(place):
    cfg = resolve(Config(env=("games.py:Maze:size=4",), eval_env=("snake",)))
    assert cfg.env == (EnvSpec(f"{place}/games.py:Maze", {"size": "4"}),)
    assert resolve(cfg) == cfg
    saved = config_to_dict(cfg)
    assert saved["env"] == [f"{place}/games.py:Maze:size=4"] and saved["eval_env"] == ["snake"]


def test_a_class_stays_with_its_spec_when_its_file_goes(place):
    spec = absolute("games.py:Maze")
    assert make(spec).size == 3
    (place / "games.py").unlink()
    assert make(spec).size == 3
    with pytest.raises(UsageError, match="there is no file"):
        make(str(spec))


def test_settings_refuse_two_files_of_one_name_and_unprintable_names(place):
    for specs, line in [
        (("games.py:Maze", "my_envs/games.py:Maze"), "two environments have the same file name"),
        (("games.py:Maze:plain=\a",), "--env has unprintable characters"),
    ]:
        with pytest.raises(UsageError, match=line):
            validate(resolve(Config(env=specs)))


def test_paths_with_spaces_are_quoted_so_that_every_option_reads_them(tmp_path, monkeypatch):
    folder = tmp_path / "my, folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my rows.jsonl").write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(60)))
    (folder / "rewards.py").write_text(
        "def one(completions):\n    return [1.0 for _ in completions]\n"
        "def two(completions):\n    return [2.0 for _ in completions]\n"
    )
    found = absolute("rewarded:data=my rows.jsonl,reward=rewards.py:one rewards.py:two")
    assert found == absolute(str(found)) and str(folder) in str(found)
    monkeypatch.chdir("/")
    env = make(found)
    env.reset(0)
    assert env.step("?").reward == 3.0 and "/" not in found.short


POOLED = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
def score(text):
    return 2.0 * len(text)
def in_pool(texts):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(score, texts))
"""


def test_a_file_may_start_processes_that_import_it(place):
    (place / "pooled.py").write_text(POOLED)
    assert import_attribute(f"{place}/pooled.py:in_pool")(["a", "abc"]) == [2.0, 6.0]


def test_files_of_one_name_and_that_of_a_module_are_different_modules(place):
    (place / "other").mkdir()
    files = [place / "judges.py", place / "other" / "judges.py", place / "numpy.py"]
    for number, file in enumerate(files):
        file.write_text(f"NUMBER = {number}")
    assert [import_attribute(f"{file}:NUMBER") for file in files * 2] == [0, 1, 2] * 2
    assert sys.modules["judges"].NUMBER == 0 and hasattr(sys.modules["numpy"], "array")


def test_a_thread_waits_for_a_file_that_another_one_imports(place):
    """As agents of several threads do, whose framework is imported for seconds."""
    begun, go_on = threading.Event(), threading.Event()
    sys.begun, sys.go_on = begun, go_on
    file = place / "slow_to_import.py"
    file.write_text("import sys\nsys.begun.set()\nsys.go_on.wait()\nNUMBER = 7\n")
    try:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(import_attribute, f"{file}:NUMBER")
            begun.wait()
            second = pool.submit(import_attribute, f"{file}:NUMBER")
            wait([second], timeout=0.2)
            go_on.set()
        assert [first.result(), second.result()] == [7, 7]
    finally:
        del sys.begun, sys.go_on


@pytest.mark.parametrize(("spec", "words"), [
    ("none.py:Maze", ["no file none.py"]), ("games.py", ["FILE.py:Class"]),
    ("games.py:Maze:bad", ["write options as key=value"]),
    ("my_envs/games:Maze", ["unknown environment 'my_envs/games'", "FILE.py:Class"]),
    ("games.py:Labyrinth", ["games.py has no Labyrinth"]),
    ("pathlib:PurePath", ["it returned Pure"]), ("Snake", ["did you mean snake?"]),
    ("games.py:Maze:size=9", ["KeyError: 9", "games.py, line 7"]),
    ("broken.py:Maze", ["SyntaxError", "broken.py, line 2"]),
])  # fmt: skip
def test_what_cannot_be_imported_or_built_is_one_line(place, spec, words):
    (place / "broken.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(UsageError) as error:
        make(spec)
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


def test_a_run_is_resumed_from_another_folder_and_after_its_environment_moved(
    place, command, tmp_path, monkeypatch
):
    code, _, err = command("--env", "games.py:Maze:size=4", *SMALL, "--run-name", "a")
    assert code == 0, err
    run = place / "runs/a"
    spec = f"{place}/games.py:Maze:size=4"
    assert yaml.safe_load((run / "config.yaml").read_text())["env"] == [spec]
    other = tmp_path / "other"
    other.mkdir()
    (other / "games.py").write_text("raise OSError('the wrong file')\n")
    monkeypatch.chdir(other)
    again = ["--resume", run, "--num-updates", "2"]
    code, _, err = command(*again)
    assert code == 0, err
    place.rename(tmp_path / "moved")
    again = ["--resume", tmp_path / "moved/runs/a", "--num-updates", "3"]
    code, _, err = command(*again)
    assert code == 2 and "no file" in err and "name it again" in err
    code, _, err = command(*again, "--env", f"{tmp_path}/moved/games.py:Maze:size=4")
    assert code == 0, err


def test_checksums_are_those_of_the_environment_and_of_reward_functions(place):
    (place / "rewards.py").write_text("import words\n")
    (place / "rows.jsonl").touch()
    spec = absolute("rewarded:data=rows.jsonl,reward=rewards.py:a rewards.py:b")
    assert checksums(spec).keys() == {"rewards.py"} and checksums(absolute("snake:size=4")) == {}
    before = checksums(absolute("games.py:Maze"))
    assert before == {"games.py": hashlib.sha256((place / "games.py").read_bytes()).hexdigest()}


def test_a_resume_says_that_code_was_edited_and_compares_no_more(place, command):
    code, _, err = command("--env", "games.py:Maze", *SMALL, "--eval-every", 1, "--run-name", "a")
    assert code == 0, err
    said = []
    for update in (2, 3):
        if update == 2:
            (place / "games.py").write_text(f"{GAMES}# edited\n")
        code, out, err = command("--resume", "a", "--num-updates", str(update))
        assert code == 0, err
        said.append(f"games.py changed since update {update - 1}" in out)
    assert said == [True, False]
    records = read_records(place / "runs/a/metrics.jsonl")
    compared = [any("p_value" in key for key in record) for record in records]
    noted = ["changed_code" in record.get("warnings", {}) for record in records]
    assert compared == [True, True, False, False] and noted == [False, False, True, False]


def test_an_error_in_a_library_names_the_users_own_line(place, monkeypatch):
    """The library lies outside site-packages, as an editable one does; so does the user's file."""
    library, elsewhere = place.parent / "src", place.parent / "elsewhere"
    for name in (library, elsewhere):
        name.mkdir()
    (library / "checkout.py").write_text("def f(x):\n\n\n    return int(x)\n")
    (elsewhere / "uses.py").write_text("import checkout\n\ndef g():\n    checkout.f('x')\n")
    monkeypatch.syspath_prepend(library)
    function = registry.import_attribute("../elsewhere/uses.py:g")
    with pytest.raises(ValueError) as raised:
        function()
    assert registry.place_of(raised.value) == " (uses.py, line 4)"


def test_a_space_in_place_of_the_colon_is_one_line_that_says_what_to_write(command):
    for name in ("--env", "--eval-env"):
        code, out, err = command(name, "snake", "letter_counting:difficulty=2", "words=a")
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert 'write snake "letter_counting:difficulty=2,words=a"' in err


def test_the_name_of_a_built_in_environment_is_taken():
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
    path: Path = Path(),
    loud: bool | None = None,
    plain=5,
    anything: Any = None,
    weights: dict[str, float] = {},  # noqa: B006
    **others,
):
    """An environment with options of all types."""


@pytest.mark.parametrize(("text", "key", "value"), [
    ("start=Washington, D.C.", "start", "Washington, D.C."), ('start="5"', "start", "5"),
    ("start=[a-z]+", "start", "[a-z]+"), ("start=O'Hare", "start", "O'Hare"),
    ("depth=7", "depth", 7), ("depth=None", "depth", None), ("mode=hard", "mode", "hard"),
    ("sizes=3 4 -5", "sizes", [3, 4, -5]), ("names='New York' b", "names", ("New York", "b")),
    ("names=[New York, 'a, b', 5]", "names", ("New York", "a, b", "5")),
    ("path=a b/c.json", "path", Path("a b/c.json")), ("loud=TRUE", "loud", True),
    ("plain=6", "plain", 6), ('weights={"a":1,b: 0.5}', "weights", {"a": 1.0, "b": 0.5}),
    ("anything=[1, '1', true, null, {a: [+,*,1e-3]}]", "anything",
     [1, "1", True, None, {"a": ["+", "*", 0.001]}]),
])  # fmt: skip
def test_an_option_is_converted_by_its_whole_annotation(text, key, value):
    register("typed")(typed)
    converted = EnvSpec.read(f"typed:{text},other=5").values[key]
    assert converted == value and type(converted) is type(value)


@pytest.mark.parametrize(("spec", "words"), [
    ("typed:depth", ["key=value", "'depth'"]), ("typed:depth=1,depth=1", ["key=value"]),
    ("snake:sizes=3", ["'sizes'", "size, fruits"]), ("typed:mode=medium", ["easy", "hard"]),
    ("typed:sizes=[3,x]", ["sizes", "list[int]", "'[3,x]'"]),
    ("typed:weights={a:1}", ["dict[str, float]"]),
])  # fmt: skip
def test_a_wrong_name_option_or_value_is_one_line(spec, words):
    register("typed")(typed)
    with pytest.raises(UsageError) as error:
        assert EnvSpec.read(spec).values
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words)


def test_other_keys_are_passed_on_to_kwargs_as_json_or_text():
    register("typed")(typed)
    values = EnvSpec.read(
        'typed:map=8x8,slippery=false,size=4,name="5",rows=["SF","FG"],depth=1'
    ).values
    others = {"map": "8x8", "slippery": False, "size": 4, "name": "5", "rows": ["SF", "FG"]}
    assert values | others == values


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


def settings(**changes):
    return Config(
        sft_steps=0, num_prompts=2, group_size=2, eval_num_tasks=2, max_tokens=4, max_turns=1,
        device="cpu", **({"num_updates": 1} | changes),
    )  # fmt: skip


def first_return(run):
    return json.loads(Path(run, "rollouts.jsonl").read_text().splitlines()[0])["return"]


def test_an_environment_is_given_as_an_object_of_python(place, capsys):
    env = Turns(2)
    assert train.run(settings(run_name="object"), env=env) == 0
    assert first_return("runs/object") == 2.0
    assert env.turns == 0 and env.shared == []  # episodes are played with copies
    assert train.run(settings(run_name="a", train_difficulty=3), env=Turns) == 0
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["env"] == ["Turns"]
    assert first_return("runs/a") == 3.0
    assert train.run(Config(resume="runs/a", num_updates=2), env=Turns) == 0
    assert read_records(Path("runs/a/metrics.jsonl"))[-1]["update"] == 2
    repeat = repeat_command(Path("runs/a"), read_settings(Path("runs/a/config.yaml")))
    assert eval(repeat, {"train": train}) == 0 and first_return("runs/again") == 3.0
    capsys.readouterr()
    registry.ENVIRONMENTS.pop("Turns")  # the same resume rule as for `register`
    assert train.execute(["--resume", "runs/a", "--num-updates", "3"]) == 2
    assert "train.run" in capsys.readouterr().err


def test_a_class_is_told_once_of_its_run_and_reads_how_far_that_is(place):
    told = []

    class Rows(Turns):
        @classmethod
        def begin_run(cls, info):
            assert not told
            told.append([info])

        def reset(self, seed):
            told[0].append(told[0][0].updates_done)
            return super().reset(seed)

    assert train.run(settings(num_updates=2, eval_every=1), env=Rows) == 0
    [[info, *seen]] = told
    assert [*info.train_envs] == [*info.eval_envs] == ["Rows"] and info.num_updates == 2
    assert [*dict.fromkeys(seen)] == [0, 1, 2] and seen == sorted(seen)


def test_an_object_that_cannot_be_copied_is_given_as_a_function(place, capsys):
    env = Turns()
    env.lock = threading.Lock()
    assert train.run(settings(run_name="lock"), env=env) == 2
    assert "give a function that returns a new one" in capsys.readouterr().err
    assert train.run(settings(run_name="lock"), env=lambda: env) == 0


def test_two_runs_in_one_process_come_one_after_the_other(place, capsys):
    """Both would set the process's random states; a run inside another one stands for a thread."""
    codes = []

    class Inner(Turns):
        def reset(self, seed):
            if not codes:
                codes.append(0)
                codes.append(train.run(settings(run_name="inner")))
            return super().reset(seed)

    assert train.run(settings(run_name="outer"), env=Inner) == 0 and codes == [0, 2]
    assert "another run of this process goes on" in capsys.readouterr().err
    assert train.run(settings(run_name="inner")) == 0


def test_rows_and_reward_functions_are_given_as_objects_of_python(place, capsys):
    rows, calls = [{"prompt": f"Say {n}.", "answer": f"{n}"} for n in range(20)], []

    def length(least):
        def brief(completions, answer, **columns):
            calls.append(answer)
            return [max(least, 1 - len(text) / 9) for text in completions]

        return brief

    class Judge:
        def __call__(self, completions, **columns):
            return [0.5] * len(completions)

    functions = [
        length(0.5),
        length(0.75),
        Judge(),
        lambda completions: [0.25 for _ in completions],
    ]
    options = {"reward": functions, "weights": [1, 0, 2, 4], "correct": functions[2]}
    options |= {"threshold": 0.5}
    assert train.run(settings(run_name="given"), data=rows, **options) == 0
    assert {answer for batch in calls for answer in batch} <= {row["answer"] for row in rows}
    [spec] = yaml.safe_load(Path("runs/given/config.yaml").read_text())["env"]
    name = spec.partition("data=")[2].partition(",")[0]
    assert spec == (f"rewarded:data={name},reward=python:brief python:brief_2 python:Judge "
                    "python:reward,weights=1 0 2 4,correct=python:Judge,threshold=0.5")  # fmt: skip
    info = json.loads(Path("runs/given/rollouts.jsonl").read_text().splitlines()[0])["info"]
    assert info["reward_Judge"] == 0.5 and info["correct"] and info["reward_brief_2"] >= 0.75

    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(rows)  # the same rows
    again = Config(resume="runs/given", num_updates=2)
    assert train.run(again, data=data, **options) == 0
    assert read_records(Path("runs/given/metrics.jsonl"))[-1]["update"] == 2
    capsys.readouterr()
    registry.OBJECTS.clear()  # as another Python
    assert train.execute(["--resume", "runs/given", "--num-updates", "3"]) == 2
    assert "give it again, train.run(.., data=.., reward=..)" in capsys.readouterr().err

    for wrong in (datasets.DatasetDict(train=data), iter(rows), 5, None):
        assert train.run(settings(), data=wrong, reward=functions) == 2
        err = capsys.readouterr().err
        assert "give a datasets.Dataset or a list of dicts" in err and err.count("\n") == 1
    assert train.run(settings(), data=rows) == 2
    assert "set data=FILE.jsonl and reward=" in capsys.readouterr().err
    assert train.run(settings(), env=Turns, data=rows, reward=functions) == 2
    assert "env= or data=, not both" in capsys.readouterr().err


def test_what_is_no_environment_is_refused_in_one_line(capsys):
    assert train.run(settings(), env=5) == 2
    err = capsys.readouterr().err
    assert "a class derived from Env" in err and err.count("\n") == 1 and not Path("runs").exists()
