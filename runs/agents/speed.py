"""64 agent programs at the same time, and the same work as an environment in Python.

    python runs/agents/speed.py

Both sample the same prompts, three answers an episode, seven times in turn; no episode waits for
the others. Prints tokens per second, and the median of the ratios without the first.
"""

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2]))

from core.episodes import RolloutCollector
from core.extras import agents
from core.loading import load_policy
from core.pool import Pool
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from core.tiny import PRETRAINED

EPISODES, REPETITIONS = 64, 7
BOTH = """
from environments.base import Env, Step

WORDS = ("cherry", "drackri", "rrorr")
QUESTIONS = [{"role": "user", "content": f'How many r in "{word}"? Work it out, then end with '
              "<answer>number</answer>."} for word in WORDS]


def run(task, client):
    messages = []
    for question in QUESTIONS:
        messages.append(question)
        answer = client.chat.completions.create(model="m", messages=messages)
        messages.append(answer.choices[0].message)
    return 1.0


class Plain(Env):
    def reset(self, seed):
        self.asked = 1
        return [QUESTIONS[0]]

    def step(self, response):
        self.asked += 1
        done = self.asked > len(QUESTIONS)
        return Step(None if done else QUESTIONS[self.asked - 1], 1.0, done)
"""


def main() -> None:
    policy, speeds = load_policy(str(PRETRAINED), device="cpu"), dict[str, list[float]]()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Pool, "answers_late", lambda _: True),
    ):
        Path(folder, "both.py").write_text(BOTH)
        rows = (json.dumps({"n": n}) + "\n" for n in range(200))
        Path(folder, "rows.jsonl").write_text("".join(rows))
        specs = {"agents": f"agent:run={folder}/both.py:run,data={folder}/rows.jsonl",
                 "in Python": f"{folder}/both.py:Plain"}  # fmt: skip
        for repetition in range(REPETITIONS):
            for name, spec in specs.items():
                collector = RolloutCollector(policy, max_turns=3)
                collector.play_program = partial(agents.play_program, collector)
                tasks = [Task(spec, repetition * EPISODES + n, n) for n in range(EPISODES)]
                params, started = SamplingParams(64, seed=repetition), time.perf_counter()
                rollouts = collector.collect(tasks, TorchSampler(policy), params)
                seconds = time.perf_counter() - started
                collector.close()
                assert not any(rollout.error for rollout in rollouts)
                tokens = sum(rollout.num_tokens for rollout in rollouts)
                speeds.setdefault(name, []).append(tokens / seconds)
    for name, found in speeds.items():
        print(f"{name}: {', '.join(f'{speed:.0f}' for speed in found)} tokens/s")
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)][1:]
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
