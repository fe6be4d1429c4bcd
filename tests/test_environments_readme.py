"""environments/README.md: its table, its numbers, its code and its commands."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import train
from core import config
from core.algorithm import options_of
from core.files.run_log import read_records
from core.other_names import ADVICE, OTHER_NAMES
from environments.plumbing.check import check_env
from environments.plumbing.registry import EnvSpec, list_envs, make

TEMPLATE = Path(__file__).parent.parent / "environments/template.py"
README = (Path(__file__).parent.parent / "environments/README.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in README.splitlines()
    if line.startswith("| `") and line.count("|") == 5
]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(text):
    """The one example with this text."""
    (found,) = [code for code in BLOCKS if text in code]
    return found


def test_table_lists_every_environment_with_its_options_and_defaults():
    names = [row[0].strip("`") for row in ROWS]
    ours = [
        name
        for name in list_envs()
        if EnvSpec.read(name).constructor.__module__.startswith("environments")
    ]
    assert sorted(names) == ours
    for name, row in zip(names, ROWS, strict=True):
        listed = re.findall(r"`(\w+)=([^`]*)`", row[2]) or "as `reverse`" in row[2]
        defaults = {k: str(v).lower() if v in (True, False) and type(v) is bool else str(v)
                    for k, v in EnvSpec.read(name).values.items()}  # fmt: skip
        assert listed is True or dict(listed) == defaults, name


@pytest.mark.parametrize("name", ["Parity", "HigherLower", "Nim", "Shop"])
def test_an_example_has_no_problem_outside_the_repository(name, command):
    text = block("class Shop") if name == "Shop" else TEMPLATE.read_text(encoding="utf-8")
    Path("my_envs.py").write_text(text, encoding="utf-8")
    report = check_env(f"my_envs.py:{name}", 5, other_process=False)
    assert not report.problems
    assert name != "Shop" or report.longest == 2  # a call of the tool, then the answer


@pytest.mark.parametrize(("text", "spec", "opening", "actions"), [
    ("Swing the pole up", "Pendulum-v1,words=mine.py:GAME",
     "Swing the pole up. End with push left or push right.\nheight 0.7, speed -0.5",
     ("I push left.", "push right")),
    ("BLACKJACK = Game", "Blackjack-v1,words=mine.py:BLACKJACK",
     "You are an expert blackjack player. Say stick or hit.\nYour current total is ",
     ("I hit.",)),
])  # fmt: skip
def test_words_replace_the_texts_of_gymnasium(command, text, spec, opening, actions):
    pytest.importorskip("gymnasium", reason="needs picorl[envs]")
    Path("mine.py").write_text(block(text))
    env = make(f"gymnasium:id={spec}")
    assert env.reset(0)[0]["content"].startswith(opening)
    assert not any(env.step(action).info.get("invalid") for action in actions)


def test_the_environments_of_the_commands_exist(command):
    shutil.copy(TEMPLATE, "my_envs.py")  # as the README says
    lines = re.findall(r"^    python -m environments (\w+) ?(\S*)", README, re.MULTILINE)
    specs = [spec for verb, spec in lines if verb != "list" and not spec.startswith("parity.py")]
    assert len(specs) >= 4 and all(map(make, specs))


@pytest.mark.parametrize(("text", "name", "column"), [
    ("def accuracy", "accuracy", "question"), ("as in verifiers", "correct", "prompt"),
])  # fmt: skip
def test_the_reward_functions_of_other_libraries_score(command, text, name, column):
    rows = [{"question": f"Say {n}", "prompt": [{"role": "user", "content": f"Say {n}"}],
             "answer": f"{n}"} for n in range(40)]  # fmt: skip
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("mine.py").write_text(block(text))
    env = make(f"rewarded:data=rows.jsonl,prompt={column},reward=mine.py:{name}")
    number = env.reset(5)[-1]["content"].removeprefix("Say ")
    assert env.step(number).reward == 1.0 and env.step("none").reward == 0.0


def test_the_rows_and_functions_of_a_notebook_are_trained_on(command, monkeypatch):
    runs = []
    with monkeypatch.context() as patch:
        patch.setattr(train, "run", lambda cfg, **data: runs.append((cfg, data)))
        exec(block("of_objects"), {})
    small = {"max_tokens": 4, "num_prompts": 2, "group_size": 2, "eval_num_tasks": 2}
    for cfg, data in runs:
        cfg = replace(cfg, num_updates=1, device="cpu", **small)
        assert train.run(cfg, **data) == 0
    assert train.run(config.Config(resume="runs/sums", num_updates=2), **runs[0][1]) == 0
    assert read_records(Path("runs/sums/metrics.jsonl"))[-1]["update"] == 2 and len(runs) == 2


def test_a_name_of_another_trainer_is_answered_with_flags_that_exist_as_on_the_page():
    known = {*vars(config.Config())}
    flags = {f"--{name.replace('_', '-')}" for name in known}
    flags |= {f"--grpo.{name.replace('_', '-')}" for name in vars(options_of("grpo")())}
    assert not known & ADVICE.keys()  # it would never be read
    for names, said in OTHER_NAMES.items():
        assert {*re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", said)} <= flags, names
        text = re.sub(r"--\S*[^\s:,]", r"`\g<0>`", said)
        assert f"| {', '.join(f'`{name}`' for name in names.split())} | {text} |" in README
