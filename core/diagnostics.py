"""An evening on metrics, 4 of 4. Warnings about training that goes wrong: facts and symptoms.

They are computed from the records and the settings alone, so a resumed run raises the same
warnings at the same updates. A broken fact (core/invariants.py) names a fault; a symptom, below,
such as a low entropy, is what training that is set up badly often shows. Each function returns ""
or what was measured; core/warning_texts.py has what that means and what to try. runs/clinic has
faults, and what they raise.
"""

import math
import statistics

from core.config import KNOWN, Config, needs
from core.invariants import broken_facts, by_group
from core.results import Record, from_to
from core.series import (
    MIN_UPDATES,
    WINDOW,
    change_of,
    evaluated,
    finite,
    is_evaluation,
    level_of,
    mean_of,
    updates_of,
    values_of,
)
from core.warning_texts import WARNINGS

UNCHANGED = {"no_movement", "answers_unchanged"}  # accuracy then says nothing of training
CONFIG = Config(lr=5e-5)  # where no settings are given
EQUAL_REWARDS = ("reading what the reward depends on (python -m environments check SPEC), or harder"
                 " tasks if all answers are right")  # fmt: skip
ADVICE = {  # what to try with these models if no reward was earned
    "tiny": "what tiny was pretrained on, which is all that it can do (--env "
    f"{' '.join(KNOWN)}); for other tasks a warm start with --sft-steps 200, where the environment"
    " has demonstrations, or a model that follows instructions, such as --model-id smollm2"
    " (core/files/smollm2.py)",
    "tiny-random": "a warm start with --sft-steps 800, as its weights are random, or --model-id"
    " tiny",
}
OWN_REWARDS = ("rewarded:", "agent:")
OWN_REWARD = ("first whether your own code rewards an answer that you know to be right (python -m"
              " environments play SPEC shows its reward, and what your code prints)")  # fmt: skip
QUIET_UPDATES = 10  # updates without a warning after which it may be raised again
LONG_WINDOW = 10  # updates at both ends, over which reward and the fraction correct are compared
MAX_EVALUATIONS = 20  # how many earlier evaluations the latest one is compared with
SOLVED = 0.9  # fraction correct above which low entropy is no problem
MIN_ENTROPY = 0.02  # nats per token
ENOUGH_DIFFERING = 0.7  # of the unsolved groups; above it the policy still explores
MAX_CAPPED = 0.05  # fraction of tokens whose importance weight is beyond the cap
MAX_UNSOLVED = 0.1  # fraction of groups up to which it does not matter if all are dead
MIN_DIFFERING = 0.25  # of the unsolved groups; up to it the others are too many
MAX_KL_UPDATE, MAX_KL_REFERENCE = 0.05, 0.5  # nats per token
MAX_MOVED = 0.3  # nats per token by which one update changes a log-prob
MAX_HIT_LIMIT = 0.95  # fraction of completions
MAX_TRUNCATED = 0.2  # fraction of episodes
# how far a mean return has to fall: in standard deviations of a return, and of a mean of P returns
# (P, not P·G: the rollouts of a task depend on each other)
MIN_FALL, CERTAIN_FALL = 0.75, 3.0
MAX_SFT_LOSS = 0.05  # nats per token, of a policy that knows its demonstrations


def advice_without_reward(cfg: Config) -> str:
    """What to try if no rollout earns a reward; "" if the run does not train on rewards."""
    if not cfg.reward_coef or "feedback" in needs(cfg):
        return ""
    runs_known = {*map(str, cfg.env)} <= {*KNOWN}  # then the list of them is no advice
    advice = ADVICE.get("" if runs_known else cfg.model_id, WARNINGS["no_reward"][1])
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
    advice, comparable = advice_without_reward(cfg), by_group(cfg)
    broken = broken_facts(records, cfg)
    recent = [r for r in records[-WINDOW:] if "update" in r]
    # One cause, one warning: the one that explains more takes the place of the other
    no_reward = _no_reward(records) if advice else ""
    equal = _equal_rewards(records)
    dead_groups = equal or _never_spread(records) or _dead_groups(recent, cfg.group_size)
    exploited = _accuracy_fell(records) or _training_accuracy_fell(records)
    below_start = "" if exploited else _below_start(records) or _reward_fell(records, cfg)
    if broken.keys() & UNCHANGED:
        below_start = ""
    if no_reward or below_start or not comparable or "equal_answers" in broken:
        dead_groups = ""
    findings = (
        broken
        | _too_high(recent)
        | {
            "entropy_collapse": _entropy_collapse(recent),
            "reward_without_accuracy": exploited,
            "dead_groups": dead_groups,
            "no_reward": no_reward,
            "below_start": below_start,
            "memorized": _memorized(records),
        }
    )
    tries = {name: what.format(lr=cfg.lr or 0) for name, (_, what, _) in WARNINGS.items()}
    tries |= {"no_reward": advice} | ({"dead_groups": EQUAL_REWARDS} if equal else {})
    return {name: f"{found}; try {tries[name]}" for name, found in findings.items() if found}


def _entropy_collapse(recent: list[Record]) -> str:
    """Low entropy without success, unless returns differ in most unsolved groups: it explores."""
    values, correct = values_of(recent, "policy/entropy"), mean_of(recent, "reward/correct")
    entropy = statistics.median(values) if values else math.nan
    differing, unsolved = _differing(recent)
    if not (entropy < MIN_ENTROPY and correct < SOLVED) or differing > ENOUGH_DIFFERING * unsolved:
        return ""
    return f"entropy {entropy:.2g} nats per token, {correct:.0%} correct"


def _accuracy_fell(records: list[Record]) -> str:
    """Held-out accuracy fell beyond both 95% intervals since an evaluation; reward rose since."""
    if not is_evaluation(records[-1]):
        return ""
    now, recent = records[-1], records[-WINDOW:]
    earlier = [end for end in range(len(records) - 2 * WINDOW, 0, -1)
               if is_evaluation(records[end - 1])]  # fmt: skip
    for end in earlier[:MAX_EVALUATIONS]:
        then = records[end - 1]
        reward = change_of(records[end : end + WINDOW], recent, "reward/mean")
        if not reward or reward[1] < reward[0]:
            continue
        for env in evaluated(then, "ci_low"):
            low, high = finite(then, f"{env}/ci_low"), finite(now, f"{env}/ci_high")
            before, after = finite(then, f"{env}/accuracy"), finite(now, f"{env}/accuracy")
            if high < low and after < before:
                return (f"since update {then['update']} reward rose from {from_to(*reward)}, "
                        f"accuracy on {env.removeprefix('eval/')} fell from "
                        f"{from_to(before, after)}")  # fmt: skip
    return ""


def _training_accuracy_fell(records: list[Record]) -> str:
    """Reward is higher than in the first updates; the fraction correct is at most half as high."""
    first, last = updates_of(records)[:LONG_WINDOW], records[-LONG_WINDOW:]
    if len(first) < LONG_WINDOW or last[0].get("update", 0) <= first[-1]["update"]:
        return ""
    reward, correct = (change_of(first, last, f"reward/{key}") for key in ("mean", "correct"))
    if not reward or not correct or reward[1] < reward[0] or correct[1] > correct[0] / 2:
        return ""
    fell = f"fell from {correct[0]:.2g} to {correct[1]:.2g}"
    return (f"since the first {LONG_WINDOW} updates reward rose from {from_to(*reward)}, the "
            f"fraction of correct rollouts {fell}")  # fmt: skip


def _too_high(recent: list[Record]) -> dict[str, str]:
    """The warnings about single metrics that stay above a limit."""
    found: dict[str, str] = {}
    for name, metric, measured, limit, words in (
        ("weights_at_cap", "weights/capped", mean_of, MAX_CAPPED,
         "{:.1%} of tokens have an importance weight beyond the cap"),
        ("kl_runaway", "kl/approx", level_of, MAX_KL_UPDATE,
         "KL {:.2g} nats per token per update, above {:g}"),
        ("kl_runaway", "kl/reference", level_of, MAX_KL_REFERENCE,
         "KL {:.2g} nats per token from the reference, above {:g}"),
        ("kl_runaway", "update/moved", level_of, MAX_MOVED,
         "an update changes log-probs by {:.2g} nats on average, above {:g}"),
        ("never_stops", "length/hit_token_limit", level_of, MAX_HIT_LIMIT,
         "{:.0%} of completions end at --max-tokens"),
        ("episodes_cut", "episodes/truncated", mean_of, MAX_TRUNCATED,
         "{:.0%} of episodes are cut before their end"),
    ):  # fmt: skip
        if (value := measured(recent, metric)) > limit:
            found.setdefault(name, words.format(value, limit))
    return found


def _dead_groups(recent: list[Record], size: int) -> str:
    """Solved groups need no gradient; of the others, too few have differing returns. (Counted as
    if no solved group had: where some have, dead ones go unnoticed.)"""
    differing, unsolved = _differing(recent)
    if unsolved > MAX_UNSOLVED and differing <= MIN_DIFFERING * unsolved:
        return (f"in {1 - differing / unsolved:.0%} of the groups that are not all right, all "
                f"{size} answers earned the same")  # fmt: skip
    return ""


def _differing(recent: list[Record]) -> tuple[float, float]:
    """The fractions of groups whose returns differ, and of those that are not all right."""
    return 1 - mean_of(recent, "groups/zero_std_fraction"), 1 - mean_of(recent, "groups/all_right")


def _equal_rewards(records: list[Record]) -> str:
    """Since the first update all rollouts have earned the same, and more than nothing."""
    updates = updates_of(records)
    returns = {finite(r, f"reward/{end}") for r in updates for end in ("min", "max")}
    if len(updates) < MIN_UPDATES or len(returns) > 1 or not min(returns) > 0:
        return ""
    return f"in all {len(updates)} updates so far every rollout has earned {min(returns):g}"


def _below_start(records: list[Record]) -> str:
    """Held-out accuracy is below that of the first evaluation, beyond both 95% intervals."""
    first, now = next(filter(is_evaluation, records), {}), records[-1]
    for env in evaluated(first, "ci_low"):
        if finite(now, f"{env}/ci_high") < finite(first, f"{env}/ci_low"):
            before, after = finite(first, f"{env}/accuracy"), finite(now, f"{env}/accuracy")
            return (f"accuracy on {env.removeprefix('eval/')} has fallen from {before:.2f} at the "
                    f"start to {after:.2f}")  # fmt: skip
    return ""


def _reward_fell(records: list[Record], cfg: Config) -> str:
    """Each of the last updates earned clearly less than the first, on tasks of the same level."""
    first, last = updates_of(records)[:1], records[-MIN_UPDATES:]
    if not first or last[0].get("update", 0) <= first[0]["update"]:
        return ""
    if len({finite(r, "groups/level") for r in first + last if "groups/level" in r}) > 1:
        return ""
    rewards, spreads = ([finite(r, f"reward/{key}") for r in first + last]
                        for key in ("mean", "std"))  # fmt: skip
    start, highest = rewards[0], max(rewards[1:])
    clear = max(spreads) * max(MIN_FALL, CERTAIN_FALL / math.sqrt(cfg.num_prompts))
    if math.isnan(sum(rewards + spreads)) or start - highest <= clear:
        return ""
    return (f"reward has fallen from {start:.2f} in update {first[0]['update']} to at most "
            f"{highest:.2f} in the last {len(last)}")  # fmt: skip


def _memorized(records: list[Record]) -> str:
    """Before update 1. A policy whose loss is l gives a demonstration of n tokens the probability
    exp(-l n), about. Had it learned the tasks, it would solve about that fraction of others."""
    now, losses = records[-1], [finite(r, "sft/loss") for r in records if "sft_step" in r][-3:]
    if now["update"] > 0 or not losses or not max(losses) < MAX_SFT_LOSS:
        return ""
    for env in evaluated(now, "ci_high"):
        expected = math.exp(-losses[-1] * finite(now, f"{env}/tokens_mean"))
        if finite(now, f"{env}/ci_high") < expected / 2:
            return (f"the loss of the warm start is {losses[-1]:.2g} nats per token, but accuracy "
                    f"on {env.removeprefix('eval/')} {now[f'{env}/accuracy']:.2f}")  # fmt: skip
    return ""


def _never_spread(records: list[Record]) -> str:
    """Since the first update no group had different returns, and not because they were right."""
    updates = updates_of(records)
    spread = any(finite(r, "groups/zero_std_fraction") != 1 for r in updates)
    solved = any(finite(r, "groups/all_right") >= 1 - MAX_UNSOLVED for r in updates)
    if len(updates) < MIN_UPDATES or spread or solved:
        return ""
    return f"in all {len(updates)} updates so far, the returns within each group were equal"


def _no_reward(records: list[Record]) -> str:
    """In every update so far all returns were equal, and none was above 0."""
    updates = updates_of(records)
    nothing = [finite(r, "reward/min") == finite(r, "reward/max") <= 0 for r in updates]
    if len(updates) < MIN_UPDATES or not all(nothing):
        return ""
    broken = mean_of(records[-WINDOW:], "info/agent_error")
    ended = f"; {broken:.0%} of the agents ended with an error" if broken > 0 else ""
    cut = level_of(records[-WINDOW:], "length/hit_token_limit")
    ended += f"; {cut:.0%} of completions end at --max-tokens" if cut > 0.5 else ""
    return f"no rollout has earned a reward in all {len(updates)} updates so far{ended}"
