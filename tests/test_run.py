"""Where a run is written: names of new runs, and their length."""

import pytest

from core.config import Config
from core.run import folder_of
from core.run_dir import new_folder
from core.types import UsageError


def test_run_without_a_name_takes_the_next_number(tmp_path):
    assert new_folder(tmp_path, "", "grpo-x").name == "grpo-x-1"
    (tmp_path / "grpo-x-1").mkdir()
    assert new_folder(tmp_path, "", "grpo-x").name == "grpo-x-2"
    with pytest.raises(UsageError, match="exists"):
        new_folder(tmp_path, "grpo-x-1", "")


def test_name_of_a_run_on_many_environments_is_shortened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = Config(env=("letter_counting",) * 40)
    folder, is_new = folder_of(cfg)
    folder.mkdir(parents=True)  # a file system refuses names of more than 255 bytes
    assert is_new and folder.name.startswith("grpo-letter_counting+letter_counting+")
    assert folder_of(cfg)[0].name == folder.name[:-1] + "2"
