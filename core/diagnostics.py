"""An evening on metrics, 4 of 4. Warnings about training that goes wrong: facts and symptoms.

They are computed from the records and the settings alone, so a resumed run raises the same
warnings at the same updates. A broken fact (core/invariants.py) names a fault; a symptom, below,
such as a reward that is always 0, is what training that is set up badly often shows. runs/clinic
has faults, and what they raise.
"""

import math

from core.config import KNOWN, Config, needs
from core.invariants import FACTS, Check, Fact, Limit, by_group, fact
from core.results import Record
from core.series import (
    MIN_UPDATES,
    WINDOW,
    evaluated,
    finite,
    is_evaluation,
    mean_of,
    updates_of,
)

NO_REWARD = (
    "reading in report.html what the model answers; an answer that you know to be right (python -m"
    " environments play SPEC shows what it earns); then a reward for a part of the task, easier"
    " tasks, a warm start with --sft-steps or --algo sdpo where there are demonstrations, or a"
    " better model"
)
TINY = f"; tiny knows --env {' '.join(KNOWN)} and nothing else: --model-id smollm2"
QUIET_UPDATES = 10  # updates without a warning after which it may be raised again
MAX_UNSOLVED = 0.1  # fraction of groups up to which it does not matter if all are dead
# how far a mean return has to fall: in standard deviations of a return, and of a mean of P returns
# (P, not P·G: the rollouts of a task depend on each other)
MIN_FALL, CERTAIN_FALL = 0.75, 3.0
EXPLAINED = {  # one cause, one warning: those that take the place of another
    "below_start": {"no_movement", "answers_unchanged"},
    "dead_groups": {"no_reward", "below_start", "equal_answers"},
}


EXACT = {  # what the line before update 1 says: metric -> text with its number
    "gap/logprob_max": "sampler and trainer agree to {:.1e} nats a token",
    "reward/judged_otherwise": "{:.0%} of answers earn something else when judged again",
    "demonstrations/right": "{:.0%} of demonstrations are right",
}


def how_exact(records: list[Record]) -> str:
    """A line about what was checked with the first update, up to which `records` go.

    >>> how_exact([{"demonstrations/right": 1.0}, {"gap/logprob_max": 2.6e-6}])
    'exact: sampler and trainer agree to 2.6e-06 nats a token, 100% of demonstrations are right'
    """
    found = {name: value for record in records for name, value in record.items()}
    said = [text.format(found[name]) for name, text in EXACT.items() if name in found]
    return f"exact: {', '.join(said)}" if said else ""


def new_warnings(records: list[Record], cfg: Config) -> dict[str, str]:
    """Returns the warnings to raise at the last record: name -> message.

    A warning is raised if it holds now and held in none of the QUIET_UPDATES updates before; at an
    evaluation, also not at the evaluation before. `records` are those of the run so far.
    """
    active = active_warnings(records, cfg)
    before = range(len(records) - 1, 0, -1)  # records[:end] is the run one, two, .. records ago
    ends = [*before[:QUIET_UPDATES]]
    if is_evaluation(records[-1]):
        ends += [end for end in before if is_evaluation(records[end - 1])][:1]
    held = {name for end in ends if active for name in active_warnings(records[:end], cfg)}
    return {name: message for name, message in active.items() if name not in held}


def active_warnings(records: list[Record], cfg: Config) -> dict[str, str]:
    """Returns the warnings that hold at the last record: name -> message.

    A message is one line with the measured values and what to try. A comparison of held-out
    accuracies can hold only at an evaluation. Missing and non-finite values raise no warning.
    """
    if not records or "update" not in records[-1]:
        return {}
    found: dict[str, str] = {}
    for one in (*FACTS, *SYMPTOMS):
        if one.name not in found and (what := one.broken(records, cfg)):
            found[one.name] = f"{what}; try {one.try_}"
    if "no_reward" in found and cfg.model_id == "tiny" and not {*map(str, cfg.env)} <= {*KNOWN}:
        found["no_reward"] += TINY
    explained = [name for name, causes in EXPLAINED.items() if causes & found.keys()]
    return {name: message for name, message in found.items() if name not in explained}


@fact("the reward and its assignment to rollouts; a lower --lr, from an earlier checkpoint")
def below_start(records: list[Record], cfg: Config) -> str:
    """The policy is no worse than before the first step: by accuracy, beyond both 95% intervals,
    and by reward: each of the last updates earned clearly less than the first, at the same level.
    """
    now, first = records[-1], next(filter(is_evaluation, records), {})
    for env in evaluated(first, "ci_low"):
        if finite(now, f"{env}/ci_high") < finite(first, f"{env}/ci_low"):
            before, after = (finite(r, f"{env}/accuracy") for r in (first, now))
            return f"accuracy on {env[5:]} fell to {after:.2f}, from {before:.2f} at the start"
    updates = updates_of(records)
    judged = [*updates[:1], *updates[-MIN_UPDATES:]]
    start, *rewards = [finite(r, "reward/mean") for r in judged] or [math.nan]
    spread = max((finite(r, "reward/std") for r in judged), default=math.nan)
    clear = spread * max(MIN_FALL, CERTAIN_FALL / math.sqrt(cfg.num_prompts))
    same_level = len({r.get("groups/level") for r in judged}) == 1
    if not (same_level and rewards and all(start - reward > clear for reward in rewards)):
        return ""
    return f"reward fell from {start:.2f} to at most {max(rewards):.2f} in the last {len(rewards)}"


def _always_earned(records: list[Record]) -> float:
    """What every rollout of every update so far has earned; NaN if they earned several returns, and
    with fewer than MIN_UPDATES updates."""
    updates = updates_of(records)
    returns = {finite(r, f"reward/{end}") for r in updates for end in ("min", "max")}
    return returns.pop() if len(updates) >= MIN_UPDATES and len(returns) == 1 else math.nan


@fact(NO_REWARD)
def no_reward(records: list[Record], cfg: Config) -> str:
    """In some update so far returns differed, or one was above 0."""
    if not (_always_earned(records) <= 0 and "feedback" not in needs(cfg)):
        return ""
    text = f"no rollout has earned a reward in all {len(updates_of(records))} updates so far"
    for metric, what in (
        ("info/agent_error", "of the agents ended with an error"),
        ("info/invalid", "of the answers could not be read"),
        ("length/hit_token_limit", "of completions end at --max-tokens"),
    ):
        mean = mean_of(records[-WINDOW:], metric)
        text += f"; {mean:.0%} {what}" if mean > 0.5 else ""
    return text


@fact(
    "what the reward depends on (python -m environments check SPEC), a warm start (--sft-steps)"
    " where the policy never succeeds, easier tasks, --curriculum 0.8, --filter-groups 3, a"
    " larger --group-size"
)
def dead_groups(records: list[Record], cfg: Config) -> str:
    """Returns differ in enough of the groups that are not all right: the others have no gradient.
    (Counted as if no solved group had: where some have, dead ones go unnoticed.)"""
    if not by_group(cfg):
        return ""
    if (earned := _always_earned(records)) > 0:
        return f"in all {len(updates_of(records))} updates every rollout has earned {earned:g}"
    same, right = (mean_of(records[-WINDOW:], f"groups/{name}")
                   for name in ("zero_std_fraction", "all_right"))  # fmt: skip
    if not (1 - right > MAX_UNSOLVED and 1 - same <= (1 - right) / 4):
        return ""
    return (
        f"in {(same - right) / (1 - right):.0%} of the groups that are not all right, all"
        f" {cfg.group_size} answers earned the same, so their gradients are 0"
    )


SYMPTOMS: tuple[Fact | Check, ...] = (
    no_reward,
    below_start,
    dead_groups,
    Fact(
        "kl_runaway",
        Limit("update/moved", 0, 0.3, MIN_UPDATES),
        "an update changes log-probs by {x:.2g} nats per token on average, which is too much",
        "a lower --lr, fewer --num-epochs, a narrower clip, a higher --kl-coef",
    ),
    Fact(
        "never_stops",
        Limit("length/hit_token_limit", 0, 0.95, MIN_UPDATES),
        "{x:.0%} of the completions end at --max-tokens, so hardly any is a finished answer",
        "a higher --max-tokens, a warm start with --sft-steps, or a model that ends its turns",
    ),
)
