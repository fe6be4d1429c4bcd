"""The warnings of core/diagnostics.py: what each means, what to try, and what shows it.

A run reports them by name, --stop-on takes the names, and a report explains them. What makes all
other numbers meaningless comes first.
"""

# name: (what it means, what to try, the metric or picture of report.html that shows it)
WARNINGS = {
    "stale_weights": (
        "the sampler has older weights than the trainer, so the policy learns from what another one"
        " did",
        "looking at what the sync sends, adapters included, and whether the sampler's prefix cache "
        "is emptied after it; --sampler torch",
        "gap/canary",
    ),
    "sampler_gap": (
        "sampler and trainer give the same tokens different log-probs: their tokens, weights or"
        " precision differ",
        "--sampler torch, --dtype float32, --top-p 1 --top-k 0 to find which side is wrong",
        "gap/logprob_mean",
    ),
    "weights_at_cap": (
        "many tokens have an importance weight beyond its cap: sampler and trainer give them"
        " different probabilities",
        "the same --dtype on both sides (float32 to find out), --top-p 1 --top-k 0",
        "weights/capped",
    ),
    "adapters_unchanged": (
        "LoRA adapters are still exactly 0 after gradient steps: their layers do not learn",
        "--lora-rank 0, or another model: some of its layers do not take part in its output",
        "lora/zero_fraction",
    ),
    "loss_weight": (
        "the token weights of a gradient step add up to more than 1, so the gradient is larger",
        "one denominator for the whole step, computed before its micro-batches",
        "loss/weight",
    ),
    "tokens_left_out": (
        "the loss has other tokens than those that the policy sampled",
        "looking for the end token in the mask: where it is also the token of the padding, a mask"
        " made of ids loses it; make the mask of lengths",
        "tokens/trained",
    ),
    "mixed_groups": (
        "rollouts of different tasks are compared with each other as one group",
        "drawing a task once and repeating it for its group: 1 1 2 2, not 1 2 1 2; an environment"
        " whose reset(seed) depends on nothing else",
        "groups/openings",
    ),
    "wrong_direction": (
        "the update does not make the rollouts likelier that earned more than their group",
        "printing a few rollouts with their advantages: the sign of the loss, and the order of"
        " rollouts and rewards, such as after a shuffle or a gather",
        "update/direction",
    ),
    "reference_moves": (
        "the reference is as close to the policy as before training: it changes with it",
        "a reference that is a copy, made before the first step, and in no optimizer",
        "kl/reference",
    ),
    "value_head_frozen": (
        "the value head still predicts 0 everywhere: no step trains it",
        "an optimizer that is made after the value head and holds its weights; --ppo.value-coef",
        "value/loss",
    ),
    "same_tasks": (
        "every update has the same tasks",
        "a seed of tasks that depends on the update, and more data",
        "groups/repeated",
    ),
    "held_out_seen": (
        "tasks of the evaluation were trained on, so their accuracy also counts what was memorized",
        "other seeds or rows for --eval-env, and removing duplicates from the data",
        "Held-out accuracy",
    ),
    "no_reward": (
        "no rollout has earned a reward, so there is nothing that training could make likelier",
        "reading in report.html what the model answers and what the environment rewards; if right"
        " answers earn nothing, an error that the reward's code catches (signal.alarm raises in all"
        " threads but the main one); else a reward for a part of the task, easier tasks, a warm"
        " start with --sft-steps or --algo sdpo where there are demonstrations, or a better model",
        "Reward per rollout",
    ),
    "reward_without_accuracy": (
        "reward rises while accuracy falls: the policy exploits the reward or memorizes the tasks",
        "reading the rollouts with the highest return in report.html, a stricter reward, --kl-coef,"
        " more tasks",
        "reward/correct",
    ),
    "below_start": (
        "the policy has become clearly worse than it was before the first gradient step",
        "a lower --lr than {lr:g}, from an earlier checkpoint or from the start",
        "reward/mean",
    ),
    "memorized": (
        "the policy knows the demonstrations by heart but not how to solve other tasks",
        "demonstrations of more different tasks, or fewer --sft-steps",
        "sft/loss",
    ),
    "dead_groups": (
        "in most groups all rollouts have the same return, so their advantages and gradients are 0",
        "a warm start (--sft-steps) where the policy never succeeds, easier tasks, "
        "--curriculum 0.8, --filter-groups 3, a larger --group-size",
        "groups/zero_std_fraction",
    ),
    "kl_runaway": (
        "the policy changes too much in one update, or is too far from the reference policy",
        "a lower --lr, fewer --num-epochs, a narrower clip, a higher --kl-coef",
        "kl/approx",
    ),
    "never_stops": (
        "nearly every completion ends at the token limit, so hardly any is a finished answer",
        "a higher --max-tokens, a warm start with --sft-steps, or a model that ends its turns (a"
        " base model without a chat template often does not)",
        "length/hit_token_limit",
    ),
    "episodes_cut": (
        "many episodes are cut before their end, so their returns lack what would have followed",
        "a higher --max-turns or --max-model-len, or a higher limit of the environment",
        "episodes/truncated",
    ),
    "entropy_collapse": (
        "the policy is almost deterministic but does not solve its tasks: it no longer explores",
        "--entropy-coef 0.01, a lower --lr, a higher --temperature, or an earlier checkpoint",
        "policy/entropy",
    ),
}
