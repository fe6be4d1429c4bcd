"""A warm start is trained once per recipe and reused bit for bit."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from core import cli, config, warm_cache
from core.tasks import training_envs

SMALL = """--sft-steps 6 --sft-batch-size 4 --num-updates 1 --num-prompts 2 --group-size 2
    --eval-num-tasks 2 --max-tokens 12 --device cpu""".split()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PICORL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def metrics_of(name):
    lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines
    ]


@pytest.mark.parametrize(
    "flags", [[], *(pytest.param(f.split(), marks=pytest.mark.slow)
                    for f in ("--lora-rank 2", "--algo ppo"))],
)  # fmt: skip
def test_the_same_recipe_is_loaded_and_gives_the_same_run(command, cache, flags):
    said = [command(*SMALL, *flags, "--run-name", name)[1] for name in ("a", "b")]
    assert ["warm start: loaded" in out for out in said] == [False, True]
    assert metrics_of("a") == metrics_of("b")
    assert "sft/loss" in metrics_of("b")[0]
    assert [p.name for p in cache.glob(".*")] == []


def recipe_of(flags):
    """The cache folder of a command, for a policy that is built from its settings."""
    cfg = config.resolve(cli.parse(flags.split()))
    policy = SimpleNamespace(
        dtype=torch.float32, device="cpu", value_head=1 if cfg.algo == "ppo" else None
    )
    return warm_cache.folder_of(cfg, policy, training_envs(cfg.env, cfg.train_difficulty))


def test_another_recipe_has_another_folder(cache):
    folders = {recipe_of(flags) for flags in (
        "", "--seed 1", "--sft-steps 7", "--sft-hasty 0.5", "--env reverse", "--lora-rank 2",
        "--algo ppo", "--train-difficulty 4", "--max-turns 3", "--thinking drop",
    )}  # fmt: skip
    assert len(folders) == 10 and all(folder.parent == cache for folder in folders)
    assert recipe_of("--no-cache") is recipe_of("--model-id other") is None
    assert recipe_of("--lr 1e-3 --temperature 0.9 --num-updates 7") == recipe_of("")


def test_a_damaged_cache_is_trained_again_with_one_line(command, cache):
    command(*SMALL, "--run-name", "a")
    (folder,) = cache.iterdir()
    (folder / "weights.safetensors").write_bytes(b"\0" * 100)
    code, out, _ = command(*SMALL, "--run-name", "b")
    assert code == 0 and "cannot be read" in out and metrics_of("a") == metrics_of("b")
    assert "warm start: loaded" in command(*SMALL)[1]  # it was written again


def test_a_cache_that_cannot_be_written_is_one_line(command, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PICORL_CACHE", str(tmp_path / "file"))
    code, out, _ = command(*SMALL, "--run-name", "a")
    assert code == 0 and "not cached" in out


def test_a_run_with_no_cache_neither_reads_nor_writes_one(command, cache):
    command(*SMALL, "--no-cache", "--num-updates", "0", "--run-name", "a")
    assert not cache.exists()
    code, out, _ = command("--resume", "runs/a", "--num-updates", "1")
    assert code == 0 and "warm start: loaded" not in out and not cache.exists()


def test_a_full_disk_does_not_stop_the_run(command, cache, monkeypatch):
    def full(*args):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(warm_cache, "save_file", full)
    code, out, err = command(*SMALL, "--seed", "77")
    assert (code, err) == (0, "") and "warm start: not cached (I/O error" in out
    assert not list(cache.glob(".part-*"))
