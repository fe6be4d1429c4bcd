"""What a run shows: the warnings that it raised, the held-out accuracy, and what to do next.

    python -m core.report.doctor runs/<name>

Is the run sound? Is it learning, or is the answer in the noise? The same lines open report.html of
the run, and end its output.
"""

import sys
from pathlib import Path
from typing import Any

from core import results
from core.diagnostics import SYMPTOMS
from core.faults import UsageError
from core.files.run_folder import again, quoted
from core.files.run_log import METRICS, ROLLOUTS, iter_records, read_records
from core.results import Record, accuracy_of, never_right, return_interval, return_of
from core.settings import read_settings
from core.terminal import cli
from environments.plumbing.registry import relative
from environments.plumbing.text import printable

CLEAR = 0.05  # McNemar's p below which accuracy has changed
SOLVED = 0.8  # the lower end of the accuracy's interval: of 64 answers 58 were right
MANY_CUT = 0.1  # completions that end at the token limit
SIGNS = dict(SYMPTOMS)  # what follows from a broken fact
WORSE = "It has become worse"


def findings(folder: Path, config: dict[str, Any], records: list[Record]) -> list[tuple[str, str]]:
    """What the log of a run shows, as sentences, each with the next step or "": the warnings that
    it raised, causes before what follows from them, and the accuracy on each environment. What to
    do next about an accuracy follows from the warnings, if there are any."""
    spec = relative(str([*config.get("env", ()), "SPEC"][0]))
    found = list[tuple[str, str]]()
    warned = sorted(results.logged_warnings(records), key=lambda warning: warning[0] in SIGNS)
    for name, updates, message in warned:
        text, _, advice = message.partition("; try ")
        example = _example(folder) if name == "no_reward" else ""
        at = f"{name} at update {', '.join(map(str, updates))}"
        found.append((f"{at}: {text}{example}", advice.replace("SPEC", spec)))
    for env, first, last in results.before_after(records):
        verdict, text = accuracy(env, first, last)
        flags = "--resume", str(folder), "--num-updates", str(2 * results.num_updates(records))
        go_on = again(config.get("env", ()), *flags)
        silent = warned or last is first
        found.append((text, "" if silent else _next(records, env, last, verdict, go_on)))
    return found


def _example(folder: Path) -> str:
    """The last answer of the first episode, whose reward a reader can judge, and its row in the
    data."""
    for rollout in iter_records(folder / ROLLOUTS):
        said = [(m["role"], str(m["content"])) for m in rollout.get("messages", [])]
        answers = [i for i, (role, _) in enumerate(said) if role == "assistant"]
        if rollout.get("kind") == "train" and answers:
            before = [text for role, text in said[: answers[-1]] if role == "user"]
            last = said[answers[-1]][1], *before[-1:]
            answer, *asked = (repr(printable(text)[:200]) for text in last)
            place = f" ({row})" if (row := rollout.get("info", {}).get("row")) else ""
            return f". The first answer was {', to '.join([answer, *asked])}{place}"
    return ""


def accuracy(env: str, first: Record, last: Record) -> tuple[str, str]:
    """Whether the change between two evaluations may be chance, and a sentence with the held-out
    accuracies; without an update between them "", and the accuracy alone."""
    verdict, notes = "", list[str]()
    text = f"held-out accuracy on {env} [95%]: {accuracy_of(env, first)}"
    p, trivial = (last.get(f"eval/{env}/{key}") for key in ("p_value", "trivial"))
    if last is not first:
        when = f"at update {first['update']}" if first["update"] else "before RL"
        text += f" {when} -> {accuracy_of(env, last)} after {last['update']} updates"
        if never_right(env, (first, last)):
            (_, low, high), (_, least, most) = (return_interval(env, r) for r in (first, last))
            change = "rose" if least > high else "fell" if most < low else "may be as before"
            verdict = f"No answer counts as right, and the mean return {change}"
            notes.append(f"mean return {return_of(env, first)} -> {return_of(env, last)}")
        elif p is not None:
            before, after = (record[f"eval/{env}/accuracy"] for record in (first, last))
            changed = "It learns" if after > before else WORSE
            verdict = changed if p < CLEAR else "The change may be chance"
            tasks = min(record.get(f"eval/{env}/tasks", 0) for record in (first, last))
            notes.append(f"{tasks or 'the same'} tasks, McNemar's p = {p:.1g}")
    notes += [] if trivial is None else [f"trivial baseline {trivial:.2f}"]
    text += f" ({'; '.join(notes)})" if notes else ""
    return verdict, f"{verdict}: {text}" if verdict else text[:1].upper() + text[1:]


def _next(records: list[Record], env: str, last: Record, verdict: str, go_on: str) -> str:
    """Harder tasks, longer answers or more updates; `go_on`: the command of the last."""
    trained = any(record.get("update/steps", 1) for record in results.updates_of(records))
    if trained and results.finite(last, f"eval/{env}/ci_low") >= SOLVED:
        return "harder tasks, as these are solved"
    if never_right(env, records) and env.startswith("rewarded"):
        return "if such answers are right, say so (correct=NAME, threshold=X of the environment)"
    if (cut := results.finite(last, "length/hit_token_limit")) > MANY_CUT:
        return f"a higher --max-tokens, as {cut:.0%} of the completions are cut"
    if verdict == WORSE:
        return "a lower --lr or fewer updates"
    return f"more updates, or more tasks per evaluation (--eval-num-tasks): {go_on}"


def lines(folder: Path, config: dict[str, Any], records: list[Record]) -> list[str]:
    """The findings as text, each with its next step in a line of its own."""
    found = findings(folder, config, records)
    return [line for text, step in found for line in (text, f"  next: {step}")[: 1 + bool(step)]]


def final_lines(folder: Path, config: dict[str, Any]) -> list[str]:
    """The lines that end a run: what it shows, and its files."""
    found = lines(folder, config, read_records(folder / METRICS))
    found.append(f"curves: {folder / 'curves.png'}   rollouts: {folder / 'report.html'}")
    if (folder / "model").exists():  # not of a server
        command = quoted(["python", "-m", "core.chat", str(folder), "--before"])
        found.append(f"talk to it: {command}")
    return found


def main(args: list[str]) -> int:
    """Prints the findings of the runs in `args`. Returns the exit code, 2 after invalid input."""

    def show(folders: list[str]) -> int:
        if not folders:
            raise UsageError("name the folder of a run: python -m core.report.doctor runs/a")
        for folder in map(Path, folders):
            config, records = read_settings(folder / "config.yaml"), read_records(folder / METRICS)
            nothing = f"Nothing stands out up to update {results.num_updates(records)}."
            for line in lines(folder, config, records) or [nothing]:
                print(f"{folder}: {line}" if len(folders) > 1 else line)
        return 0

    return cli.execute(show, args, lambda given: given, "core.report.doctor")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
