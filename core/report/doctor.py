"""Prints the findings about a run: its warnings, its held-out accuracy, and what to do next.

    python -m core.report.doctor runs/<name>

Is the run sound? Is it learning, or is the change within the noise? report.html of the run begins
with the same lines, and its output ends with them.
"""

import sys
from pathlib import Path
from typing import Any

from core import results
from core.diagnostics import SYMPTOMS
from core.faults import UsageError
from core.files.run_folder import quoted, start_command
from core.files.run_log import METRICS, ROLLOUTS, iter_records, read_records
from core.results import Record, accuracy_of, mcnemar, never_right, return_of
from core.settings import read_settings
from core.terminal import cli
from environments.plumbing.text import printable

CLEAR = 0.05  # McNemar's p below which accuracy has changed
SOLVED = 0.8  # the lower end of the accuracy's interval: of 64 answers 58 were right
MANY_CUT = 0.1  # completions that end at the token limit
SYMPTOM_NAMES = {name for name, _ in SYMPTOMS}  # warnings that follow from another one
WORSE = "It has become worse"


def findings(folder: Path, config: dict[str, Any], records: list[Record]) -> list[tuple[str, str]]:
    """The findings in the log of a run, as sentences, each with the next step or "".

    First come the warnings, causes before symptoms, then the accuracy on each environment, which
    has a next step only if there are no warnings.
    """
    spec = str([*config.get("env", ()), "SPEC"][0]).replace(f"{Path.cwd().as_posix()}/", "")
    sentences: list[tuple[str, str]] = []
    warnings = sorted(results.logged_warnings(records), key=lambda row: row[0] in SYMPTOM_NAMES)
    for name, updates, message in warnings:
        text, _, advice = message.partition("; next: ")
        example = _example(folder) if name == "no_reward" else ""
        at = f"{name} at update {', '.join(map(str, updates))}"
        sentences.append((f"{at}: {text}{example}", advice.replace("SPEC", spec)))
    flags = "--resume", str(folder), "--num-updates", str(2 * results.num_updates(records))
    resume = start_command(config.get("env", ()), *flags)
    for env, first, last in results.before_after(records):
        verdict, text = accuracy(env, first, last)
        needs_step = not warnings and last is not first
        sentences.append((text, _next(records, env, last, verdict, resume) if needs_step else ""))
    return sentences


def _example(folder: Path) -> str:
    """A sentence with the last answer of the first training episode, its question and its row."""
    for rollout in iter_records(folder / ROLLOUTS):
        question = answer = ""
        for message in rollout.get("messages", []):
            text = repr(printable(str(message["content"]))[:200])
            if message["role"] == "assistant":
                answer = text if not question else f"{text}, to {question}"
            elif message["role"] == "user":
                question = text
        if rollout.get("kind") == "train" and answer:
            row = rollout.get("info", {}).get("row")
            return f". The first answer was {answer}" + (f" ({row})" if row else "")
    return ""


def accuracy(env: str, first: Record, last: Record) -> tuple[str, str]:
    """Whether the change between two evaluations may be chance, and a sentence with the accuracies.

    If both are the same evaluation, the first is "", and the sentence has that accuracy alone.
    """
    verdict, notes = "", list[str]()
    text = f"held-out accuracy on {env} [95%]: {accuracy_of(env, first)}"
    p_value, trivial = last.get(f"eval/{env}/p_value"), last.get(f"eval/{env}/trivial")
    if last is not first:
        when = f"at update {first['update']}" if first["update"] else "before RL"
        text += f" {when} -> {accuracy_of(env, last)} after {last['update']} updates"
        if never_right(env, (first, last)):
            verdict = "No answer counts as right"
            notes.append(f"mean return {return_of(env, first)} -> {return_of(env, last)}")
            if f"eval/{env}/return_rose" in last:
                fell, rose = (last.get(f"eval/{env}/return_{k}", 0) for k in ("fell", "rose"))
                change = "rose" if rose > fell else "fell"
                change = change if mcnemar(fell, rose) < CLEAR else "may be as before"
                verdict += f", and the return {change}"
                notes.append(f"higher on {rose} tasks, lower on {fell}")
        elif p_value is not None:
            rose = last[f"eval/{env}/accuracy"] > first[f"eval/{env}/accuracy"]
            change = "It learns" if rose else WORSE
            verdict = change if p_value < CLEAR else "The change may be chance"
            tasks = min(record.get(f"eval/{env}/tasks", 0) for record in (first, last))
            notes.append(f"{tasks or 'the same'} tasks, McNemar's p = {p_value:.1g}")
    if trivial is not None:
        notes.append(f"trivial baseline {trivial:.2f}")
    text += f" ({'; '.join(notes)})" if notes else ""
    return verdict, f"{verdict}: {text}" if verdict else text[:1].upper() + text[1:]


def _next(records: list[Record], env: str, last: Record, verdict: str, resume: str) -> str:
    """The next step: harder tasks, longer answers or more updates, with the command `resume`."""
    if not any(record.get("update/steps", 1) for record in results.updates_of(records)):
        return "answers that earn differently: an easier task, --sft-steps, a better model"
    if results.finite(last, f"eval/{env}/ci_low") >= SOLVED:
        return "harder tasks, as these are solved"
    if never_right(env, records) and env.startswith("rewarded"):
        return "if such answers are right, say so (correct=NAME, threshold=X of the environment)"
    if (cut := results.finite(last, "length/hit_token_limit")) > MANY_CUT:
        return f"a higher --max-tokens, as {cut:.0%} of the completions are cut"
    if verdict == WORSE:
        return "a lower --lr or fewer updates"
    return f"more updates, or more tasks per evaluation (--eval-num-tasks): {resume}"


def lines(folder: Path, config: dict[str, Any], records: list[Record]) -> list[str]:
    """The findings as text, each with its next step in a line of its own."""
    texts: list[str] = []
    for text, step in findings(folder, config, records):
        texts += [text, f"  next: {step}"] if step else [text]
    return texts


def final_lines(folder: Path, config: dict[str, Any]) -> list[str]:
    """The lines that end a run: its findings, and its files."""
    texts = lines(folder, config, read_records(folder / METRICS))
    texts.append(f"curves: {folder / 'curves.png'}   rollouts: {folder / 'report.html'}")
    if (folder / "model").exists():  # with --sampler openai there is none
        command = quoted(["python", "-m", "core.chat", str(folder), "--before"])
        texts.append(f"talk to it: {command}")
    return texts


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

    return cli.execute(show, args, lambda words: words, "core.report.doctor")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
