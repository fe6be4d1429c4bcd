"""The display: live in a terminal, plain lines elsewhere, with the same content."""

import io
import subprocess
import sys

from rich.console import Console

from core.terminal.console import Display, print_line, sparkline
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
    at = lines.index("update  reward  tokens  worked   time")
    assert lines[at + 1] == "     3   0.500    12.0    0.25  1.0 s"
    assert "quiet" not in screen() and "\x1b" not in screen()


def test_a_run_goes_on_where_nobody_reads_its_output():
    """As `train.py | head -1`: a line of stderr says so, and the exit code is that of the run."""
    program = """import sys
from core.terminal.console import Display
with Display("title") as display:
    input()
    display.say("a")
    display.say("b")
    print("c", flush=True)
sys.exit(3)"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=-1, stdout=-1, stderr=-1, text=True
    )
    assert child.stdout.readline() == "title\n"
    child.stdout.close()
    child.stdin.write("\n")
    child.stdin.close()
    (line,) = child.stderr.read().splitlines()
    child.stderr.close()
    assert line == "nothing reads the output any more; the run goes on in its folder"
    assert child.wait() == 3


def plain_lines(records, **meanings):
    file = io.StringIO()
    with Display("x", Console(file=file, width=200, highlight=False), meanings=meanings) as display:
        for update, record in enumerate(records, 1):
            display.update(update, RECORD | record, [])
    return file.getvalue().splitlines()[1:]


def test_a_line_of_metrics_has_80_columns_and_is_explained_once():
    every = {
        "reward/correct": 0.5,
        "policy/entropy": 1.25,
        "gap/logprob_mean": 1e-7,
        "grad/norm": 9.5,
    }
    lines = plain_lines([every] * 3, worked="fraction that spell the word")
    assert sum(line.startswith("gap: ") for line in lines) == 1
    assert sum(line.startswith("grad: ") for line in lines) == 1
    assert lines.count("worked: fraction that spell the word") == 1
    assert len(lines) == 4 + 1 + 3 and max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[5:]] == ["1", "2", "3"]
    assert len({len(line) for line in lines[4:]}) == 1  # labels above their numbers


def test_a_metric_that_comes_and_goes_has_a_column_with_a_dash():
    few = {"info/calls": 2.0, "reported/calls": 3}
    lines = plain_lines([{}, few, {"reward/mean": -100.25}])
    assert lines.pop(2) == 'calls ".. of n": the mean over the n rollouts that report it'
    assert lines[0].split() == ["update", "reward", "tokens", "worked", "time"]
    assert lines[2].split() == ["update", "reward", "tokens", "worked", "calls", "time"]
    assert lines[3].split() == ["2", "0.500", "12.0", "0.25", "2.00", "of", "3", "1.0", "s"]
    assert lines[4].split() == ["3", "-100.250", "12.0", "0.25", "-", "1.0", "s"]


def test_the_screen_says_how_far_the_run_is_and_for_how_long(monkeypatch):
    """The third of five updates, 10 s after the first: two more take 10 s."""
    monkeypatch.setenv("TERM", "xterm-256color")
    clock, console = [0.0], Console(file=io.StringIO(), width=80, force_terminal=True)
    monkeypatch.setattr("core.terminal.console.time.monotonic", lambda: clock[0])
    with Display("x", console, num_updates=5) as display:
        display.progress.get_time = lambda: clock[0]
        with display.phase("rollouts", 4) as phase:
            for clock[0] in (0.0, 30.0, 60.0):
                phase.advance()
            shown = [str(line) for line in console.render_lines(display.progress)]
            assert "30 s left" in str(shown) and "3/4" in str(shown) and "steps" in str(shown)
            phase.advance()
        assert "took 1 min 0 s" in str(console.render_lines(display.progress))
        for update, clock[0] in enumerate((100.0, 105.0, 110.0), 1):
            display.update(update, RECORD, [])
        assert "update 3 of 5, about 10 s left" in str(console.render_lines(display._render()))


def test_the_screen_says_how_many_rollouts_report_a_metric(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Display("x", console) as display:
        for update, (value, of) in enumerate(((1.0, 2), (2.0, 3)), 1):
            record = RECORD | {"info/calls": value, "reported/calls": of}
            display.update(update, record, [])
        assert "1.00 → 2.00 of 3" in str(console.render_lines(display._render()))
        display.update(3, RECORD, [])
        assert "1.00 → -" in str(console.render_lines(display._render()))


def test_the_screen_leaves_room_for_the_key_that_stops_a_run(monkeypatch):
    """The terminal writes ^C behind the last line, and a full line would become two."""
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with Display("x", console) as display:
        display.update(1, RECORD, [ROLLOUT])
        lines = console.render_lines(display._render(), pad=False)
    assert [sum(part.cell_length for part in line) for line in lines[-2:]] == [80, 0]


def test_a_terminal_breaks_lines_between_words_but_no_command(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    words, command = "word:cat: " * 12, "resume with: python train.py " + "--lr 1 " * 20
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal, highlight=False)
        for line in (words, command):
            print_line(line, console)
        lines = console.file.getvalue().splitlines()
        assert len(lines) == (3 if terminal else 2) and lines[-1].strip() == command.strip()
        assert max(map(len, lines[:-1])) <= (80 if terminal else 120)


def test_a_terminal_breaks_the_words_before_a_command(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    console = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False)
    command = "python train.py --resume runs/" + "a" * 80
    print_line("word:cat: " * 12 + command, console)
    lines = console.file.getvalue().splitlines()
    assert [line.split() for line in lines] == [
        ["word:cat:"] * 8,
        ["word:cat:"] * 4,
        command.split(),
    ]


def test_sparkline_keeps_the_whole_run_in_view():
    assert sparkline([1.0] * 3, 10) == "▁▁▁"
    assert sparkline([float(i) for i in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, float("nan"), 1.0], 10) == "▁█"
    assert sparkline([float("nan")], 10) == "▁"
