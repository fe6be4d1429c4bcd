"""A warm start is made once for each recipe, and reused to the bit."""

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
def test_the_same_recipe_is_reused_and_gives_the_same_run(command, cache, flags):
    said = [command(*SMALL, *flags, "--run-name", name)[1] for name in ("a", "b")]
    assert ["warm start: reused" in out for out in said] == [False, True]
    assert metrics_of("a") == metrics_of("b")
    assert "sft/loss" in metrics_of("b")[0]
    assert [p.name for p in cache.glob(".*")] == []


@pytest.mark.parametrize(
    "flags", ["--seed 1", "--sft-steps 7", "--sft-hasty 0.5", "--env reverse", "--no-cache",
              "--lora-rank 2", "--algo ppo", "--train-difficulty 4"],
)  # fmt: skip
def test_another_recipe_is_not(command, flags):
    command(*SMALL, "--run-name", "a")
    assert "reused" not in command(*SMALL, *flags.split(), "--run-name", "b")[1]


def test_what_comes_after_the_warm_start_is_not_of_the_recipe(command):
    command(*SMALL, "--run-name", "a")
    assert "reused" in command(*SMALL, "--lr", "1e-3", "--temperature", "0.9")[1]


def test_a_damaged_or_missing_cache_costs_a_line(command, cache):
    command(*SMALL, "--run-name", "a")
    (folder,) = cache.iterdir()
    (folder / "weights.safetensors").write_bytes(b"\0" * 100)
    code, out, _ = command(*SMALL, "--run-name", "b")
    assert code == 0 and "can't be read" in out and metrics_of("a") == metrics_of("b")
    assert "reused" in command(*SMALL)[1]  # it was kept again


def test_a_cache_that_cannot_be_written_costs_a_line(command, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PICORL_CACHE", str(tmp_path / "file"))
    code, out, _ = command(*SMALL, "--run-name", "a")
    assert code == 0 and "not kept for other runs" in out


def test_a_resumed_warm_start_is_kept_but_none_is_reused(command, cache):
    command(*SMALL, "--no-cache", "--num-updates", "0", "--run-name", "a")
    assert not cache.exists()
    code, out, _ = command("--resume", "runs/a", "--num-updates", "1")
    assert code == 0 and "reused" not in out and not cache.exists()


def test_a_disk_that_is_full_costs_the_cache_and_not_the_run(command, cache, monkeypatch):
    def full(*args):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(warm_cache, "save_file", full)
    code, out, err = command(*SMALL, "--seed", "77")
    assert (code, err) == (0, "") and "warm start: not kept for other runs (I/O error" in out
    assert not list(cache.glob(".part-*"))
