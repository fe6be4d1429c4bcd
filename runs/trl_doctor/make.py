"""Six runs of TRL's GRPOTrainer on `tiny`: a healthy one, and five with a fault.

    python runs/trl_doctor/make.py              # all six, in two minutes, and the page's list
    python runs/trl_doctor/make.py lr_zero      # one of them, and the list
    python runs/trl_doctor/make.py --say        # only the list, from the logs that are here

Letter counting on the CPU, in float32. FOLDER/trainer_state.json is what TRL wrote; where the
doctor quotes a completion, the first file of those that `log_completions` writes is beside it.
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from record import commit, machine, recorded_with, versions, write_atomically, write_table  # noqa: E402

from core.report import doctor  # noqa: E402
from core.tiny import write_tiny  # noqa: E402
from environments.letter_counting import LetterCounting  # noqa: E402

STEPS, PROMPTS, GROUP = 25, 8, 8
Reward = Callable[..., list[float]]


def counted(completions: list[Any], seed: list[int], **_: Any) -> list[float]:
    """The environment's reward of each completion; `seed`: the task's, a column of the data."""
    env, rewards = LetterCounting(), []
    for completion, number in zip(completions, seed, strict=True):
        env.reset(number)
        rewards.append(env.step(completion[0]["content"]).reward)
    return rewards


def raises(completions: list[Any], seed: list[int], **_: Any) -> list[float]:
    """As `counted`, for completions that are texts. These are lists of messages, so each call
    raises, and the error is a reward of 0."""
    env, rewards = LetterCounting(), []
    for completion, number in zip(completions, seed, strict=True):
        try:
            env.reset(number)
            rewards.append(env.step(completion.strip()).reward)
        except Exception:  # the fault
            rewards.append(0.0)
    return rewards


def always_one(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


RUNS: dict[str, tuple[str, Reward, dict[str, Any]]] = {
    "healthy": ("nothing is wrong", counted, {}),
    "lr_zero": ("the learning rate is 0", counted, {"learning_rate": 0.0}),
    "constant_reward": ("every completion earns 1", always_one, {}),
    "cut_answers": ("completions end after 3 tokens", counted, {"max_completion_length": 3}),
    "reward_raises": ("the reward raises, and its error counts as 0", raises, {}),
    "high_rate": ("the learning rate is 100 times as high", counted, {"learning_rate": 5e-3}),
}


def train(output: Path, reward: Reward, steps: int = STEPS, **changes: Any) -> None:
    """A run of TRL with these settings, and a checkpoint at its end; `output`: a new folder."""
    from datasets import Dataset  # imports that take seconds
    from trl import GRPOConfig, GRPOTrainer

    write_tiny("tiny", output / "tiny", seed=0)
    env = LetterCounting()
    rows = [{"prompt": env.reset(seed), "seed": seed} for seed in range(STEPS * PROMPTS)]
    settings = {
        "learning_rate": 5e-5, "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP, "max_completion_length": 64, "max_steps": steps,
        "save_steps": steps, "logging_steps": 1, "log_completions": True, "report_to": "none",
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
        "save_only_model": True,
    } | changes  # fmt: skip
    trainer = GRPOTrainer(
        model=str(output / "tiny"),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(output_dir=str(output), **settings),
    )
    with contextlib.redirect_stdout(io.StringIO()):  # tables of completions
        trainer.train()


def record(name: str) -> None:
    """Trains the run, and keeps its log."""
    _, reward, changes = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), reward, **changes)
        kept = HERE / name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        shutil.copy(Path(folder, f"checkpoint-{STEPS}", "trainer_state.json"), kept)
        if name == "reward_raises":
            (kept / "completions").mkdir()
            first = "completions/completions_00001.parquet"
            shutil.copy(Path(folder, first), kept / first)


def said(name: str) -> list[str]:
    """What the doctor says of a recorded run."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        doctor.main([str(HERE / name)])
    return output.getvalue().splitlines()


def main(args: list[str]) -> None:
    for name in [] if args == ["--say"] else args or RUNS:
        record(name)
        used = ", ".join(f"{k} {n}" for k, n in versions().items() if k in ("trl", "torch"))
        made = f"Recorded with {used} at commit {commit()} on {machine()}."
        write_atomically(HERE / "recorded.txt", made)
    rows = []
    for name, (fault, *_) in RUNS.items():
        # the last line is the same for all, but for what `log_completions` adds
        rows += [f"**`{name}`**: {fault}", "", *(f"> {line}" for line in said(name)[:-1]), ""]
    last = said("healthy")[-1]
    write_table(HERE, [*rows, "Each ends with:", "", f"> {last}", "", recorded_with(HERE)])


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    main(sys.argv[1:])
