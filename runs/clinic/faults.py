"""Twenty published bugs of reinforcement learning that raise no error, each a patch of our loop.

    python runs/clinic/faults.py stale_weights               # train.py with the fault
    python runs/clinic/faults.py stale_weights --lr 1e-4     # .. and with flags of train.py
    python runs/clinic/faults.py nothing                     # train.py as it is

A fault is a function that replaces parts of our modules with `patch(module, name, value)`.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import torch  # noqa: E402
from torch.nn.functional import dropout  # noqa: E402

import train  # noqa: E402
from core import context, optimizer, policy, sampler, tasks  # noqa: E402
from core.loop import before  # noqa: E402
from core.types import Completion  # noqa: E402
from environments.letter_counting import LetterCounting  # noqa: E402

Patch = Callable[[Any, str, Any], None]  # replaces a part of our modules: (module, name, value)


@dataclass
class Fault:
    """A row of the page; the docstring of `install` describes the fault."""

    install: Callable[[Patch], None]  # puts the fault into our modules
    source: str  # where it was reported
    warning: str  # the warning that names it; "": none does
    flags: str = ""  # of train.py, also for the healthy run beside it


FAULTS: dict[str, Fault] = {}


def fault(source: str, warning: str, flags: str = "") -> Callable:
    """The decorator that enters a function into FAULTS, by its name."""

    def enter(install: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS[install.__name__] = Fault(install, source, warning, flags)
        return install

    return enter


# 1. sampler and trainer differ


@fault("TRL #5312", "stale_weights")
def stale_weights(patch: Patch) -> None:
    """The sampler keeps the weights with which it started; no sync reaches it."""
    init = sampler.TorchSampler.__init__

    def frozen(self: Any, model_policy: policy.Policy, *args: Any) -> None:
        init(self, replace(model_policy, model=copy.deepcopy(model_policy.model)), *args)

    patch(sampler.TorchSampler, "__init__", frozen)


@fault("verl #7495", "stale_weights", "--lora-rank 8 --lr 2e-4")
def stale_adapter(patch: Patch) -> None:
    """Each sync sends the base weights, which never change, and none of the adapter."""
    trained: list[Any] = []
    init = sampler.TorchSampler.__init__

    def copied(self: Any, model_policy: policy.Policy, *args: Any) -> None:
        trained.append(model_policy.model)
        init(self, replace(model_policy, model=copy.deepcopy(model_policy.model)), *args)

    def sync(self: Any) -> None:
        weights = trained[-1].state_dict()
        base = {name: weight for name, weight in weights.items() if "lora_" not in name}
        self.policy.model.load_state_dict(base, strict=False)

    patch(sampler.TorchSampler, "__init__", copied)
    patch(sampler.TorchSampler, "sync", sync)


@fault("vLLM #42125", "stale_weights", "--lora-rank 8 --lr 2e-4")
def stale_prefix_cache(patch: Patch) -> None:
    """The adapter is replaced in place; the cache keeps the prompts' keys and values of the old."""
    prefill, old = sampler.prefill, list[Any]()

    def from_cache(
        model_policy: policy.Policy, prompts: list[list[int]], max_new_tokens: int
    ) -> Any:
        old.append(old[0] if old else copy.deepcopy(model_policy.model))
        cache = prefill(replace(model_policy, model=old[0]), prompts, max_new_tokens)
        cache.model = model_policy.causal_lm
        return cache

    patch(sampler, "prefill", from_cache)


@fault("TRL #6789, #4159", "sampler_gap", "--top-p 0.9")
def whole_distribution(patch: Patch) -> None:
    """The trainer's log-probs are of the whole distribution, the sampler's of its top-p part."""
    build = sampler.to_completion

    def without_kept(
        model_policy: policy.Policy, ids: list[int], logprobs: list[float], _: Any, *stop: Any
    ) -> Any:
        return build(model_policy, ids, logprobs, None, *stop)

    patch(sampler, "to_completion", without_kept)


@fault("TRL #5224", "sampler_gap", "--temperature 1.5")
def retokenised(patch: Patch) -> None:
    """The text of a completion is tokenised again for training; the token that ends it is lost."""
    add = context.Agent.add

    def add_again(agent: context.Agent, answer: Completion) -> str:
        tokenizer = agent.renderer.policy.tokenizer
        ids = tokenizer.encode(answer.text, add_special_tokens=False) or answer.token_ids
        logprobs = [*answer.logprobs, *[0.0] * len(ids)][: len(ids)]
        return add(agent, replace(answer, token_ids=ids, logprobs=logprobs))

    patch(context.Agent, "add", add_again)


@fault("TRL #3500, arXiv:2403.17031", "sampler_gap")
def dropout_on(patch: Patch) -> None:
    """Dropout acts while the loss is computed, so the policy in training is another one."""
    hidden_states = policy.Policy.hidden_states

    def with_dropout(self: policy.Policy, *args: Any) -> torch.Tensor:
        return dropout(hidden_states(self, *args), 0.1, training=torch.is_grad_enabled())

    patch(policy.Policy, "hidden_states", with_dropout)


# 2. the wrong tokens


@fault("TRL #1623, #4974", "tokens_left_out")
def end_token_masked(patch: Patch) -> None:
    """Padding is recognised by its id, which is that of the end token: ends are never trained."""
    shape_rewards = train.shape_rewards

    def masked(cfg: Any, batch: Any) -> None:
        shape_rewards(cfg, batch)
        ends = (batch.completion_lengths > 0) & ~batch.hit_token_limit
        batch.in_loss &= ~ends

    patch(train, "shape_rewards", masked)


@fault("TRL #5697", "never_stops", "--max-tokens 3")
def cut_answers(patch: Patch) -> None:
    """The token limit of the example is too low for the task: answers are cut, and count as wrong.
    (The limit is the fault: there is no patch.)"""


# 3. the wrong advantages


@fault("TRL #3098", "advantages_uneven")
def advantages_shifted(patch: Patch) -> None:
    """After a gather in another order each rollout has the advantage of its neighbour."""
    add_advantages = train.add_advantages

    def shifted(batch: Any, advantages: torch.Tensor) -> None:
        lengths = batch.rollout.unique_consecutive(return_counts=True)[1]
        of_rollouts = advantages[lengths.cumsum(0) - 1]  # at the last token of each
        add_advantages(batch, of_rollouts.roll(1).repeat_interleave(lengths))

    patch(train, "add_advantages", shifted)


@fault("TRL #2803, Search-R1 #88", "mixed_groups")
def groups_mixed(patch: Patch) -> None:
    """Prompts are repeated as 1 2 3 1 2 3, and groups cut as 1 1 2 2 3 3."""
    train_tasks = tasks.train_tasks

    def tiled(*args: Any) -> list[tasks.Task]:
        drawn = train_tasks(*args)
        num_groups = 1 + max(task.group_id for task in drawn)
        group_size = len(drawn) // num_groups
        seeds = [drawn[i % num_groups * group_size].seed for i in range(len(drawn))]
        return [replace(task, seed=seed) for task, seed in zip(drawn, seeds, strict=True)]

    patch(tasks, "train_tasks", tiled)


@fault("TRL #3675", "same_tasks")
def same_tasks(patch: Patch) -> None:
    """The generator of tasks gets the same seed in every update."""
    train_tasks = tasks.train_tasks

    def first(envs: Any, seed: int, update: int, *args: Any) -> list[tasks.Task]:
        return train_tasks(envs, seed, 1, *args)

    patch(tasks, "train_tasks", first)


# 4. the wrong loss or step


@fault("ToolRL #52, Logic-RL #58", "", "--kl-coef 5")
def kl_sign(patch: Patch) -> None:
    """The KL to the reference is maximized."""
    regularizers = train.regularizers

    def negative(run: Any, *args: Any) -> Any:
        cfg = replace(run.cfg, kl_coef=-run.cfg.kl_coef)
        return regularizers(replace(run, cfg=cfg), *args)

    patch(train, "regularizers", negative)


@fault("ChatGLM-Efficient-Tuning #380", "reference_moves", "--kl-coef 5")
def reference_moves(patch: Patch) -> None:
    """The reference is not a copy of the policy: it is the policy."""
    patch(before, "freeze_reference", lambda policy, *_: replace(policy, value_head=None))


@fault("prime-rl #583", "loss_weight", "--max-tokens-per-micro-batch 256")
def micro_batch_mean(patch: Patch) -> None:
    """Each micro-batch divides by its own number of tokens, and the gradients are added up."""
    forward = train.forward

    def means(*args: Any) -> Any:
        tokens = forward(*args)
        tokens.token_weights = tokens.in_loss / tokens.in_loss.sum()
        return tokens

    patch(train, "forward", means)


@fault("LLaMA-Factory #124", "weights_unchanged", "--algo ppo")
def value_head_left_out(patch: Patch) -> None:
    """The optimizer was made before the value head, and does not have it."""
    make = optimizer.make_optimizer

    def without_head(model_policy: policy.Policy, *args: Any, **options: Any) -> Any:
        return make(replace(model_policy, value_head=None), *args, **options)

    patch(optimizer, "make_optimizer", without_head)


@fault("hello-agents #771", "kl_runaway")
def high_rate(patch: Patch) -> None:
    """The learning rate is that of another recipe, 100 times as high."""
    make = optimizer.make_optimizer

    def hundredfold(model_policy: policy.Policy, lr: float, *args: Any, **options: Any) -> Any:
        return make(model_policy, 100 * lr, *args, **options)

    patch(optimizer, "make_optimizer", hundredfold)


@fault("AReaL #1369", "step_size", "--dtype bfloat16 --lr 1e-5")
def steps_vanish(patch: Patch) -> None:
    """AdamW steps on bfloat16 weights, whose spacing is larger than most steps."""
    patch(optimizer, "dtype_of_master", lambda weight: weight.dtype)


# 5. the wrong task


@fault("verl #5635, open-r1 #474", "no_reward")
def reward_fails(patch: Patch) -> None:
    """The reward function raises outside the main thread; its caller returns 0 for every error."""
    step = LetterCounting.step

    def zero(self: LetterCounting, response: str) -> Any:
        return replace(step(self, response), reward=0.0)

    patch(LetterCounting, "step", zero)


@fault("TRL #2771, #5787", "")
def reward_for_length(patch: Patch) -> None:
    """A reward that was meant to make answers longer has the wrong sign: short ones win."""
    step = LetterCounting.step

    def shorter(self: LetterCounting, response: str) -> Any:
        right = step(self, response)
        return replace(right, reward=right.reward - 0.2 * len(response.split()))

    patch(LetterCounting, "step", shorter)


@fault("OpenRLHF #1089", "held_out_seen", "--eval-num-tasks 64")
def evaluates_on_training(patch: Patch) -> None:
    """The tasks of the evaluation are drawn from those of training."""
    train_tasks = tasks.train_tasks

    def few(*args: Any) -> list[tasks.Task]:
        drawn = train_tasks(*args)
        return [replace(t, seed=tasks.EVAL_SEEDS[t.seed % 64]) for t in drawn]

    patch(tasks, "train_tasks", few)


def main(args: list[str]) -> int:
    name, *flags = args or [""]
    if name in FAULTS:
        FAULTS[name].install(setattr)
        flags = [*FAULTS[name].flags.split(), *flags]
    elif name != "nothing":
        sys.exit(f"faults.py: name one of nothing, {', '.join(FAULTS)}, then flags of train.py")
    return train.execute(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
