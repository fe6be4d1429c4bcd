"""Checks an environment, as `gymnasium.utils.env_checker.check_env` does for Gymnasium.

    python -m environments check my_envs.py:Maze:size=4     # exit code 1 if it found a problem

`check_env` plays episodes and asks five questions:

    seeds            does a seed repeat its episode, in a new instance and in another process?
    demonstrations   do they succeed? Without them: does any guess?
    two answers      does a right answer with a wrong one count as right, in either order?
    odd texts        does a text that a policy may answer make `step` raise or return no Step?
    openings         are the tasks of evaluation held out from training and demonstrations?

The answer No is a problem, or a warning where an environment may have a reason.

>>> report = check_env("letter_counting", num_seeds=3, other_process=False)
>>> report.problems, sorted(report.rewards), report.demonstrations[0]
([], [0.0, 0.1, 1.0], (1.0, True))
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from environments.base import (
    DEMO_SEEDS,
    EVAL_SEEDS,
    PLAYER,
    TRAIN_SEEDS,
    Message,
    MultiAgentEnv,
    SingleAgentEnv,
    Step,
    UsageError,
    checked_openings,
    checked_steps,
)
from environments.parsing import prefill_of
from environments.plumbing.registry import describe_error, make
from environments.plumbing.text import is_rendered
from environments.plumbing.tools import with_tools

MAX_TURNS = 500  # of an episode
NUM_OPENINGS = 300  # to compare, of each range of seeds; a tenth if the environment `waits`
MAX_SHARED = 0.02  # fraction of the openings of evaluation that training may have by chance
ODD_TEXTS = [
    "", " \n\t", "\x00", "\ud800", "é 你好 🎲", "no idea", "-1", "NaN", "1e400", "٣", "½", "\\",
    "{", '{"action": ', '{"answer": true}', '{"answer": "\\ud800"}', '{"move": -1}', '{"url": 5}',
    '{"move": 1e999}', '{"move": [1, 2]}', '{"action": {"action": {}}}', "\\boxed{\\frac{1}{",
    "</answer><answer>", "<answer></answer>", "<answer>\ud800</answer>", "<move>99</move>",
    "<answer>" + "9" * 5000 + "</answer>", '{"answer":' * 10_000, "[" * 100_000, "5 " * 50_000,
]  # fmt: skip

Respond = Callable[[str, int], str | None]  # the response of an agent in a turn
Turn = tuple[dict[str, str], dict[str, Step]]  # responses and steps


@dataclass
class Report:
    """What `check_env` found."""

    spec: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rewards: set[float] = field(default_factory=set)  # of all steps
    # return and info["correct"] of each demonstrated episode; empty: no demonstrations
    demonstrations: list[tuple[float, bool | None]] = field(default_factory=list)
    openings: set[str] = field(default_factory=set)  # of training and demonstrations
    held_out: set[str] = field(default_factory=set)  # of evaluation
    longest: int = 0  # turns of the longest episode
    num_guesses: int = 0  # of the environment: demonstrate(hasty=True)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        low, high = min(self.rewards, default=0), max(self.rewards, default=0)
        yield f"{self.spec}: rewards {low:g} to {high:g}, episodes of up to {self.longest} turns"
        yield f"openings: {len(self.openings)} for training, {len(self.held_out)} held out"
        if self.demonstrations:
            returns, correct = zip(*self.demonstrations, strict=True)
            judged = [value for value in correct if value is not None]
            text = f"demonstrations: mean return {sum(returns) / len(returns):g}"
            yield f"{text}, correct {sum(judged)} of {len(judged)}"
        yield from (f"warning: {text}" for text in self.warnings)
        yield from (f"problem: {text}" for text in self.problems)
        yield f"{len(self.problems) or 'no'} problem(s), {len(self.warnings)} warning(s)"


def check_env(spec: str, num_seeds: int = 20, other_process: bool = True) -> Report:
    """Plays episodes of an environment and returns what it found.

    `other_process`: also compare episodes with those of another Python process.
    Raises UsageError if the environment cannot be built.
    """
    report, env = Report(spec), with_tools(make(spec))
    questions: dict[str, Callable[[], None]] = {
        "seeds": lambda: _check_seeds(spec, other_process),
        "demonstrations": lambda: _check_demonstrations(report, env, num_seeds),
        "two answers": lambda: _check_two_answers(report, env, num_seeds),
        "odd texts": lambda: _check_odd_texts(report, env),
        "openings": lambda: _check_openings(report, env),
    }
    for name, check in questions.items():
        try:
            check()
        except (Exception, SystemExit) as error:
            report.problems.append(f"{name}: {describe_error(error)}")
    env.close()
    return report


def digests(spec: str, seeds: Iterable[int]) -> list[str]:
    """Returns a checksum of the episode of each seed, all played in one environment.

    The second response is unreadable, every third one is a guess, the others are demonstrations.
    """
    env, checksums = with_tools(make(spec)), list[str]()

    def respond(agent: str, turn: int) -> str | None:
        return "no idea" if turn == 1 else env.demonstrate(agent, hasty=turn % 3 == 2)

    for seed in seeds:
        episode = repr(_play(Report(spec), env, seed, respond, max_turns=6))
        checksums.append(hashlib.sha256(episode.encode(errors="replace")).hexdigest())
    env.close()
    return checksums


def _check_seeds(spec: str, other_process: bool) -> None:
    """Compares episodes of one environment with those of new ones, in another process or here."""
    seeds = [3, 4, EVAL_SEEDS[0], 3]
    in_one, error = digests(spec, seeds), ""
    if other_process:
        code = f"import sys; sys.path[:] = {sys.path}; from {__spec__.name} import digests; "
        code += f"print(*[digests({spec!r}, [seed])[0] for seed in {seeds}])"
        env = os.environ | {"PYTHONHASHSEED": "12345"}
        command = [sys.executable, "-c", code]
        process = subprocess.run(command, capture_output=True, encoding="utf-8", env=env)
        in_new = process.stdout.split()[-len(seeds) :]
        error = process.stderr.strip().split("\n")[-1]
    else:
        in_new = [digests(spec, [seed])[0] for seed in seeds]
    if in_one != in_new:
        causes = "earlier episodes, random, the time, hash() or the order of a set change it"
        raise UsageError(f"the seed does not determine the episode: {causes} {error}".strip())


def _check_demonstrations(report: Report, env: MultiAgentEnv, num_seeds: int) -> None:
    """Plays as the warm start does: one agent demonstrates, the others do so hastily."""
    seeds = [(TRAIN_SEEDS, DEMO_SEEDS, EVAL_SEEDS)[i % 3][i // 3] for i in range(num_seeds)]
    correct = [_demonstrate(report, env, seed) for seed in seeds]
    if num_unscored := sum("" in verdicts for verdicts in correct):
        unscored = f'{num_unscored} of {num_seeds} episodes ended without info["correct"]'
        report.warnings.append(f"{unscored}: they count as wrong")
    count = len(report.demonstrations)
    verdicts = {verdict for of_episode in correct for verdict in of_episode}
    if True in verdicts or False not in verdicts or not count + report.num_guesses:
        return
    episodes = f"{count} demonstrations" if count else f"{num_seeds} episodes of guesses"
    if count and isinstance(env, SingleAgentEnv):
        raise UsageError(f"none of {episodes} succeeds")
    report.warnings.append(f"none of {episodes} succeeds")  # other agents may be better


def _demonstrate(report: Report, env: MultiAgentEnv, seed: int) -> list[bool | str | None]:
    """Plays an episode of demonstrations, or else of guesses. Returns info["correct"] of the agent
    that demonstrates, or else of all agents; "" if an episode ended without it."""
    demonstrator = env.agents[seed % len(env.agents)] if env.agents else ""
    demonstrations: list[str] = []

    def respond(agent: str, turn: int) -> str | None:
        text = env.demonstrate(agent, hasty=agent != demonstrator)
        if agent == demonstrator and text is not None:
            demonstrations.append(text)
        return text

    turns = _play(report, env, seed, respond, MAX_TURNS)[1]
    report.longest = max(report.longest, len(turns))
    last_steps = {agent: step for _, steps in turns for agent, step in steps.items()}
    if demonstrations and demonstrator in last_steps:
        last = last_steps[demonstrator]
        rewards = [steps[demonstrator].reward for _, steps in turns if demonstrator in steps]
        report.demonstrations.append((sum(rewards), last.info.get("correct", False)))
        last_steps = {demonstrator: last}
    missing = "" if len(turns) < MAX_TURNS else False
    return [step.info.get("correct", missing) for step in last_steps.values()]


def _check_two_answers(report: Report, env: MultiAgentEnv, num_seeds: int) -> None:
    """Joins each demonstration with a wrong answer: the next task's demonstration."""
    if report.longest != 1 or not report.demonstrations or not isinstance(env, SingleAgentEnv):
        return

    def is_right(seed: int, text: str) -> bool:
        [(_, steps)] = _play(report, env, seed, lambda agent, turn: text, max_turns=1)[1]
        return bool(steps[PLAYER].info.get("correct"))

    seeds, answers = TRAIN_SEEDS[:num_seeds], list[str]()
    for seed in seeds:
        _reset(env, seed)
        answers.append(env.demonstrate(PLAYER) or "")
    tasks = zip(seeds, answers, answers[1:], strict=False)
    pairs = [(i, a, b) for i, a, b in tasks if is_right(i, a) and not is_right(i, b)]
    orders = [(i, f"{a} {b}", f"{b} {a}") for i, a, b in pairs]
    fooled = [one for i, one, other in orders if is_right(i, one) and is_right(i, other)]
    if fooled:
        text = f"{len(fooled)} of {len(pairs)} right answers are right with a wrong one, too"
        report.warnings.append(f"{text}, before and after it, such as {fooled[0][:150]!a}")


def _check_odd_texts(report: Report, env: MultiAgentEnv) -> None:
    """Answers with each text three times, so that it also meets the last retry."""
    for seed, text in enumerate(ODD_TEXTS):
        try:
            _play(report, env, seed, lambda *_, t=text: t, max_turns=3)  # type: ignore[misc]
        except (Exception, SystemExit) as error:
            response = f"response {text[:30]!a} of {len(text)} characters"
            raise UsageError(f"{response}: {describe_error(error)}") from error


def _check_openings(report: Report, env: MultiAgentEnv) -> None:
    count = NUM_OPENINGS // (10 if env.waits else 1)
    messages = [m for opening in _reset(env, TRAIN_SEEDS[0]).values() for m in opening]
    if any(m["role"] != "raw" and is_rendered(m["content"]) for m in messages):
        raise UsageError("a message contains the chat template: leave it out, or set role raw")
    train_seeds = [*TRAIN_SEEDS[:count], *DEMO_SEEDS[:count]]
    report.openings = {repr(_reset(env, seed)) for seed in train_seeds}
    report.held_out = {repr(_reset(env, seed)) for seed in EVAL_SEEDS[:count]}
    shared, total = len(report.openings & report.held_out), len(report.held_out)
    text = f"{shared} of {total} openings of evaluation occur in training"
    if shared > MAX_SHARED * total and report.longest == 1:
        raise UsageError(f"{text}: reserve tasks for the seeds in EVAL_SEEDS")
    if shared:
        report.warnings.append(text)


def _play(
    report: Report, env: MultiAgentEnv, seed: int, respond: Respond, max_turns: int
) -> tuple[dict[str, list[Message]], list[Turn]]:
    """Plays an episode; returns its opening, and the responses and steps of each turn. A guess
    takes the place of a response None."""
    opening, turns = _reset(env, seed), list[Turn]()
    prefills = {agent: prefill_of(messages) for agent, messages in opening.items()}
    agents_to_act = set(opening)
    while agents_to_act and len(turns) < max_turns:
        undeclared = agents_to_act - {*env.agents}
        if env.agents and undeclared:
            raise UsageError(f"{min(undeclared)} acts, but is not one of {', '.join(env.agents)}")
        responses = {}
        for agent in sorted(agents_to_act):
            text = respond(agent, len(turns))
            if text is None:
                text = env.demonstrate(agent, hasty=True) or "?"
                report.num_guesses += text != "?"
            responses[agent] = prefills.pop(agent, "") + text
        steps = checked_steps(env.step(responses), isinstance(env, SingleAgentEnv))
        turns.append((responses, steps))
        report.rewards |= {step.reward for step in steps.values()}
        agents_to_act = {agent for agent, step in steps.items() if step.message and not step.done}
    without_step = {agent for responses, _ in turns for agent in responses}
    without_step -= {agent for _, steps in turns for agent in steps}
    if without_step and not agents_to_act:
        raise UsageError(f"step() never returned a Step for {min(without_step)}")
    return opening, turns


def _reset(env: MultiAgentEnv, seed: int) -> dict[str, list[Message]]:
    openings = checked_openings(env.reset(seed))
    if not openings or not all(openings.values()):
        raise UsageError(f"reset({seed}) returned no messages")
    return openings
