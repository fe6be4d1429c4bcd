"""Ends a program with one sentence where this Python lacks packages; imported before the others."""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from environments.base import UsageError

# the dependencies of pyproject.toml
NEEDED = """torch transformers tokenizers safetensors jinja2 peft tyro rich matplotlib
    yaml numpy httpx filelock psutil jsonschema starlette uvicorn""".split()

missing = [name for name in NEEDED if not find_spec(name)]
if missing:
    hint = "Activate the environment in which you installed picoRL, or install it in this one"
    text = f"{', '.join(missing)}: not installed in this Python, {sys.executable}. {hint}"
    sys.exit(f"{text}: {sys.executable} -m pip install -e .")


def import_library(name: str, extra: str = "envs") -> Any:
    """Imports an optional library; raises UsageError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0].replace("_", "-")
        raise UsageError(f'{package} is not installed: pip install -e ".[{extra}]"') from None
