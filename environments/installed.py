"""Ends a program with one sentence where this Python lacks packages; imported before the others."""

import sys
from importlib.util import find_spec

NEEDED = """torch transformers tokenizers safetensors jinja2 peft tyro rich matplotlib yaml numpy
    httpx filelock jsonschema""".split()  # the dependencies of pyproject.toml

if missing := [name for name in NEEDED if find_spec(name) is None]:
    sys.exit(f"{', '.join(missing)}: not installed in this Python, {sys.executable}. Activate the "
             "environment in which you installed picoRL, or install it in this one: "
             f"{sys.executable} -m pip install -e .")  # fmt: skip
