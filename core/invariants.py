"""An evening on metrics, 3 of 4. What every correct loop does, whatever the task, and where not.

Most faults of reinforcement learning raise no error, and most break a fact of this table. A fact is
a function of the records and the settings alone, so a resumed run names the same at the same
update. It returns "", or which numbers contradict it; core/warning_texts.py has what that means and
where to look. core/probes.py measures what the loop does not need for itself. A fact is not judged
where it need not hold, such as a baseline that a filter has chosen from.
"""

import itertools
import math
import statistics
from collections.abc import Callable

from core.config import Config, needs
from core.results import Record
from core.series import (
    MIN_UPDATES,
    WINDOW,
    evaluated,
    finite,
    known,
    last_of,
    level_of,
    updates_of,
)

TWICE = 2  # updates in a row, where one number might be chance
ROUNDING = 1e-6  # nats by which log-probs differ that are computed in other micro-batches
SMALLEST_STEP = 0.03  # of --lr; AdamW's steps are 0.1 to 1 of it
LARGEST_STEP = 4.0  # of --lr and of one gradient step
LOST_PASSES = 0.05
UNEVEN = 1e-3  # sum of a group's advantages, as a fraction of the sum of their sizes
ANSWERS_MOVED = 0.02  # nats per token, since the first evaluation
FEW_TASKS, FEW_TOKENS = 8, 200  # held-out tasks, or answers, that may all be as before
MIN_SURPRISE = 0.01  # nats per token
MIN_Z = 4.0  # standard errors of the mean surprise
EQUAL = 2.0  # times as many equal answers as are likely, or half as many
MANY_UPDATES, MIN_ERRORS = 8, 6.0  # or a tenth more or less, in updates that scatter so little
MAX_GAP_MEAN, MAX_GAP_TOKEN = 0.05, 5.0  # nats: mean over tokens; one token, in two updates
MAX_GAP_FLOAT32 = 5e-4  # nats; rounding in float32 is below 1e-5
MIN_LAG = 0.3  # updates that the sampler lacks, in two canaries
MIN_DIRECTION = 0.1  # correlation of returns and changes of log-probs; about 0.7 if healthy
STRONG_KL = 0.5  # a larger --kl-coef may rule an update, which then need not follow the rewards
MAX_SEEN = 0.05  # fraction of held-out openings that training had
MANY_TASKS = 0.9  # different tasks for each held-out episode, at which MAX_SEEN counts


# before training, and of the environment


def demonstrations_wrong(records: list[Record], cfg: Config) -> str:
    """The environment calls its own demonstrations right."""
    found = next((r for r in records if "demonstrations/right" in r), {})
    if not finite(found, "demonstrations/right") < 1:
        return ""
    return (f"the environment calls {finite(found, 'demonstrations/right'):.0%} of its own "
            f"demonstrations right, and wrong {found.get('example/demonstration')}")  # fmt: skip


def prompts_differ(records: list[Record], cfg: Config) -> str:
    """The ids of a prompt decode to what the chat template writes."""
    share = finite(records[-1], "groups/prompts_differ")
    if not share > 0:
        return ""
    example = records[-1].get("example/prompt", "another text")
    return f"the ids of {share:.0%} of the prompts read otherwise, such as {example}"


def reward_differs(records: list[Record], cfg: Config) -> str:
    """Equal answers to one prompt earn the same, also when they are judged again."""
    again = known(records, "reward/judged_otherwise")
    if again and again[0] > 0:
        first = next(r for r in records if "reward/judged_otherwise" in r)
        example = first.get("example/judged", "")
        return f"{again[0]:.0%} of the answers earn something else when judged again: {example}"
    unequal = finite(records[-1], "reward/unequal")
    if not unequal > 0:
        return ""
    example = records[-1].get("example/reward", "")
    return f"{unequal:.0%} of equal answers in a group earned unequal rewards: {example}"


def mixed_groups(records: list[Record], cfg: Config) -> str:
    """The rollouts of a group have one prompt."""
    openings = min(last_of(records[-WINDOW:], "groups/openings"), default=math.nan)
    wrong = by_group(cfg) and openings > 1
    return f"the rollouts of a group have {openings:.3g} different prompts" if wrong else ""


def same_tasks(records: list[Record], cfg: Config) -> str:
    """An update has other tasks than the one before."""
    if last_of(records[-WINDOW:], "groups/repeated", TWICE) != [1, 1]:
        return ""
    return "all tasks of the last two updates were those of the update before"


def held_out_seen(records: list[Record], cfg: Config) -> str:
    """Training has not had the held-out tasks. Judged only where nearly each episode is a task with
    an opening of its own: in games training has the same openings anyway."""
    now = records[-1]
    for env in evaluated(now, "seen"):
        seen, openings = finite(now, f"{env}/seen"), finite(now, f"{env}/openings")
        many = openings == finite(now, f"{env}/tasks") >= MANY_TASKS * cfg.eval_num_tasks
        if seen > MAX_SEEN and many:
            return f"{seen:.0%} of the held-out tasks of {env.removeprefix('eval/')} were sampled"
    return ""


def tasks_missing(records: list[Record], cfg: Config) -> str:
    """An evaluation has as many tasks as were asked for."""
    now, different = records[-1], known(records, "groups/different")
    for env in evaluated(now, "asked"):
        asked, played, tasks = (finite(now, f"{env}/{key}") for key in ("asked", "played", "tasks"))
        if played < asked:
            return f"{played:.0f} of {asked:.0f} tasks of {env.removeprefix('eval/')} were played"
        varied = len(different) > 0 and min(different) >= MANY_TASKS and not cfg.eval_env
        if varied and asked >= FEW_TASKS and tasks <= asked / 2:
            return (f"the accuracy on {env.removeprefix('eval/')} is that of {tasks:.0f} different "
                    f"tasks, of {asked:.0f} that were asked for")  # fmt: skip
    return ""


# of sampler and trainer


def stale_weights(records: list[Record], cfg: Config) -> str:
    """The sampler has the weights of the trainer (core/canary.py)."""
    lags = [finite(record, "gap/canary") for record in records[-TWICE:]]
    if len(lags) < TWICE or not all(lag >= MIN_LAG for lag in lags):  # NaN: not measured
        return ""
    return (f"the sampler lacks {min(lags):.2g} of an update, by the log-probs of a fixed text "
            "(gap/canary)")  # fmt: skip


def sampler_gap(records: list[Record], cfg: Config) -> str:
    """Sampler and trainer give a token the same log-prob, up to rounding."""
    recent = records[-WINDOW:]
    mean, largest = level_of(recent, "gap/logprob_mean"), known(recent, "gap/logprob_max")
    limit = MAX_GAP_FLOAT32 if cfg.dtype == "float32" else MAX_GAP_MEAN
    if cfg.staleness:  # older weights
        return ""
    if mean > limit:
        return f"log-probs differ by {mean:.2g} nats on average, above {limit:g}"
    large = [gap for gap in largest if gap > MAX_GAP_TOKEN]
    if len(large) < 2:
        return ""
    return (f"in {len(large)} of {len(largest)} updates the log-probs of a token differed by up to "
            f"{max(large):.3g} nats")  # fmt: skip


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
    if not (abs(z) > MIN_Z and abs(off) > max(MIN_SURPRISE, 2 * gap)):
        return ""
    return (f"-log π of the sampled tokens is {entropy + off:.3g} nats on average, the entropy of π"
            f" {entropy:.3g}: {abs(z):.0f} standard errors apart")  # fmt: skip


def equal_answers(records: list[Record], cfg: Config) -> str:
    """A group has about as many equal answers as their probabilities say."""
    pairs = [
        (finite(r, "groups/equal_answers"), finite(r, "groups/likely_equal"))
        for r in updates_of(records)
    ]
    pairs = [pair for pair in pairs if not math.isnan(sum(pair))]
    if len(pairs) < TWICE:
        return ""
    equal, likely = (sum(column) for column in zip(*pairs[-MIN_UPDATES:], strict=True))
    chance = 3 * cfg.group_size * (cfg.group_size - 1) / 2  # pairs of three equal groups
    if equal > EQUAL * likely + chance or likely > EQUAL * equal + chance:
        return f"{equal:.0f} pairs of answers were equal lately, where {likely:.0f} are likely"
    equal, likely = (sum(column) for column in zip(*pairs, strict=True))
    excess = [a - b for a, b in pairs]
    errors = abs(statistics.fmean(excess)) / (statistics.stdev(excess) or 1) * len(excess) ** 0.5
    if len(pairs) < MANY_UPDATES or errors < MIN_ERRORS or abs(equal - likely) < likely / 10:
        return ""
    return (f"{equal:.0f} pairs of answers were equal in {len(pairs)} updates, where {likely:.0f} "
            "are likely")  # fmt: skip


def no_end_token(records: list[Record], cfg: Config) -> str:
    """A completion that stopped has an end token."""
    share = finite(records[-1], "length/no_end")
    return f"{share:.0%} of the completions that stopped have no end token" if share > 0 else ""


# of advantages and the loss


def advantages_uneven(records: list[Record], cfg: Config) -> str:
    """The advantages of a group, which is compared with its own mean, add up to 0."""
    found = last_of(records[-WINDOW:], "groups/advantage_sum", TWICE)
    if not found or min(found) <= UNEVEN:
        return ""
    return f"a group's advantages add up to {found[-1]:.0%} of the sum of their sizes, not to 0"


def values_differ(records: list[Record], cfg: Config) -> str:
    """One prompt has one value."""
    found = last_of(records[-WINDOW:], "value/spread", TWICE)
    limit = 1e-4 if cfg.dtype == "float32" else 0.1
    if not found or min(found) <= limit:
        return ""
    return f"the values of one prompt are up to {found[-1]:.2g} apart"


def tokens_left_out(records: list[Record], cfg: Config) -> str:
    """Every sampled token is in the loss, and no other."""
    last = records[-MIN_UPDATES:]
    lost = [finite(r, "tokens/sampled") - finite(r, "tokens/trained") for r in last]
    dropped = [finite(r, "episodes/failed") for r in last if r.get("episodes/failed")]
    if dropped or cfg.filter_groups or cfg.mask_truncated_completions:
        return ""
    if len(lost) < MIN_UPDATES or not all(abs(tokens) > 0 for tokens in lost):  # NaN: not measured
        return ""
    return (f"{finite(last[-1], 'tokens/sampled'):.0f} tokens were sampled, "
            f"{finite(last[-1], 'tokens/trained'):.0f} are in the loss")  # fmt: skip


def loss_weight(records: list[Record], cfg: Config) -> str:
    """The token weights of a step add up to 1: 0 without a token in the loss, and with `constant`
    aggregation any number."""
    sums = last_of(records[-WINDOW:], "loss/weight")
    free = getattr(cfg.options, "aggregation", "") == "constant" or cfg.mask_truncated_completions
    if free or not sums or not all(x > 0 and abs(x - 1) > 1e-3 for x in sums):
        return ""
    return f"the token weights of a gradient step add up to {sums[-1]:.3g}"


def ratio_stays_one(records: list[Record], cfg: Config) -> str:
    """After the first of several steps the policy is not π_old any more."""
    last = [r for r in records[-TWICE:] if finite(r, "update/steps") > 1]
    pairs = [(finite(r, "update/moved"), abs(finite(r, "kl/approx"))) for r in last]
    if len(pairs) < TWICE or not all(m > 1e-4 and kl < m**2 / 1000 for m, kl in pairs):
        return ""
    moved, kl = pairs[-1]
    return f"the update moved log-probs by {moved:.2g} nats, but kl/approx is {kl:.1g}"


def reference_differs(records: list[Record], cfg: Config) -> str:
    """At update 1 the reference is the policy."""
    first = next((r for r in records if r.get("update") == 1), {})
    kl, gap = finite(first, "kl/reference"), finite(first, "gap/logprob_max")
    several = cfg.num_epochs > 1 or cfg.num_minibatches > 1
    other = cfg.teacher or several or (cfg.sft_steps and cfg.lora_rank)
    limit = max(ROUNDING, min(gap, 0.1) ** 2 if cfg.dtype != "float32" else 0.0)
    wrong = kl > limit and not other
    return f"the KL to the reference was {kl:.2g} nats at update 1, not 0" if wrong else ""


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
    return (f"the KL to the reference is {finite(last[-1], 'kl/reference'):.2g} although the "
            f"update before moved the policy by {finite(last[-2], 'update/moved'):.2g} nats "
            "per token")  # fmt: skip


# of the step


def no_movement(records: list[Record], cfg: Config) -> str:
    """Where returns differ within groups, an update moves the policy."""
    last = [r for r in records[-TWICE:] if (r.get("update") or 0) > value_warmup(cfg)]
    if len(last) < TWICE or not all(may_learn(r, cfg) for r in last):
        return ""
    now = last[-1]
    skipped = all(finite(r, "update/skipped") == 1 and not r.get("grad/norm") for r in last)
    if skipped and not getattr(cfg.options, "target_kl", 0):
        differ = 1 - finite(now, "groups/zero_std_fraction")
        if finite(now, "grad/passes") == 0:
            return "the passes give the weights a gradient, of which the optimizer has nothing"
        return f"returns differ in {differ:.0%} of the groups, but no weight has a gradient"
    still = all(
        finite(r, "update/unchanged") == 1 or finite(r, "update/moved") < ROUNDING for r in last
    )
    if not still or not all(
        finite(r, "update/steps") > 0 and finite(r, "grad/norm") > 0 for r in last
    ):
        return ""
    return (f"the gradient has a norm of {now['grad/norm']:.2g}, and log-probs moved by "
            f"{finite(now, 'update/moved'):.1g} nats")  # fmt: skip


def weights_unchanged(records: list[Record], cfg: Config) -> str:
    """A step changes every trained weight."""
    last = [r for r in records[-TWICE:] if finite(r, "update/steps") > 0
            and r["update"] > max(1, value_warmup(cfg))]  # fmt: skip
    least = min((finite(r, "update/unchanged") for r in last), default=0.0)
    untrained = getattr(cfg.options, "value_coef", 1) == 0
    if len(last) < TWICE or not 0 < least < 1 or untrained:
        return ""
    name = last[-1].get("example/unchanged", "")
    return f"{least:.0%} of the trained tensors are exactly as before, such as {name}"


def step_size(records: list[Record], cfg: Config) -> str:
    """AdamW changes a weight by about the learning rate; below float32, its master."""
    last = [r for r in records[-TWICE:] if finite(r, "update/steps") > 0]
    if len(last) < TWICE or last[0]["update"] <= value_warmup(cfg) or not cfg.lr:
        return ""
    if all(finite(r, "update/masters_apart") == 0 for r in last):
        return f"no master differs from its {cfg.dtype} weight, so that small steps are lost"
    rates = [finite(r, "update/lr") if "update/lr" in r else cfg.lr for r in last]
    if not min(rates) > 0:  # the schedule of the settings has ended
        return ""
    sizes = [finite(r, "update/step_size") * cfg.lr / lr for r, lr in zip(last, rates, strict=True)]
    most = LARGEST_STEP * max(finite(r, "update/steps") for r in last)
    if max(sizes) < SMALLEST_STEP or (min(sizes) > most and cfg.optimizer == "adamw"):
        return f"weights change by {sizes[-1]:.2g} times --lr {cfg.lr:g} (root mean square)"
    return ""


def passes_lost(records: list[Record], cfg: Config) -> str:
    """The gradient of a step is the sum of its backward passes, over all ranks."""
    stepped = [r for r in records[-WINDOW:] if finite(r, "update/steps") > 0]
    found = last_of(stepped, "grad/passes", TWICE)
    if not found or not min(abs(x - 1) for x in found) > LOST_PASSES:
        return ""
    return f"the gradient of a step is {found[-1]:.2g} times the sum of what its passes gave"


def wrong_direction(records: list[Record], cfg: Config) -> str:
    """An update makes likelier what earned more than its group; judged only where it moved the
    policy further than rounding."""
    if cfg.gamma < 1 or not cfg.reward_coef or "feedback" in needs(cfg):
        return ""  # it follows something else than the returns of episodes
    values = [finite(r, "update/direction") for r in records[-MIN_UPDATES:]
              if finite(r, "update/moved") > 2 * finite(r, "gap/logprob_mean")]  # fmt: skip
    if cfg.kl_coef > STRONG_KL or len(values) < MIN_UPDATES:
        return ""
    if not max(values) < MIN_DIRECTION:
        return ""
    return (f"returns and the changes of log-probs correlate by {statistics.fmean(values):.2f} in "
            f"the last {len(values)} updates")  # fmt: skip


def answers_unchanged(records: list[Record], cfg: Config) -> str:
    """Once the policy has moved, not all greedy answers are those of the first evaluation."""
    now, moved = records[-1], sum(known(records, "update/moved"))
    for env in evaluated(now, "same_answers"):
        same, tasks = finite(now, f"{env}/same_answers"), finite(now, f"{env}/tasks")
        unsolved = finite(now, f"{env}/accuracy") < 0.9
        many = tasks >= FEW_TASKS and tasks * finite(now, f"{env}/tokens_mean") >= FEW_TOKENS
        if same == 1 and moved > ANSWERS_MOVED and many and unsolved:
            name = env.removeprefix("eval/")
            return (f"log-probs have moved by {moved:.2g} nats, but all {tasks:.0f} answers on "
                    f"{name} are those of the first evaluation")  # fmt: skip
    return ""


FACTS: dict[str, Callable[[list[Record], Config], str]] = {
    function.__name__: function
    for function in (
        demonstrations_wrong, prompts_differ, reward_differs, mixed_groups, same_tasks,
        held_out_seen, tasks_missing, stale_weights, sampler_gap, draws_otherwise, equal_answers,
        no_end_token, advantages_uneven, values_differ, tokens_left_out, loss_weight,
        ratio_stays_one, reference_differs, reference_moves, no_movement, weights_unchanged,
        step_size, passes_lost, wrong_direction, answers_unchanged,
    )
}  # fmt: skip


def broken_facts(records: list[Record], cfg: Config) -> dict[str, str]:
    """The facts that the records contradict: name -> the numbers."""
    found = {name: fact(records, cfg) for name, fact in FACTS.items()}
    return {name: numbers for name, numbers in found.items() if numbers}


def by_group(cfg: Config) -> bool:
    """Whether the algorithm compares the rollouts of a group."""
    return "groups" in needs(cfg) and "feedback" not in needs(cfg)


def value_warmup(cfg: Config) -> int:
    """Updates that train the value head alone."""
    return getattr(cfg.options, "value_warmup", 0)


def may_learn(record: Record, cfg: Config) -> bool:
    """Whether an update has something to learn from: returns that differ within a group."""
    finite_gradient = "grad/norm" not in record or not math.isnan(finite(record, "grad/norm"))
    rewarded = cfg.reward_coef and "feedback" not in needs(cfg)
    alive = finite(record, "groups/zero_std_fraction") < 1 and finite(record, "tokens/trained") != 0
    return bool(cfg.lr and rewarded and alive and finite_gradient)
