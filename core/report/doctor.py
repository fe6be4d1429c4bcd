"""What a run shows: at most three findings, the one that matters most first.

    python -m core.report.doctor runs/<name>

Each says what was measured, where to look, and what to do next. Is the run sound? Is it learning,
or is the answer in the noise? Why is the reward flat, and the loss 0? Does the policy exploit its
reward? Would more updates help? The same lines open report.html and README.md of the run, and end
its output.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from core import diagnostics, invariants, series
from core.algorithm import name_of
from core.faults import UsageError
from core.files.run_folder import again, quoted
from core.files.run_log import METRICS, ROLLOUTS, iter_records, read_records
from core.report.summary import logged_warnings, num_updates
from core.results import Record, accuracies_of, before_after, from_to, never_right, returns_of
from core.settings import read_settings
from core.terminal import cli
from core.warning_texts import WARNINGS
from environments.plumbing.registry import relative
from environments.plumbing.text import printable

MAX_FINDINGS = 3
CLEAR = 0.05  # McNemar's p below which accuracy has changed
SOLVED = 0.8  # the lower end of the accuracy's interval: of 64 answers 58 were right
MANY_CUT = 0.1  # completions that end at the token limit
RARELY = 0.05  # fraction of right answers
NOTHING = 0.02  # of the standard deviation of returns: a reward that rises less has stopped
MAX_DIFFERENCE = 0.2  # of the fractions correct in training and on held-out tasks


class Finding(NamedTuple):
    """A sentence with its number, the picture in report.html that shows it, and the next step."""

    text: str
    picture: str
    next: str

    def __str__(self) -> str:
        return f"{self.text} (report.html: {self.picture}). Next: {self.next}"


def findings(folder: Path, config: dict[str, Any], records: list[Record]) -> list[Finding]:
    """What the records of a run show; `config`: its settings. A healthy run has one finding."""
    if not any(record.get("update", -1) >= 0 for record in records):
        return []
    spec = relative(str([*config.get("env", ()), "SPEC"][0]))
    held = _held(config, records)
    found = _current_warnings(folder, held, records, spec)
    outcome = _outcomes(folder, config, records) or _by_reward(config, records)
    if held.keys() & {"no_reward", *diagnostics.UNCHANGED}:
        return found[:MAX_FINDINGS]  # what the reward and the accuracy do follows from it
    if not found and not any(
        finding.text.startswith(("It learns", "It has")) for finding in outcome
    ):
        flat = _flat(config, records)  # has a better reason than the one after the ";"
        outcome = [
            f._replace(next=f.next.partition("; ")[0]) if flat else f for f in outcome
        ] + flat
    return [*found, *_overfit(records), *outcome][:MAX_FINDINGS]


def _held(config: dict[str, Any], records: list[Record]) -> dict[str, str]:
    """The warnings of the log that still hold at its end, with their numbers there."""
    logged = {name: message for name, _, message in logged_warnings(records)}
    # --dtype auto does not say how large rounding is; in float32 the message names a lower limit
    limit = f"above {invariants.MAX_GAP_FLOAT32:g};"
    exact = any(limit in message for message in logged.values())
    sizes = {name: config[name] for name in ("group_size", "num_prompts") if name in config}
    cfg = replace(diagnostics.CONFIG, dtype="float32" if exact else "auto", **sizes)
    held = diagnostics.active_warnings(records, cfg)
    return {name: message for name, message in held.items() if name in logged}


def _current_warnings(
    folder: Path, held: dict[str, str], records: list[Record], spec: str
) -> list[Finding]:
    """What the warnings that still hold mean, the one that matters most first."""
    logged = {name: (updates, message) for name, updates, message in logged_warnings(records)}
    found = []
    for name, (meaning, _, picture) in WARNINGS.items():
        if name in held:
            updates, message = logged[name]
            number, advice = held[name].partition("; try ")[0], message.partition("; try ")[2]
            since = f"({name}, since update {updates[-1]})"
            text = f"{meaning[:1].upper()}{meaning[1:]}: {number} {since}"
            if name == "no_reward":
                text = f"{number[:1].upper()}{number[1:]}{_example(folder)}"
                advice = advice.partition("; else ")[0].replace("SPEC", spec)
            found.append(Finding(text, picture, advice))
    return found


def _example(folder: Path) -> str:
    """The first answer of training, whose reward a reader can judge, and its row in the data. Of an
    episode with several it is the last one; the environment may speak after it."""
    for rollout in iter_records(folder / ROLLOUTS):
        question = asked = answer = ""
        for message in rollout.get("messages", []) if rollout.get("kind") == "train" else []:
            text = printable(str(message.get("content")))[:200]
            if message["role"] == "assistant":
                asked, answer = question, text
            elif message["role"] == "user":
                question = text
        if asked:
            place = f" ({row})" if (row := rollout.get("info", {}).get("row")) else ""
            return f". The first answer was {answer!r}, to {asked!r}{place}"
    return ""


def _outcomes(folder: Path, config: dict[str, Any], records: list[Record]) -> list[Finding]:
    """Whether held-out accuracy has changed, for each environment, and whether it still does."""
    found = []
    for env, first, last in before_after(records):
        if last is first:
            continue
        before, after = (record[f"eval/{env}/accuracy"] for record in (first, last))
        tasks, p, low, high = (
            last.get(f"eval/{env}/{key}") for key in ("tasks", "p_value", "ci_low", "ci_high")
        )
        if p is None and low is not None:  # the tasks are others now: compare the intervals
            apart = low > first[f"eval/{env}/ci_high"] or high < first[f"eval/{env}/ci_low"]
            p = CLEAR / 2 if apart else 1.0
        on, step = f"on held-out tasks of {env}", _more_updates(folder, config, records, low)
        if p is not None and p < CLEAR and after > before:
            text = f"It learns: accuracy {on} rose from {from_to(before, after)}"
        elif p is not None and p < CLEAR:
            text = f"It has become worse: accuracy {on} fell from {from_to(before, after)}"
            step = "a lower --lr, from an earlier checkpoint"
        elif never_right(env, records):
            text, step = _by_return(env, first, last, step)
        else:
            was, now = from_to(before, after).split(" to ")
            text = f"The answer is in the noise: accuracy {on} was {was} and is {now}"
            if low is not None:
                text += f", with a 95% interval from {low:.2f} to {high:.2f}"
            if tasks:
                text += f" on {tasks} " + ("tasks" if tasks > 1 else "task")
            if tasks != 1:  # a game without chance, of which greedy players know one course
                step = f"more tasks per evaluation (--eval-num-tasks); {step}"
        found.append(Finding(text, "Held-out accuracy", step))
    return found


def _by_return(env: str, first: Record, last: Record, step: str) -> tuple[str, str]:
    """What the mean return says where no held-out answer counted as right, and what to do next."""
    lows, highs = (
        [series.finite(record, f"eval/{env}/return_{key}") for record in (first, last)]
        for key in ("low", "high")
    )
    means = "{} before and {} after".format(*returns_of(env, first, last))
    if lows[1] > highs[0]:
        text = "It learns, though no answer counts as right: the mean return"
    elif highs[1] < lows[0]:
        text, step = "It has become worse: the mean return", "a lower --lr"
    else:
        text = "Nothing is right yet, and the rest is in the noise: the mean return"
    if env.startswith("rewarded"):
        step += "; if such answers are right, say so (correct=NAME, threshold=X of the environment)"
    return f"{text} on held-out tasks of {env} is {means}", step


def _more_updates(
    folder: Path, config: dict[str, Any], records: list[Record], lowest: float | None
) -> str:
    """Whether more updates would help, by how the reward moved in the last updates.

    `lowest`: the lower end of the accuracy's interval, as one game that was won solves nothing.
    """
    updates = [r for r in records if (r.get("update") or 0) > 0]
    window = max(series.WINDOW, len(updates) // 4)
    before, last = updates[-2 * window : -window], updates[-window:]
    total = str(2 * num_updates(records))
    go_on = again(config.get("env", ()), "--resume", str(folder), "--num-updates", total)
    right = series.mean_of(last, "reward/correct")
    if (lowest or 0) >= SOLVED and config.get("curriculum") and right < SOLVED:
        return (f"held-out tasks as hard as those that the curriculum trains on by now, of which "
                f"{right:.0%} are right (--eval-env)")  # fmt: skip
    if (lowest or 0) >= SOLVED:
        other = "reinforce" if name_of(config["algo"]) == "grpo" else "grpo"
        command = again(config.get("env", ()), "--config", str(folder), "--algo", other)
        return f"the tasks are solved, so harder ones, or another algorithm: {command}"
    if len(before) < series.WINDOW:
        return f"more updates, as these are too few to tell: {go_on}"
    if (cut := series.mean_of(last, "length/hit_token_limit")) > MANY_CUT:
        return f"a higher --max-tokens first, as {cut:.0%} of the completions are cut"
    change = series.change_of(before, last, "reward/mean")
    if change is None:
        was, now, error = series.means_of(before, last, "reward/mean")
        if now - was + 2 * error <= NOTHING * series.finite(last[-1], "reward/std"):
            return "no more of the same updates, as the reward has stopped rising"
        return (f"more updates, to see whether the reward still rises: {from_to(was, now)} in the "
                f"last {len(last)} may be chance: {go_on}")  # fmt: skip
    means_text = f"{from_to(*change)} in the last {len(last)} updates"
    if change[1] < change[0]:
        return f"a lower --lr or fewer updates, as the reward falls again ({means_text})"
    if right < RARELY and not series.change_of(before, last, "reward/correct"):
        return (f"reading what earns the reward, which rises ({means_text}) while {right:.0%} of "
                "the answers are right")  # fmt: skip
    return f"more updates, as the reward still rises ({means_text}): {go_on}"


def _by_reward(config: dict[str, Any], records: list[Record]) -> list[Finding]:
    """Without evaluations: whether training earns more, or less, than in the first updates."""
    updates = [r for r in records if (r.get("update") or 0) > 0]
    first, last = updates[: series.WINDOW], updates[-series.WINDOW :]
    change = series.change_of(first, last, "reward/mean")
    if before_after(records) or len(updates) < 2 * series.WINDOW or not change:
        return []
    if series.mean_of(last, "update/moved") == 0:  # then by chance
        return []
    where = f"in training {{}} from {from_to(*change)} (means of {len(first)} updates)"
    if change[0] > change[1]:
        text = f"It has become worse: the reward {where.format('fell')}"
        return [Finding(text, "Reward per rollout", f"a lower --lr than {config.get('lr')}, from "
                        "an earlier checkpoint or from the start")]  # fmt: skip
    return [Finding(f"It learns: the reward {where.format('rose')}", "Reward per rollout", "a look "
                    "at held-out tasks, too (--eval-num-tasks, --eval-every)")]  # fmt: skip


def _flat(config: dict[str, Any], records: list[Record]) -> list[Finding]:
    """Why a reward without a warning does not rise, and what the loss says about it."""
    updates = [r for r in records if (r.get("update") or 0) > 0]
    first, last = updates[: series.WINDOW], updates[-series.WINDOW :]
    unmoved = series.mean_of(last, "update/moved") == 0  # then a change is chance
    changed = not unmoved and series.change_of(first, last, "reward/mean")
    if len(updates) < 2 * series.WINDOW or changed:
        return []
    means = [series.mean_of(rows, "reward/mean") for rows in (first, last)]
    differing = 1 - series.mean_of(last, "groups/zero_std_fraction")
    norm, loss = (series.mean_of(last, name) for name in ("grad/norm", "loss"))
    if any(map(math.isnan, [*means, differing, norm, loss])):
        return []
    if series.mean_of(last, "update/direction") < invariants.MIN_DIRECTION:
        return []  # the loss follows something else than the rewards, as that of sdpo does
    text = (f"The reward is flat: {means[0]:.2f} in the first {len(first)} updates, {means[1]:.2f} "
            f"in the last; answers earned different rewards in {differing:.0%} of the groups, and "
            f"the gradient had a norm of {norm:.2g}")  # fmt: skip
    if unmoved:
        return [Finding(f"{text}, but no update has moved the policy", "Reward per rollout",
                        f"a higher --lr than {config.get('lr')}")]  # fmt: skip
    text += f". The loss of {loss:.2g} says nothing: advantages add up to about 0"
    step = f"a higher --lr than {config.get('lr')}, or a larger --group-size"
    return [Finding(text, "Reward per rollout", step)]


def _overfit(records: list[Record]) -> list[Finding]:
    """Training tasks that are solved far more often than those that no update has seen."""
    envs = before_after(records)
    correct = series.mean_of(records[-series.WINDOW :], "reward/correct")
    if len(envs) != 1 or envs[0][1] is envs[0][2]:
        return []
    env, _, last = envs[0]
    if not correct > last.get(f"eval/{env}/ci_high", 1.0) + MAX_DIFFERENCE:
        return []
    text = (
        f"It learns its training tasks by heart, or they are easier: {correct:.2f} of their "
        f"rollouts are right, but {last[f'eval/{env}/accuracy']:.2f} of the held-out tasks"
    )
    return [Finding(text, "Held-out accuracy", "more training tasks, or fewer updates")]


def lines(folder: Path, config: dict[str, Any], records: list[Record]) -> list[str]:
    """The findings, as text."""
    return [*map(str, findings(folder, config, records))]


def final_lines(folder: Path, config: dict[str, Any]) -> list[str]:
    """The lines that end a run: accuracy before and after, warnings, files, the findings."""
    records = read_records(folder / METRICS)
    found = []
    for env, first, last in before_after(records):
        line = f"{env}, held-out accuracy [95%]: {_change(env, first, last)}"
        if never_right(env, records):
            line += f"  mean return: {' -> '.join(returns_of(env, first, last))}"
        found.append(line)
    for name, updates, message in logged_warnings(records):
        found.append(f"warning at update {', '.join(map(str, updates))}: {name}: {message}")
    found.append(f"curves: {folder / 'curves.png'}   rollouts: {folder / 'report.html'}")
    if config["sampler"] != "openai":
        command = quoted(["python", "-m", "core.chat", str(folder), "--before"])
        found.append(f"talk to it: {command}")
    return [*found, *lines(folder, config, records)]


def _change(env: str, first: Record, last: Record) -> str:
    """The accuracy before RL and after; the accuracy alone where no update followed."""
    p, trivial = (last.get(f"eval/{env}/{key}") for key in ("p_value", "trivial"))
    counts = [record.get(f"eval/{env}/tasks") for record in (first, last)]
    tasks = min(filter(None, counts), default=None)  # --eval-num-tasks may have changed
    (line, after), parts = accuracies_of(env, first, last), list[str]()
    if last is not first:
        line += f" before RL -> {after} after {last['update']} updates"
        if p is not None:
            verdict = "a clear change" if p < CLEAR else "may be chance"
            parts.append(f"{verdict}: {tasks or 'the same'} tasks, McNemar's p = {p:.1g}")
    parts += [] if trivial is None else [f"trivial baseline: {trivial:.2f}"]
    return f"{line}  ({'; '.join(parts)})" if parts else line


def main(args: list[str]) -> int:
    """Prints the findings of the runs in `args`. Returns the exit code, 2 after invalid input."""

    def show(folders: list[str]) -> int:
        if not folders:
            raise UsageError("name the folder of a run: python -m core.report.doctor runs/a")
        for folder in map(Path, folders):
            config = read_settings(folder / "config.yaml")
            records = read_records(folder / METRICS)
            nothing = (f"Nothing stands out up to update {num_updates(records)}. Two evaluations "
                       "show whether it learns (--eval-num-tasks, --eval-every)")  # fmt: skip
            for line in lines(folder, config, records) or [nothing]:
                print(f"{folder}: {line}" if len(folders) > 1 else line)
        return 0

    return cli.execute(show, args, lambda given: given, "core.report.doctor")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
