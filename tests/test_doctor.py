"""core/report/doctor.py shows what a run logged: its warnings, its accuracy, the next step."""

import json
from pathlib import Path

import pytest

from core.report import doctor


def update(number, **metrics):
    return {"update": number, "reward/mean": 0.5} | metrics


def evaluation(accuracy, p=None, low=None, **returns):
    found = {"accuracy": accuracy, "ci_low": low or accuracy - 0.05, "ci_high": accuracy + 0.05}
    found |= {"tasks": 256, "p_value": p} | returns
    return {f"eval/sums/{name}": value for name, value in found.items()}


def shown(records, folder=Path("runs/a"), **config):
    return doctor.findings(folder, {"algo": "grpo", "lr": 1e-5} | config, records)


def trained(after, **metrics):
    """A run with an evaluation before and after it."""
    rows = [{"update": 0} | evaluation(0.2), *(update(n, **metrics) for n in range(1, 21))]
    rows[-1] |= after
    return rows


def edited(rows, at):
    rows[at]["warnings"] = {"changed_code": "rewards.py changed"}
    return rows


SOLVED = evaluation(0.97, p=1e-9)
EARNS = update(1) | evaluation(0.0, p=1.0, return_mean=0.7, return_low=0.6, return_high=0.8)
ROSE, FELL = "eval/sums/return_rose", "eval/sums/return_fell"
NEVER = {"update": 0} | evaluation(0.0, return_mean=0.4)  # is an answer right


@pytest.mark.parametrize(("records", "text", "step"), [
    (trained(evaluation(0.5, p=1e-9)),
     "It learns: held-out accuracy on sums [95%]: 0.20 [0.15, 0.25] before RL -> "
     "0.50 [0.45, 0.55] after 20 updates (256 tasks, McNemar's p = 1e-09)",
     "more updates, or more tasks per evaluation (--eval-num-tasks): "
     "python train.py --resume runs/a --num-updates 40"),
    (trained(SOLVED), "It learns", "harder"),
    (trained(SOLVED, **{"update/steps": 0}), "It learns", "earn differently"),
    (trained(evaluation(1.0, p=1e-3, low=0.2)), "It learns", "more updates"),  # few tasks
    (trained(evaluation(0.1, p=1e-9)), "It has become worse", "a lower --lr"),
    (trained(evaluation(0.23, p=0.4)), "The change may be chance", "--eval-num"),
    (trained(evaluation(0.5, p=1e-9), **{"length/hit_token_limit": 0.3}), "It learns", "--max-tok"),
    (trained(evaluation(0.5)), "Held-out accuracy", "more updates"),  # of other tasks: no p
    ([NEVER, EARNS | {ROSE: 6}], "No answer counts as right, and the return rose", "more up"),
    ([NEVER, EARNS | {ROSE: 1, FELL: 9}], "No answer counts as right, and the return fell", "more"),
    ([NEVER, EARNS | {ROSE: 5}], "No answer counts as right, and the return may be as", "more up"),
    ([NEVER, EARNS], "No answer counts as right: held-out", "more up"),  # an older log
    ([{"update": 0} | evaluation(0.2)], "Held-out accuracy on sums [95%]: 0.20 [0.15, 0.25]", ""),
])  # fmt: skip
def test_the_verdict_is_that_of_the_paired_test_and_the_next_step_follows(records, text, step):
    [(found, following)] = shown(records)
    assert found.startswith(text) and step in following and bool(step) == bool(following)
    assert ("mean return 0.40 -> 0.70 [0.60, 0.80]" in found) == text.startswith("No answer")


def test_what_was_evaluated_before_an_edit_is_not_compared():
    *_, (alone, _) = shown(edited(trained(evaluation(0.5, p=1e-9)), at=3))
    assert "->" not in alone and alone.endswith("0.50 [0.45, 0.55]")
    rows = edited(trained(evaluation(0.5)), at=3)
    rows[4] |= evaluation(0.3)
    assert "0.30 [0.25, 0.35] at update 4 -> 0.50" in shown(rows)[-1][0]


def test_without_a_reward_an_answer_shows_whether_the_reward_is_wrong(tmp_path):
    """The policy's last answer: neither a tool's result nor the environment's last word."""
    said = [("system", "s"), ("user", "1 + 1?"), ("assistant", "call"), ("tool", "67"),
            ("assistant", "<b>2"), ("user", "You lost.")]  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in said]
    rollout = {"kind": "train", "info": {"row": "sums.jsonl:3"}, "messages": messages}
    lines = map(json.dumps, ({"kind": "eval"}, rollout))
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    warnings = {"no_reward": "nothing was earned; next: python -m environments play SPEC"}
    [(found, following)] = shown([update(3, warnings=warnings)], tmp_path, env=["compose"])
    assert found.endswith(" The first answer was '<b>2', to '1 + 1?' (sums.jsonl:3)")
    assert following == "python -m environments play compose"


def test_the_command_prints_them_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, records in {"a": trained(evaluation(0.5, p=1e-9)), "b": [update(1)]}.items():
        Path(name).mkdir()
        Path(f"{name}/config.yaml").write_text("lr: 1e-5\nalgo: grpo\n")
        Path(f"{name}/metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert doctor.main(["a", "b"]) == 0
    learns, following, nothing = capsys.readouterr().out.splitlines()
    assert learns.startswith("a: It learns: ") and following.startswith("a:   next: ")
    assert nothing.startswith("b: Nothing")
    assert doctor.main(["none"]) == 2 and "none" in capsys.readouterr().err
    assert doctor.main([]) == 2
