"""Train a language model by reinforcement learning: the whole loop, top to bottom.

    python train.py                      # the tiny policy learns to count letters, on a laptop
    python train.py --algo ppo           # the same with PPO
    python train.py --model-id Qwen/Qwen3-4B-Instruct-2507 --lora-rank 32 --train-difficulty 6

An update: P tasks, G rollouts of each; what was sampled is paid, compared and learnt from.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from core import cli
from core.config import Config

if __name__ == "__main__":
    cli.answer_at_once(Config, sys.argv[1:])  # --help, or a mistake: the next imports take seconds

import torch

from algorithms import common, grpo, ppo, reinforce, sft
from core import batching, config, distributed, metrics, selection, tasks, warm_cache
from core.evaluation import evaluate
from core.interrupt import Stopped
from core.memory import attempt, probe_peak_memory
from core.model import Policy
from core.reference import as_reference
from core.report.token_traces import trace_tokens
from core.run import Run, is_due, open_run
from core.sampler import SamplingParams
from core.types import Rollout
from core.workshop import as_algorithm

ALGORITHMS: dict[str, Any] = {"reinforce": reinforce, "grpo": grpo, "ppo": ppo}
Known = dict[str, torch.Tensor]  # what is known of each sampled token, by name; each [B, N]


def main(cfg: Config) -> int:
    """The whole run: warm start, then updates of RL with evaluations. Returns the exit code."""
    cfg = config.resolve(cfg)
    cfg = replace(cfg, grpo=grpo.with_loss_type(cfg.grpo)) if cfg.algo == "grpo" else cfg
    config.check(cfg, ALGORITHMS)
    train_envs = [tasks.with_difficulty(spec, cfg.train_difficulty) for spec in cfg.env]
    eval_envs = [tasks.with_difficulty(spec, 0) for spec in cfg.eval_env] or train_envs
    if cfg.sft_steps:
        tasks.check_demonstrations(train_envs)
    settings = cli.to_dict(cfg, ALGORITHMS)

    with open_run(cfg, settings, Path("runs"), config.remarks(cfg)) as run:
        try:
            probe_peak_memory(cfg, run, partial(imitation, run))
            if run.progress["sft_step"] < cfg.sft_steps:
                if not warm_cache.reuse(cfg, run, train_envs):
                    warm_start(cfg, run, train_envs)
                    warm_cache.keep(cfg, run, train_envs)
                run.begin_rl(cfg.lr, cfg.ppo.value_lr)
            if cfg.kl_coef:
                run.keep_reference()
            run.code = 0 if reinforce_loop(cfg, run, train_envs, eval_envs) else 1
        except Stopped:
            run.save()
            run.display.say(f"stopped and saved; go on with: python train.py --resume {run.folder}")
            run.code = 130
    return run.code


def warm_start(cfg: Config, run: Run, envs: list[str]) -> None:
    """Supervised steps on demonstrations: a share of them hasty guesses, the rest worked out."""
    with run.display.phase("warm start", cfg.sft_steps, run.progress["sft_step"]) as phase:
        for step in range(run.progress["sft_step"], cfg.sft_steps):
            run.stop.check()
            for group in run.optimizer.param_groups:
                group["lr"] = cfg.sft_lr * sft.schedule(step, cfg.sft_steps)
            drawn = tasks.demo_tasks(envs, cfg.seed, step, cfg.sft_batch_size, cfg.sft_hasty)
            loss = imitate(cfg, run, run.drop_failed(run.batched_env.demonstrate(drawn)))
            run.progress["sft_step"] = step + 1
            phase.advance(f"loss {loss:.3f}")
            if is_due(step + 1, 20, cfg.sft_steps):
                run.log.log({"sft_step": step + 1, "sft/loss": loss, "time/sft_s": phase.lap()})


def reinforce_loop(cfg: Config, run: Run, train_envs: list[str], eval_envs: list[str]) -> bool:
    """Updates of RL, evaluated on the way; update 0 only evaluates. False: given up."""
    held_out = tasks.eval_tasks(eval_envs, cfg.eval_num_tasks)
    done = run.progress["update"]
    with run.display.phase("updates", cfg.num_updates, max(0, done)) as phase:
        for update in range(done + 1, cfg.num_updates + 1):
            run.stop.check()
            record: dict[str, Any] = {"update": update}
            if update > 0:
                record |= play_and_learn(cfg, run, train_envs, update)
                phase.advance(quiet=True)
            if held_out and is_due(update, cfg.eval_every, cfg.num_updates):
                record |= evaluate(cfg, run, held_out, update)
            if not run.conclude(cfg, record):  # warns, logs and saves
                return False
    return True


def play_and_learn(cfg: Config, run: Run, envs: list[str], update: int) -> dict[str, Any]:
    """One update: P tasks, G rollouts of each; then one lesson from all of them."""
    started = time.perf_counter()
    level = run.progress["level"]
    played, kept = play(cfg, run, [tasks.harder(spec, level) for spec in envs], update)
    sampled = time.perf_counter()
    # from here on the update is finished, whatever signal comes
    good = [rollout for rollout in played if not rollout.error]
    record: dict[str, Any] = metrics.rollout_metrics(good)
    record |= {"episodes/failed": 1 - len(good) / len(played), "groups/level": level}
    record |= learn(cfg, run, kept, update)
    record["tokens/sampled"] = sum(rollout.num_tokens for rollout in played)
    if cfg.curriculum:
        success = record["reward/correct"]
        run.progress["level"] = tasks.next_step(envs, level, success, cfg.curriculum)
    if cfg.sft_best:
        run.progress["best"] = selection.keep_best(run.progress["best"], kept, cfg.sft_best)
        record["sft/best_loss"] = imitate(cfg, run, selection.as_rollouts(run.progress["best"]))
    run.sampler.sync()
    record["time/rollout_s"] = sampled - started
    record["time/train_s"] = time.perf_counter() - sampled
    run.log.log_rollouts("train", update, played)
    run.display.update(update, record, kept)
    return record


def play(cfg: Config, run: Run, envs: list[str], update: int) -> tuple[list, list]:
    """All rollouts of the update, and those to learn from: --filter-groups leaves out tasks whose
    rollouts were all paid alike, and plays others instead, so many times."""
    played: list[Rollout] = []
    kept: list[Rollout] = []
    for again in range(1 + cfg.filter_groups):
        missing = cfg.num_prompts - len(selection.by_task(kept))
        if missing == 0:
            break
        drawn = tasks.train_tasks(envs, cfg.seed, update, missing, cfg.group_size, again)
        seed = cfg.seed * 1_000_003 + update + again * 1009
        params = SamplingParams(cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.top_k, seed)
        with run.display.phase("rollouts", cfg.max_tokens) as phase, run.sampler:
            watch = phase.tick_and(run.stop.check_alone)
            fresh = run.batched_env.collect(drawn, run.sampler, params, watch)
        for rollout in fresh:
            rollout.group_id += len(played)  # a number that no group has yet
        played += fresh
        good = run.drop_failed(fresh)
        kept += selection.with_spread(good) if cfg.filter_groups else good
    return played, kept or good


def learn(cfg: Config, run: Run, rollouts: list[Rollout], number: int) -> dict[str, float]:
    """One update from its rollouts: advantages, loss, backward, step. Returns its metrics."""
    if run.exercises is not None:
        return as_algorithm.learn(run, rollouts, cfg.temperature, cfg.microscope)
    update = batching.to_rollout_batch(rollouts)
    longest = batching.longest(update.sequences)
    known = attempt(run, longest, partial(score, cfg, run, update))
    assign_credit(cfg, update, known)
    learnt = (
        update.mask & ~update.hit_token_limit if cfg.mask_truncated_completions else update.mask
    )
    aggregation = cfg.grpo.aggregation if cfg.algo == "grpo" else "token"
    totals, sums = dict[str, float](), Counter[str]()
    seed = (cfg.seed * 1_000_003 + number) * 101
    steps = batching.minibatches(len(rollouts), cfg.num_epochs, cfg.num_minibatches, seed)
    for step, rows in enumerate(steps):
        known["scale"] = torch.zeros_like(update.rewards)
        known["scale"][rows] = common.token_scale(learnt[rows], aggregation, cfg.max_tokens)
        first = step == 0 and not known["old_logprobs"].any()
        one_pass = partial(backward, cfg, run, update, known, rows, first)
        found = attempt(run, longest, one_pass)
        if cfg.algo == "ppo" and 0 < cfg.ppo.target_kl * found["tokens"] < found["kl/approx"]:
            run.optimizer.zero_grad()  # far enough: this step isn't taken, nor any after it
            break
        head_only = cfg.algo == "ppo" and number <= cfg.ppo.value_warmup
        finite = math.isfinite(found["loss"])
        norm, stepped = run.optimizer.clip_and_step(cfg.max_grad_norm, finite, head_only)
        totals |= {"loss": found["loss"], "grad/norm": norm, "update/skipped": float(not stepped)}
        totals["update/steps"] = step + stepped
        if step % cfg.num_minibatches == 0:
            sums.clear()  # the metrics are those of the last epoch
        sums.update(found)
        if not stepped:
            break
    if cfg.microscope and distributed.rank() == 0:
        now = partial(forward, run.policy, temperature=cfg.temperature)
        trace_tokens(run.policy, rollouts, update, known, cfg.microscope, now)
    totals |= {k: v / sums["tokens"] for k, v in sums.items() if k not in ("loss", "tokens")}
    totals |= metrics.token_metrics(known, update.mask)
    return {**totals, "tokens/trained": int(learnt.sum())}


def score(cfg: Config, run: Run, update: batching.RolloutBatch) -> Known:
    """What has to be known before the first step: log-probs under the weights that sampled, under
    the reference, and values. What isn't needed so early, the first pass of learning makes."""
    known = {"sampler_logprobs": update.sampler_logprobs}
    names = ["old_logprobs", *(["values"] if cfg.algo == "ppo" else [])]
    names += ["ref_logprobs"] if run.reference is not None else []
    known |= {name: torch.zeros_like(update.rewards) for name in names}
    if len(names) == 1 and cfg.num_minibatches == 1:
        return known
    for batch in micro_batches(run.policy, update.sequences):
        with torch.no_grad():
            logprobs, _, values = forward(run.policy, batch, cfg.temperature)
        batching.put(logprobs, batch, into=known["old_logprobs"])
        if values is not None:
            batching.put(values, batch, into=known["values"])
        if run.reference is not None:
            with as_reference(run.reference) as reference:
                logprobs, _, _ = forward(reference, batch, cfg.temperature)
            batching.put(logprobs, batch, into=known["ref_logprobs"])
    distributed.all_reduce_sum([known[name] for name in names])
    return known


def assign_credit(cfg: Config, update: batching.RolloutBatch, known: Known) -> None:
    """From rewards to the advantage of each token; for PPO, what its value should have been."""
    algorithm, options = ALGORITHMS[cfg.algo], getattr(cfg, cfg.algo)
    rewards, turn_ids = update.rewards, update.turn_ids
    if cfg.overlong_buffer:
        late = common.overlong_penalty(update.lengths, cfg.max_tokens, cfg.overlong_buffer)
        rewards = rewards + late
    if cfg.kl_coef and cfg.kl_in == "reward":
        kl = common.kl_estimate(known["old_logprobs"], known["ref_logprobs"], cfg.kl_estimator)
        rewards = rewards - cfg.kl_coef * kl
    if cfg.credit == "episode":  # as if it were one turn, paid what the whole is worth
        rewards, turn_ids = rewards * cfg.gamma**turn_ids, torch.zeros_like(turn_ids)
    known["advantages"] = algorithm.compute_advantages(
        rewards, update.mask, turn_ids, update.group_ids, known.get("values"),
        update.episode_truncated, cfg.gamma, options,
    )  # fmt: skip
    if cfg.algo == "ppo":
        known["targets"] = ppo.value_targets(
            rewards,
            update.mask,
            turn_ids,
            known["values"],
            update.episode_truncated,
            cfg.gamma,
            options,
        )


def backward(
    cfg: Config, run: Run, update: batching.RolloutBatch, known: Known, rows: list[int], first: bool
) -> dict[str, float]:
    """The gradient of one step, from the rollouts `rows`. Returns the loss and sums over tokens."""
    algorithm, options = ALGORITHMS[cfg.algo], getattr(cfg, cfg.algo)
    sums: Any = Counter()  # its `update` adds up
    if first:
        known["old_logprobs"].zero_()  # the ranks' parts are added up below
    chosen = [sequence for sequence in update.sequences if sequence.rollout in set(rows)]
    for batch in micro_batches(run.policy, chosen):
        mask = batch.completion_mask
        logprobs, entropy, values = forward(run.policy, batch, cfg.temperature)
        if first:  # no step was taken yet: these are the weights that sampled
            batching.put(logprobs.detach(), batch, into=known["old_logprobs"])
        at = {name: batching.rows(tensor, batch) for name, tensor in known.items()}  # [b, T-1]
        old = at["old_logprobs"]
        ratio = common.sampler_ratio(old, at["sampler_logprobs"], mask, cfg.tis_level)
        weights = common.importance_weights(ratio, cfg.tis_cap, masked=cfg.tis_mode == "mask")
        extra = (values, at["values"], at["targets"]) if cfg.algo == "ppo" else ()
        loss, parts = algorithm.compute_loss(
            logprobs, old, at["advantages"], mask, weights, at["scale"], options, *extra
        )
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * (entropy * at["scale"]).sum()
        if "ref_logprobs" in at:
            kl = common.kl_estimate(logprobs, at["ref_logprobs"], cfg.kl_estimator)
            if cfg.kl_in == "loss":
                loss = loss + cfg.kl_coef * torch.where(mask, kl * at["scale"], 0.0).sum()
            parts["kl/reference"] = kl[mask].sum().item()
        run.optimizer.backward(loss)  # they add up; one micro-batch's graph is alive at a time
        parts |= {"loss": loss.item(), "tokens": batch.num_tokens}
        parts["policy/entropy"] = entropy.sum().item()
        parts |= metrics.weight_metrics(ratio[mask], cfg.tis_cap, cfg.tis_mode)
        sums.update(parts)
    if first:
        distributed.all_reduce_sum([known["old_logprobs"]])
    return distributed.all_reduce_metrics(sums)


def imitate(cfg: Config, run: Run, rollouts: list[Rollout]) -> float:
    """One supervised step on rollouts, demonstrated or our own. Returns the loss."""
    shown = batching.to_rollout_batch(rollouts)
    longest = batching.longest(shown.sequences)
    total = attempt(run, longest, partial(imitation, run, shown))
    run.optimizer.clip_and_step(cfg.max_grad_norm, math.isfinite(total))
    return total


def imitation(run: Run, shown: batching.RolloutBatch) -> float:
    """The gradient of a supervised step. Returns the loss."""
    total = 0.0
    for batch in micro_batches(run.policy, shown.sequences):
        logprobs, _, _ = forward(run.policy, batch, temperature=1.0)
        loss, _ = sft.compute_loss(logprobs, batch.completion_mask, shown.num_tokens)
        run.optimizer.backward(loss)
        total += loss.item()
    return distributed.all_reduce_metrics({"loss": total})["loss"]


def forward(
    policy: Policy, batch: batching.MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies of the sampled tokens, and values if there is a head: [b, T-1]."""
    hidden = policy.hidden_states(batch.input_ids, batch.tree)
    logprobs, entropy = common.token_logprobs(
        hidden, batch.input_ids, batch.completion_mask, policy.to_logits, temperature,
        policy.logits_chunk,
    )  # fmt: skip
    if policy.value_head is None:
        return logprobs, entropy, None
    return logprobs, entropy, policy.value_head(hidden[:, :-1].float()).squeeze(-1)


def micro_batches(policy: Policy, sequences: list) -> Iterator[batching.MicroBatch]:
    mine = distributed.shard(sequences, batching.length)
    return batching.micro_batches(
        mine, policy.micro_batch_tokens, policy.device, policy.packs_groups
    )


run_command = partial(cli.run, Config, main)  # what `python train.py ARGS` does with the ARGS

if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
