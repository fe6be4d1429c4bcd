"""The afternoon, 3 of 9. Train a language model with reinforcement learning: the whole loop.

    python train.py                      # GRPO: a tiny model learns to count letters, on a laptop
    python train.py --algo ppo           # the same with PPO
    python train.py --model-id Qwen/Qwen3-4B-Instruct-2507 --lora-rank 32 --train-difficulty 6

A task is an environment and a seed. A rollout is one agent's episode of a task: one or more turns,
each a prompt and the completion that the policy (the model in training) sampled; its return is the
sum of the rewards of its turns, discounted with --gamma (by default not). The G rollouts of a task
(--group-size) are a group; in a game with several agents, each agent has a group of its own. Each
update samples the groups of P tasks (--num-prompts). It turns their rewards into advantages (how
much better than expected a rollout did). Then it takes gradient steps: --num-epochs times
--num-minibatches, by default one.

By default this is GRPO with P = 16 and G = 8, and an update is:

    R      the return of each rollout
    A      (R - mean of its group) / (std of its group), for each token that was sampled in it
    ρ      π / π_old, for each token: 1, as the only step has not been taken yet
    loss   -Σ min(ρ A, clip(ρ) A) / number of tokens       its gradient is -Σ A ∇ log π / number
    step   AdamW, with the gradient clipped to norm 1 and a learning rate of 5e-5

So the clip of ρ does not act, and GRPO is REINFORCE with the mean of the group as the baseline and
advantages divided by the group's standard deviation. It has no KL.

Each sampled token has three log-probs: π_sampler, which the sampler reported; π_old, the trainer's
before the first gradient step (with a single step it is π, without gradient); and π, which the
trainer computes now. By default sampler and trainer have the same weights, but their kernels round
differently, so the importance weight π_old / π_sampler, which also multiplies a token's term, is
only about 1. The policy ratio π / π_old is 1 until the first step.

Shapes: the sampled tokens of an update are numbered, 0 to S-1, rollout after rollout, and what is
known of them are vectors [S], such as `batch.advantages`. A forward pass works on a micro-batch: Q
sequences of T tokens, prompts included. A sequence is a rollout, or a part of one if the
environment changed the context between turns. Of the n tokens that were sampled in them, the loss
sees vectors [n], such as `tokens.logprobs`.

Each process of torchrun is a rank. All ranks have all rollouts; each trains on its share.

From elsewhere: algorithms/tokens.py lists what is known of a token; core/loop/play.py samples,
core/batching.py makes tokens and micro-batches, core/scoring.py the log-probs,
algorithms/off_policy.py the importance weights; core/loop/run.py evaluates, logs and saves;
core/config.py has all settings.
"""

import gc
import math
import sys
from dataclasses import replace
from time import perf_counter
from typing import Any

from core.config import Config
from core.terminal import cli

if __name__ == "__main__":
    cli.answer_at_once(sys.argv[1:])  # --help and errors, before the slow imports

import torch
from torch import Tensor

from algorithms import off_policy, sft
from algorithms.tokens import Tokens, token_weights
from core import distributed, selection, tasks
from core.batching import (
    Batch,
    MicroBatch,
    Minibatch,
    add_advantages,
    micro_batches,
    minibatches,
    shape_rewards,
    to_tokens,
)
from core.faults import UsageError
from core.loop.open import open_run, optimizer_for
from core.loop.play import play
from core.loop.reference import freeze_reference
from core.loop.run import Run, is_due
from core.metrics import UpdateStats
from core.scoring import predict, score_tokens
from core.types import Rollout
from environments import rewarded
from environments.plumbing import registry


def main(cfg: Config) -> int:
    """Trains: a warm start, if one is asked for, and updates of RL. Returns the exit code.

    Raises UsageError, Fault or Stopped with the line that the command line prints.
    """
    with open_run(cfg) as run:  # settings, policy, optimizer, sampler, environments, log
        cfg, algorithm = run.cfg, run.algorithm  # compute_advantages, compute_loss
        begin(run)  # supervised steps on demonstrations, if any; the reference of --kl-coef
        # evaluates before update 1; yields 1, 2, .. up to --num-updates or --max-sampled-tokens,
        # and an empty record of each update's gradient steps
        for update, stats in run.updates():
            # 1. Sample G rollouts for each of P tasks; the environment rewards each turn. Those
            #    whose environment failed are not trained on
            sampled, rollouts = play(run, update)  # all, and those to train on
            batch = to_tokens(rollouts)  # what is known of their S sampled tokens: vectors [S]

            # 2. The policy scores the sampled tokens: π_old, and PPO's values. With a single step
            #    π_old is π, so the default does nothing here. With --kl-coef the reference scores
            #    them, too
            score(run, batch)

            # 3. Rewards to batch.advantages [S], and what else compute_loss needs
            shape_rewards(cfg, batch)  # penalties, discount; which tokens are in the loss
            add_advantages(batch, algorithm.compute_advantages(batch, cfg.options))

            # 4. Gradient steps; by default one, of all rollouts. The loss of a step is a sum over
            #    tokens with weights, by default 1 / number of tokens of the step, so the gradients
            #    of its micro-batches add up to the gradient of the step
            for minibatch in minibatches(cfg, len(rollouts), update):
                batch.token_weights = token_weights(
                    batch, minibatch.rollouts, cfg.options.aggregation, cfg.max_tokens
                )
                for micro in micro_batches(run.policy, batch, minibatch.rollouts):
                    tokens = forward(run, batch, micro)  # [n]: log-probs now, and all of the above
                    loss, metrics = algorithm.compute_loss(tokens, cfg.options)
                    loss = loss + regularizers(run, tokens)  # of --kl-coef and --entropy-coef
                    # adds to the gradients of the weights; goes through the model only if some
                    # token has a gradient: those of groups that earned the same have none
                    run.optimizer.backward(loss, tokens.outputs)
                    stats.add(tokens, loss, metrics)
                if not take_step(run, batch, stats, minibatch):
                    break  # the policy has moved further than --ppo.target-kl

            # 5. The sampler gets the new weights: nothing to send if it shares them
            run.sync()

            # 6. Metrics, evaluation, log, checkpoint
            run.finish_update(update, sampled, batch, stats)
        return 1 if run.stopped else 0  # as 20 updates had no finite gradient


def begin(run: Run) -> None:
    """What precedes the first update of RL: the warm start, and the reference of --kl-coef.

    The reference is the teacher, or the policy when RL begins (with LoRA its base).
    """
    if run.progress["sft_step"] < run.cfg.sft_steps:  # counters that a checkpoint stores
        warm_start(run.cfg, run)
    if run.teacher:
        run.reference = replace(run.teacher, micro_batch_tokens=run.policy.micro_batch_tokens)
    elif run.cfg.kl_coef:
        run.reference = freeze_reference(run.policy, run.outputs.folder, run.next_update)


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


def score(run: Run, batch: Batch) -> None:
    """Sets π_old and PPO's values where they are needed before the first step, and π_ref.

    π_old is needed then if there are several steps, a value head, or advantages made of it.
    """
    if run.scores_first:
        found = score_tokens(run.policy, batch, run.cfg.temperature)
        batch.add({f"old_{name}": x for name, x in found.items()})
    if run.reference:
        found = score_tokens(run.reference, batch, run.cfg.temperature)
        batch.ref_logprobs = found["logprobs"]


def forward(run: Run, batch: Batch, micro: MicroBatch) -> Tokens:
    """What is known of the n tokens of a micro-batch, and log-probs, entropies, values now.

    These have gradients, the entropies only with --entropy-coef. Importance weights are
    min(π_old / π_sampler, 2) by default, about 1.
    """
    cfg = run.cfg
    outputs = predict(run.policy, micro, cfg.temperature, cfg.entropy_coef > 0, run.read_out)
    if not run.scores_first:  # the only step: π is still π_old
        batch.write("old_logprobs", micro.numbers, outputs["logprobs"].detach())
    tokens = batch[micro.numbers].to(run.policy.device)
    tokens.add(outputs)
    tokens.outputs = [*outputs.values()]  # through these the gradient reaches the model
    tokens.logprobs.retain_grad()  # for report.html
    tokens.sampler_ratio = off_policy.sampler_ratio(tokens, cfg.tis_level)
    tokens.importance_weights = off_policy.importance_weights(
        tokens.sampler_ratio, cfg.tis_cap, cfg.tis_mode
    )
    return tokens


def regularizers(run: Run, tokens: Tokens) -> Tensor:
    """What --entropy-coef and --kl-coef add to the loss; by default 0.

    Each token's term has the factors of the policy loss: token weight, importance weight and the
    policy ratio ρ = π / π_old. ρ is not clipped here: where GRPO's clip has removed a token's
    gradient, these terms keep theirs.
    """
    cfg, added = run.cfg, torch.zeros((), device=run.policy.device)
    if not cfg.entropy_coef and not run.reference:
        return added
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()  # [n]
    weights = tokens.token_weights * tokens.importance_weights
    if cfg.entropy_coef:
        bonus = (weights * ratio.detach() * tokens.entropy).sum()
        added = added - cfg.entropy_coef * bonus
    if run.reference and cfg.kl_in == "loss":
        kl = run.weighted_kl(tokens.logprobs, ratio, tokens.ref_logprobs, cfg.kl_estimator)
        added = added + cfg.kl_coef * (weights * kl).sum()
    return added


def take_step(run: Run, batch: Batch, stats: UpdateStats, minibatch: Minibatch) -> bool:
    """AdamW's step on the gradients of one minibatch, summed over all ranks; then they are dropped.

    There is no weight decay. The norm of the gradient is clipped to --max-grad-norm; a gradient of
    0, or one that is not finite, changes no weight. Returns False, without a step, if the
    KL(π_old ‖ π) of the minibatch exceeds --ppo.target-kl: then the update takes no further step.
    By default there is no such limit.
    """
    cfg = run.cfg
    run.optimizer.sum_gradients()
    stats.end_minibatch(minibatch.epoch)
    if not run.scores_first:
        batch.sum_over_ranks("old_logprobs")
    if 0 < cfg.options.target_kl < stats.approx_kl:  # the KL of this minibatch
        run.optimizer.zero_grad()
        return False
    stats.grad_norm, stepped = run.optimizer.clip_and_step(
        cfg.max_grad_norm,
        finite_loss=math.isfinite(stats.loss),
        # run.next_update: this one, until it is finished; --ppo.value-warmup, else 0
        only_value_head=run.next_update <= cfg.options.value_warmup,
    )
    stats.num_steps += stepped
    return True


def sft_step(cfg: Config, run: Run, rollouts: list[Rollout]) -> float:
    """One supervised step on `rollouts`. Returns the loss, in nats per token."""
    batch = to_tokens(rollouts)
    total = 0.0
    for micro in micro_batches(run.policy, batch):
        logprobs = predict(run.policy, micro, temperature=1.0)["logprobs"]
        loss = sft.compute_loss(logprobs, len(batch))
        run.optimizer.backward(loss)
        total += loss.item()
    run.optimizer.sum_gradients()
    total = distributed.all_reduce_metrics({"loss": total})["loss"]
    run.optimizer.clip_and_step(cfg.max_grad_norm, math.isfinite(total))
    return total


def run(cfg: Config, env: Any = None, **data: Any) -> int:
    """Trains with these settings, as a notebook wants it. Returns the exit code.

    `env`: an environment in place of `cfg.env`: a class, an object, which is copied for every
    episode, or a function that returns a new one. Or `data`: rows, a `datasets.Dataset` or a list
    of dicts, with `reward`, functions with TRL's signature, and other options of the environment
    `rewarded`. To resume the run, call this again with the same.
    """

    def named(_: list[str]) -> Config:
        if data and env is not None:
            raise UsageError("give env= or data=, not both")
        found = rewarded.of_objects(**data) if data else env
        return cfg if found is None else replace(cfg, env=(registry.name_object(found),))

    return cli.execute(main, [], named)


def execute(args: list[str]) -> int:
    """What `python train.py ARGS` does. Returns the exit code."""
    return cli.execute(main, args)


if __name__ == "__main__":
    if "triton" not in sys.modules:  # its version 3.9 prints what is not collected: 25 lines
        gc.freeze()  # the garbage collector skips what was imported: saves 1 s at the exit
    sys.exit(execute(sys.argv[1:]))
