"""Prompts from a data set, and reward functions with TRL's signature: a task without a class.

    --env "rewarded:data=rows.jsonl,reward=rewards.py:accuracy"
    --env "rewarded:data=rows.jsonl,reward=rewards.py:accuracy rewards.py:brief,weights=1 0.2"
    --env "rewarded:data=openai/gsm8k,config=main,prompt=question,reward=my_rewards:accuracy"

Each row has a prompt, a text or a list of messages, and any other columns. A text is a message of
the user; one that has the chat template around it already, or is for a base model, needs raw=true.
All completions that a
rank samples at the same time are a batch; in training, groups lie side by side. Each function is
called once for a batch. It receives lists of its own, of the columns too (None where a row has no
value), and returns a list with one number for each completion, or None or NaN where it does not
apply. A prompt may end with a message of the assistant, which the policy continues: it is in the
prompt and, as in TRL, not in the completion:

    def accuracy(prompts, completions, answer, **columns):
        return [float(a in text) for text, a in zip(completions, answer)]

So it may compare completions; with several ranks a group can lie in the batches of two. If the
prompt is a list of messages, a completion is one, too, as in TRL. `async` functions are awaited
together, and those of all batches in the same event loop; if all are, --env-timeout limits their
call. After an exception they are called again for each row by itself, and the rows that fail
cost only their own episodes. EnvFailure, anything but such a list, or only None from all functions
for all completions fails every episode of the batch.

As in TRL, a function may also ask for `completion_ids`, the sampled tokens of each completion;
`trainer_state`, whose `global_step` of `max_steps` updates are complete, after `epoch` passes over
as many prompts as there are rows for training; `log_extra(column, values)`, which adds one value to
the info of each completion; and `log_metric(name, value)`, which adds the mean of the values that
the functions log to the info of all.

Reward: the sum of weight times value over the functions that apply. A completion to which none
applies has no reward: it is left out of its group. `info["correct"]`, of which accuracy is the
mean: the function `correct` returned `threshold` or more; by default it is the first one, and 1. A
function of `correct` that is none of `reward` adds nothing to the reward. `info["reward_<name>"]`
has the value of each, `info["weight_<name>"]` its weight if that is not 1. <name> is what follows
the colon, with the file's before it (first_accuracy, second_accuracy) where the functions of two
files have the same. `info["row"]`: FILE:LINE of the row.

`tools` and `environment` are TRL's `tools` and `environment_factory`: the policy may call the
functions, and the public methods of an object that each episode has for itself. Its `reset` gets
the row, and what it returns ends the prompt. Functions get these objects, `environments`, and each
completion (of messages) has all that the policy and the tools said, in OpenAI's form; then they are
called for each completion by itself, and `completion_ids` are those of the last answer.

By default each prompt of an update is drawn from all rows, so that some come twice before others
come once. `order=shuffled` goes through all rows in an order that the run's seed decides, each pass
in another one; `order=data` in that of the file. Prompts that --filter-groups draws in place of
others are drawn from all rows.

Of equal rows only the first one is kept. One prompt in eight is reserved for evaluation, decided by
its text, or one row in eight if all have the same prompt; where that leaves none for one of both,
all rows are for both. Where --eval-env names other data, both are used whole: let them have no
prompt in common.
"""

import asyncio
import copy
import functools
import inspect
import json
import math
import os
import random
import reprlib
import statistics
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from environments.base import (
    EVAL_SEEDS,
    TRAIN_SEEDS,
    Env,
    EnvFailure,
    Message,
    NoReward,
    RunInfo,
    Step,
    UsageError,
    is_held_out,
)
from environments.parsing import prefill_of, user
from environments.plumbing import event_loop
from environments.plumbing.dataset import Row, read_hub, read_jsonl
from environments.plumbing.registry import OBJECTS, EnvSpec, find_file, import_attribute, make

RUN = RunInfo((), ())  # that of this process; without one all data is divided
Function = tuple[str, Callable[..., Any], float]  # name, function, weight


@dataclass
class TrainerState:
    """The progress of the run, as far as reward functions may use it; names of transformers."""

    global_step: int = 0  # updates that are complete
    max_steps: int = 0  # --num-updates
    epoch: float = 0.0  # prompts drawn until then / rows for training

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has global_step, max_steps and epoch, no {name}")


OF_TEXTS = ("as the prompts are texts, each completion is one: for completion[0]['content'] make "
            "each prompt a list of messages")  # fmt: skip
FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
Order = Literal["random", "shuffled", "data"]
Source = tuple[str, str, str]  # data, config, split


class Rewarded(Env):
    """`data`: FILE.jsonl, .json, .csv, .parquet, a data set of the hub or a folder with one, with
    its `config` and `split`; `prompt`: the column with the prompt; `reward`: functions as
    FILE.py:name or module:name; `weights`: of the functions, by default 1; `correct`, `threshold`:
    a response is right if this function, one of `reward` by its name or another one, returns as
    much; `raw`: a prompt that is a text is tokenized as it is, without the chat template; `name`:
    of this environment, in titles and metrics; `order`: of the rows in training; `tools`: functions
    that the policy may call; `environment`: a class as TRL's `environment_factory`, whose methods
    are tools."""

    def __init__(
        self,
        data: str = "",
        reward: tuple[str, ...] = (),
        weights: tuple[float, ...] = (),
        prompt: str = "prompt",
        config: str = "",
        split: str = "train",
        correct: str = "",
        threshold: float = 1.0,
        raw: bool = False,
        name: str = "",
        order: Order = "random",
        tools: tuple[str, ...] = (),
        environment: str = "",
    ):
        if not data or not reward:
            raise UsageError("set data=FILE.jsonl and reward=FILE.py:function")
        if name and not name.replace("-", "_").isidentifier():
            raise UsageError(f"name={name}: give a word, such as name=gsm8k")
        if weights and len(weights) != len(reward):
            raise UsageError(f"{len(weights)} weights for {len(reward)} reward functions")
        weights = weights or (1.0,) * len(reward)
        self.num_rewards = len(reward)
        own = [name for name in reward if correct in (name, name.rpartition(":")[2])]
        if ":" in correct and not own:
            reward, weights, own = (*reward, correct), (*weights, 0.0), [correct]
        functions = [*map(import_attribute, reward)]
        names = [name.rpartition(":")[2] for name in reward]
        if len({*names}) < len(names):  # of several files
            files = [Path(name.rpartition(":")[0].removesuffix(".py")).name for name in reward]
            names = [f"{file}_{name}" for file, name in zip(files, names, strict=True)]
        for name, function in zip(names, functions, strict=True):
            if not callable(function) or names.count(name) > 1:
                raise UsageError(f"reward: {name} is no function, or given twice")
        if correct and len(own) != 1:
            raise UsageError(f"correct={correct}: name one of {' '.join(reward)}, or another "
                             "FILE.py:function")  # fmt: skip
        self.correct, self.threshold = names[reward.index(own[0]) if own else 0], threshold
        self.functions: list[Function] = list(zip(names, functions, weights, strict=True))
        self.waits = all(map(inspect.iscoroutinefunction, functions))
        self.prompt, self.order, self.raw = prompt, order, raw
        self.world = import_attribute(environment)() if environment else None
        methods = inspect.getmembers(type(self.world), inspect.isfunction)  # of None: none
        self.tools = [*map(import_attribute, tools)] + [
            getattr(self.world, name) for name, _ in methods
            if name not in ("reset", "get_reward") and not name.startswith("_")
        ]  # fmt: skip
        self.train, self.test, self.columns = load(data, prompt, config, split)

    @classmethod
    def begin_run(cls, info: RunInfo) -> None:
        begin_run(info)

    def reset(self, seed: int) -> list[Message]:
        self.row = draw(seed, self.train, self.test, self.order)
        if self.world is not None:
            row = copy.deepcopy(dict.fromkeys(self.columns) | self.row)
            if (seen := self.world.reset(**row)) is not None:  # it ends the prompt
                self.row = self.row.with_prompt(self.prompt, seen)
        return _messages(self.row[self.prompt], self.raw)

    def step(self, response: str) -> Step:
        [step] = self.step_batch([self], [response])
        if isinstance(step, Exception):
            raise step
        return step

    @classmethod
    def step_batch(cls, envs: Sequence[Env], responses: list[str]) -> list[Step | Exception]:
        batch = [env for env in envs if isinstance(env, Rewarded)]
        steps: list[Step | Exception]
        try:
            called = cls.call(batch, responses)
        except Exception as failure:
            rows = {id(env.row): env.row for env in batch}
            if isinstance(failure, EnvFailure) or len(rows) == 1:
                raise
            by_place: dict[int, Step | Exception] = {}
            for row in rows.values():
                places = [place for place, env in enumerate(batch) if env.row is row]
                own, texts = [batch[i] for i in places], [responses[i] for i in places]
                try:
                    found = cls.to_steps(own, *cls.call(own, texts))
                except Exception as error:
                    found = [error] * len(places)
                by_place |= dict(zip(places, found, strict=True))
            steps = [by_place[place] for place in range(len(batch))]
        else:
            steps = cls.to_steps(batch, *called)
        if len(steps) > 1 and all(isinstance(step, NoReward) for step in steps):
            names = [name for name, *_ in batch[0].functions[: batch[0].num_rewards]]
            raise ValueError(f"{', '.join(names)} returned None for all completions")
        return steps

    @classmethod
    def call(
        cls, batch: Sequence["Rewarded"], responses: list[str]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What each function returns, by name, and what they log for each completion."""
        first = batch[0]
        prompts = [env.row[first.prompt] for env in batch]
        completions: list[Any] = [
            response if isinstance(prompt, str)
            else [*getattr(response, "earlier", ()),
                  {"role": "assistant", "content": response.removeprefix(prefill_of(prompt))}]
            for prompt, response in zip(prompts, responses, strict=True)
        ]  # fmt: skip
        columns = {key: [env.row.get(key) for env in batch] for key in first.columns}
        if first.prompt != "prompt":  # a function may know it by the name that the data gives it
            columns[first.prompt] = prompts
        logged: list[dict[str, Any]] = [{} for _ in batch]  # by log_extra
        metrics: dict[str, list[float]] = defaultdict(list)  # by log_metric

        def log_extra(column: str, values: Sequence[Any]) -> None:
            for info, value in zip(logged, values, strict=True):
                info[column] = value

        arguments = {
            **columns, "prompts": prompts, "completions": completions,
            "completion_ids": [[*getattr(response, "token_ids", ())] for response in responses],
            "trainer_state": TrainerState(RUN.updates_done, RUN.num_updates, passes()),
            "log_extra": log_extra,
            "log_metric": lambda name, value: metrics[name].append(float(value)),
        }  # fmt: skip
        if first.world is not None:
            arguments["environments"] = [env.world for env in batch]
        row = first.row if all(env.row is first.row for env in batch) else None
        returned = _call_all(first.functions, arguments, row)
        means = {name: statistics.fmean(numbers) for name, numbers in metrics.items()}
        return returned, [means | info for info in logged]

    @classmethod
    def to_steps(
        cls, batch: Sequence["Rewarded"], returned: dict[str, Any], logged: list[dict[str, Any]]
    ) -> list[Step | Exception]:
        values: dict[str, list[float | None]] = {}
        for name, numbers in returned.items():
            with _named(name):
                values[name] = _numbers(numbers, len(batch))
        return [env.to_step({name: numbers[i] for name, numbers in values.items()}, logged[i])
                for i, env in enumerate(batch)]  # fmt: skip

    def to_step(self, values: dict[str, float | None], logged: dict[str, Any]) -> Step | Exception:
        """The Step of one completion, from the value of each function and what they logged; an
        error that names the function and the row, if a value is infinite, and NoReward if none
        applies."""
        for name, value in values.items():
            if value is not None and math.isinf(value):
                error = ValueError(f"it returned {value} for a completion")
                return _with_names(error, name, self.row)
        applied = [weight * value for name, _, weight in self.functions[: self.num_rewards]
                   if (value := values[name]) is not None]  # fmt: skip
        if not applied:
            return NoReward(f"no function applies to the answer ({self.row.place})")
        first = values[self.correct]
        info = {f"reward_{name}": value for name, value in values.items() if value is not None}
        info |= {f"weight_{name}": weight for name, _, weight in self.functions if weight != 1}
        correct = first is not None and first >= self.threshold
        place = {"row": self.row.place}
        return Step(None, sum(applied), True, place | logged | {"correct": correct} | info)


def of_objects(data: Any = None, reward: Any = (), **options: Any) -> str:
    """The spec of `rewarded` for rows and functions that Python has, not a file.

    `data`: a `datasets.Dataset`, or a list of dicts; `reward`: a function, or several; each may
    also be a text as in a spec. `options`: the others of `rewarded`, such as weights=[1, 0.2] or
    tools=[multiply]. Raises UsageError if `data` is anything else.
    """
    if not isinstance(data, str):
        try:
            rows = [*map(dict, data)] if len(data) else []
        except (TypeError, ValueError):
            raise UsageError(
                "data=: give a datasets.Dataset or a list of dicts; of a DatasetDict one part, as "
                'data["train"], of a DataFrame data.to_dict("records")'
            ) from None
        # the same rows have the same name in a later call, which resumes the run
        name = f"rows_{zlib.crc32(json.dumps(rows, default=repr).encode()):08x}"
        OBJECTS[name], data = rows, f"python:{name}"
    given: dict[str, Callable[..., Any]] = {}

    def text(value: Any) -> str:
        if isinstance(value, list | tuple):
            return " ".join(map(text, value))
        if not callable(value):
            return str(value)
        name = getattr(getattr(value, "func", value), "__name__", type(value).__name__)
        name = name if name.isidentifier() else "reward"  # of a lambda
        while given.setdefault(name, value) != value:
            name += "_2"
        return f"python:{name}"

    values = {"data": data, "reward": reward} | options
    spec = "rewarded:" + ",".join(f"{key}={text(value)}" for key, value in values.items())
    OBJECTS.update(given)
    return spec


def begin_run(info: RunInfo) -> None:
    """From now on `load` divides data as this run needs it, and functions read its progress."""
    global RUN
    RUN = info
    for cached in CACHED:
        cached.cache_clear()


def passes() -> float:
    """How often the run has drawn as many prompts as its data has rows for training."""
    own = [spec for spec in map(EnvSpec.read, RUN.train_envs) if spec.name == "rewarded"]
    rows = sum(len(_load(spec)[0]) for spec in own)
    share = len(own) / max(1, len(RUN.train_envs))
    return RUN.updates_done * RUN.num_prompts * share / rows if rows else 0.0


def sources(specs: Sequence[str]) -> set[Source]:
    """The data of environments that have some: `rewarded`, `agent` and `math_qa`, but for the data
    sets that `math_qa` knows, which are not divided."""
    found = set()
    for env in map(EnvSpec.read, specs):
        if env.name in ("rewarded", "agent", "math_qa"):
            o = {"config": "", "split": "train"} | env.values
            found.add((o["data"], o["config"], o["split"]))
    return found


class Placed(Row):
    """A row, and its place: FILE:LINE, or of a data set NAME:NUMBER, from 1."""

    place = ""

    def with_prompt(self, column: str, end: str) -> "Placed":
        """The row whose prompt, in this column, ends with `end`, too."""
        prompt = self[column]
        if isinstance(prompt, str):
            prompt += end
        else:
            prompt = [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + end}]
        row = Placed(self | {column: prompt})
        row.place = self.place
        return row


def draw(seed: int, train: list[Placed], test: list[Placed], order: Order = "random") -> Placed:
    """The row of a seed; those of evaluation in their order, each once. `order`: of the others; but
    for random ones, the first seeds for training are the first pass over the rows, and so on."""
    if seed in EVAL_SEEDS:
        return test[(seed - EVAL_SEEDS.start) % len(test)]
    if order == "random" or seed not in TRAIN_SEEDS:
        return random.Random(seed).choice(train)
    done, place = divmod(seed - TRAIN_SEEDS.start, len(train))
    return train[place if order == "data" else shuffled(RUN.seed, done, len(train))[place]]


@functools.lru_cache(maxsize=2)  # an update may end one pass and begin the next
def shuffled(seed: int, done: int, count: int) -> list[int]:
    """The order of `count` rows, after `done` passes over them, in a run with this seed."""
    return random.Random(f"{seed} {done}").sample(range(count), count)


def is_in_order(spec: str | EnvSpec) -> bool:
    """Whether the environment goes through its rows: then its seeds for training are 0, 1, 2, .."""
    spec = EnvSpec.read(spec)
    return spec.name == "rewarded" and spec.values["order"] != "random"


@functools.cache  # a run needs all its data until its end
def load(
    data: str, prompt: str, config: str, split: str
) -> tuple[list[Placed], list[Placed], list[str]]:
    """Returns the rows for training, those for evaluation, and the names of the other columns.

    Data on which the run both trains and evaluates is divided, or used for both, with a line, if
    that leaves no row for one of them. Other data is used whole. Raises as `read`, and UsageError
    if there are no rows for one of both uses.
    """
    rows, names = read(data, config, split, prompt)
    trained, evaluated = sources(RUN.train_envs), sources(RUN.eval_envs)
    here = data, config, split
    is_divided = (here in trained) == (here in evaluated)  # both, or neither: no run has begun
    train = [row for words, row in rows if not (is_divided and is_held_out(words))]
    test = [row for words, row in rows if not is_divided or is_held_out(words)]
    if is_divided and rows and not (train and test):
        train, test = ([row for _, row in rows] for _ in range(2))
        print(
            f"{data}: {len({words for words, _ in rows})} different tasks in {len(rows)} rows are "
            "too few to hold some out: the run evaluates on what it trains on",
            file=sys.stderr,
        )
    if not train or not test:
        raise UsageError(f"{data} has {len(train)} rows for training and {len(test)} for "
                         "evaluation; add some, or name other data with --eval-env")  # fmt: skip
    return train, test, names


@functools.cache
def read(
    data: str, config: str, split: str, prompt: str
) -> tuple[list[tuple[str, Placed]], list[str]]:
    """Returns the rows, each with the text that decides its use, and the names of the columns but
    `prompt`.

    The text is that of the column `prompt`; if it is "" or all rows have the same, that of all
    columns, as JSON; with one space between words.

    Prints how many rows equal an earlier one. Raises UsageError if there is no file, a
    row has no prompt, or a column that tells rows apart is no JSON.
    """
    path = str(find_file(data)) if data.endswith(FILES) else os.path.expanduser(data)
    if data.startswith("python:"):
        rows = [*enumerate(import_attribute(data), 1)]
    elif data.endswith((".jsonl", ".json")):
        rows = read_jsonl(path)
    else:
        rows = [*enumerate(read_hub(path, config or None, split), 1)]
    unique: dict[str, tuple[str, Placed]] = {}
    empty: list[int] = []  # rows without a prompt
    for number, row in rows:
        value = row.get(prompt) if prompt else row
        if prompt in row and (value.strip() if isinstance(value, str) else value) in (None, "", []):
            empty.append(number)
            continue
        if prompt and not (isinstance(value, str | list) and value):
            what = f"no prompt in {prompt!r}; it has {', '.join(row)}"
            if prompt in row:
                what = (f"the prompt in {prompt!r} is {reprlib.repr(value)}: it must be a text or "
                        "a list of messages")  # fmt: skip
            raise UsageError(f"{data}, row {number}: {what}")
        for key, part in ({prompt: value} if prompt else row).items():
            try:
                json.dumps(part)
            except (TypeError, ValueError) as error:
                place = f"{data}, row {number}: column {key!r}"
                raise UsageError(f"{place} is no JSON: {error}") from None
        whole = json.dumps(row, sort_keys=True, default=repr)
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        if whole not in unique:
            placed = Placed(row)
            placed.place = f"{os.path.basename(path)}:{number}"
            unique[whole] = " ".join(text.split()), placed
    found = [*unique.values()]
    if len(found) > 1 and len({text for text, _ in found}) == 1:
        found = [(" ".join(whole.split()), row) for whole, (_, row) in unique.items()]
    if empty:
        print(f"{data}: left out {len(empty)} of {len(rows)} rows, whose {prompt!r} is empty; the "
              f"first one is row {empty[0]}", file=sys.stderr)  # fmt: skip
    if duplicates := len(rows) - len(empty) - len(unique):
        print(f"{data}: left out {duplicates} of {len(rows)} rows, which occur before",
              file=sys.stderr)  # fmt: skip
    return found, [n for n in dict.fromkeys(key for _, row in rows for key in row) if n != prompt]


CACHED: list[Any] = [load, read]  # and what depends on them


def num_held_out(spec: EnvSpec) -> int:
    """The number of rows for evaluation of an environment with data; no limit for any other."""
    if spec.name not in ("rewarded", "agent"):
        return sys.maxsize
    return len(_load(spec)[1])


def what_is_right(spec: EnvSpec) -> str:
    """What accuracy is the mean of, as a line."""
    env = make(spec)
    assert isinstance(env, Rewarded)
    names = [name for name, *_ in env.functions]
    which = (
        f"the first of {len(names)} functions; " if names[1:] and not spec.values["correct"] else ""
    )
    return (f"{spec.short}: an answer is right if {env.correct} returns {env.threshold:g} or more "
            f"({which}correct=NAME and threshold=X choose)")  # fmt: skip


def texts_of(spec: EnvSpec) -> Iterator[str]:
    """The prompts of the data that are texts."""
    (train, test, _), prompt = _load(spec), spec.values["prompt"]
    return (row[prompt] for row in (*train, *test) if isinstance(row[prompt], str))


def _load(spec: EnvSpec) -> tuple[list[Placed], list[Placed], list[str]]:
    o = spec.values
    return load(o["data"], o.get("prompt", ""), o["config"], o["split"])


def _messages(prompt: str | list[Message], raw: bool = False) -> list[Message]:
    if raw and isinstance(prompt, str):
        return [{"role": "raw", "content": prompt}]
    return [user(prompt)] if isinstance(prompt, str) else copy.deepcopy(prompt)


def _call_all(
    functions: list[Function], arguments: dict[str, Any], row: Row | None
) -> dict[str, Any]:
    """What each function returns, by name. `row`: as `_named`."""
    returned = {}
    # calling an async function only makes a coroutine: after the others, which may raise
    for name, function, _ in sorted(functions, key=lambda f: inspect.iscoroutinefunction(f[1])):
        with _named(name, row):
            # a copy: it may change what it gets, which other functions and later updates need
            same = {id(world): world for world in arguments.get("environments", ())}
            own = copy.deepcopy(_accepted(function, arguments), same)
            try:
                returned[name] = function(**own)
            except TypeError as error:
                if "string indices" in str(error) and isinstance(arguments["completions"][0], str):
                    raise TypeError(f"{error}; {OF_TEXTS}") from error
                raise
    waiting = {name: value for name, value in returned.items() if inspect.isawaitable(value)}
    if waiting:
        returned |= event_loop.wait_for(_await_all(waiting, row))
    return {name: returned[name] for name, _, _ in functions}


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _numbers(returned: Any, count: int) -> list[float | None]:
    """What a function returned, as `count` numbers; raises if it is anything else."""
    wanted = f"not a list of {count} numbers, one for each completion"
    if callable(returned):
        raise TypeError("it returned a function, so it makes reward functions: write `made = ..`, "
                        "a call of it, in its file, and name made")  # fmt: skip
    if isinstance(returned, str | bytes | dict | set) or not isinstance(returned, Iterable):
        raise TypeError(f"it returned {returned!r:.50}, {wanted}")
    rewards = list(returned)
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards for {count} completions")
    for reward in rewards:
        if reward is not None and (
            isinstance(reward, str | bytes) or not hasattr(reward, "__float__")
        ):
            raise TypeError(f"it returned {reward!r:.50} for a completion, not a number or None")
    numbers = [math.nan if reward is None else float(reward) for reward in rewards]
    return [None if math.isnan(number) else number for number in numbers]


async def _await_all(waiting: dict[str, Any], row: Row | None) -> dict[str, Any]:
    async def wait(name: str) -> Any:
        with _named(name, row):
            return await waiting[name]

    return dict(zip(waiting, await asyncio.gather(*map(wait, waiting)), strict=True))


@contextmanager
def _named(name: str, row: Row | None = None) -> Iterator[None]:
    """An exception in the block says in which reward function it was raised, and for which row."""
    try:
        yield
    except EnvFailure as error:
        raise EnvFailure(f"{name}: {error}") from error
    except Exception as error:
        raise _with_names(error, name, row) from error


def _with_names(error: Exception, name: str, row: Row | None) -> RuntimeError:
    columns = ", ".join(f"{key}={value!r:.60}" for key, value in (row or {}).items())
    text = f"{name}: {type(error).__name__}: {error!s:.200}"
    return RuntimeError(f"{text}; the row: {columns}" if row else text)
