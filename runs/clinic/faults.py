"""Twenty published bugs of reinforcement learning that raise no error, each a patch of our loop.

    python runs/clinic/faults.py stale_weights               # train.py with the fault
    python runs/clinic/faults.py stale_weights --lr 1e-4     # .. and with flags of train.py
    python runs/clinic/faults.py nothing                     # train.py as it is
    python runs/clinic/faults.py --quiz 1                    # a fault without its name and warnings
    python runs/clinic/faults.py --answer 1                  # .. and which it was
    python runs/clinic/faults.py table                       # the table and the picture of the page

A fault is a function that replaces parts of our modules with `patch(module, name, value)`.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import record  # noqa: E402
import torch  # noqa: E402
from figures import figure, panel  # noqa: E402
from torch.nn.functional import dropout  # noqa: E402

import train  # noqa: E402
from core import (  # noqa: E402
    context,
    diagnostics,
    optimizer,
    policy,
    sampler,
    tasks,
)
from core.loop import open as opening  # noqa: E402
from core.report.curves import INK, RED  # noqa: E402
from core.types import Completion  # noqa: E402
from environments.letter_counting import LetterCounting  # noqa: E402

Patch = Callable[[Any, str, Any], None]


@dataclass
class Fault:
    """A row of the page. `install` is the fault; its docstring says what it does."""

    install: Callable[[Patch], None]
    source: str  # where it was reported
    metric: str  # that shows it
    warning: str  # that names it; "": none does
    flags: str = ""  # of train.py, also for the healthy run beside it


FAULTS: dict[str, Fault] = {}


def fault(source: str, metric: str, warning: str, flags: str = "") -> Callable:
    """Enters a function into FAULTS."""

    def enter(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS[install.__name__] = Fault(install, source, metric, warning, flags)
        return install

    return enter


# 1. sampler and trainer differ


@fault("TRL #5312", "gap/canary", "stale_weights")
def stale_weights(patch: Patch) -> None:
    """The sampler keeps the weights with which it started; no sync reaches it."""
    init = sampler.TorchSampler.__init__

    def frozen(self: Any, own: policy.Policy, *args: Any) -> None:
        init(self, replace(own, model=copy.deepcopy(own.model)), *args)

    patch(sampler.TorchSampler, "__init__", frozen)


@fault("verl #7495", "gap/canary", "stale_weights", "--lora-rank 8 --lr 2e-4")
def stale_adapter(patch: Patch) -> None:
    """Each sync sends the base weights, which never change, and none of the adapter."""
    trained: list[Any] = []
    init = sampler.TorchSampler.__init__

    def copied(self: Any, own: policy.Policy, *args: Any) -> None:
        trained.append(own.model)
        init(self, replace(own, model=copy.deepcopy(own.model)), *args)

    def sync(self: Any) -> None:
        weights = trained[-1].state_dict()
        base = {name: weight for name, weight in weights.items() if "lora_" not in name}
        self.policy.model.load_state_dict(base, strict=False)

    patch(sampler.TorchSampler, "__init__", copied)
    patch(sampler.TorchSampler, "sync", sync)


@fault("vLLM #42125", "gap/canary", "stale_weights", "--lora-rank 8 --lr 2e-4")
def stale_prefix_cache(patch: Patch) -> None:
    """The adapter is replaced in place; the cache keeps the prompts' keys and values of the old."""
    prefill, old = sampler.prefill, list[Any]()

    def from_cache(own: policy.Policy, prompts: list[list[int]], max_new_tokens: int) -> Any:
        old.append(old[0] if old else copy.deepcopy(own.model))
        cache = prefill(replace(own, model=old[0]), prompts, max_new_tokens)
        cache.model = own.causal_lm
        return cache

    patch(sampler, "prefill", from_cache)


@fault("TRL #6789, #4159", "gap/logprob_mean", "sampler_gap", "--top-p 0.9")
def whole_distribution(patch: Patch) -> None:
    """The trainer's log-probs are of the whole distribution, the sampler's of its top-p part."""
    build = sampler.to_completion

    def without_kept(
        own: policy.Policy, ids: list[int], logprobs: list[float], _: Any, *stop: Any
    ) -> Any:
        return build(own, ids, logprobs, None, *stop)

    patch(sampler, "to_completion", without_kept)


@fault("TRL #5224", "gap/logprob_max", "sampler_gap", "--temperature 1.5")
def retokenised(patch: Patch) -> None:
    """The text of a completion is tokenised again for training; the token that ends it is lost."""
    add = context.Agent.add

    def add_again(agent: context.Agent, answer: Completion) -> str:
        tokenizer = agent.renderer.policy.tokenizer
        ids = tokenizer.encode(answer.text, add_special_tokens=False) or answer.token_ids
        logprobs = [*answer.logprobs, *[0.0] * len(ids)][: len(ids)]
        return add(agent, replace(answer, token_ids=ids, logprobs=logprobs))

    patch(context.Agent, "add", add_again)


@fault("TRL #3500, arXiv:2403.17031", "gap/logprob_mean", "sampler_gap")
def dropout_on(patch: Patch) -> None:
    """Dropout acts while the loss is computed, so the policy in training is another one."""
    hidden_states = policy.Policy.hidden_states

    def with_dropout(self: policy.Policy, *args: Any) -> torch.Tensor:
        return dropout(hidden_states(self, *args), 0.1, training=torch.is_grad_enabled())

    patch(policy.Policy, "hidden_states", with_dropout)


# 2. the wrong tokens


@fault("TRL #1623, #4974", "tokens/trained / tokens/sampled", "tokens_left_out")
def end_token_masked(patch: Patch) -> None:
    """Padding is recognised by its id, which is that of the end token: ends are never trained."""
    shape_rewards = train.shape_rewards

    def masked(cfg: Any, batch: Any) -> None:
        shape_rewards(cfg, batch)
        ends = (batch.completion_lengths > 0) & ~batch.hit_token_limit
        batch.in_loss &= ~ends

    patch(train, "shape_rewards", masked)


@fault("TRL #5697", "length/hit_token_limit", "never_stops", "--max-tokens 3")
def cut_answers(patch: Patch) -> None:
    """The token limit of the example is too low for the task: answers are cut, and count as wrong.
    (The limit is the fault: there is no patch.)"""


# 3. the wrong advantages


@fault("TRL #3098", "update/direction", "wrong_direction")
def advantages_shifted(patch: Patch) -> None:
    """After a gather in another order each rollout has the advantage of its neighbour."""
    add_advantages = train.add_advantages

    def shifted(batch: Any, found: torch.Tensor) -> None:
        lengths = batch.rollout.unique_consecutive(return_counts=True)[1]
        of_rollouts = found[lengths.cumsum(0) - 1]  # at the last token of each
        add_advantages(batch, of_rollouts.roll(1).repeat_interleave(lengths))

    patch(train, "add_advantages", shifted)


@fault("TRL #2803, Search-R1 #88", "groups/openings", "mixed_groups")
def groups_mixed(patch: Patch) -> None:
    """Prompts are repeated as 1 2 3 1 2 3, and groups cut as 1 1 2 2 3 3."""
    train_tasks = tasks.train_tasks

    def tiled(*args: Any) -> list[tasks.Task]:
        drawn = train_tasks(*args)
        size = 1 + max(task.group_id for task in drawn)
        each = len(drawn) // size
        return [replace(t, seed=drawn[i % size * each].seed) for i, t in enumerate(drawn)]

    patch(tasks, "train_tasks", tiled)


@fault("TRL #3675", "groups/repeated", "same_tasks")
def same_tasks(patch: Patch) -> None:
    """The generator of tasks gets the same seed in every update."""
    train_tasks = tasks.train_tasks

    def first(envs: Any, seed: int, update: int, *args: Any) -> list[tasks.Task]:
        return train_tasks(envs, seed, 1, *args)

    patch(tasks, "train_tasks", first)


# 4. the wrong loss or step


@fault("ToolRL #52, Logic-RL #58", "kl/reference", "", "--kl-coef 5")
def kl_sign(patch: Patch) -> None:
    """The KL to the reference is maximized."""
    regularizers = train.regularizers

    def negative(run: Any, *args: Any) -> Any:
        cfg = replace(run.cfg, kl_coef=-run.cfg.kl_coef)
        return regularizers(replace(run, cfg=cfg), *args)

    patch(train, "regularizers", negative)


@fault("ChatGLM-Efficient-Tuning #380", "kl/reference", "reference_moves", "--kl-coef 5")
def reference_moves(patch: Patch) -> None:
    """The reference is not a copy of the policy: it is the policy."""
    patch(train, "freeze_reference", lambda policy, *_: replace(policy, value_head=None))


@fault("prime-rl #583", "loss/weight", "loss_weight", "--max-tokens-per-micro-batch 256")
def micro_batch_mean(patch: Patch) -> None:
    """Each micro-batch divides by its own number of tokens, and the gradients are added up."""
    forward = train.forward

    def means(*args: Any) -> Any:
        tokens = forward(*args)
        tokens.token_weights = tokens.in_loss / tokens.in_loss.sum()
        return tokens

    patch(train, "forward", means)


@fault("LLaMA-Factory #124", "value/loss", "value_head_frozen", "--algo ppo")
def value_head_left_out(patch: Patch) -> None:
    """The optimizer was made before the value head, and does not have it."""
    make = opening.make_optimizer

    def without_head(own: policy.Policy, *args: Any, **options: Any) -> Any:
        return make(replace(own, value_head=None), *args, **options)

    patch(opening, "make_optimizer", without_head)


@fault("hello-agents #771", "update/moved", "kl_runaway")
def high_rate(patch: Patch) -> None:
    """The learning rate is that of another recipe, 100 times as high."""
    make = opening.make_optimizer

    def hundredfold(own: policy.Policy, lr: float, *args: Any, **options: Any) -> Any:
        return make(own, 100 * lr, *args, **options)

    patch(opening, "make_optimizer", hundredfold)


@fault("AReaL #1369", "eval/letter_counting/accuracy", "", "--dtype bfloat16 --lr 1e-5")
def steps_vanish(patch: Patch) -> None:
    """AdamW steps on bfloat16 weights, whose spacing is larger than most steps."""
    patch(optimizer, "dtype_of_master", lambda weight: weight.dtype)


# 5. the wrong task


@fault("verl #5635, open-r1 #474", "reward/mean", "no_reward")
def reward_fails(patch: Patch) -> None:
    """The reward function raises outside the main thread; its caller returns 0 for every error."""
    step = LetterCounting.step

    def zero(self: LetterCounting, response: str) -> Any:
        return replace(step(self, response), reward=0.0)

    patch(LetterCounting, "step", zero)


@fault("TRL #2771, #5787", "reward/correct", "")
def reward_for_length(patch: Patch) -> None:
    """A reward that was meant to make answers longer has the wrong sign: short ones win."""
    step = LetterCounting.step

    def shorter(self: LetterCounting, response: str) -> Any:
        found = step(self, response)
        return replace(found, reward=found.reward - 0.2 * len(response.split()))

    patch(LetterCounting, "step", shorter)


@fault("OpenRLHF #1089", "eval/letter_counting/seen", "held_out_seen", "--eval-num-tasks 64")
def evaluates_on_training(patch: Patch) -> None:
    """The tasks of the evaluation are drawn from those of training."""
    train_tasks = tasks.train_tasks

    def few(*args: Any) -> list[tasks.Task]:
        drawn = train_tasks(*args)
        return [replace(t, seed=tasks.EVAL_SEEDS[t.seed % 64]) for t in drawn]

    patch(tasks, "train_tasks", few)


HEALTHY = {  # the run without a fault, by its flags
    "": "healthy", "--lora-rank 8 --lr 2e-4": "healthy_lora", "--top-p 0.9": "healthy_top_p",
    "--temperature 1.5": "healthy_hot", "--max-tokens 3": "healthy", "--kl-coef 5": "healthy_kl",
    "--max-tokens-per-micro-batch 256": "healthy",
    "--algo ppo": "healthy_ppo", "--dtype bfloat16 --lr 1e-5": "healthy_bf16",
    "--eval-num-tasks 64": "healthy",
}  # fmt: skip
REPOSITORIES = {
    "TRL": "huggingface/trl", "verl": "verl-project/verl", "vLLM": "vllm-project/vllm",
    "Search-R1": "PeterGriffinJin/Search-R1",
    "ToolRL": "qiancheng0/ToolRL", "Logic-RL": "Unakar/Logic-RL", "open-r1": "huggingface/open-r1",
    "ChatGLM-Efficient-Tuning": "hiyouga/ChatGLM-Efficient-Tuning", "AReaL": "areal-project/AReaL",
    "prime-rl": "PrimeIntellect-ai/prime-rl", "LLaMA-Factory": "hiyouga/LlamaFactory",
    "hello-agents": "datawhalechina/hello-agents", "OpenRLHF": "OpenRLHF/OpenRLHF",
}  # fmt: skip


def write() -> None:
    draw()
    record.write_table(HERE, [*table(), "", record.recorded_with(HERE)])


def read(name: str) -> list[dict[str, Any]]:
    """The records of a run's updates."""
    records = record.read_records(HERE / f"{name}.jsonl")
    return [r for r in records if r.get("update")]


def series(name: str, metric: str) -> tuple[list[int], list[float]]:
    """The updates and the values of a metric."""
    of = metric.split(" / ")  # one metric, or the quotient of two
    rows = [r for r in read(name) if all(r.get(part) is not None for part in of)]
    points = [(r["update"], r[of[0]] / (r[of[1]] if of[1:] else 1)) for r in rows]
    return [update for update, _ in points], [value for _, value in points]


def raised(name: str) -> tuple[int, str, str]:
    """Update, name and text of the warning that names a fault, else of the first one at all;
    (0, "", "") without any."""
    for r in read(name):
        for warning, text in r.get("warnings", {}).items():
            if warning == (FAULTS[name].warning or warning):
                return r["update"], warning, text
    return 0, "", ""


def links(source: str) -> str:
    """Issue numbers as links.

    >>> links("verl #5635, #7, arXiv:2403.17031").count("https")
    3
    """
    shown, repository = [], ""
    for name in source.split(", "):
        project, _, number = name.partition("#")
        repository = REPOSITORIES.get(project.strip(), repository)
        to = f"https://github.com/{repository}/issues/{number}"
        if not number:
            to = f"https://arxiv.org/abs/{name.removeprefix('arXiv:')}"
        shown.append(f"[{name}]({to})")
    return ", ".join(shown)


def table() -> list[str]:
    """A row per fault, as Markdown."""
    rows = []
    for name, each in FAULTS.items():
        update, warning, text = raised(name)
        what = " ".join((each.install.__doc__ or "").split())
        at = update or read(name)[-1]["update"]
        values = [dict(zip(*series(run, each.metric), strict=True)).get(at)
                  for run in (HEALTHY[each.flags], name)]  # fmt: skip
        sign = " → ".join("-" if value is None else f"{value:.3g}" for value in values)
        named = f"`{warning}`: {text.partition('; try ')[0]}" if warning else "none"
        rows.append([f"`{name}`", links(each.source), what, f"`{each.metric}` {sign}",
                     str(update or "-"), named])  # fmt: skip
    return record.markdown("fault | reported in | what is wrong | first sign: healthy → broken | "
                           "update | warning", rows)  # fmt: skip


def draw() -> None:
    """A panel per fault: the metric that shows it, healthy (grey) and broken."""
    title = "Twenty bugs that raise no error: what each does to a metric (grey: the healthy run)"
    with figure(HERE / "curves.png", title, 4, 5, (13.5, 8.1)) as axes:
        for axis, (name, each) in zip(axes, FAULTS.items(), strict=True):
            curves = [series(run, each.metric) for run in (HEALTHY[each.flags], name)]
            axis.plot(*curves[0], color="#9a9aa5", linewidth=3.5)
            axis.plot(*curves[1], color=RED, linewidth=2)
            if each.metric.startswith("gap/logprob"):
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
                axis.minorticks_off()
            update, warning, _ = raised(name)
            panel(axis, name.replace("_", " "), size=11)
            short = each.metric.replace("letter_counting/", "").replace(" / ", " /\n")
            axis.set_ylabel(short, fontsize=8)
            axis.tick_params(labelsize=7)
            if update:
                axis.axvline(update, color=INK, linewidth=1, linestyle=":")
            axis.set_xlim(0.5, curves[1][0][-1] + 0.5)
            sign = f"update {update}: {warning.replace('_', ' ')}" if update else "no warning"
            axis.set_xlabel(sign, fontsize=9, color=INK if each.warning else "#9a9aa5")


def main(args: list[str]) -> int:
    name, *flags = args or [""]
    if name == "table":
        return write() or 0
    hidden = name in ("--quiz", "--answer") and bool(flags)
    if hidden:
        number, *flags = flags
        chosen = [*FAULTS][(13 * int(number) - 5) % len(FAULTS)]
        if name == "--answer":
            print(f"{chosen}: {FAULTS[chosen].install.__doc__}")
            return 0
        name = chosen
        diagnostics.new_warnings = lambda *_: {}  # they would name it
    if name in FAULTS:
        FAULTS[name].install(setattr)
        flags = [*FAULTS[name].flags.split(), *flags]
    elif name != "nothing":
        sys.exit(f"faults.py: name one of nothing, {', '.join(FAULTS)}, then flags of train.py")
    return train.execute(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
