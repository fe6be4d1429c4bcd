"""Accuracies before and after a file of an environment has changed are not compared."""

from pathlib import Path

from conftest import metrics_of

from core.results import before_after

REWARDS = "def right(completions, **columns):\n    return [{}.0] * len(completions)\n"


def test_an_edited_reward_does_not_learn(command):
    rows = [f'{{"prompt": "Task {n}."}}\n' for n in range(100)]
    Path("d.jsonl").write_text("".join(rows))
    Path("r.py").write_text(REWARDS.format(0))
    flags = """--num-prompts 2 --group-size 2 --max-tokens 4 --eval-num-tasks 8 --eval-every 1
        --device cpu --run-name a --num-updates 1 --model-id tiny-random"""
    assert command("--env", "rewarded:data=d.jsonl,reward=r.py:right", *flags.split())[0] == 0
    assert [first["update"] for _, first, _ in before_after(metrics_of("runs/a"))] == [0]
    Path("r.py").write_text(REWARDS.format(1))
    _, out, _ = command("--resume", "runs/a", "--num-updates", 2)
    assert "a file of rewarded" in out and "It learns" not in out
    records = metrics_of("runs/a")
    assert "changed_code" in records[2]["warnings"]
    [(env, first, last)] = before_after(records)
    assert first is last is records[2] and last[f"eval/{env}/p_value"] == 1.0
