"""Rows of data for environments: local files and data sets of the Hugging Face hub."""

import csv
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from environments.base import UsageError
from environments.plumbing.installed import import_library
from environments.plumbing.registry import find_file, import_attribute

Row = dict[str, Any]
FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
SPLITS = "dataset_dict.json"  # lies in a folder that DatasetDict.save_to_disk wrote


def read_rows(data: str, configuration: str, split: str) -> list[tuple[int, Row]]:
    """Returns the rows of a file, of a split of a data set of the hub or of a folder with one, or
    of an object of Python. Each has its number, from 1; in a file of JSON lines, that of its line.

    Raises UsageError for what is no such file, folder or split, naming the line.
    """
    if split != "train" and (data.startswith("python:") or data.endswith(FILES)):
        raise UsageError(f"{data} has no split {split!r}: it is one table")
    if data.startswith("python:"):
        return [*enumerate(import_attribute(data), 1)]
    if not data.endswith(FILES):
        return [*enumerate(read_hub(os.path.expanduser(data), configuration or None, split), 1)]
    file = find_file(data)
    with file.open("rb") as start:
        if start.read(23) == b"version https://git-lfs":
            raise UsageError(f"{data} is a pointer of Git LFS: run git lfs pull in its folder")
    if data.endswith((".jsonl", ".json")):
        return _read_json(file)
    if data.endswith((".csv", ".tsv")):
        csv.field_size_limit(sys.maxsize)
        with file.open(encoding="utf-8-sig", newline="") as lines:
            rows = csv.DictReader(lines, delimiter="\t" if data.endswith(".tsv") else ",")
            return [*enumerate(map(dict, rows), 1)]
    load = import_library("datasets").load_dataset
    return [*enumerate(as_stored(load(file.suffix[1:], data_files=str(file), split=split)), 1)]


def read_hub(path: str, configuration: str | None, split: str) -> list[Row]:
    """Returns the rows of a split of a data set of the hub, or of a folder that `save_to_disk`
    wrote. Raises UsageError if that folder has no such split."""
    datasets = import_library("datasets")
    if not any(os.path.exists(os.path.join(path, name)) for name in ("state.json", SPLITS)):
        try:
            return as_stored(datasets.load_dataset(path, configuration, split=split))
        except (ConnectionError, FileNotFoundError) as error:
            raise UsageError(f"no file or folder {path} with data is here; {error}") from error
    loaded = datasets.load_from_disk(path)
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if split not in splits:
        raise UsageError(f"{path} has no split {split!r}; it has {', '.join(splits)}")
    return as_stored(splits[split])


def _read_json(file: Path) -> list[tuple[int, Row]]:
    """The objects of a JSON array, or of lines with one each, with their numbers."""
    text = file.read_text(encoding="utf-8-sig")
    rows: list[tuple[int, Any]] = []
    if text.lstrip().startswith("["):
        with suppress(ValueError):
            rows = [*enumerate(json.loads(text), 1)]
    for number, line in enumerate([] if rows else text.split("\n"), 1):
        if line.strip():
            rows.append((number, None))
            with suppress(ValueError):
                rows[-1] = number, json.loads(line)
    for number, row in rows:
        if not isinstance(row, dict):
            raise UsageError(f"{file.name}, line {number}: not a JSON object")
    return rows


def as_stored(rows: Any) -> list[Row]:
    """The rows of a `Dataset` as Arrow stores them, without decoding pictures and sounds. Arrow
    gives a message the keys of all others, with the value None: these are removed."""
    stored = [_decode_json(row, rows.features) for row in rows.with_format("arrow")[:].to_pylist()]
    for row in stored:
        for key, value in row.items():
            parts = value if isinstance(value, list) else []
            if parts and all(isinstance(part, dict) and "role" in part for part in parts):
                row[key] = without_none(value)
    return stored


def without_none(value: Any, change: Callable[[str], str] = str) -> Any:
    """Removes the keys of dicts whose value is None. `change`: of each text."""
    if isinstance(value, dict):
        return {key: without_none(part, change) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_none(part, change) for part in value]
    return change(value) if isinstance(value, str) else value


def _decode_json(value: Any, feature: Any) -> Any:
    """The value of a feature, where `datasets` stores dicts of several shapes as JSON texts."""
    if isinstance(feature, dict) and isinstance(value, dict):
        return {key: _decode_json(part, feature.get(key)) for key, part in value.items()}
    if isinstance(value, list):
        return [_decode_json(part, getattr(feature, "feature", None)) for part in value]
    is_json = type(feature).__name__ == "Json" and isinstance(value, str)
    return json.loads(value) if is_json else value
