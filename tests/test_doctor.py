"""core/report/doctor.py says what a run shows, from its records."""

import json
from pathlib import Path

import pytest

from core import results
from core.files.run_log import read_records
from core.report import compare, doctor

RUNS = Path(__file__).resolve().parent.parent / "runs"


def update(number, reward=0.5, **metrics):
    noise = 0.01 * (-1) ** number
    return {"update": number, "reward/mean": reward + noise, "grad/norm": 0.3, "loss": 0.001,
            "groups/zero_std_fraction": 0.25, "groups/all_right": 0.1} | metrics  # fmt: skip


def evaluation(accuracy, p=None, low=None, high=None):
    low, high = low or max(0, accuracy - 0.05), high or accuracy + 0.05
    found = {"accuracy": accuracy, "ci_low": low, "ci_high": high, "tasks": 256, "p_value": p}
    return {f"eval/sums/{name}": value for name, value in found.items()}


def shown(records):
    settings = {"algo": "grpo", "lr": 1e-5}
    return [*map(str, doctor.findings(Path("runs/a"), settings, records))]


def test_a_healthy_run_has_one_finding_with_the_next_step():
    rising = [{"update": 0} | evaluation(0.2), *(update(n, n / 50) for n in range(1, 21))]
    rising[-1] |= evaluation(0.5, p=1e-9)
    assert shown(rising) == [
        "It learns: accuracy on held-out tasks of sums rose from 0.20 to 0.50 (report.html: "
        "Held-out accuracy). Next: more updates, as the reward still rises (0.26 to 0.36 in the "
        "last 5 updates): python train.py --resume runs/a --num-updates 40"
    ]
    rising[-1] |= evaluation(0.97, p=1e-9)
    assert shown(rising)[0].endswith(
        "or another algorithm: python train.py --config runs/a --algo reinforce"
    )


def test_numbers_that_differ_are_shown_with_digits_that_differ(tmp_path):
    """97 and 96 of 254 right: 0.3819 and 0.3780, both 0.38; reward from 0.5000 to 0.5031."""
    before, after = evaluation(97 / 254), evaluation(96 / 254, p=0.9)
    rows = [{"update": 0} | before, *map(update, range(1, 21))]
    for row in rows[1:]:
        row["reward/mean"] = 0.5031 if row["update"] > 15 else 0.5
    rows[-1] |= after
    (line,) = [line for line in shown(rows) if "noise" in line]
    assert "was 0.382 and is 0.378, with" in line and "(0.500 to 0.503 in the last" in line
    assert results.accuracies_of("sums", before, before)[0] == "0.38 [0.33, 0.43]"
    row = compare.table_rows([(tmp_path, {"env": ["sums"], "algo": "grpo"}, rows)])[0]
    assert row[3] == "0.382 [0.332, 0.432] -> 0.378 [0.328, 0.428]"


def test_without_evaluations_the_reward_says_whether_it_learns():
    (line,) = shown([update(n, n / 50) for n in range(1, 21)])
    assert "It learns" in line and "0.06 to 0.36" in line and "--eval-num-tasks" in line
    (line,) = shown([update(n, 1 - n / 50) for n in range(1, 21)])
    assert "worse" in line and "0.94 to 0.64" in line and "a lower --lr than 1e-05" in line
    moved = [update(n, n / 50, **{"update/moved": 0.0}) for n in range(1, 21)]  # all is chance
    assert "no update has moved the policy" in shown(moved)[0]


def test_the_size_of_a_group_is_that_of_the_run():
    dead = {"groups/zero_std_fraction": 0.9, "warnings": {"dead_groups": "dead; try easier tasks"}}
    records = [update(n, **dead) for n in range(1, 7)]
    (line,) = map(str, doctor.findings(Path("runs/a"), {"group_size": 4}, records))
    assert "all 4 answers earned the same" in line


def test_noise_is_called_noise_and_a_flat_reward_is_explained():
    flat = [{"update": 0} | evaluation(0.40), *(update(n) for n in range(1, 21))]
    flat[-1] |= evaluation(0.43, p=0.4)
    noise, reward = shown(flat)
    assert (
        "in the noise" in shown([{"update": 0} | evaluation(0.4), update(1) | evaluation(0.4)])[0]
    )
    assert "in the noise: accuracy on held-out tasks of sums was 0.40 and is 0.43, with" in noise
    assert "from 0.38 to 0.48 on 256 tasks" in noise and "updates" not in noise  # the next says it
    assert "is flat: 0.50 in the first 5 updates, 0.50 in the last; answers" in reward
    assert "in 75% of the groups" in reward and "norm of 0.3. The loss of 0.001 says" in reward


def after_training(**metrics):
    """What is next after 40 updates at a mean reward of 0.5, and an evaluation that is no better;
    `metrics`: numbers, or functions of the update; names have __ for /."""
    metrics = {name.replace("__", "/"): value for name, value in metrics.items()}
    rows = [{"update": 0} | evaluation(0.2)]
    for n in range(1, 41):
        row = {name: value(n) if callable(value) else value for name, value in metrics.items()}
        rows.append(update(n, **{"reward/correct": 0.5} | row))
    rows[-1] |= evaluation(0.5, p=1e-9)
    return shown(rows)[0]


def test_whether_more_updates_help_is_said_as_surely_as_it_is_known():
    assert "may be chance: python train.py --resume" in after_training(reward__std=0.3)
    still = {"reward__mean": 0.5, "reward__std": 0.3}
    assert "as the reward has stopped rising" in after_training(**still)
    cut = {"reward__std": 0.3, "length__hit_token_limit": 0.33}
    assert "a higher --max-tokens first, as 33% of" in after_training(**cut)
    low = {"reward__mean": lambda n: 0.09 + n / 4000, "reward__std": 0.01, "reward__correct": 0.0}
    assert "what earns the reward, which rises (0.096 to 0.099" in after_training(**low)


def test_tasks_are_solved_where_the_interval_says_so():
    def next_step(low, **config):
        rows = [{"update": 0} | evaluation(0.2), *(update(n, 0.9) for n in range(1, 12))]
        for row in rows:
            row["reward/correct"] = 0.3
        rows[-1] |= evaluation(1.0, p=1e-3, low=low, high=1.0)
        settings = {"algo": "grpo", "lr": 1e-5} | config
        return str(doctor.findings(Path("runs/a"), settings, rows)[0])

    assert "the tasks are solved" in next_step(0.94) and "solved" not in next_step(0.2)
    assert "as hard as those that the curriculum trains on" in next_step(0.94, curriculum=0.8)


def test_what_the_policy_did_not_learn_is_not_explained_by_its_accuracy():
    """A policy that does not move learns nothing by heart, and needs no more updates."""

    def rows(**metrics):
        still = {"update/moved": 0.0, "update/steps": 1, "tokens/trained": 9} | metrics
        found = [{"update": 0} | evaluation(0.2), *(update(n, **still) for n in range(1, 12))]
        for row in found[1:]:
            row["reward/correct"] = 0.9
        found[2]["warnings"] = {"no_movement": "no; try its lr"}
        found[-1] |= evaluation(0.21, p=0.9)
        return found

    assert len(shown(rows())) == 1 and "do not change the policy" in shown(rows())[0]
    assert any("by heart" in line for line in shown(rows(**{"update/moved": 0.1})))


def test_one_task_is_not_answered_with_more_of_them():
    """A greedy player meets one course of a game without chance, whatever --eval-num-tasks."""
    rows = [{"update": 0} | evaluation(0.0), update(1) | evaluation(1.0, p=1.0)]
    assert "--eval-num-tasks" in shown(rows)[0]
    rows[-1]["eval/sums/tasks"] = 1
    assert "--eval-num-tasks" not in shown(rows)[0]


def test_what_makes_other_numbers_meaningless_comes_first_and_what_has_ended_is_left_out():
    def records(lag):
        rows = [update(n, **{"gap/canary": lag, "kl/approx": 0.2}) for n in range(1, 9)]
        rows[2]["warnings"] = {"kl_runaway": "KL 0.2; try a lower --lr"}
        rows[4]["warnings"] = {
            "stale_weights": "the sampler lacks 1 of an update; try --sampler torch"
        }
        return rows

    stale, kl = shown(records(1.0))
    measured = "the sampler lacks 1 of an update, by the log-probs of a fixed text (gap/canary)"
    assert f"{measured} (stale_weights, " in stale
    assert stale.endswith("Next: --sampler torch") and kl.endswith("Next: a lower --lr")
    assert [line for line in shown(records(0.0)) if "stale" in line] == []


def test_without_a_reward_an_answer_shows_whether_the_reward_is_wrong(tmp_path):
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "<b>2"}]
    rollout = {"kind": "train", "info": {"row": "sums.jsonl:3"}, "messages": messages}
    lines = map(json.dumps, ({"kind": "eval"}, rollout))
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines))
    records = [{"update": 0} | evaluation(0.0)]
    records += [update(n, 0.0, **{"reward/min": 0.0, "reward/max": 0.0}) for n in range(1, 4)]
    records[-1] |= evaluation(0.0, p=1.0)
    records[-1]["warnings"] = {"no_reward": "no rollout has earned a reward; try other tasks"}
    assert [*map(str, doctor.findings(tmp_path, {}, records))] == [
        "No rollout has earned a reward in all 3 updates so far. The first answer was '<b>2', to "
        "'1 + 1?' (sums.jsonl:3) (report.html: Reward per rollout). Next: other tasks"
    ]


def test_the_answer_shown_is_the_policys_to_the_question(tmp_path):
    """Neither a tool's result nor the environment's last word."""
    said = [("system", "s"), ("user", "1 + 1?"), ("assistant", "call"), ("tool", "67"),
            ("assistant", "<b>2"), ("user", "You lost.")]  # fmt: skip
    messages = [{"role": role, "content": text} for role, text in said]
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"kind": "train", "messages": messages}))
    records = [update(n, 0.0, **{"reward/min": 0.0, "reward/max": 0.0}) for n in range(1, 4)]
    records[-1]["warnings"] = {"no_reward": "no rollout has earned a reward; try other tasks"}
    (line,) = map(str, doctor.findings(tmp_path, {}, records))
    assert "answer was '<b>2', to '1 + 1?' (report" in line


def test_training_tasks_known_by_heart_are_named():
    rows = [{"update": 0} | evaluation(0.3),
            *(update(n, **{"reward/correct": 0.9}) for n in range(1, 9))]  # fmt: skip
    rows[-1] |= evaluation(0.4, p=0.01)
    assert "0.90 of their rollouts are right, but 0.40 of the held-out" in shown(rows)[0]
    rows[-1] |= evaluation(0.8, p=1e-9)
    assert len(shown(rows)) == 1


@pytest.mark.parametrize("pattern", ["letter_counting_tiny/*-seed[0-4]", "smollm2/sums-seed*"])
def test_recorded_runs_that_learn_have_one_finding(pattern):
    files = [file for file in RUNS.glob(f"{pattern}.jsonl") if "answers" not in file.name]
    found = {file.name: shown(read_records(file)) for file in files}
    assert files and all(len(lines) == 1 for lines in found.values()), found
    assert all(lines[0].startswith("It learns: ") for lines in found.values())


@pytest.mark.parametrize(("after", "said"), [
    ((0.7, 0.6, 0.8), "It learns, though no answer counts as right: the mean return"),
    ((0.5, 0.35, 0.65), "Nothing is right yet, and the rest is in the noise: the mean return"),
    ((0.2, 0.1, 0.25), "It has become worse: the mean return"),
    ((0.7, None, None), "Nothing is right yet, and the rest is in the noise: the mean return"),
])  # fmt: skip
def test_where_no_answer_counts_as_right_the_mean_return_is_compared(after, said):
    def returns(mean, low, high):
        of = {"mean": mean, "low": low, "high": high}
        return {f"eval/sums/return_{name}": value for name, value in of.items()}

    rows = [{"update": 0} | evaluation(0.0) | returns(0.4, 0.3, 0.5), *map(update, range(1, 12))]
    rows[-1] |= evaluation(0.0, p=1.0) | returns(*after)
    line = shown(rows)[0]
    interval = "" if after[1] is None else f" [{after[1]:.2f}, {after[2]:.2f}]"
    means = f"0.40 [0.30, 0.50] before and {after[0]:.2f}{interval} after"
    assert line.startswith(f"{said} on held-out tasks of sums is {means} (report.html")


def test_the_command_prints_them_and_says_what_is_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/config.yaml").write_text("lr: 1e-5\n")
    rows = [{"update": 0} | evaluation(0.0), update(1) | evaluation(0.0, p=1.0)]
    Path("a/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert doctor.main(["a"]) == 0
    assert capsys.readouterr().out.startswith(
        "Nothing is right yet, and the rest is in the noise: the mean"
    )
    Path("b").mkdir()
    Path("b/config.yaml").write_text("lr: 1e-5\n")
    Path("b/metrics.jsonl").write_text(json.dumps(update(1)) + "\n")
    assert doctor.main(["b"]) == 0 and capsys.readouterr().out
    assert doctor.main(["a", "b"]) == 0
    assert [line[:3] for line in capsys.readouterr().out.splitlines()] == ["a: ", "b: "]
    assert doctor.main(["none"]) == 2 and "none" in capsys.readouterr().err
    assert doctor.main([]) == 2
