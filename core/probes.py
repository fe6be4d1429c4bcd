"""An evening on metrics, 2 of 4. What the facts of core/invariants.py are checked by.

    WeightProbe         what an update did to the weights, and whether each pass is in the gradient
    of_rollouts         what an update's rollouts show of prompts, answers, rewards and advantages
    of_episodes         whether rewards, prompts and rollouts went where they should
    of_greedy           whether the answers of an evaluation are the trainer's likeliest
    of_demonstrations   what the environment's own demonstrations earn
    judged_again        whether the environment rewards the same answers as it did

Each costs little: some elements of each weight, numbers that the update has anyway, and a few
episodes without sampling. core/README.md says what each metric means.
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
from core.metrics import opening_of
from core.optimizer import MasterAdamW
from core.policy import Policy
from core.pool import EnvCall, is_program
from core.tasks import Task, demo_tasks, training_envs
from core.types import Completion, Rollout
from environments.base import PLAYER, Env

ELEMENTS = 256  # of each weight that are looked at
NUM_DEMONSTRATIONS = 8
NUM_JUDGED = 16  # rollouts that are judged again
NUM_GREEDY = 8  # answers of an evaluation that the trainer scores
NUM_PROMPTS = 16  # of an update that are compared with what the template writes
SAME_REWARD = 1e-6  # difference of two rewards that rounding explains


class WeightProbe:
    """Looks at some elements of each trained weight before and after an update.

    Below float32 it looks at the masters, as a step may be too small for the weight. It also adds
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
        """Looks at the weights before an update; a warm start has had an optimizer of its own."""
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
        """What the update did. `grad_norm`: the norm of the last step's gradient before it was
        clipped, None without a step; `lr`: the learning rate that the settings ask for; `steps`:
        those of the run so far."""
        assert self.optimizer is not None
        both = zip(self.weights, self.before, elements(self.holders.values()), strict=True)
        sizes = {name: (b - a).double().square().mean().sqrt().item() for name, a, b in both}
        still = [name for name, size in sizes.items() if size == 0]
        found: dict[str, Any] = {"update/unchanged": len(still) / len(sizes)}
        if 0 < len(still) < len(sizes):
            found["example/unchanged"] = still[0]
        moved = [size for name, size in sizes.items() if size and "value_head" not in name]
        if moved and cfg.lr:
            found["update/step_size"] = statistics.median(moved) / cfg.lr
        if lr:
            found["update/lr_ratio"] = self.optimizer.adamw.param_groups[0]["lr"] / lr
        firsts = [group["params"][0] for group in self.optimizer.adamw.param_groups]
        counted = max(float(self.optimizer.adamw.state[p]["step"]) for p in firsts)
        found["update/steps_lost"] = steps - counted
        low = [name for name, weight in self.weights.items() if weight.dtype.itemsize == 2]
        if low:
            weights, masters = (elements(x[n] for n in low) for x in (self.weights, self.holders))
            rounded = [m.to(self.weights[low[0]].dtype).float() for m in masters]
            for name, others in (("masters_apart", masters), ("masters_unequal", rounded)):
                unequal = ((w != x).double().mean() for w, x in zip(weights, others, strict=True))
                found[f"update/{name}"] = statistics.fmean(map(float, unequal))
        if self.of_step and grad_norm:
            distributed.all_reduce_sum([self.of_step[0]])
            passes, gradient = (x.cpu().double() for x in self.of_step)
            if passes.any():
                clip = min(1.0, (cfg.max_grad_norm or torch.inf) / (grad_norm + 1e-6))
                found["grad/passes"] = (gradient @ passes / (passes @ passes)).item() / clip
        elif not grad_norm and self.passes.any():
            found["grad/passes"] = 0.0  # the weight has a gradient, and AdamW none
        return found

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
    """What the rollouts that were trained on show, after the gradient steps."""
    rollouts, found = batch.rollouts, dict[str, Any]()
    if not rollouts:
        return found
    groups: dict[int, list[int]] = defaultdict(list)
    for r, rollout in enumerate(rollouts):
        groups[rollout.group_id].append(r)
    alike = [rows for rows in groups.values() if len({opening_of(rollouts[r]) for r in rows}) == 1]
    last = torch.bincount(batch.rollout, minlength=len(rollouts)).cumsum(0) - 1  # [B], its token
    if not any(map(is_program, cfg.env)):
        stopped = [t for r in rollouts for t in r.turns if t.finish_reason == "stop"]
        if stopped and not cfg.stop:
            no_end = [not {*t.completion_ids[-1:]} & {*policy.stop_ids} for t in stopped]
            found["length/no_end"] = statistics.fmean(no_end)
        found |= _prompts(cfg, policy, [rollouts[rows[0]] for rows in groups.values()])
        found |= {} if cfg.filter_groups else _equal_answers(batch, alike)
    if "groups" in needs(cfg) and cfg.credit == "episode":
        of_rollouts = batch.advantages[last].double()
        ids = torch.tensor([rollout.group_id for rollout in rollouts])
        sizes = sums(of_rollouts.abs(), ids).clamp(min=1e-9)
        found["groups/advantage_sum"] = (sums(of_rollouts, ids).abs() / sizes).max().item()
    if "old_values" in batch and alike:
        values = batch.old_values[torch.cat([last.new_zeros(1), last[:-1] + 1])]  # first tokens
        found["value/spread"] = max((values[r].max() - values[r].min()).item() for r in alike)
    if "value_targets" in batch:  # at the end of a rollout nothing but its own reward follows
        off = (batch.value_targets[last] - batch.rewards[last]).abs()
        found["value/target_ends"] = (off / (1 + batch.rewards[last].abs())).max().item()
    return found


def of_episodes(sampled: list[Rollout], batch: Batch, correct: float) -> dict[str, Any]:
    """Whether the turns of an update's rollouts have the rewards that their steps gave, and begin
    with the turn before; whether `correct` is the fraction of right ones; which are not trained on.
    """
    usable, trained = [r for r in sampled if not r.error], {*map(id, batch.rollouts)}
    if not usable:
        return {}
    right = sum(bool(r.info.get("correct")) for r in usable) / len(usable)
    found = {"reward/miscounted": abs(right - correct)}
    if out := [r.num_tokens for r in usable if id(r) not in trained]:
        found["episodes/left_out"] = len(out)
        mean = statistics.fmean(r.num_tokens for r in usable)
        found["episodes/left_out_length"] = statistics.fmean(out) / mean
    other, lost = list[bool](), list[bool]()
    for r in usable:
        if r.agent != PLAYER or len(r.steps) < len(r.turns):  # others act, too; or a program does
            continue
        for k, turn in enumerate(r.turns):  # after the last turn an episode that is cut has a step
            last = len(r.steps) if turn is r.turns[-1] else k + 1
            given = sum(reward for reward, _ in r.steps[k:last])
            other.append(abs(turn.reward - given) > SAME_REWARD)
            if k and not r.steps[k - 1][1]:
                before = r.turns[k - 1].prompt_ids + r.turns[k - 1].completion_ids
                lost.append(turn.prompt_ids[: len(before)] != before)
    for name, column in (("reward/misplaced", other), ("groups/history_lost", lost)):
        found |= {name: statistics.fmean(column)} if column else {}
    return found


@torch.no_grad()
def of_greedy(policy: Policy, rollouts: list[Rollout]) -> dict[str, float]:
    """The fraction of the tokens of NUM_GREEDY greedy answers that the trainer finds another token
    likelier than, by more than rounding."""
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
    """Whether first prompts are what the chat template makes of their messages."""
    pairs = [pair for r in rollouts[:NUM_PROMPTS] if (pair := _texts(cfg, policy, r))]
    wrong = [(shown, wanted) for shown, wanted in pairs if shown != wanted]
    found: dict[str, Any] = {"groups/prompts_differ": len(wrong) / len(pairs)} if pairs else {}
    for pair in wrong[:1]:
        at = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), 0)
        start = max(0, at - 20)
        shown, wanted = (text[start : start + 60] for text in pair)
        found["example/prompt"] = f"{shown!r} for {wanted!r}"
    return found


def _texts(cfg: Config, policy: Policy, rollout: Rollout) -> tuple[str, str] | None:
    """The text of a first prompt's ids, and what the chat template makes of the messages; None
    where an answer begins with a text that the environment gave, and where it has tools."""
    tokenizer: Any = policy.tokenizer
    if not (written := _written(rollout)) or "tools" in rollout.for_log:
        return None
    opening, answer = rollout.messages[: written[0]], rollout.messages[written[0]]["content"]
    turn = rollout.turns[0]
    sampled = tokenizer.decode(turn.completion_ids, skip_special_tokens=True).strip()
    if answer.strip() != sampled and answer.strip().endswith(sampled):
        return None
    shown = tokenizer.decode(turn.prompt_ids)
    if opening[0]["role"] == RAW:
        return shown[-len(opening[0]["content"]) :], opening[0]["content"]
    if cfg.system_prompt and cfg.system_prompt.strip() not in opening[0]["content"]:
        return shown, cfg.system_prompt
    try:
        text = render(tokenizer, opening)
    except UsageError:
        return None
    return shown, tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))


def _written(rollout: Rollout) -> list[int]:
    """Where the messages of the policy are; assistant messages before them are examples."""
    said = [i for i, m in enumerate(rollout.messages) if m["role"] == "assistant"]
    return said[max(0, len(said) - len(rollout.turns)) :]


def _equal_answers(batch: Batch, alike: list[list[int]]) -> dict[str, float]:
    """Pairs of equal first answers in the groups, and how many are likely: answer i has the
    probability p_i, so that each of the G - 1 others equals it so often: Σ p_i (G - 1) / 2."""
    first_turn = batch.env_turn == 0
    logprobs = sums(batch.old_logprobs.double() * first_turn, batch.rollout)  # [B]
    equal, likely = 0.0, 0.0
    for rows in alike:
        answers = Counter(tuple(batch.rollouts[r].turns[0].completion_ids) for r in rows)
        equal += sum(n * (n - 1) / 2 for n in answers.values())
        likely += logprobs[rows].exp().sum().item() * (len(rows) - 1) / 2
    return {"groups/equal_answers": equal, "groups/likely_equal": likely}


def last_answer(rollout: Rollout) -> str:
    """The end of what the policy, or a demonstration, said last."""
    said = [m["content"] for m in rollout.messages if m["role"] == "assistant"]
    return said[-1][-100:] if said else ""


def of_demonstrations(cfg: Config, collector: RolloutCollector) -> dict[str, Any]:
    """How many of the environment's own demonstrations are right, and a wrong one, as text."""
    envs = [
        env
        for env in training_envs(cfg)
        if isinstance(made := env.constructor, type)  # whose demonstrations cost nothing
        and issubclass(made, Env)
        and made.demonstrate != Env.demonstrate
        and not any(map(env.declares, ("waits", "heavy", "luck")))
    ]
    tasks = demo_tasks(envs, cfg.seed, 0, NUM_DEMONSTRATIONS * bool(envs), hasty=0.0)
    played = [r for r in collector.demonstrate(tasks) if not r.error and not r.episode_truncated]
    if not played:
        return {}
    wrong = [r for r in played if not r.info.get("correct", r.episode_return > 0)]
    found: dict[str, Any] = {"demonstrations/right": 1 - len(wrong) / len(played)}
    for r in wrong[:1]:
        asked = r.messages[0]["content"][-200:]
        found["example/demonstration"] = f"{last_answer(r)!r} to {asked!r}"
    return found


def judged_again(
    cfg: Config, collector: RolloutCollector, sampled: list[Rollout]
) -> dict[str, Any]:
    """The fraction of some episodes that earn something else when their answers are given again, in
    the reverse order. Not of judges, which wait for a model or a server, nor where others act."""
    envs = training_envs(cfg)
    specs = {e.short: e for e in envs if not e.declares("waits") and not e.declares("heavy")}
    alone = [r for r in sampled if not r.error and r.env in specs and r.agent == PLAYER]
    chosen = [r for r in alone if "tools" not in r.for_log]
    chosen = chosen[:: -(-len(chosen) // NUM_JUDGED) or 1][::-1]
    answers = [zip(r.turns, _written(r), strict=False) for r in chosen]

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
    found: dict[str, Any] = {"reward/judged_otherwise": len(differ) / len(pairs)} if pairs else {}
    for a, b in differ[:1]:
        earned = f"{a.episode_return:.4g} and {b.episode_return:.4g}"
        found["example/judged"] = f"{last_answer(a)!r} earned {earned}"
    return found
