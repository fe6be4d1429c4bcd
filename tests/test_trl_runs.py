"""The doctor on runs of TRL: recorded ones, made-up logs, and one that TRL trains here."""

import json
import sys
from pathlib import Path

import pytest

from core.report import doctor, trl_runs

RECORDED = Path(__file__).parents[1] / "runs/trl_doctor"
sys.path[:0] = [str(RECORDED)]
import make  # noqa: E402

CAUSES = {  # what its first line has to contain, in TRL's words
    "healthy": ["It learns", "0.61 to 0.86", "eval_dataset"],
    "lr_zero": ["no update has moved", "a higher learning_rate than 0.0"],
    "constant_reward": ["every completion has earned 1 ", "dead_groups", "reward_funcs"],
    "cut_answers": ["100%", "never_stops", "a higher max_completion_length"],
    "reward_raises": ["in all 25 updates", "'<answer>1</answer>'", "a call of reward_funcs"],
    "high_rate": ["worse", "0.54 to 0.28", "a lower learning_rate than 0.005"],
}


def entry(step, **metrics):
    found = {"step": step, "reward": 0.5 + 0.01 * (-1) ** step, "reward_std": 0.5, "loss": 0.1,
             "frac_reward_zero_std": 0.25, "learning_rate": 1e-5, "grad_norm": 0.3}  # fmt: skip
    return found | {name.replace("__", "/"): value for name, value in metrics.items()}


def save(folder, log, **state):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log} | state))


def said(folder, capsys):
    assert doctor.main([str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", make.RUNS)
def test_the_first_line_names_the_cause_in_the_words_of_trl(name, capsys):
    first, last = said(RECORDED / name, capsys)
    assert all(words in first for words in CAUSES[name]), first
    assert "--" not in first and "report.html" not in first
    assert last.startswith("Not in TRL's log") and "the KL to a reference (beta=0)" in last


def test_a_run_that_trl_trains_here(tmp_path, capsys):
    pytest.importorskip("trl")
    make.train(tmp_path, make.raises, steps=3, max_completion_length=4)
    capsys.readouterr()
    config, records = trl_runs.read(tmp_path)
    assert (config["group_size"], config["num_prompts"]) == (make.GROUP, make.PROMPTS)
    assert [record["update"] for record in records] == [1, 2, 3]
    assert {"policy/entropy", "length/mean", "grad/norm", "update/lr"} <= records[0].keys()
    first, *_ = said(tmp_path, capsys)
    assert "in all 3 updates" in first and "reward_funcs" in first and 'in "' in first


def test_kl_and_the_gap_to_vllm_are_read_by_the_same_rules(tmp_path, capsys):
    gap = {"sampling__sampling_logp_difference__mean": 0.2}
    save(tmp_path, [entry(n, kl=0.9 * (n > 1), **gap) for n in range(1, 7)])
    one, two, last = said(tmp_path, capsys)
    assert "0.2 nats" in one and "sampler_gap, since update 3" in one and "use_vllm=False" in one
    assert "0.9 nats" in two and "kl_runaway" in two and "(in the log: kl)" in two
    assert " beta" in two
    assert "beta=0" not in last and "only with use_vllm" not in last


def test_the_newest_state_counts_and_later_steps_on_the_same_completions_are_one_update(tmp_path):
    reused = {"step": 2, "loss": 0.2, "clip_ratio/low_mean": 0.3}
    save(tmp_path / "checkpoint-10", [entry(1), reused, {"step": 2, "train_runtime": 9.0}])
    save(tmp_path / "checkpoint-9", [entry(n) for n in range(1, 9)])
    _, (record,) = trl_runs.read(tmp_path)
    assert (record["update"], record["loss"], record["clip/low_fraction"]) == (1, 0.2, 0.3)
    save(tmp_path, [entry(1), entry(2), entry(3)])
    assert len(trl_runs.read(tmp_path)[1]) == 3


def test_rewards_of_none_entries_of_many_steps_and_evaluations_are_named(tmp_path, capsys):
    log = [entry(10 * n, reward=None, reward_std=None, frac_reward_zero_std=0.0)
           for n in range(1, 5)]  # fmt: skip
    log += [{"step": 10, "eval_reward": 0.25}, {"step": 40, "eval_reward": 0.5}]
    save(tmp_path, log, logging_steps=10)
    first, none, evaluated, _ = said(tmp_path, capsys)
    assert "in all 4 log entries of 10 steps so far" in first
    assert none.startswith("In 4 of 4 log entries") and "returned None" in none
    assert "from 0.25 to 0.50 between steps 10 and 40" in evaluated


def test_a_limit_that_ends_nothing_is_not_blamed(tmp_path):
    """All are clipped for TRL, but of unequal lengths: their end token is another one."""
    clipped = {"completions__clipped_ratio": 1.0, "completions__max_length": 9}
    save(tmp_path, [entry(1, completions__min_length=9, **clipped),
                    entry(2, completions__min_length=3, **clipped)])  # fmt: skip
    cut = [record["length/hit_token_limit"] for record in trl_runs.read(tmp_path)[1]]
    assert cut == [1.0, None]


def test_completions_say_which_groups_are_solved(tmp_path, capsys):
    """Four groups of two in each of five steps: one solved, three that earned nothing, but for one
    in step 1: of 15 groups that are not all right 14 earned the same, 93%."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    save(tmp_path, [entry(n, reward=0.25, rewards__right__mean=0.25) for n in range(1, 6)])
    (tmp_path / "completions").mkdir()
    for n in range(1, 6):
        columns = {"step": [n] * 8, "prompt": [*"aabbccdd"], "completion": [*"12345678"],
                   "right": [1.0, 1.0, float(n == 1), *[0.0] * 5]}  # fmt: skip
        file = tmp_path / f"completions/completions_{n:05}.parquet"
        parquet.write_table(pyarrow.table(columns), file)
    config, records = trl_runs.read(tmp_path)
    assert (config["group_size"], config["num_prompts"]) == (2, 4)
    assert {record["groups/all_right"] for record in records} == {0.25}
    line, *_ = said(tmp_path, capsys)
    assert "in 93% of the groups" in line and "all 2 answers" in line
    assert "SFTTrainer" in line and "a larger num_generations" in line and "--" not in line
    (tmp_path / "completions/completions_00001.parquet").write_bytes(b"cut short")
    assert said(tmp_path, capsys)


def test_the_least_number_of_groups():
    records = [{"groups/zero_std_fraction": value} for value in (0.25, 0.0, 2 / 3, None)]
    assert trl_runs._least_groups(records) == 12
    assert trl_runs._least_groups([]) == 1


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"log_history": 1}', '{"log_history": [1, {"step": 1, "loss": 2.0}]}'],
)
def test_other_files_are_one_line(tmp_path, capsys, text):
    (tmp_path / "trainer_state.json").write_text(text)
    assert doctor.main([str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
