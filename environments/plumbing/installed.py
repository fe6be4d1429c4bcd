"""Ends a program with one sentence where this Python lacks packages; imported before the others."""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

NEEDED = """torch transformers tokenizers safetensors jinja2 peft tyro rich matplotlib yaml numpy
    httpx filelock jsonschema""".split()  # the dependencies of pyproject.toml

# PathFinder is quick; an editable installation has a finder of its own, which find_spec asks
if missing := [name for name in NEEDED if not (PathFinder.find_spec(name) or find_spec(name))]:
    sys.exit(f"{', '.join(missing)}: not installed in this Python, {sys.executable}. Activate the "
             "environment in which you installed picoRL, or install it in this one: "
             f"{sys.executable} -m pip install -e .")  # fmt: skip
