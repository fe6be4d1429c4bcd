"""Prompts from a data set, and reward functions with TRL's signature: a task without a class.

    --env "rewarded:data=rows.jsonl,reward=rewards.py:accuracy"
    --env "rewarded:data=rows.jsonl,reward=rewards.py:accuracy rewards.py:brief,weights=1 0.2"
    --env "rewarded:data=openai/gsm8k,config=main,prompt=question,reward=my_rewards:accuracy"

Each row has a prompt, a text or a list of messages, and any other columns. A text is a message of
the user; with raw=true it is tokenized as it is, for base models. A prompt may end with a message
of the assistant, which the policy continues: it is in the prompt, not in the completion.

    def accuracy(prompts, completions, answer, **columns):
        return [float(a in text) for text, a in zip(completions, answer)]

All completions that a rank samples at the same time are a batch, for which each function is called
once; groups lie side by side. It gets the arguments that it names: lists of its own, with an entry
for each completion, of `prompts`, `completions` (messages, where prompts are), `completion_ids` and
the columns (None where a row has no value); `trainer_state`, with `global_step` of `max_steps`
updates complete; `log_extra(column, values)` for the info of each completion; and
`log_metric(name, value)`, whose mean is in the info of all. It returns a list with a number for
each completion, or None or NaN where it does not apply. `async` functions are awaited together, and
if all are, --env-timeout limits their call. After an exception all are called again for each row by
itself, and rows that fail cost only their own episodes. EnvFailure, anything but such a list, or
only None from all functions for all completions fails every episode of the batch.

Reward: the sum of weight times value over the functions that apply. A completion to which none
applies has no reward: it is left out of its group. `info["correct"]`, of which accuracy is the
mean: the function `correct` returned `threshold` or more; an evaluation leaves out what it does not
apply to. By default it is the first function that applies, and 1. `info["reward_<name>"]` has the
value of each, `info["weight_<name>"]` its weight if that is not 1, `info["row"]` FILE:LINE.

`tools` and `environment` are TRL's `tools` and `environment_factory`: the policy may call the
functions, and the public methods of an object that each episode has for itself. Its `reset` gets
the row, and what it returns ends the prompt, which a row may lack; its `get_reward` is one function
more, called as its class, with the weight 1. Functions get these objects, `environments`, and each
completion (of messages) has all that the policy and the tools said, in OpenAI's form. They are
called for each completion by itself, also where an episode is cut off between calls.

Each prompt of an update is drawn from all rows. One prompt in eight is reserved for evaluation,
decided by a hash of its text, or one row in eight if all have the same prompt; where that leaves
none for one of both, all rows are for both. Where --eval-env names other data, both are used whole:
let them have no prompt in common.
"""

import asyncio
import copy
import functools
import hashlib
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
from types import SimpleNamespace
from typing import Any

from environments.base import (
    EVAL_SEEDS,
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
from environments.plumbing.dataset import Row, read_rows
from environments.plumbing.registry import OBJECTS, EnvSpec, import_attribute

RUN = RunInfo((), ())  # that of this process; without one all data is divided
Function = tuple[str, Callable[..., Any], float]  # name, function, weight
OF_TEXTS = "; as the prompts are texts, so are completions: make each prompt a list of messages"
OF_MAKER = "; as this makes reward functions, write `made = ..`, a call of it, and name made"


class Rewarded(Env):
    """`data`: FILE.jsonl, .json, .csv, .parquet, a data set of the hub or a folder with one, with
    its `config` and `split`; `prompt`: the column with the prompt; `reward`: functions as
    FILE.py:name or module:name; `weights`: of the functions, by default 1; `correct`, `threshold`:
    a response is right if this function, one of `reward` by its name, returns as much; `raw`: a
    prompt that is a text is tokenized as it is, without the chat template; `name`: of this
    environment, in titles and metrics; `tools`: functions that the policy may call; `environment`:
    a class as TRL's `environment_factory`, whose methods are tools."""

    judges_calls = True  # an episode that ends after calls is judged, too

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
        tools: tuple[str, ...] = (),
        environment: str = "",
    ):
        self.functions: list[Function] = []
        if weights and len(weights) != len(reward):
            raise UsageError(f"{len(weights)} weights for {len(reward)} reward functions")
        for word, weight in zip(reward, weights or [1.0] * len(reward), strict=True):
            if not callable(function := import_attribute(word)):
                raise UsageError(f"reward: {word} is no function")
            self.add(word.rpartition(":")[2], function, weight)
        self.world = import_attribute(environment)() if environment else None
        methods = dict(inspect.getmembers(type(self.world), inspect.isfunction))  # of None: none
        if methods.pop("get_reward", None):
            own = lambda environments: [env.get_reward() for env in environments]  # noqa: E731
            self.add(type(self.world).__name__, own, 1.0)
        if not data or not self.functions:
            raise UsageError("set data=FILE.jsonl and reward=FILE.py:function")
        names = [name for name, *_ in self.functions]
        by_word = dict(zip(reward, names, strict=False))
        self.correct = by_word.get(correct, correct.rpartition(":")[2])
        if correct and self.correct not in names:
            raise UsageError(f"correct={correct}: name one of {' '.join(names)}; with the weight 0 "
                             "it adds no reward")  # fmt: skip
        self.threshold, self.prompt, self.raw = threshold, prompt, raw
        self.waits = all(inspect.iscoroutinefunction(function) for _, function, _ in self.functions)
        self.tools = [*map(import_attribute, tools)] + [
            getattr(self.world, name) for name in methods
            if name != "reset" and not name.startswith("_")
        ]  # fmt: skip
        self.train, self.test, self.columns = load(data, prompt, config, split, bool(environment))

    def add(self, name: str, function: Callable[..., Any], weight: float) -> None:
        """Adds a function; the second one of a name is NAME_2."""
        while name in [other for other, *_ in self.functions]:
            name += "_2"
        self.functions.append((name, function, weight))

    @classmethod
    def begin_run(cls, info: RunInfo) -> None:
        begin_run(info)

    @property
    def what_is_right(self) -> str:
        """What accuracy is the mean of, as a line."""
        names = ", ".join(name for name, *_ in self.functions)
        which = f"the first of {names} that applies" if self.functions[1:] else names
        return (f"an answer is right if {self.correct or which} returns {self.threshold:g} or more "
                "(correct=NAME and threshold=X choose)")  # fmt: skip

    def reset(self, seed: int) -> list[Message]:
        self.is_evaluation = seed in EVAL_SEEDS
        self.row = draw(seed, self.train, self.test)
        self.asked = self.row.get(self.prompt, [user("")])
        if self.world is not None:
            row = copy.deepcopy(dict.fromkeys(self.columns) | self.row)
            end = self.world.reset(**row) or ""
            if isinstance(self.asked, str):
                self.asked += end
            else:
                last = self.asked[-1]
                self.asked = [*self.asked[:-1], last | {"content": last["content"] + end}]
        if isinstance(self.asked, str):
            return [{"role": "raw", "content": self.asked} if self.raw else user(self.asked)]
        return copy.deepcopy(self.asked)

    def step(self, response: str) -> Step:
        [step] = self.step_batch([self], [response])
        if isinstance(step, Exception):
            raise step
        return step

    @classmethod
    def step_batch(cls, envs: Sequence[Env], responses: list[str]) -> list[Step | Exception]:
        batch: list[Any] = [*envs]
        try:
            steps = _judge(batch, responses)
        except EnvFailure:
            raise
        except Exception:
            steps = [NoReward()] * len(batch)
            for row in {id(env.row): env.row for env in batch}.values():
                places = [place for place, env in enumerate(batch) if env.row is row]
                try:
                    own = _judge([batch[i] for i in places], [responses[i] for i in places], row)
                except Exception as error:
                    own = [error] * len(places)
                for place, step in zip(places, own, strict=True):
                    steps[place] = step
        if len(steps) > 1 and all(isinstance(step, NoReward) for step in steps):
            names = ", ".join(name for name, *_ in batch[0].functions)
            raise EnvFailure(f"{names} returned None for all completions")
        return steps

    def to_step(self, values: dict[str, float], logged: dict[str, Any]) -> Step | Exception:
        """The Step of one completion, from the value of each function that applies and what they
        logged; NoReward if none applies."""
        judge = self.correct or next(iter(values), "")
        if not values or (self.is_evaluation and judge not in values):
            return NoReward(f"no function applies to the answer ({self.row.place})")
        weights = {name: weight for name, _, weight in self.functions}
        correct = judge in values and values[judge] >= self.threshold
        info = {"row": self.row.place} | logged | {"correct": correct}
        info |= {f"reward_{name}": value for name, value in values.items()}
        info |= {f"weight_{name}": weight for name, weight in weights.items() if weight != 1}
        return Step(None, sum(weights[name] * values[name] for name in values), True, info)


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
            raise UsageError("data=: give a datasets.Dataset or a list of dicts; of a DatasetDict "
                             'one part, as data["train"]') from None  # fmt: skip
        # the same rows have the same name in a later call, which resumes the run
        name = f"rows_{zlib.crc32(json.dumps(rows, default=repr).encode()):08x}"
        OBJECTS[name], data = rows, f"python:{name}"

    def text(value: Any) -> str:
        if isinstance(value, list | tuple):
            return " ".join(map(text, value))
        if not callable(value):
            return str(value)
        name = getattr(getattr(value, "func", value), "__name__", type(value).__name__)
        name = name if name.isidentifier() else "reward"  # of a lambda
        while not _is_the_same(OBJECTS.get(name, value), value):
            name += "_2"
        OBJECTS[name] = value
        return f"python:{name}"

    values = {"data": data, "reward": reward} | options
    return "rewarded:" + ",".join(f"{key}={text(value)}" for key, value in values.items())


def _is_the_same(one: Any, other: Any) -> bool:
    """Whether both are one function, or one is the other after its notebook cell ran again: a new
    code object under its name. Functions made in a loop share one, and lambdas have no name."""
    names = [(f.__module__, getattr(f, "__qualname__", "<")) for f in (one, other)]
    codes = [getattr(f, "__code__", f) for f in (one, other)]
    is_new = names[0] == names[1] and "<" not in names[0][1] and codes[0] is not codes[1]
    return is_new or bool(one == other)


def begin_run(info: RunInfo) -> None:
    """From now on `load` divides data as this run needs it, and functions read its progress."""
    global RUN
    RUN = info
    load.cache_clear()


def sources(specs: Sequence[str]) -> set[tuple[str, str, str]]:
    """Data, config and split of environments that have some: `rewarded`, `agent` and `math_qa`, but
    for the data sets that `math_qa` knows, which are not divided."""
    own = [env for env in map(EnvSpec.read, specs) if env.name in ("rewarded", "agent", "math_qa")]
    values = [{"config": "", "split": "train"} | env.values for env in own]
    return {(o["data"], o["config"], o["split"]) for o in values}


class Placed(Row):
    """A row, and its place: FILE:LINE, or of a data set NAME:NUMBER, from 1."""

    place = ""


def draw(seed: int, train: list[Placed], test: list[Placed]) -> Placed:
    """The row of a seed; those of evaluation in their order, each once."""
    if seed in EVAL_SEEDS:
        return test[(seed - EVAL_SEEDS.start) % len(test)]
    return random.Random(seed).choice(train)


@functools.cache  # a run needs all its data until its end
def load(
    data: str, prompt: str, config: str, split: str, may_lack: bool = False
) -> tuple[list[Placed], list[Placed], list[str]]:
    """Returns the rows for training, those for evaluation, and the names of the columns but
    `prompt`.

    Data on which the run both trains and evaluates is divided by the text in the column `prompt`,
    or that of all columns, as JSON, if `prompt` is "" or all rows have the same; it is used for
    both, with a line, if that leaves no row for one of them. Other data is used whole. Raises
    UsageError if there are no rows, or one has no prompt, but if they `may_lack` it.
    """
    rows, texts = list[Placed](), list[str]()
    for number, columns in read_rows(data, config, split):
        rows.append(Placed(columns))
        rows[-1].place = f"{os.path.basename(data)}:{number}"
        value = columns.get(prompt, columns if may_lack else None) if prompt else columns
        if value is not columns and not isinstance(value, str | list):
            what = f"{reprlib.repr(value)} in {prompt!r} is no text and no list of messages"
            raise UsageError(f"{data}, row {number}: {what}; its columns are {', '.join(columns)}")
        texts.append(value if isinstance(value, str) else _as_json(value))
    if not rows:
        raise UsageError(f"{data} has no rows")
    names = [*dict.fromkeys(key for row in rows for key in row if key != prompt)]
    here = data, config, split
    if (here in sources(RUN.train_envs)) != (here in sources(RUN.eval_envs)):
        return rows, rows, names  # of one use; where no run has begun, of both
    if len({*texts}) == 1:
        texts = [*map(_as_json, rows)]
    train, test = list[Placed](), list[Placed]()
    for row, is_test in zip(rows, held_out_of(texts), strict=True):
        (test if is_test else train).append(row)
    if train and test:
        return train, test, names
    print(f"{data}: {len({*texts})} different tasks in {len(rows)} rows are too few to hold some "
          "out: the run evaluates on what it trains on", file=sys.stderr)  # fmt: skip
    return rows, rows, names


def held_out_of(texts: list[str]) -> list[bool]:
    """Whether each text is for evaluation; one in eight is, and those that are equal but for white
    space have the same use.

    `is_held_out` decides, as in recorded runs; SHA-256 where that holds out far from an eighth: a
    CRC is linear, so that numbered prompts ("Say 1.", "Say 2.", ..) may be all of one use.
    """
    texts = [" ".join(text.split()) for text in texts]
    found = [*map(is_held_out, texts)]
    if not len(texts) / 16 <= sum(found) <= len(texts) / 4:
        found = [hashlib.sha256(text.encode(errors="replace")).digest()[0] < 32 for text in texts]
    return found


def num_held_out(spec: EnvSpec) -> int:
    """The number of rows for evaluation of an environment with data; no limit for any other."""
    if spec.name not in ("rewarded", "agent"):
        return sys.maxsize
    o = {"prompt": "", "environment": ""} | spec.values
    may_lack = bool(o["environment"])
    return len(load(o["data"], o["prompt"], o["config"], o["split"], may_lack)[1])


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _completion(prompt: str | list[Message], response: str) -> Any:
    """What the functions get for a response: a text, or the messages since the prompt."""
    if isinstance(prompt, str):
        return response
    own = getattr(response, "message", None) or {"role": "assistant", "content": response}
    last = own | {"content": own["content"].removeprefix(prefill_of(prompt))}
    return [*getattr(response, "earlier", ()), last]


def _judge(
    batch: Sequence[Rewarded], responses: Sequence[str], row: Placed | None = None
) -> list[Step | Exception]:
    """The steps of these episodes, with one call of each function. `row`: as `_named`."""
    first = batch[0]
    logged: list[dict[str, Any]] = [{} for _ in batch]  # by log_extra
    extras: dict[str, list[Any]] = defaultdict(list)  # by log_extra
    metrics: dict[str, list[float]] = defaultdict(list)  # by log_metric

    def log_extra(column: str, values: Sequence[Any]) -> None:
        extras[column].extend(values)

    prompts = [env.asked for env in batch]
    lists: dict[str, list[Any]] = {
        **{key: [env.row.get(key) for env in batch] for key in first.columns},
        "prompts": prompts,
        "completions": [*map(_completion, prompts, responses)],
        "completion_ids": [[*getattr(response, "token_ids", ())] for response in responses],
    }
    if first.prompt != "prompt":  # a function may know it by the name that the data gives it
        lists[first.prompt] = prompts
    others: dict[str, Any] = {
        "trainer_state": SimpleNamespace(global_step=RUN.updates_done, max_steps=RUN.num_updates),
        "log_extra": log_extra,
        "log_metric": lambda name, value: metrics[name].append(float(value)),
    }
    if first.world is not None:
        others["environments"] = [env.world for env in batch]
    returned: dict[str, Any] = {}
    for name, function, _ in first.functions:
        with _named(name, row):
            returned[name] = function(**_arguments(function, lists, others))
    waiting = {name: value for name, value in returned.items() if inspect.isawaitable(value)}
    if waiting:
        returned |= event_loop.wait_for(_await_all(waiting, row))
    values = [dict[str, float]() for _ in batch]
    for name, numbers in returned.items():
        with _named(name, row):
            for own, number in zip(values, _numbers(numbers, len(batch)), strict=True):
                own |= {} if math.isnan(number) else {name: number}
    for column, of_all in extras.items():
        for info, value in zip(logged, of_all, strict=False):
            info[column] = value
    means = {name: statistics.fmean(numbers) for name, numbers in metrics.items()}
    return [env.to_step(own, means | info)
            for env, own, info in zip(batch, values, logged, strict=True)]  # fmt: skip


def _arguments(
    function: Callable[..., Any], lists: dict[str, list[Any]], others: dict[str, Any]
) -> dict[str, Any]:
    """The arguments that a function names. `lists`: those with an entry for each completion, of
    which it gets copies."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        key: [*map(copy.deepcopy, value)] if key in lists else value
        for key, value in (lists | others).items() if takes_all or key in parameters
    }  # fmt: skip


def _numbers(returned: Any, count: int) -> list[float]:
    """What a function returned, as `count` numbers, NaN for None; raises if it is anything else."""
    if isinstance(returned, str | dict) or not isinstance(returned, Iterable):
        hint = OF_MAKER if callable(returned) else ""
        raise EnvFailure(f"it returned {returned!r:.50}, not a list of {count} numbers{hint}")
    numbers = [math.nan if value is None else float(value) for value in returned]
    if len(numbers) != count:
        raise EnvFailure(f"{len(numbers)} rewards for {count} completions")
    return numbers


async def _await_all(waiting: dict[str, Any], row: Placed | None) -> dict[str, Any]:
    async def wait(name: str) -> Any:
        with _named(name, row):
            return await waiting[name]

    return dict(zip(waiting, await asyncio.gather(*map(wait, waiting)), strict=True))


@contextmanager
def _named(name: str, row: Placed | None) -> Iterator[None]:
    """An exception in the block says in which reward function it was raised, and for which row."""
    try:
        yield
    except EnvFailure as error:
        raise EnvFailure(f"{name}: {error}") from error
    except Exception as error:
        hint = OF_TEXTS if "string indices" in str(error) else ""
        place = f" ({row.place})" if row else ""
        text = f"{name}: {type(error).__name__}: {error!s:.200}{hint}{place}"
        raise RuntimeError(text) from error
