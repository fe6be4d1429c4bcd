"""The afternoon, 3 of 9. Train a language model with reinforcement learning: the whole loop.

    python train.py                      # GRPO: a tiny model learns to count letters, on a laptop
    python train.py --algo ppo           # the same with PPO
    python train.py --model-id Qwen/Qwen3-4B-Instruct-2507 --lora-rank 32 --train-difficulty 6

A task is an environment and a seed. A rollout is one agent's episode of a task: one or more turns,
each a prompt and the completion that the policy (the model in training) sampled; its return R is
the sum of the rewards of its turns. The G rollouts of a task are a group; in a game with several
agents, each agent has a group of its own. An update samples G = 8 rollouts of each of P = 16 tasks,
and raises the probability of the tokens of those that earned more than their group:

    R      the return of each rollout
    A      (R - mean of its group) / (std of its group), for each token that was sampled in it
    ρ      π / π_old, for each token: its probability now and before the first step of the update
    w      π_old / π_sampler: the importance weight, as the sampler's kernels round differently
    loss   -Σ w min(ρ A, clip(ρ) A) / number of tokens
    step   AdamW on the gradient, clipped to norm 1, with a learning rate of 5e-5

This is GRPO (with DAPO's numbers: clip(ρ) is within 0.8 and 1.28, and all tokens count alike), one
step per update. So ρ is exactly 1, its clip does nothing, and the gradient of the loss is
-Σ w A ∇log π / number of tokens: REINFORCE, with the mean of the group as the baseline and the
group's standard deviation as the unit. A group whose returns are equal has A = 0, and its tokens
still count in the denominator. In the 25 updates of the default run, w is between 1 - 1e-5 and
1 + 1e-5, and the norm of the gradient is above 1 in one update.

A line that ends in `off:` and flags does nothing by default; these flags switch it on.

Shapes: the sampled tokens of an update have the indices 0 to S-1, rollout after rollout. A vector
[S], such as `batch.advantages`, has a value for each of them, and none for prompts and padding.
A forward pass works on a micro-batch, which fits into memory: sequences with prompts, in which n
of the tokens were sampled. The loss reads vectors [n], such as `tokens.logprobs`.
"""

import math
import sys
from functools import partial

from core.config import Config
from core.terminal import cli

if __name__ == "__main__":
    cli.answer_at_once(sys.argv[1:])  # --help and errors, before the slow imports

from algorithms import off_policy
from algorithms.tokens import Tokens, token_weights
from core.batching import (
    Batch,
    MicroBatch,
    add_advantages,
    micro_batches,
    minibatches,
    shape_rewards,
    to_tokens,
)
from core.loop import notebook
from core.loop.before import begin
from core.loop.off import regularizers, score_first
from core.loop.open import open_run
from core.loop.play import play
from core.loop.run import Run
from core.scoring import predict


def main(cfg: Config) -> int:
    """Trains. Returns the exit code; raises UsageError, Fault or Stopped with a line about it."""
    with open_run(cfg) as run:  # settings, policy, optimizer, sampler, environments, log
        begin(run)  # off: --sft-steps, a warm start on demonstrations; --kl-coef, its reference
        cfg, policy, optimizer, algorithm = run.cfg, run.policy, run.optimizer, run.algorithm
        for update, stats in run.updates():  # evaluates before update 1; yields 1, 2, ..
            # 1. Sample G rollouts for each of P tasks; the environment rewards each turn
            sampled, selected = play(run, update)  # all; those whose environment did not fail
            batch = to_tokens(selected)  # their S sampled tokens
            score_first(run, batch)  # off: π_old before several steps; values; --kl-coef

            # 2. Compare them: rewards to advantages [S], and what else compute_loss needs
            shape_rewards(cfg, batch)  # with --gamma (1) and --mask-truncated-completions (no)
            add_advantages(batch, algorithm.compute_advantages(batch, cfg.options))

            # 3. A gradient step on all of them: --num-epochs (1) times --num-minibatches (1)
            for epoch, rollouts in minibatches(cfg, len(selected), update):
                # the loss of a step is a sum over tokens, weighted by default by 1 / their number,
                # so the gradients of its micro-batches add up to the gradient of the step
                batch.token_weights = token_weights(
                    batch, rollouts, cfg.options.aggregation, cfg.max_tokens
                )
                for micro in micro_batches(policy, batch, rollouts):
                    tokens = forward(run, batch, micro)  # [n]: log π, and all of the above
                    loss, metrics = algorithm.compute_loss(tokens, cfg.options)
                    loss = loss + regularizers(run, tokens)  # off: --kl-coef, --entropy-coef
                    # loss.backward(), but not through the model if all A of a micro-batch are 0
                    optimizer.backward(loss, tokens.outputs)
                    stats.add(tokens, loss, metrics)
                optimizer.sum_gradients()  # off: over the processes of torchrun
                stats.end_minibatch(epoch)
                if not run.scores_first:  # one step: π_old is the π of its forward pass
                    batch.sum_over_ranks("old_logprobs")  # off: torchrun
                if 0 < cfg.options.target_kl < stats.approx_kl:  # off: --ppo.target-kl
                    optimizer.zero_grad()
                    break
                # clip_grad_norm_, step, zero_grad; no step if the gradient is 0 or not finite
                stats.grad_norm, stepped = optimizer.clip_and_step(
                    cfg.max_grad_norm,
                    finite_loss=math.isfinite(stats.loss),
                    only_value_head=update <= cfg.options.value_warmup,  # off: --ppo.value-warmup
                )
                stats.num_steps += stepped

            # 4. The sampler shares the weights, so it has the new ones. Evaluation, log, checkpoint
            run.sync()  # off: --sampler server, which is sent the new adapters
            run.finish_update(update, sampled, batch, stats)
        return 0


def forward(run: Run, batch: Batch, micro: MicroBatch) -> Tokens:
    """The n tokens of a micro-batch, with the log-probs of the current policy, with gradients.

    The hidden state of the token before x predicts x: log π(x) = log_softmax(logits)[x], where
    logits = W state / temperature (core/scoring.py).
    """
    cfg = run.cfg
    outputs = predict(run.policy, micro, cfg.temperature, cfg.entropy_coef > 0, run.divergence)
    if not run.scores_first:  # there is one step, and it has not been taken: π_old is π
        batch.write("old_logprobs", micro.indices, outputs["logprobs"].detach())
    tokens = batch[micro.indices].to(run.policy.device)
    tokens.add(outputs)  # logprobs, entropy; values of PPO
    tokens.outputs = [*outputs.values()]  # the gradient reaches the model through these
    tokens.sampler_ratio = off_policy.sampler_ratio(tokens, cfg.tis_level)  # π_old / π_sampler
    tokens.importance_weights = off_policy.importance_weights(  # w: that ratio, at most 2
        tokens.sampler_ratio, cfg.tis_cap, cfg.tis_mode
    )
    return tokens


run = partial(notebook.run, main)  # in a notebook: train.run(Config(num_updates=5), env=MyEnv)
execute = partial(cli.execute, main)  # what `python train.py ARGS` does; returns the exit code

if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
