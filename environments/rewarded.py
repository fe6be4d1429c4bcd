"""Prompts from a data set, and reward functions with TRL's signature: a task without a class.

    --env rewarded:data=rows.jsonl,reward=rewards.py:accuracy
    --env "rewarded:data=rows.jsonl,reward=rewards.py:accuracy rewards.py:brief,weights=1 0.2"
    --env rewarded:data=openai/gsm8k,config=main,prompt=question,reward=my_rewards:accuracy

Each row has a prompt, a text or a list of messages, and any other columns. A reward function
receives lists of one element and returns a list of one number, or None where it does not apply:

    def accuracy(prompts, completions, answer, **columns):
        return [float(a in text) for text, a in zip(completions, answer)]

If the prompt is a list of messages, a completion is one, too, as in TRL. `async` functions are
awaited. A function is called for each completion, slow ones in several threads (--env-workers); it
must not compare the completions of a batch.

Reward: the sum of weight times value over the functions. `info["correct"]`: the first function
returned 1 or more; `info["reward_<name>"]` has the value of each. Of rows with the same prompt only
the first one is kept. One prompt in eight is reserved for evaluation, decided by its text.
"""

import asyncio
import functools
import inspect
import json
import random
import sys
from typing import Any

from core.types import Message, UsageError
from environments.base import EVAL_SEEDS, Env, Step, is_held_out
from environments.dataset import Row, read_hub, read_jsonl
from environments.parsing import user
from environments.registry import find_file, import_attribute


class Rewarded(Env):
    """`data`: FILE.jsonl or a data set of the hub, with its `config` and `split`; `prompt`: the
    column with the prompt; `reward`: functions as FILE.py:name or module:name; `weights`: of the
    functions, by default 1."""

    def __init__(
        self,
        data: str = "",
        reward: tuple[str, ...] = (),
        weights: tuple[float, ...] = (),
        prompt: str = "prompt",
        config: str = "",
        split: str = "train",
    ):
        if not data or not reward:
            raise UsageError("set data=FILE.jsonl and reward=FILE.py:function")
        if weights and len(weights) != len(reward):
            raise UsageError(f"{len(weights)} weights for {len(reward)} reward functions")
        functions = [import_attribute(*name.rpartition(":")[::2]) for name in reward]
        names = [getattr(function, "__name__", "function") for function in functions]
        for name, function in zip(names, functions, strict=True):
            if not callable(function) or names.count(name) > 1:
                raise UsageError(f"reward: {name} is no function, or given twice")
        self.functions = list(zip(names, functions, weights or [1.0] * len(names), strict=True))
        self.prompt = prompt
        self.train, self.test = load(data, prompt, config, split)

    def reset(self, seed: int) -> list[Message]:
        if seed in EVAL_SEEDS:  # in their order, each once
            self.row = self.test[(seed - EVAL_SEEDS.start) % len(self.test)]
        else:
            self.row = random.Random(seed).choice(self.train)
        prompt = self.row[self.prompt]
        return [user(prompt)] if isinstance(prompt, str) else [dict(m) for m in prompt]  # type: ignore[misc]

    def step(self, response: str) -> Step:
        is_text = isinstance(self.row[self.prompt], str)
        completion = response if is_text else [{"role": "assistant", "content": response}]
        columns = {key: [value] for key, value in self.row.items() if key != self.prompt}
        values: dict[str, float | None] = {}
        for name, function, _ in self.functions:
            returned = function(
                prompts=[self.row[self.prompt]], completions=[completion], **columns
            )
            if inspect.isawaitable(returned):
                returned = asyncio.run(_wait(returned))
            if len(returned) != 1:
                raise ValueError(f"{name} returned {len(returned)} rewards for one completion")
            values[name] = None if returned[0] is None else float(returned[0])
        reward = sum(weight * (values[name] or 0.0) for name, _, weight in self.functions)
        first = values[self.functions[0][0]]
        info = {f"reward_{name}": value for name, value in values.items() if value is not None}
        return Step(None, reward, True, {"correct": first is not None and first >= 1.0, **info})


@functools.lru_cache(maxsize=4)
def load(data: str, prompt: str, config: str, split: str) -> tuple[list[Row], list[Row]]:
    """Returns the rows for training and those for evaluation.

    Prints how many rows have the prompt of an earlier one. Raises UsageError if the data cannot be
    loaded, a row has no prompt, or there are no rows for one of both uses.
    """
    if data.endswith((".jsonl", ".json")):
        try:
            rows = read_jsonl(find_file(data))
        except (OSError, ValueError) as error:
            raise UsageError(f"data={data}: {error}") from None
    else:
        rows = list(enumerate(read_hub(data, config or None, split), start=1))
    unique: dict[str, Row] = {}
    for number, row in rows:
        value = row.get(prompt)
        if not isinstance(value, str | list) or not value:
            columns = ", ".join(row)
            raise UsageError(f"{data}, row {number}: no prompt in {prompt!r}; it has {columns}")
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        unique.setdefault(" ".join(text.split()), row)
    if len(unique) < len(rows):
        duplicates = len(rows) - len(unique)
        print(f"{data}: left out {duplicates} of {len(rows)} rows, whose prompts occur before",
              file=sys.stderr)  # fmt: skip
    train, test = ([r for t, r in unique.items() if is_held_out(t) == use] for use in (False, True))
    if not train or not test:
        raise UsageError(f"{data} has {len(train)} rows for training and {len(test)} for "
                         "evaluation; add some")  # fmt: skip
    return train, test


async def _wait(returned: Any) -> Any:
    return await returned
