"""QLoRA on `tiny` and `smollm2`, beside LoRA on the same model without quantization.

python runs/qlora/reproduce.py                    # every run but that of vLLM: half an hour
python runs/qlora/reproduce.py --missing          # those that are not recorded
python runs/qlora/reproduce.py sums-nf4-vllm      # in the environment of vLLM's CPU build
python runs/qlora/reproduce.py --draw             # only the table and the picture
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

import record  # noqa: E402
from figures import band, figure, panel  # noqa: E402

from core.metrics import before_after, describe  # noqa: E402
from core.report.curves import BLUE, ORANGE  # noqa: E402
from core.run_log import read_records  # noqa: E402

TRAIN = "runs/qlora/measured.py"
LETTERS = "--num-updates 25 --lora-rank 16 --lr 5e-4"
SUMS = (
    "--model-id smollm2 --env math_qa:level=1,style=plain --temperature 0.7 --num-prompts 8 "
    "--group-size 8 --max-tokens 16 --max-turns 1 --microscope 0 --eval-every 0 "
    "--eval-num-tasks 128 --num-updates 15 --lora-rank 16 --lr 1e-4"
)
METHODS = {"nf4": "--quantize nf4", "lora": ""}
RUNS = {
    f"letters-{method}-seed{seed}": f"{LETTERS} {flags} --seed {seed}"
    for method, flags in METHODS.items()
    for seed in (0, 1)
} | {f"sums-{method}": f"{SUMS} {flags} --seed 0" for method, flags in METHODS.items()}
VLLM = {"sums-nf4-vllm": f"{SUMS} --quantize nf4 --dtype bfloat16 --sampler vllm --seed 0"}


def main() -> None:
    chosen = record.chosen_runs(__doc__, HERE, RUNS | VLLM)
    named = [name for name in chosen if name in RUNS or name in sys.argv]
    for name in named:
        flags = " ".join((RUNS | VLLM)[name].split())
        memory = {"memory.json": HERE / f"{name}.memory.json"}
        record.make_run(HERE, name, flags, TRAIN, memory)
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])


def recorded() -> list[str]:
    """The names of the runs that are recorded."""
    return [name for name in RUNS | VLLM if (HERE / f"{name}.jsonl").exists()]


def table() -> list[str]:
    """One row per run, as Markdown."""
    rows = [
        "| run | before RL [95%] | after RL [95%] | gap, nats: largest mean of an update | "
        "of a token | weights of the base | peak of the process | time |",
        "|" + " --- |" * 8,
    ]
    for name in recorded():
        records = read_records(HERE / f"{name}.jsonl")
        ((env, first, last),) = before_after(records)
        mean, most = (
            max(r[f"gap/logprob_{kind}"] for r in records if f"gap/logprob_{kind}" in r)
            for kind in ("mean", "max")
        )
        memory = json.loads((HERE / f"{name}.memory.json").read_text())
        base = f"{memory['base_weights'] / 1e6:.2f}M in {memory['base_bytes'] / 1e6:.2f} MB"
        cells = [
            name, describe(env, first), describe(env, last), f"{mean:.1e}", f"{most:.1e}", base,
            f"{memory['peak_bytes'] / 1e6:.0f} MB", f"{record.read_seconds(HERE)[name]} s",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    commands = {"letters": LETTERS, "sums": SUMS}
    for task, flags in commands.items():
        rows += ["", f"{task}: `python {TRAIN} {flags}`, `--quantize nf4` and `--seed`."]
    return [*rows, "vllm: `--dtype bfloat16 --sampler vllm`."]


def draw() -> None:
    """Held-out accuracy of `tiny`, and right answers of `smollm2` in training, by update."""
    with figure(HERE / "curves.png", "QLoRA (blue) beside LoRA (orange)", 1, 2, (11, 4)) as axes:
        for name in (name for name in recorded() if name in RUNS):
            records = read_records(HERE / f"{name}.jsonl")
            color = BLUE if "-nf4" in name else ORANGE
            if name.startswith("sums"):
                trained = [m for m in records if "reward/correct" in m]
                right = [m["reward/correct"] for m in trained]
                axes[1].plot([m["update"] for m in trained], right, color=color)
                continue
            evaluated = [m for m in records if "eval/letter_counting/accuracy" in m]
            keys = ("accuracy", "ci_low", "ci_high")
            values = ([m[f"eval/letter_counting/{key}"] for m in evaluated] for key in keys)
            band(axes[0], [m["update"] for m in evaluated], *values, color, marker="o")
        for axis in axes:
            axis.set_ylim(-0.03, 1.05)
        panel(axes[0], "tiny, letters: held-out accuracy, 2 seeds", "update")
        panel(axes[1], "smollm2, sums: right answers in training", "update")


if __name__ == "__main__":
    main()
