"""Cases for settings in a file that would run code or send the API key.

Each case writes one hostile config.yaml and gives it to what reads such files. It fails if the
marker file exists afterwards, or if there is no line that names what would run, and exit code 2.
"""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import yaml

from core import chat, cli, config

CODE = "from pathlib import Path\nPath({marker!r}).touch()\n"
# {file}: a file of Python code that creates the marker; {marker}: that file
SPECS = (
    "{file}:Maze", "evil_module:Maze", "evil_module:Maze:size=4",
    "gymnasium:id=evil_module:Maze-v0",
    'gymnasium:id="evil_module\\u003aMaze-v0"', "gymnasium:id=CartPole-v1,words=evil_module:GAME",
    "gymnasium:id=A-v0,env_id=evil_module:Maze", "gymnasium:id=A-v0,url=x,options=evil_module:a",
    "pettingzoo:words={file}:GAME", "remote:command=touch {marker}", "remote:env={file}:Maze",
    'remote:command="touch {marker}"', "remote: command = touch {marker}",
    "rewarded:data=rows.jsonl,reward={file}:one", "evil_module:Maze:opponent=guess",
    "{file}:Maze:opponent=openai:m@http://127.0.0.1:9/v1", "gymnasium:id=evil_module:Maze,=",
)  # fmt: skip
SENT = (
    {"sampler": "openai", "base_url": "http://127.0.0.1:9/v1", "num_updates": 0},
    {"env": ["tic_tac_toe:opponent=openai:m@http://127.0.0.1:9/v1"]},
    {"env": ['tic_tac_toe:opponent="openai:m\\u0040http://127.0.0.1:9/v1"']},
)


def cases(rng: random.Random) -> Iterator[tuple[str, Callable[[], str]]]:
    """Name and check of each case; a check returns "" or what went wrong."""
    for key in ("env", "eval_env"):
        for spec in SPECS:
            specs = ["snake"] * rng.randrange(2) + [spec] + ["reverse"] * rng.randrange(2)
            for how in ("--config", "--resume", "chat"):
                settings = {key: specs, "env_path": "{folder}"}  # of an older version
                yield f"{how} {key} {spec}", lambda s=settings, h=how: attack(s, h, "would run")
    for settings in SENT:
        for how in ("--config", "--resume"):
            yield f"{how} {settings}", lambda s=settings, h=how: attack(s, h, "would send")


def attack(settings: dict, how: str, said: str) -> str:
    """Writes `settings` as a config.yaml and reads it as `how` says. "" if it was refused."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        marker, here = folder / "marker", folder / "here"
        here.mkdir()
        for file in ("evil.py", "evil_module.py"):
            (folder / file).write_text(CODE.format(marker=str(marker)))
        words = {"{file}": str(folder / "evil.py"), "{marker}": str(marker), "{folder}": name}
        text = yaml.safe_dump(settings)
        for word, value in words.items():
            text = text.replace(word, value)
        (folder / "config.yaml").write_text(text)
        file = str(folder / "config.yaml") if how == "--config" else str(folder)
        errors = StringIO()
        with chdir(here), redirect_stdout(StringIO()), redirect_stderr(errors), patch.dict(
            os.environ, OPENAI_API_KEY="secret-7"
        ):  # fmt: skip
            if how == "chat":
                code = chat.run(lambda *_: 0, [file])
            else:
                code = cli.run(lambda cfg: _validated(cfg), [how, file])
        err = errors.getvalue()
        if marker.exists():
            return f"its code has run: {err}"
        fine = code == 2 and err.count("\n") == 1 and "secret-7" not in err
        return "" if fine and said in err and "--trust" in err else f"exit code {code}: {err}"


def _validated(cfg: config.Config) -> int:
    config.validate(config.resolve(cfg))
    return 0
