"""A terminal gets a live display, a pipe plain lines; both tell the same."""

import io

import pytest
from rich.console import Console

from core.console import Display, sparkline
from core.types import Rollout

RECORD = {
    "reward/mean": 0.5, "length/mean": 12.0, "info/worked": 0.25,
    "time/rollout_s": 0.4, "time/train_s": 0.6, "update/skipped": 0.0,
}  # fmt: skip
ROLLOUT = Rollout(
    "e", "player", 0, 0,
    [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "[b]3[/b]"}],
)  # fmt: skip


def shown(record=RECORD, **kind):
    screen = io.StringIO()
    with Display("picoRL · x", Console(file=screen, width=100, highlight=False, **kind)) as display:
        with display.phase("warm start", 20) as phase:
            for _ in range(20):
                phase.advance("loss 1.5")
        with display.phase("updates", 3, done=2) as phase:
            display.update(3, record, [ROLLOUT])
            phase.advance(quiet=True)
        display.say("[held-out] accuracy")
    return screen.getvalue()


def test_a_pipe_gets_one_plain_line_an_update():
    lines = shown().splitlines()
    assert lines[0] == "picoRL · x"
    assert sum(line.startswith("warm start") for line in lines) == 10
    assert "update    3  reward 0.500  tokens 12.0  worked 0.25  1.0 s" in lines
    assert lines[-1] == "[held-out] accuracy"
    assert "\x1b" not in shown()


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_is_treated_as_a_pipe(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    assert "\x1b" not in shown(force_terminal=True)


def test_a_terminal_sees_progress_metrics_and_a_completion(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = shown(force_terminal=True)
    for text in ("warm start", "20/20", "3/3", "reward", "worked", "how many?", "[b]3[/b]"):
        assert text in screen
    assert "[held-out] accuracy" in screen


@pytest.mark.parametrize("kind", [{}, {"force_terminal": True}])
def test_a_skipped_update_is_said(kind):
    screen = shown({**RECORD, "update/skipped": 1.0, "reward/mean": float("nan")}, **kind)
    assert "update 3 skipped" in screen


def test_a_sparkline_keeps_the_whole_run_in_view():
    assert sparkline([1.0] * 3, 10) == "▁▁▁"
    assert sparkline([float(i) for i in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, float("nan"), 1.0], 10) == "▁█"
    assert sparkline([float("nan")], 10) == "▁"
