"""What can be wrong with a model's files, each in one line.

>>> check_folder("./nowhere")
Traceback (most recent call last):
core.types.UsageError: --model-id ./nowhere: no model in this folder (config.json)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

from core.types import UsageError

LONGEST = 200  # characters of a reason


def check_folder(model_id: str) -> None:
    """Raise UsageError for what is a path and no model's folder; a hub id passes."""
    looks_local = model_id.startswith((".", "/", "~")) or os.path.exists(model_id)
    if not looks_local or os.path.exists(os.path.join(model_id, "config.json")):
        return
    hint = "; it is a file: name its folder" if os.path.isfile(model_id) else ""
    if os.path.exists(os.path.join(model_id, "adapter_config.json")):
        hint = "; it holds a LoRA adapter: name the base model instead"
    raise UsageError(f"--model-id {model_id}: no model in this folder (config.json){hint}")


@contextmanager
def in_one_line(what: str, trusted: bool = True) -> Iterator[None]:
    """Whatever is raised inside, by whichever library, becomes a UsageError about `what`.

    Transformers' remarks of many lines are not shown; `check_whole` says what matters of them.
    `trusted`: whether a model's own code may run.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except Exception as error:
        name = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
        reason = f"{name}{' '.join(str(error).split())}"
        if not trusted and "trust_remote_code" in reason:
            reason = "it needs code of its own; --trust-remote-code, if you trust its author"
        shown = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}.."
        raise UsageError(f"{what}: {shown}") from error
    finally:
        logging.set_verbosity(verbosity)


def check_whole(model_id: str, report: dict[str, Any], tokenizer: Any) -> None:
    """Raise UsageError where from_pretrained went on with what the files don't have.

    `report`: its loading info, of a load in which sizes were allowed to differ.
    """
    unfit = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if unfit:  # they are random numbers now
        raise UsageError(f"--model-id {model_id}: {len(unfit)} of its weights are missing or of "
                         f"another shape than config.json says, like {unfit[0]}")  # fmt: skip
    if not tokenizer.encode("a", add_special_tokens=False):
        raise UsageError(f"--model-id {model_id}: no tokenizer beside the model (tokenizer.json)")
