"""Where a run is written: names of new runs, and their length; what each rank writes; its date."""

import shutil
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from core import chat, run
from core.chat_template import prompt_ids
from core.config import Config, resolve
from core.model import load_policy
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


def test_a_run_keeps_the_date_and_the_options_of_its_chat_template(
    command, tmp_path, qwen3_folder, monkeypatch
):
    folder = Path(shutil.copytree(qwen3_folder, tmp_path / "dated"))
    template = folder / "chat_template.jinja"
    shown = "{{ strftime_now('%d %B') }}{{ ', brief' if brief else '' }}"
    template.write_text(shown + template.read_text())
    policies = []

    def load(*args, **options):
        policies.append(load_policy(*args, **options))
        return policies[-1]

    def train(day, *flags):
        monkeypatch.setattr(run, "date", SimpleNamespace(today=lambda: date(2025, 3, day)))
        code, _, stderr = command(*flags, "--num-updates", 1 + len(policies))
        assert code == 0, stderr
        opening = prompt_ids(policies[-1].tokenizer, [{"role": "user", "content": ""}])
        return policies[-1].tokenizer.decode(opening).partition("<")[0]

    monkeypatch.setattr(run, "load_policy", load)
    new = f"--model-id {folder} --device cpu --num-prompts 1 --group-size 2 --max-tokens 4".split()
    new += ["--eval-num-tasks", "0"]
    options = "--template-options brief=true --run-name first".split()
    assert train(9, *new, *options) == "09 March, brief"
    settings = yaml.safe_load(Path("runs/first/config.yaml").read_text())
    assert settings["template_date"] == "2025-03-09"
    assert settings["template_options"] == "brief=true"
    assert train(10, "--resume", "runs/first") == "09 March, brief"
    assert train(11, "--config", "runs/first/config.yaml") == "09 March, brief"
    assert train(12, *new) == "12 March"
    [speaker] = chat.load_speakers(*chat.parse(["runs/first", "--device", "cpu"]))
    tokenizer = speaker.policy.tokenizer
    opening = tokenizer.decode(prompt_ids(tokenizer, [{"role": "user", "content": ""}]))
    assert opening.startswith("09 March, brief<")
