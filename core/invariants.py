"""An evening on metrics, 3 of 4. Facts that hold for every correct loop, whatever the task.

Most faults of reinforcement learning raise no error, and most break a fact of this file. A fact
reads the records and the settings alone, so a resumed run raises the same warnings at the same
updates. A fact is a row, `Fact`, or, where it looks further back, a function; each has the text of
its warning. core/probes.py measures those metrics that the loop itself does not need.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from core.config import Config, needs
from core.results import Record, evaluated, finite, finite_values

TWICE = 2  # updates in a row, as one might be chance
MIN_UPDATES = 3  # updates in a row, for metrics that vary more
ROUNDING = 1e-6  # nats by which log-probs differ that are computed in other micro-batches
Judge = Callable[[list[Record], Config], str]  # returns "", or a warning and what to do


class Numbers:
    """The metrics of a record. Missing and infinite ones are NaN, and comparisons with NaN false.
    With `env`, its evaluation metrics have names without "eval/<env>/", too."""

    def __init__(self, record: Record, env: str = "") -> None:
        self.record = record
        self.prefix = f"eval/{env}/" if env else ""

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.record.get(name), str):
            return self.record[name]
        return finite(self.record, name if name in self.record else self.prefix + name)


class Limit(NamedTuple):
    """A metric is wrong if it was below `low` or above `high` in each of the last `updates`."""

    metric: str  # */NAME: the metric NAME of each evaluated environment
    low: float = math.nan  # NaN: only the condition of the fact decides
    high: float = math.nan
    updates: int = TWICE


class Fact(NamedTuple):
    """A limit of a metric, the condition under which it has to hold, and the text of a warning."""

    name: str
    limit: Limit
    says: str  # the warning; {x}: the metric in the last record, r, {r[name]}: another metric there
    next: str  # what to do
    when: Callable[[Numbers, Config], Any] = lambda r, cfg: True  # the condition, for a record r

    def broken(self, records: list[Record], cfg: Config) -> str:
        """The warning at the last record, with what to do; "" if the fact holds."""
        limit, metric = self.limit, self.limit.metric.removeprefix("*/")

        def is_beyond(r: Numbers) -> bool:
            within = limit.low <= r[metric] <= limit.high or math.isnan(r[metric])
            return not within and bool(self.when(r, cfg))

        for env in evaluated(records[-1], metric) if metric != limit.metric else [""]:
            last = [Numbers(record, env) for record in records[-limit.updates :]]
            if len(last) == limit.updates and all(map(is_beyond, last)):
                text = self.says.format(x=last[-1][metric], r=last[-1])
                return f"{text} ({limit.metric.replace('*', f'eval/{env}')}); next: {self.next}"
        return ""


def by_group(cfg: Config) -> bool:
    """Whether the algorithm compares the rollouts of a group."""
    return "groups" in needs(cfg) and "feedback" not in needs(cfg)


def is_no_rounding(value: float, limit: float, cfg: Config) -> bool:
    """Whether rounding cannot explain a value: in 16 bits one above `limit`, in float32 any."""
    return value > limit or cfg.dtype == "float32"


def has_stepped(r: Numbers, cfg: Config) -> bool:
    """Whether the update has trained the policy, and not its value head alone."""
    return bool(r["update/steps"] > 0 and r["update"] > cfg.options.value_warmup and cfg.lr)


def may_learn(r: Numbers, cfg: Config) -> bool:
    """Whether an update has something to learn from: returns that differ within a group."""
    norm = r["grad/norm"] if "grad/norm" in r.record else 0.0
    not_finite = r["update/skipped"] == 1 and norm != 0
    rewarded = cfg.lr and "feedback" not in needs(cfg)
    alive = r["groups/zero_std_fraction"] < 1 and r["tokens/trained"] != 0
    trains = r["update"] > cfg.options.value_warmup
    return bool(rewarded and alive and not not_finite and trains)


def is_odd_step(r: Numbers, cfg: Config) -> bool:
    """Whether weights have changed by far less or more than AdamW's 0.1 to 1 times the rate."""
    rate = r["update/lr"] if "update/lr" in r.record else cfg.lr  # 0: a schedule has ended
    size = r["update/step_size"] * cfg.lr / rate if rate > 0 and has_stepped(r, cfg) else math.nan
    return bool(size < 0.03 or (size > 4 * r["update/steps"] and cfg.optimizer == "adamw"))


def changes_a_part(r: Numbers, cfg: Config) -> bool:
    """Whether steps have changed some tensors; not in update 1, as B = 0 gives A no gradient."""
    trains_values = bool(getattr(cfg.options, "value_coef", 1))
    return has_stepped(r, cfg) and r["update"] > 1 > r["update/unchanged"] and trains_values


def has_one_denominator(r: Numbers, cfg: Config) -> bool:
    free = cfg.options.aggregation == "constant" or cfg.mask_truncated_completions
    return r["loss/weight"] > 0 and not free  # 0: without a token in the loss


def has_lost_tokens(r: Numbers, cfg: Config) -> bool:
    failed = r["episodes/failed"] > 0 or r["episodes/no_reward"] > 0
    drops = failed or cfg.filter_groups or cfg.mask_truncated_completions
    return abs(r["tokens/sampled"] - r["tokens/trained"]) > 0 and not drops


def follows_returns(r: Numbers, cfg: Config) -> bool:
    """Whether an update follows the returns alone, and moves log-probs by more than rounding."""
    other = cfg.gamma < 1 or "feedback" in needs(cfg) or cfg.kl_coef > 0.5
    return not other and r["update/moved"] > 2 * r["gap/logprob_mean"]


def has_no_ratio(r: Numbers, cfg: Config) -> bool:
    moved = r["update/moved"]
    return r["update/steps"] > 1 and moved > 1e-4 and abs(r["kl/approx"]) < moved**2 / 1000


def begins_at_reference(r: Numbers, cfg: Config) -> bool:
    """Whether the policy is its reference, up to the rounding of 16 bits: before its one step."""
    several = cfg.num_epochs > 1 or cfg.num_minibatches > 1
    other = cfg.teacher or several or (cfg.sft_steps and cfg.lora_rank)
    rounded = cfg.dtype != "float32" and r["kl/reference"] <= min(r["gap/logprob_max"], 0.1) ** 2
    return r["update"] == 1 and not other and not rounded


def reference_is_too_near(r: Numbers, cfg: Config) -> bool:
    """Whether the policy, having moved by m nats an update, is as near to its reference as if it
    had not: the KL is about m²/2, and a tenth of that is still not 0."""
    moved, noise = r["update/moved"], max(1e-3, 3 * r["gap/logprob_mean"])
    return r["update"] > 1 and moved > noise and r["kl/reference"] < moved**2 / 20


def is_no_chance(r: Numbers, cfg: Config) -> bool:
    """Whether a group has far more or fewer equal answers than their probabilities say."""
    equal, likely = r["groups/equal_answers"], r["groups/likely_equal"]
    chance = cfg.group_size * (cfg.group_size - 1) / 2  # pairs of a group of equal answers
    return equal > 2 * likely + chance or likely > 2 * equal + chance


def should_answer_otherwise(r: Numbers, cfg: Config) -> bool:
    """Whether the policy has moved so far that some greedy answer should be another one."""
    many = r["tasks"] >= 8 and r["tasks"] * r["tokens_mean"] >= 200
    return r["update"] * r["update/moved"] > 0.05 and many and r["accuracy"] < 0.9


STEP = Fact(
    "step_size",
    Limit("update/step_size"),
    "weights change by {x:.2g} times --lr (root mean square)",
    "print the lr of the optimizer's groups in this update (a scheduler may change it, a division"
    " by accumulation steps), and see whether bfloat16 weights have float32 masters",
    when=is_odd_step,
)


def draws_otherwise(records: list[Record], cfg: Config) -> str:
    """The mean of -log π over sampled tokens is the mean entropy of π, up to chance; the longer a
    run, the smaller a difference shows."""
    z_scores = finite_values(records, "gap/surprise_z")
    if len(z_scores) < TWICE or cfg.filter_groups or cfg.staleness:
        return ""  # the tokens are chosen by their returns, or drawn with older weights
    errors = abs(sum(z_scores)) / math.sqrt(len(z_scores))
    mean = statistics.fmean(finite_values(records, "gap/surprise"))
    gap = statistics.fmean(finite_values(records, "gap/logprob_mean"))
    if not (errors > 4 and abs(mean) > max(0.01, 2 * gap)):
        return ""
    return (
        f"the sampler does not draw from the π that both sides report: -log π of its tokens is"
        f" {mean:+.3g} nats from the entropy of π, {errors:.0f} standard errors; next:"
        " see what the sampler sets by itself: temperature, top-p, top-k or a repetition penalty,"
        " such as from a generation_config.json"
    )


ROWS = (
    Fact(
        "answers_unchanged",
        Limit("*/same_answers", 0, 0.999, 1),
        "all answers are those of the first evaluation, though updates move log-probs by"
        " {r[update/moved]:.2g} nats each",
        "see which weights the evaluation samples with, and whether a cache answers",
        when=should_answer_otherwise,
    ),
    Fact(
        "no_movement",
        Limit("update/moved", ROUNDING, math.inf),
        "an update moves log-probs by {x:.1g} nats, although returns differ within groups",
        "set a higher --lr if it is far below 1e-6; else see which weights the optimizer holds"
        " (those of the model that samples, and made after its adapters), what lr a scheduler"
        " gives them, and whether the loss has a gradient",
        when=may_learn,
    ),
    Fact(
        "demonstrations_wrong",
        Limit("demonstrations/right", 1, 1, 1),
        "the environment calls only {x:.0%} of its own demonstrations right, and punishes"
        " {r[example/demonstration]}",
        "play that task by hand (python -m environments play SPEC): how is an answer read?",
    ),
    Fact(
        "prompts_differ",
        Limit("groups/prompts_differ", 0, 0, 1),
        "{x:.0%} of the prompts are not what the chat template writes: {r[example/prompt]}",
        "print the decoded ids beside apply_chat_template(messages, tokenize=False,"
        " add_generation_prompt=True): a cut, a lost system message, a second first token",
    ),
    Fact(
        "reward_differs",
        Limit("reward/judged_otherwise", 0, 0, 1),
        "{x:.0%} of the answers earn something else when judged again: {r[example/judged]}",
        "check the order of answers and rewards (a shuffle, a gather, workers), what the class"
        " keeps from the episode before, a time limit; if it draws at random, set luck = True",
    ),
    Fact(
        "reward_misplaced",
        Limit("reward/misplaced", 0, 0, 1),
        "{x:.0%} of the turns have another reward than the step after them gave",
        "read what stands between step() and the turn: a scale, a clip, a sum, another turn",
    ),
    Fact(
        "correct_miscounted",
        Limit("reward/miscounted", 0, 1e-6, 1),
        "reward/correct is {x:.2g} away from the fraction of rollouts whose info says correct",
        "see over which rollouts it is a mean: all of the update, or a part",
    ),
    Fact(
        "history_lost",
        Limit("groups/history_lost", 0, 0, 1),
        "{x:.0%} of the later prompts do not begin with the turn before them, prompt and answer",
        "read what makes the next prompt: a cut, a second template, answers tokenized again",
    ),
    Fact(
        "mixed_groups",
        Limit("groups/openings", 0, 1, MIN_UPDATES),
        "the rollouts of a group, which are compared, have {x:.3g} different prompts",
        "draw a task once and repeat it for its group: 1 1 2 2, not 1 2 1 2; see that the"
        " environment's reset(seed) depends on nothing else",
        when=lambda r, cfg: by_group(cfg),
    ),
    Fact(
        "same_tasks",
        Limit("groups/repeated", 0, 0.999),
        "all tasks of the last two updates were those of the update before",
        "draw tasks with a seed that depends on the update, from more data",
    ),
    Fact(
        "stale_weights",
        Limit("gap/canary", -math.inf, 0.3),
        "the sampler has older weights than the trainer: it lacks {x:.2g} of an update",
        "see what the sync sends, adapters included, and whether the sampler's prefix cache is"
        " emptied after it; try --sampler torch",
    ),
    Fact(
        "sampler_gap",
        Limit("gap/logprob_mean", 0, 5e-4, MIN_UPDATES),
        "sampler and trainer give the same tokens log-probs that differ by {x:.2g} nats",
        "try --sampler torch, --dtype float32, --temperature 1 --top-p 1 --top-k 0 one by one:"
        " which side has other tokens, weights or precision?",
        when=lambda r, cfg: not cfg.staleness and is_no_rounding(r["gap/logprob_mean"], 0.05, cfg),
    ),
    Fact(
        "no_end_token",
        Limit("length/no_end", 0, 0, 1),
        "{x:.0%} of the completions that stopped have no end token",
        "see whether the sampler returns the end token, or calls answers that it cut 'stop'",
    ),
    Fact(
        "advantages_uneven",
        Limit("groups/advantage_sum", 0, 1e-3),
        "the advantages of groups add up to {x:.0%} of the sum of their sizes, not to 0",
        "see which rollouts the baseline is the mean of: those of one prompt, in the same order",
        when=lambda r, cfg: r["groups/advantage_sum"] < 1 - 1e-6 or not cfg.algo.endswith(".py"),
    ),  # of one sign: an own algorithm need not have a baseline
    Fact(
        "values_differ",
        Limit("value/spread", 0, 1e-4),
        "the value head gives one prompt values that are up to {x:.2g} apart",
        "see which state it reads for a token: the one before, without what was sampled after",
        when=lambda r, cfg: is_no_rounding(r["value/spread"], 0.1, cfg),
    ),
    Fact(
        "value_targets",
        Limit("value/target_ends", 0, 1e-3, 1),
        "the value target of a rollout's last token is {x:.2g} away from its reward",
        "end GAE with each rollout, as nothing of the next one is its future, and make targets"
        " from the rewards, not from normalized advantages",
    ),
    Fact(
        "weights_unchanged",
        Limit("update/unchanged", 0, 0),
        "steps leave {x:.0%} of the trained tensors as before, such as {r[example/unchanged]}",
        "see which weights have no gradient: frozen or detached layers, gradient checkpointing,"
        " a layer that takes no part in the output, weights that the optimizer does not hold",
        when=changes_a_part,
    ),
    STEP,
    STEP._replace(
        limit=Limit("update/masters_apart", 1e-9, 1),
        when=has_stepped,
        says="no master differs from its 16-bit weight, so that small steps are lost",
    ),
    Fact(
        "masters_unequal",
        Limit("update/masters_unequal", 0, 0, 1),
        "{x:.0%} of the 16-bit weights are not their float32 masters, rounded",
        "see what writes to the weights beside the optimizer: a load, a merge, a sync, a step whose"
        " result is not copied",
    ),
    Fact(
        "learning_rate",
        Limit("update/lr_ratio", 1 - 1e-6, 1 + 1e-6, 1),
        "the optimizer has {x:.4g} times the learning rate that the settings ask for",
        "look for a scheduler that does not count updates, a rate that is scaled twice",
    ),
    Fact(
        "steps_lost",
        Limit("update/steps_lost", -math.inf, 0, 1),
        "AdamW has counted {x:.0f} steps fewer than the run has made",
        "see whether a resumed run restores AdamW's state, and where else an optimizer is made",
    ),
    Fact(
        "passes_lost",
        Limit("grad/passes", 0.95, 1.05),
        "the gradient of a step is {x:.2g} times the sum of what its passes gave",
        "find where gradients are dropped or scaled between the passes: zero_grad before the"
        " step, a mean over micro-batches or ranks in place of a sum",
        when=lambda r, cfg: r["update/steps"] > 0,
    ),
    Fact(
        "loss_weight",
        Limit("loss/weight", 0.999, 1.001, MIN_UPDATES),
        "the token weights of a gradient step add up to {x:.3g}, not to 1",
        "use one denominator for the whole step, computed before its micro-batches",
        when=has_one_denominator,
    ),
    Fact(
        "rollouts_left_out",
        Limit("episodes/left_out", 0, 0),
        "{x:.0f} rollouts are left out, {r[episodes/left_out_length]:.2g} times as long as all",
        "read what chooses rollouts: a limit of tokens, a batch whose end is cut off",
        when=lambda r, cfg: not cfg.filter_groups,
    ),
    Fact(
        "tokens_left_out",
        Limit("tokens/trained", updates=1),
        "{r[tokens/sampled]:.0f} tokens were sampled, and {x:.0f} are in the loss",
        "see whether whole rollouts are missing (the longest, the end of a batch); else make the"
        " mask of lengths, as one of ids loses the end token where that is also the padding",
        when=has_lost_tokens,
    ),
    Fact(
        "wrong_direction",
        Limit("update/direction", 0.1, math.inf, MIN_UPDATES),  # about 0.7 in a healthy run
        "returns and changes of log-probs correlate by {x:.2f}: what earns more gets no likelier",
        "read a few rollouts in report.html: does each have the reward of its own answer, and"
        " the better one the higher advantage? Look for a shuffle, and at the sign of the loss",
        when=follows_returns,
    ),
    Fact(
        "ratio_stays_one",
        Limit("kl/approx"),
        "steps moved log-probs by {r[update/moved]:.2g} nats, but kl/approx is {x:.1g}: the"
        " policy ratio stays 1, so nothing is clipped",
        "compute old log-probs once, before the first step of an update",
        when=has_no_ratio,
    ),
    Fact(
        "reference_differs",
        Limit("kl/reference", -math.inf, ROUNDING, 1),
        "the KL to the reference was {x:.2g} nats at update 1, not 0",
        "see which weights the reference has (a copy after the warm start), and whether dropout,"
        " temperature and adapters are those of the policy",
        when=begins_at_reference,
    ),
    Fact(
        "not_greedy",
        Limit("gap/greedy", 0, 0.02, 1),
        "the trainer finds another token likelier in {x:.0%} of the tokens of greedy answers",
        "see which weights the evaluation samples with, and whether it draws (a temperature)",
    ),
    Fact(
        "tasks_missing",
        Limit("*/played", updates=1),
        "{x:.0f} of {r[asked]:.0f} held-out tasks were played",
        "read the loop over the held-out tasks: has it one batch, or seeds that repeat a task?",
        when=lambda r, cfg: r["played"] < r["asked"],
    ),
    Fact(
        "held_out_seen",
        Limit("*/seen", 0, 0.05, 1),
        "{x:.0%} of the held-out tasks were trained on: their accuracy counts what was memorized",
        "give --eval-env other seeds or rows, and remove duplicates from the data",
        # where nearly each episode has an opening of its own; games have the same ones anyway
        when=lambda r, cfg: r["openings"] == r["tasks"] >= 0.9 * cfg.eval_num_tasks,
    ),
    Fact(
        "equal_answers",
        Limit("groups/equal_answers"),
        "{x:.0f} pairs of answers of a group were equal, {r[groups/likely_equal]:.0f} are likely",
        "give the sampler a seed for each rollout, not for a group, a worker or an update",
        when=is_no_chance,
    ),
    Fact(
        "reference_moves",
        Limit("kl/reference"),
        "the KL to the reference is {x:.2g} although an update moves the policy by"
        " {r[update/moved]:.2g} nats per token: the reference changes with it",
        "make the reference a copy, before the first step, that is in no optimizer",
        when=reference_is_too_near,
    ),
)
FACTS: tuple[tuple[str, Judge], ...] = (
    ("draws_otherwise", draws_otherwise),
    *((row.name, row.broken) for row in ROWS),
)
