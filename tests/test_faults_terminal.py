"""No text of others acts on the terminal, and each page of a run is written on its own."""

import io
import random
from contextlib import redirect_stderr

import pytest
from rich.console import Console

from core import config, report
from core.extras import chat
from core.faults import UsageError
from core.report import curves
from core.settings import config_to_dict
from core.terminal import cli, interrupt
from core.terminal.console import Display
from environments import __main__ as play
from environments.base import Env, Step
from environments.plumbing.text import CONTROL_CHARACTERS

ATTACKS = ("\x1b]0;renamed\x07", "\x1b[2J\x1b[H", "\x9b31m", "\x7f", "a\rb", "\u202eevil\u2066",
           "\ud800", "[/x]", "[bold]", "[link=x]", "\\[")  # fmt: skip
RECORD = {"reward/mean": 0.5, "time/rollout_s": 0.1, "time/train_s": 0.1}


def display(text):
    """What the display prints in a pipe."""
    console = Console(file=io.StringIO(), width=200, highlight=False)
    with Display(text, console, meanings={text: text}) as screen:
        with screen.phase("warm start", 1) as phase:
            phase.advance(text)
        screen.update(1, RECORD | {f"info/{text}": 1.0})
        screen.say(text)
    return console.file.getvalue()


def episode(text):
    """What `python -m environments show` prints of an environment that says `text`."""

    class Hostile(Env):
        def reset(self, seed):
            return [{"role": text, "content": text}]

        def step(self, response):
            return Step({"role": text, "content": text}, 1.0, True, {text: text})

        def demonstrate(self, hasty=False):
            return text

    return _recorded(play, "CONSOLE", lambda: play.play_episode(Hostile(), 0, interactive=False))


def note(text):
    """What core/extras/chat.py prints beside an answer."""
    return _recorded(chat, "NOTES", lambda: chat._note(text))


def error(text):
    """What a command prints of a UsageError, which must be one line, and of any other error."""

    def fail(_):
        raise UsageError(f"{text}\n{text}")

    stderr = io.StringIO()
    with redirect_stderr(stderr):
        assert cli.execute(fail, [], lambda args: args) == 2
        assert stderr.getvalue().count("\n") == 1
        interrupt.show_error(RuntimeError, RuntimeError(text), None)
    return stderr.getvalue()


PLACES = {"display": display, "play": episode, "chat": note, "error": error}


def _recorded(module, name, call):
    """What `call` prints to the console `module.name`."""
    own, file = getattr(module, name), io.StringIO()
    setattr(module, name, Console(file=file, width=200))
    try:
        call()
    finally:
        setattr(module, name, own)
    return file.getvalue()


@pytest.mark.parametrize("place", PLACES)
def test_no_text_of_others_acts_on_the_terminal(place):
    rng = random.Random(0)
    for text in (*ATTACKS, *("".join(rng.choices(ATTACKS, k=3)) for _ in range(3))):
        shown = PLACES[place](text)
        assert not CONTROL_CHARACTERS.search(shown), text
        assert not text.isprintable() or text in shown


def test_any_name_can_stand_in_the_curves(tmp_path):
    name = "$\\frac{_a" + "x" * 300
    metrics = {"reward/mean": 0.5, f"info/{name}": 0.5, "warnings": {name: name}}
    accuracy = {f"eval/{name}/{key}": 0.5 for key in ("accuracy", "ci_low", "ci_high")}
    records = [{"update": update, **metrics, **accuracy} for update in range(2)]
    curves.draw_curves(tmp_path / "curves.png", records, name)
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_a_page_that_cannot_be_made_costs_itself_and_one_line(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"update": 0}\n')
    settings, errors = config_to_dict(config.resolve(config.Config())), []

    def fail(*_):
        raise errors[-1]

    monkeypatch.setattr(curves, "draw_curves", fail)
    errors.append(ValueError("no glyph\n\x1b[2J"))
    lines = report.write_pages(tmp_path, settings)
    assert lines == [f"{tmp_path / 'curves.png'} cannot be made: ValueError: no glyph [2J"]
    assert (tmp_path / "README.md").exists() and (tmp_path / "report.html").exists()
    errors.append(OSError(28, "No space left on device"))  # ends the run, as it should
    with pytest.raises(OSError, match="No space"):
        report.write_pages(tmp_path, settings)
