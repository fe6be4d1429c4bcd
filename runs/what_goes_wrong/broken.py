"""train.py with one mistake that raises no error.

    python runs/what_goes_wrong/broken.py wrong_clip --num-epochs 4
    python runs/what_goes_wrong/broken.py table     # the table and the picture

The first argument names the mistake, the others are flags of train.py.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import record  # noqa: E402
import torch  # noqa: E402
from figures import figure, panel  # noqa: E402

import train  # noqa: E402
from algorithms import grpo  # noqa: E402
from core.context import Agent  # noqa: E402
from core.report.curves import BLUE, RED  # noqa: E402
from core.run.log import RunLog  # noqa: E402
from core.sampler import TorchSampler  # noqa: E402
from core.types import Completion  # noqa: E402


def wrong_clip() -> None:
    """Takes the larger of the two products of the clipped surrogate instead of the smaller."""
    source = inspect.getsource(grpo.compute_loss)
    assert source.count("torch.minimum") == 1
    exec(source.replace("torch.minimum", "torch.maximum"), vars(grpo))


def retokenised() -> None:
    """Tokenises the sampled text again for training; the end-of-turn token is lost."""
    add = Agent.add

    def add_retokenised(agent: Agent, answer: Completion | str) -> str:
        demonstrated = isinstance(answer, str)
        completion = agent.renderer.demonstration(answer) if demonstrated else answer
        tokenizer = agent.renderer.policy.tokenizer
        ids = tokenizer.encode(completion.text.strip(), add_special_tokens=False)
        ids = ids or completion.token_ids
        logprobs = [*completion.logprobs, *[0.0] * len(ids)][: len(ids)]
        again = Completion(ids, logprobs, completion.text, completion.finish_reason)
        return add(agent, again)

    Agent.add = add_retokenised


def merged_adapter() -> None:
    """Merges the LoRA adapter into the bfloat16 weights for sampling, and subtracts it again.

    Logs base/drift: the norm of the change of the frozen weights, relative to their norm.
    """
    initial: dict[str, torch.Tensor] = {}
    drifts: list[float] = []
    log = RunLog.log

    def sync(sampler: TorchSampler) -> None:
        model: Any = sampler.policy.model
        base = {n: p for n, p in model.named_parameters() if n.endswith("base_layer.weight")}
        initial.update({n: p.detach().clone() for n, p in base.items() if n not in initial})
        model.merge_adapter()
        model.unmerge_adapter()
        change = sum(float((p - initial[n]).float().norm() ** 2) for n, p in base.items())
        whole = sum(float(weight.float().norm() ** 2) for weight in initial.values())
        drifts.append((change / whole) ** 0.5)

    def log_drift(run_log: RunLog, record: dict[str, Any]) -> None:
        log(run_log, record | ({"base/drift": drifts[-1]} if drifts else {}))

    TorchSampler.sync = sync
    RunLog.log = log_drift


def nothing() -> None:
    """Trains as train.py does."""


ACCURACY = ("eval/letter_counting/accuracy", "held-out accuracy")
PANELS = (  # run with the mistake, run without it, title, two (metric, label)
    ("no_spread", "healthy", "Groups without spread",
     (ACCURACY, ("groups/zero_std_fraction", "groups with equal rewards"))),
    ("high_rate", "healthy", "Learning rate too high",
     (ACCURACY, ("policy/entropy", "entropy, nats per token"))),
    ("retokenised", "random", "Re-tokenised text",
     (("length/mean", "tokens per completion"), ("gap/logprob_max", "largest log-prob gap, nats"))),
    ("merged_adapter", "adapter", "Merged adapter",
     (ACCURACY, ("base/drift", "relative change of frozen weights"))),
    ("wrong_clip", "clip", "Wrong clip",
     (ACCURACY, ("kl/approx", "KL within an update, nats per token"))),
    ("hacked_proxy", "true_reward", "Hacked proxy reward",
     (("reward/mean", "reward"), ("info/true_return", "true return"))),
)  # fmt: skip


def write() -> None:
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])


def series(name: str, metric: str) -> tuple[list[int], list[float]]:
    """Returns the updates and the values of a metric; 0 for the drift of a base left frozen."""
    updates = [r for r in record.read_records(HERE / f"{name}.jsonl") if "update" in r]
    if metric == "base/drift" and name == "adapter":
        return [r["update"] for r in updates], [0.0] * len(updates)
    points = [(r["update"], r[metric]) for r in updates if r.get(metric) is not None]
    return [u for u, _ in points], [v for _, v in points]


def table() -> list[str]:
    """One row per mistake and metric, as Markdown."""
    rows = []
    for broken, healthy, _, metrics in PANELS:
        for metric, _ in metrics:
            values = [series(name, metric)[1] for name in (healthy, broken)]
            ends = [f"{sum(v[-5:]) / len(v[-5:]):.3g} ({max(v):.3g})" for v in values]
            rows.append([broken, f"`{metric}`", *ends])
    head = "mistake | metric | without the mistake: end (highest) | with it: end (highest)"
    return [*record.markdown(head, rows), "", "End: mean of the last five values."]


def draw() -> None:
    """Two panels per mistake: the run with it, and the run without it (dashed)."""
    title = "Mistakes that raise no error: what they do, and the metric that shows them"
    with figure(HERE / "curves.png", title, 3, 4, (15, 8.5)) as axes:
        shown = [(row, *metric) for row in PANELS for metric in row[3]]
        for axis, ((broken, healthy, name, metrics), metric, label) in zip(
            axes, shown, strict=True
        ):
            axis.plot(*series(healthy, metric), color=BLUE, linewidth=1.6, linestyle="--",
                      label="without the mistake")  # fmt: skip
            axis.plot(*series(broken, metric), color=RED, linewidth=2.2, label=name.lower())
            first = metric == metrics[0][0]
            panel(axis, f"{name}: {label}" if first else label, "update", size=10)
            if first:
                axis.legend(fontsize=8, frameon=False)


MISTAKES = {f.__name__: f for f in (nothing, wrong_clip, retokenised, merged_adapter)}

if __name__ == "__main__":
    name, *flags = sys.argv[1:] or [""]
    if name == "table":
        sys.exit(write())
    if name not in MISTAKES:
        sys.exit(f"broken.py: name one of {', '.join(MISTAKES)}, then flags of train.py")
    MISTAKES[name]()
    sys.exit(train.run_command(flags))
