"""Rows of data for environments: local files and data sets of the Hugging Face hub."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from environments.base import UsageError
from environments.plumbing.installed import import_library

Row = dict[str, Any]


def read_jsonl(path: str | Path) -> list[tuple[int, Row]]:
    """Returns the number and the object of each line that is not empty; of a JSON array, of each
    entry.

    Raises OSError or UnicodeDecodeError if the file cannot be read, and UsageError, naming the
    line, for anything but one JSON object per line.
    """
    rows, text = [], Path(path).read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            entries = json.loads(text)
            if entries and all(isinstance(entry, dict) for entry in entries):
                return list(enumerate(entries, start=1))
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
    """Returns the rows of a split, or those of a local file, as `datasets` reads its kind."""
    datasets = import_library("datasets")
    if os.path.isfile(path):
        folder, name = os.path.split(os.path.abspath(path))
        return list(datasets.load_dataset(folder, data_files=name, split="train"))
    return list(datasets.load_dataset(path, configuration, split=split))
