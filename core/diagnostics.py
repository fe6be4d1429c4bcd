"""An evening on metrics, 4 of 4. Warnings about training that goes wrong: facts and symptoms.

They are computed from the records and the settings alone, so a resumed run raises the same
warnings at the same updates. A broken fact (core/invariants.py) names a fault; a symptom, below,
such as a low entropy, is what training that is set up badly often shows. runs/clinic has faults,
and what they raise.
"""

import math
import statistics

from core.config import KNOWN, Config, needs
from core.invariants import FACTS, Check, Fact, by_group, fact
from core.results import Record, from_to
from core.series import (
    MIN_UPDATES,
    WINDOW,
    change_of,
    evaluated,
    finite,
    is_evaluation,
    least_of,
    mean_of,
    updates_of,
    values_of,
)

CONFIG = Config(lr=5e-5)  # where no settings are given
NO_REWARD = (
    "reading in report.html what the model answers and what the environment rewards; then a"
    " reward for a part of the task, easier tasks, a warm start with --sft-steps or --algo sdpo"
    " where there are demonstrations, or a better model"
)
ADVICE = {  # what to try with these models if no reward was earned
    "tiny": "what tiny was pretrained on, which is all that it can do (--env"
    f" {' '.join(KNOWN)}); for other tasks a warm start with --sft-steps 200, where the"
    " environment has demonstrations, or a model that follows instructions, such as"
    " --model-id smollm2 (core/files/smollm2.py)",
    "tiny-random": "a warm start with --sft-steps 800, as its weights are random, or --model-id"
    " tiny",
}
OWN_REWARDS = ("rewarded:", "agent:")
OWN_REWARD = (
    "first whether your own code rewards an answer that you know to be right (python -m"
    " environments play SPEC shows its reward, and what your code prints)"
)
QUIET_UPDATES = 10  # updates without a warning after which it may be raised again
MAX_EVALUATIONS = 20  # how many earlier evaluations the latest one is compared with
MAX_UNSOLVED = 0.1  # fraction of groups up to which it does not matter if all are dead
# how far a mean return has to fall: in standard deviations of a return, and of a mean of P returns
# (P, not P·G: the rollouts of a task depend on each other)
MIN_FALL, CERTAIN_FALL = 0.75, 3.0
EXPLAINED = {  # one cause, one warning: those that take the place of another
    "below_start": {"reward_without_accuracy", "no_movement", "answers_unchanged"},
    "dead_groups": {"no_reward", "below_start", "equal_answers"},
}

RUNAWAY = Fact(
    "kl_runaway",
    "update/moved",
    (0, 0.3),
    MIN_UPDATES,
    "an update changes log-probs by {x:.2g} nats per token on average, which is too much",
    "a lower --lr, fewer --num-epochs, a narrower clip, a higher --kl-coef",
)
ROWS = (
    Fact(
        "weights_at_cap",
        "weights/capped",
        (0, 0.05),
        MIN_UPDATES,
        "{x:.1%} of the tokens have an importance weight beyond its cap: sampler and trainer"
        " give them different probabilities",
        "the same --dtype on both sides (float32 to find out), --top-p 1 --top-k 0",
    ),
    RUNAWAY,
    RUNAWAY._replace(
        metric="kl/reference",
        beyond=(0, 0.5),
        says="the policy is {x:.2g} nats per token from its reference, which is too far",
    ),
    RUNAWAY._replace(
        metric="kl/approx",
        beyond=(0, 0.05),
        says="one update takes the policy {x:.2g} nats per token away, which is too far",
    ),
    Fact(
        "never_stops",
        "length/hit_token_limit",
        (0, 0.95),
        MIN_UPDATES,
        "{x:.0%} of the completions end at --max-tokens, so hardly any is a finished answer",
        "a higher --max-tokens, a warm start with --sft-steps, or a model that ends its"
        " turns (a base model without a chat template often does not)",
    ),
    Fact(
        "episodes_cut",
        "episodes/truncated",
        (0, 0.2),
        WINDOW,
        "{x:.0%} of the episodes are cut before their end, so their returns lack what would"
        " have followed",
        "a higher --max-turns or --max-model-len, or a higher limit of the environment",
    ),
)


def advice_without_reward(cfg: Config) -> str:
    """What to try if no rollout earns a reward."""
    runs_known = {*map(str, cfg.env)} <= {*KNOWN}  # then the list of them is no advice
    advice = ADVICE.get("" if runs_known else cfg.model_id, NO_REWARD)
    own = any(str(spec).startswith(OWN_REWARDS) for spec in cfg.env)
    return f"{OWN_REWARD}; else {advice}" if own else advice


def new_warnings(records: list[Record], cfg: Config = CONFIG) -> dict[str, str]:
    """Returns the warnings to raise at the last record: name -> message.

    A warning is raised if it holds now and held in none of the QUIET_UPDATES updates before; at an
    evaluation, also not at the evaluation before.

    `records` are those of the run so far; `cfg`: its settings.
    """
    active = active_warnings(records, cfg)
    if not active:
        return {}
    before = range(len(records) - 1, 0, -1)  # records[:end] is the run one, two, .. records ago
    ends = [*before[:QUIET_UPDATES]]
    if is_evaluation(records[-1]):
        ends += [end for end in before if is_evaluation(records[end - 1])][:1]
    held = {name for end in ends for name in active_warnings(records[:end], cfg)}
    return {name: message for name, message in active.items() if name not in held}


def active_warnings(records: list[Record], cfg: Config = CONFIG) -> dict[str, str]:
    """Returns the warnings that hold at the last record: name -> message.

    A message is one line with the measured values and what to try. A comparison of held-out
    accuracies can hold only at an evaluation. Missing and non-finite values raise no warning.
    """
    if not records or "update" not in records[-1]:
        return {}
    found: dict[str, str] = {}
    for one in (*FACTS, *SYMPTOMS):
        if one.name not in found and (what := one.broken(records, cfg)):
            tries = advice_without_reward(cfg) if one is no_reward else one.try_
            found[one.name] = f"{what}; try {tries}"
    for name, causes in EXPLAINED.items():
        if causes & found.keys():
            found.pop(name, None)
    return found


@fact(
    "reading the rollouts with the highest return in report.html, a stricter reward,"
    " --kl-coef, more tasks"
)
def reward_without_accuracy(records: list[Record], cfg: Config) -> str:
    """Held-out accuracy fell beyond both 95% intervals since an evaluation; reward rose since."""
    if not is_evaluation(records[-1]):
        return ""
    now, recent = records[-1], records[-WINDOW:]
    ends = range(len(records) - 2 * WINDOW, 0, -1)
    for end in [end for end in ends if is_evaluation(records[end - 1])][:MAX_EVALUATIONS]:
        then = records[end - 1]
        reward = change_of(records[end : end + WINDOW], recent, "reward/mean")
        if not reward or reward[1] < reward[0]:
            continue
        for env in evaluated(then, "ci_low"):
            if fell := _fell(env, then, now):
                return f"since update {then['update']} reward rose from {from_to(*reward)}, {fell}"
    return ""


@fact("the reward and its assignment to rollouts; a lower --lr, from an earlier checkpoint")
def below_start(records: list[Record], cfg: Config) -> str:
    """The policy is no worse than before the first step, by accuracy and by reward."""
    first = next(filter(is_evaluation, records), {})
    for env in evaluated(first, "ci_low"):
        if fell := _fell(env, first, records[-1]):
            return f"{fell} at the start"
    return _reward_fell(records, cfg)


def _fell(env: str, then: Record, now: Record) -> str:
    """Whether the accuracy on "eval/<env>" fell beyond both 95% intervals."""
    if not finite(now, f"{env}/ci_high") < finite(then, f"{env}/ci_low"):
        return ""
    before, after = finite(then, f"{env}/accuracy"), finite(now, f"{env}/accuracy")
    return f"accuracy on {env.removeprefix('eval/')} fell to {after:.2f}, from {before:.2f}"


def _reward_fell(records: list[Record], cfg: Config) -> str:
    """Each of the last updates earned clearly less than the first, on tasks of the same level."""
    first, last = updates_of(records)[:1], records[-MIN_UPDATES:]
    if not first or last[0].get("update", 0) <= first[0]["update"]:
        return ""
    if len({finite(r, "groups/level") for r in first + last if "groups/level" in r}) > 1:
        return ""
    rewards = [finite(r, "reward/mean") for r in first + last]
    spreads = [finite(r, "reward/std") for r in first + last]
    start, highest = rewards[0], max(rewards[1:])
    clear = max(spreads) * max(MIN_FALL, CERTAIN_FALL / math.sqrt(cfg.num_prompts))
    if math.isnan(sum(rewards + spreads)) or start - highest <= clear:
        return ""
    return (
        f"reward fell from {start:.2f} in update {first[0]['update']} to at most"
        f" {highest:.2f} in the last {len(last)}"
    )


@fact(NO_REWARD)
def no_reward(records: list[Record], cfg: Config) -> str:
    """In some update so far returns differed, or one was above 0."""
    updates = updates_of(records)
    nothing = [finite(r, "reward/min") == finite(r, "reward/max") <= 0 for r in updates]
    trains_on_it = cfg.reward_coef and "feedback" not in needs(cfg)
    if len(updates) < MIN_UPDATES or not all(nothing) or not trains_on_it:
        return ""
    broken = mean_of(records[-WINDOW:], "info/agent_error")
    ended = f"; {broken:.0%} of the agents ended with an error" if broken > 0 else ""
    cut = least_of(records[-WINDOW:], "length/hit_token_limit")
    ended += f"; {cut:.0%} of completions end at --max-tokens" if cut > 0.5 else ""
    return f"no rollout has earned a reward in all {len(updates)} updates so far{ended}"


@fact(
    "what the reward depends on (python -m environments check SPEC), a warm start"
    " (--sft-steps) where the policy never succeeds, easier tasks, --curriculum 0.8,"
    " --filter-groups 3, a larger --group-size"
)
def dead_groups(records: list[Record], cfg: Config) -> str:
    """Returns differ in enough of the groups that are not all right: the others have no gradient.
    (Counted as if no solved group had: where some have, dead ones go unnoticed.)"""
    if not by_group(cfg):
        return ""
    updates = updates_of(records)
    returns = {finite(r, f"reward/{end}") for r in updates for end in ("min", "max")}
    if len(updates) >= MIN_UPDATES and len(returns) == 1 and min(returns) > 0:
        return f"in all {len(updates)} updates every rollout has earned {min(returns):g}"
    differing, unsolved = _differing(records[-WINDOW:])
    if not (unsolved > MAX_UNSOLVED and differing <= unsolved / 4):
        return ""
    return (
        f"in {1 - differing / unsolved:.0%} of the groups that are not all right, all"
        f" {cfg.group_size} answers earned the same, so their advantages and gradients are 0"
    )


@fact("--entropy-coef 0.01, a lower --lr, a higher --temperature, or an earlier checkpoint")
def entropy_collapse(records: list[Record], cfg: Config) -> str:
    """The policy solves its tasks, or explores: its entropy is not low, or returns differ in most
    groups that are not all right."""
    recent = records[-WINDOW:]
    values, correct = values_of(recent, "policy/entropy"), mean_of(recent, "reward/correct")
    entropy = statistics.median(values) if values else math.nan
    differing, unsolved = _differing(recent)
    if not (entropy < 0.02 and correct < 0.9) or differing > 0.7 * unsolved:
        return ""
    return (
        f"the policy is almost deterministic (entropy {entropy:.2g} nats per token) but"
        f" solves only {correct:.0%} of its tasks: it no longer explores"
    )


def _differing(recent: list[Record]) -> tuple[float, float]:
    """The fractions of groups whose returns differ, and of those that are not all right."""
    return 1 - mean_of(recent, "groups/zero_std_fraction"), 1 - mean_of(recent, "groups/all_right")


SYMPTOMS: tuple[Fact | Check, ...] = (
    no_reward, reward_without_accuracy, below_start, dead_groups, *ROWS, entropy_collapse,
)  # fmt: skip
