"""More published bugs that raise no error, by the fact of a correct loop that each violates.

    python runs/clinic/faults.py adapters_left_out     # train.py with the fault

The reports are of pull requests, too. `warning` is the fact of core/invariants.py that names it;
"": none does.
"""

import copy
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from entries import Fault, Patch, entering
from torch import Tensor
from torch.nn.functional import dropout
from torch.nn.utils.rnn import pad_sequence

import train
from algorithms import grpo
from core import context, evaluation, policy, sampler, scoring
from core.batching import MicroBatch
from core.episodes import RolloutCollector
from core.loop import evaluator
from core.loop import open as opening
from core.loop import run as running
from core.optimizer import MasterAdamW
from core.sampler import SamplingParams
from core.types import Rollout
from environments import letter_counting
from environments.letter_counting import LetterCounting

MORE: dict[str, Fault] = {}
fault = entering(MORE)
LORA = "--lora-rank 8 --lr 2e-4"
SEVERAL = "--max-tokens-per-micro-batch 256"  # micro-batches in a gradient step


# Fact 1: the policy moves


@fault("adapters #260", "grad/norm", "no_movement", LORA)
def adapters_left_out(patch: Patch) -> None:
    """The optimizer was made before the adapters, and holds the base weights, which are frozen."""
    make = opening.make_optimizer

    def flip(own: policy.Policy) -> None:
        for weight in own.model.parameters():
            weight.requires_grad = not weight.requires_grad

    def of_base(own: policy.Policy, *args: Any, **options: Any) -> Any:
        flip(own)
        made = make(own, *args, **options)
        flip(own)
        return made

    patch(opening, "make_optimizer", of_base)


@fault("open-rl #80", "grad/norm", "no_movement")
def optimizer_of_a_copy(patch: Patch) -> None:
    """The optimizer holds the weights of another copy of the model than the one that trains."""
    make = opening.make_optimizer

    def of_copy(own: policy.Policy, *args: Any, **options: Any) -> Any:
        return make(replace(own, model=copy.deepcopy(own.model)), *args, **options)

    patch(opening, "make_optimizer", of_copy)


@fault("open-instruct #537", "update/moved", "no_movement")
def rate_ends_early(patch: Patch) -> None:
    """The schedule of the learning rate counts the rollouts of a group as updates, and is at 0 when
    an eighth of the run is over."""

    def factor(cfg: Any, update: int, _: int) -> float:
        return max(0.0, 1 - (update - 1) * cfg.group_size / cfg.num_updates)

    patch(running, "lr_factor", factor)


# Fact 2: the environment's own demonstrations are right


@fault("TinyZero #120", "reward/mean", "demonstrations_wrong")
def first_number(patch: Patch) -> None:
    """The reward takes the first number of a response as its answer, also one of the thought."""
    score = letter_counting.score

    def first(response: str, counts: dict[str, int]) -> float:
        found = re.search(r"\d+", response)
        return score(f"<answer>{found[0]}</answer>", counts) if found else 0.0

    patch(letter_counting, "score", first)


@fault("evalscope #1753", "reward/mean", "demonstrations_wrong")
def zero_is_no_answer(patch: Patch) -> None:
    """The reward tests whether there is an answer by its truth, and 0 counts as none."""
    score = letter_counting.score

    def truthy(response: str, counts: dict[str, int]) -> float:
        found = re.search(r"<answer>(\d+)</answer>", response)
        return score(response, counts) if found and int(found[1]) else 0.0

    patch(letter_counting, "score", truthy)


# Fact 3: the prompt is what the template writes


@fault("TRL #3646", "eval/letter_counting/accuracy", "prompts_differ")
def prompts_cut(patch: Patch) -> None:
    """Prompts are cut to 24 tokens from the left, so that the letter asked for is lost."""
    render = context.prompt_ids
    patch(context, "prompt_ids", lambda *args: render(*args)[-24:])


@fault("OpenRLHF #393", "eval/letter_counting/accuracy", "prompts_differ")
def begins_twice(patch: Patch) -> None:
    """The template writes the token that begins a prompt, and the tokenizer adds it once more."""
    render = context.prompt_ids
    patch(context, "prompt_ids", lambda *args: render(*args)[:1] + render(*args))


@fault("smolagents #993, TRL #4361", "eval/letter_counting/accuracy", "prompts_differ")
def turn_not_opened(patch: Patch) -> None:
    """Prompts lack the generation prompt, here one token that opens the assistant's turn."""
    render = context.prompt_ids
    patch(context, "prompt_ids", lambda *args: render(*args)[:-1])


@fault("BALROG #7", "eval/letter_counting/accuracy", "prompts_differ", "--system-prompt Spell.")
def system_prompt_lost(patch: Patch) -> None:
    """The system prompt is in the messages, but not in the ids that the policy sees."""
    render = context.prompt_ids

    def without(tokenizer: Any, messages: list[Any], *args: Any) -> list[int]:
        return render(tokenizer, [m for m in messages if m["role"] != "system"], *args)

    patch(context, "prompt_ids", without)


# Fact 4: equal answers earn equal rewards


@fault("verl #2185, NeMo-RL #3635", "reward/correct", "reward_differs")
def rewards_in_another_order(patch: Patch) -> None:
    """Rewards are attached to the rollouts of a batch in the order of their lengths."""
    collect = RolloutCollector.collect

    def sorted_rewards(
        self: Any, drawn: Any, source: Any, params: SamplingParams, *args: Any
    ) -> list[Rollout]:
        rollouts = collect(self, drawn, source, params, *args)
        ordered = sorted(rollouts, key=lambda r: r.num_tokens) if params.temperature else rollouts
        rewards = [rollout.turns[-1].reward for rollout in ordered]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.turns[-1].reward = reward
        return rollouts

    patch(RolloutCollector, "collect", sorted_rewards)


@fault("WebAgent-R1 #6", "reward/mean", "reward_differs")
def environment_not_reset(patch: Patch) -> None:
    """An environment that is used again is not reset: once it was solved, it stays solved."""
    step = LetterCounting.step

    def stays(self: Any, response: str) -> Any:
        found = step(self, response)
        self.solved = getattr(self, "solved", False) or found.reward == 1
        return replace(found, reward=1.0 if self.solved else found.reward)

    patch(LetterCounting, "step", stays)


@fault("verifiers #831", "reward/mean", "reward_differs")
def judge_times_out(patch: Patch) -> None:
    """The time limit of a judgement counts the time in the queue; a third of a burst gets 0."""
    step, draws = LetterCounting.step, random.Random(0)

    def late(self: LetterCounting, response: str) -> Any:
        found = step(self, response)
        return replace(found, reward=found.reward if draws.random() > 1 / 3 else 0.0)

    patch(LetterCounting, "step", late)


# Fact 5: the KL to the reference begins at 0


@fault("TRL #1340", "kl/reference", "reference_differs", "--kl-coef 0.5 --sft-steps 20")
def reference_before_warm_start(patch: Patch) -> None:
    """The reference is the model before the supervised steps, not the policy when RL begins."""
    begin = train.begin

    def with_base(run: Any) -> None:
        base = copy.deepcopy(run.policy.model).requires_grad_(False)
        begin(run)
        run.reference = replace(run.policy, model=base, value_head=None)

    patch(train, "begin", with_base)


@fault("LLaMA-Factory #10779", "kl/reference", "reference_differs", "--kl-coef 0.5")
def reference_drops_out(patch: Patch) -> None:
    """Dropout acts in the reference, which is another one in each forward pass."""
    freeze = train.freeze_reference

    def noisy(*args: Any) -> policy.Policy:
        frozen = freeze(*args)
        last = frozen.causal_lm.get_decoder().layers[-1]
        last.register_forward_hook(lambda _, __, hidden: dropout(hidden, 0.1))
        return frozen

    patch(train, "freeze_reference", noisy)


@fault("TRL #3029", "kl/reference", "reference_differs", "--kl-coef 0.5 --temperature 0.7")
def reference_without_temperature(patch: Patch) -> None:
    """The log-probs of the reference are those of temperature 1, the policy's those of 0.7."""
    score_tokens = train.score_tokens
    patch(train, "score_tokens", lambda own, batch, _: score_tokens(own, batch, 1.0))


# Fact 6: every trained tensor has a gradient


@fault("TRL #2671", "update/moved", "weights_unchanged")
def lower_layers_cut_off(patch: Patch) -> None:
    """Gradient checkpointing breaks the graph in the middle: no gradient reaches lower layers."""
    load = opening.load_policy

    def cut(*args: Any, **options: Any) -> policy.Policy:
        own = load(*args, **options)
        layers = own.causal_lm.get_decoder().layers
        middle = layers[len(layers) // 2]
        middle.register_forward_pre_hook(lambda _, given: (given[0].detach(), *given[1:]))
        return own

    patch(opening, "load_policy", cut)


@fault("ms-swift #10142", "update/moved", "weights_unchanged", LORA)
def one_layer_without_gradient(patch: Patch) -> None:
    """What a layer adds is computed without a graph, so its adapters have no gradient."""
    load = opening.load_policy

    def without(*args: Any, **options: Any) -> policy.Policy:
        own = load(*args, **options)
        layer = own.causal_lm.get_decoder().layers[1]
        for part in (layer.self_attn.o_proj, layer.mlp):
            part.register_forward_hook(lambda _, __, out: out.detach())
        return own

    patch(opening, "load_policy", without)


# Fact 7: Adam's steps are about as long as the learning rate


@fault("transformers #218", "update/moved", "step_size")
def warms_up_forever(patch: Patch) -> None:
    """The warm-up is a tenth of all steps, which are counted in rollouts: the rate stays low."""

    def factor(cfg: Any, update: int, _: int) -> float:
        return update / (0.1 * cfg.num_updates * cfg.num_prompts * cfg.group_size)

    patch(running, "lr_factor", factor)


@fault("OpenTau #185", "update/moved", "step_size", "--dtype bfloat16 --lr 3e-5")
def masters_made_again(patch: Patch) -> None:
    """Float32 masters are made of the bfloat16 weights again and again, and forget small steps."""
    step = MasterAdamW.step

    @torch.no_grad()
    def forgetful(self: MasterAdamW) -> None:
        for weight, master in self.pairs:
            master.copy_(weight)
        step(self)

    patch(MasterAdamW, "step", forgetful)


# Fact 8: the policy that trains is evaluated


@fault("NLPDL-2025Fall #31", "eval/letter_counting/accuracy", "answers_unchanged")
def evaluates_the_start(patch: Patch) -> None:
    """Evaluations have the weights of the start; the engine that makes them gets no others."""
    evaluate, start = evaluator.Evaluator.evaluate, dict[str, Any]()

    def at_start(self: evaluator.Evaluator, update: int) -> Any:
        model: Any = vars(self.sampler)["policy"].model
        now = copy.deepcopy(model.state_dict())
        model.load_state_dict(start.setdefault("weights", now))
        found = evaluate(self, update)
        model.load_state_dict(now)
        return found

    patch(evaluator.Evaluator, "evaluate", at_start)


# Fact 9: what is drawn has the probabilities that are reported


def reported_as_raw(patch: Patch, **hidden: Any) -> None:
    """Draws with other parameters than asked for, and reports the log-probs of those asked for."""
    draw = sampler.draw

    def other(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
        if params.temperature == 0:
            return draw(logits, params, uniform)
        ids, _ = draw(logits, replace(params, **hidden), uniform)
        raw = (logits.float() / params.temperature).log_softmax(-1)
        return ids, raw.gather(1, ids[:, None]).squeeze(1)

    patch(sampler, "draw", other)


@fault("tinker-feedback #148", "reward/mean", "draws_otherwise")
def hidden_temperature(patch: Patch) -> None:
    """The engine draws at temperature 0.5, and both sides have the log-probs of temperature 1."""
    reported_as_raw(patch, temperature=0.5)


@fault("NeMo-RL #3497", "reward/mean", "draws_otherwise")
def hidden_top_p(patch: Patch) -> None:
    """The engine takes its top-p of 0.8 from a file of the model, and nobody knows of it."""
    reported_as_raw(patch, top_p=0.8)


@fault("TRL #3494", "reward/mean", "draws_otherwise", "--temperature 1.5")
def hidden_top_k(patch: Patch) -> None:
    """The engine draws from the two likeliest tokens, by a default that nobody has asked for."""
    reported_as_raw(patch, top_k=2)


# Fact 10: the rollouts of a group are drawn independently


@fault("tt-metal #53077", "groups/zero_std_fraction", "equal_answers")
def one_seed(patch: Patch) -> None:
    """All rollouts have the same seed, so the answers to one prompt are equal."""
    uniforms = sampler.uniforms
    patch(sampler, "uniforms", lambda seed, _, steps: uniforms(seed, [0], steps))


@fault("verl-omni #112", "groups/zero_std_fraction", "equal_answers")
def seeds_collide(patch: Patch) -> None:
    """Seeds are numbered within each worker: every second rollout repeats the one before it."""
    uniforms = sampler.uniforms
    patch(sampler, "uniforms", lambda seed, streams, steps: uniforms(
        seed, [stream // 2000 for stream in streams], steps))  # fmt: skip


# Fact 11: all backward passes are in the gradient


@fault("torchtitan #3575, open-instruct #1498", "grad/norm", "passes_lost", SEVERAL)
def only_the_last_counts(patch: Patch) -> None:
    """Gradients are set to 0 before each backward pass, so only the last micro-batch counts."""
    backward = MasterAdamW.backward

    def alone(self: MasterAdamW, *args: Any, **options: Any) -> None:
        self.zero_grad()
        backward(self, *args, **options)

    patch(MasterAdamW, "backward", alone)


@fault("ms-swift #10117, verl-SpeCo #29", "grad/norm", "passes_lost", SEVERAL)
def gradients_averaged(patch: Patch) -> None:
    """The loss is normalized over all micro-batches, and then their gradients are averaged."""
    backward, total, count = MasterAdamW.backward, MasterAdamW.sum_gradients, Counter[str]()

    def counted(self: MasterAdamW, *args: Any, **options: Any) -> None:
        count["passes"] += 1
        backward(self, *args, **options)

    def averaged(self: MasterAdamW) -> None:
        for grad in (p.grad for p in self.masters if p.grad is not None):
            grad /= count["passes"]
        count.clear()
        total(self)

    patch(MasterAdamW, "backward", counted)
    patch(MasterAdamW, "sum_gradients", averaged)


# Fact 12: the advantages of a group add up to 0


@fault("rllm #776", "update/direction", "advantages_uneven")
def no_baseline(patch: Patch) -> None:
    """Each rollout has an id of its own, and is a group of one: returns have no baseline."""
    patch(grpo, "group_mean", lambda x, _: torch.zeros_like(x))
    patch(grpo, "group_std", lambda x, _: torch.ones_like(x))


@fault("grpo-flat #2", "update/direction", "advantages_uneven")
def baseline_of_the_batch(patch: Patch) -> None:
    """Mean and standard deviation are those of all returns of the batch, not of the group's."""
    mean, std = grpo.group_mean, grpo.group_std
    patch(grpo, "group_mean", lambda x, ids: mean(x, ids * 0))
    patch(grpo, "group_std", lambda x, ids: std(x, ids * 0))


@fault("d1 #19", "update/direction", "advantages_uneven")
def baseline_of_other_prompts(patch: Patch) -> None:
    """Returns are cut into groups across the prompts: each baseline is of eight other prompts."""
    mean = grpo.group_mean

    def across(x: Tensor, ids: Tensor) -> Tensor:
        return mean(x, torch.arange(len(x)) % len(ids.unique()))

    patch(grpo, "group_mean", across)


# Fact 13: one prompt has one value


@fault("ROLL #3, trlx #341", "value/loss", "values_differ", "--algo ppo")
def values_of_the_next_state(patch: Patch) -> None:
    """The value of a token is read from the state after it, which knows the token."""

    def later(own: policy.Policy, micro: MicroBatch, hidden: Tensor, *args: Any) -> Any:
        found = scoring.read_out(own, micro, hidden, *args)
        numbers = [torch.tensor(sequence.numbers) for sequence in micro.sequences]
        sampled = pad_sequence(numbers, batch_first=True, padding_value=-1) >= 0
        assert own.value_head is not None
        values = own.value_head(hidden.float()).squeeze(-1)
        return found | {"values": values[micro.nodes[sampled]]}

    predict = scoring.predict

    def predict_later(own: policy.Policy, micro: MicroBatch, *args: Any) -> Any:
        return predict(own, micro, *args[:2], read=later)

    patch(scoring, "predict", predict_later)
    patch(train, "predict", predict_later)


# Fact 14: what has stopped ends with an end token


@fault("xtuner #1063, vLLM #28185", "tokens/sampled", "no_end_token")
def ends_not_returned(patch: Patch) -> None:
    """The engine says that a completion has stopped, and leaves out the token that ended it."""
    build = sampler.to_completion

    def without_end(own: policy.Policy, ids: list[int], *args: Any) -> Any:
        found = build(own, ids, *args)
        if len(ids) < 2 or ids[-1] not in own.stop_ids:
            return found
        return replace(found, token_ids=ids[:-1], logprobs=found.logprobs[:-1])

    patch(sampler, "to_completion", without_end)


@fault("LiteLLM #25825, inspect_ai #5143", "length/hit_token_limit", "no_end_token",
       "--max-tokens 18 --mask-truncated-completions")  # fmt: skip
def cuts_called_stops(patch: Patch) -> None:
    """The engine says "stop" for completions that were cut at the token limit, too."""
    build = sampler.to_completion
    patch(sampler, "to_completion", lambda *args: replace(build(*args), finish_reason="stop"))


# Fact 15: after the first of several steps the ratio is not 1


@fault("tensorforce #312, higgsfield #20", "kl/approx", "ratio_stays_one", "--num-minibatches 4")
def old_is_new(patch: Patch) -> None:
    """The old log-probs are computed again before each step, so the ratio is 1 in all of them."""
    forward = train.forward

    def renewed(*args: Any) -> Any:
        tokens = forward(*args)
        tokens.old_logprobs = tokens.logprobs.detach()
        return tokens

    patch(train, "forward", renewed)


# Fact 16: as many tasks are evaluated as were asked for


@fault("UniRL #189", "eval/letter_counting/tasks", "tasks_missing")
def evaluates_one_batch(patch: Patch) -> None:
    """Only the first batch of the held-out tasks is evaluated, here 16."""
    eval_tasks = evaluator.eval_tasks
    patch(evaluator, "eval_tasks", lambda *args: eval_tasks(*args)[:16])


@fault("rl-prompt #42", "eval/letter_counting/tasks", "tasks_missing")
def accuracy_of_the_last_batch(patch: Patch) -> None:
    """All held-out tasks are played, but the accuracy is that of the last batch, here of 16."""
    accuracy = evaluation.accuracy_metrics
    patch(evaluation, "accuracy_metrics", lambda rollouts: accuracy(rollouts[-16:]))


# No fact sees these


@fault("Visual-RFT #176, open-r1 #293", "reward/correct", "", "--temperature 1.5")
def unreadable_is_right(patch: Patch) -> None:
    """A response in which no answer is found earns the full reward."""
    step = LetterCounting.step

    def generous(self: LetterCounting, response: str) -> Any:
        found = step(self, response)
        return replace(found, reward=found.reward or 1.0)

    patch(LetterCounting, "step", generous)


@fault("ballbeam-gym #2", "reward/correct", "")
def more_is_better(patch: Patch) -> None:
    """The distance to the right answer has a sign: a number above it earns more than the answer."""
    step = LetterCounting.step

    def signed(self: LetterCounting, response: str) -> Any:
        found, number = step(self, response), re.search(r"<answer>(\d+)</answer>", response)
        beyond = int(number[1][:3]) - sum(self.counts.values()) if number else 0
        return replace(found, reward=1.0 + 0.1 * beyond if beyond > 0 else found.reward)

    patch(LetterCounting, "step", signed)


@fault("NLE #84", "eval/letter_counting/accuracy", "")
def word_without_its_end(patch: Patch) -> None:
    """An index is off by one: the question shows the word without its last letter."""
    reset = LetterCounting.reset

    def shorter(self: LetterCounting, seed: int) -> Any:
        [message] = reset(self, seed)
        content = message["content"].replace(f'"{self.word}"', f'"{self.word[:-1]}"')
        return [{**message, "content": content}]

    patch(LetterCounting, "reset", shorter)


@fault("pg-is-all-you-need #37", "policy/entropy", "", "--entropy-coef 0.2")
def entropy_sign(patch: Patch) -> None:
    """The entropy is minimized."""
    regularizers = train.regularizers

    def negative(run: Any, *args: Any) -> Any:
        cfg = replace(run.cfg, entropy_coef=-run.cfg.entropy_coef)
        return regularizers(replace(run, cfg=cfg), *args)

    patch(train, "regularizers", negative)


@fault("verl #6202", "eval/letter_counting/accuracy", "")
def evaluation_draws(patch: Patch) -> None:
    """Evaluations draw their answers at temperature 1, though greedy ones were asked for."""

    def hot(max_tokens: int, temperature: float, stop: Any) -> SamplingParams:
        return SamplingParams(max_tokens, temperature=1.0, stop=stop)

    patch(evaluator, "SamplingParams", hot)


@fault("flow_grpo #46", "update/direction", "")
def deviation_of_the_batch(patch: Patch) -> None:
    """Advantages are divided by the standard deviation of all returns of the batch."""
    std = grpo.group_std
    patch(grpo, "group_std", lambda x, ids: std(x, ids * 0))
