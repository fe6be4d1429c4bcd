"""64 agent programs at the same time, and the same work as an environment in Python.

    python runs/agents/speed.py

Both sample the same prompts, three answers an episode, six times in turn; no episode waits for the
others. `tiny` answers with about 7 tokens, `tiny-random` with 64, `smollm2` with at most 16. Prints
tokens per second, and the median of the ratios without the first.
"""

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
from core.run.models import folder_of
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task

EPISODES, REPETITIONS = 64, 6
MAX_TOKENS = {"tiny": 64, "tiny-random": 64, "smollm2": 16}
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
    for model_id in MAX_TOKENS:
        with tempfile.TemporaryDirectory() as folder:
            compare(model_id, Path(folder))


def compare(model_id: str, folder: Path) -> None:
    """Plays both with a model; `folder` is for its files."""
    policy = load_policy(folder_of(model_id, folder / "model"), device="cpu")
    speeds: dict[str, list[float]] = {}
    Path(folder, "both.py").write_text(BOTH)
    Path(folder, "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(200)))
    specs = {"agents": f"agent:run={folder}/both.py:run,data={folder}/rows.jsonl",
             "in Python": f"{folder}/both.py:Plain"}  # fmt: skip
    collector = RolloutCollector(policy, max_turns=3)
    collector.play_program = partial(agents.play_program, collector)
    for repetition in range(REPETITIONS):
        for name, spec in specs.items():
            tasks = [Task(spec, repetition * EPISODES + n, n) for n in range(EPISODES)]
            params = SamplingParams(MAX_TOKENS[model_id], seed=repetition)
            started = time.perf_counter()
            with patch.object(Pool, "answers_late", lambda _: True):
                rollouts = collector.collect(tasks, TorchSampler(policy), params)
            seconds = time.perf_counter() - started
            assert not any(rollout.error for rollout in rollouts)
            tokens = sum(rollout.num_tokens for rollout in rollouts)
            speeds.setdefault(name, []).append(tokens / seconds)
    collector.close()
    for name, found in speeds.items():
        print(f"{model_id}, {name}: {', '.join(f'{speed:.0f}' for speed in found)} tokens/s")
    ratios = [a / b for a, b in zip(*speeds.values(), strict=True)][1:]
    print(f"ratio: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
