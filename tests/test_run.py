"""Where a run is written: names of new runs, and their length; what each rank writes."""

from types import SimpleNamespace

import pytest

from core import run
from core.config import Config, resolve
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


def test_a_rank_that_does_not_write_leaves_scratch_py_out_of_the_folder(tmp_path):
    folder, log_dir = tmp_path / "run", tmp_path / "log"
    folder.mkdir()
    log_dir.mkdir()
    written = []
    algorithm = SimpleNamespace(save_source=written.append, remarks=[], exercises=[], draw=None)
    cfg = resolve(Config(algo="scratch", device="cpu"))
    with run._opened(cfg, algorithm, folder, log_dir, new=True):
        assert written == [log_dir]
