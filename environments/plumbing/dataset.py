"""Rows of data for environments: local files and data sets of the Hugging Face hub."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from environments.base import UsageError
from environments.plumbing.installed import import_library

Row = dict[str, Any]
SPLITS = "dataset_dict.json"  # lies in a folder that DatasetDict.save_to_disk wrote


def read_jsonl(path: str | Path) -> list[tuple[int, Row]]:
    """Returns the number and the object of each line that is not empty; of a JSON array, also of
    one within an object in a .json file, {"data": [..]}, of each entry.

    Raises OSError or UnicodeDecodeError if the file cannot be read, and UsageError, naming the
    line, for anything but one JSON object per line.
    """
    rows, text = [], Path(path).read_text(encoding="utf-8-sig")
    whole: Any = None
    if text.lstrip().startswith("[") or str(path).endswith(".json"):
        with suppress(ValueError, RecursionError):
            whole = json.loads(text)
    if isinstance(whole, dict):
        lists = {name: value for name, value in whole.items() if _are_rows(value)}
        if len(lists) > 1:
            raise UsageError(f"{path}: which of {', '.join(lists)}? Write one of them to a file of "
                             "its own")  # fmt: skip
        whole = next(iter(lists.values()), None)
    if _are_rows(whole):
        return list(enumerate(whole, start=1))
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = line
        if row is not None and not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: not a JSON object")
        rows += [] if row is None else [(number, row)]
    return rows


def read_hub(path: str, configuration: str | None, split: str) -> list[Row]:
    """Returns the rows of a split, or those of a local file, as `datasets` reads its kind, also of
    a folder that its `save_to_disk` wrote.

    Raises UsageError if that folder has no such split.
    """
    datasets = import_library("datasets")
    if os.path.isfile(path):
        folder, name = os.path.split(os.path.abspath(path))
        rows = datasets.load_dataset(folder, data_files=name, split="train")
    elif any(os.path.exists(os.path.join(path, name)) for name in ("state.json", SPLITS)):
        rows = datasets.load_from_disk(path)
        if isinstance(rows, dict):
            if split not in rows:
                raise UsageError(f"{path} has no split {split!r}; it has {', '.join(rows)}")
            rows = rows[split]
    else:
        rows = datasets.load_dataset(path, configuration, split=split)
    return [{key: _without_fill(value) for key, value in row.items()} for row in rows]


def _are_rows(value: Any) -> bool:
    """Whether it is a list of objects, and not the messages of one prompt."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(entry, dict) and "role" not in entry for entry in value
    )  # fmt: skip


def _without_fill(value: Any) -> Any:
    """Messages without the keys that Arrow gives them because those of other rows have them.

    All structures of a column have the same keys there, with None where a row had none: also the
    arguments of calls of tools, and of different tools. Other values are left as they are.
    """

    def without_none(part: Any) -> Any:
        if isinstance(part, dict):
            return {k: without_none(v) for k, v in part.items() if v is not None}
        return [*map(without_none, part)] if isinstance(part, list) else part

    is_chat = isinstance(value, list) and value and all(
        isinstance(message, dict) and "role" in message for message in value
    )  # fmt: skip
    return without_none(value) if is_chat else value
