"""GDPO and its rewards on their way to it; test_grpo.py has cases, test_float64_step.py loops."""

import json

from core.batching import to_rollout_batch
from core.types import Rollout, Turn


def test_the_batch_has_the_rewards_that_the_environment_reports():
    def rollout(**info):
        turn = Turn([1], [2], [-0.5], "stop", 1.0)
        return Rollout("e", "player", 0, 0, turns=[turn], info=info)

    batch = to_rollout_batch([
        rollout(reward_b=0.5, reward_a=True, weight_b=0.1, correct=True, reward_text="no"),
        rollout(reward_a=0),
    ])  # fmt: skip
    assert batch.env_reward_parts[0].tolist() == [1.0, 0.5]  # a, b
    assert batch.env_reward_parts[1, 0] == 0 and batch.env_reward_parts[1, 1].isnan()
    assert batch.reward_weights.tolist() == [[1.0, 0.1], [1.0, 0.0]]


FUNCTIONS = """
def right(completions, **columns): return [float("a" in c) for c in completions]
def brief(completions, **columns): return [-len(c) / 100 for c in completions]
"""


SMALL = "--algo gdpo --num-updates 1 --num-prompts 2 --group-size 3 --eval-num-tasks 0".split()


def test_a_run_with_two_reward_functions(command, tmp_path):
    (tmp_path / "two.py").write_text(FUNCTIONS)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(40)))
    env = "rewarded:data=rows.jsonl,reward=two.py:right two.py:brief,weights=1 0.5"
    code, _, err = command(*SMALL, "--env", env, "--run-name", "two", "--max-tokens", 8)
    assert code == 0, err
    lines = (tmp_path / "runs/two/metrics.jsonl").read_text().splitlines()
    record = next(record for record in map(json.loads, lines) if record.get("update") == 1)
    assert record["info/weight_brief"] == 0.5 and "info/weight_right" not in record
