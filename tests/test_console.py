"""The display: live in a terminal, plain lines elsewhere, with the same content."""

import io

from rich.console import Console

from core.run.console import Display, printable, sparkline
from core.types import Rollout

RECORD = {
    "reward/mean": 0.5, "length/mean": 12.0, "info/worked": 0.25,
    "time/rollout_s": 0.4, "time/train_s": 0.6,
}  # fmt: skip
ROLLOUT = Rollout(
    "e", "player", 0, 0,
    [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "[b]3[/b]"}],
)  # fmt: skip


def screen(record=RECORD, **options):
    """What a console with these options shows of a short run."""
    file = io.StringIO()
    console = Console(file=file, width=100, highlight=False, **options)
    with Display("picoRL · x", console) as display:
        with display.phase("warm start", 20) as phase:
            for _ in range(20):
                phase.advance("loss\n1.5")
        with display.phase("rollouts", 3, done=2) as phase:
            phase.advance("[b]quiet[/b]", quiet=True)
        display.update(3, record, [ROLLOUT])
        display.say("[held-out] accuracy")
    return file.getvalue()


def test_pipe_gets_one_plain_line_per_update():
    lines = screen().splitlines()
    assert lines[0] == "picoRL · x" and lines[-1] == "[held-out] accuracy"
    assert sum(line.startswith("warm start") and "loss 1.5" in line for line in lines) == 10
    assert "update    3  reward 0.500  tokens 12.0  worked 0.25  1.0 s" in lines
    assert "quiet" not in screen() and "\x1b" not in screen()


def test_terminal_shows_progress_metrics_and_a_completion(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    text = screen(force_terminal=True)
    for part in ("warm start", "20/20", "3/3", "[b]quiet[/b]", "reward", "worked", "how many?",
                 "[b]3[/b]", "[held-out] accuracy"):  # fmt: skip
        assert part in text


def test_text_of_others_cannot_write_control_characters(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    file, attack = io.StringIO(), "\x1b]0;renamed\x07"
    rollout = Rollout("e", "player", 0, 0, [{"role": "assistant", "content": f"a{attack}"}])
    console = Console(file=file, highlight=False, force_terminal=True)
    with Display("x", console) as display:
        with display.phase("evaluation", 1) as phase:
            phase.advance(f"b{attack}")
        display.update(1, RECORD, [rollout])
        display.say(f"c{attack}")
    shown = file.getvalue()
    assert attack not in shown and printable("é\u3000\u200d\n\t") == "é\u3000\u200d\n\t"
    assert all(f"{letter}\ufffd]0;renamed\ufffd" in shown for letter in "abc")


def test_sparkline_keeps_the_whole_run_in_view():
    assert sparkline([1.0] * 3, 10) == "▁▁▁"
    assert sparkline([float(i) for i in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, float("nan"), 1.0], 10) == "▁█"
    assert sparkline([float("nan")], 10) == "▁"
