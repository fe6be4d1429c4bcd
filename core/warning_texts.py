"""The warnings of core/diagnostics.py: what each means, what to try, and what shows it.

A run reports them by name, and a report explains them. What makes all
other numbers meaningless comes first.
"""

# name: (what it means, what to try, the metric or picture of report.html that shows it)
WARNINGS = {
    "no_movement": (
        "groups have different returns, but updates do not change the policy",
        "whether the loss has a gradient; which weights the optimizer holds (those of the model"
        " that samples, and made after its adapters), and what lr a scheduler gives them",
        "update/moved",
    ),
    "answers_unchanged": (
        "evaluations answer exactly as before the first update, although updates move the policy",
        "which weights the evaluation samples with, and whether its answers come from a cache",
        "Held-out accuracy",
    ),
    "demonstrations_wrong": (
        "the environment's reward calls its own demonstrations wrong, so right answers are "
        "punished",
        "playing that task by hand (python -m environments play SPEC): how the answer is read, "
        "and how it is compared",
        "reward/correct",
    ),
    "prompts_differ": (
        "the token ids of a prompt are not what the chat template writes for its messages",
        "printing the decoded ids beside tokenizer.apply_chat_template(messages, "
        "tokenize=False, add_generation_prompt=True): a cut, a lost system message, a second "
        "token that begins the text",
        "groups/prompts_differ",
    ),
    "reward_differs": (
        "equal answers to one prompt earn different rewards",
        "the order of answers and rewards (a shuffle, a gather, a pool of workers), what an "
        "environment keeps from the episode before, a time limit; a reward that draws at "
        "random is only noisy",
        "reward/unequal",
    ),
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
        "--sampler torch, --dtype float32, --temperature 1 --top-p 1 --top-k 0, one at a time, "
        "to find which side is wrong",
        "gap/logprob_mean",
    ),
    "weights_at_cap": (
        "many tokens have an importance weight beyond its cap: sampler and trainer give them"
        " different probabilities",
        "the same --dtype on both sides (float32 to find out), --top-p 1 --top-k 0",
        "weights/capped",
    ),
    "draws_otherwise": (
        "the sampler draws from another distribution than the one whose log-probs both sides "
        "report",
        "what the sampler sets by itself: temperature, top-p, top-k or a repetition "
        "penalty, such as from a generation_config.json",
        "gap/surprise",
    ),
    "equal_answers": (
        "a group has far more or fewer equal answers than their probabilities say",
        "the seeds of the sampler: one for each rollout, not one for all of a group, a worker "
        "or an update",
        "groups/equal_answers",
    ),
    "no_end_token": (
        "completions that are said to have stopped do not end with an end token",
        "whether the sampler returns the end token, and calls answers that the limit cut "
        "'stop': the end is not trained then, or a cut answer counts as a whole one",
        "length/no_end",
    ),
    "weights_unchanged": (
        "steps leave some trained weights exactly as they were",
        "which weights have no gradient: frozen or detached layers, gradient checkpointing, "
        "weights that the optimizer does not hold, a layer that takes no part in the output",
        "update/unchanged",
    ),
    "step_size": (
        "the steps of AdamW are not of the size of the learning rate",
        "the lr of the optimizer's groups in this update (a scheduler, a division by "
        "accumulation steps), and whether bfloat16 weights have float32 masters",
        "update/step_size",
    ),
    "passes_lost": (
        "the gradient of a step is not the sum of what its backward passes gave",
        "where gradients are dropped or scaled between the passes: zero_grad before the step, "
        "a mean over micro-batches or ranks in place of a sum",
        "grad/passes",
    ),
    "loss_weight": (
        "the token weights of a gradient step do not add up to 1, so the gradient has another size",
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
    "advantages_uneven": (
        "the advantages of a group do not add up to 0, so its baseline is not its own mean",
        "which rollouts the baseline is the mean of: those of one prompt, in the order of the "
        "advantages",
        "groups/advantage_sum",
    ),
    "values_differ": (
        "the value head gives one prompt different values",
        "which state it reads for a token: the one before it, without anything that was "
        "sampled after",
        "value/spread",
    ),
    "ratio_stays_one": (
        "the policy ratio is 1 after the first gradient step, so nothing is clipped",
        "where old log-probs are computed: once, before the first step of an update",
        "kl/approx",
    ),
    "reference_moves": (
        "the reference is as close to the policy as before training: it changes with it",
        "a reference that is a copy, made before the first step, and in no optimizer",
        "kl/reference",
    ),
    "reference_differs": (
        "the reference is another policy than the one that training began with",
        "which weights it has (a copy after the warm start), and whether dropout, temperature "
        "and adapters are those of the policy",
        "kl/reference",
    ),
    "same_tasks": (
        "every update has the same tasks",
        "a seed of tasks that depends on the update, and more data",
        "groups/repeated",
    ),
    "tasks_missing": (
        "an evaluation covers fewer tasks than were asked for",
        "the loop over the held-out tasks: one batch of them, or seeds that repeat a task",
        "Held-out accuracy",
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
