"""The faults of the drill: changes of drill_loop.py that raise no error, as people have made them.

Each names the function that it is in, where it was reported, what is wrong, the facts of
drill_facts.py that it breaks, and its change: old text, new text, and so on.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    function: str
    source: str  # a report of it: repository #issue, or a paper
    cause: str
    breaks: tuple[str, ...]  # names of facts
    change: tuple[str, ...]  # old, new, old, new, ..


FAULTS = {
    # the reward
    "first_number": Fault(
        "reward", "TinyZero #120",
        "The first number of the text counts as the answer. Who spells and counts writes 1 first.",
        ("answer_is_between_tags",),
        ('r"<answer>(\\d+)</answer>"', 'r"\\d+"', "if len(found) != 1:", "if not found:"),
    ),
    "zero_is_no_answer": Fault(
        "reward", "evalscope #1753",
        "The answer 0 is false in Python, so it counts as no answer.",
        ("zero_is_an_answer",),
        ("    if len(found) != 1:", "    number = len(found) == 1 and int(found[0])\n"
         "    if not number:", "if int(found[0]) == right", "if number == right"),
    ),
    # prompts
    "padded_on_the_right": Fault(
        "encode", "DeepSpeedExamples #637",
        "Prompts are padded on the right: the first token of an answer follows the padding.",
        ("prompts_end_together",),
        ('(PRETRAINED, padding_side="left")', "(PRETRAINED)"),
    ),
    "turn_not_opened": Fault(
        "encode", "smolagents #993, TRL #4361",
        "The prompt ends after the user's turn; the model was trained to answer in its own.",
        ("prompts_open_the_turn",),
        ("tokenize=False, add_generation_prompt=True)", "tokenize=False)"),
    ),
    # sampling
    "drawn_from_logits": Fault(
        "sample", "flow_matching #46, gpt-2 #51",
        "multinomial gets logits, whose negative ones were cut off as it complained: all but the "
        "likeliest tokens are drawn far too often.",
        ("draws_are_the_policys",),
        ("p = logits.softmax(-1)", "p = logits.clamp(min=1e-6)"),
    ),
    "temperature_in_training_alone": Fault(
        "sample", "tinker-feedback #148",
        "Answers are drawn at temperature 1, and trained as if drawn at TEMPERATURE.",
        ("one_temperature",),
        ("model(last, attention, None, cache).logits[:, -1] / TEMPERATURE",
         "model(last, attention, None, cache).logits[:, -1]"),
    ),
    "end_left_out": Fault(
        "sample", "TRL #1623, #4974",
        "The mask ends before END: the policy samples that token, but does not learn to stop.",
        ("end_is_trained",),
        ("(ends.cumsum(1) - ends == 0)", "(ends.cumsum(1) == 0)"),
    ),
    "trained_after_the_end": Fault(
        "sample", "MemGen #33",
        "What is sampled after END, while other rows go on, counts as part of the answer.",
        ("nothing_after_the_end",),
        ("return tokens, (ends.cumsum(1) - ends == 0).long()",
         "return tokens, (ends.cumsum(1) - ends < MAX_TOKENS).long()"),
    ),
    # log-probs
    "temperature_in_sampling_alone": Fault(
        "token_logprobs", "TRL #3029",
        "The log-probs are those at temperature 1; the answers were drawn at TEMPERATURE.",
        ("one_temperature",),
        ("[:, -n - 1 : -1] / TEMPERATURE", "[:, -n - 1 : -1]"),
    ),
    "not_shifted": Fault(
        "token_logprobs", "mlx-lm-lora #80, prime-rl #1525",
        "Each token is looked up in the logits at its own position, which have seen it.",
        ("logprobs_are_of_the_next_token",),
        ("[:, -n - 1 : -1]", "[:, -n:]"),
    ),
    "padding_is_seen": Fault(
        "token_logprobs", "TRL #2708",
        "The attention mask is not passed on: the trainer's model reads the padding as text.",
        ("padding_is_not_seen",),
        ("model(ids, attention_mask=attention).logits[:, -n", "model(ids).logits[:, -n"),
    ),
    # advantages
    "deviation_of_the_batch": Fault(
        "group_advantages", "flow_grpo #46",
        "Divided by the standard deviation of the whole batch: groups whose rewards differ little "
        "hardly count.",
        ("unit_deviation", "own_group_alone"),
        ("groups.std(1, keepdim=True)", "groups.std()"),
    ),
    "mean_of_the_batch": Fault(
        "group_advantages", "grpo-flat #2",
        "Compared with the mean of the whole batch: an easy task's answers are all good.",
        ("group_adds_up_to_zero", "own_group_alone", "equal_rewards_teach_nothing"),
        ("groups.mean(1, keepdim=True)", "groups.mean()"),
    ),
    "groups_cut_across": Fault(
        "group_advantages", "d1 #19",
        "Cut into G groups of P answers in place of P groups of G: answers to different questions "
        "are compared.",
        ("group_adds_up_to_zero", "own_group_alone", "unit_deviation",
         "equal_rewards_teach_nothing"),
        ("rewards.view(-1, G)  # [P, G]", "rewards.view(G, -1)"),
    ),
    "no_baseline": Fault(
        "group_advantages", "rllm #776",
        "The mean is not subtracted: every answer with a reward is made likelier.",
        ("group_adds_up_to_zero", "equal_rewards_teach_nothing"),
        ("mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)",
         "std = groups.std(1, keepdim=True)",
         "((groups - mean) / (std + 1e-4))", "(groups / (std + 1e-4))"),
    ),
    # the loss
    "mean_of_row_means": Fault(
        "compute_loss", "Dr. GRPO, arXiv:2503.20783",
        "The mean of each row comes first, so a token of a long answer counts less.",
        ("tokens_count_alike",),
        ("((BETA * kl - surrogate) * mask).sum() / mask.sum()",
         "(((BETA * kl - surrogate) * mask).sum(1) / mask.sum(1)).mean()"),
    ),
    "mean_with_padding": Fault(
        "compute_loss", "SkyRL #462",
        "The mean is over all positions, padding too: one long answer shrinks the step of all.",
        ("weights_add_up_to_one",),
        ("((BETA * kl - surrogate) * mask).sum() / mask.sum()",
         "((BETA * kl - surrogate) * mask).mean()"),
    ),
    "maximum": Fault(
        "compute_loss", "tensorforce #106",
        "The larger of both terms, where the clip needs the smaller: it never holds a token back "
        "that moves as intended, and stops those that move the wrong way.",
        ("clip_holds_back", "clip_lets_return"),
        ("torch.minimum(", "torch.maximum("),
    ),
    "minimum_before_the_advantage": Fault(
        "compute_loss", "takuseno/ppo #3",
        "The smaller ratio is taken before it meets the advantage, whose sign decides which term "
        "is the smaller: where A is negative, the clip acts on the wrong side.",
        ("clip_holds_back", "clip_lets_return"),
        ("torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])",
         "torch.minimum(ratio, clipped) * advantages[:, None]"),
    ),
    "sign_of_the_kl": Fault(
        "compute_loss", "ToolRL #52, Logic-RL #58",
        "The penalty has the wrong sign: it drives the policy away from the reference.",
        ("kl_pulls_back",),
        ("((BETA * kl - surrogate) * mask)", "((-BETA * kl - surrogate) * mask)"),
    ),
    "ratio_detached": Fault(
        "compute_loss", "PPO-PyTorch #18",
        "No gradient goes through the ratio. Only the KL is trained.",
        ("good_tokens_rise",),
        ("(logprobs - old).exp()\n", "(logprobs - old).exp().detach()\n"),
    ),
    # the update
    "old_has_a_gradient": Fault(
        "update", "miles #1832",
        "The old log-probs are those of now, with their gradient: the ratio is 1 for all weights, "
        "and its gradient 0.",
        ("old_is_fixed", "old_has_no_gradient"),
        ("compute_loss(now, old[rows],", "compute_loss(now, now,"),
    ),
    "old_is_renewed": Fault(
        "update", "tensorforce #312, higgsfield #20",
        "The old log-probs are computed again in every step: the ratio is 1, and nothing clips.",
        ("old_is_fixed",),
        ("compute_loss(now, old[rows],", "compute_loss(now, now.detach(),"),
    ),
    "gradients_add_up": Fault(
        "update", "PyTorch #47175, TRL #583",
        "Nothing sets the gradient to zero, so a step follows those of all steps before, too.",
        ("a_step_follows_its_own_gradient",),
        ("            optimizer.zero_grad()\n", ""),
    ),
    "clipped_after_the_step": Fault(
        "update", "graphstorm #1366, VGRNN #4",
        "The gradient is scaled after the step that has used it.",
        ("long_gradients_are_scaled",),
        ("            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
         "            optimizer.step()\n",
         "            optimizer.step()\n"
         "            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"),
    ),
    "advantages_not_shuffled": Fault(
        "update", "ddpo-pytorch #29, drl-zh #17",
        "The rows are shuffled and the advantages are not: an answer gets another one's.",
        ("rows_belong_together",),
        ("advantages[rows]", "advantages[: len(rows)]"),
    ),
    "rows_drawn_again": Fault(
        "update", "higgsfield #7",
        "Rows are drawn with replacement: a third are left out of a pass, others come twice.",
        ("each_row_once_per_pass",),
        ("torch.randperm(len(ids))", "torch.randint(len(ids), (len(ids),))"),
    ),
    # the loop
    "prompts_are_trained": Fault(
        "play", "RAGEN #71, Search-R1 #21",
        "The mask covers the prompts, too: the policy learns to write, or avoid, the questions.",
        ("only_answers_are_trained",),
        ("torch.cat([attention, mask], 1), mask, rewards",
         "torch.cat([attention, mask], 1), torch.cat([attention, mask], 1)[:, 1:], rewards"),
    ),
    "evaluated_on_training_tasks": Fault(
        "evaluate", "OpenRLHF #1089",
        "The evaluation has the first tasks of the training.",
        ("evaluation_is_held_out",),
        ("EVALUATED = range(1_500_000_000, 1_500_000_128)  # seeds of tasks that no update trains "
         "on", "EVALUATED = range(128)  # seeds of the tasks of an evaluation"),
    ),
    "reference_is_the_policy": Fault(
        "train", "ChatGLM-Efficient-Tuning #380",
        "A shallow copy shares the policy's weights, so the reference moves with it and the KL is "
        "always 0.",
        ("reference_stays",),
        ("copy.deepcopy(model).requires_grad_(False)", "copy.copy(model)"),
    ),
    "optimizer_of_another_model": Fault(
        "train", "open-rl #80",
        "The optimizer has the weights of the reference; those of the policy never change.",
        ("optimizer_has_the_policy",),
        ("AdamW(model.parameters()", "AdamW(reference.parameters()"),
    ),
    "same_tasks": Fault(
        "train", "TRL #3675",
        "Every update has the same P tasks.",
        ("updates_have_new_tasks",),
        ("range(number * P, (number + 1) * P)", "range(P)"),
    ),
    "groups_mixed": Fault(
        "train", "TRL #2803, Search-R1 #88",
        "The list of tasks is repeated, not each task: G neighbours answer different questions.",
        ("groups_share_a_question",),
        ("[task for task in tasks for _ in range(G)]", "[*tasks] * G"),
    ),
}  # fmt: skip
