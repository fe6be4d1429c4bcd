"""No text of others acts on the terminal, and each page of a run is written on its own."""

import random

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


class Hostile(Env):
    """Says `text` wherever an environment says something."""

    def __init__(self, text):
        self.text = text

    def reset(self, seed):
        return [{"role": self.text, "content": self.text}]

    def step(self, response):
        return Step(self.reset(0)[0], 1.0, True, {self.text: self.text})

    def demonstrate(self, hasty=False):
        return self.text


def show_update(text, console):
    with Display(text, console, meanings={text: text}) as screen:
        with screen.phase(text, 1) as advance:
            advance()
        screen.update(1, RECORD | {f"info/{text}": 1.0})
        screen.say(text)


def fail(text):
    raise UsageError(f"{text}\n{text}")


@pytest.mark.parametrize("place", [
    show_update,
    lambda text, _: play.play_episode(Hostile(text), 0, interactive=False),
    lambda text, _: chat._note(text),
    lambda text, _: cli.execute(fail, [], lambda args: text),
    lambda text, _: interrupt.show_error(RuntimeError, RuntimeError(text), None),
])  # fmt: skip
def test_no_text_of_others_acts_on_the_terminal(place, monkeypatch, capsys):
    monkeypatch.setattr(play, "CONSOLE", console := Console(width=200, highlight=False))
    rng = random.Random(0)
    for text in (*ATTACKS, *("".join(rng.choices(ATTACKS, k=3)) for _ in range(3))):
        place(text, console)
        shown = "".join(capsys.readouterr())
        assert not CONTROL_CHARACTERS.search(shown), text
        assert not text.isprintable() or text in shown


def test_a_usage_error_is_one_line_and_exit_code_2(capsys):
    assert cli.execute(fail, [], lambda args: "a\nb") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_page_that_cannot_be_made_costs_itself_and_one_line(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"update": 0}\n')
    settings, errors = config_to_dict(config.resolve(config.Config())), []

    def fail(*_):
        raise errors[-1]

    monkeypatch.setattr(curves, "draw_curves", fail)
    errors.append(FileNotFoundError("no glyph\n\x1b[2J"))
    lines = report.write_pages(tmp_path, settings)
    assert lines == [f"{tmp_path / 'curves.png'} cannot be made: FileNotFoundError: no glyph [2J"]
    assert (tmp_path / "README.md").exists() and (tmp_path / "report.html").exists()
    errors.append(OSError(28, "No space left on device"))  # ends the run, as it should
    with pytest.raises(OSError, match="No space"):
        report.write_pages(tmp_path, settings)
