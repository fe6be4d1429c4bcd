"""An evening on metrics, 4 of 4. Warnings about training that goes wrong: facts and symptoms.

They are computed from the records and the settings alone, so a resumed run raises the same
warnings at the same updates. A broken fact (core/invariants.py) names a fault; a symptom, below,
such as a reward that is always 0, is what training that is set up badly often shows. runs/clinic
has faults, and what they raise.
"""

import math

from core.config import KNOWN, Config, needs
from core.invariants import FACTS, MIN_UPDATES, Fact, Judge, Limit, Numbers, by_group
from core.results import Record, evaluated, finite, updates_of

WINDOW = 5  # updates, where single ones are chance
QUIET_UPDATES = 10  # updates without a warning after which it may be raised again
# a fall, in standard deviations of a return, and of a mean of P (as a task's rollouts are alike)
MIN_FALL, CERTAIN_FALL = 0.75, 3.0
WORSE = "read a few rollouts: does each have the reward of its own answer? Then a lower --lr"
EXPLAINED = {  # warning -> warnings with the same cause: if one of them holds, it is left out
    "below_start": {"no_movement", "answers_unchanged"},
    "accuracy_fell": {"no_movement", "answers_unchanged", "below_start"},
    "tokens_left_out": {"rollouts_left_out"},
    "dead_groups": {"no_reward", "below_start", "equal_answers"},
}
EXACT = {  # metric -> its text in the line before update 1
    "gap/logprob_max": "sampler and trainer agree to {:.1e} nats a token",
    "reward/judged_otherwise": "the environment judges {:.0%} of answers otherwise a second time",
    "demonstrations/right": "{:.0%} of the environment's own demonstrations are right",
}


def how_exact(records: list[Record]) -> str:
    """A line about what was checked up to the first update, whose `records` these are.

    >>> how_exact([{"gap/logprob_max": 2.6e-6}])
    'exact: sampler and trainer agree to 2.6e-06 nats a token'
    """
    metrics = {name: value for record in records for name, value in record.items()}
    texts = [text.format(metrics[name]) for name, text in EXACT.items() if name in metrics]
    return f"exact: {', '.join(texts)}" if texts else ""


def new_warnings(records: list[Record], cfg: Config) -> dict[str, str]:
    """Returns the warnings to raise at the last record: name -> message.

    A warning is raised if it holds now and held in none of the QUIET_UPDATES updates before; at an
    evaluation, also not at the evaluation before. `records` are those of the run so far.
    """
    active = active_warnings(records, cfg)
    before = range(len(records) - 1, 0, -1)  # records[:end] is the run one, two, .. records ago
    ends = [*before[:QUIET_UPDATES]]
    if evaluated(records[-1]):
        ends += [end for end in before if evaluated(records[end - 1])][:1]
    held = set[str]()
    for end in ends if active else []:
        held |= active_warnings(records[:end], cfg).keys()
    return {name: message for name, message in active.items() if name not in held}


def active_warnings(records: list[Record], cfg: Config) -> dict[str, str]:
    """Returns the warnings that hold at the last record: name -> message.

    A message is one line with the measured values and what to do. A comparison of held-out
    accuracies can hold only at an evaluation. Missing and non-finite values raise no warning.
    """
    if not records or "update" not in records[-1]:
        return {}
    warnings: dict[str, str] = {}
    for name, judge in (*FACTS, *SYMPTOMS):
        if name not in warnings and (message := judge(records, cfg)):
            warnings[name] = message
    explained = [name for name, causes in EXPLAINED.items() if causes & warnings.keys()]
    return {name: message for name, message in warnings.items() if name not in explained}


def accuracy_fell(records: list[Record], cfg: Config) -> str:
    """Warns of an accuracy below that of an earlier evaluation, beyond both intervals."""
    last = records[-1]
    for earlier in reversed(records):
        for env in evaluated(earlier, "ci_low"):
            if finite(last, f"eval/{env}/ci_high") < finite(earlier, f"eval/{env}/ci_low"):
                before, after = (finite(r, f"eval/{env}/accuracy") for r in (earlier, last))
                text = f"accuracy on {env} fell to {after:.2f}, from {before:.2f} at update"
                return f"{text} {earlier['update']}; next: {WORSE}"
    return ""


def below_start(records: list[Record], cfg: Config) -> str:
    """Warns if each of the last updates has earned clearly less than the first, at its level."""
    updates = updates_of(records)
    judged = [*updates[:1], *updates[-MIN_UPDATES:]]
    start, *rewards = [finite(r, "reward/mean") for r in judged] or [math.nan]
    spread = max((finite(r, "reward/std") for r in judged), default=math.nan)
    clear = spread * max(MIN_FALL, CERTAIN_FALL / math.sqrt(cfg.num_prompts))
    same_level = len({r.get("groups/level") for r in judged}) == 1
    if not (same_level and rewards and all(start - reward > clear for reward in rewards)):
        return ""
    fell = f"reward fell from {start:.2f} to at most {max(rewards):.2f} in the last {len(rewards)}"
    return f"{fell}; next: {WORSE}"


def no_reward(records: list[Record], cfg: Config) -> str:
    """Warns if all rollouts of all updates so far have the same return."""
    updates = updates_of(records)
    returns = {finite(r, f"reward/{end}") for r in updates for end in ("min", "max")}
    earned = min(returns, default=math.nan)
    no_warning = len(returns) > 1 or math.isnan(earned) or len(updates) < MIN_UPDATES
    if no_warning or "feedback" in needs(cfg):
        return ""
    if earned > 0:
        return (
            f"every rollout has earned {earned:g} in all {len(updates)} updates so far; next:"
            " see what the reward depends on (python -m environments check SPEC); harder tasks"
        )
    text = f"no rollout has earned a reward in all {len(updates)} updates so far"
    num_rollouts = cfg.num_prompts * cfg.group_size
    for metric, meaning in (
        ("info/agent_error", "of the agents ended with an error"),
        ("info/invalid", "of the answers could not be read"),
        ("length/hit_token_limit", "of completions end at --max-tokens"),
    ):
        # a flag that only some rollouts report is a mean over these: take it over all rollouts
        count = records[-1].get(metric.replace("info", "reported"), num_rollouts)
        fraction = finite(records[-1], metric) * min(1.0, count / num_rollouts)
        text += f"; {fraction:.0%} {meaning}" if fraction > 0.5 else ""
    if cfg.model_id == "tiny" and not {*map(str, cfg.env)} <= {*KNOWN}:
        text += f"; tiny knows --env {' '.join(KNOWN)} and nothing else: --model-id smollm2"
    return (
        f"{text}; next: read in report.html what the model answers; give an answer that you"
        " know to be right (python -m environments play SPEC); then try a reward for a part of the"
        " task, easier tasks, a warm start with --sft-steps or --algo sdpo where there are"
        " demonstrations, or a better model"
    )


def _has_dead_groups(r: Numbers, cfg: Config) -> bool:
    """Whether returns differ in too few of the groups that are not all right."""
    unsolved = 1 - (r["groups/all_right"] if "groups/all_right" in r.record else 0.0)
    differing = 1 - r["groups/zero_std_fraction"]
    return by_group(cfg) and unsolved > 0.1 and differing <= unsolved / 4


ROWS = (
    Fact(
        "dead_groups",
        Limit("groups/zero_std_fraction", updates=WINDOW),
        "in {x:.0%} of the groups all answers earned the same, so their gradients are 0;"
        " {r[groups/all_right]:.0%} are all right",
        "see what the reward depends on (python -m environments check SPEC); try a warm start"
        " (--sft-steps) where the policy never succeeds, easier tasks, --curriculum 0.8,"
        " --filter-groups 3, a larger --group-size",
        when=_has_dead_groups,
    ),
    Fact(
        "kl_runaway",
        Limit("update/moved", 0, 0.3, MIN_UPDATES),
        "an update changes log-probs by {x:.2g} nats per token on average, which is too much",
        "try a lower --lr, fewer --num-epochs, a narrower clip, a higher --kl-coef",
    ),
    Fact(
        "never_stops",
        Limit("length/hit_token_limit", 0, 0.95, MIN_UPDATES),
        "{x:.0%} of the completions end at --max-tokens, so hardly any is a finished answer",
        "try a higher --max-tokens, a warm start (--sft-steps), or a model that ends its turns",
    ),
)
SYMPTOMS: tuple[tuple[str, Judge], ...] = (
    ("no_reward", no_reward),
    ("below_start", below_start),
    ("accuracy_fell", accuracy_fell),
    *((row.name, row.broken) for row in ROWS),
)
