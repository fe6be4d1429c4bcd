"""The afternoon, 3 of 6. Train a language model with reinforcement learning: the whole loop.

    python train.py                      # GRPO: a tiny model learns to count letters, on a laptop
    python train.py --algo ppo           # the same with PPO
    python train.py --model-id Qwen/Qwen3-4B-Instruct-2507 --lora-rank 32 --train-difficulty 6

A task is an environment and a seed. A rollout is one agent's episode of a task: one or more turns,
each a prompt and the completion that the policy (the model in training) sampled; its return is the
sum of its rewards. The G rollouts of a task (--group-size) are a group; in a game, each agent has
one of its own. Each update samples the groups of P tasks (--num-prompts). It turns their rewards
into advantages (how much better than expected a rollout did). Then it takes gradient steps, by
default one.

The default run has P = 16, G = 8, at most 64 tokens per completion, one gradient step per update
with a constant learning rate of 5e-5, and no KL. In the only step of an update the policy is still
the one that sampled, so the policy ratio is 1 and no clip acts: GRPO is then REINFORCE with the
mean of the group as the baseline, and advantages divided by the group's standard deviation.

Each sampled token has three log-probs: π_sampler, which the sampler reported; π_old, the trainer's
before the first gradient step (with a single step it is π, without gradient); and π, which the
trainer computes now. By default sampler and trainer have the same weights, but their kernels round
differently, so the importance weight π_old / π_sampler is only about 1. The policy ratio π / π_old
is 1 until the first step.

Shapes: a tensor [B, N] has one row per rollout and one column per sampled token, padded on the
right. A forward pass works on a micro-batch: b sequences of T tokens, prompts included. A sequence
is a rollout, or a part of one if the environment changed the context between turns.
`micro_batches` copies [B, N] to [b, T-1], where column t has the values of token t+1, which the
model predicts at position t. completion_mask marks the sampled tokens, loss_mask those of them
that are trained on. A forward pass computes hidden states, [L, D]: one for each of the b · T
tokens, or fewer where sequences that begin alike share them (core/prefix_sharing.py).

Each process of torchrun is a rank. All ranks have all B rollouts; each trains on its share.

From elsewhere: algorithms/common.py lists what a batch and a micro-batch have, core/batching.py
makes them, algorithms/off_policy.py the importance weights; core/loop/run.py evaluates, logs and
saves; core/config.py has all settings.
"""

import gc
import math
import sys
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from core.config import Config
from core.run import cli

if __name__ == "__main__":
    cli.answer_at_once(sys.argv[1:])  # --help and errors, before the slow imports

import torch
from torch import Tensor

from algorithms import common, off_policy, sft
from algorithms.kl import weighted_kl
from algorithms.token_logprobs import token_logprobs
from core import config, distributed, selection, tasks
from core.algorithm import load_algorithm
from core.batching import (
    MicroBatch,
    RolloutBatch,
    add_advantages,
    micro_batches,
    minibatches,
    shape_rewards,
    to_rollout_batch,
)
from core.feedback import make_teacher
from core.loop.open import open_run, optimizer_for
from core.loop.run import Run, is_due
from core.metrics import UpdateStats, rollout_metrics
from core.observations import mark_observations, predict_observations
from core.policy import Policy
from core.report.token_traces import trace_tokens
from core.run.memory import probe_peak_memory
from core.run.reference import freeze_reference
from core.run.staleness import older_weights
from core.sampler import SamplingParams
from core.seeds import MINIBATCHES, SAMPLING, derive_seed
from core.types import Rollout
from environments import rewarded
from environments.plumbing import registry


def main(cfg: Config) -> int:
    """Runs the warm start and `cfg.num_updates` updates of RL. Returns the exit code."""
    cfg = prepare(cfg)  # all settings, checked
    algorithm = load_algorithm(cfg.algo)  # has compute_advantages and compute_loss
    if hasattr(algorithm, "start"):  # the workshop's: an object with the exercises of scratch.py
        algorithm = algorithm.start(cfg)
    options = cfg.options  # the algorithm's flags, such as --grpo.clip-high

    with open_run(cfg, algorithm) as run:  # policy, optimizer, sampler, environments, log
        # lowers run.policy.micro_batch_tokens until the largest micro-batch fits into memory
        probe_peak_memory(cfg, run.policy, run.optimizer, forward, run.say)
        if run.progress["sft_step"] < cfg.sft_steps:  # counters that a checkpoint stores
            warm_start(cfg, run)  # supervised steps on demonstrations
        reference = load_reference(cfg, run)  # the policy of --kl-coef, or None
        # evaluates before update 1; yields 1, 2, .. up to --num-updates or --max-sampled-tokens
        for update in run.updates():
            # 1. Sample G rollouts for each of P tasks; the environment rewards each turn. `sampled`
            #    are all, `rollouts` those to train on. With --staleness, an earlier update's
            #    weights sample; with --overlap, in a thread, while the update before trained
            with older_weights(run.policy, run.sampler, run.older, run.ahead.started):
                sampled, rollouts = run.take_ahead() or collect_rollouts(cfg, run, update)
            if cfg.overlap and update < cfg.num_updates:  # play_ahead adds `run`: the thread's own
                run.play_ahead(partial(collect_rollouts, cfg, update=update + 1))
            batch = to_rollout_batch(rollouts)  # their tokens and rewards as tensors [B, N]

            # 2. The policy scores the sampled tokens: π_old, and PPO's values. The default, GRPO
            #    with one step, skips this. With --kl-coef the reference scores them, too
            if needs_old_logprobs(cfg):
                scored = score_logprobs(run.policy, batch, cfg.temperature)
                batch.old_logprobs, batch.values = scored
            if reference is not None:
                batch.ref_logprobs, _ = score_logprobs(reference, batch, cfg.temperature)

            # 3. Rewards to batch.advantages [B, N], and what else compute_loss needs
            shape_rewards(cfg, batch)  # sets rewards (penalized, discounted), turn_ids, loss_mask
            add_advantages(batch, algorithm.compute_advantages(batch, options))
            if "observations" in config.needs(cfg):  # of --algo echo: the tokens to predict
                mark_observations(run.policy.tokenizer, batch, run.say if update == 1 else None)

            # 4. Gradient steps, one per minibatch; by default the only minibatch has all rollouts.
            #    The loss of a step is a sum over tokens with weights, by default 1 / number of
            #    tokens, so the gradients of its micro-batches add up to the gradient of the step
            stats = UpdateStats(cfg, batch)  # sums for the metrics of this update
            seed = derive_seed(cfg.seed, MINIBATCHES, update)
            steps = minibatches(len(rollouts), cfg.num_epochs, cfg.num_minibatches, seed)
            for epoch, rows in steps:  # rows: the rollouts of this step
                batch.token_weights = common.token_weights(
                    batch.loss_mask, options.aggregation, cfg.max_tokens, rows, batch.group_ids
                )
                for micro in micro_batches(run.policy, batch, rows):
                    if hasattr(algorithm, "divergence"):  # sdpo's teacher, not that of --teacher
                        micro.teacher = make_teacher(cfg, algorithm, run.policy, batch, micro)
                    logprobs, entropy, values = forward(
                        run.policy, micro, cfg.temperature, entropy_grad=cfg.entropy_coef > 0
                    )
                    if batch.old_logprobs is None:  # the only step: π is still π_old
                        micro.old_logprobs = logprobs.detach()
                    # micro.importance_weights: min(π_old / π_sampler, 2) by default, about 1
                    off_policy.set_weights(micro, cfg.tis_level, cfg.tis_cap, cfg.tis_mode)
                    loss, sums = algorithm.compute_loss(logprobs, values, micro, options)
                    extra_loss, kl_sums = regularizers(cfg, algorithm, logprobs, entropy, micro)
                    loss = loss + extra_loss
                    # adds to the gradients; skips the model's backward pass if the gradient at
                    # `outputs` is 0, as for advantages of 0, which have micro-batches of their own
                    outputs = (logprobs, entropy, values, micro.divergence,
                               micro.observation_logprobs)  # fmt: skip
                    run.optimizer.backward(loss, outputs)
                    stats.add(micro, loss, entropy, sums | kl_sums)  # sums: of metrics, over tokens
                if not take_step(cfg, run, stats, epoch, update):  # beyond --ppo.target-kl
                    break

            # 5. Metrics; how far the steps moved the tokens of some groups (--microscope), for the
            #    report. Then the sampler gets the new weights: nothing to send if it shares them
            if batch.old_logprobs is None:  # the default kept π_old for each micro-batch
                batch.old_logprobs = stats.old_logprobs  # [B, N], for the metrics and the report
            metrics = rollout_metrics(cfg, sampled) | stats.means()
            metrics |= trace_tokens(
                run.policy, rollouts, batch, cfg.microscope, forward, cfg.temperature
            )
            run.ahead.wait()  # until the thread of --overlap has sampled: no sync before that
            run.sampler.sync()

            # 6. Evaluate, log, save; with --curriculum the next tasks are harder or easier
            run.finish_update(update, sampled, metrics, next_level(cfg, run, metrics))
        return 1 if run.stopped else 0  # by --stop-on, or without a finite gradient in 20 updates


def prepare(cfg: Config) -> Config:
    """Fills in the defaults that depend on the model and the algorithm, and checks all settings.

    Raises UsageError for an invalid setting.
    """
    cfg = config.resolve(cfg)
    config.validate(cfg)
    rewarded.set_sources(cfg.env, cfg.eval_env or cfg.env)  # which rows of data sets are held out
    tasks.held_out_envs(cfg.eval_env, cfg.env, cfg.train_difficulty)  # raises for unknown names
    train_envs = tasks.training_envs(cfg.env, cfg.train_difficulty)
    if cfg.sft_steps:
        tasks.check_demonstrations(train_envs)
    return cfg


def warm_start(cfg: Config, run: Run) -> None:
    """Supervised steps on demonstrations, so that the policy can do the task at all.

    A fraction `cfg.sft_hasty` of the demonstrations are guesses in the right format; the others
    work the answer out, which RL can then learn to prefer.
    """
    envs = tasks.training_envs(cfg.env, cfg.train_difficulty)
    with run.display.phase("warm start", cfg.sft_steps, run.progress["sft_step"]) as phase:
        logged_at = perf_counter()
        for step in range(run.progress["sft_step"], cfg.sft_steps):
            run.interrupt.check()
            run.optimizer.set_lr(cfg.sft_lr * sft.schedule(step, cfg.sft_steps))
            drawn = tasks.demo_tasks(envs, cfg.seed, step, cfg.sft_batch_size, cfg.sft_hasty)
            demonstrations = selection.drop_failed(run.collector.demonstrate(drawn), run.say)
            loss = sft_step(cfg, run, demonstrations)
            run.progress["sft_step"] = step + 1
            phase.advance(f"loss {loss:.3f}")
            if step + 1 == cfg.sft_steps or is_due(step + 1, 20):
                record = {"sft_step": step + 1, "sft/loss": loss}
                run.outputs.run_log.log(record | {"time/sft_s": perf_counter() - logged_at})
                logged_at = perf_counter()
    run.optimizer.release()
    run.optimizer = optimizer_for(cfg, run.policy)  # Adam's moments at 0
    run.sampler.sync()


def load_reference(cfg: Config, run: Run) -> Policy | None:
    """The policy of --kl-coef: the teacher, or the policy when RL began (with LoRA its base)."""
    if run.teacher:
        return replace(run.teacher, micro_batch_tokens=run.policy.micro_batch_tokens)
    if not cfg.kl_coef:
        return None
    return freeze_reference(run.policy, run.outputs.folder, run.next_update)


def collect_rollouts(cfg: Config, run: Run, update: int) -> tuple[list[Rollout], list[Rollout]]:
    """Samples G rollouts for each of P tasks. Returns all of them, and those to train on.

    Not trained on: rollouts whose environment failed and, with --filter-groups n, tasks with equal
    returns in each group, which up to n more rounds replace. --curriculum adapts the level.
    """
    envs = tasks.training_envs(cfg.env, cfg.train_difficulty, run.progress["level"])
    sampled: list[Rollout] = []
    kept: list[Rollout] = []
    for attempt in range(1 + cfg.filter_groups):
        missing = cfg.num_prompts - len(selection.by_task(kept))
        if missing == 0:
            break
        # G copies of each task: the same environment and seed, the same group_id
        drawn = tasks.train_tasks(envs, cfg.seed, update, missing, cfg.group_size, attempt)
        seed = derive_seed(cfg.seed, SAMPLING, update, attempt)
        params = SamplingParams(cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.top_k, seed)
        with run.display.phase("rollouts", cfg.max_tokens) as phase, run.sampler:
            on_progress = phase.tick_and(run.interrupt.check_alone)
            if attempt == 0:
                run.compare_weights()  # the sampler's with the policy's: logs gap/canary
            fresh = run.collector.collect(drawn, run.sampler, params, on_progress)
        for rollout in fresh:
            rollout.group_id += len(sampled)  # so that no two rounds share a group
        sampled += fresh
        usable = selection.drop_failed(fresh, run.say)
        if update == 1 or "changed_settings" in run.notes:
            selection.check_reward_parts(cfg, usable)
            selection.check_feedback(cfg, usable)
        kept += selection.with_spread(cfg, usable) if cfg.filter_groups else usable
    if not kept:
        run.say(f"update {update}: no gradient step: no usable rollout, or only equal returns")
    run.sampled_at = perf_counter()
    return sampled, kept


def forward(
    policy: Policy, micro: MicroBatch, temperature: float, entropy_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs and entropies of the sampled tokens, and values (PPO), each [b, T-1] float32.

    All have gradients, the entropies only with `entropy_grad`. Sets `micro.divergence` for sdpo and
    `micro.observation_logprobs` for echo.
    """
    # what the last layer, `policy.to_logits`, turns into logits. Tokens with the same beginning may
    # share one hidden state, [L, D]; `micro.nodes` [b, T] says which one belongs to which token
    hidden = policy.hidden_states(micro.input_ids, micro.tree).flatten(0, 1)
    logprobs, entropy, *compared = token_logprobs(
        hidden, micro.nodes, micro.input_ids, micro.completion_mask, policy.to_logits, temperature,
        policy.logits_chunk, micro.kept_ids, entropy_grad, micro.teacher,
    )  # fmt: skip
    if compared:
        [micro.divergence] = compared
    if micro.observation_weights is not None:
        micro.observation_logprobs = predict_observations(policy, hidden, micro)
    if policy.value_head is None:
        return logprobs, entropy, None
    values = policy.value_head(hidden.float()).squeeze(-1)  # [L]
    return logprobs, entropy, values[micro.nodes[:, :-1]]


def needs_old_logprobs(cfg: Config) -> bool:
    """Whether a pass before the first gradient step has to compute log-probs and PPO's values."""
    several_steps = cfg.num_epochs > 1 or cfg.num_minibatches > 1
    kl_in_reward = cfg.kl_coef > 0 and cfg.kl_in == "reward"
    needed = bool({"old_logprobs", "value_head"} & config.needs(cfg))
    return several_steps or kl_in_reward or needed


@torch.no_grad()
def score_logprobs(
    policy: Policy, batch: RolloutBatch, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the sampled tokens under `policy`, and values if it has a value head; [B, N]."""
    all_logprobs = torch.zeros(batch.completion_mask.shape)
    all_values = None if policy.value_head is None else torch.zeros(batch.completion_mask.shape)
    for micro in micro_batches(policy, batch):
        logprobs, _, values = forward(policy, micro, temperature)
        micro.scatter(logprobs, into=all_logprobs)
        if values is not None:
            micro.scatter(values, into=all_values)
    # each rank has scored its own sequences; the others are 0
    distributed.all_reduce_sum([x for x in (all_logprobs, all_values) if x is not None])
    return all_logprobs, all_values


def regularizers(
    cfg: Config, algorithm: Any, logprobs: Tensor, entropy: Tensor, micro: MicroBatch
) -> tuple[Tensor, dict[str, float]]:
    """What --entropy-coef and --kl-coef add to the loss; the sum of the KL for the metrics.

    Each token's term has the factors of the policy loss: token weight, importance weight and the
    policy ratio ρ = π / π_old. ρ is not clipped here: these terms have a gradient beyond the clip.
    """
    extra_loss = torch.zeros((), device=logprobs.device)
    mask = micro.completion_mask
    ratio = torch.where(mask, logprobs - micro.old_logprobs, 0.0).exp()
    weights = micro.token_weights * micro.importance_weights  # [b, T-1]
    if cfg.entropy_coef:
        bonus = torch.where(mask, weights * ratio.detach() * entropy, 0.0).sum()
        extra_loss = extra_loss - cfg.entropy_coef * bonus
    if micro.ref_logprobs is None:
        return extra_loss, {}
    estimate = getattr(algorithm, "weighted_kl", weighted_kl)  # scratch.py may have its own
    if cfg.kl_in == "loss":
        kl = estimate(logprobs, ratio, micro.ref_logprobs, cfg.kl_estimator)
        extra_loss = extra_loss + cfg.kl_coef * torch.where(mask, weights * kl, 0.0).sum()
    k3 = estimate(logprobs, ratio, micro.ref_logprobs, "k3")
    return extra_loss, {"kl/reference": k3[mask].sum().item()}


def take_step(cfg: Config, run: Run, stats: UpdateStats, epoch: int, update: int) -> bool:
    """AdamW's step on the gradients of one minibatch, summed over all ranks; then they are dropped.

    There is no weight decay. The norm of the gradient is clipped to --max-grad-norm; a gradient of
    0, or one that is not finite, changes no weight. Returns False, without a step, if the
    KL(π_old ‖ π) of the minibatch exceeds --ppo.target-kl: then the update takes no further step.
    By default there is no such limit.
    """
    run.optimizer.sum_gradients()
    stats.end_minibatch(epoch)
    if 0 < cfg.options.target_kl < stats.approx_kl:  # the KL of this minibatch
        run.optimizer.zero_grad()
        return False
    stats.grad_norm, stepped = run.optimizer.clip_and_step(
        cfg.max_grad_norm,
        finite_loss=math.isfinite(stats.loss),
        only_value_head=update <= cfg.options.value_warmup,  # 0, unless --ppo.value-warmup
    )
    stats.num_steps += stepped
    return True


def sft_step(cfg: Config, run: Run, rollouts: list[Rollout]) -> float:
    """One supervised step on `rollouts`. Returns the loss, in nats per token."""
    batch = to_rollout_batch(rollouts)
    total = 0.0
    for micro in micro_batches(run.policy, batch):
        logprobs, _, _ = forward(run.policy, micro, temperature=1.0)
        loss, _ = sft.compute_loss(logprobs, micro.completion_mask, batch.num_tokens)
        run.optimizer.backward(loss)
        total += loss.item()
    run.optimizer.sum_gradients()
    total = distributed.all_reduce_metrics({"loss": total})["loss"]
    run.optimizer.clip_and_step(cfg.max_grad_norm, math.isfinite(total))
    return total


def next_level(cfg: Config, run: Run, metrics: dict[str, float]) -> int:
    """The level of the next update's tasks; --curriculum adapts it to this update's accuracy."""
    level: int = run.progress["level"]
    if not cfg.curriculum or "reward/correct" not in metrics:
        return level
    envs = tasks.training_envs(cfg.env, cfg.train_difficulty)
    return tasks.next_level(envs, level, metrics["reward/correct"], cfg.curriculum)


def run(cfg: Config, env: Any = None) -> int:
    """Trains with these settings, as a notebook wants it. Returns the exit code.

    `env`: an environment in place of `cfg.env`: a class, an object, which is copied for every
    episode, or a function that returns a new one. To resume the run, call this again with it.
    """

    def parse(_: list[str]) -> Config:
        named = cfg if env is None else replace(cfg, env=(registry.name_object(env),))
        return cli.parse(cli.flags_of(named))

    return cli.run(main, [], parse)


def run_command(args: list[str]) -> int:
    """What `python train.py ARGS` does. Returns the exit code."""
    return cli.run(main, args)


if __name__ == "__main__":
    gc.freeze()  # the garbage collector skips what was imported: saves 1 s at the exit
    sys.exit(run_command(sys.argv[1:]))
