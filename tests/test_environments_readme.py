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
from core.other_names import ADVICE, OTHER_NAMES
from environments.plumbing.check import check_env
from environments.plumbing.registry import EnvSpec, list_envs, make
from environments.plumbing.tools import ToolEnv, call_text

TEMPLATE = Path(__file__).parent.parent / "environments/template.py"
README = (Path(__file__).parent.parent / "environments/README.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in README.splitlines()
    if line.startswith("| `") and line.count("|") == 7
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


def test_example_environment_with_a_tool_has_no_problem(tmp_path):
    (tmp_path / "shop.py").write_text(block("class Shop"))
    report = check_env(f"{tmp_path}/shop.py:Shop", 3, other_process=False)
    assert not report.problems and report.longest == 2  # a call, then the answer
    assert report.demonstrations == [(1.0, True)] * 3


@pytest.mark.parametrize("name", ["Parity", "HigherLower", "Nim"])
def test_a_template_has_no_problem_outside_the_repository(name, command):
    shutil.copy(TEMPLATE, "my_envs.py")
    assert not check_env(f"my_envs.py:{name}", 5, other_process=False).problems


def test_words_replace_the_texts_of_a_gymnasium_environment(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium", reason="needs picorl[envs]")
    (tmp_path / "my_words.py").write_text(block("Swing the pole up"))
    monkeypatch.syspath_prepend(tmp_path)
    env = make("gymnasium:id=Pendulum-v1,words=my_words:GAME")
    opening = env.reset(0)[0]["content"]
    assert opening == "Swing the pole up. End with push left or push right.\nheight 0.7, speed -0.5"
    left, right = env.step("I push left."), env.step("push right")
    assert left.reward < 0 and "invalid" not in left.info | right.info
    assert env.step("push").info["invalid"]


def test_the_environments_of_the_commands_exist(command):
    shutil.copy(TEMPLATE, "my_envs.py")  # as the README says
    lines = re.findall(r"^    python -m environments (\w+) ?(\S*)", README, re.MULTILINE)
    specs = [spec for verb, spec in lines if verb != "list" and not spec.startswith("parity.py")]
    assert len(specs) >= 4 and all(map(make, specs))


def test_the_game_for_those_who_come_from_llamagym_plays(command):
    pytest.importorskip("gymnasium", reason="needs picorl[envs]")
    Path("blackjack.py").write_text(block("BLACKJACK = Game"))
    env = make("gymnasium:id=Blackjack-v1,words=blackjack.py:BLACKJACK")
    rules, total = env.reset(3)[0]["content"].split("\n")
    assert rules == "You are an expert blackjack player. Say stick or hit."
    assert int(total.removeprefix("Your current total is ")) == env.observation[0]
    assert not env.step("I hit.").info.get("invalid")
    assert env.step("I stick").done


def rows(number, **columns):
    """A file of rows, of which some are held out."""
    lines = [json.dumps({k: v(i) for k, v in columns.items()}) + "\n" for i in range(number)]
    Path("rows.jsonl").write_text("".join(lines))


def test_the_reward_function_for_those_who_come_from_trl_scores(command):
    rows(40, question=lambda i: f"{i} + 1?", answer=lambda i: f"Count on.\n#### {i + 1}")
    Path("rewards.py").write_text(block("def accuracy"))
    env = make("rewarded:data=rows.jsonl,prompt=question,reward=rewards.py:accuracy")
    number = int(env.reset(5)[0]["content"].split()[0])
    assert env.step(f"It is {number + 1}.").reward == 1.0
    assert env.step("It is -1.").reward == 0.0


def test_the_rubric_for_those_who_come_from_verifiers_scores(command):
    message = {"role": "user", "content": "Say {}."}
    rows(40, prompt=lambda i: [message | {"content": f"Say {i}."}], answer=str)
    Path("rubric.py").write_text(block("as in verifiers"))
    env = make("rewarded:data=rows.jsonl,reward=rubric.py:correct")
    answer = env.reset(5)[-1]["content"].removeprefix("Say ").removesuffix(".")
    assert env.step(answer).reward == 1.0 and env.step(f"{answer}!").reward == 0.0


def test_the_rows_and_functions_of_a_notebook_are_trained_on(command, monkeypatch):
    runs = []
    with monkeypatch.context() as patch:
        patch.setattr(train, "run", lambda cfg, **data: runs.append((cfg, data)))
        exec(block("of_objects"), {})
    small = {"max_tokens": 4, "num_prompts": 2, "group_size": 2, "eval_num_tasks": 2}
    for cfg, data in runs:
        cfg = replace(cfg, num_updates=1, device="cpu", **small)
        assert train.run(cfg, **data) == 0
    assert Path("runs/sums").exists() and len(runs) == 2


def test_the_environment_for_those_who_come_from_trl_counts(command):
    message = {"role": "user", "content": "Count up with the tool."}
    rows(40, prompt=lambda i: [message], goal=lambda i: i + 3)
    Path("counting.py").write_text(block("class Counter"))
    env = make("rewarded:data=rows.jsonl,reward=counting.py:reached counting.py:few_calls,"
               "environment=counting.py:Counter")  # fmt: skip
    game = ToolEnv(env)
    [opening] = game.reset(5)
    goal = env.row["goal"]
    assert opening["content"] == f"Count up with the tool. To {goal}, please."
    assert game.step(call_text("add", by=goal - 1)).messages == [
        {"role": "tool", "content": f"It is {goal - 1}."}
    ]
    game.step(call_text("add", by=1))
    assert game.step("There.").reward == pytest.approx(0.8)


def test_a_name_of_another_trainer_is_answered_with_flags_that_exist_as_on_the_page():
    known = {*vars(config.Config())}
    flags = {f"--{name.replace('_', '-')}" for name in known}
    flags |= {f"--grpo.{name.replace('_', '-')}" for name in vars(options_of("grpo")())}
    assert not known & ADVICE.keys()  # it would never be read
    for names, said in OTHER_NAMES.items():
        assert {*re.findall(r"--[a-z][a-z0-9.-]*[a-z0-9]", said)} <= flags, names
        text = re.sub(r"--\S*[^\s:,]", r"`\g<0>`", said)
        assert f"| {', '.join(f'`{name}`' for name in names.split())} | {text} |" in README
