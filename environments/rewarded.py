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
once; groups lie side by side. A function gets the arguments that it names. Lists with an entry for
each completion: `prompts`, `completions` (messages, where prompts are), `completion_ids` and the
columns (None where a row has no value). `trainer_state`: `global_step` of `max_steps` updates are
complete, after `epoch` times as many prompts as there are rows; `is_world_process_zero`: on rank 0.
`log_extra(column, values)` adds a value to the info of each completion, and
`log_metric(name, value)` the mean of its values to the info of all. A function returns a list with
a number for each completion, or None or NaN where it does not apply. `async` functions are awaited
together; if all are `async`, --env-timeout limits their call. After an exception all functions are
called again for each row by itself, and only rows that fail again lose their episodes. EnvFailure
or another return value fails the whole batch; in an evaluation None for all completions does, too.

Reward: the sum of weight times value over the functions that apply. A completion to which none
applies has no reward: it is left out of its group. `info["correct"]`, of which accuracy is the
mean: the function `correct`, by default the first that applies, returned `threshold` or more.
Completions to which `correct` does not apply are left out. `info["reward_<name>"]` is the
value of a function, `info["weight_<name>"]` its weight if that is not 1, `info["row"]` FILE:LINE.

`tools` and `environment` are TRL's `tools` and `environment_factory` (README.md): functions that
the policy may call, and an object that each episode has for itself, whose `reset` may give the
prompt. Reward functions are then called for each completion by itself, also where an episode is cut
off between calls, with `environments`, and with calls and results in OpenAI's form.
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
from environments.plumbing.dataset import Row, as_stored, read_rows, without_none
from environments.plumbing.registry import OBJECTS, EnvSpec, content_of, import_attribute

RUN = RunInfo((), ())  # the run of this process; before a run begins all data is divided
OF_TEXTS = "; as the prompts are texts, so are completions: make each prompt a list of messages"
OF_CHATS = '; where prompts are messages, the text of a completion is completion[0]["content"]'
OF_MAKER = "; as this makes reward functions, write `made = ..`, a call of it, and name made"
OF_STATE = "; trainer_state has global_step, max_steps, epoch and is_world_process_zero"


class Rewarded(Env):
    """`data`: FILE.jsonl, .json, .csv, .parquet, a data set of the hub or a folder with one, with
    its `config` and `split`; `prompt`: the column with the prompt; `reward`: functions as
    FILE.py:name or module:name; `weights`: of the functions, by default 1; `raw`: a prompt that is
    a text is tokenized as it is, without the chat template; `name`: of this environment, in titles
    and metrics. The head of this file has the others."""

    judges_calls = True  # also judges an episode that is cut off after calls of tools

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
        self.functions: list[tuple[str, Callable[..., Any], float]] = []  # name, function, weight
        if weights and len(weights) != len(reward):
            raise UsageError(f"{len(weights)} weights for {len(reward)} reward functions")
        for word, weight in zip(reward, weights or [1.0] * len(reward), strict=True):
            function = import_attribute(word)
            if not callable(function):
                raise UsageError(f"reward: {word} is no function")
            self.add(word.rpartition(":")[2], function, weight)
        self.world = import_attribute(environment)() if environment else None
        methods = dict(inspect.getmembers(type(self.world), inspect.isfunction))  # of None: none
        if get_reward := methods.pop("get_reward", None):
            is_async = inspect.iscoroutinefunction(get_reward)
            self.add(type(self.world).__name__, _await_rewards if is_async else _get_rewards, 1.0)
        if not data or not self.functions:
            raise UsageError("set data=FILE.jsonl and reward=FILE.py:function, or Python's objects")
        names = [name for name, *_ in self.functions]
        by_word = dict(zip(reward, names, strict=False))
        self.correct = by_word.get(correct, correct.rpartition(":")[2])
        if correct and self.correct not in names:
            raise UsageError(f"correct={correct}: name one of {' '.join(names)}; it may weigh 0")
        self.threshold, self.prompt, self.raw = threshold, prompt, raw
        self.waits = all(inspect.iscoroutinefunction(function) for _, function, _ in self.functions)
        methods.pop("reset", None)
        world_tools = [getattr(self.world, name) for name in methods if not name.startswith("_")]
        self.tools = [*map(import_attribute, tools), *world_tools]
        self.train, self.test, self.columns = load(data, prompt, config, split, bool(environment))

    def add(self, name: str, function: Callable[..., Any], weight: float) -> None:
        """Adds a reward function; a second one with the same name is called NAME_2."""
        while name in [added for added, *_ in self.functions]:
            name += "_2"
        self.functions.append((name, function, weight))

    @classmethod
    def begin_run(cls, info: RunInfo) -> None:
        begin_run(info)

    @property
    def what_is_right(self) -> str:
        """A line that says which answers are right, of which accuracy is the mean."""
        names = ", ".join(name for name, *_ in self.functions)
        default = f"the first of {names} that applies" if self.functions[1:] else names
        rule = f"{self.correct or default} returns {self.threshold:g} or more"
        return f"an answer is right if {rule} (correct=NAME and threshold=X choose)"

    def reset(self, seed: int) -> list[Message]:
        self.is_evaluation = seed in EVAL_SEEDS
        self.row = draw(seed, self.train, self.test)
        self.opening = self.row.get(self.prompt, [user("")])  # a text or messages
        if self.world is not None:
            row = copy.deepcopy(dict.fromkeys(self.columns) | self.row)
            end = self.world.reset(**row) or ""
            if not isinstance(end, str):
                raise EnvFailure(f"reset of environment= returned {end!r:.50}, not a text")
            if isinstance(self.opening, str):
                self.opening += end
            else:
                last = self.opening[-1]
                self.opening = [*self.opening[:-1], last | {"content": last["content"] + end}]
        if isinstance(self.opening, str):
            return [{"role": "raw", "content": self.opening} if self.raw else user(self.opening)]
        return copy.deepcopy(self.opening)

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
                indices = [i for i, env in enumerate(batch) if env.row is row]
                row_envs = [batch[i] for i in indices]
                try:
                    row_steps = _judge(row_envs, [responses[i] for i in indices])
                except Exception as error:
                    row_steps = [error] * len(row_envs)
                for i, step in zip(indices, row_steps, strict=True):
                    steps[i] = step
        if len(steps) > 1 and batch[0].is_evaluation and {*map(type, steps)} == {NoReward}:
            names = batch[0].correct or ", ".join(name for name, *_ in batch[0].functions)
            raise EnvFailure(f"{names} returned None for all completions")
        return steps

    def to_step(self, values: dict[str, float], logged: dict[str, Any]) -> Step | Exception:
        """Returns the Step of one completion; NoReward if no function applies. `values`: of the
        functions that apply; `logged`: by log_extra and log_metric."""
        deciding = self.correct or next(iter(values), "")  # function
        if not values or (self.is_evaluation and deciding not in values):
            return NoReward(f"{self.correct or 'each function'} returned None ({self.row.place})")
        weights = {name: weight for name, _, weight in self.functions}
        correct = values[deciding] >= self.threshold if deciding in values else None
        info = {"row": self.row.place} | logged | {"correct": correct}
        info |= {f"reward_{name}": value for name, value in values.items()}
        info |= {f"weight_{name}": weight for name, weight in weights.items() if weight != 1}
        return Step(None, sum(weights[name] * values[name] for name in values), True, info)


def of_objects(data: Any = None, reward: Any = (), **options: Any) -> str:
    """Returns the spec of `rewarded` for rows and functions that are objects of Python.

    `data`: a `datasets.Dataset`, or a list of dicts; `reward`: a function, or several; each may
    also be a text as in a spec. `options`: the others of `rewarded`, such as weights=[1, 0.2] or
    tools=[multiply]. Raises UsageError if `data` is anything else.
    """
    given = set[str]()  # names of functions in this call
    if not isinstance(data, str):
        try:
            is_stored = hasattr(data, "with_format") and data.format["type"] is None
            rows = as_stored(data) if is_stored else [*map(dict, data)] if len(data) else []
        except (AttributeError, TypeError, ValueError):
            needed = 'a list of dicts or a datasets.Dataset, of a DatasetDict such as data["train"]'
            raise UsageError(f"data=: give {needed}") from None
        # equal rows have the same name in a later call, so that call resumes the run
        name = f"rows_{zlib.crc32(json.dumps(rows, default=content_of).encode()):08x}"
        OBJECTS[name], data = rows, f"python:{name}"

    def as_option(value: Any) -> str:
        if isinstance(value, list | tuple):
            return " ".join(map(as_option, value))
        if not callable(value):
            return str(value)
        name = getattr(getattr(value, "func", value), "__name__", type(value).__name__)
        name = name if name.isidentifier() else "reward"  # of a lambda
        while (old := OBJECTS.get(name, value)) != value and (
            name in given or not _has_run_again(old, value)
        ):
            name += "_2"
        given.add(name)
        OBJECTS[name] = value
        return f"python:{name}"

    values = {"data": data, "reward": reward} | options
    return "rewarded:" + ",".join(f"{key}={as_option(value)}" for key, value in values.items())


def _has_run_again(old: Any, new: Any) -> bool:
    """Whether `new` is `old` after its notebook cell ran again: it has the name, the decorator and
    another code object. Functions made in a loop share their code object."""
    undecorated = inspect.unwrap(old), inspect.unwrap(new)
    codes = [getattr(f, "__code__", f) for f in (old, new, *undecorated)]
    names = [getattr(code, "co_qualname", "<") for code in codes]  # with <: lambda, local function
    is_other_code = codes[2] is not codes[3] and old.__module__ == new.__module__
    return names[::2] == names[1::2] and "<" not in names[2] and is_other_code


def begin_run(info: RunInfo) -> None:
    """From now on `load` divides data as this run needs it, and functions read its progress."""
    global RUN
    RUN = info
    load.cache_clear()


def sources(specs: Sequence[str]) -> set[tuple[str, str, str]]:
    """Returns data, config and split of the environments whose data `load` divides."""
    envs = [env for env in map(EnvSpec.read, specs) if env.name in ("rewarded", "agent", "math_qa")]
    options = [{"config": "", "split": "train"} | env.values for env in envs]
    return {(values["data"], values["config"], values["split"]) for values in options}


class PlacedRow(Row):
    """A row with its `place`: FILE:LINE, or of a data set NAME:NUMBER, from 1."""

    place = ""


def draw(seed: int, train: list[PlacedRow], test: list[PlacedRow]) -> PlacedRow:
    """The row of a seed; the seeds of evaluation have the rows of `test` in their order."""
    if seed in EVAL_SEEDS:
        return test[(seed - EVAL_SEEDS.start) % len(test)]
    return random.Random(seed).choice(train)


@functools.cache  # a run needs all its data until its end
def load(
    data: str, prompt: str, config: str, split: str, prompt_is_optional: bool = False
) -> tuple[list[PlacedRow], list[PlacedRow], list[str]]:
    """Returns the rows for training, the rows for evaluation, and the names of all columns but
    `prompt`.

    README.md says how data is divided; by all columns if `prompt` is "". Raises UsageError if there
    are no rows, or if a row has no prompt, unless `prompt_is_optional`.
    """
    rows, texts = list[PlacedRow](), list[str]()
    for number, row in read_rows(data, config, split):
        rows.append(PlacedRow(row))
        rows[-1].place = f"{os.path.basename(data)}:{number}"
        if {None} & {*row}:  # of a CSV
            raise UsageError(f"{data}, row {number}: more values than the header has names")
        task: Any = row
        if prompt and (prompt in row or not prompt_is_optional):
            task = row.get(prompt)
            if not isinstance(task, str | list):
                problem = f"{reprlib.repr(task)} in {prompt!r} is no text and no list of messages"
                raise UsageError(f"{data}, row {number}: {problem}; columns: {', '.join(row)}")
        texts.append(task if isinstance(task, str) else _as_json(task))
    if not rows:
        raise UsageError(f"{data} has no rows")
    columns = [*dict.fromkeys(key for row in rows for key in row if key != prompt)]
    source = data, config, split
    if (source in sources(RUN.train_envs)) != (source in sources(RUN.eval_envs)):
        return rows, rows, columns  # the run only trains or only evaluates on this data
    if len({*texts}) == 1:
        texts = [*map(_as_json, rows)]
    train, test = list[PlacedRow](), list[PlacedRow]()
    for placed_row, is_test in zip(rows, held_out_of(texts), strict=True):
        (test if is_test else train).append(placed_row)
    if train and test:
        return train, test, columns
    tasks = f"{len({*texts})} different tasks in {len(rows)} rows are too few to hold some out"
    print(f"{data}: {tasks}: the run evaluates on what it trains on", file=sys.stderr)
    return rows, rows, columns


def held_out_of(texts: list[str]) -> list[bool]:
    """Returns whether each text is for evaluation; one in eight is. Texts that differ in white
    space alone have the same use.

    `is_held_out` decides, as in recorded runs; SHA-256 where `is_held_out` is far from an eighth:
    its CRC is linear, so numbered prompts ("Say 1.", "Say 2.", ..) may all have the same use.
    """
    texts = [" ".join(text.split()) for text in texts]
    held_out = [*map(is_held_out, texts)]
    if len(texts) / 16 <= sum(held_out) <= len(texts) / 4:
        return held_out
    return [hashlib.sha256(text.encode(errors="replace")).digest()[0] < 32 for text in texts]


def num_held_out(spec: EnvSpec) -> int:
    """The number of rows for evaluation of an environment with data; no limit for any other."""
    if spec.name not in ("rewarded", "agent"):
        return sys.maxsize
    options = {"prompt": "", "environment": ""} | spec.values
    source = options["data"], options["prompt"], options["config"], options["split"]
    return len(load(*source, bool(options["environment"]))[1])


def _as_json(task: Any) -> str:
    """Messages or a row as a text that identifies them, whatever their white space is."""
    task = without_none(task, lambda text: " ".join(text.split()))
    return json.dumps(task, sort_keys=True, default=content_of)


def _get_rewards(environments: list[Any]) -> list[Any]:
    return [environment.get_reward() for environment in environments]


async def _await_rewards(environments: list[Any]) -> list[Any]:
    return await asyncio.gather(*_get_rewards(environments))


def _completion(prompt: str | list[Message], response: str) -> Any:
    """What reward functions get for a response: a text, or the messages since the prompt."""
    if isinstance(prompt, str):
        return response
    message = getattr(response, "message", None) or {"role": "assistant", "content": response}
    last = message | {"content": message["content"].removeprefix(prefill_of(prompt))}
    return [*getattr(response, "earlier", ()), last]


def _judge(batch: Sequence[Rewarded], responses: Sequence[str]) -> list[Step | Exception]:
    """The steps of these episodes, with one call of each function."""
    first = batch[0]
    extras: dict[str, list[Any]] = defaultdict(list)  # by log_extra: column -> values
    metrics: dict[str, list[float]] = defaultdict(list)  # by log_metric: name -> values
    prompts = [env.opening for env in batch]
    per_completion: dict[str, list[Any]] = {
        **{key: [env.row.get(key) for env in batch] for key in first.columns},
        "prompts": prompts,
        "completions": [*map(_completion, prompts, responses)],
        "completion_ids": [[*getattr(response, "token_ids", ())] for response in responses],
    }
    if first.prompt != "prompt":  # a function may also name the data's column
        per_completion[first.prompt] = prompts
    state = SimpleNamespace(global_step=RUN.updates_done, max_steps=RUN.num_updates)
    state.epoch = RUN.updates_done * RUN.num_prompts / len(first.train)
    rank = os.environ["RANK"] if "TORCHELASTIC_RUN_ID" in os.environ else "0"  # of torchrun
    state.is_world_process_zero = rank == "0"
    shared: dict[str, Any] = {
        "trainer_state": state,
        "log_extra": lambda column, values: extras[column].extend(values),
        "log_metric": lambda name, value: metrics[name].append(float(value)),
    }
    if first.world is not None:
        shared["environments"] = [env.world for env in batch]
    returned: dict[str, Any] = {}  # by function
    for name, function, _ in first.functions:
        with _named(name, first):
            returned[name] = function(**_arguments(function, per_completion, shared))
    awaitables = {name: value for name, value in returned.items() if inspect.isawaitable(value)}
    if awaitables:
        returned |= event_loop.wait_for(_await_all(awaitables, first))
    values = [dict[str, float]() for _ in batch]  # of the functions that apply to a completion
    means = {name: statistics.fmean(samples) for name, samples in metrics.items()}
    logged = [dict[str, Any](means) for _ in batch]  # info of a completion
    for name, rewards in returned.items():
        with _named(name, first):
            for values_by_name, reward in zip(values, _floats(rewards, len(batch)), strict=True):
                if not math.isnan(reward):
                    values_by_name[name] = reward
    for column, entries in extras.items():
        for info, entry in zip(logged, entries, strict=False):
            info[column] = entry
    texts = [json.dumps(info, default=_plain) for info in logged]
    infos = [json.loads(text, parse_constant=str) for text in texts]  # NaN is a text
    return [batch[i].to_step(values[i], infos[i]) for i in range(len(batch))]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _arguments(
    function: Callable[..., Any], per_completion: dict[str, list[Any]], shared: dict[str, Any]
) -> dict[str, Any]:
    """The arguments that a function names; it gets copies of the lists `per_completion`."""
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {}
    for key, value in (per_completion | shared).items():
        if takes_all or key in parameters:
            arguments[key] = [*map(copy.deepcopy, value)] if key in per_completion else value
    return arguments


def _floats(rewards: Any, count: int) -> list[float]:
    """What a function returned, as `count` numbers, NaN for None; raises if it is anything else."""
    if isinstance(rewards, str | dict) or not isinstance(rewards, Iterable):
        hint = OF_MAKER if callable(rewards) else ""
        raise EnvFailure(f"it returned {rewards!r:.50}, not a list of {count} numbers{hint}")
    floats = [math.nan if reward is None else float(reward) for reward in rewards]
    if len(floats) != count:
        raise EnvFailure(f"{len(floats)} rewards for {count} completions")
    return floats


async def _await_all(awaitables: dict[str, Any], env: Rewarded) -> dict[str, Any]:
    async def wait(name: str) -> Any:
        with _named(name, env):
            return await awaitables[name]

    return dict(zip(awaitables, await asyncio.gather(*map(wait, awaitables)), strict=True))


@contextmanager
def _named(name: str, env: Rewarded) -> Iterator[None]:
    """Lets an exception of the block name the reward function, and the row of `env`: each row is
    judged again by itself after an exception."""
    try:
        yield
    except EnvFailure as error:
        raise EnvFailure(f"{name}: {error}") from error
    except Exception as error:
        hints = {"SimpleNamespace": OF_STATE, " required ": f"; columns: {', '.join(env.row)}"}
        is_text = isinstance(env.opening, str)
        hints |= {"string indices": OF_TEXTS} if is_text else {"'list'": OF_CHATS}
        hint = next((hints[part] for part in hints if part in str(error)), "")
        text = f"{name}: {type(error).__name__}: {error!s:.200}{hint} ({env.row.place})"
        raise RuntimeError(text) from error
