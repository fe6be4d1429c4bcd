"""The board of a room: order, the budget, and which runs are on it."""

import json
from pathlib import Path

import pytest
import yaml

from core.faults import UsageError
from core.report import compare
from core.report.board import boards

CONFIG = {"algo": "grpo", "env": ["adding"], "model_id": "runs/base/model", "seed": 0,
          "sft_steps": 0, "eval_num_tasks": 256, "max_sampled_tokens": 300}  # fmt: skip


def evaluated(update, accuracy, tokens=100, env="adding", half=0.1):
    """An update of so many tokens, and the accuracy after it with an interval of ± `half`."""
    values = {"accuracy": accuracy, "ci_low": accuracy - half, "ci_high": accuracy + half}
    record = {"update": update, **{f"eval/{env}/{k}": v for k, v in values.items()}}
    return record | ({"tokens/sampled": tokens, "time/train_s": 6.0} if update else {})


def run(name, *accuracies, **changes):
    """A run that is evaluated before the first update and after each, of 100 tokens."""
    records = [evaluated(update, accuracy) for update, accuracy in enumerate(accuracies)]
    return Path(name), CONFIG | changes, records


def test_runs_are_ordered_by_accuracy_with_their_interval_and_model():
    runs = [run("a", 0, 0.60), run("b", 0, 0.90, model_id="/far/base/model"), run("c", 0, 0.70)]
    [(title, rows)] = boards(runs)
    assert [row[0] for row in rows] == ["b", "c", "a"]
    assert rows[0][1:] == ["grpo", "base", "0.90 [0.80, 1.00]", "100", "0.1"]
    assert title == "adding, 256 held-out tasks, 300 sampled tokens"


def test_a_run_counts_at_its_last_evaluation_within_the_budget():
    """An update may exceed it by a twentieth, and no more."""
    runs = [run("long", 0, 0.1, 0.2, 0.5, 0.9), run("short", 0, 0.4)]
    [(_, rows)] = boards(runs)  # of 300 tokens, three updates
    assert [(row[3][:4], row[4]) for row in rows] == [("0.50", "300"), ("0.40", "100")]
    for budget, tokens in ((286, ["300", "100"]), (285, ["100", "200"]), (1, ["0", "0"])):
        for _, config, _ in runs:
            config["max_sampled_tokens"] = budget  # 300 / 1.05 = 285.7; 1: before the first update
        assert [row[4] for row in next(boards(runs))[1]] == tokens


def test_the_budget_is_that_of_most_runs_and_each_environment_has_a_board():
    """Of the end of scratch.py and of the contest, in the folder of one participant."""
    runs = [run(name, 0, 0.5, max_sampled_tokens=n) for name, n in [("a", 9), ("b", 7), ("c", 7)]]
    words = [evaluated(0, 0.4, env="words"), evaluated(1, 0.9, env="words")]
    others = [(Path("mine"), CONFIG, words), (Path("never"), CONFIG, []),
              run("base", 0.2, max_sampled_tokens=0)]  # fmt: skip
    of_adding, of_words = boards([*runs, *others])
    assert ", 7 sampled tokens" in of_adding[0] and of_words[0].startswith("words, ")
    assert [[row[0] for row in rows] for _, rows in (of_adding, of_words)] == [["b", "c"], ["mine"]]
    with pytest.raises(UsageError, match="no run has an evaluation and a budget"):
        next(boards(others[1:]))


def test_the_command_leaves_out_what_is_no_run(tmp_path, capsys):
    for folder, config, records in (run("a", 0, 0.9), run("b", 0, 0.5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.yaml").write_text(yaml.safe_dump(config))
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / folder / "metrics.jsonl").write_text(lines)
    (tmp_path / "page").mkdir()
    folders = [str(tmp_path / name) for name in ("a", "b", "page")]
    assert compare.main(["--board", *folders]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("adding, 256 held-out tasks")
    assert [line.split()[0] for line in out.splitlines()[2:4]] == ["a", "b"]
    assert "1 of the folders are not runs" in out and not (tmp_path / "compare.png").exists()
    for pattern in ("*", "[ab]"):  # PowerShell expands none
        assert compare.main(["--board", str(tmp_path / pattern)]) == 0
        assert capsys.readouterr().out.splitlines()[:4] == out.splitlines()[:4]
    assert compare.main(["--board", folders[2]]) == 2
