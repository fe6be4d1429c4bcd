"""The journal is one JSON object a line, can be cut back, and tells before from after."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

import train
from core import run_log
from core.metrics import (
    before_after,
    describe,
    eval_metrics,
    explained_variance,
    rollout_metrics,
    token_metrics,
    weight_metrics,
    wilson,
)  # fmt: skip
from core.report.page import choose
from core.run import folder_of
from core.run_dir import new_folder, write_config
from core.run_log import Journal, read_records, rewind, summary
from core.types import Rollout, Turn, UsageError

CONFIG = {
    "algo": "grpo", "env": ["letter_counting"], "model_id": "tiny", "seed": 0, "sft_steps": 0,
}  # fmt: skip


def rollout(reward, group=0, tokens=2, reason="stop", **info):
    turn = Turn([1], [5] * tokens, [-0.5] * tokens, reason, reward)
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    return Rollout("e", "player", 0, group, messages, [turn], info=info)


def test_rollout_metrics_by_hand():
    rollouts = [
        rollout(1.0, 0, correct=True, worked=True),
        rollout(1.0, 0, tokens=4, reason="length", correct=True, worked=False),
        rollout(0.0, 1, correct=False, worked=False),
        rollout(0.5, 1, correct=False, note="text"),
    ]
    found = rollout_metrics(rollouts)
    assert (found["reward/mean"], found["reward/min"], found["reward/max"]) == (0.625, 0.0, 1.0)
    assert found["reward/std"] == pytest.approx(math.sqrt(0.171875))
    assert found["reward/correct"] == 0.5
    assert (found["groups/zero_std_fraction"], found["groups/all_right"]) == (0.5, 0.5)
    assert found["groups/all_wrong"] == 0.5
    assert (found["length/mean"], found["length/max"], found["length/hit_token_limit"]) == (
        2.5,
        4,
        0.25,
    )
    assert found["info/worked"] == pytest.approx(1 / 3)
    assert "info/note" not in found and "info/correct" not in found


def test_correct_is_what_the_environment_says_not_the_reward():
    found = eval_metrics([rollout(0.9, correct=False), rollout(0.1, correct=True)])
    assert found["eval/e/accuracy"] == 0.5
    assert found["eval/e/return_mean"] == pytest.approx(0.5)
    half = 1.96 * 0.4 / math.sqrt(2)  # returns 0.9 and 0.1: standard deviation 0.4
    assert found["eval/e/return_low"] == pytest.approx(0.5 - half)
    assert found["eval/e/return_high"] == pytest.approx(0.5 + half)
    assert found["eval/e/ci_low"] < 0.5 < found["eval/e/ci_high"]


def test_wilson_by_hand_and_at_the_ends():
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4901625, abs=1e-5), pytest.approx(0.9433178, abs=1e-5))
    assert wilson(10, 10)[1] == 1.0 and wilson(10, 10)[0] < 0.8


def test_gaps_and_explained_variance_by_hand():
    known = {
        "old_logprobs": torch.tensor([[-1.0, -2.0, 9.0]]),
        "sampler_logprobs": torch.tensor([[-1.0, -3.0, 0.0]]),
    }
    mask = torch.tensor([[True, True, False]])
    assert token_metrics(known, mask) == {"gap/logprob_mean": 0.5, "gap/logprob_max": 1.0}
    known |= {"targets": torch.tensor([[1.0, 3.0, 9.0]]), "values": torch.tensor([[1.5, 2.5, 0.0]])}
    # variances of a sample: targets 2, what is left of them (-0.5, 0.5) 0.5
    assert token_metrics(known, mask)["baseline/explained_variance"] == 0.75
    same = torch.tensor([1.0, 1.0])
    assert explained_variance(same, torch.tensor([2.0, 5.0])) == {"baseline/explained_variance": 0}


def test_the_group_s_mean_explains_what_differs_between_groups():
    # returns 0 2 | 4 6: variance 20/3, around the groups' means 1 and 5: 4/3
    rollouts = [rollout(0.0), rollout(2.0), rollout(4.0, group=1), rollout(6.0, group=1)]
    found = rollout_metrics(rollouts)["baseline/explained_variance"]
    assert found == pytest.approx(1 - (4 / 3) / (20 / 3))


def test_weights_are_counted_before_the_cap_and_beyond_it():
    ratio = torch.tensor([0.4, 1.0, 3.0])
    cut = weight_metrics(ratio, 2.0, "truncate")
    assert cut == {"weights/mean": pytest.approx(4.4), "weights/capped": 1}
    assert weight_metrics(ratio, 2.0, "mask")["weights/capped"] == 2  # 0.4 is below 1/2
    assert weight_metrics(ratio, 0.0, "truncate")["weights/capped"] == 0


def test_records_hold_no_nan_and_a_line_cut_short_is_left_out(tmp_path):
    write_config(tmp_path, CONFIG)
    with Journal(tmp_path, CONFIG) as log:
        log.log({"update": 0, "reward/mean": float("nan"), "loss": float("inf")})
        log.log({"update": 1, "reward/mean": 0.5})
        log.log_rollouts("train", 1, [rollout(1.0, correct=True)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 2, "rew')
    assert read_records(tmp_path / "metrics.jsonl") == [
        {"update": 0, "reward/mean": None, "loss": None},
        {"update": 1, "reward/mean": 0.5},
    ]
    (row,) = read_records(tmp_path / "rollouts.jsonl")
    assert (row["return"], row["rewards"], row["tokens"]) == (1.0, [1.0], 2)


@pytest.mark.parametrize("line", ["[1]", "3", "null", '"update"'])
def test_a_line_that_is_no_object_ends_the_records(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"update": 0}}\n{line}\n{{"update": 1}}\n')
    assert read_records(tmp_path / "metrics.jsonl") == [{"update": 0}]


def test_rewind_drops_what_will_be_done_again(tmp_path):
    lines = [{"sft_step": 20}, {"sft_step": 40}, {"update": 0}, {"update": 1}, {"update": 2}]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(x) + "\n" for x in lines))
    rewind(tmp_path, {"sft_step": 20, "update": -1})
    assert read_records(tmp_path / "metrics.jsonl") == lines[:1]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    rewind(tmp_path, {"sft_step": 40, "update": 1})
    assert read_records(tmp_path / "metrics.jsonl") == lines[:4]


def test_rollouts_are_bounded_the_newest_kept_and_rewound(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "ROLLOUTS_BYTES", 2000)
    write_config(tmp_path, CONFIG)
    with Journal(tmp_path, CONFIG) as log:
        for update in range(60):
            log.log_rollouts("train", update, [rollout(1.0, correct=True)])
    files = [tmp_path / name for name in ("rollouts.old.jsonl", "rollouts.jsonl")]
    sizes = [file.stat().st_size for file in files]
    one = max(len(line) for file in files for line in file.read_text().splitlines())
    assert 2000 < sizes[0] <= 2000 + one + 1 and 0 < sizes[1] <= 2000 + one + 1
    kept = [r["update"] for file in files for r in read_records(file)]
    assert kept == list(range(kept[0], 60)) and kept[0] > 0
    segments, left = choose(tmp_path / "rollouts.jsonl", 10**6)
    assert [s["u"] for s in segments] == kept and not left
    rewind(tmp_path, {"sft_step": 0, "update": kept[0]})  # back into the older file
    assert [r["update"] for file in files for r in read_records(file)] == kept[:1]


def test_before_and_after_are_the_first_and_last_evaluations(tmp_path):
    def record(update, accuracy):
        return {"update": update, "eval/a:k=1/accuracy": accuracy,
                "eval/a:k=1/ci_low": 0.1, "eval/a:k=1/ci_high": 0.9}  # fmt: skip

    records = [{"sft_step": 1}, record(0, 0.2), {"update": 1}, record(2, 0.5), record(4, 0.75)]
    ((env, first, last),) = before_after(records)
    assert (env, first["update"], last["update"]) == ("a:k=1", 0, 4)
    assert describe(env, last) == "0.75 [0.10, 0.90]"
    assert before_after([{"update": 1}]) == []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert "0.20 [0.10, 0.90] before RL -> 0.75" in summary(tmp_path, CONFIG)[0]


def test_a_run_without_a_name_takes_the_next_number(tmp_path):
    assert new_folder(tmp_path, "", "grpo-x").name == "grpo-x-1"
    (tmp_path / "grpo-x-1").mkdir()
    assert new_folder(tmp_path, "", "grpo-x").name == "grpo-x-2"
    with pytest.raises(UsageError, match="exists"):
        new_folder(tmp_path, "grpo-x-1", "")


def test_many_environments_make_no_name_that_a_disk_would_refuse(tmp_path):
    cfg = train.Config(env=("letter_counting",) * 40)
    folder, new = folder_of(cfg, tmp_path)
    folder.mkdir()
    assert new and folder.name.startswith("grpo-letter_counting+letter_counting+")
    assert folder_of(cfg, tmp_path)[0].name == folder.name[:-1] + "2"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_update_the_first_included(tmp_path, monkeypatch, name):
    sent = []
    session = SimpleNamespace(
        log=lambda scalars, step: sent.append((step, scalars)), finish=lambda: sent.append("end")
    )
    opened = {}
    module = SimpleNamespace(init=lambda **settings: opened.update(settings) or session)
    monkeypatch.setitem(sys.modules, name, module)
    write_config(tmp_path, CONFIG)
    with Journal(tmp_path, CONFIG, track=name) as log:
        log.log({"sft_step": 1, "sft/loss": 3.0})
        log.log({"update": 0, "eval/e/accuracy": 0.5})
        log.log({"update": 1, "reward/mean": 0.25})
    assert sent == [(0, {"eval/e/accuracy": 0.5}), (1, {"reward/mean": 0.25}), "end"]
    assert opened == {"project": "picorl", "name": tmp_path.name, "config": CONFIG}


def test_tensorboard_gets_its_event_file(tmp_path):
    write_config(tmp_path, CONFIG)
    with Journal(tmp_path, CONFIG, track="tensorboard") as log:
        log.log({"update": 1, "reward/mean": 0.25})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"reward/mean" in events.read_bytes()


def test_the_picture_is_drawn_for_any_journal(tmp_path):
    evaluated = {"eval/a/accuracy": 0.5, "eval/a/ci_low": 0.4, "eval/a/ci_high": 0.6}
    update = {"reward/mean": 0.1, "length/mean": 9.0}
    for records in (
        [{"update": 0, **evaluated}],
        [{"update": 0}, {"update": 1, "reward/mean": None, "length/mean": 3.0}],
        [{"sft_step": 1, "sft/loss": 2.0}, {"update": 0, **evaluated}, {"update": 1, **update}],
        [{"update": i, **evaluated, **update, "info/worked": 0.5} for i in range(3)],
    ):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        (tmp_path / "rollouts.jsonl").touch()
        run_log.write_pages(tmp_path, CONFIG)
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert f"# {tmp_path.name}" in (tmp_path / "README.md").read_text()


def test_seeds_are_drawn_as_a_band(tmp_path):
    from core.report.curves import draw_seeds

    records = [
        {"update": i, "eval/a/accuracy": 0.1 * i, "reward/correct": 0.5, "length/mean": 3.0 + i,
         "info/worked": 0.5} for i in range(4)
    ]  # fmt: skip
    draw_seeds(tmp_path / "seeds.png", {"grpo": [records, records[:3]], "ppo": [records]}, "title")
    assert (tmp_path / "seeds.png").read_bytes().startswith(b"\x89PNG")
