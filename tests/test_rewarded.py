"""`rewarded`: rows of a file or of the hub, and reward functions with TRL's signature."""

import functools
import json
import re
from pathlib import Path

import pytest
from conftest import SMALL, load_small, metrics_of
from test_environments_readme import block
from test_episodes import Scripted

from core.config import Config
from core.context import Renderer
from core.episodes import RolloutCollector
from core.faults import UsageError
from core.files.run_log import read_records
from core.loop.outputs import note_changes
from core.sampler import SamplingParams
from core.tasks import Task, eval_tasks
from core.tiny import PRETRAINED, write_tiny
from environments import rewarded
from environments.base import DEMO_SEEDS, EVAL_SEEDS, EnvFailure, NoReward, RunInfo, is_held_out
from environments.plumbing.registry import ENVIRONMENTS, EnvSpec, absolute, import_source, make
from environments.plumbing.text import is_rendered
from environments.plumbing.tools import call_text
from environments.rewarded import Rewarded, of_objects

FUNCTIONS = """
import asyncio
import functools
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
def times(completions, factor, **columns):
    return [factor] * len(completions)
halved = functools.partial(times, factor=0.5)
@functools.wraps(lambda completions: None)
def wrapped(prompts, completions, **columns):
    return [float(len(prompts))] * len(completions)
def get_shorter(max_len=4):
    return lambda completions: [1 - len(text) / max_len for text in completions]
def rank(completions, **columns):
    return [float(sorted(completions).index(text)) for text in completions]
def array(completions, **columns):
    return torch.arange(len(completions)).numpy()
async def meets(completions, **columns):
    here.append(1)
    while len(here) < 2:
        await asyncio.sleep(0.001)
    return [1.0 for _ in completions]
def trl(completions, completion_ids, trainer_state, log_extra, log_metric):
    calls.append((completions, completion_ids, vars(trainer_state)))
    for c in completions:
        log_extra("letter", [c[0]["content"].upper()])
        log_metric("share", ord(c[0]["content"]) - 97)
    log_extra("scores", torch.ones(len(completions), 2).numpy())
    log_extra(column="correct", values=["no"] * len(completions))
    log_extra("odd", [[float("nan"), {0}]] * len(completions))
    log_metric(name="seen", value=torch.tensor(float("inf")))
    return [1.0 for _ in completions]
def two(**columns):
    return [1.0, 1.0]
class Parts: reset = staticmethod(two)
def late(trainer_state): return trainer_state.log_history
def zero(completions):
    return [0.0 for _ in completions]
def strict(completions, answer):
    return [float(int(a) < 30) for a in answer]
async def strict_too(completions, answer):
    return [float(([a] if a == "none" else a).isdigit()) for a in answer]
def of_texts(completions):
    return [float(len(text.strip())) for text in completions]
def once(completions, **columns):
    calls.append(completions)
    if len(calls) == 1:
        raise ConnectionError("503: try again")
    return [1.0 for _ in completions]
def never(completions, **columns):
    return [None] * len(completions)
def judged(completions):
    return [float("nan") if i % 2 else -1.0 for i in range(len(completions))]
def nothing(completions, **columns):
    [1.0 for _ in completions]
def is_down(completions, **columns):
    calls.append(completions)
    raise EnvFailure("no judge")
def of_messages(completions):
    return [c[0]["content"] for c in completions]
def takes(prompts, completions, left):
    found = []
    for prompt, completion, one in zip(prompts, completions, left):
        found.append(len(one) + len(prompt) / 10)
        one.clear(); prompt.extend(completion); completion[0]["content"] = "right"
    return found
def sees(prompts, completions, left, question, **columns):
    assert question == prompts and "prompt" not in columns
    return [len(one) + len(prompt) / 10 for one, prompt in zip(left, prompts)]
"""
ROWS = [{"prompt": f"Say {n}.", "answer": str(n), "n": n} for n in range(60)]
USER = {"role": "user", "content": "Count."}


@pytest.fixture(autouse=True)
def place(tmp_path, command):
    """A folder with rows.jsonl and rewards.py."""
    Path("rewards.py").write_text(FUNCTIONS)
    write("rows.jsonl", ROWS)
    return tmp_path


def write(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def spec_of(functions, data="rows.jsonl", **options):
    """A spec with functions of rewards.py."""
    names = " ".join(f"rewards.py:{name}" for name in functions.split())
    given = "".join(f",{key}={value}" for key, value in options.items())
    return f"rewarded:data={data},reward={names}{given}"


def prompts_of(env, seeds):
    return [env.reset(seed)[0]["content"] for seed in seeds]


def scored(spec, texts, seeds=None):
    """The steps of a batch, by default all of the same row."""
    envs = [make(spec) for _ in texts]
    for env, seed in zip(envs, seeds or [3] * len(texts), strict=True):
        env.reset(seed)
    return Rewarded.step_batch(envs, texts)


def globals_of(spec):
    return make(spec).functions[0][1].__globals__


@pytest.mark.parametrize(("functions", "options", "rewards", "right"), [
    ("accuracy brief sometimes", {"weights": "2, .5,1"}, [2.9, 0.45, 0.5], [1, 0, 0]),
    ("sometimes", {}, [0.5, None, 0.5], [0, None, 0]),
    ("sometimes halved", {"threshold": 0.5}, [1, 0.5, 1], [1, 1, 1]),
    ("halved accuracy", {"correct": "rewards.py:accuracy"}, [1.5, 0.5, 0.5], [1, 0, 0]),
    ("accuracy sometimes", {"weights": "1 0", "correct": "sometimes", "threshold": 0.5},
     [1, 0, 0], [1, None, 1]),
    ("wrapped", {}, [3, 3, 3], [1, 1, 1]), ("array", {}, [0, 1, 2], [0, 1, 1]),
    ("meets meets", {}, [2, 2, 2], [1, 1, 1]), ("never", {}, [None] * 3, [None] * 3),
    ("array array", {"weights": "1 -2", "correct": "array_2"}, [0, -1, -2], [0, 1, 1]),
])  # fmt: skip
def test_the_reward_is_the_weighted_sum_of_the_functions_that_apply(
    functions, options, rewards, right
):
    write("rows.jsonl", [{"prompt": "Say 42.", "answer": "42"}])
    steps = scored(spec_of(functions, **options), ["42", "x", "b" * 10])
    for step, reward, correct in zip(steps, rewards, right, strict=True):
        if reward is None:
            assert isinstance(step, NoReward) and "rows.jsonl:1" in str(step)
        else:
            assert step.reward == pytest.approx(reward) and step.info["correct"] == correct
            assert (step.done, step.message, step.info["row"]) == (True, None, "rows.jsonl:1")
    if "brief" in functions:
        assert steps[0].info["reward_brief"] == pytest.approx(0.8)
        assert steps[0].info["weight_accuracy"] == 2 and "weight_sometimes" not in steps[0].info


def test_an_evaluation_leaves_out_what_the_function_of_correct_does_not_apply_to():
    spec = spec_of("zero sometimes", correct="sometimes", threshold=0.5)
    for seed, is_left_out in ((3, False), (EVAL_SEEDS[0], True)):
        first, second = scored(spec, ["a", "x"], [seed, seed])
        assert first.info["correct"] and isinstance(second, NoReward) is is_left_out


@pytest.mark.parametrize(("functions", "error"), [
    ("two", "two: 2 rewards for 3"), ("nothing", "returned None, not a list of 3"),
    ("zero never,correct=never", "^never returned"), ("get_shorter", "this makes reward functions"),
    ("is_down", "is_down: no judge"), ("zero,environment=rewards.py:Parts", "not a text"),
])  # fmt: skip
def test_a_function_that_returns_no_rewards_fails_its_batch(functions, error):
    with pytest.raises(EnvFailure, match=error):
        scored(spec_of(functions), ["a"] * 3, [EVAL_SEEDS[i] for i in (1, 1, 2)])
    assert functions != "is_down" or len(globals_of(spec_of(functions))["calls"]) == 1


@pytest.mark.parametrize(("functions", "errors"), [
    ("strict", [r"strict: ValueError: invalid literal .* 'none' \(bad.jsonl:1\)"]), ("once", []),
    ("strict_too", [r"too: Attr[^;]* \(bad"]), ("times", ["columns: prompt, answer"] * 3),
    ("of_messages", ["make each prompt a list of messages"] * 3), ("late", ["global_step"] * 3),
    ("of_texts", [r"completion\[0\]"]),
])  # fmt: skip
def test_a_row_that_fails_costs_only_its_own_episodes_and_is_named(functions, errors):
    """After an exception each row is judged by itself."""
    prompt = [USER | {"content": "Say it."}, USER] if functions == "of_texts" else "Say it."
    write("bad.jsonl", [{"prompt": prompt, "answer": "none"}, *ROWS])
    spec = spec_of(functions, "bad.jsonl")
    env = make(spec)
    seeds = [next(i for i in range(999) if prompts_of(env, [i]) == [f"Say {text}."])
             for text in ("it", "1", "2")]  # fmt: skip
    steps = scored(spec, ["a", "a", "a"], seeds)
    for step, error in zip(steps, errors, strict=False):
        assert isinstance(step, Exception) and re.search(error, str(step))
    assert all(step.reward == 1 for step in steps[len(errors) :])


def test_each_completion_and_each_function_has_lists_of_its_own():
    """Also those of one row, as TRL's data loader makes them; and both names of the prompt."""
    write("chats.jsonl", [{"question": [USER], "left": [1, 2], "n": n} for n in range(40)])
    for _ in range(2):
        steps = scored(spec_of("takes sees", "chats.jsonl", prompt="question"), ["a", "b", "c"])
        assert [step.reward for step in steps] == [pytest.approx(4.2)] * 3
    assert make(spec_of("sees", "chats.jsonl", prompt="question")).reset(3) == [USER]


class Judge:
    def score(self, completions):
        return [1.0]


def test_functions_of_one_name_are_different_ones_but_for_a_cell_that_runs_again():
    cells, made, judges = [{}, {}, {}], {}, [Judge(), Judge()]
    for cell, module in zip(cells, ("cell", "cell", "other"), strict=True):
        exec("def judge(completions): return [1.0]", {"__name__": module}, cell)
    loop = "for n in (0, 1):\n  def judge(completions, n=n): return [n]\n  made[n] = judge"
    exec(loop, {"__name__": "loop", "made": made})
    *again, other = [cell["judge"] for cell in cells]
    negative = [functools.wraps(f)(lambda completions: [-1.0]) for f in again]
    assert of_objects(ROWS, again).endswith("reward=python:judge python:judge_2")
    methods = [judge.score for judge in judges]
    for different in ([again[1], negative[0]], methods, made.values(), [again[0], other]):
        assert len({of_objects(ROWS, f) for f in different}) == 2
    for same in (again, negative, [judges[0].score] * 2):
        assert len({of_objects(ROWS, f) for f in same}) == 1


@pytest.mark.parametrize(("texts", "num_held_out"), [
    ([f"{n} and {n * n}" for n in range(400)], 52),  # by CRC-32, as recorded runs have it
    ([f"<|user|>Say {n}.<|end|><|assistant|>" for n in range(40)], 4),  # which holds out none
    ([f'[{{"content": "Say {n}.", "role": "user"}}]' for n in range(100)], 16),  # 2 by CRC-32
])  # fmt: skip
def test_about_one_prompt_in_eight_is_held_out(texts, num_held_out):
    found = rewarded.held_out_of(texts)
    assert sum(found) == num_held_out
    assert (found == [*map(is_held_out, texts)]) is (num_held_out == 52)


def test_rows_are_split_by_content():
    env = make(spec_of("zero"))
    held_out = [row["prompt"] for row in ROWS if is_held_out(row["prompt"])]
    assert prompts_of(env, EVAL_SEEDS[: len(held_out)]) == held_out  # in their order, each once
    trained = set(prompts_of(env, [*range(400), *DEMO_SEEDS[:400]]))
    assert trained == {row["prompt"] for row in ROWS} - set(held_out)
    tasks = eval_tasks([spec_of("zero"), "letter_counting"], 256)  # each row once
    assert len(tasks) == len(held_out) + 256
    # white space makes no other prompt, nor does a key without a value
    programs = [f"if a:\n    b = {n}\n{indent}c()" for n in range(160) for indent in ("", "    ")]
    chats = [[USER | {"content": text, "name": None}] for text in programs[160:]]
    chats[::2] = [[USER | {"content": text}] for text in programs[160::2]]
    write("shapes.jsonl", [{"prompt": prompt} for prompt in programs[:160] + chats])
    env = make(spec_of("zero", "shapes.jsonl"))
    used = [{re.findall(r"\d+", str(row))[0] for row in rows} for rows in (env.train, env.test)]
    assert len(env.train) + len(env.test) == 320 and not used[0] & used[1] and all(used)


def test_data_of_its_own_for_evaluation_is_used_whole_and_so_is_that_for_training():
    write("test.jsonl", [{"prompt": f"Say {n}.", "answer": f"{n}"} for n in range(90, 191)])
    trained, evaluated = (absolute(spec_of("zero", f"{x}.jsonl")) for x in ("rows", "test"))
    rewarded.begin_run(RunInfo([trained], [evaluated]))
    test = make(evaluated).test
    assert len(test) == 101 and rewarded.draw(EVAL_SEEDS.start + 1, [], test) is test[1]
    assert make(trained).train == ROWS
    rewarded.begin_run(RunInfo([trained], [trained, "letter_counting"]))  # of both uses: divided
    made = make(trained)
    assert 3 < len(made.test) < 20 and len(made.train) == 60 - len(made.test)


def test_rows_of_one_prompt_are_tasks_and_too_few_are_for_both_uses(capsys):
    rows = [{"prompt": "Guess.", "answer": str(n)} for n in range(40)]
    write("guess.jsonl", rows)
    env = make(spec_of("accuracy", "guess.jsonl"))
    answers = [{row["answer"] for row in own} for own in (env.train, env.test)]
    assert not answers[0] & answers[1] and len(answers[0]) + len(answers[1]) == 40
    for name, few in [("a", [rows[0]] * 4), ("b", ROWS[:1])]:
        write(f"{name}.jsonl", few)
        env = make(spec_of("accuracy", f"{name}.jsonl"))
        assert env.train == env.test == few
        assert "the run evaluates on what it trains on" in capsys.readouterr().err


@pytest.fixture
def datasets(place, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(place / "cache"))
    return datasets


def test_local_files_of_other_kinds_are_rows_too(datasets):
    Path(f"{Path.cwd().name}.py").touch()  # `datasets` takes it for a script that loads the folder
    table = datasets.Dataset.from_list(ROWS)
    table.to_csv("a.csv")
    table.to_parquet("a.parquet")
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk("splits")
    Path("b.csv").write_bytes(b"\xef\xbb\xbf" + Path("a.csv").read_bytes())  # as Excel writes it
    Path("a.tsv").write_text(Path("a.csv").read_text().replace(",", "\t"))
    Path("a.json").write_text(json.dumps(ROWS, indent=1))
    Path("a.jsonl").write_text(Path("rows.jsonl").read_text(), encoding="utf-8-sig")
    expected = make(spec_of("two")).train
    for file in "a.csv b.csv a.tsv a.parquet a.json a.jsonl splits".split():
        found = make(spec_of("two", file)).train
        of_text = file.endswith("sv")
        assert found == [row | {"n": str(row["n"])} if of_text else row for row in expected]
        assert [row.place for row in found] == [f"{file}:{int(row['n']) + 1}" for row in found]
    assert make(spec_of("two", "splits", split="test")).train == ROWS[:1]
    rows = of_objects(ROWS, "").partition("data=")[2].partition(",")[0]
    for file in [rows, *"splits splits/train a.json a.jsonl a.csv a.parquet ./none".split()]:
        with pytest.raises(UsageError, match=r"has no split 'dev'|no file or folder"):
            make(spec_of("two", file, split="dev"))


def test_values_are_those_of_the_file(datasets):
    """A CSV has texts; parquet gives the call of each row the arguments of all, as null, and what
    is no picture."""
    texts = ["NA", "None", "007", "1.50", ""]
    Path("a.csv").write_text("prompt,answer\n" + "".join(f"{t}?,{t}\n" for t in texts))
    env = make(spec_of("two", "a.csv"))
    assert sorted(row["answer"] for row in env.train + env.test) == sorted(texts)
    arguments, rows = [{"word": "a"}, {"number": 1, "within": {"all": [1, None]}}], []
    for i in range(40):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments[i % 2]}}
        chat = [{"role": "user", "content": f"{i}?"}]
        chat += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        rows.append({"prompt": [*chat, {"role": "tool", "content": "found"}], "n": i})
    table = datasets.Dataset.from_list(rows)
    pictures = table.add_column("image", [{"bytes": b"none", "path": None}] * 40)
    pictures.cast_column("image", datasets.Image()).to_parquet("a.parquet")
    write("a.jsonl", rows)
    parquet, lines = (make(spec_of("two", f"a.{kind}")).train for kind in ("parquet", "jsonl"))
    pictures = datasets.Dataset.from_parquet("a.parquet")
    assert make(of_objects(pictures, "rewards.py:two")).train == parquet
    assert [row.pop("image") for row in parquet] == [{"bytes": b"none", "path": None}] * len(lines)
    assert parquet == lines
    own = {"data_files": "a.jsonl", "split": "train"}  # reads what differs from row to row as JSON
    datasets.load_dataset("json", **own).to_parquet("b.parquet")
    assert make(spec_of("two", "b.parquet")).train == lines


def test_a_change_of_what_a_spec_names_is_seen(datasets, monkeypatch):
    code, cell, seen = "def right(completions): return [{}.0]", {"__name__": "cell"}, []
    progress, changes = {}, []
    for n, both in ((0, {8, 0}), (0, {0, 8}), (1, {0, 8})):  # equal sets in another order
        rewarded.OBJECTS.clear()
        progress["first_returns"] = {"x": 1}
        Path("judges.py").write_text(code.format(n))
        import_source("judges")
        exec(code.format(n), cell)
        datasets.Dataset.from_list([{"prompt": str(n)}]).save_to_disk("whole")
        specs = [f"rewarded:reward={name}:right" for name in ("judges.py", "judges")]
        monkeypatch.setitem(ENVIRONMENTS, "mine", type("Mine", (), {"step": cell["right"]}))
        judge = type("Judge", (), {"__call__": cell["right"], "calls": n})()
        default = lambda completions, given=(both, n): given  # noqa: E731
        functions = [cell["right"], default, functools.partial(print, {"a": (both, n)}), judge]
        specs += ["rewarded:data=./whole", "mine", *(of_objects("a.jsonl", f) for f in functions)]
        seen.append([EnvSpec.read(spec).checksum() for spec in specs])
        cfg = Config(env=(EnvSpec.read("reverse"),), eval_env=(EnvSpec.read("mine"),))
        changes.append((note_changes(cfg, progress), progress["first_returns"]))
    assert changes == [([], {"x": 1})] * 2 + [(["options, code or data of mine"], {})]
    assert seen[0] == seen[1] and all(a != b for a, b in zip(seen[1], seen[2], strict=True))


def test_a_run_with_another_threshold_does_not_learn(command):
    specs = [spec_of("zero", name="x", threshold=threshold) for threshold in (1, 0)]
    assert command("--env", specs[0], *SMALL, "--run-name", "a")[0] == 0
    _, out, _ = command("--resume", "runs/a", "--num-updates", 2, "--env", specs[1])
    assert (
        f"changed at this resume: env ['{specs[0]}'] -> ['{specs[1]}'], num_updates 1 -> 2" in out
    )
    assert "2, options, code or data of x\n" in out
    assert "before and after are not compared" in out and "It learns" not in out
    assert metrics_of("runs/a")[2]["eval/x/p_value"] == 1.0


@pytest.mark.parametrize(("options", "words"), [
    ("data=none.csv,reward=rewards.py:two", "no file none.csv"), ("data=rows.jsonl", "set data="),
    ("data=rows.jsonl,reward=rewards.py:calls", "calls is no function"),
    ("data=rows.jsonl,reward=rewards.py", "FILE.py:"),
    ("data=rows.jsonl,reward=rewards.py:two rewards.py:rank,weights=1", "1 weights for 2"),
    ("data=rows.jsonl,reward=rewards.py:two,correct=rank", "correct=rank"),
    ("data=bad.jsonl,reward=rewards.py:two", "line 2"),
    ("data=odd.jsonl,reward=rewards.py:two", "row 2: {'a': 1} in 'prompt'"),
    ("data=rows.jsonl,prompt=question,reward=rewards.py:two", "prompt, answer, n"),
    ("data=empty.jsonl,reward=rewards.py:two", "no rows"),
    ("data=pointer.parquet,reward=rewards.py:two", "git lfs pull"),
    ("data=ragged.csv,reward=rewards.py:two", "row 2: more values"),
])  # fmt: skip
def test_an_invalid_option_is_one_line(options, words):
    write("bad.jsonl", [{"prompt": "a"}, [1]])
    write("odd.jsonl", [{"prompt": "a"}, {"prompt": {"a": 1}}])
    Path("empty.jsonl").touch()
    Path("pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    Path("ragged.csv").write_text("prompt\na\nb,c\n")
    with pytest.raises(UsageError) as error:
        make(f"rewarded:{options}")
    assert words in str(error.value) and "\n" not in str(error.value)


OF_TINY = "<|user|>{}<|end|><|assistant|>Let me think.<think>"


def test_a_raw_prompt_is_tokenized_as_it_is_and_alone():
    """As in TRL; with the template around it, it would be rendered twice."""
    policy = load_small(PRETRAINED)
    render, tokenizer = Renderer(policy).opening_ids, policy.tokenizer
    assert is_rendered(OF_TINY) and is_rendered("<|im_start|>user\nHi<|im_end|>\n<think>")
    assert not is_rendered("Is <|im_end|> or <|end|> after <|user|>? 5")
    text = OF_TINY.format("1 + 1?")
    ids = render([{"role": "raw", "content": text}], [])
    assert ids == tokenizer(text).input_ids and tokenizer.decode(ids) == text
    assert {*tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>", "<|assistant|>"])} <= {*ids}
    assert len(render([{"role": "user", "content": text}], [])) > len(ids)
    with pytest.raises(UsageError, match="a raw prompt is one text"):
        render([{"role": "raw", "content": "a"}, {"role": "user", "content": "b"}], [])


def test_a_base_model_without_a_template_is_trained_on_raw_prompts(command):
    """An answer that no function judges is left out of its group. Where all others of its group
    earn the same there is no gradient; so it is with TRL."""
    write("rendered.jsonl", [{"prompt": OF_TINY.format(n)} for n in range(60)])
    flags = "--num-prompts 2 --group-size 4 --max-tokens 8 --eval-num-tasks 4 --num-updates 1"
    spec, raw = (spec_of("judged", "rendered.jsonl", raw=raw) for raw in ("false", "true"))
    code, _, err = command("--env", spec, *flags.split())
    assert code == 2 and "add raw=true" in err
    code, _, err = command("--env", raw, *flags.split(), "--system-prompt", "Be brief.")
    assert code == 2 and "a raw prompt has no system message" in err
    write_tiny("tiny", "base", 0)
    Path("base/chat_template.jinja").unlink()
    code, _, err = command("--env", spec_of("judged"), *flags.split(), "--model-id", "base")
    assert code == 2 and "the tokenizer has no chat template" in err
    code, _, err = command("--env", raw, *flags.split(), "--model-id", "base", "--run-name", "a")
    assert code == 0, err
    rows = [json.loads(line) for line in Path("runs/a/rollouts.jsonl").read_text().splitlines()]
    assert all(row["messages"][0]["role"] == "raw" for row in rows)
    first, update = read_records(Path("runs/a/metrics.jsonl"))
    assert update["episodes/no_reward"] == 0.5 and update["episodes/failed"] == 0
    assert (update["reward/mean"], update["grad/norm"]) == (-1, 0)
    assert first[f"eval/{raw}/return_mean"] == -1 and f"eval/{raw}/failed" not in first
    errors = [row.get("error") or "" for row in rows if row["kind"] == "train"]
    assert sum("NoReward" in error for error in errors) == 4


def play(policy, spec, others=()):
    """Rollouts of one batch, and the variables of the reward function's module."""
    tasks = [Task(spec, seed, seed) for seed in (1, 1, 2)] + [Task(env, 0, 9) for env in others]
    answers = Scripted(policy, *"abcdefgh")
    rollouts = RolloutCollector(policy, 1).collect(tasks, answers, SamplingParams(4))
    return rollouts, globals_of(spec)


def test_functions_are_called_once_per_batch_with_lists(policy):
    write("rows.jsonl", [*ROWS, {"prompt": "A row with another column.", "level": 5}])
    others = ["letter_counting", spec_of("times")]
    rollouts, module = play(policy, spec_of("accuracy rank", weights="1 .5"), others)
    [(prompts, completions, answer, columns)] = module["calls"]
    assert prompts == [r.messages[0]["content"] for r in rollouts[:3]]
    assert answer == [prompt[4:-1] for prompt in prompts]
    assert prompts[0] == prompts[1] != prompts[2] and completions == ["a", "b", "c"]
    assert [r.info["row"] for r in rollouts[:3]] == [f"rows.jsonl:{int(a) + 1}" for a in answer]
    assert columns["n"] == list(map(int, answer)) and columns["level"] == [None] * 3
    assert [r.episode_return for r in rollouts[:3]] == [0.0, 0.5, 1.0]  # compared with the others
    assert [r.error[:27] for r in rollouts] == [""] * 4 + ["RuntimeError: times: TypeErr"[:27]]


def test_functions_may_use_all_that_trl_passes_and_only_what_they_name(policy, monkeypatch):
    """A completion is what was sampled, without the beginning that the prompt gives."""
    rewarded.begin_run(RunInfo((), (), 7, 0.5, 3))
    monkeypatch.setenv("RANK", "3")  # as some clusters set it
    begun = {"role": "assistant", "content": "<think>One"}
    write("begun.jsonl", [{"prompt": [USER, begun]}] * 2)
    rollouts, module = play(policy, spec_of("trl array", "begun.jsonl"))
    said = [[{"role": "assistant", "content": text}] for text in "abc"]
    sampled = [r.turns[0].completion_ids for r in rollouts]
    state = {"global_step": 3, "max_steps": 7, "epoch": 0.75, "is_world_process_zero": True}
    assert module["calls"] == [(said, sampled, state)] and all(sampled)
    assert [r.info for r in rollouts] == [
        {"row": "begun.jsonl:1", "share": 1.0, "seen": "Infinity", "letter": letter,
         "odd": ["NaN", "{0}"], "scores": [1.0, 1.0], "correct": True, "reward_trl": 1.0,
         "reward_array": float(n)}
        for n, letter in enumerate("ABC")
    ]  # fmt: skip
    assert [r.messages[-1]["content"] for r in rollouts] == [f"<think>One{text}" for text in "abc"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    scored(spec_of("trl", "begun.jsonl"), ["a"])
    assert not module["calls"][-1][2]["is_world_process_zero"]


COUNTER = """
calls = []
def multiply(a: int, b: int) -> dict:
    '''
    Multiplies.

    Args:
        a: One number.
        b: Another one.
    '''
    return {"product": a * b, "is_even": None}
class Odd(Counter):
    def __init__(self):
        self.lock = __import__("threading").Lock()  # nothing copies it
    def get_reward(self):
        return float(self.count)
    def __len__(self):
        return 0
    def _hidden(self):
        pass
class Later(Odd):
    async def get_reward(self):
        return float(self.count)
def used(prompts, completions, completion_ids, **columns):
    calls.append((completions[0], completion_ids[0]))
    assert prompts[0][-1]["content"].endswith(f" To {columns['goal'][0]}, please.")
    return few_calls(completions)
"""
COUNTING = ("rewarded:data=goals.jsonl,reward=counter.py:reached counter.py:used,"
            "tools=counter.py:multiply,environment=counter.py:")  # fmt: skip
TWO_CALLS = f"<think>So</think>\n\nNow {call_text('add', by='2')}{call_text('multiply', a=2, b=3)}"


@pytest.mark.parametrize(("world", "texts", "max_turns", "num_calls", "total"), [
    ("Odd", ["<think>1</think>\n\nDone. "], 3, 3, 1.7),
    ("Later", [call_text("add", by=4)], 3, 3, 1.7),  # is not run, as no answer may follow
    ("Odd", [call_text("add", by=4)], 9, 4, 4.7),  # its result does not fit into the context
])  # fmt: skip
def test_functions_get_what_trl_gives_them_of_an_episode_with_tools(
    policy, world, texts, max_turns, num_calls, total
):
    """As seen in TRL 1.16. The functions are those of the README, and others; the rows have no
    prompt, which `reset` gives."""
    Path("counter.py").write_text(block("class Counter") + COUNTER)
    write("goals.jsonl", [{"goal": 1, "n": n} for n in range(20)])
    policy.max_length = 1 << 20
    for _ in range(1 + (max_turns == 9)):
        collector = RolloutCollector(policy, max_turns if policy.max_length < 1 << 20 else 3)
        answers = Scripted(policy, TWO_CALLS, call_text("add", by=-1), *texts)
        [rollout] = collector.collect([Task(COUNTING + world, 5, 0)], answers, SamplingParams(4))
        policy.max_length = len(rollout.turns[-1].prompt_ids) + 5
    assert not rollout.error and rollout.for_log["tools"] == ["multiply", "add"]
    assert rollout.messages[0]["content"] == " To 1, please."
    assert rollout.episode_return == pytest.approx(total) and len(rollout.turns) == 3
    assert rollout.info["tool_calls"] == num_calls
    assert rollout.episode_truncated is ("Done" not in texts[0])
    first, last = rollout.turns[0], rollout.turns[-1]
    completion, ids = globals_of(COUNTING + world)["calls"][-1]
    assert ids == (last.prompt_ids + last.completion_ids)[len(first.prompt_ids) :]
    called, result, product, *_, end = completion
    assert [m["role"] for m in completion] == "assistant tool tool assistant tool assistant".split()
    assert (called["reasoning_content"], called["content"]) == ("So", "Now")
    functions = [call["function"] for call in called["tool_calls"]]
    assert functions[0] == {"name": "add", "arguments": {"by": 2}}
    assert result == {"role": "tool", "name": "add", "content": "It is 2."}
    assert product["content"] == "{'product': 6, 'is_even': None}"
    assert end["content"] == ("Done." if "Done" in texts[0] else "")
