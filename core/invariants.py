"""An evening on metrics, 3 of 4. What every correct loop does, whatever the task, and where not.

Most faults of reinforcement learning raise no error, and most break a fact of this file. A fact
reads the records and the settings alone, so a resumed run names the same at the same update. It is
a row, `Fact`, or a function with `@fact`: each has the words of its warning. core/probes.py
measures what the loop does not need for itself. A fact is not judged where it need not hold, such
as a baseline that a filter has chosen from.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from core.config import Config, needs
from core.results import Record
from core.series import MIN_UPDATES, WINDOW, evaluated, finite, known, last_of, updates_of

TWICE = 2  # updates in a row, where one number might be chance
ROUNDING = 1e-6  # nats by which log-probs differ that are computed in other micro-batches
MIN_LAG = 0.3  # updates that the sampler lacks, in two canaries
MAX_SEEN = 0.05  # fraction of held-out openings that training had
MANY_TASKS = 0.9  # different tasks for each held-out episode, at which MAX_SEEN counts
Judge = Callable[[list[Record], Config], str]  # "", or what is wrong, with its numbers


class Fact(NamedTuple):
    """A metric that is `beyond` what it should be in each of the last `updates` records."""

    name: str
    metric: str
    beyond: tuple[float, float]  # from the lowest to the highest value nothing is wrong
    updates: int
    says: str  # what is wrong; {x}: the last value, {prompt}: the text example/prompt
    try_: str
    unless: Callable[[Config], object] = lambda cfg: False  # settings with which it need not hold

    def broken(self, records: list[Record], cfg: Config) -> str:
        """What is wrong at the last record, or ""."""
        low, high = self.beyond
        values = last_of(records[-self.updates :], self.metric, self.updates)
        if not values or self.unless(cfg) or any(low <= x <= high for x in values):
            return ""
        examples = [key for key in records[-1] if key.startswith("example/")]
        texts = {key.removeprefix("example/"): records[-1][key] for key in examples}
        return f"{self.says.format_map(defaultdict(str, texts, x=values[-1]))} ({self.metric})"


class Check(NamedTuple):
    """A fact of more than one metric."""

    name: str
    try_: str
    broken: Judge


def fact(try_: str) -> Callable[[Judge], Check]:
    """The decorator that makes a function a fact of its name."""
    return lambda judge: Check(judge.__name__, try_, judge)


def by_group(cfg: Config) -> bool:
    """Whether the algorithm compares the rollouts of a group."""
    return "groups" in needs(cfg) and "feedback" not in needs(cfg)


def below_float32(cfg: Config) -> bool:
    return cfg.dtype != "float32"


GAP = Fact(
    "sampler_gap",
    "gap/logprob_mean",
    (0, 0.05),
    MIN_UPDATES,
    "sampler and trainer give the same tokens log-probs that differ by {x:.2g} nats on"
    " average: their tokens, weights or precision differ",
    "--sampler torch, --dtype float32, --temperature 1 --top-p 1 --top-k 0, one at a time,"
    " to find which side is wrong",
    unless=lambda cfg: cfg.staleness,  # older weights
)
JUDGED_AGAIN = Fact(
    "reward_differs",
    "reward/judged_otherwise",
    (0, 0),
    1,
    "{x:.0%} of the answers earn something else when they are judged again: {judged}",
    "the order of answers and rewards (a shuffle, a gather, a pool of workers), what an"
    " environment keeps from the episode before, a time limit; a reward that draws at random"
    " is only noisy",
)
VALUES = Fact(
    "values_differ",
    "value/spread",
    (0, 0.1),
    TWICE,
    "the value head gives one prompt values that are up to {x:.2g} apart",
    "which state it reads for a token: the one before it, without anything that was sampled after",
)
ROWS = (
    Fact(
        "demonstrations_wrong",
        "demonstrations/right",
        (1, 1),
        1,
        "the environment calls {x:.0%} of its own demonstrations right, so right answers are"
        " punished; wrong is {demonstration}",
        "playing that task by hand (python -m environments play SPEC): how the answer is"
        " read, and how it is compared",
    ),
    Fact(
        "prompts_differ",
        "groups/prompts_differ",
        (0, 0),
        1,
        "the ids of {x:.0%} of the prompts are not what the chat template writes for their"
        " messages, such as {prompt}",
        "printing the decoded ids beside tokenizer.apply_chat_template(messages,"
        " tokenize=False, add_generation_prompt=True): a cut, a lost system message, a"
        " second token that begins the text",
    ),
    JUDGED_AGAIN,
    JUDGED_AGAIN._replace(
        metric="reward/unequal",
        says="{x:.0%} of equal answers in a group earn unequal rewards: {reward}",
    ),
    Fact(
        "mixed_groups",
        "groups/openings",
        (0, 1),
        MIN_UPDATES,
        "the rollouts of a group, which are compared with each other, have {x:.3g} different"
        " prompts",
        "drawing a task once and repeating it for its group: 1 1 2 2, not 1 2 1 2; an"
        " environment whose reset(seed) depends on nothing else",
        unless=lambda cfg: not by_group(cfg),
    ),
    Fact(
        "same_tasks",
        "groups/repeated",
        (0, 0.999),
        TWICE,
        "all tasks of the last two updates were those of the update before",
        "a seed of tasks that depends on the update, and more data",
    ),
    Fact(
        "stale_weights",
        "gap/canary",
        (-math.inf, MIN_LAG),
        TWICE,
        "the sampler has older weights than the trainer: it lacks {x:.2g} of an update, by"
        " the log-probs of a fixed text",
        "looking at what the sync sends, adapters included, and whether the sampler's prefix"
        " cache is emptied after it; --sampler torch",
    ),
    GAP._replace(beyond=(0, 5e-4), unless=lambda cfg: cfg.staleness or below_float32(cfg)),
    GAP,
    GAP._replace(
        metric="gap/logprob_max",
        beyond=(0, 5),
        updates=TWICE,
        says="sampler and trainer give a token log-probs that differ by {x:.3g} nats: their"
        " tokens, weights or precision differ",
    ),
    Fact(
        "no_end_token",
        "length/no_end",
        (0, 0),
        1,
        "{x:.0%} of the completions that stopped have no end token",
        "whether the sampler returns the end token, and calls answers that the limit cut"
        " 'stop': the end is not trained then, or a cut answer counts as a whole one",
    ),
    Fact(
        "advantages_uneven",
        "groups/advantage_sum",
        (0, 1e-3),
        TWICE,
        "a group's advantages add up to {x:.0%} of the sum of their sizes, not to 0: its"
        " baseline is not its own mean",
        "which rollouts the baseline is the mean of: those of one prompt, in the order of"
        " the advantages",
    ),
    VALUES._replace(beyond=(0, 1e-4), unless=below_float32),
    VALUES,
)


# of evaluations


@fact("other seeds or rows for --eval-env, and removing duplicates from the data")
def held_out_seen(records: list[Record], cfg: Config) -> str:
    """Training has not had the held-out tasks. Judged only where nearly each episode is a task with
    an opening of its own: in games training has the same openings anyway."""
    now = records[-1]
    for env in evaluated(now, "seen"):
        seen, openings = finite(now, f"{env}/seen"), finite(now, f"{env}/openings")
        many = openings == finite(now, f"{env}/tasks") >= MANY_TASKS * cfg.eval_num_tasks
        if seen > MAX_SEEN and many:
            return (
                f"{seen:.0%} of the held-out tasks of {env.removeprefix('eval/')} were"
                " trained on, so their accuracy also counts what was memorized"
            )
    return ""


@fact("the loop over the held-out tasks: one batch of them, or seeds that repeat a task")
def tasks_missing(records: list[Record], cfg: Config) -> str:
    """An evaluation plays as many tasks as were asked for."""
    now = records[-1]
    for env in evaluated(now, "asked"):
        asked, played = finite(now, f"{env}/asked"), finite(now, f"{env}/played")
        if played < asked:
            return f"{played:.0f} of {asked:.0f} tasks of {env.removeprefix('eval/')} were played"
    return ""


@fact("which weights the evaluation samples with, and whether its answers come from a cache")
def answers_unchanged(records: list[Record], cfg: Config) -> str:
    """Once the policy has moved, not all greedy answers are those of the first evaluation."""
    now, moved = records[-1], sum(known(records, "update/moved"))
    for env in evaluated(now, "same_answers"):
        same, tasks = finite(now, f"{env}/same_answers"), finite(now, f"{env}/tasks")
        unsolved = finite(now, f"{env}/accuracy") < 0.9
        many = tasks >= 8 and tasks * finite(now, f"{env}/tokens_mean") >= 200
        if same == 1 and moved > 0.02 and many and unsolved:
            return (
                f"updates have moved log-probs by {moved:.2g} nats, but all {tasks:.0f}"
                f" answers on {env.removeprefix('eval/')} are those of the first evaluation"
            )
    return ""


# of sampler and trainer


@fact(
    "what the sampler sets by itself: temperature, top-p, top-k or a repetition penalty,"
    " such as from a generation_config.json"
)
def draws_otherwise(records: list[Record], cfg: Config) -> str:
    """The mean of -log π over sampled tokens is the mean entropy of π, up to chance; the longer a
    run, the smaller a difference shows."""
    all_updates = [r for r in updates_of(records) if not math.isnan(finite(r, "gap/surprise_z"))]
    if len(all_updates) < TWICE or cfg.filter_groups or cfg.staleness or cfg.overlap:
        return ""  # chosen by what they earned, or drawn with older weights
    z = sum(finite(r, "gap/surprise_z") for r in all_updates) / math.sqrt(len(all_updates))
    off, entropy, gap = (
        statistics.fmean(finite(r, name) for r in all_updates)
        for name in ("gap/surprise", "policy/entropy", "gap/logprob_mean")
    )
    if not (abs(z) > 4 and abs(off) > max(0.01, 2 * gap)):
        return ""
    return (
        "the sampler draws from another distribution than the one whose log-probs both sides"
        f" report: -log π of its tokens is {entropy + off:.3g} nats on average, the entropy"
        f" of π {entropy:.3g}, {abs(z):.0f} standard errors apart"
    )


@fact("the seeds of the sampler: one for each rollout, not one for a group, a worker or an update")
def equal_answers(records: list[Record], cfg: Config) -> str:
    """A group has about as many equal answers as their probabilities say."""
    pairs = [
        (finite(r, "groups/equal_answers"), finite(r, "groups/likely_equal"))
        for r in updates_of(records)
    ]
    pairs = [pair for pair in pairs if not math.isnan(sum(pair))][-MIN_UPDATES:]
    if len(pairs) < TWICE:
        return ""
    equal, likely = (sum(column) for column in zip(*pairs, strict=True))
    chance = 3 * cfg.group_size * (cfg.group_size - 1) / 2  # pairs of three equal groups
    if equal <= 2 * likely + chance and likely <= 2 * equal + chance:
        return ""
    return f"{equal:.0f} pairs of answers of a group were equal, where {likely:.0f} are likely"


# of the loss


@fact(
    "looking for the end token in the mask: where it is also the token of the padding, a"
    " mask made of ids loses it; make the mask of lengths"
)
def tokens_left_out(records: list[Record], cfg: Config) -> str:
    """Every sampled token is in the loss, and no other."""
    last = records[-MIN_UPDATES:]
    lost = [finite(r, "tokens/sampled") - finite(r, "tokens/trained") for r in last]
    dropped = [finite(r, "episodes/failed") for r in last if r.get("episodes/failed")]
    if dropped or cfg.filter_groups or cfg.mask_truncated_completions:
        return ""
    if len(lost) < MIN_UPDATES or not all(abs(tokens) > 0 for tokens in lost):  # NaN: not measured
        return ""
    sampled, trained = (finite(last[-1], f"tokens/{name}") for name in ("sampled", "trained"))
    return f"the policy sampled {sampled:.0f} tokens, and {trained:.0f} are in the loss"


@fact("one denominator for the whole step, computed before its micro-batches")
def loss_weight(records: list[Record], cfg: Config) -> str:
    """The token weights of a step add up to 1: 0 without a token in the loss, and with `constant`
    aggregation any number."""
    sums = last_of(records[-WINDOW:], "loss/weight")
    free = getattr(cfg.options, "aggregation", "") == "constant" or cfg.mask_truncated_completions
    if free or not sums or not all(x > 0 and abs(x - 1) > 1e-3 for x in sums):
        return ""
    return f"the token weights of a gradient step add up to {sums[-1]:.3g}, not to 1"


@fact("where old log-probs are computed: once, before the first step of an update")
def ratio_stays_one(records: list[Record], cfg: Config) -> str:
    """After the first of several steps the policy is not π_old any more."""
    last = [r for r in records[-TWICE:] if finite(r, "update/steps") > 1]
    pairs = [(finite(r, "update/moved"), abs(finite(r, "kl/approx"))) for r in last]
    if len(pairs) < TWICE or not all(m > 1e-4 and kl < m**2 / 1000 for m, kl in pairs):
        return ""
    moved, kl = pairs[-1]
    return (
        f"an update of several steps moved log-probs by {moved:.2g} nats, but kl/approx is"
        f" {kl:.1g}: the policy ratio stays 1, so nothing is clipped"
    )


@fact(
    "which weights the reference has (a copy after the warm start), and whether dropout,"
    " temperature and adapters are those of the policy"
)
def reference_differs(records: list[Record], cfg: Config) -> str:
    """At update 1 the reference is the policy."""
    first = next((r for r in records if r.get("update") == 1), {})
    kl, gap = finite(first, "kl/reference"), finite(first, "gap/logprob_max")
    several = cfg.num_epochs > 1 or cfg.num_minibatches > 1
    other = cfg.teacher or several or (cfg.sft_steps and cfg.lora_rank)
    limit = max(ROUNDING, min(gap, 0.1) ** 2 if below_float32(cfg) else 0.0)
    wrong = kl > limit and not other
    return f"the KL to the reference was {kl:.2g} nats at update 1, not 0" if wrong else ""


@fact("a reference that is a copy, made before the first step, and in no optimizer")
def reference_moves(records: list[Record], cfg: Config) -> str:
    """The reference stays behind. After m nats of movement the KL is about m²/2; a tenth of that
    is still not 0."""
    last = records[-MIN_UPDATES:]
    if len(last) < MIN_UPDATES:
        return ""
    for before, now in itertools.pairwise(last):
        moved = finite(before, "update/moved")
        noise = max(1e-3, 3 * finite(before, "gap/logprob_mean"))
        if not (moved > noise and finite(now, "kl/reference") < moved**2 / 20):
            return ""
    return (
        f"the KL to the reference is {finite(last[-1], 'kl/reference'):.2g} although the"
        f" update before moved the policy by {moved:.2g} nats per token: the reference"
        " changes with it"
    )


# of the step


@fact(
    "whether the loss has a gradient; which weights the optimizer holds (those of the model"
    " that samples, and made after its adapters), and what lr a scheduler gives them"
)
def no_movement(records: list[Record], cfg: Config) -> str:
    """Where returns differ within groups, an update moves the policy."""
    last = [r for r in records[-TWICE:] if (r.get("update") or 0) > value_warmup(cfg)]
    if len(last) < TWICE or not all(may_learn(r, cfg) for r in last):
        return ""
    now = last[-1]
    skipped = all(finite(r, "update/skipped") == 1 and not r.get("grad/norm") for r in last)
    if skipped and not getattr(cfg.options, "target_kl", 0):
        if finite(now, "grad/passes") == 0:
            return "the passes give the weights a gradient, of which the optimizer has nothing"
        differ = 1 - finite(now, "groups/zero_std_fraction")
        return f"returns differ in {differ:.0%} of the groups, but no weight has a gradient"
    still = all(
        finite(r, "update/unchanged") == 1 or finite(r, "update/moved") < ROUNDING for r in last
    )
    stepped = all(finite(r, "update/steps") > 0 and finite(r, "grad/norm") > 0 for r in last)
    if not still or not stepped:
        return ""
    return (
        "updates do not change the policy: the gradient has a norm of"
        f" {now['grad/norm']:.2g}, and log-probs moved by {finite(now, 'update/moved'):.1g}"
        " nats"
    )


@fact(
    "which weights have no gradient: frozen or detached layers, gradient checkpointing,"
    " weights that the optimizer does not hold, a layer that takes no part in the output"
)
def weights_unchanged(records: list[Record], cfg: Config) -> str:
    """A step changes every trained weight."""
    first = max(1, value_warmup(cfg))
    last = [r for r in records[-TWICE:] if finite(r, "update/steps") > 0 and r["update"] > first]
    least = min((finite(r, "update/unchanged") for r in last), default=0.0)
    untrained = getattr(cfg.options, "value_coef", 1) == 0
    if len(last) < TWICE or not 0 < least < 1 or untrained:
        return ""
    name = last[-1].get("example/unchanged", "")
    return f"steps leave {least:.0%} of the trained tensors exactly as before, such as {name}"


@fact(
    "the lr of the optimizer's groups in this update (a scheduler, a division by"
    " accumulation steps), and whether bfloat16 weights have float32 masters"
)
def step_size(records: list[Record], cfg: Config) -> str:
    """AdamW changes a weight by 0.1 to 1 times the learning rate; below float32, its master."""
    last = [r for r in records[-TWICE:] if finite(r, "update/steps") > 0]
    if len(last) < TWICE or last[0]["update"] <= value_warmup(cfg) or not cfg.lr:
        return ""
    if all(finite(r, "update/masters_apart") == 0 for r in last):
        return f"no master differs from its {cfg.dtype} weight, so that small steps are lost"
    rates = [finite(r, "update/lr") if "update/lr" in r else cfg.lr for r in last]
    if not min(rates) > 0:  # the schedule of the settings has ended
        return ""
    sizes = [finite(r, "update/step_size") * cfg.lr / lr for r, lr in zip(last, rates, strict=True)]
    most = 4 * max(finite(r, "update/steps") for r in last)
    if max(sizes) < 0.03 or (min(sizes) > most and cfg.optimizer == "adamw"):
        return f"weights change by {sizes[-1]:.2g} times --lr {cfg.lr:g} (root mean square)"
    return ""


@fact(
    "where gradients are dropped or scaled between the passes: zero_grad before the step, a"
    " mean over micro-batches or ranks in place of a sum"
)
def passes_lost(records: list[Record], cfg: Config) -> str:
    """The gradient of a step is the sum of its backward passes, over all ranks."""
    stepped = [r for r in records[-WINDOW:] if finite(r, "update/steps") > 0]
    found = last_of(stepped, "grad/passes", TWICE)
    if not found or not min(abs(x - 1) for x in found) > 0.05:
        return ""
    return f"the gradient of a step is {found[-1]:.2g} times the sum of what its passes gave"


@fact(
    "printing a few rollouts with their advantages: the sign of the loss, and the order of"
    " rollouts and rewards, such as after a shuffle or a gather"
)
def wrong_direction(records: list[Record], cfg: Config) -> str:
    """An update makes likelier what earned more than its group; judged only where it moved the
    policy further than rounding. A healthy correlation is about 0.7."""
    if cfg.gamma < 1 or not cfg.reward_coef or "feedback" in needs(cfg) or cfg.kl_coef > 0.5:
        return ""  # it follows something else than the returns of episodes
    values = [
        finite(r, "update/direction")
        for r in records[-MIN_UPDATES:]
        if finite(r, "update/moved") > 2 * finite(r, "gap/logprob_mean")
    ]
    if len(values) < MIN_UPDATES or not max(values) < 0.1:
        return ""
    return (
        "updates do not make likelier what earned more than its group: returns and changes"
        f" of log-probs correlate by {statistics.fmean(values):.2f}"
    )


FACTS: tuple[Fact | Check, ...] = (
    no_movement, answers_unchanged, *ROWS, draws_otherwise, equal_answers, weights_unchanged,
    step_size, passes_lost, loss_weight, tokens_left_out, wrong_direction, ratio_stays_one,
    reference_moves, reference_differs, tasks_missing, held_out_seen,
)  # fmt: skip


def value_warmup(cfg: Config) -> int:
    """Updates that train the value head alone."""
    return getattr(cfg.options, "value_warmup", 0)


def may_learn(record: Record, cfg: Config) -> bool:
    """Whether an update has something to learn from: returns that differ within a group."""
    finite_gradient = "grad/norm" not in record or not math.isnan(finite(record, "grad/norm"))
    rewarded = cfg.reward_coef and "feedback" not in needs(cfg)
    alive = finite(record, "groups/zero_std_fraction") < 1 and finite(record, "tokens/trained") != 0
    return bool(cfg.lr and rewarded and alive and finite_gradient)
