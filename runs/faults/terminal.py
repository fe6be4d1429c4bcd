"""Cases for texts of others on the terminal: control sequences, and rich's markup.

Each case sends one text through one place that prints, and fails if the terminal would act on it,
if its brackets vanish or raise, or if an error is more than one line.
"""

import io
import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import Any

from rich.console import Console

from core import chat, cli, interrupt
from core.console import Display
from core.types import CONTROL_CHARACTERS, Message, Rollout, UsageError
from environments import __main__ as play
from environments.base import Env, Step

ATTACKS = (
    "\x1b]0;renamed\x07", "\x1b]52;c;ZXZpbA==\x07", "\x1b[2J\x1b[H", "\x9b31m", "\x90q\x9c", "\x07",
    "\x7f", "a\rb", "\x1b[8m", "\u202eevil\u2066", "\ud800", "[/INST]", "[/x]", "[bold]",
    "[link=x]", "[/]", "\\[", "$\\frac{",
)  # fmt: skip
RECORD = {"reward/mean": 0.5, "time/rollout_s": 0.1, "time/train_s": 0.1}


def cases(rng: random.Random) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and check of each case; a check returns "" or what went wrong."""
    mixed = ["".join(rng.choices(ATTACKS, k=3)) + rng.choice("abc") for _ in range(20)]
    for text in (*ATTACKS, *mixed):
        for name, show in PLACES.items():
            yield f"{name}: {text!a}", lambda show=show, text=text: _judge(show, text)


def display(text: str) -> str:
    """What the plain display and the first frame of the live one print."""
    shown = io.StringIO()
    messages: list[Message] = [{"role": "assistant", "content": text}]
    rollout = Rollout(text, text, 0, 0, messages)
    for options in ({}, {"force_terminal": True, "color_system": None}):
        console = Console(file=shown, width=200, highlight=False, **options)  # type: ignore[arg-type]
        with Display(text, console) as screen:
            with screen.phase(text, 1) as phase:
                phase.advance(text)
            screen.update(1, RECORD | {f"info/{text}": 1.0}, [rollout])
            screen.say(text)
            live = screen._render()
        Console(file=shown, width=200, color_system=None).print(live)
    return _plain(shown.getvalue())


def episode(text: str) -> str:
    """What `python -m environments show` prints of an environment that says `text`."""

    class Hostile(Env):
        def reset(self, seed: int) -> list[Message]:
            return [{"role": text, "content": text}]

        def step(self, response: str) -> Step:
            return Step({"role": text, "content": text}, 1.0, True, {text: text})

        def demonstrate(self, hasty: bool = False) -> str:
            return text

    return _recorded(play, "CONSOLE", lambda: play.run_episode(Hostile(), 0, interactive=False))


def note(text: str) -> str:
    """What core/chat.py prints beside an answer."""
    return _recorded(chat, "NOTES", lambda: chat._note(text))


def error(text: str) -> str:
    """What a command prints of a UsageError; adds a failure where it is not one line."""

    def fail(_: Any) -> int:
        raise UsageError(f"{text}\n{text}")

    stderr = io.StringIO()
    with redirect_stderr(stderr):
        code = cli.run(fail, [], lambda args: args)
    shown = stderr.getvalue()
    return shown if code == 2 and shown.count("\n") == 1 else f"\x07{shown}"


def traceback(text: str) -> str:
    """What a command prints of an error that nobody expected."""
    stderr = io.StringIO()
    with redirect_stderr(stderr):
        interrupt.show_error(RuntimeError, RuntimeError(text), None)
    return stderr.getvalue()


PLACES: dict[str, Callable[[str], str]] = {
    "display": display, "play": episode, "chat": note, "error": error, "traceback": traceback,
}  # fmt: skip


def _judge(show: Callable[[str], str], text: str) -> str:
    shown = show(text)
    if found := CONTROL_CHARACTERS.search(shown):
        return f"{found[0]!a} reaches the terminal"
    if text.isprintable() and text not in shown:
        return f"{text!a} is not shown as it is: {shown[-200:]!a}"
    return ""


def _recorded(module: Any, name: str, call: Callable[[], object]) -> str:
    """What `call` prints to the console `module.name`."""
    own, file = getattr(module, name), io.StringIO()
    setattr(module, name, Console(file=file, width=200))
    try:
        call()
    finally:
        setattr(module, name, own)
    return file.getvalue()


def _plain(text: str) -> str:
    """Without the sequences with which rich moves the cursor of a live display."""
    for sequence in ("\x1b[?25l", "\x1b[?25h", "\x1b[1A", "\x1b[2K", "\r"):
        text = text.replace(sequence, "")
    return text
