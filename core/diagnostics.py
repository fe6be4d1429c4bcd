"""An evening on metrics, 2 of 2. Twenty-one warnings about training that goes wrong.

They are computed from the records and the settings alone, so a resumed run raises the same
warnings at the same updates. `active_warnings` asks the functions below, each of which returns ""
or what was measured; core/warning_texts.py has what that means and what to try. A missing metric is
NaN, and every comparison with NaN is false: hence conditions such as `not x < limit`. runs/clinic
has twenty faults and the warnings that they raise. Some warnings watch what a correct loop does by
construction: sampler and trainer give a token the same log-prob, a group has one task, the token
weights of a loss add up to 1. These name a fault in two or three updates.
"""

import itertools
import math
import statistics

from core.config import KNOWN, Config, needs
from core.results import Record, from_to
from core.warning_texts import WARNINGS

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
WINDOW = 5  # a metric is judged by its mean over this many updates
MIN_UPDATES = 3  # or by each of this many, where each is a clear sign
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
MAX_GAP_MEAN, MAX_GAP_TOKEN = 0.05, 5.0  # nats: mean over tokens; one token, in two updates
MAX_GAP_FLOAT32 = 5e-4  # nats; rounding in float32 is below 1e-5
MIN_LAG = 0.3  # updates that the sampler lacks, in two canaries
MIN_DIRECTION = 0.1  # correlation of returns and changes of log-probs; about 0.7 if healthy
STRONG_KL = 0.5  # a larger --kl-coef may rule an update, which then need not follow the rewards
MAX_SEEN = 0.05  # fraction of held-out openings that training had
MANY_TASKS = 0.9  # different tasks for each held-out episode, at which MAX_SEEN counts
# how far a mean return has to fall: in standard deviations of a return, and of a mean of P returns
# (P, not P·G: the rollouts of a task depend on each other)
MIN_FALL, CERTAIN_FALL = 0.75, 3.0
MAX_SFT_LOSS = 0.05  # nats per token, of a policy that knows its demonstrations


def advice_without_reward(cfg: Config) -> str:
    """What to try if no rollout earns a reward; "" if the run does not train on rewards."""
    if not cfg.reward_coef or "feedback" in needs(cfg):
        return ""
    advice = ADVICE.get(cfg.model_id, WARNINGS["no_reward"][1])
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
    if _is_evaluation(records[-1]):
        ends += [end for end in before if _is_evaluation(records[end - 1])][:1]
    held = {name for end in ends for name in active_warnings(records[:end], cfg)}
    return {name: message for name, message in active.items() if name not in held}


def active_warnings(records: list[Record], cfg: Config = CONFIG) -> dict[str, str]:
    """Returns the warnings that hold at the last record: name -> message.

    A message is one line with the measured values and what to try. A comparison of held-out
    accuracies can hold only at an evaluation. Missing and non-finite values raise no warning.
    """
    if not records or "update" not in records[-1]:
        return {}
    by_group = "groups" in needs(cfg) and "feedback" not in needs(cfg)
    advice = advice_without_reward(cfg)
    recent = [r for r in records[-WINDOW:] if "update" in r]
    # One cause, one warning: the one that explains more takes the place of the other
    no_reward = _no_reward(records) if advice else ""
    equal = _equal_rewards(records)
    dead_groups = equal or _never_spread(records) or _dead_groups(recent, cfg.group_size)
    exploited = _accuracy_fell(records) or _training_accuracy_fell(records)
    below_start = "" if exploited else _below_start(records) or _reward_fell(records, cfg)
    follows_rewards, high = cfg.kl_coef <= STRONG_KL, _too_high(recent)
    findings = {
        "entropy_collapse": _entropy_collapse(recent),
        "reward_without_accuracy": exploited,
        "weights_at_cap": high.get("weights_at_cap", ""),
        "dead_groups": "" if no_reward or below_start or not by_group else dead_groups,
        "kl_runaway": high.get("kl_runaway", ""),
        "sampler_gap": _sampler_gap(recent, cfg) if not cfg.staleness else "",  # older weights
        "stale_weights": _stale_weights(recent),
        "never_stops": high.get("never_stops", ""),
        "episodes_cut": high.get("episodes_cut", ""),
        "adapters_unchanged": _adapters_unchanged(recent),
        "no_reward": no_reward,
        "below_start": below_start,
        "memorized": _memorized(records),
        "wrong_direction": _wrong_direction(recent) if advice and follows_rewards else "",
        "mixed_groups": high.get("mixed_groups", "") if by_group else "",
        "same_tasks": _same_tasks(recent),
        "tokens_left_out": _tokens_left_out(recent, cfg),
        "loss_weight": _loss_weight(recent, cfg),
        "reference_moves": _reference_moves(records),
        "value_head_frozen": _value_head_frozen(recent),
        "held_out_seen": _held_out_seen(records[-1], cfg),
    }
    tries = {name: what.format(lr=cfg.lr or 0) for name, (_, what, _) in WARNINGS.items()}
    tries |= {"no_reward": advice} | ({"dead_groups": EQUAL_REWARDS} if equal else {})
    return {name: f"{found}; try {tries[name]}" for name, found in findings.items() if found}


def _entropy_collapse(recent: list[Record]) -> str:
    """Low entropy without success, unless returns differ in most unsolved groups: it explores."""
    values, correct = _values(recent, "policy/entropy"), mean_of(recent, "reward/correct")
    entropy = statistics.median(values) if values else math.nan
    differing, unsolved = _differing(recent)
    if not (entropy < MIN_ENTROPY and correct < SOLVED) or differing > ENOUGH_DIFFERING * unsolved:
        return ""
    return f"entropy {entropy:.2g} nats per token, {correct:.0%} correct"


def _accuracy_fell(records: list[Record]) -> str:
    """Held-out accuracy fell beyond both 95% intervals since an evaluation; reward rose since."""
    if not _is_evaluation(records[-1]):
        return ""
    now, recent = records[-1], records[-WINDOW:]
    earlier = [end for end in range(len(records) - 2 * WINDOW, 0, -1)
               if _is_evaluation(records[end - 1])]  # fmt: skip
    for end in earlier[:MAX_EVALUATIONS]:
        then = records[end - 1]
        reward = change_of(records[end : end + WINDOW], recent, "reward/mean")
        if not reward or reward[1] < reward[0]:
            continue
        for env in _evaluated(then, "ci_low"):
            low, high = finite(then, f"{env}/ci_low"), finite(now, f"{env}/ci_high")
            before, after = finite(then, f"{env}/accuracy"), finite(now, f"{env}/accuracy")
            if high < low and after < before:
                return (f"since update {then['update']} reward rose from {from_to(*reward)}, "
                        f"accuracy on {env.removeprefix('eval/')} fell from "
                        f"{from_to(before, after)}")  # fmt: skip
    return ""


def _training_accuracy_fell(records: list[Record]) -> str:
    """Reward is higher than in the first updates; the fraction correct is at most half as high."""
    first, last = _updates(records)[:LONG_WINDOW], records[-LONG_WINDOW:]
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
        ("kl_runaway", "kl/approx", _level, MAX_KL_UPDATE,
         "KL {:.2g} nats per token per update, above {:g}"),
        ("kl_runaway", "kl/reference", _level, MAX_KL_REFERENCE,
         "KL {:.2g} nats per token from the reference, above {:g}"),
        ("kl_runaway", "update/moved", _level, MAX_MOVED,
         "an update changes log-probs by {:.2g} nats on average, above {:g}"),
        ("mixed_groups", "groups/openings", _least, 1,
         "the rollouts of a group have {:.3g} different prompts"),
        ("never_stops", "length/hit_token_limit", _level, MAX_HIT_LIMIT,
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
    updates = _updates(records)
    returns = {finite(r, f"reward/{end}") for r in updates for end in ("min", "max")}
    if len(updates) < MIN_UPDATES or len(returns) > 1 or not min(returns) > 0:
        return ""
    return f"in all {len(updates)} updates so far every rollout has earned {min(returns):g}"


def _below_start(records: list[Record]) -> str:
    """Held-out accuracy is below that of the first evaluation, beyond both 95% intervals."""
    first, now = next(filter(_is_evaluation, records), {}), records[-1]
    for env in _evaluated(first, "ci_low"):
        if finite(now, f"{env}/ci_high") < finite(first, f"{env}/ci_low"):
            before, after = finite(first, f"{env}/accuracy"), finite(now, f"{env}/accuracy")
            return (f"accuracy on {env.removeprefix('eval/')} has fallen from {before:.2f} at the "
                    f"start to {after:.2f}")  # fmt: skip
    return ""


def _reward_fell(records: list[Record], cfg: Config) -> str:
    """Each of the last updates earned clearly less than the first, on tasks of the same level."""
    first, last = _updates(records)[:1], records[-MIN_UPDATES:]
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
    for env in _evaluated(now, "ci_high"):
        expected = math.exp(-losses[-1] * finite(now, f"{env}/tokens_mean"))
        if finite(now, f"{env}/ci_high") < expected / 2:
            return (f"the loss of the warm start is {losses[-1]:.2g} nats per token, but accuracy "
                    f"on {env.removeprefix('eval/')} {now[f'{env}/accuracy']:.2f}")  # fmt: skip
    return ""


def _never_spread(records: list[Record]) -> str:
    """Since the first update no group had different returns, and not because they were right."""
    updates = _updates(records)
    spread = any(finite(r, "groups/zero_std_fraction") != 1 for r in updates)
    solved = any(finite(r, "groups/all_right") >= 1 - MAX_UNSOLVED for r in updates)
    if len(updates) < MIN_UPDATES or spread or solved:
        return ""
    return f"in all {len(updates)} updates so far, the returns within each group were equal"


def _no_reward(records: list[Record]) -> str:
    """In every update so far all returns were equal, and none was above 0."""
    updates = _updates(records)
    nothing = [finite(r, "reward/min") == finite(r, "reward/max") <= 0 for r in updates]
    if len(updates) < MIN_UPDATES or not all(nothing):
        return ""
    broken = mean_of(records[-WINDOW:], "info/agent_error")
    ended = f"; {broken:.0%} of the agents ended with an error" if broken > 0 else ""
    cut = _level(records[-WINDOW:], "length/hit_token_limit")
    ended += f"; {cut:.0%} of completions end at --max-tokens" if cut > 0.5 else ""
    return f"no rollout has earned a reward in all {len(updates)} updates so far{ended}"


def _sampler_gap(recent: list[Record], cfg: Config) -> str:
    mean, largest = _level(recent, "gap/logprob_mean"), _known(recent, "gap/logprob_max")
    limit = MAX_GAP_FLOAT32 if cfg.dtype == "float32" else MAX_GAP_MEAN
    if mean > limit:
        return f"log-probs differ by {mean:.2g} nats on average, above {limit:g}"
    large = [gap for gap in largest if gap > MAX_GAP_TOKEN]
    if len(large) < 2:
        return ""
    return (f"in {len(large)} of {len(largest)} updates the log-probs of a token differed by up to "
            f"{max(large):.3g} nats")  # fmt: skip


def _stale_weights(recent: list[Record]) -> str:
    lags = [finite(record, "gap/canary") for record in recent[-2:]]
    if len(lags) < 2 or not all(lag >= MIN_LAG for lag in lags):  # NaN: not measured
        return ""
    return f"it lacks {min(lags):.2g} of an update, by the log-probs of a fixed text (gap/canary)"


def _wrong_direction(recent: list[Record]) -> str:
    """Judged only where the update moved the policy further than rounding."""
    values = [finite(r, "update/direction") for r in recent[-MIN_UPDATES:]
              if finite(r, "update/moved") > 2 * finite(r, "gap/logprob_mean")]  # fmt: skip
    if len(values) < MIN_UPDATES or not statistics.fmean(values) < MIN_DIRECTION:
        return ""
    return (f"returns and the changes of log-probs correlate by {statistics.fmean(values):.2f} in "
            f"the last {len(values)} updates")  # fmt: skip


def _same_tasks(recent: list[Record]) -> str:
    if _last(recent, "groups/repeated", 2) != [1, 1]:
        return ""
    return "all tasks of the last two updates were those of the update before"


def _tokens_left_out(recent: list[Record], cfg: Config) -> str:
    last = recent[-MIN_UPDATES:]
    lost = [finite(r, "tokens/sampled") - finite(r, "tokens/trained") for r in last]
    dropped = [finite(r, "episodes/failed") for r in last if r.get("episodes/failed")]
    if dropped or cfg.filter_groups or cfg.mask_truncated_completions:
        return ""
    if len(lost) < MIN_UPDATES or not all(abs(tokens) > 0 for tokens in lost):  # NaN: not measured
        return ""
    return (f"{finite(last[-1], 'tokens/sampled'):.0f} tokens were sampled, "
            f"{finite(last[-1], 'tokens/trained'):.0f} are in the loss")  # fmt: skip


def _loss_weight(recent: list[Record], cfg: Config) -> str:
    """Without a token in the loss a sum is 0; with `constant` aggregation it may be any number."""
    sums = _last(recent, "loss/weight")
    constant = getattr(cfg.options, "aggregation", "") == "constant"
    if constant or not sums or min(sums) <= 1 + 1e-3:
        return ""
    return f"the token weights of a gradient step add up to {sums[-1]:.3g}"


def _reference_moves(records: list[Record]) -> str:
    """After m nats of movement the KL is about m²/2; a tenth of that is still not 0."""
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


def _value_head_frozen(recent: list[Record]) -> str:
    """The values explain exactly 0 where all are 0; and where all returns are equal, left out."""
    judged = [r for r in recent if "value/loss" in r
              and finite(r, "reward/min") != finite(r, "reward/max")]  # fmt: skip
    explained = _last(judged, "baseline/explained_variance")
    if not explained or any(explained):
        return ""
    return f"the values explain exactly 0 of the returns' variance in {len(explained)} updates"


def _held_out_seen(now: Record, cfg: Config) -> str:
    """Only where nearly each episode is a task with an opening of its own: in games training has
    the same openings anyway."""
    for env in _evaluated(now, "seen"):
        seen, openings = finite(now, f"{env}/seen"), finite(now, f"{env}/openings")
        many = openings == finite(now, f"{env}/tasks") >= MANY_TASKS * cfg.eval_num_tasks
        if seen > MAX_SEEN and many:
            return f"{seen:.0%} of the held-out tasks of {env.removeprefix('eval/')} were sampled"
    return ""


def _adapters_unchanged(recent: list[Record]) -> str:
    steps, zero = _values(recent, "update/steps"), _values(recent, "lora/zero_fraction")
    if not (steps and zero and min(steps) >= 1 and zero[-1] > 0):
        return ""
    return f"{zero[-1]:.0%} of the adapters are still 0"


def _updates(records: list[Record]) -> list[Record]:
    """The records from update 1 on; update 0 is the evaluation before training."""
    return [r for r in records if (r.get("update") or 0) > 0]


def finite(record: Record, name: str) -> float:
    """The value of a metric; NaN, with which every comparison is false, if there is no number."""
    value = record.get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else math.nan


def _known(records: list[Record], name: str) -> list[float]:
    """The finite values of a metric."""
    return [value for r in records if not math.isnan(value := finite(r, name))]


def _values(records: list[Record], name: str) -> list[float]:
    """The finite values of a metric; none if there are fewer than WINDOW."""
    values = _known(records, name)
    return values if len(values) >= WINDOW else []


def mean_of(records: list[Record], name: str) -> float:
    """The mean of a metric; NaN with fewer than WINDOW values."""
    values = _values(records, name)
    return statistics.fmean(values) if values else math.nan


def _last(records: list[Record], name: str, number: int = MIN_UPDATES) -> list[float]:
    """The last `number` finite values of a metric; none if there are fewer."""
    values = _known(records, name)[-number:]
    return values if len(values) == number else []


def _least(recent: list[Record], name: str) -> float:
    """The least of the last MIN_UPDATES values of a metric; NaN with fewer."""
    return min(_last(recent, name), default=math.nan)


def _level(recent: list[Record], name: str) -> float:
    """What a metric keeps up: its mean over WINDOW updates, or its least value in the last
    MIN_UPDATES if that is higher; NaN with fewer values."""
    least, mean = _least(recent, name), mean_of(recent, name)
    return least if math.isnan(mean) else max(least, mean)


def change_of(first: list[Record], last: list[Record], name: str) -> tuple[float, float] | None:
    """The means of a metric in both lists; None unless they differ by two standard errors."""
    before, after = _values(first, name), _values(last, name)
    if not before or not after:
        return None
    means = statistics.fmean(before), statistics.fmean(after)
    error = math.sqrt(sum(statistics.variance(v) / len(v) for v in (before, after)))
    return means if abs(means[1] - means[0]) > 2 * error else None


def _evaluated(record: Record, metric: str) -> list[str]:
    """ "eval/<env>" of each environment whose evaluation has this metric."""
    end = f"/{metric}"
    return [k.removesuffix(end) for k in record if k.startswith("eval/") and k.endswith(end)]


def _is_evaluation(record: Record) -> bool:
    return "update" in record and bool(_evaluated(record, "accuracy"))
