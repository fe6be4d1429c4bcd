"""Warnings: the recorded runs get what they deserve, and every bound has two sides."""

import json
import math
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from test_report import CONFIG, data_of, write_run

from core import diagnostics, run_log
from core.checkpoint import find_checkpoint
from core.report import compare, curves
from environments import base, registry

ROOT = Path(__file__).parent.parent
FOLDERS = """algorithms_tiny environments_tiny letter_counting_tiny letter_counting_vllm
    what_goes_wrong""".split()
RUNS = sorted(path for folder in FOLDERS for path in (ROOT / "runs" / folder).glob("*.jsonl"))
DESERVED = {  # (name, update) in the order in which they are raised; all other runs: none
    "what_goes_wrong/no_spread": [("entropy_collapse", 5), ("dead_groups", 5)],
    "what_goes_wrong/high_rate": [("dead_groups", 16), ("entropy_collapse", 23)],
    "what_goes_wrong/retokenised": [("sampler_gap", 9)],
    "what_goes_wrong/wrong_clip": [("kl_runaway", 5)],
    "what_goes_wrong/hacked_proxy": [("reward_without_accuracy", 20)],
    # held-out accuracy 0.99 -> 0.93 -> 0.92 at the end, and reward still rises
    "algorithms_tiny/grpo-seed2": [("reward_without_accuracy", 39)],
    "algorithms_tiny/gspo-seed2": [("reward_without_accuracy", 39)],
}


def replay(records, first=1, by_group=True, keep=dict):
    """What the loop does: (name, update, line) of all that is raised, from record `first` on."""
    kept = [keep(record) for record in records]
    return [
        (name, records[end - 1]["update"], line)
        for end in range(first, len(records) + 1)
        for name, line in diagnostics.new(kept[:end], by_group).items()
    ]


def names(records, **options):
    return [found[:2] for found in replay(records, **options)]


def run_of(updates, evals=(), **metrics):
    """Records of a run: update 0, then so many; a metric is a number or a function of the update.
    `evals`: {update: accuracy}, an interval of 0.05 to either side."""
    records = []
    for update in range(updates + 1):
        of = {k.replace("__", "/"): v(update) if callable(v) else v for k, v in metrics.items()}
        records.append({"update": update, **(of if update else {})})
        if update in evals:
            at = evals[update]
            records[-1] |= {"eval/e:k=1/accuracy": at, "eval/e:k=1/ci_low": at - 0.05,
                            "eval/e:k=1/ci_high": at + 0.05}  # fmt: skip
    return records


def test_there_are_recorded_runs():
    assert len(RUNS) > 70 and {"/".join(p.with_suffix("").parts[-2:]) for p in RUNS} > set(DESERVED)


@pytest.mark.parametrize("path", RUNS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_recorded_runs_raise_what_they_deserve(path):
    records = run_log.read_records(path)
    assert names(records, keep=diagnostics.warning_inputs) == DESERVED.get(
        f"{path.parent.name}/{path.stem}", []
    )


KL, GAP, FAR = "kl__approx", "gap__logprob_mean", "gap__logprob_max"


@pytest.mark.parametrize(
    ("name", "below", "above"),
    [
        ("weights_at_cap", {"weights__capped": 0.049}, {"weights__capped": 0.051}),
        ("kl_runaway", {KL: 0.049}, {KL: 0.051}),
        ("kl_runaway", {"kl__reference": 0.49}, {"kl__reference": 0.51}),
        ("sampler_gap", {GAP: 0.049}, {GAP: 0.051}),
        ("sampler_gap", {GAP: 5e-3}, {GAP: 0.06}),  # bfloat16 on a CPU has 3e-3 to 5e-3
        ("sampler_gap", {FAR: 4.9}, {FAR: 5.1}),
        ("sampler_gap", {FAR: lambda u: 9.0 * (u == 3)}, {FAR: lambda u: 9.0 * (u in (3, 5))}),
        ("entropy_collapse",
         {"policy__entropy": 0.021, "reward__correct": 0.5},
         {"policy__entropy": 0.019, "reward__correct": 0.5}),
        ("entropy_collapse",  # solved
         {"policy__entropy": 0.01, "reward__correct": 0.91},
         {"policy__entropy": 0.01, "reward__correct": 0.89}),
        ("dead_groups",
         {"groups__zero_std_fraction": 0.874, "groups__all_right": 0.5},
         {"groups__zero_std_fraction": 0.876, "groups__all_right": 0.5}),
        ("dead_groups",  # solved
         {"groups__zero_std_fraction": 1.0, "groups__all_right": 0.91},
         {"groups__zero_std_fraction": 1.0, "groups__all_right": 0.89}),
    ],
)  # fmt: skip
def test_each_bound_has_two_sides(name, below, above):
    assert names(run_of(30, **below)) == []
    assert names(run_of(30, **above)) == [(name, 5)]  # once, as soon as five updates say so


def test_entropy_is_compared_with_what_it_was():
    for end, expected in ((0.11, []), (0.09, [("entropy_collapse", 13)])):  # most of 11..15 at 13
        records = run_of(20, policy__entropy=lambda u, end=end: 1.0 if u <= 10 else end,
                         reward__correct=0.5)  # fmt: skip
        assert names(records) == expected


def test_one_update_raises_nothing():
    spike = run_of(20, kl__approx=lambda u: 0.2 * (u == 10), gap__logprob_max=1.0,
                   weights__capped=lambda u: 0.2 * (u == 10),
                   gap__logprob_mean=lambda u: 0.2 * (u == 10))  # fmt: skip
    assert names(spike) == []


def test_reward_that_rises_while_accuracy_falls_is_told():
    def reward(u):
        return 0.5 + 0.02 * u + 0.01 * (-1) ** u

    fell = {0: 0.5, 10: 0.7, 20: 0.59}
    ((name, update, line),) = replay(run_of(25, fell, reward__mean=reward))
    assert (name, update) == ("reward_without_accuracy", 20)
    assert "since update 10 reward rose from 0.76 to 0.86" in line
    assert "accuracy on e:k=1 fell from 0.70 to 0.59" in line
    within = {0: 0.5, 10: 0.7, 20: 0.61}  # the intervals touch
    assert names(run_of(25, within, reward__mean=reward)) == []
    assert names(run_of(25, fell, reward__mean=lambda u: 2 - reward(u))) == []  # both fall
    noise = run_of(25, fell, reward__mean=lambda u: 0.5 + 0.01 * (u > 10) + 0.1 * (-1) ** u)
    assert names(noise) == []
    assert names(run_of(25, {10: 0.9, 19: 0.1}, reward__mean=reward)) == []  # too near to compare


def test_the_slow_fall_of_accuracy_is_told_once():
    fell = {0: 0.9, 10: 0.85, 20: 0.78, 30: 0.7, 40: 0.6, 50: 0.5}
    records = run_of(50, fell, reward__mean=lambda u: 0.01 * u)
    assert names(records) == [("reward_without_accuracy", 20)]


def test_another_environment_is_not_compared():
    records = run_of(20, {0: 0.9, 20: 0.1}, reward__mean=lambda u: 0.01 * u)
    assert names(records) == [("reward_without_accuracy", 20)]
    records[20] = {k.replace("e:k=1", "other"): v for k, v in records[20].items()}
    assert names(records) == []


def test_dead_groups_do_no_harm_where_no_group_is_compared():
    records = run_of(10, groups__zero_std_fraction=1.0, groups__all_right=0.0)
    assert names(records, by_group=False) == []
    assert names(records) == [("dead_groups", 5)]


def test_a_warning_comes_again_only_after_ten_updates_without_it():
    def high(u):  # means of five above the bound at 5, then 15..20 and 40
        return 0.1 if u <= 5 or u in (15, 16, 17, 18, 40, 41, 42) else 0.0

    ends = [u for u in range(1, 51)
            if "weights_at_cap" in diagnostics.raised(run_of(u, weights__capped=high))]  # fmt: skip
    assert ends == [5, 6, 7, *range(17, 21), *range(42, 45)]  # two of five make 0.04 only
    assert names(run_of(50, weights__capped=high)) == [
        ("weights_at_cap", 5), ("weights_at_cap", 42),
    ]  # fmt: skip
    later = run_of(50, weights__capped=lambda u: high(u - 1 if u > 6 else u))  # one update later
    assert ("weights_at_cap", 18) in names(later)


def test_a_resumed_run_raises_the_same(tmp_path):
    records = run_of(40, {10: 0.9, 20: 0.5, 30: 0.2}, reward__mean=lambda u: 0.01 * u,
                     weights__capped=lambda u: 0.1 * (u % 20 > 9),
                     kl__approx=lambda u: math.nan if u % 7 == 0 else 0.1)  # fmt: skip
    records = [{"sft_step": 20, "sft/loss": 1.0}, *records]
    whole = replay(records)
    assert {name for name, _, _ in whole} == {
        "weights_at_cap", "kl_runaway", "reward_without_accuracy",
    }  # fmt: skip
    log = run_log.RunLog(tmp_path, CONFIG)
    with log:
        for record in records:
            log.log(record)  # NaN becomes null
    written = [
        diagnostics.warning_inputs(r) for r in run_log.read_records(tmp_path / "metrics.jsonl")
    ]
    assert None in (r.get("kl/approx", 0) for r in written)
    for cut in (2, 15, 21, 33):
        gone_on = written[:cut] + records[cut:]
        assert replay(gone_on, first=cut) == [
            f for f in whole if f[1] >= records[cut - 1]["update"]
        ]


def test_what_is_missing_or_not_finite_says_nothing():
    everything = {k.replace("/", "__"): None for k in diagnostics.LOOKED_AT if k != "update"}
    for value in (None, math.nan, math.inf, "much", {}):
        records = run_of(15, {0: 0.5, 10: 0.1, 15: 0.1}, **dict.fromkeys(everything, value))
        records[10]["eval/e:k=1/ci_high"] = value
        records[15]["eval/e:k=1/accuracy"] = value
        assert replay(records) == []
    assert (
        diagnostics.new([])
        == diagnostics.new([{"sft_step": 1}])
        == diagnostics.new([{"update": 0}])
        == {}
    )


def test_essence_keeps_all_that_is_judged_and_little_else():
    record = json.loads((ROOT / "runs/what_goes_wrong/healthy.jsonl").read_text().splitlines()[-1])
    kept = diagnostics.warning_inputs(record)
    assert len(kept) == 13 and kept.items() <= record.items() and "time/train_s" not in kept


def test_every_line_says_what_to_try():
    told = [f for path in RUNS for f in replay(run_log.read_records(path))
            if f"{path.parent.name}/{path.stem}" in DESERVED]  # fmt: skip
    assert told and all(line.endswith(f"; try {diagnostics.WARNINGS[n][1]}") for n, _, line in told)
    assert all("\n" not in line and len(line) < 300 for _, _, line in told)


@pytest.fixture
def warned():
    records = run_of(30, {0: 0.2, 30: 0.6}, reward__mean=0.5, length__mean=3.0)
    records[9]["warnings"] = {"kl_runaway": "KL <b>0.1", "sampler_gap": "apart"}
    records[30]["warnings"] = {"kl_runaway": "KL 0.2"}
    return records


def test_the_end_of_a_run_repeats_its_warnings(tmp_path, warned):
    told = run_log.summary(write_run(tmp_path / "a", warned), CONFIG)
    assert "warning at update 9, 30: kl_runaway: KL <b>0.1" in told
    assert "warning at update 9: sampler_gap: apart" in told
    assert not [line for line in run_log.summary(write_run(tmp_path / "b"), CONFIG)
                if "warning" in line]  # fmt: skip


def test_a_tracker_is_sent_numbers_only(warned):
    sent = []
    run_log._Tracker(lambda scalars, step: sent.append((scalars, step)), None).log(warned[9])
    assert sent == [({"reward/mean": 0.5, "length/mean": 3.0}, 9)]


def test_the_report_has_each_warning_with_its_updates(tmp_path, warned):
    page = compare.write_report(write_run(tmp_path, warned), CONFIG)
    (data,) = data_of(page.read_text(encoding="utf-8"))
    meant = diagnostics.WARNINGS
    assert data["warnings"] == [
        ["kl_runaway", [9, 30], "KL <b>0.1", meant["kl_runaway"][0]],
        ["sampler_gap", [9], "apart", meant["sampler_gap"][0]],
    ]
    assert "warnings" not in data["curves"]


def test_the_picture_marks_warnings_with_their_names(tmp_path, warned, monkeypatch):
    written, lines = [], []
    annotate, axvline = Axes.annotate, Axes.axvline
    monkeypatch.setattr(Axes, "annotate", lambda axis, text, *args, **kwargs: (
        written.append(text), annotate(axis, text, *args, **kwargs))[1])  # fmt: skip
    monkeypatch.setattr(Axes, "axvline", lambda axis, x, **kwargs: (
        lines.append(x), axvline(axis, x, **kwargs))[1])  # fmt: skip
    curves.draw_curves(tmp_path / "curves.png", warned, "x")
    assert {"kl_runaway, sampler_gap", "kl_runaway"} < set(written)
    assert sorted(lines) == [9, 9, 9, 30, 30, 30]


@pytest.fixture
def hopeless():
    """An environment in which nobody is ever paid."""
    known = dict(registry.ENVIRONMENTS)

    @registry.register("hopeless")
    class Hopeless(base.Env):
        def reset(self, seed):
            return [{"role": "user", "content": f"{seed}?"}]

        def step(self, response):
            return base.Step(None, 0.0, True, {"correct": False})

    yield
    registry.ENVIRONMENTS.clear()
    registry.ENVIRONMENTS.update(known)


HOPELESS = """--env hopeless --sft-steps 0 --num-updates 7 --num-prompts 2 --group-size 2
    --eval-num-tasks 2 --eval-every 0 --save-every 0 --max-tokens 4 --device cpu""".split()


def metrics_of(run):
    records = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]


def test_a_run_warns_once_and_goes_on(command, hopeless):
    code, out, err = command(*HOPELESS, "--run-name", "a")
    assert (code, err) == (0, "")
    assert out.count("\nwarning: dead_groups: ") == 1
    raised = {r["update"]: r["warnings"] for r in metrics_of("runs/a") if "warnings" in r}
    assert list(raised) == [5] and list(raised[5]) == ["dead_groups"]
    assert f"dead_groups: {raised[5]['dead_groups']}" in out


@pytest.mark.parametrize("named", [["dead_groups"], ["any"], ["sampler_gap", "dead_groups"]])
def test_stop_on_saves_and_stops_and_the_run_can_go_on(command, hopeless, named):
    assert command(*HOPELESS, "--run-name", "whole")[0] == 0
    code, out, _ = command(*HOPELESS, "--run-name", "a", "--stop-on", *named)
    assert code == 1 and "--stop-on dead_groups: stopped; go on with: python train.py" in out
    assert [r["update"] for r in metrics_of("runs/a")] == list(range(6))
    assert find_checkpoint(Path("runs/a")).progress["update"] == 5
    assert not Path("runs/a/model").exists() and Path("runs/a/report.html").exists()
    assert command("--resume", "runs/a")[0] == 0  # what was raised isn't raised again
    assert metrics_of("runs/a") == metrics_of("runs/whole")


def test_stop_on_something_else_does_not_stop(command, hopeless):
    assert command(*HOPELESS, "--run-name", "a", "--stop-on", "sampler_gap")[0] == 0


def test_an_unknown_warning_is_one_line(command):
    code, _, err = command("--stop-on", "boredom")
    assert code == 2 and err.count("\n") == 1 and "no such warning; there are" in err
