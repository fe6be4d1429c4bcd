"""Train a language model by reinforcement learning: the whole loop, top to bottom.

    python train.py                      # the tiny policy learns to count letters, on a laptop
    python train.py --algo ppo           # the same with PPO
    python train.py --model-id Qwen/Qwen3-4B-Instruct-2507 --lora-rank 32 --train-difficulty 6

An update: P tasks, G rollouts of each; what was sampled is paid, compared and learnt from.
"""

import importlib.util
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.utils import clip_grad_norm_

from algorithms import common, grpo, ppo, reinforce, sft
from algorithms.grpo import Options as GrpoOptions
from algorithms.ppo import Options as PpoOptions
from algorithms.reinforce import Options as ReinforceOptions
from core import batching, checkpoint, cli, journal, metrics, tasks
from core.batched_env import BatchedEnv, without_failed
from core.console import Display
from core.interrupt import Interrupt, Stopped
from core.model import Policy, load_policy
from core.nanollm import make_sampler
from core.openai_sampler import OpenAISampler
from core.optimizer import MasterAdamW, make_optimizer
from core.sampler import Sampler, SamplingParams
from core.types import Rollout, UsageError

ALGORITHMS: dict[str, Any] = {"reinforce": reinforce, "grpo": grpo, "ppo": ppo}
RUNS = Path("runs")
SKIPS_IN_A_ROW = 10  # so many updates without a finite loss, and the run stops


@dataclass(frozen=True)
class Config:
    """picoRL: reinforcement learning for language models."""

    algo: Literal["reinforce", "grpo", "ppo"] = "grpo"  # its own options are below, under its name
    model_id: str = "tiny"  # hub id or folder; tiny: a Qwen3 of 0.8M random weights, from the seed
    env: tuple[str, ...] = ("letter_counting",)  # name[:key=value,...]; several are mixed evenly
    eval_env: tuple[str, ...] = ()  # environments to evaluate on; none given: those of --env
    train_difficulty: int = 0  # `difficulty` of the environments that have it; 0: as --env says
    num_updates: int = 50  # updates of RL; 0: only the warm start and the evaluation
    num_prompts: int = 16  # P, tasks in an update
    group_size: int = 8  # G, rollouts of each task
    num_epochs: int = 1  # optimiser steps on each update's rollouts
    lr: float | None = None  # learning rate of RL; None: 1e-4 for tiny, 2e-5 with LoRA, 1e-6 else
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm; 0: never
    temperature: float = 1.0  # of sampling in training; evaluation is greedy
    top_p: float = 1.0  # sample from the likeliest tokens of this mass; 1: from all
    top_k: int = 0  # sample from so many of the likeliest tokens; 0: from all
    max_tokens: int | None = None  # longest completion, in tokens; None: 64 for tiny, 1024 else
    max_turns: int = 8  # turns after which an episode is cut
    thinking: Literal["keep", "drop"] = "keep"  # drop: later turns don't see earlier <think> text
    max_model_len: int | None = None  # tokens of an episode; None: max_turns * max_tokens + 4096
    max_tokens_per_micro_batch: int | None = None  # padded ones; None: 2048 for tiny, 8192 else
    tis_cap: float = 2.0  # cap of the importance weights between sampler and trainer; 0: no weights
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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA, else float32
    seed: int = 0  # decides everything: the same command with the same seed gives the same run
    eval_every: int = 10  # updates between evaluations; 0: only before and after
    eval_num_tasks: int = 256  # held-out tasks of an evaluation, always the same; 0: never evaluate
    save_every: int = 20  # updates between checkpoints; 0: only at the end
    run_name: str = ""  # folder under runs/; empty: <algo>-<env>-<number>
    config: str = ""  # a config.yaml to start from; other flags win over it
    resume: str = ""  # a run folder to go on with; only num_updates, save_every, track may change
    track: Literal["none", "wandb", "tensorboard", "trackio"] = "none"  # send the metrics there too
    reinforce: ReinforceOptions = field(default_factory=ReinforceOptions)
    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    ppo: PpoOptions = field(default_factory=PpoOptions)


@dataclass
class Run:
    """What the loop stands on."""

    folder: Path
    policy: Policy
    optimizer: MasterAdamW
    batched_env: BatchedEnv  # plays
    sampler: Sampler  # writes
    log: journal.Journal
    display: Display
    stop: Interrupt
    progress: dict[str, int]  # what a checkpoint remembers

    def save(self) -> None:
        checkpoint.save_checkpoint(self.folder, self.policy, self.optimizer, self.progress)


def main(cfg: Config) -> int:
    """The whole run: warm start, then updates of RL with evaluations. Returns the exit code."""
    # --- refuse what can be refused before anything is written ----------------------------------
    cfg = check(resolve(cfg))
    train_envs = [tasks.with_difficulty(spec, cfg.train_difficulty) for spec in cfg.env]
    eval_envs = [tasks.with_difficulty(spec, 0) for spec in cfg.eval_env] or train_envs
    if cfg.sft_steps:
        tasks.check_demonstrations(train_envs)
    stem = f"{cfg.algo}-{'+'.join(spec.partition(':')[0] for spec in cfg.env)}"
    folder = Path(cfg.resume) if cfg.resume else journal.new_folder(RUNS, cfg.run_name, stem)
    found = checkpoint.find_checkpoint(folder) if cfg.resume else checkpoint.NEW_RUN
    served = cfg.sampler == "openai"  # then the model is elsewhere, and tiny its tokenizer here
    policy = load_policy(
        "tiny" if served else cfg.model_id, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed,
        lora_rank=cfg.lora_rank, lora_alpha=cfg.lora_alpha, value_head=cfg.algo == "ppo",
        max_length=cfg.max_model_len, tiny_folder=folder / "base",
    )  # fmt: skip
    in_warm_start = found.progress["sft_step"] < cfg.sft_steps
    optimizer = make_optimizer(policy, cfg.sft_lr if in_warm_start else cfg.lr, cfg.ppo.value_lr)
    if found.folder:
        checkpoint.load_checkpoint(found.folder, policy, optimizer)
    sampler: Sampler = (
        OpenAISampler(policy, cfg.base_url, cfg.model_id) if served else
        make_sampler(cfg.sampler, policy, cfg.gpu_memory_utilization, optimizer.memory_to_come())
    )  # fmt: skip
    journal.rewind(folder, found.progress)
    settings = cli.to_dict(cfg, ALGORITHMS)
    journal.create_run(folder, settings)

    with (
        closing(sampler),
        Interrupt() as stop,
        journal.Journal(folder, settings, cfg.track) as log,
        Display(f"picoRL · {cfg.algo} · {' '.join(train_envs)} · {policy.size()}") as display,
    ):
        batched_env = BatchedEnv(policy, cfg.max_turns, drop_thinking=cfg.thinking == "drop")
        run = Run(folder, policy, optimizer, batched_env, sampler, log, display, stop,
                  dict(found.progress))  # fmt: skip
        for remark in [*found.remarks, *filter(None, [sampler.remark])]:
            display.say(remark)
        if cfg.top_p < 1 or cfg.top_k > 0:
            display.say("with --top-p or --top-k the sampler's log-probs are renormalised over the "
                        "tokens left, the trainer's are not: expect a gap")  # fmt: skip
        try:
            if in_warm_start:
                warm_start(cfg, run, train_envs)
            code = 0 if reinforce_loop(cfg, run, train_envs, eval_envs) else 1
        except Stopped:
            run.save()
            display.say(f"stopped and saved; go on with: python train.py --resume {folder}")
            code = 130
    journal.write_pages(folder, settings)
    if code == 0:
        if not served:
            checkpoint.export_model(folder, policy)
        print("\n".join(journal.summary(folder, settings)))
    return code


def warm_start(cfg: Config, run: Run, envs: list[str]) -> None:
    """Supervised steps on demonstrations: a share of them hasty guesses, the rest worked out."""
    with run.display.phase("warm start", cfg.sft_steps, run.progress["sft_step"]) as phase:
        for step in range(run.progress["sft_step"], cfg.sft_steps):
            run.stop.check()
            for group in run.optimizer.param_groups:
                group["lr"] = cfg.sft_lr * sft.schedule(step, cfg.sft_steps)
            drawn = tasks.demo_tasks(envs, cfg.seed, step, cfg.sft_batch_size, cfg.sft_hasty)
            shown = batching.to_update(run.batched_env.demonstrate(drawn))
            total = 0.0
            for batch in micro_batches(cfg, run.policy, shown):
                logprobs, _, _ = forward(run.policy, batch, temperature=1.0)
                loss, _ = sft.compute_loss(logprobs, batch.completion_mask, shown.num_tokens)
                loss.backward()
                total += loss.item()
            apply_gradients(cfg, run.optimizer, finite=math.isfinite(total))
            run.progress["sft_step"] = step + 1
            phase.advance(f"loss {total:.3f}")
            if is_due(step + 1, 20, cfg.sft_steps):
                run.log.log({"sft_step": step + 1, "sft/loss": total, "time/sft_s": phase.lap()})
    run.optimizer.release()  # RL begins with fresh moments
    run.optimizer = make_optimizer(run.policy, cfg.lr, cfg.ppo.value_lr)
    run.sampler.sync()


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
            run.log.log(record)
            run.progress["update"] = update
            in_a_row = run.progress["skipped_in_a_row"] + 1 if record.get("update/skipped") else 0
            run.progress["skipped_in_a_row"] = in_a_row
            if in_a_row == SKIPS_IN_A_ROW:
                run.display.say(
                    f"{SKIPS_IN_A_ROW} updates in a row without a finite loss: stopped, the last "
                    f"good checkpoint kept. Try a lower --lr than {cfg.lr:g}"
                )
                return False
            if not in_a_row and is_due(update, cfg.save_every, cfg.num_updates):
                run.save()
    return True


def play_and_learn(cfg: Config, run: Run, envs: list[str], update: int) -> dict[str, Any]:
    """One update: P tasks, G rollouts of each in one batch; then one lesson from all of them."""
    started = time.perf_counter()
    drawn = tasks.train_tasks(envs, cfg.seed, update, cfg.num_prompts, cfg.group_size)
    seed = cfg.seed * 1_000_003 + update
    params = SamplingParams(cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.top_k, seed)
    with run.display.phase("rollouts", cfg.max_tokens) as phase, run.sampler:
        watch = phase.tick_and(run.stop.check)
        played = run.batched_env.collect(drawn, run.sampler, params, watch)
    rollouts, remarks = without_failed(played)
    for remark in remarks:
        run.display.say(remark)
    sampled = time.perf_counter()
    # from here on the update is finished, whatever signal comes
    record: dict[str, Any] = metrics.rollout_metrics(rollouts)
    record["episodes/failed"] = 1 - len(rollouts) / len(played)
    record |= learn(cfg, run.policy, run.optimizer, rollouts)
    run.sampler.sync()
    record["time/rollout_s"] = sampled - started
    record["time/train_s"] = time.perf_counter() - sampled
    run.log.log_rollouts("train", update, played)
    run.display.update(update, record, rollouts)
    return record


def learn(
    cfg: Config, policy: Policy, optimizer: MasterAdamW, rollouts: list[Rollout]
) -> dict[str, float]:
    """One update from its rollouts: advantages, loss, backward, step. Returns its metrics."""
    algorithm, options = ALGORITHMS[cfg.algo], getattr(cfg, cfg.algo)
    update = batching.to_update(rollouts)
    old_logprobs = torch.zeros_like(update.rewards)  # [B, N], as all that is known of a token
    values = targets = None
    if cfg.algo == "ppo":
        values = torch.zeros_like(update.rewards)
        with torch.no_grad():
            for batch in micro_batches(cfg, policy, update):
                batching.put(forward(policy, batch, cfg.temperature)[2], batch, into=values)
        targets = ppo.value_targets(update.rewards, update.mask, values, update.truncated, options)
    advantages = algorithm.compute_advantages(
        update.rewards, update.mask, update.group_ids, values, update.truncated, options
    )
    for epoch in range(cfg.num_epochs):
        totals: dict[str, float] = defaultdict(float)
        for batch in micro_batches(cfg, policy, update):
            logprobs, entropy, now_values = forward(policy, batch, cfg.temperature)
            if epoch == 0:  # no step was taken yet: these are the weights that sampled
                batching.put(logprobs.detach(), batch, into=old_logprobs)
            old = batching.rows(old_logprobs, batch)
            weights = common.importance_weights(
                old, batching.rows(update.sampler_logprobs, batch), cfg.tis_cap
            )
            extra: tuple[torch.Tensor, ...] = ()
            if cfg.algo == "ppo":
                extra = (now_values, batching.rows(values, batch), batching.rows(targets, batch))
            loss, parts = algorithm.compute_loss(
                logprobs, old, batching.rows(advantages, batch), batch.completion_mask, weights,
                options, update.num_tokens, *extra,
            )  # fmt: skip
            loss.backward()  # gradients add up; the graph of one micro-batch is alive at a time
            parts |= {"loss": loss.item(), "tokens/trained": batch.num_tokens}
            parts["policy/entropy"] = entropy.sum().item() / update.num_tokens
            for name, value in parts.items():
                totals[name] += value
        grad_norm, stepped = apply_gradients(cfg, optimizer, finite=math.isfinite(totals["loss"]))
        totals |= {"grad/norm": grad_norm, "update/skipped": float(not stepped)}
        if not stepped:
            break
    if values is not None:
        totals |= metrics.value_metrics(targets[update.mask], values[update.mask])
    totals |= metrics.gap_metrics(old_logprobs, update.sampler_logprobs, update.mask, cfg.tis_cap)
    return {**totals, "tokens/sampled": update.num_tokens}


def forward(
    policy: Policy, batch: batching.Batch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies of the sampled tokens, and values if there is a head: [b, T-1]."""
    hidden = policy.hidden_states(batch.input_ids)
    logprobs, entropy = common.token_logprobs(
        hidden, batch.input_ids, batch.completion_mask, policy.to_logits, temperature
    )
    if policy.value_head is None:
        return logprobs, entropy, None
    return logprobs, entropy, policy.value_head(hidden[:, :-1].float()).squeeze(-1)


def micro_batches(cfg: Config, policy: Policy, update: batching.Update) -> Iterator[batching.Batch]:
    return batching.micro_batches(update.sequences, cfg.max_tokens_per_micro_batch, policy.device)


def apply_gradients(cfg: Config, optimizer: MasterAdamW, finite: bool) -> tuple[float, bool]:
    """Clip and step, unless the loss or the gradient isn't finite. Returns (norm, stepped)."""
    norm = float(clip_grad_norm_(optimizer.masters, cfg.max_grad_norm or math.inf))
    stepped = finite and math.isfinite(norm)
    if stepped:
        optimizer.step()
    optimizer.zero_grad()
    return norm, stepped


def evaluate(cfg: Config, run: Run, held_out: list[tasks.Task], update: int) -> dict[str, float]:
    """Play the held-out tasks greedily; log the first ones; return accuracy with its interval."""
    started = time.perf_counter()
    params = SamplingParams(cfg.max_tokens, temperature=0.0)
    with run.display.phase("evaluation", cfg.max_tokens) as phase, run.sampler:
        watch = phase.tick_and(lambda: phase.show(run.sampler.latest))
        rollouts = run.batched_env.collect(held_out, run.sampler, params, watch)
    run.log.log_rollouts("eval", update, rollouts[:8])  # enough to see
    found = metrics.eval_metrics(rollouts)
    for env in dict.fromkeys(task.env for task in held_out):
        line = metrics.describe(env, found)
        run.display.say(f"held-out accuracy at update {update}: {line}  {env}")
    return found | {"time/eval_s": time.perf_counter() - started}


def resolve(cfg: Config) -> Config:
    """Fill in what was left to the kind of model."""
    tiny, lora = cfg.model_id == "tiny", cfg.lora_rank > 0
    defaults: dict[str, Any] = {
        "lr": 1e-4 if tiny else 2e-5 if lora else 1e-6,
        "sft_lr": 2e-3 if tiny else 1e-4 if lora else 1e-5,
        "sft_steps": 800 if tiny and cfg.sampler != "openai" else 0,
        "max_tokens": 64 if tiny else 1024,
        "max_tokens_per_micro_batch": 2048 if tiny else 8192,
    }
    cfg = replace(cfg, **{k: v for k, v in defaults.items() if getattr(cfg, k) is None})
    longest = cfg.max_turns * cfg.max_tokens + 4096  # what is written, and what is read
    return replace(cfg, max_model_len=longest) if cfg.max_model_len is None else cfg


def check(cfg: Config) -> Config:
    """Raise UsageError for the first setting that can't be meant; return `cfg` otherwise."""
    positive = """num_prompts group_size num_epochs lr temperature max_tokens max_turns
        max_tokens_per_micro_batch max_model_len sft_batch_size sft_lr top_p
        gpu_memory_utilization""".split()
    not_negative = """num_updates max_grad_norm tis_cap lora_rank lora_alpha sft_steps seed
        train_difficulty eval_every eval_num_tasks save_every top_k""".split()
    shares = "sft_hasty top_p gpu_memory_utilization".split()
    cli.check_ranges(cfg, positive, not_negative, shares)
    compares = cfg.algo == "grpo" or cfg.reinforce.baseline == "leave_one_out"
    if compares and cfg.group_size < 2:
        raise UsageError("--group-size 1 has nothing to compare a rollout with; take 2 or more")
    if not cfg.env:
        raise UsageError("--env names no environment")
    for name in ALGORITHMS:
        options = getattr(cfg, name)
        if name != cfg.algo and options != type(options)():
            raise UsageError(f"--{name}.* options have no effect with --algo {cfg.algo}")
    if cfg.sampler == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UsageError('--sampler vllm: not installed; pip install -e ".[vllm]"')
    if cfg.sampler == "openai" and (cfg.num_updates or cfg.sft_steps or not cfg.base_url):
        raise UsageError("--sampler openai evaluates only: --num-updates 0 --base-url http://..")
    if cfg.track != "none" and importlib.util.find_spec(cfg.track) is None:
        raise UsageError(f'--track {cfg.track}: not installed; pip install -e ".[track]"')
    return cfg


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many steps is due; always at 0 and at the last step."""
    return step in (0, last) or (every > 0 and step % every == 0)


def run_command(args: list[str]) -> int:
    """What `python train.py ARGS` does; bad input is one line and exit code 2."""
    try:
        return main(cli.parse(Config, args))
    except UsageError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there was anything to save, or for the second time
        return 130


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
