"""The display: the same lines in a terminal and in a pipe."""

import io

import pytest
from rich.console import Console

from core.terminal.console import Display

RECORD = {
    "reward/mean": 0.5, "length/mean": 12.0, "grad/norm": 9.5, "info/worked": 0.25,
    "time/rollout_s": 0.4, "time/train_s": 0.6,
}  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_and_a_pipe_show_the_same_lines(monkeypatch, terminal):
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(file=io.StringIO(), width=40, highlight=False, force_terminal=terminal)
    meanings, checks = {"worked": "fraction that spell"}, []
    with Display("picoRL · x", console, meanings=meanings, num_updates=2) as display:
        with display.phase("rollouts", 3, completed=2, check=lambda: checks.append(1)) as advance:
            advance()
            assert [task.completed for task in display.progress.tasks] == [3] and checks
        display.update(1, RECORD)
        display.update(2, RECORD | {"info/calls": 2.0, "reported/calls": 3})
        assert [task.completed for task in display.progress.tasks] == [2]
        display.say("resume with: python train.py --resume runs/a :cat: [bold]")
    lines = [
        "picoRL · x", "worked: fraction that spell",
        "update 1  reward 0.500  tokens 12.0  worked 0.25  1.0 s",
        "update 2  reward 0.500  tokens 12.0  worked 0.25  calls 2.00 of 3  1.0 s",
        "resume with: python train.py --resume runs/a :cat: [bold]",
    ]  # fmt: skip
    shown = console.file.getvalue()
    assert all(line in shown for line in lines) and terminal != (shown.splitlines() == lines)
