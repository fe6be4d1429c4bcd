"""A run that is killed, or whose disk is full, resumes to the same metrics."""

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
from conftest import metrics_of
from safetensors import SafetensorError

import train
from core.files import checkpoint

FLAGS = """--sft-steps 2 --sft-batch-size 2 --num-updates 3 --num-prompts 2 --group-size 2
    --eval-num-tasks 2 --eval-every 2 --save-every 1 --max-tokens 10 --max-model-len 256
    --device cpu""".split()
# The settings of a run, and the renames in it at which it is killed
KILLS = {
    "--algo reinforce --lora-rank 2 --kl-coef 0.1": (1, 7),
    "--algo grpo --kl-coef 0.1 --filter-groups 1 --staleness 1": (2, 5, 8, 11),
    "--algo ppo --num-epochs 2 --num-minibatches 2 --curriculum 0.4 --max-turns 2 "
    "--env letter_counting tic_tac_toe:opponent=older:1": (3, 4, 6, 9, 10, 12),
}


def killed_at(number, *flags):
    """How a run with these flags ends that is killed at its os.replace of this number: the status,
    as `os.waitpid` has it."""
    child = os.fork()  # much sooner there than a process that has to import torch
    if child:
        return os.waitpid(child, 0)[1]
    replace, numbers = os.replace, itertools.count(1)

    def replace_or_die(source, target):
        if "runs/a/" in str(target) and next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die
    try:
        train.execute(["--run-name", "a", *flags])
    finally:
        os._exit(1)


def assert_alike(run, whole):
    """The same metrics, rollouts, weights and names of files, pages apart."""
    assert metrics_of(run) == metrics_of(whole)
    for name in (
        "rollouts.jsonl",
        *(str(p.relative_to(whole)) for p in whole.rglob("*.safetens*")),
    ):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    names = [
        {str(p.relative_to(r)) for p in r.rglob("*") if p.suffix != ".png"} for r in (run, whole)
    ]
    assert names[0] == names[1]
    assert not list(run.parent.rglob(".part-*"))


FIRST, *OTHERS = KILLS


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not copy a process")
@pytest.mark.parametrize(
    "settings", [FIRST, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)]
)
def test_a_run_that_is_killed_at_a_rename_resumes_to_the_same(command, settings):
    flags = [*FLAGS, *settings.split()]
    assert command("--run-name", "whole", *flags)[0] == 0
    for number in KILLS[settings]:
        assert killed_at(number, *flags) == signal.SIGKILL
        code, _, err = command("--resume", "runs/a")
        assert code == 0, err
        assert_alike(Path("runs/a"), Path("runs/whole"))
        shutil.rmtree("runs/a")


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(command, monkeypatch):
    written, save_file = [], checkpoint.save_file

    def fill(tensors, file, *rest):
        written.append(file)
        if len(written) == 3:  # after the warm start, after update 1, after update 2
            raise SafetensorError("Error while serializing: No space left on device (os error 28)")
        save_file(tensors, file, *rest)

    assert command("--run-name", "whole", *FLAGS)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fill)
        code, _, err = command("--run-name", "a", *FLAGS)
    assert code == 1 and err.count("\n") == 1 and "No space left on device" in err
    assert "--resume" in err
    saved = sorted(path.name for path in Path("runs/a/checkpoint").iterdir())
    assert saved == ["000002-000000", "000002-000002"]
    assert command("--resume", "runs/a")[0] == 0
    assert_alike(Path("runs/a"), Path("runs/whole"))
