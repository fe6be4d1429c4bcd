"""Extreme settings on the command line and in config.yaml; wrong answers of remote servers.

    python runs/faults/reproduce.py --only settings --tries 50

A setting must be refused in one line, or give a config whose numbers are within their ranges. A
remote server may fail its episode only, and must leave no process and no open pipe behind.
"""

import contextlib
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

from core import cli  # noqa: E402
from core.config import RANGE_OF, Config, flag, range_problem, resolve, validate  # noqa: E402
from core.run_dir import config_to_dict  # noqa: E402
from core.types import UsageError  # noqa: E402
from environments.adapters.remote import Remote, RemoteError  # noqa: E402
from environments.base import EnvFailure, checked_step  # noqa: E402

Case = tuple[str, Callable[[], str]]  # a name, and what returns "" or says in a line what failed
NUMBERS = [
    "0", "-1", "1", "2", "0.5", "-0.0", "nan", "-inf", "inf", "1e-300", "1e-7", "1e308", "-1e308",
    "1e400", "1" + "0" * 21, str(2**63), "9" * 5000, "0x10", "1_0", "", " ", "None", "true", "1,5",
    "1e", "--", "+3", "\u0663", "1\n2", "1" + "0" * 400 + ".5",
]  # fmt: skip
VALUES = [
    *NUMBERS, "[]", "{}", "[1, [2, [3]]]", "{a: {b: c}}", "!!python/object/apply:os.abort []",
    "!!int x", "&a [*a]", "*b", "'", "\t", "2026-11-23", "[" * 300, "[" * 20_000, "{" * 2000,
    "| \n  a", "<<", "? [a]", "~", "\x00", "\ud7ff", "off", "grpo",
]  # fmt: skip
BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40)
)
OPENING = '{"messages": [{"role": "user", "content": "?"}]}'
JSON = [
    *("null", "[]", "{}", '"x"', "1e999", "NaN", "9" * 6000, "-1e308", "1" + "0" * 400, "true"),
    *("[" * 50_000, '{"a":' * 5000 + "1" + "}" * 5000, '"' + "a" * 10**6 + '"', '"\\ud800"'),
]
SERVER = "import sys, time, os\nfor line in sys.stdin:\n {}\n"


def cases(rng: random.Random) -> Iterator[Case]:
    """Tries without end."""
    settings = [f.name for f in fields(Config)]
    with tempfile.TemporaryDirectory(prefix="picorl-settings-") as folder:
        while True:
            for _ in range(6):
                given = {rng.choice([*RANGE_OF]): rng.choice(NUMBERS) for _ in range(2)}
                args = [f"{flag(name)}={value}" for name, value in given.items()]
                args += ["--algo", next((a for a in ("grpo", "ppo") if a in str(args)), "grpo")]
                yield f"flags {given}"[:200], partial(parse, args)
            for _ in range(6):
                names = rng.sample([*settings, *RANGE_OF, "unknown", "__class__"], 3)
                lines = [f"{name}: {rng.choice(VALUES)}" for name in names]
                text = "\n".join([BOMB * (rng.random() < 0.1) + lines[0], *lines[1:]])
                if rng.random() < 0.2:
                    place = rng.randrange(len(text) + 1)
                    text = text[:place] + rng.choice(VALUES) + text[place:]
                file = Path(folder, "config.yaml")
                yield f"config.yaml {text!r}"[:200], partial(read, file, text)
            name, reset, step = answers(rng)
            yield f"remote: {name}"[:200], partial(play, Path(folder, "server.py"), reset, step)


def parse(args: list[str]) -> str:
    """What is wrong with how `args` are parsed and checked."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
            cfg = resolve(cli.parse(args))
            validate(cfg)
    except SystemExit as error:  # of tyro
        return "" if error.code == 2 and errors.getvalue() else f"exit code {error.code}"
    except UsageError as error:
        return "" if "\n" not in str(error) and len(str(error)) < 500 else f"message {error!s:.200}"
    for name in RANGE_OF:
        group, _, key = name.rpartition(".")
        value = getattr(getattr(cfg, group) if group else cfg, key)
        if value is not None and (problem := range_problem(name, value)):
            return f"accepted, but {problem}"
    written = yaml.safe_load(yaml.safe_dump(config_to_dict(cfg)))
    return "" if written == config_to_dict(cfg) else "config.yaml does not give the settings back"


def read(file: Path, text: str) -> str:
    """What is wrong with how a config.yaml with `text` is read."""
    file.write_text(text)
    return parse(["--config", str(file)])


def answers(rng: random.Random) -> tuple[str, str, str]:
    """A name, and the program lines with which a server answers a reset and a step."""
    value = rng.choice(JSON)
    key = rng.choice(["message", "reward", "done", "info", "fresh", "truncated"])
    step = {"message": "null", "reward": "0.0", "done": "true", "info": "{}", key: value}
    members = ", ".join(f'"{name}": {text}' for name, text in step.items())
    messages = f'{{"messages": [{{"role": {value}, "content": {rng.choice(JSON)}}}]}}'
    good = f"print({OPENING!r}, flush=True)"
    return rng.choice([
        (f"step with {key} {value}", good, f"print({'{' + members + '}'!r}, flush=True)"),
        (f"info with {value}", good,
         f'print(\'{{"reward": 1, "done": true, "info": {{"x": \', {value!r}, "}}}}", flush=True)'),
        (f"line {value}", good, f"print({value!r}, flush=True)"),
        (f"opening {messages}", f"print({messages!r}, flush=True)", "pass"),
        ("a line without end", good, 'while True: sys.stdout.write("x" * 65536)'),
        ("silence", good, "time.sleep(60)"), ("silence at the start", "time.sleep(60)", "pass"),
        ("an exit", good, "os._exit(3)"), ("an exit at the start", "os._exit(0)", "pass"),
        ("an exit after the answer", good + "; os._exit(0)", "pass"),
        ("closed pipes", good, "os.close(1); time.sleep(60)"),
        ("bytes", good, 'sys.stdout.buffer.write(b"\\xff\\x00\\n"); sys.stdout.flush()'),
        ("two lines", good, 'print("{}\\n{}", flush=True)'),
    ])  # fmt: skip


def play(program: Path, reset: str, step: str) -> str:
    """What is wrong after an episode with a server of these answers."""
    body = f"exec({reset!r} if '\"reset\"' in line else {step!r})"
    program.write_text(SERVER.format(body))
    before = len(os.listdir("/dev/fd"))
    env = Remote(command=f"{sys.executable} -S {program}", timeout=0.4)
    try:
        for seed in range(2):
            with contextlib.suppress(EnvFailure, RemoteError, TypeError, ValueError):
                json.dumps(env.reset(seed))
                checked_step(env.step("x"), "player", True)
    finally:
        env.close()
        if env.stderr:
            env.stderr.close()
    left = len(os.listdir("/dev/fd")) - before
    return f"{left} open files are left" if left else ""
