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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from algorithms.options import KL, GrpoOptions, Level, PpoOptions, ReinforceOptions
from core import cli


@dataclass(frozen=True)
class Config:
    """picoRL: reinforcement learning for language models."""

    algo: Literal["reinforce", "grpo", "ppo", "scratch"] = "grpo"  # scratch: your scratch.py
    model_id: str = "tiny"  # hub id or folder; tiny: a Qwen3 of 0.8M random weights, from the seed
    trust_remote_code: bool = False  # run the code in --model-id; only if you trust its author
    env: tuple[str, ...] = ("letter_counting",)  # name[:key=value,...]; several are mixed evenly
    eval_env: tuple[str, ...] = ()  # environments to evaluate on; none given: those of --env
    train_difficulty: int = 0  # difficulty, level, n_hops or length of --env; 0: as it says itself
    curriculum: float = 0.0  # share right at which tasks get harder, half: easier again; 0: off
    num_updates: int = 50  # updates of RL; 0: only the warm start and the evaluation
    num_prompts: int = 16  # P, tasks in an update
    group_size: int = 8  # G, rollouts of each task
    num_epochs: int = 1  # times that each update's rollouts are learnt from
    num_minibatches: int = 1  # parts of the rollouts in an epoch, each with a step of its own
    lr: float | None = None  # learning rate of RL; None: 1e-4 for tiny, 2e-5 with LoRA, 1e-6 else
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm; 0: never
    temperature: float = 1.0  # of sampling in training; evaluation is greedy
    top_p: float = 1.0  # sample from the likeliest tokens of this mass; 1: from all
    top_k: int = 0  # sample from so many of the likeliest tokens; 0: from all
    max_tokens: int | None = None  # longest completion, in tokens; None: 64 for tiny, 1024 else
    max_turns: int = 8  # turns after which an episode is cut
    env_timeout: float = (
        60.0  # seconds an environment may think; then its episode fails; 0: no limit
    )
    thinking: Literal["keep", "drop"] = "keep"  # drop: later turns don't see earlier <think> text
    max_model_len: int | None = None  # tokens of an episode; None: max_turns * max_tokens + 4096
    max_tokens_per_micro_batch: int | None = None  # None: 2048 for tiny, else as memory allows
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # auto: when memory asks for it
    filter_groups: int = 0  # rounds in which groups without spread in reward are replaced; 0: none
    overlong_buffer: int = 0  # tokens before --max-tokens over which a penalty grows to 1; 0: none
    mask_truncated: bool = False  # whether completions cut off at --max-tokens aren't learnt from
    gamma: float = 1.0  # what is paid a turn later counts so much; 1: as much
    credit: Literal["episode", "turn"] | None = None  # a turn for all, or its own; None: episode
    entropy_coef: float = 0.0  # weight of the entropy of each token in the loss; 0: none
    kl_coef: float = 0.0  # weight of the KL to the policy before RL or without adapters; 0: none
    kl_estimator: KL = "k2"  # k2 in the loss and k1 in the reward have the gradient of KL
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL is counted
    tis_cap: float = 2.0  # cap of the importance weights between sampler and trainer; 0: no weights
    tis_level: Level = "token"  # a weight a token; or the geometric mean over its sequence
    tis_mode: Literal["truncate", "mask"] = "truncate"  # mask: out of 1/cap..cap counts nothing
    sft_best: int = 0  # best rollouts, one a task, kept and imitated after each update; 0: none
    lora_rank: int = 0  # rank of LoRA adapters on all linear layers; 0: train all weights
    lora_alpha: float = 0.0  # adapters count alpha/rank; 0: alpha is twice the rank
    sft_steps: int | None = None  # warm-start steps on demonstrations; None: 800 for tiny, 0 else
    sft_batch_size: int = 32  # demonstrations in a warm-start step
    sft_hasty: float = 0.6  # share of demonstrations that only guess; 0: all are worked out
    sft_lr: float | None = None  # peak in the warm start; None: 2e-3 for tiny, 1e-4 LoRA, 1e-5 else
    sampler: Literal["auto", "torch", "vllm", "openai"] = "auto"  # auto: vllm on a GPU, or torch
    base_url: str = ""  # of the server that plays with --sampler openai, which evaluates only
    gpu_memory_utilization: float = 0.9  # share of the GPU in use while vLLM samples, at most
    device: str = "auto"  # cpu, cuda, cuda:N or mps; auto: the fastest there is
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on CUDA
    seed: int = 0  # decides everything: the same command with the same seed gives the same run
    eval_every: int = 10  # updates between evaluations; 0: only before and after
    eval_num_tasks: int = 256  # held-out tasks of an evaluation, always the same; 0: never evaluate
    cache: bool = True  # reuse what the same warm start of tiny made; --no-cache: make it anew
    microscope: int = 4096  # sampled tokens an update that report.html looks at one by one; 0: none
    stop_on: tuple[str, ...] = ()  # warnings at which the run is saved and stops; any: at each
    save_every: int = 20  # updates between checkpoints; 0: only at the end
    run_name: str = ""  # folder under runs/; empty: <algo>-<env>-<number>
    config: str = ""  # a config.yaml to start from; other flags win over it
    resume: str = ""  # a run folder to go on with; num_updates, save_every, .. may change
    track: Literal["none", "wandb", "tensorboard", "trackio"] = "none"  # send the metrics there too
    reinforce: ReinforceOptions = field(default_factory=ReinforceOptions)
    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    ppo: PpoOptions = field(default_factory=PpoOptions)


if __name__ == "__main__":
    cli.answer_at_once(Config, sys.argv[1:])  # --help, or a mistake: the next imports take seconds

import torch

from algorithms import common, grpo, ppo, reinforce, sft
from core import batching, distributed, exercises, metrics, selection, settings, tasks, warm_cache
from core.evaluation import evaluate
from core.interrupt import Stopped
from core.looks import look
from core.memory import attempt, try_longest
from core.model import Policy
from core.reference import as_reference
from core.run import Run, is_due, open_run
from core.sampler import SamplingParams
from core.types import Rollout

ALGORITHMS: dict[str, Any] = {"reinforce": reinforce, "grpo": grpo, "ppo": ppo}
Known = dict[str, torch.Tensor]  # what is known of each sampled token, by name; each [B, N]


def main(cfg: Config) -> int:
    """The whole run: warm start, then updates of RL with evaluations. Returns the exit code."""
    cfg = settings.resolve(cfg)
    cfg = replace(cfg, grpo=grpo.with_variant(cfg.grpo)) if cfg.algo == "grpo" else cfg
    settings.check(cfg, ALGORITHMS)
    train_envs = [tasks.with_difficulty(spec, cfg.train_difficulty) for spec in cfg.env]
    eval_envs = [tasks.with_difficulty(spec, 0) for spec in cfg.eval_env] or train_envs
    if cfg.sft_steps:
        tasks.check_demonstrations(train_envs)
    config = cli.to_dict(cfg, ALGORITHMS)

    with open_run(cfg, config, Path("runs"), settings.remarks(cfg)) as run:
        try:
            try_longest(cfg, run, partial(imitation, run))
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
            loss = imitate(cfg, run, run.told(run.batched_env.demonstrate(drawn)))
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
        good = run.told(fresh)
        kept += selection.with_spread(good) if cfg.filter_groups else good
    return played, kept or good


def learn(cfg: Config, run: Run, rollouts: list[Rollout], number: int) -> dict[str, float]:
    """One update from its rollouts: advantages, loss, backward, step. Returns its metrics."""
    if run.exercises is not None:
        return exercises.learn(run, rollouts, cfg.temperature, cfg.microscope)
    update = batching.to_update(rollouts)
    longest = batching.longest(update.sequences)
    known = attempt(run, longest, partial(score, cfg, run, update))
    assign_credit(cfg, update, known)
    learnt = update.mask & ~update.cut_off if cfg.mask_truncated else update.mask
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
        if cfg.algo == "ppo" and 0 < cfg.ppo.target_kl * found["tokens"] < found["kl/old_policy"]:
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
        look(run.policy, rollouts, update, known, cfg.microscope, now)
    totals |= {k: v / sums["tokens"] for k, v in sums.items() if k not in ("loss", "tokens")}
    totals |= metrics.token_metrics(known, update.mask)
    return {**totals, "tokens/trained": int(learnt.sum())}


def score(cfg: Config, run: Run, update: batching.Update) -> Known:
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
    distributed.add_up([known[name] for name in names])
    return known


def assign_credit(cfg: Config, update: batching.Update, known: Known) -> None:
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
        rewards, update.mask, turn_ids, update.group_ids, known.get("values"), update.truncated,
        cfg.gamma, options,
    )  # fmt: skip
    if cfg.algo == "ppo":
        known["targets"] = ppo.value_targets(
            rewards, update.mask, turn_ids, known["values"], update.truncated, cfg.gamma, options
        )


def backward(
    cfg: Config, run: Run, update: batching.Update, known: Known, rows: list[int], first: bool
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
        distributed.add_up([known["old_logprobs"]])
    return distributed.total(sums)


def imitate(cfg: Config, run: Run, rollouts: list[Rollout]) -> float:
    """One supervised step on rollouts, demonstrated or our own. Returns the loss."""
    shown = batching.to_update(rollouts)
    longest = batching.longest(shown.sequences)
    total = attempt(run, longest, partial(imitation, run, shown))
    run.optimizer.clip_and_step(cfg.max_grad_norm, math.isfinite(total))
    return total


def imitation(run: Run, shown: batching.Update) -> float:
    """The gradient of a supervised step. Returns the loss."""
    total = 0.0
    for batch in micro_batches(run.policy, shown.sequences):
        logprobs, _, _ = forward(run.policy, batch, temperature=1.0)
        loss, _ = sft.compute_loss(logprobs, batch.completion_mask, shown.num_tokens)
        run.optimizer.backward(loss)
        total += loss.item()
    return distributed.total({"loss": total})["loss"]


def forward(
    policy: Policy, batch: batching.Batch, temperature: float
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


def micro_batches(policy: Policy, sequences: list) -> Iterator[batching.Batch]:
    mine = distributed.share(sequences, batching.length)
    return batching.micro_batches(mine, policy.tokens_at_once, policy.device, policy.takes_trees)


run_command = partial(cli.run, Config, main)  # what `python train.py ARGS` does with the ARGS

if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
