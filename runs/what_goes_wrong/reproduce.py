"""Failures made on purpose, each beside the same run without it: curves and a table.

python runs/what_goes_wrong/reproduce.py              # all of them: about an hour
python runs/what_goes_wrong/reproduce.py --missing    # those that aren't here yet
python runs/what_goes_wrong/reproduce.py --draw       # only the table and the picture again
python runs/what_goes_wrong/reproduce.py wrong_clip   # those named
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent.parent)]

import matplotlib.pyplot as plt  # noqa: E402
from record import machine, record, warm_policy, write_table  # noqa: E402

from core.report.curves import BLUE, INK, STYLE  # noqa: E402
from core.run_log import read_records  # noqa: E402

RED = "#c8442f"
BROKEN = "runs/what_goes_wrong/broken.py"
WARM = "--max-tokens 64 --max-tokens-per-micro-batch 2048 --num-updates 30 --eval-every 3"
LORA = "--lora-rank 8 --dtype bfloat16 --lr 1e-3"
HACKED = (
    "--env reward_hacking:world=rescue,proxy_weight={} --sft-steps 250 --sft-batch-size 8 "
    "--num-updates 40 --num-prompts 8 --eval-every 10 --eval-num-tasks 128 --lr 2e-4"
)
RUNS = {  # name: (script, flags; those of WARM begin at the default warm start)
    "healthy": ("train.py", WARM),
    "no_spread": ("train.py", f"{WARM} --temperature 0.05"),
    "high_rate": ("train.py", f"{WARM} --lr 5e-3"),
    "retokenised": (f"{BROKEN} retokenised", WARM),
    "adapter": ("train.py", f"{WARM} {LORA}"),
    "merged_adapter": (f"{BROKEN} merged_adapter", f"{WARM} {LORA}"),
    "clip": ("train.py", f"{WARM} --num-epochs 4 --lr 3e-4"),
    "wrong_clip": (f"{BROKEN} wrong_clip", f"{WARM} --num-epochs 4 --lr 3e-4"),
    "true_reward": ("train.py", HACKED.format(0)),
    "hacked_proxy": ("train.py", HACKED.format(1)),
}
ACCURACY = "eval/letter_counting/accuracy"
PANELS = (  # failure, the run without it, its name in the picture, [(metric, label)]
    ("no_spread", "healthy", "Reward without spread",
     [(ACCURACY, "held-out accuracy"), ("groups/zero_std_fraction", "groups without spread")]),
    ("high_rate", "healthy", "Too high a rate",
     [(ACCURACY, "held-out accuracy"), ("policy/entropy", "entropy, nats a token")]),
    ("retokenised", "healthy", "Re-tokenised text",
     [("length/mean", "tokens a completion"), ("gap/logprob_max", "largest gap, nats")]),
    ("merged_adapter", "adapter", "A merged adapter",
     [(ACCURACY, "held-out accuracy"), ("base/drift", "drift of the frozen base")]),
    ("wrong_clip", "clip", "A wrong clip",
     [(ACCURACY, "held-out accuracy"), ("kl/approx", "KL in an update, nats a token")]),
    ("hacked_proxy", "true_reward", "A proxy reward hacked",
     [("reward/mean", "what is paid"), ("info/true_return", "what was meant")]),
)  # fmt: skip


def play(name: str) -> None:
    script, flags = RUNS[name]
    if flags.startswith(WARM):
        flags = f"--model-id {warm_policy(HERE, 0)} {flags}"
        flags += "" if "--lr " in flags else " --lr 1e-4"
    record(HERE, name, flags, script=script)


def series(name: str, metric: str) -> tuple[list[int], list[float]]:
    """(updates, values) of a metric; of the drift of a base that nobody touched: 0."""
    records = [r for r in read_records(HERE / f"{name}.jsonl") if "update" in r]
    if metric == "base/drift" and name == "adapter":
        return [r["update"] for r in records], [0.0] * len(records)
    found = [(r["update"], r[metric]) for r in records if r.get(metric) is not None]
    return [u for u, _ in found], [v for _, v in found]


def table() -> list[str]:
    lines = ["| failure | metric | without it: end (most) | with it: end (most) |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    for broken, sound, _, metrics in PANELS:
        for metric, _ in metrics:
            found = [series(name, metric)[1] for name in (sound, broken)]
            ends = [f"{sum(v[-5:]) / len(v[-5:]):.3g} ({max(v):.3g})" for v in found]
            lines.append(f"| {broken} | `{metric}` | {ends[0]} | {ends[1]} |")
    return [*lines, "", f"End: the mean of the last five. Machine: {machine()}."]


def draw() -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(3, 4, figsize=(14, 8), layout="constrained")
        title = "Failures that raise no error: what they do, and the curve that shows them"
        figure.suptitle(title, fontsize=15, fontweight="bold", x=0.01, ha="left")
        pairs = axes.reshape(6, 2)
        for pair, (broken, sound, name, metrics) in zip(pairs, PANELS, strict=True):
            for axis, (metric, label) in zip(pair, metrics, strict=True):
                axis.plot(*series(sound, metric), color=BLUE, linewidth=1.6, linestyle="--",
                          label="without")  # fmt: skip
                axis.plot(*series(broken, metric), color=RED, linewidth=2.2, label=name.lower())
                axis.set_title(label, fontsize=10, loc="left", color=INK)
                axis.set_xlabel("update", fontsize=9)
            pair[0].legend(fontsize=8, frameon=False)
            pair[0].set_title(f"{name}: {metrics[0][1]}", fontsize=10, loc="left",
                              fontweight="bold")  # fmt: skip
        figure.savefig(HERE / "curves.png", dpi=100)
        plt.close(figure)


def main() -> None:
    named = [name for name in RUNS if name in sys.argv[1:]] or list(RUNS)
    for name in named:
        if "--draw" not in sys.argv:
            play(name)
    if all((HERE / f"{name}.jsonl").exists() for name in RUNS):
        draw()
        write_table(HERE, table())


if __name__ == "__main__":
    main()
