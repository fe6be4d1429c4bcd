"""The board of a room: order, ties, the budget, and which runs are not on it."""

import json
from pathlib import Path

import pytest
import yaml

from core.faults import UsageError
from core.report import compare
from core.report.board import board, boards

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


def ranks(rows):
    return [(row[0], row[1]) for row in rows]


def test_runs_that_cannot_be_told_apart_share_a_rank():
    """0.90 and 0.78 differ by less than √(0.1² + 0.1²) = 0.141, 0.90 and 0.70 by more; 0.70 and
    0.60 by less again, and so do 0.78 and 0.70, but the first of a rank decides."""
    runs = [run("a", 0, 0.60), run("b", 0, 0.78), run("c", 0, 0.90), run("d", 0, 0.70)]
    title, rows, left_out = board(runs)
    assert ranks(rows) == [("1", "c"), ("1", "b"), ("3", "d"), ("3", "a")]
    assert rows[0][3:] == ["0.90 [0.80, 1.00]", "100", "0.1"] and left_out == []
    assert title == "adding, 256 held-out tasks, 300 sampled tokens, all from base"


def test_the_interval_of_each_side_counts():
    """Below the better accuracy, above the worse one: 0.2 against √(0.15² + 0.15²) = 0.212."""
    better, worse = run("a", 0, 0.9), run("b", 0, 0.7)
    better[2][1]["eval/adding/ci_low"], worse[2][1]["eval/adding/ci_high"] = 0.75, 0.85
    assert ranks(board([better, worse])[1]) == [("1", "a"), ("1", "b")]
    worse[2][1]["eval/adding/ci_high"] = 0.80  # √(0.15² + 0.10²) = 0.180
    assert ranks(board([better, worse])[1]) == [("1", "a"), ("2", "b")]


def test_a_run_counts_at_its_last_evaluation_within_the_budget():
    """An update may exceed it by a twentieth, and no more."""
    runs = [run("long", 0, 0.1, 0.2, 0.5, 0.9), run("short", 0, 0.4)]
    _, rows, [line] = board(runs)  # of 300 tokens, three updates
    assert line.startswith("long: the last evaluation within the budget counts")
    assert [row[3][:4] for row in rows] == ["0.50", "0.40"]
    assert [row[4] for row in rows] == ["300", "100"]
    for budget, tokens in ((286, ["300", "100"]), (285, ["100", "200"]), (1, ["0", "0"])):
        for _, config, _ in runs:
            config["max_sampled_tokens"] = budget  # 300 / 1.05 = 285.7; 1: before the first update
        assert [row[4] for row in board(runs)[1]] == tokens


def test_a_model_goes_by_the_name_of_its_folder_wherever_that_is():
    for ids in (("runs/base/model", "/far/base/model"), ("base", "/far/base")):
        title, rows, _ = board([run(model_id, 0, 0.5, model_id=model_id) for model_id in ids])
        assert len(rows) == 2 and title.endswith(" from base")


def test_runs_on_other_terms_are_not_ranked():
    runs = [run("a", 0, 0.5), run("b", 0, 0.5), run("warm", 0, 0.9, sft_steps=50),
            run("tiny", 0, 0.9, model_id="tiny"), run("few", 0, 0.9, eval_num_tasks=10),
            run("easier", 0, 0.9, env=["adding:digits=1"]), run("trained", 0.3, 0.9),
            (Path("other"), CONFIG, [evaluated(1, 0.9, env="words")]),
            (Path("never"), CONFIG, [{"update": 1, "tokens/sampled": 100}])]  # fmt: skip
    _, rows, left_out = board(runs)
    assert ranks(rows) == [("1", "a"), ("1", "b")]
    assert [line.removeprefix("Not on this board: ") for line in left_out] == [
        "warm: warm-start steps 50, not 0", "tiny: from tiny, not base",
        "few: held-out tasks 10, not 256", "easier: trained on adding:digits=1, not adding",
        "trained: accuracy before RL 0.30, not 0.00",
        "other: evaluated on words, not adding",
        "never: evaluated on nothing, not adding",
    ]  # fmt: skip


def test_a_file_of_an_environment_may_be_in_a_clone_of_each():
    clones = [run(name, 0, 0.5, env=[f"/home/{name}/my.py:Maze:size=4"]) for name in "ab"]
    assert ranks(board(clones)[1]) == [("1", "a"), ("1", "b")]


def test_the_budget_is_that_of_most_runs():
    runs = [run(name, 0, 0.5, max_sampled_tokens=n) for name, n in [("a", 9), ("b", 7), ("c", 7)]]
    assert ", 7 sampled tokens," in board(runs)[0]
    for others in (run("a", 0, 0.5, max_sampled_tokens=0), (Path("never"), CONFIG, [])):
        with pytest.raises(UsageError, match="no run has an evaluation and a budget"):
            board([others])


def test_the_terms_are_those_of_the_runs_that_set_a_budget():
    """A room has more other runs, such as those of the first steps of the workshop."""
    first = [run(f"grpo-{i}", 0.4, 0.9, model_id="tiny", max_sampled_tokens=0) for i in range(3)]
    base = run("base", 0.2, sft_steps=400, max_sampled_tokens=0)
    contest = [run("alice", 0, 0.5), run("bob", 0, 0.8)]
    _, rows, left_out = board([*first, base, *contest])
    assert ranks(rows) == [("1", "bob"), ("2", "alice")]
    assert left_out[0] == "Not on this board: grpo-0, grpo-1, grpo-2: from tiny, not base"


def test_each_environment_with_a_budget_has_a_board():
    """Of the end of scratch.py and of the contest, in the folder of one participant."""
    words = [evaluated(0, 0.4, env="words"), evaluated(1, 0.9, env="words")]
    first = [(Path(name), CONFIG | {"max_sampled_tokens": 100}, words) for name in ("mine", "ours")]
    base = run("base", 0.2, max_sampled_tokens=0)
    base[2][0] = evaluated(0, 0.2, env="pairs")
    of_words, of_adding = boards([run("alice", 0, 0.5), base, *first])
    assert [of_words[0][:5], of_adding[0][:6]] == ["words", "adding"]
    assert [ranks(rows) for _, rows, _ in (of_words, of_adding)] == [
        [("1", "mine"), ("1", "ours")], [("1", "alice")]
    ]  # fmt: skip
    assert of_words[2] == ["Not on this board: base: evaluated on pairs, not words"]
    assert of_adding[2] == []


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
    assert [line.split()[:2] for line in out.splitlines()[2:4]] == [["1", "a"], ["2", "b"]]
    assert "1 of the folders are not runs" in out and not (tmp_path / "compare.png").exists()
    for pattern in ("*", "[ab]"):  # PowerShell expands none
        assert compare.main(["--board", str(tmp_path / pattern)]) == 0
        assert capsys.readouterr().out.splitlines()[:4] == out.splitlines()[:4]
    assert compare.main(["--board", folders[2]]) == 2
