"""`rewarded`: rows of a file or of the hub, and reward functions with TRL's signature."""

import json
import re
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from conftest import load_small
from test_episodes import Scripted

from core.context import Renderer
from core.episodes import RolloutCollector
from core.faults import UsageError
from core.files.run_log import read_records
from core.sampler import SamplingParams
from core.tasks import Task, eval_tasks, train_tasks
from core.tiny import PRETRAINED, write_tiny
from environments import rewarded
from environments.base import DEMO_SEEDS, EVAL_SEEDS, EnvFailure, NoReward, RunInfo, is_held_out
from environments.plumbing.check import check_env
from environments.plumbing.registry import EnvSpec, absolute, make
from environments.plumbing.tools import ToolEnv, call_text

FUNCTIONS = """
import asyncio
import functools
import signal
import torch
from environments.base import EnvFailure
calls, here = [], []
def accuracy(prompts, completions, answer, **columns):
    calls.append((prompts, completions, answer, columns))
    return [float(a in text) for text, a in zip(completions, answer)]
async def brief(prompts, completions, **columns):
    return [1 - len(text) / 10 for text in completions]
def sometimes(completions, **columns):
    return [None if "x" in text else 0.5 for text in completions]
def content(prompts, completions, **columns):
    return [float(c[-1]["content"] == p[-1]["content"]) for p, c in zip(prompts, completions)]
def trl(completions, completion_ids, trainer_state, log_extra, log_metric):
    calls.append((completion_ids, trainer_state.global_step, trainer_state.max_steps))
    log_extra("letter", [text.upper() for text in completions])
    log_extra("scores", torch.ones(len(completions), 2).numpy())
    log_extra(column="correct", values=["no"] * len(completions))
    for text in completions:
        log_metric("share", ord(text) - 97)
    log_metric(name="seen", value=torch.tensor(len(calls)))
    return [1.0 for _ in completions]
def zero(completions):
    return [0.0 for _ in completions]
def verified(completions, **columns):
    from math_verify import parse, verify
    return [float(verify(parse("$1/2$"), parse("$0.5$"))) for _ in completions]
def strict(prompts, completions, answer, **columns):
    calls.append(prompts)
    return [float(int(a) < 30) for a in answer]
async def strict_too(completions, answer, **columns):
    return [float(answer[i].isdigit()) / (answer[i] != "none") for i in range(len(completions))]
def times(completions, factor, **columns):
    return [factor] * len(completions)
halved = functools.partial(times, factor=0.5)
class Longest:
    def __call__(self, completions, **columns):
        return [float(text == max(completions, key=len)) for text in completions]
longest = Longest()
def get_shorter(max_len=4, least=0.0):
    def shorter(completions, **columns):
        return [max(least, 1 - len(text) / max_len) for text in completions]
    return shorter
shorter_than_10 = get_shorter(max_len=10, least=0.5)
first_letter = lambda completions: [float(text[:1] == "a") for text in completions]
def needs(completions, wanted):
    return [1.0]
def never(completions, **columns):
    return [None] * len(completions)
def nothing(completions, **columns):
    [1.0 for _ in completions]
def texts(completions, **columns):
    return ["1.0"] * len(completions)
def array(completions, **columns):
    return torch.arange(len(completions)).numpy()
def infinite(prompts, completions, **columns):
    return [float(text in "a-") or -float("inf") for text in completions]
def nan_metric(completions, log_metric, **columns):
    log_metric("loss_of_judge", float("nan"))
    return [1.0] * len(completions)
def two(**columns):
    return [1.0, 1.0]
def rank(completions, **columns):
    calls.append(completions)
    return [float(sorted(completions).index(text)) for text in completions]
async def meets(completions, **columns):
    here.append(1)
    while len(here) < 2:
        await asyncio.sleep(0.001)
    return [1.0 for _ in completions]
async def also(**columns):
    return await meets(**columns)
def raises(**columns):
    raise KeyError("judge")
def is_down(completions, **columns):
    calls.append(completions)
    raise EnvFailure("no judge")
async def fails(**columns):
    raise EnvFailure("no judge")
VALUE = 5
"""
ROWS = [{"prompt": f"Say {n}.", "answer": str(n), "n": n} for n in range(60)]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch, command):
    """A folder with rows.jsonl and rewards.py."""
    Path("rewards.py").write_text(FUNCTIONS)
    write("rows.jsonl", ROWS)
    rewarded.begin_run(RunInfo((), ()))
    return tmp_path


def write(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts_of(env, seeds):
    return [env.reset(seed)[0]["content"] for seed in seeds]


def test_several_functions_are_weighted_awaited_and_may_not_apply():
    reward = "rewards.py:accuracy rewards.py:brief rewards.py:sometimes"
    env = make(f"rewarded:data=rows.jsonl,reward={reward},weights=2 0.5 1")
    number = env.reset(3)[0]["content"][4:-1]
    step = env.step(f"{number:>5}")  # 5 characters: brief gives 0.5
    assert step.reward == pytest.approx(2 * 1 + 0.5 * 0.5 + 1 * 0.5)
    assert step.info["reward_brief"] == 0.5 and step.info["correct"] is True
    assert step.info["weight_accuracy"] == 2 and "weight_sometimes" not in step.info
    assert (step.done, step.message) == (True, None)
    step = env.step("xxxxx")
    assert step.reward == pytest.approx(0.25) and "reward_sometimes" not in step.info
    assert step.info["correct"] is False


def test_rows_are_split_by_content_and_duplicates_are_counted(capsys):
    write("twice.jsonl", [*ROWS, *ROWS[:7]])
    env = make("rewarded:data=twice.jsonl,reward=rewards.py:sometimes")
    assert "left out 7 of 67 rows, which occur before" in capsys.readouterr().err
    assert len(env.train + env.test) == 60
    held_out = [row["prompt"] for row in ROWS if is_held_out(row["prompt"])]
    assert 3 < len(held_out) < 20
    assert prompts_of(env, EVAL_SEEDS[: len(held_out)]) == held_out  # in their order, each once
    trained = set(prompts_of(env, [*range(400), *DEMO_SEEDS[:400]]))
    assert trained == {row["prompt"] for row in ROWS} - set(held_out)
    with pytest.raises(NoReward, match=r"no function applies to the answer \(twice.jsonl:\d+"):
        env.step("x")  # None of the only function
    assert env.step("a").info["correct"] is False  # for 0.5
    spec = "rewarded:data=rows.jsonl,reward=rewards.py:accuracy"
    report = check_env(spec, 3, other_process=False)
    assert not report.problems and report.shared == 0


def test_data_of_its_own_for_evaluation_is_used_whole_and_so_is_that_for_training():
    write("test.jsonl", [{"prompt": f"Say {n}.", "answer": f"{n}"} for n in range(90, 191)])
    options = "reward=rewards.py:accuracy"
    trained, evaluated = (absolute(f"rewarded:data={x}.jsonl,{options}") for x in ("rows", "test"))
    rewarded.begin_run(RunInfo([trained], [evaluated]))
    test = make(evaluated).test
    assert len(test) == 101 and rewarded.draw(EVAL_SEEDS.start + 1, [], test) is test[1]
    assert make(trained).train == ROWS
    # data of both uses is divided
    rewarded.begin_run(RunInfo([trained], [trained, "letter_counting"]))
    made = make(trained)
    assert 3 < len(made.test) < 20 and len(made.train) == 60 - len(made.test)


def test_a_run_evaluates_on_all_rows_of_a_test_file(command):
    write("test.jsonl", [{"prompt": f"Say {n}.", "answer": f"{n}"} for n in range(100, 120)])
    specs = [f"rewarded:data={x}.jsonl,reward=rewards.py:accuracy" for x in ("rows", "test")]
    options = "--eval-num-tasks", 20, "--num-updates", 0, "--max-tokens", 2, "--run-name", "a"
    assert command("--env", specs[0], "--eval-env", specs[1], *options)[0] == 0
    rollouts = map(json.loads, Path("runs/a/rollouts.jsonl").read_text().splitlines())
    opened = [rollout["messages"][0]["content"] for rollout in rollouts]
    assert opened == [f"Say {n}." for n in range(100, 108)]  # the first eight of an evaluation


def test_rows_that_cannot_be_rendered_give_their_place_to_others(command):
    wrong = [{"prompt": [{"role": "judge", "content": "a"}]}]
    wrong += [{"prompt": f"{n} " * 5000} for n in range(9)]  # longer than the context
    write("some.jsonl", [*wrong, *ROWS[:9]])
    options = "--num-prompts", 8, "--num-updates", 1, "--max-tokens", 2, "--eval-num-tasks", 0
    code, out, err = command("--env", "rewarded:data=some.jsonl,reward=rewards.py:zero", *options)
    assert code == 0 and "another task takes its place" in out and "failed" not in out + err


def test_prompts_that_differ_in_white_space_are_different_and_have_the_same_use(capsys):
    """Programs of another indentation, grids of another shape; none is trained on while the other
    is for evaluation."""
    programs = [f"if a:\n    b = {n}\n{indent}c()" for n in range(40) for indent in ("", "    ")]
    grids = [f"{n}0\n{n}1{end}" for n in range(40) for end in ("", "\n", "\n\n")]
    write("shapes.jsonl", [{"prompt": text} for text in programs + grids])
    env = make("rewarded:data=shapes.jsonl,reward=rewards.py:two")
    assert "left out" not in capsys.readouterr().err
    used = [{row["prompt"] for row in rows} for rows in (env.train, env.test)]
    assert used[0] | used[1] == {*programs, *grids} and not used[0] & used[1]
    collapsed = [{" ".join(text.split()) for text in texts} for texts in used]
    assert not collapsed[0] & collapsed[1] and all(collapsed)


def test_rows_whose_prompt_is_empty_are_left_out_and_counted(capsys):
    rows = [*(f"row {n}" for n in range(40)), None, "", " \n", []]
    write("gaps.jsonl", [{"prompt": prompt} for prompt in rows])
    env = make("rewarded:data=gaps.jsonl,reward=rewards.py:two")
    assert len(env.train) + len(env.test) == 40
    [said] = capsys.readouterr().err.splitlines()  # and no duplicates
    assert "left out 4 of 44 rows, whose 'prompt' is empty" in said


def test_an_evaluation_asks_each_row_of_the_data_once():
    write("few.jsonl", [{"prompt": f"row {n}"} for n in range(40)])
    spec = "rewarded:data=few.jsonl,reward=rewards.py:two"
    env, tasks = make(spec), eval_tasks([spec, "letter_counting"], 256)
    asked = [env.reset(task.seed)[0]["content"] for task in tasks if str(task.env) == spec]
    assert sorted(asked) == sorted(row["prompt"] for row in env.test)
    assert len(tasks) == len(env.test) + 256


@pytest.mark.parametrize("others", [[], ["snake"]])
def test_a_run_may_go_through_the_rows_in_their_order_or_shuffled(others):
    used = [row["prompt"] for row in ROWS if not is_held_out(row["prompt"])]
    updates = range(1, 1 + 2 * len(used))

    def drawn(order, seed=0):
        """The prompts of two passes over the rows, with 3 and with 4 prompts in an update."""
        spec = f"rewarded:data=rows.jsonl,reward=rewards.py:zero,order={order}"
        rewarded.begin_run(RunInfo([spec], [spec], seed=seed))
        env, found = make(spec), []
        for num_prompts in (3, 4):
            envs = [EnvSpec.read(e) for e in [spec, *others]]
            tasks = [t for u in updates for t in train_tasks(envs, seed, u, num_prompts, 1)]
            seeds = [task.seed for task in tasks if str(task.env) == spec]
            found.append(prompts_of(env, seeds)[: 2 * len(used)])
        return found

    assert drawn("data") == [used * 2] * 2
    [first, again] = drawn("shuffled")
    assert first == again and drawn("shuffled", seed=1)[0] != first
    passes = first[: len(used)], first[len(used) :]
    assert [sorted(each) for each in passes] == [sorted(used)] * 2 and passes[0] != passes[1]
    assert passes[0] != used
    assert len({*drawn("random")[0][: len(used)]}) < len(used)


def test_a_completion_has_what_was_sampled_without_the_prefill(policy):
    Path("prefill.py").write_text(
        "calls = []\n"
        "def f(prompts, completions, completion_ids):\n"
        "    calls.append((prompts, completions, completion_ids))\n"
        "    return [1.0 for _ in completions]\n"
    )
    user = {"role": "user", "content": "Count."}
    begun = {"role": "assistant", "content": "<think>One"}
    write("begun.jsonl", [{"prompt": [user, begun]}])
    rollouts, module = play(policy, "prefill.py:f", data="begun.jsonl")
    [(prompts, completions, ids)] = module["calls"]
    assert prompts == [[user, begun]] * 3
    assert completions == [[{"role": "assistant", "content": text}] for text in "abc"]
    assert ids == [r.turns[0].completion_ids for r in rollouts]
    assert [r.messages[-1]["content"] for r in rollouts] == [f"<think>One{text}" for text in "abc"]


def test_a_prompt_of_messages_has_a_completion_of_messages():
    write("chats.jsonl", [
        {"chat": [{"role": "system", "content": "Repeat."}, {"role": "user", "content": f"{n}"}]}
        for n in range(60)
    ])  # fmt: skip
    env = make("rewarded:data=chats.jsonl,prompt=chat,reward=rewards.py:content")
    system, question = env.reset(5)
    assert system == {"role": "system", "content": "Repeat."}
    assert env.step(question["content"]).reward == 1.0 and env.step("?").reward == 0.0


def test_local_files_of_other_kinds_are_rows_too(place, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place / "cache"))
    table = datasets.Dataset.from_list(ROWS)
    for name, save in (("a.csv", table.to_csv), ("a.parquet", table.to_parquet)):
        save(name)
    table.save_to_disk("saved")
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk("splits")
    Path("data.json").write_text(json.dumps({"version": "1", "data": ROWS}, indent=1))
    Path("b.csv").write_bytes(b"\xef\xbb\xbf" + Path("a.csv").read_bytes())  # as Excel writes it
    Path("a.json").write_text(json.dumps(ROWS, indent=1))
    Path("a.jsonl").write_text(Path("rows.jsonl").read_text(), encoding="utf-8-sig")
    expected = make("rewarded:data=rows.jsonl,reward=rewards.py:two").train
    for file in (
        "a.csv",
        "b.csv",
        "a.parquet",
        "a.json",
        "a.jsonl",
        "data.json",
        "saved",
        "splits",
    ):
        found = make(f"rewarded:data={file},reward=rewards.py:two").train
        assert [row["prompt"] for row in found] == [row["prompt"] for row in expected]
        assert [row["n"] for row in found] == [row["n"] for row in expected]
        assert [row.place for row in found] == [f"{file}:{row['n'] + 1}" for row in found]

    with pytest.raises(UsageError, match=r"splits has no split 'dev'; it has train, test"):
        make("rewarded:data=splits,split=dev,reward=rewards.py:two")
    Path("two.json").write_text(json.dumps({"train": ROWS, "test": ROWS}, indent=1))
    with pytest.raises(UsageError, match="which of train, test\\? Write one"):
        make("rewarded:data=two.json,reward=rewards.py:two")


def test_calls_of_tools_have_the_arguments_of_their_own_row(place, monkeypatch):
    """Parquet gives the call of each row the arguments of all, as null; a list keeps its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place / "cache"))
    arguments, rows = [{"word": "a"}, {"number": 1, "within": {"all": [1, None]}}], []
    for i in range(40):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments[i % 2]}}
        chat = [{"role": "user", "content": f"{i}?"}, {"role": "tool", "content": "found"}]
        chat[1:1] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        rows.append({"prompt": chat, "settings": arguments[i % 2]})
    datasets.Dataset.from_list(rows).to_parquet("a.parquet")
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet, lines = (
        make(f"rewarded:data={file},reward=rewards.py:two").train
        for file in ("a.parquet", "a.jsonl")
    )
    assert [row["prompt"] for row in parquet] == [row["prompt"] for row in lines]
    filled = {"word": "a", "number": None, "within": None}  # a column of the function's, as in TRL
    assert next(row["settings"] for row in parquet if row["settings"]["word"]) == filled


def test_a_column_that_is_no_json_is_named(place, monkeypatch):
    datasets, value = pytest.importorskip("datasets"), datetime(2026, 1, 2)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place / "cache"))
    datasets.Dataset.from_list([{**row, "when": value} for row in ROWS]).to_parquet("a.parquet")
    with pytest.raises(UsageError, match=r"row 1: column 'when' is no JSON: .* datetime "):
        make("agent:command=true,data=a.parquet")
    assert make("rewarded:data=a.parquet,reward=rewards.py:two").train[0]["when"] == value


@pytest.mark.parametrize(("options", "words"), [
    ("data=none.csv,reward=rewards.py:two", "there is no file none.csv"),
    ("data=rows.jsonl", "set data="),
    ("data=rows.jsonl,reward=rewards.py:VALUE", "no function"),
    ("data=rows.jsonl,reward=rewards.py", "rewards.py names no class or function: write FILE.py:"),
    ("data=rows.jsonl,reward=rewards.py:two rewards.py:rank,weights=1", "1 weights for 2"),
    ("data=rows.jsonl,reward=rewards.py:two,name=my set", "give a word, such as name=gsm8k"),
    ("data=rows.jsonl,reward=rewards.py:two,correct=rank", "correct=rank: name one of"),
    ("data=bad.jsonl,reward=rewards.py:two", "line 2: not a JSON object"),
    ("data=odd.jsonl,reward=rewards.py:two", "row 2: the prompt in 'prompt' is {'a': 1}: it must"),
])  # fmt: skip
def test_an_invalid_option_is_one_line(options, words):
    write("bad.jsonl", [{"prompt": "a"}, [1]])
    write("odd.jsonl", [{"prompt": "a"}, {"prompt": {"a": 1}}])
    with pytest.raises(UsageError) as error:
        make(f"rewarded:{options}")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_is_right_is_the_first_function_or_the_one_that_is_named(command):
    two = "rewarded:data=rows.jsonl,reward=rewards.py:halved rewards.py:accuracy"
    other = "rewarded:data=rows.jsonl,reward=rewards.py:brief,correct=rewards.py:halved,threshold=2"
    for spec, right, reward in [
        (two, False, 1.5),  # halved returns 0.5
        (f"{two},correct=accuracy", True, 1.5),
        (f"{two},threshold=0.5", True, 1.5),
        (other, False, 0.3),
        (other.replace("=2", "=0.5"), True, 0.3),  # halved is no part of the reward
    ]:
        env = make(spec)
        answer = env.reset(5)[0]["content"][4:-1]
        step = env.step(f"{answer:>7}")
        assert (step.info["correct"], step.reward) == (right, pytest.approx(reward)), spec
    flags = ["--num-updates", 0, "--eval-num-tasks", 4, "--max-tokens", 4]
    code, out, _ = command("--env", two, *flags)
    assert code == 0 and "halved returns 1 or more (the first of 2 functions; correct=NAME" in out
    assert re.search(r"accuracy at update 0: 0.00 .*  mean return \d", out)
    code, out, _ = command("--env", f"{two},correct=halved,threshold=0.5,name=halves", *flags)
    assert "right if halved returns 0.5 or more (correct=NAME and" in out
    assert re.search(r"accuracy at update 0: 1.00 \S+ \S+  halves$", out, re.MULTILINE)
    assert "mean return" not in out


@pytest.mark.parametrize("value", ["None", "float('nan')"])
def test_an_answer_that_no_function_judges_is_left_out_of_its_group(command, value):
    """Where all others of its group earn the same there is no gradient; so it is with TRL."""
    Path("judge.py").write_text(
        "def judged(completions):\n"
        f"    return [{value} if i % 2 else -1.0 for i in range(len(completions))]\n"
    )
    spec = "rewarded:data=rows.jsonl,reward=judge.py:judged"
    flags = "--num-updates 1 --num-prompts 2 --group-size 4 --max-tokens 8 --eval-num-tasks 4"
    assert command("--env", spec, *flags.split(), "--run-name", "a")[0] == 0
    first, update = read_records(Path("runs/a/metrics.jsonl"))
    assert update["episodes/no_reward"] == 0.5 and update["episodes/failed"] == 0
    assert (update["reward/mean"], update["grad/norm"]) == (-1, 0)
    short = "rewarded:data=rows.jsonl,reward=judge.py:judged"
    assert first[f"eval/{short}/return_mean"] == -1 and f"eval/{short}/failed" not in first
    rows = [json.loads(line) for line in Path("runs/a/rollouts.jsonl").read_text().splitlines()]
    assert (
        sum("NoReward" in (row.get("error") or "") for row in rows if row["kind"] == "train") == 4
    )


def test_what_a_function_changes_is_its_own():
    """Later calls, other functions and the next prompts see the data as it is."""
    write("chats.jsonl", [{"prompt": [{"role": "user", "content": "?"}], "left": [1, 2], "n": n}
                          for n in range(40)])  # fmt: skip
    Path("rude.py").write_text(
        "def takes(prompts, completions, left):\n"
        "    found = [float(len(one)) for one in left]\n"
        "    for prompt, completion, one in zip(prompts, completions, left):\n"
        "        one.clear(); prompt.append('x'); completion[0]['content'] = 'right'\n"
        "    return found\n"
        "def sees(prompts, completions, left):\n"
        "    return [float(c[0]['content'] == 'a' and len(p) == 1) for p, c in\n"
        "            zip(prompts, completions)]\n"
    )
    env = make("rewarded:data=chats.jsonl,reward=rude.py:takes rude.py:sees")
    for _ in range(2):
        assert env.reset(3) == [{"role": "user", "content": "?"}]
        assert env.step("a").reward == 3


def test_the_column_of_the_prompt_is_passed_under_both_names():
    write("asked.jsonl", [{"question": row["prompt"]} for row in ROWS])
    Path("both.py").write_text(
        "def both(prompts, question): return [float(p == q) for p, q in zip(prompts, question)]\n"
        "def rest(completions, **columns):\n"
        "    return [float('prompt' not in columns) for _ in completions]\n"
    )
    asked = make("rewarded:data=asked.jsonl,prompt=question,reward=both.py:both")
    usual = make("rewarded:data=rows.jsonl,reward=both.py:rest")  # TRL passes no `prompt`
    for env in (asked, usual):
        env.reset(0)
        assert env.step("a").reward == 1


def test_a_function_for_messages_is_told_that_prompts_are_texts():
    Path("chat.py").write_text("def f(completions): return [c[0]['content'] for c in completions]")
    env = make("rewarded:data=rows.jsonl,reward=chat.py:f")
    env.reset(0)
    with pytest.raises(RuntimeError, match=r"make each prompt a list of messages"):
        env.step("a")


OF_TINY = "<|user|>{}<|end|><|assistant|>Let me think.<think>"
OF_OTHERS = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nLet me think.\n<think>"


@pytest.mark.parametrize("rendered", [OF_TINY, OF_OTHERS])
def test_a_prompt_with_the_template_around_it_is_refused_or_taken_as_it_is(command, rendered):
    """With raw=true its ids are those of the text, as in TRL; else it would be rendered twice."""
    write("rendered.jsonl", [{"prompt": rendered.format(n), "answer": "1"} for n in range(60)])
    quoted = "Is <|im_end|> or <|end|> after <|user|>? {}"
    write("quoted.jsonl", [{"prompt": quoted.format(n), "answer": ""} for n in range(60)])
    flags = ["--num-updates", 1, "--num-prompts", 2, "--group-size", 2, "--max-tokens", 4,
             "--eval-num-tasks", 2, "--max-turns", 1]  # fmt: skip
    spec = "rewarded:data={}.jsonl,reward=rewards.py:accuracy"
    code, _, err = command("--env", spec.format("rendered"), *flags)
    assert code == 2 and "has the chat template around it already: add raw=true" in err
    assert command("--env", spec.format("quoted"), *flags)[0] == 0
    raw = f"{spec.format('rendered')},raw=true"
    assert command("--env", raw, *flags, "--run-name", "raw")[0] == 0
    rows = [json.loads(line) for line in Path("runs/raw/rollouts.jsonl").read_text().splitlines()]
    assert all(row["messages"][0]["role"] == "raw" for row in rows)
    code, _, err = command("--env", raw, *flags, "--system-prompt", "Be brief.")
    assert code == 2 and "a raw prompt has no system message" in err


def test_a_raw_prompt_is_tokenized_as_it_is_and_alone():
    policy = load_small(PRETRAINED)
    renderer, tokenizer = Renderer(policy), policy.tokenizer
    text = OF_TINY.format("1 + 1?")
    ids = renderer.first_prompt([{"role": "raw", "content": text}])
    assert ids == tokenizer(text).input_ids and tokenizer.decode(ids) == text
    assert {*tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>", "<|assistant|>"])} <= {*ids}
    as_message = renderer.first_prompt([{"role": "user", "content": text}])
    assert len(as_message) > len(ids)
    with pytest.raises(UsageError, match="a raw prompt is one text"):
        renderer.first_prompt([{"role": "raw", "content": "a"}, {"role": "user", "content": "b"}])


def test_a_base_model_without_a_template_is_trained_on_raw_prompts(command):
    write_tiny("tiny", "base", 0)
    Path("base/chat_template.jinja").unlink()
    write("texts.jsonl", [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(60)])
    flags = ["--num-updates", 1, "--num-prompts", 2, "--group-size", 2, "--max-tokens", 4,
             "--eval-num-tasks", 2, "--model-id", "base"]  # fmt: skip
    spec = "rewarded:data=texts.jsonl,reward=rewards.py:accuracy"
    code, _, err = command("--env", spec, *flags)
    assert code == 2 and "the tokenizer has no chat template; use an instruct model" in err
    code, _, err = command("--env", f"{spec},raw=true", *flags, "--run-name", "a")
    assert code == 0, err


def test_rows_of_one_prompt_are_tasks_and_too_few_are_for_both_uses(capsys):
    rows = [{"prompt": "Guess.", "answer": str(n)} for n in range(40)]
    write("guess.jsonl", rows + rows[:3])
    env = make("rewarded:data=guess.jsonl,reward=rewards.py:accuracy")
    assert "left out 3 of 43 rows" in capsys.readouterr().err
    answers = [{row["answer"] for row in own} for own in (env.train, env.test)]
    assert not answers[0] & answers[1] and len(answers[0]) + len(answers[1]) == 40
    for few in ([rows[0]] * 4, ROWS[:1], [row for row in ROWS if is_held_out(row["prompt"])][:2]):
        write("few.jsonl", few)
        rewarded.begin_run(RunInfo((), ()))
        env = make("rewarded:data=few.jsonl,reward=rewards.py:accuracy")
        assert env.train == env.test and len(env.train) == len({row["answer"] for row in few})
        assert "the run evaluates on what it trains on" in capsys.readouterr().err


class Letters(Scripted):
    """Answers the prompts of a batch with a, b, c, .."""

    def complete(self, request):
        self.answered = getattr(self, "answered", 0) + 1
        return replace(super().complete(request), text="abcdefgh"[self.answered - 1])


def play(policy, reward, others=(), seeds=(1, 1, 2), data="rows.jsonl", **options):
    """Rollouts of one batch, and the reward function's module."""
    spec = f"rewarded:data={data},reward={reward}"
    collector = RolloutCollector(policy, 1, **options)
    tasks = [Task(spec, seed, seed) for seed in seeds] + [Task(env, 0, 9) for env in others]
    rollouts = collector.collect(tasks, Letters(policy), SamplingParams(4))
    return rollouts, make(spec).functions[0][1].__globals__


def test_functions_are_called_once_per_batch_with_lists(policy):
    write("rows.jsonl", [*ROWS, {"prompt": "A row with another column.", "level": 5}])
    reward = "rewards.py:accuracy rewards.py:rank,weights=1 0.5"
    rollouts, module = play(policy, reward, others=["letter_counting"])
    (prompts, completions, answer, columns), ranked = module["calls"]
    assert prompts == [r.messages[0]["content"] for r in rollouts[:3]]
    assert answer == [prompt[4:-1] for prompt in prompts]
    assert prompts[0] == prompts[1] != prompts[2]
    assert completions == ranked == ["a", "b", "c"]
    assert [r.info["row"] for r in rollouts[:3]] == [f"rows.jsonl:{int(a) + 1}" for a in answer]
    assert columns["n"] == list(map(int, answer)) and columns["level"] == [None] * 3
    assert [r.episode_return for r in rollouts[:3]] == [0.0, 0.5, 1.0]  # compared with the others
    assert [r.info["reward_rank"] for r in rollouts[:3]] == [0.0, 1.0, 2.0]
    assert not any(r.error for r in rollouts)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="Windows has no alarm")
def test_functions_may_need_the_main_thread(policy):
    """math-verify's alarm raises in other threads: the reward would be 0 for ever."""
    pytest.importorskip("math_verify", reason="needs picorl[envs]")
    rollouts, _ = play(policy, "rewards.py:verified", others=["letter_counting"])
    assert [r.episode_return for r in rollouts[:3]] == [1.0, 1.0, 1.0]


def test_a_call_that_waits_ends_at_its_limit(policy):
    rollouts, _ = play(policy, "rewards.py:meets", ["letter_counting"], env_timeout=3)
    said = "TimeLimit: no answer in 3 seconds (--env-timeout)"
    assert [r.error[: len(said)] for r in rollouts[:3]] == [said] * 3
    assert not rollouts[3].error


@pytest.mark.parametrize(("name", "error"), [
    ("strict", "RuntimeError: strict: ValueError: invalid literal for int() with base 10: 'none'; "
     "the row: prompt='Say it.', answer='none' (rewards.py, line "),
    ("strict_too", "RuntimeError: strict_too: ZeroDivisionError: float division by zero; the row:"),
])  # fmt: skip
def test_a_row_that_fails_costs_only_its_own_episodes_and_is_named(policy, name, error):
    write("bad.jsonl", [{"prompt": "Say it.", "answer": "none"}, *ROWS])
    spec = f"rewarded:data=bad.jsonl,reward=rewards.py:{name}"
    seeds = [next(i for i in range(999) if make(spec).reset(i)[0]["content"] == f"Say {text}.")
             for text in ("it", "1", "2")]  # fmt: skip
    tasks = [Task(spec, seed, seed) for seed in seeds for _ in range(2)]
    rollouts = RolloutCollector(policy, 1).collect(tasks, Letters(policy), SamplingParams(4))
    assert [r.error[: len(error)] for r in rollouts] == [error] * 2 + [""] * 4
    assert [r.episode_return for r in rollouts[2:]] == [1.0] * 4


def test_an_infinite_reward_names_its_function_and_its_row(policy):
    rollouts, _ = play(policy, "rewards.py:sometimes rewards.py:infinite")
    assert [bool(rollout.error) for rollout in rollouts] == [False, True, True]
    text = "RuntimeError: infinite: ValueError: it returned -inf for a completion; the row: prompt="
    assert rollouts[1].error.startswith(f"{text}{rollouts[1].messages[0]['content']!r}")


def test_a_function_with_arguments_is_made_in_a_line_of_the_file():
    env = make("rewarded:data=rows.jsonl,reward=rewards.py:shorter_than_10")
    env.reset(0)
    assert [env.step("a" * n).reward for n in (1, 9)] == [0.9, 0.5]
    for call in ("get_shorter(max_len=9)", "get_shorter(max_len=9,least=0.5)"):
        with pytest.raises(UsageError, match=re.escape(f"write `made = {call}` in it")):
            make(f"rewarded:data=rows.jsonl,reward=rewards.py:{call},threshold=0.5")
    env = make("rewarded:data=rows.jsonl,reward=rewards.py:get_shorter")
    env.reset(0)
    with pytest.raises(RuntimeError, match=r"get_shorter: .* it makes reward functions"):
        env.step("a")


COUNTER = """
calls = []
def multiply(a: int, b: int) -> int:
    '''
    Multiplies.

    Args:
        a: One number.
        b: Another one.
    '''
    return a * b
class Counter:
    def __init__(self):
        self.lock = __import__("threading").Lock()  # nothing copies it
    def reset(self, start, **row):
        self.count = start
        return f" From {start}."
    def add(self, by: int) -> str:
        '''
        Adds to the counter.

        Args:
            by: How much.
        '''
        self.count += by
        return f"now {self.count}"
    def get_reward(self):
        return float(self.count)
    def __len__(self):
        return 0
    def _hidden(self):
        pass
def own(environments, **columns):
    return [environment.get_reward() for environment in environments]
def used(prompts, completions, **columns):
    calls.extend(completions)
    assert prompts[0][-1]["content"] == f"Count. From {columns['start'][0]}."
    return [sum(m["role"] == "tool" for m in c) / 10 for c in completions]
"""


def test_tools_and_an_environment_of_trl_go_with_functions_that_read_the_turns():
    Path("counter.py").write_text(COUNTER)
    message = {"role": "user", "content": "Count."}
    write("starts.jsonl", [{"prompt": [message], "start": n} for n in range(20)])
    spec = ("rewarded:data=starts.jsonl,reward=counter.py:own counter.py:used,"
            "tools=counter.py:multiply,environment=counter.py:Counter")  # fmt: skip
    env = make(spec)
    assert isinstance(env, rewarded.Rewarded)
    assert [tool.__name__ for tool in env.tools] == ["multiply", "add"]
    game = ToolEnv(env)
    [opening] = game.reset(5)
    start = env.row["start"]
    assert opening == message | {"content": f"Count. From {start}."}
    asked = [call_text("add", by=2) + call_text("multiply", a=2, b=3), call_text("add", by=-1)]
    for text in asked:
        assert game.step(text).reward == 0.0
    step = game.step("Done.")
    assert step.done and step.reward == pytest.approx(start + 1 + 0.3)
    assert step.info["reward_own"] == start + 1 and step.info["tool_calls"] == 3

    def called(*names_and_arguments):
        return [{"type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in names_and_arguments]  # fmt: skip

    assert env.functions[1][1].__globals__["calls"] == [[
        {"role": "assistant", "content": asked[0],
         "tool_calls": called(("add", {"by": 2}), ("multiply", {"a": 2, "b": 3}))},
        {"role": "tool", "name": "add", "content": f"now {start + 2}"},
        {"role": "tool", "name": "multiply", "content": "6"},
        {"role": "assistant", "content": asked[1], "tool_calls": called(("add", {"by": -1}))},
        {"role": "tool", "name": "add", "content": f"now {start + 1}"},
        {"role": "assistant", "content": "Done."},
    ]]  # fmt: skip
    game.reset(5)
    assert game.step("Done.").reward == start  # nothing of the episode before


def test_a_run_trains_on_tools_of_rewarded(command):
    Path("counter.py").write_text(COUNTER)
    message = {"role": "user", "content": "Count."}
    write("starts.jsonl", [{"prompt": [message], "start": n} for n in range(20)])
    env = ("rewarded:data=starts.jsonl,reward=counter.py:own,"
           "tools=counter.py:multiply,environment=counter.py:Counter")  # fmt: skip
    options = ["--num-prompts", 2, "--eval-num-tasks", 2, "--max-tokens", 4, "--num-updates", 1]
    assert command("--env", env, *options, "--run-name", "tools")[0] == 0
    rows = [json.loads(line) for line in Path("runs/tools/rollouts.jsonl").read_text().splitlines()]
    starts = {f"Count. From {n}." for n in range(20)}
    assert all(row["messages"][-2]["content"] in starts for row in rows)
    assert rows[0]["tools"] == ["multiply", "add"]


def test_functions_may_be_those_of_packages_and_of_the_running_script(monkeypatch):
    pytest.importorskip("trl")
    pytest.importorskip("math_verify", reason="needs picorl[envs]")
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "half", lambda completions: [0.5 for _ in completions], raising=False)
    message = {"role": "user", "content": "What is 1 + 1?"}
    write("sums.jsonl", [{"prompt": [message], "solution": "$2$", "n": n} for n in range(9)])
    env = make("rewarded:data=sums.jsonl,reward=trl.rewards:accuracy_reward __main__:half")
    env.reset(0)
    answers = [r"It is $\boxed{2}$.", r"It is $\boxed{3}$."]
    assert [env.step(answer).reward for answer in answers] == [1.5, 0.5]


def test_functions_are_named_by_what_follows_the_colon_and_by_their_file():
    Path("second.py").write_text("def longest(completions): return [0.25] * len(completions)")
    reward = "rewards.py:halved rewards.py:longest second.py:longest rewards.py:first_letter"
    env = make(f"rewarded:data=rows.jsonl,reward={reward}")
    env.reset(0)
    found = {key: value for key, value in env.step("a").info.items() if "reward_" in key}
    assert found == {"reward_rewards_halved": 0.5, "reward_rewards_longest": 1.0,
                     "reward_second_longest": 0.25, "reward_rewards_first_letter": 1.0}  # fmt: skip


def test_functions_may_use_all_that_trl_passes_and_only_what_they_name(policy):
    rewarded.begin_run(RunInfo((), (), 7, 3))
    rollouts, module = play(policy, "rewards.py:trl rewards.py:array")
    assert not any(r.error for r in rollouts)
    sampled = [r.turns[0].completion_ids for r in rollouts]
    assert module["calls"] == [(sampled, 3, 7)] and all(sampled)
    assert all(re.fullmatch(r"rows.jsonl:\d+", r.info.pop("row")) for r in rollouts)
    assert [r.info for r in rollouts] == [
        {"share": 1.0, "seen": 1.0, "letter": letter, "scores": [1.0, 1.0], "correct": True,
         "reward_trl": 1.0, "reward_array": float(n)} for n, letter in enumerate("ABC")
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="missing 1 required positional argument: 'wanted'"):
        alone = make("rewarded:data=rows.jsonl,reward=rewards.py:needs")
        alone.reset(0)
        alone.step("a")


def test_a_run_tells_functions_how_many_updates_are_complete(command, place):
    Path("state.py").write_text(
        "def f(completions, trainer_state):\n"
        "    print(trainer_state.global_step, trainer_state.max_steps, file=open('log', 'a'))\n"
        "    return [float(len(text) % 2) for text in completions]\n"
    )
    options = ["--num-prompts", 2, "--eval-num-tasks", 4, "--eval-every", 2, "--max-tokens", 4]
    env = "rewarded:data=rows.jsonl,reward=state.py:f"
    assert command("--env", env, "--num-updates", 3, *options)[0] == 0
    # evaluation, update 1, its answers once more, update 2, evaluation, update 3, evaluation
    assert [line[0] for line in Path("log").read_text().splitlines()] == [*"0001223"]


def test_functions_read_how_many_passes_over_the_rows_are_complete():
    spec = "rewarded:data=rows.jsonl,reward=rewards.py:zero"
    rows = sum(not is_held_out(row["prompt"]) for row in ROWS)  # for training
    found = []
    for envs in ([spec], [spec, "snake"]):
        rewarded.begin_run(RunInfo(envs, envs, 9, updates_done=3, num_prompts=4))
        found.append(rewarded.passes())
    assert found == [12 / rows, 6 / rows]
    rewarded.begin_run(RunInfo((), (), 9, 3, 4))
    assert rewarded.passes() == 0.0  # no run draws from the data
    with pytest.raises(AttributeError, match="global_step, max_steps and epoch, no log_history"):
        rewarded.TrainerState().log_history  # noqa: B018


def test_async_functions_are_awaited_together():
    env = make("rewarded:data=rows.jsonl,reward=rewards.py:meets rewards.py:also")
    env.reset(0)
    assert env.step("?").reward == 2.0  # each waits for the other


def test_a_judge_that_is_down_is_not_asked_again_for_each_row():
    envs = [make("rewarded:data=rows.jsonl,reward=rewards.py:is_down") for _ in range(3)]
    for seed, env in enumerate(envs):
        env.reset(seed)
    with pytest.raises(EnvFailure, match="no judge"):
        type(envs[0]).step_batch(envs, ["a"] * 3)
    assert len(envs[0].functions[0][1].__globals__["calls"]) == 1


@pytest.mark.parametrize(("reward", "error", "env_failure"), [
    ("two", "RuntimeError: two: ValueError: 2 rewards for 3 completions", False),
    ("nothing", "RuntimeError: nothing: TypeError: it returned None, not a list of 3 numbers, one "
     "for each completion", False),
    ("texts", "RuntimeError: texts: TypeError: it returned '1.0' for a completion, not a", False),
    ("nan_metric", "ValueError: info['loss_of_judge'] of player is not JSON", False),
    ("never", "ValueError: never returned None for all completions", False),
    ("fails", "EnvFailure: fails: no judge", True),
    ("rank rewards.py:raises rewards.py:meets",
     "RuntimeError: raises: KeyError: 'judge'; the row: prompt='Say ", False),
])  # fmt: skip
def test_a_function_that_fails_costs_the_episodes_of_its_batch(policy, reward, error, env_failure):
    others = ["letter_counting", "rewarded:data=rows.jsonl,reward=rewards.py:sometimes"]
    rollouts, _ = play(policy, f"rewards.py:{reward}", others)
    assert [r.error[: len(error)] for r in rollouts] == [error] * 3 + [""] * 2
    assert [r.env_failure for r in rollouts] == [env_failure] * 3 + [False] * 2
