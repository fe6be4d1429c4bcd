"""An evening on metrics, 2 of 4. Measures what the facts of core/invariants.py need.

The probes cost little: they read some elements of each weight and numbers that the update has
anyway, and play a few episodes without sampling. core/README.md says what each metric means.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from algorithms.tokens import sums
from core import distributed
from core.batching import Batch, cut, to_tokens
from core.chat_template import RAW, render
from core.config import Config, needs
from core.context import Agent
from core.episodes import Episode, RolloutCollector, Wanted
from core.faults import UsageError
from core.metrics import judged, opening_of
from core.optimizer import MasterAdamW
from core.policy import Policy
from core.pool import EnvCall, is_program
from core.tasks import Task, demo_tasks, training_envs
from core.types import Completion, Rollout
from environments.base import PLAYER, Env
from environments.plumbing.registry import EnvSpec

ELEMENTS = 256  # of each weight that are compared
NUM_DEMONSTRATIONS = 8
NUM_JUDGED = 16  # rollouts that are judged again
NUM_GREEDY = 8  # answers of an evaluation that the trainer scores
NUM_PROMPTS = 16  # prompts of an update that are compared with the chat template's text
SAME_REWARD = 1e-6  # difference of two rewards that rounding explains


class WeightProbe:
    """Compares some elements of each trained weight before and after an update.

    Below float32 it compares the masters, as a step may be too small for the weight. It also adds
    up the gradients that backward passes give one weight: AdamW should step on their sum.
    """

    def __init__(self, policy: Policy) -> None:
        self.weights = policy.trainable()
        self.holders = dict[str, Tensor]()  # what AdamW steps on: the weight's master, or itself
        self.optimizer: MasterAdamW | None = None
        self.before: list[Tensor] = []
        small = [name for name in self.weights if "lora_A" not in name]  # B is 0 at first
        self.watched = min(small, key=lambda name: self.weights[name].numel())
        weight = self.weights[self.watched]
        self.passes = torch.zeros(weight.numel(), device=weight.device)
        self.of_step: tuple[Tensor, Tensor] | None = None  # sum of the passes, and AdamW's gradient
        weight.register_hook(self._add)

    def begin(self, optimizer: MasterAdamW) -> None:
        """Copies the elements before an update; a warm start has had an optimizer of its own."""
        if optimizer is not self.optimizer:
            self.optimizer = optimizer
            masters = {id(weight): master for weight, master in optimizer.pairs}
            self.holders = {name: masters.get(id(w), w) for name, w in self.weights.items()}
            optimizer.adamw.register_step_pre_hook(self._note_step)
        self.before = elements(self.holders.values())
        self.passes.zero_()
        self.of_step = None

    def metrics(
        self, cfg: Config, grad_norm: float | None, lr: float, steps: int
    ) -> dict[str, Any]:
        """Metrics of the update. `grad_norm`: the norm of the last step's gradient before it was
        clipped, None without a step; `lr`: the learning rate that the settings ask for; `steps`:
        those of the run so far."""
        assert self.optimizer is not None
        adamw = self.optimizer.adamw
        pairs = zip(self.weights, self.before, elements(self.holders.values()), strict=True)
        sizes = {name: (b - a).double().square().mean().sqrt().item() for name, a, b in pairs}
        unchanged = [name for name, size in sizes.items() if size == 0]
        metrics: dict[str, Any] = {"update/unchanged": len(unchanged) / len(sizes)}
        if 0 < len(unchanged) < len(sizes):
            metrics["example/unchanged"] = unchanged[0]
        moved = [size for name, size in sizes.items() if size and "value_head" not in name]
        if moved and cfg.lr:
            metrics["update/step_size"] = statistics.median(moved) / cfg.lr
        if lr:
            metrics["update/lr_ratio"] = adamw.param_groups[0]["lr"] / lr
        first_weights = [group["params"][0] for group in adamw.param_groups]
        counted = max(float(adamw.state[weight]["step"]) for weight in first_weights)
        metrics["update/steps_lost"] = steps - counted
        names = [name for name, weight in self.weights.items() if weight.dtype.itemsize == 2]
        if names:
            weights = elements(self.weights[name] for name in names)
            masters = elements(self.holders[name] for name in names)
            rounded = [master.to(self.weights[names[0]].dtype).float() for master in masters]
            for name, others in (("apart", masters), ("unequal", rounded)):
                differ = [w != other for w, other in zip(weights, others, strict=True)]
                metrics[f"update/masters_{name}"] = torch.cat(differ).double().mean().item()
        if self.of_step and grad_norm:
            distributed.all_reduce_sum([self.of_step[0]])
            passes, gradient = (x.cpu().double() for x in self.of_step)
            if passes.any():
                clip = min(1.0, (cfg.max_grad_norm or torch.inf) / (grad_norm + 1e-6))
                metrics["grad/passes"] = (gradient @ passes / (passes @ passes)).item() / clip
        elif not grad_norm and self.passes.any():
            metrics["grad/passes"] = 0.0  # the weight has a gradient, and AdamW none
        return metrics

    def _add(self, gradient: Tensor) -> None:
        self.passes += gradient.detach().flatten()

    def _note_step(self, *_: Any) -> None:
        assert self.optimizer is not None
        holder = self.holders[self.watched]
        if holder.grad is not None and any(m is holder for m in self.optimizer.masters):
            passes = self.passes / self.optimizer.loss_scale
            self.of_step = passes, holder.grad.detach().flatten().to(passes)
        self.passes.zero_()


def elements(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of up to ELEMENTS elements of each tensor, evenly spaced: float32, on the CPU."""
    flat = [x.detach().flatten() for x in tensors]
    some = [x[:: max(1, -(-len(x) // ELEMENTS))].float() for x in flat]
    return [*torch.cat(some).cpu().clone().split([*map(len, some)])]  # one transfer from a GPU


def of_rollouts(cfg: Config, policy: Policy, batch: Batch) -> dict[str, Any]:
    """Metrics of an update's prompts, answers, advantages and values, after the gradient steps."""
    rollouts = batch.rollouts
    if not rollouts:
        return {}
    metrics: dict[str, Any] = {}
    groups: dict[int, list[int]] = defaultdict(list)  # group -> rows, places in `rollouts`
    for row, rollout in enumerate(rollouts):
        groups[rollout.group_id].append(row)
    openings = [*map(opening_of, rollouts)]
    alike = [rows for rows in groups.values() if len({openings[row] for row in rows}) == 1]
    last = torch.bincount(batch.rollout, minlength=len(rollouts)).cumsum(0) - 1  # [B]: last tokens
    if not any(map(is_program, cfg.env)):
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        ends = [turn.completion_ids[-1:] for turn in turns if turn.finish_reason == "stop"]
        if ends and not cfg.stop:
            no_end = [not {*end} & {*policy.stop_ids} for end in ends]
            metrics["length/no_end"] = statistics.fmean(no_end)
        metrics |= _prompts(cfg, policy, [rollouts[rows[0]] for rows in groups.values()])
        if not cfg.filter_groups:
            metrics |= _equal_answers(batch, alike)
    if "groups" in needs(cfg) and cfg.credit == "episode":
        advantages = batch.advantages[last].double()
        ids = torch.tensor([rollout.group_id for rollout in rollouts])
        size = advantages.abs().sum().clamp(min=1e-9)
        metrics["groups/advantage_sum"] = (sums(advantages, ids).abs().sum() / size).item()
    if "old_values" in batch and alike:
        values = batch.old_values[torch.cat([last.new_zeros(1), last[:-1] + 1])]  # first tokens
        spreads = [values[rows].max() - values[rows].min() for rows in alike]
        metrics["value/spread"] = max(spreads).item()
    if "value_targets" in batch:  # at the end of a rollout nothing but its own reward follows
        errors = (batch.value_targets[last] - batch.rewards[last]).abs()
        metrics["value/target_ends"] = (errors / (1 + batch.rewards[last].abs())).max().item()
    return metrics


def of_episodes(sampled: list[Rollout], batch: Batch, correct: float) -> dict[str, float]:
    """Metrics of faults: turns without the reward of their steps, prompts without the turn before
    them, a wrong fraction `correct` of right rollouts, rollouts that are not trained on.
    """
    usable = [rollout for rollout in sampled if not rollout.error]
    if not usable:
        return {}
    right = [bool(rollout.info.get("correct")) for rollout in judged(usable)]
    metrics = {"reward/miscounted": abs(sum(right) / max(1, len(right)) - correct)}
    trained = {*map(id, batch.rollouts)}
    left_out = [rollout.num_tokens for rollout in usable if id(rollout) not in trained]
    if left_out:
        metrics["episodes/left_out"] = len(left_out)
        mean_length = statistics.fmean(rollout.num_tokens for rollout in usable)
        metrics["episodes/left_out_length"] = statistics.fmean(left_out) / mean_length
    misplaced, history_lost = list[bool](), list[bool]()
    for rollout in usable:
        turns, steps = rollout.turns, rollout.steps
        if rollout.agent != PLAYER or len(steps) < len(turns):  # other agents act, or a program
            continue
        for k, turn in enumerate(turns):  # an episode that is cut has a step after its last turn
            end = len(steps) if turn is turns[-1] else k + 1
            reward = sum(reward for reward, _ in steps[k:end])
            misplaced.append(abs(turn.reward - reward) > SAME_REWARD)
            if k and not steps[k - 1][1]:
                before = turns[k - 1].prompt_ids + turns[k - 1].completion_ids
                history_lost.append(turn.prompt_ids[: len(before)] != before)
    faults = {"reward/misplaced": misplaced, "groups/history_lost": history_lost}
    return metrics | {name: statistics.fmean(values) for name, values in faults.items() if values}


@torch.no_grad()
def of_greedy(policy: Policy, rollouts: list[Rollout]) -> dict[str, float]:
    """The fraction of the tokens of NUM_GREEDY greedy answers in whose place the trainer gives
    another token a higher log-prob, by more than rounding."""
    batch = to_tokens([r for r in rollouts if r.turns][:NUM_GREEDY])
    rounding = 0.5 if policy.dtype.itemsize < 4 or policy.quantized else 0.05
    behind = 0
    for micro in cut(batch.sequences, policy):
        hidden = policy.hidden_states(micro.input_ids, micro.tree).flatten(0, 1)
        logits = policy.to_logits(hidden[micro.predictors]).float()
        nats = logits.max(-1).values - logits.gather(1, micro.targets[:, None])[:, 0]
        behind += int((nats > rounding).sum())
    return {"gap/greedy": behind / len(batch)} if len(batch) else {}


def _prompts(cfg: Config, policy: Policy, rollouts: list[Rollout]) -> dict[str, Any]:
    """Whether first prompts are those that the chat template makes of their messages."""
    texts = [_texts(cfg, policy, rollout) for rollout in rollouts[:NUM_PROMPTS]]
    pairs = [pair for pair in texts if pair]
    wrong = [(prompt, expected) for prompt, expected in pairs if prompt != expected]
    if not wrong:
        return {"groups/prompts_differ": 0.0} if pairs else {}
    prompt, expected = wrong[0]
    characters = enumerate(zip(prompt, expected, strict=False))
    start = max(0, next((i for i, (a, b) in characters if a != b), 0) - 20)
    example = f"{prompt[start : start + 60]!r} for {expected[start : start + 60]!r}"
    return {"groups/prompts_differ": len(wrong) / len(pairs), "example/prompt": example}


def _texts(cfg: Config, policy: Policy, rollout: Rollout) -> tuple[str, str] | None:
    """The text of a first prompt's ids, and the text that the chat template makes of the messages;
    None where an answer begins with a prefill of the environment, and where there are tools."""
    tokenizer: Any = policy.tokenizer
    places = _places_of_answers(rollout)
    if not places or "tools" in rollout.for_log:
        return None
    opening, answer = rollout.messages[: places[0]], rollout.messages[places[0]]["content"]
    ids = rollout.turns[0].completion_ids
    sampled = tokenizer.decode(ids[: -1 if ids[-1] in policy.stop_ids else None])
    if answer != sampled and answer.endswith(sampled):
        return None
    prompt = tokenizer.decode(rollout.turns[0].prompt_ids)
    if opening[0]["role"] == RAW:
        return prompt[-len(opening[0]["content"]) :], opening[0]["content"]
    if cfg.system_prompt and cfg.system_prompt.strip() not in opening[0]["content"]:
        return prompt, cfg.system_prompt
    try:
        text = render(tokenizer, opening)
    except UsageError:
        return None
    return prompt, tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))


def _places_of_answers(rollout: Rollout) -> list[int]:
    """Where the messages of the policy are; assistant messages before them are examples."""
    places = [i for i, m in enumerate(rollout.messages) if m["role"] == "assistant"]
    return places[max(0, len(places) - len(rollout.turns)) :]


def _equal_answers(batch: Batch, alike: list[list[int]]) -> dict[str, float]:
    """The number of pairs of equal first answers in the groups, and its expected value,
    Σ p_i (G - 1) / 2: each of the other G - 1 answers equals answer i with its probability p_i."""
    first_turn = batch.env_turn == 0
    logprobs = sums(batch.old_logprobs.double() * first_turn, batch.rollout)  # [B]
    equal, likely = 0.0, 0.0
    for rows in alike:
        answers = Counter(tuple(batch.rollouts[r].turns[0].completion_ids) for r in rows)
        equal += sum(n * (n - 1) / 2 for n in answers.values())
        likely += logprobs[rows].exp().sum().item() * (len(rows) - 1) / 2
    return {"groups/equal_answers": equal, "groups/likely_equal": likely}


def last_answer(rollout: Rollout) -> str:
    """The end of the last message of the assistant: the policy, or a demonstration."""
    answers = [m["content"] for m in rollout.messages if m["role"] == "assistant"]
    return answers[-1][-100:] if answers else ""


def of_demonstrations(cfg: Config, collector: RolloutCollector) -> dict[str, Any]:
    """The fraction of right ones among environments' own demonstrations; a wrong one, as text."""
    classes: dict[EnvSpec, Any] = {e: e.constructor for e in training_envs(cfg) if _repeats(e)}
    classes = {e: c for e, c in classes.items() if isinstance(c, type) and issubclass(c, Env)}
    envs = [env for env, cls in classes.items() if cls.demonstrate != Env.demonstrate]
    tasks = demo_tasks(envs, cfg.seed, 0, NUM_DEMONSTRATIONS * bool(envs), hasty=0.0)
    played = judged([r for r in collector.demonstrate(tasks) if not r.error])
    played = [rollout for rollout in played if not rollout.episode_truncated]
    if not played:
        return {}
    wrong = [r for r in played if not r.info.get("correct", r.episode_return > 0)]
    metrics: dict[str, Any] = {"demonstrations/right": 1 - len(wrong) / len(played)}
    if wrong:
        question = wrong[0].messages[0]["content"][-200:]
        metrics["example/demonstration"] = f"{last_answer(wrong[0])!r} to {question!r}"
    return metrics


def _repeats(env: EnvSpec) -> bool:
    """Whether the same answers, given again, cost nothing and earn the same."""
    return not any(map(env.declares, ("waits", "heavy", "luck")))


def judged_again(
    cfg: Config, collector: RolloutCollector, sampled: list[Rollout]
) -> dict[str, Any]:
    """The fraction of some episodes that earn something else when the environment gets the same
    answers again, in reverse order. Leaves out what costs or has luck, and several agents."""
    specs = {env.short: env for env in training_envs(cfg) if _repeats(env)}
    chosen = [r for r in sampled if not r.error and r.env in specs and r.agent == PLAYER]
    chosen = [rollout for rollout in chosen if "tools" not in rollout.for_log]
    chosen = chosen[:: -(-len(chosen) // NUM_JUDGED) or 1][::-1]
    answers = [zip(r.turns, _places_of_answers(r), strict=False) for r in chosen]

    def again(episode: Episode, agent: Agent) -> Wanted:
        def answer() -> Completion:
            turn, i = next(answers[episode.number])
            text = chosen[episode.number].messages[i]["content"].removeprefix(agent.prefill)
            return Completion(turn.completion_ids, turn.sampler_logprobs, text, turn.finish_reason)

        return EnvCall(episode.env, answer)

    tasks = [Task(specs[r.env], r.seed, i) for i, r in enumerate(chosen)]
    played = {r.group_id: r for r in collector.play(tasks, again) if not r.error}
    pairs = [(r, played[i]) for i, r in enumerate(chosen) if i in played]
    differ = [(a, b) for a, b in pairs if abs(a.episode_return - b.episode_return) > SAME_REWARD]
    metrics: dict[str, Any] = {"reward/judged_otherwise": len(differ) / len(pairs)} if pairs else {}
    if differ:
        first, second = differ[0]
        earned = f"{first.episode_return:.4g} and {second.episode_return:.4g}"
        metrics["example/judged"] = f"{last_answer(first)!r} earned {earned}"
    return metrics
