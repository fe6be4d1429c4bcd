"""The logs of a run: one JSON object per line, bounded, rewound on resume, sent to trackers."""

import json
import sys
from types import SimpleNamespace

import pytest

from core.files import run_log
from core.files.run_log import RunLog, read_records, rewind
from core.report.page import pack_rollouts
from core.types import Rollout, Turn

CONFIG = {"algo": "grpo", "env": ["letter_counting"], "model_id": "tiny", "seed": 0}


def rollout(**changes):
    turns = [Turn([1], [5, 6], [-0.5, -0.5], "stop", 0.25), Turn([1], [5], [-0.5], "length", 1.0)]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    return Rollout("e", "player", 3, 4, messages, turns, info={"correct": True}, **changes)


def test_rollouts_are_logged_with_everything_that_the_report_shows(tmp_path):
    more = {"token_traces": [{"text": ["a"], "sampler": [-0.5]}], "tools": ["look"]}
    with RunLog(tmp_path, CONFIG) as log:
        log.log_rollouts("train", 1, [rollout(), rollout(for_log=more)])
    plain, traced = read_records(tmp_path / "rollouts.jsonl")
    assert plain == {
        "update": 1, "kind": "train", "env": "e", "agent": "player", "seed": 3, "group_id": 4,
        "return": 1.25, "rewards": [0.25, 1.0], "tokens": 3, "hit_token_limit": True,
        "episode_truncated": False, "error": "", "info": {"correct": True},
        "messages": rollout().messages,
    }  # fmt: skip
    assert traced == plain | more


def test_lines_that_are_no_objects_are_skipped_and_numbers_that_json_lacks_are_null(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert read_records(file) == []
    file.write_text('{"update": 0}\n[1]\n\n{"update": 2, "rew\n\xff\n', encoding="latin-1")
    with RunLog(tmp_path, CONFIG) as log:
        log.log({"update": 1, "loss": float("nan"), "kl": float("-inf"), "\ud800": 1.0})
    with file.open("a") as cut:
        cut.write('{"update": 2, "los')
    second = {"update": 1, "loss": None, "kl": None, "\ud800": 1.0}
    assert read_records(file) == [{"update": 0}, second]


@pytest.mark.parametrize(("sft_step", "update", "kept"), [(20, -1, 1), (40, 1, 4)])
def test_rewind_drops_the_records_after_a_checkpoint(tmp_path, sft_step, update, kept):
    records = [{"sft_step": 20}, {"sft_step": 40}, {"update": 0}, {"update": 1}, {"update": 2}]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (tmp_path / name).write_text(lines + '{"upd')  # a kill has cut a line short
    rewind(tmp_path, {"sft_step": sft_step, "update": update})
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert read_records(tmp_path / name) == records[:kept]


def test_rollouts_are_rotated_read_and_rewound_across_both_files(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "ROLLOUTS_BYTES", 2000)
    with RunLog(tmp_path, CONFIG) as log:
        for update in range(60):
            log.log_rollouts("train", update, [rollout()])
    files = [tmp_path / name for name in ("rollouts.old.jsonl", "rollouts.jsonl")]
    line = max(len(line) + 1 for file in files for line in file.read_text().splitlines())
    assert 2000 < files[0].stat().st_size <= 2000 + line and files[1].stat().st_size <= 2000 + line
    kept = [record["update"] for file in files for record in read_records(file)]
    assert kept == list(range(kept[0], 60)) and kept[0] > 0
    batches, left_out = pack_rollouts(tmp_path, 10**6)
    assert [batch["update"] for batch in batches] == kept and not left_out
    rewind(tmp_path, {"sft_step": 0, "update": kept[0]})  # within the older file
    assert [r["update"] for file in files for r in read_records(file)] == kept[:1]


class Tracker(SimpleNamespace):
    """Stands in for the modules wandb and trackio, and for their runs: it keeps what it is sent."""

    def init(self, **options):
        self.started.append(options)
        return Tracker(id="id1", name="calm-sea", sent=self.sent)  # trackio: "taken" was taken

    def log(self, scalars, step):
        self.sent.append((step, scalars))

    def finish(self):
        self.sent.append("end")


@pytest.mark.parametrize("track, identity", [
    ("wandb", {"id": "id1", "allow_val_change": True}), ("trackio", {"name": "calm-sea"}),
])  # fmt: skip
def test_a_tracker_receives_every_update_and_a_resumed_run_continues_its_own(
    tmp_path, monkeypatch, track, identity
):
    tracker = Tracker(started=[], sent=[])
    monkeypatch.setitem(sys.modules, track, tracker)
    (folder := tmp_path / "taken").mkdir()
    with RunLog(folder, CONFIG, track=track) as log:
        log.log({"sft_step": 1, "sft/loss": 3.0})
        log.log({"update": 0, "eval/e/accuracy": 0.5})
        log.log({"update": 1, "reward/mean": 0.25, "warnings": {"kl_runaway": "KL 0.1"}})
    assert tracker.sent == [(0, {"eval/e/accuracy": 0.5}), (1, {"reward/mean": 0.25}), "end"]
    changed = CONFIG | {"num_updates": 99}
    with RunLog(folder, changed, track=track):
        pass
    first, resumed = tracker.started
    assert first == {"project": "picorl", "name": "taken", "config": CONFIG}
    assert resumed == {"project": "picorl", "resume": "allow", "config": changed} | identity


def test_tensorboard_shows_each_update_once_also_after_a_resume(tmp_path):
    """The run was killed after update 3, and its checkpoint is that of update 1."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for updates in (range(4), (2, 3, 4)):
        with RunLog(tmp_path, CONFIG, track="tensorboard") as log:
            for update in updates:
                log.log({"update": update, "reward/mean": 0.25 * update})
        rewind(tmp_path, {"sft_step": 0, "update": 1})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert shown == [(update, 0.25 * update) for update in range(5)]
