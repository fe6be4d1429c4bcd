"""The display: one line per update in a terminal and in a pipe."""

import io

from rich.console import Console

from core.terminal.console import Display, print_line

RECORD = {
    "reward/mean": 0.5, "length/mean": 12.0, "grad/norm": 9.5, "info/worked": 0.25,
    "time/rollout_s": 0.4, "time/train_s": 0.6,
}  # fmt: skip


def screen(terminal):
    """What a run of two updates prints, in a terminal without the bars and their colours."""
    console = Console(file=io.StringIO(), width=100, highlight=False, force_terminal=terminal)
    meanings = {"worked": "fraction that spell"}
    with Display("picoRL · x", console, meanings=meanings, num_updates=2) as display:
        with display.phase("warm start", 20) as phase:
            for _ in range(20):
                phase.advance("loss 1.5")
        with display.phase("rollouts", 3, done=2) as phase:
            phase.tick_and(lambda: None)()
            assert [task.completed for task in display.progress.tasks] == [3]
        display.update(1, RECORD)
        display.update(2, RECORD | {"info/calls": 2.0, "reported/calls": 3})
        assert [task.completed for task in display.progress.tasks] == [2]
        display.say("[held-out] accuracy :cat:")
    return console.file.getvalue()


def test_both_modes_print_the_same_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = [
        "picoRL · x",
        *(f"warm start {n}/20  loss 1.5  0 s" for n in range(2, 21, 2)),
        "worked: fraction that spell",
        "update 1  reward 0.500  tokens 12.0  worked 0.25  1.0 s",
        "update 2  reward 0.500  tokens 12.0  worked 0.25  calls 2.00 of 3  1.0 s",
        "[held-out] accuracy :cat:",
    ]
    assert screen(terminal=False).splitlines() == lines
    shown = screen(terminal=True)
    assert all(line in shown for line in [lines[0], *lines[-4:]]) and "loss" not in shown


def test_a_terminal_breaks_lines_between_words_but_no_command(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for line, count in (("word:cat: " * 12, 2), ("resume: python train.py " + "--lr 1 " * 20, 1)):
        for terminal in (True, False):
            console = Console(file=io.StringIO(), width=80, force_terminal=terminal)
            print_line(line, console)
            printed = console.file.getvalue().splitlines()
            assert len(printed) == (count if terminal else 1)
