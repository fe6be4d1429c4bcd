"""A warm start is trained once per recipe and reused bit for bit."""

import json
from pathlib import Path

import pytest
from safetensors import SafetensorError

from core import warm_cache

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


@pytest.mark.parametrize("flags", [[], ["--lora-rank", "2"], ["--algo", "ppo"]])
def test_the_same_recipe_is_loaded_and_gives_the_same_run(command, cache, flags):
    said = [command(*SMALL, *flags, "--run-name", name)[1] for name in ("a", "b")]
    assert ["warm start: loaded" in out for out in said] == [False, True]
    assert metrics_of("a") == metrics_of("b")
    assert "sft/loss" in metrics_of("b")[0]
    assert [p.name for p in cache.glob(".*")] == []


@pytest.mark.parametrize(
    "flags", ["--seed 1", "--sft-steps 7", "--sft-hasty 0.5", "--env reverse", "--no-cache",
              "--lora-rank 2", "--algo ppo", "--train-difficulty 4"],
)  # fmt: skip
def test_another_recipe_is_not_loaded(command, flags):
    command(*SMALL, "--run-name", "a")
    assert "warm start: loaded" not in command(*SMALL, *flags.split(), "--run-name", "b")[1]


def test_settings_of_rl_are_not_part_of_the_recipe(command):
    command(*SMALL, "--run-name", "a")
    assert "warm start: loaded" in command(*SMALL, "--lr", "1e-3", "--temperature", "0.9")[1]


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
