"""picoRL and TRL's GRPOTrainer on real tasks: what they need to reach the same accuracy.

    python runs/benchmarks/vs_trl_task.py                  # both tasks, five seeds
    python runs/benchmarks/vs_trl_task.py --only tiny
    python runs/benchmarks/vs_trl_task.py --rounds 1 --updates 2 --no-write     # a quick check

`tiny` learns letter_counting with the settings of `python train.py`, `smollm2` sums with those of
runs/smollm2/sums.yaml. Both sides start from the same weights, have the same prompts in the same
order, the environment's rewards, P, G, temperature, learning rate and loss; TRL has no vLLM and the
micro-batch size that is fastest for it. First `compare` lets both learn from the same completions:
prompts, rewards, gradient and accuracies must agree. Then each samples its own.

After the same updates picoRL's greedy evaluation answers the same held-out questions with the
weights of either side; the first time that its accuracy is at the goal ends the run. The clock runs
from the first update until then. It stands still during evaluations and, in picoRL, while
checkpoints and pages are written, which TRL's process does not do.
"""

import math
import os
import statistics
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any, Literal

import tyro
from pairs import ROOT, Rounds, Side, alternate, in_child, note, publish, run_child, spread, verdict
from record import markdown
from vs_trl import engine_options, trl_config

GOAL = 0.33  # maximum of picoRL's time / TRL's time


@dataclass(frozen=True)
class Case:
    """A task; `trl_rows`: completions per micro-batch of TRL; `every`: updates per evaluation."""

    flags: tuple[str, ...]
    accuracy: float
    every: int
    trl_rows: int


CASES = {
    "tiny": Case((), 0.95, every=1, trl_rows=32),
    "smollm2": Case(("--config", f"{ROOT}/runs/smollm2/sums.yaml"), 0.70, every=2, trl_rows=16),
}


@dataclass
class Args(Rounds):
    """What to measure; each round is a seed, with a pair of fresh processes."""

    updates: int = 60  # at most, in each run
    only: Literal["", "tiny", "smollm2"] = ""  # one of the tasks


def main(args: Args) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # inherited by the children
    for name in [args.only] if args.only else CASES:
        publish(f"vs_trl_task_{name}", [measure(args, name)], table, args.write)


def measure(args: Args, name: str) -> dict[str, Any]:
    """Measures both sides of a task. Raises RuntimeError if they did not do the same."""
    print(name, flush=True)
    compared = in_child(__file__, "compare", name=name)

    def side(part: str) -> Side:
        seeds = iter(range(args.rounds))
        return lambda: in_child(__file__, part, seed=next(seeds), name=name, updates=args.updates)

    results = alternate({"picoRL": side("picorl"), "TRL": side("trl")}, args.rounds, "wall_s")
    for ours, theirs in zip(*results.values(), strict=True):
        check_equal(ours, theirs, "prompts")
    return {"task": name, "trl_rows": CASES[name].trl_rows, "compared": compared, "sides": results}


def table(cases: list[dict[str, Any]]) -> list[str]:
    """One row per side; of the pairs in which both sides reached the accuracy."""
    rows = []
    for case in cases:
        goal = CASES[case["task"]].accuracy
        pairs = list(zip(*case["sides"].values(), strict=True))
        both = [pair for pair in pairs if all(answer["reached"] for answer in pair)]
        for number, (name, answers) in enumerate(case["sides"].items()):
            reached = f"{sum(a['reached'] for a in answers)} of {len(answers)}"
            cells = [f"{case['task']}, {goal:.2f}", name, reached]
            for key, form in (("updates", ".0f"), ("tokens", ",.0f"), ("wall_s", ".1f"),
                              ("cpu_s", ".1f")):  # fmt: skip
                cells.append(spread([pair[number][key] for pair in both], form) if both else "")
            if number and both:
                wall, cpu = ([a[k] / b[k] for a, b in both] for k in ("wall_s", "cpu_s"))
                steps = [ratio * b["updates"] / a["updates"]
                         for ratio, (a, b) in zip(wall, both, strict=True)]  # fmt: skip
                cells += [spread(values) for values in (wall, cpu, steps)]
                cells.append(verdict(statistics.median(wall), GOAL))
            rows.append([*cells, "", "", "", ""][:11])
    return markdown("task | side | reached | updates | tokens sampled | wall, s | processor, s | "
                    "wall, picoRL / TRL | processor | wall per update | goal", rows)  # fmt: skip


def check_equal(ours: dict[str, Any], theirs: dict[str, Any], *keys: str) -> None:
    """Raises RuntimeError if the sides differ in these lists, as far as both go."""
    for key in keys:
        common = zip(ours[key], theirs[key], strict=False)
        if not ours[key] or any(a != b for a, b in common):
            raise RuntimeError(f"other {key} on the two sides: {ours[key]} and {theirs[key]}")


# --- child processes -----------------------------------------------------------------------------


@dataclass
class Race:
    """One side of a run until it reaches the accuracy."""

    name: str
    goal: float
    reached: bool = False
    tokens: int = 0  # sampled
    prompts: list[int] = field(default_factory=list)  # a checksum of the token ids for each update
    completions: list[list[int]] = field(default_factory=list)  # of update 1
    rewards: list[float] = field(default_factory=list)  # of update 1
    grad_norm: float = math.nan  # of update 1
    curve: list[dict[str, float]] = field(default_factory=list)  # a point for each evaluation
    zero: tuple[float, ...] | None = None  # wall and processor time at which the clock was 0

    def start(self) -> None:
        self.zero = now()

    def clock(self) -> tuple[float, ...]:
        """Wall and processor seconds since `start`, without what was outside."""
        return tuple(a - b for a, b in zip(now(), self.zero or now(), strict=True))

    def outside(self, function: Callable) -> Callable:
        """Wraps a function so that the clock stands still."""

        def wrapped(*args: Any) -> Any:
            spent = self.clock()
            result = function(*args)
            if self.zero:
                self.zero = tuple(a - b for a, b in zip(now(), spent, strict=True))
            return result

        return wrapped

    def sampled(self, prompts: list[list[int]], completions: list[list[int]]) -> None:
        self.prompts.append(zlib.crc32(str(prompts).encode()))
        self.completions = self.completions or completions
        self.tokens += sum(map(len, completions))

    def evaluating(self, evaluate: Callable) -> Callable:
        """Wraps an evaluation, a function of its owner and the update that returns the metrics."""

        def wrapped(owner: Any, update: int) -> dict[str, float]:
            wall, cpu = self.clock()
            metrics = evaluate(owner, update)
            [accuracy] = [v for k, v in metrics.items() if k.endswith("/accuracy")]
            point = {"updates": update, "tokens": self.tokens, "wall_s": wall, "cpu_s": cpu}
            self.curve.append(point | {"accuracy": accuracy})
            note(f"{self.name}: update {update}, {wall:.1f} s, {self.tokens:,} tokens, "
                 f"held-out accuracy {accuracy:.3f}")  # fmt: skip
            self.reached = accuracy >= self.goal
            return metrics

        return self.outside(wrapped)

    def answer(self) -> dict[str, Any]:
        """The last point of the curve, the curve and the prompts."""
        found = {"reached": self.reached, "curve": self.curve, "prompts": self.prompts}
        return self.curve[-1] | found


def now() -> tuple[float, ...]:
    return perf_counter(), process_time()


def settings(name: str, seed: int, updates: int) -> Any:
    """The Config of the task, for both sides."""
    from core.run import cli

    return cli.parse([
        *CASES[name].flags, "--seed", f"{seed}", "--num-updates", f"{updates}", "--device", "cpu",
        "--eval-every", f"{CASES[name].every}", "--save-every", "0", "--microscope", "0",
    ])  # fmt: skip


def run_picorl(name: str, seed: int, updates: int) -> Race:
    """Trains with train.py."""
    import train
    from core.loop.evaluator import Evaluator
    from core.loop.outputs import Outputs
    from core.loop.run import Run

    race = Race("picoRL", CASES[name].accuracy)
    collect, all_updates, log = train.collect_rollouts, Run.updates, Run.log

    def until_reached(run: Run) -> Any:
        for update in all_updates(run):
            if race.reached:
                return
            if update == 1:
                race.start()
            yield update

    def collect_rollouts(*args: Any) -> Any:
        sampled, kept = collect(*args)
        turns = [turn for rollout in sampled for turn in rollout.turns]
        race.sampled([t.prompt_ids for t in turns], [t.completion_ids for t in turns])
        race.rewards = race.rewards or [rollout.episode_return for rollout in sampled]
        return sampled, kept

    def log_update(run: Run, update: int, metrics: dict[str, Any], rollouts: list) -> bool:
        if update == 1:
            race.grad_norm = metrics["grad/norm"]
        return log(run, update, metrics, rollouts)

    def save(run: Run, saved: Any = Run.save) -> bool:
        done = saved(run)
        run.outputs.writer.wait()
        return done

    train.collect_rollouts, Run.updates, Run.log = collect_rollouts, until_reached, log_update
    Evaluator.evaluate = race.evaluating(Evaluator.evaluate)
    Run.save = race.outside(save)
    Outputs.write_pages = race.outside(Outputs.write_pages)
    cfg = settings(name, seed, updates)
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)  # for runs/
        train.main(cfg)
        os.chdir(here)
    return race


def run_trl(name: str, seed: int, updates: int, given: list[list[int]] | None = None) -> Race:
    """Trains with TRL; `given`: completions of update 1, in place of sampled ones."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    import train
    from core import evaluation, tasks
    from core.episodes import RolloutCollector
    from core.run.models import folder_of, load_policy
    from core.sampler import SamplingParams, TorchSampler
    from environments.plumbing.registry import make

    cfg = train.prepare(settings(name, seed, updates))
    race = Race("TRL", CASES[name].accuracy)
    folder = folder_of(cfg.model_id)
    questions = [
        {"prompt": make(task.env).reset(task.seed), "spec": task.env, "task": task.seed}
        for update in range(1, updates + 1)
        for task in tasks.train_tasks(cfg.env, cfg.seed, update, cfg.num_prompts, 1)
    ]
    environments = {spec: make(spec) for spec in cfg.env}

    def rewards(completions: list, spec: list[str], task: list[int], **rest: Any) -> list[float]:
        found = []
        for completion, env, number in zip(completions, spec, task, strict=True):
            environments[env].reset(number)
            found.append(environments[env].step(completion[0]["content"]).reward)
        race.rewards = race.rewards or found
        return found

    policy = load_policy(cfg, cfg.model_id)  # to evaluate TRL's weights
    collector, held_out = RolloutCollector(policy, cfg.max_turns), evaluation.held_out_tasks(cfg)

    @torch.no_grad()
    def greedy(trainer: Any, update: int) -> dict[str, float]:
        for mine, trained in zip(policy.model.parameters(), trainer.model.parameters(),
                                 strict=True):  # fmt: skip
            mine.copy_(trained)
        params = SamplingParams(cfg.max_tokens, temperature=0.0)
        rollouts = collector.collect(held_out, TorchSampler(policy), params)
        return evaluation.accuracy_metrics(rollouts)

    evaluate = race.evaluating(greedy)

    class Watch(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            evaluate(trainer, 0)
            race.start()

        def on_step_end(self, _: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % cfg.eval_every == 0 or state.global_step == updates:
                evaluate(trainer, state.global_step)
                control.should_training_stop |= race.reached

        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            race.grad_norm = logs.get("grad_norm", race.grad_norm)

    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=folder, reward_funcs=rewards, train_dataset=Dataset.from_list(questions),
            callbacks=[Watch()],
            args=trl_config(
                out, CASES[name].trl_rows, cfg.num_prompts, cfg.group_size, cfg.max_tokens, updates,
                temperature=cfg.temperature, learning_rate=cfg.lr, seed=cfg.seed,
                max_grad_norm=cfg.max_grad_norm, lr_scheduler_type="constant",
                shuffle_dataset=False, logging_steps=1 if given else 10,
                **engine_options(folder, False, False, 0, 0, False),
            ),
        )  # fmt: skip
        sample = trainer._generate_single_turn

        def generate(prompt_ids: list, *args: Any, **kwargs: Any) -> Any:
            ids, logprobs = (given, None) if given else sample(prompt_ids, *args, **kwargs)
            race.sampled([list(ids) for ids in prompt_ids], ids)
            return ids, logprobs

        trainer._generate_single_turn = generate
        trainer.train()
    return race


def compare(name: str) -> dict[str, Any]:
    """Both sides learn from the completions that picoRL samples; raises if they then differ."""
    ours = run_picorl(name, 0, 1)
    theirs = run_trl(name, 0, 1, given=ours.completions)
    check_equal(vars(ours), vars(theirs), "prompts", "rewards")
    norms = [ours.grad_norm, theirs.grad_norm]
    accuracies = [[point["accuracy"] for point in race.curve] for race in (ours, theirs)]
    found = {"rewards": len(ours.rewards), "grad_norms": norms, "accuracies": accuracies}
    note(f"equal prompts and {len(ours.rewards)} equal rewards; gradient norms {norms}; "
         f"held-out accuracies before and after update 1 {accuracies}")  # fmt: skip
    if not math.isclose(*norms, rel_tol=1e-5) or accuracies[0][0] != accuracies[1][0]:
        raise RuntimeError(f"the sides have other gradients or start from other weights: {found}")
    return found


def picorl(**options: Any) -> dict[str, Any]:
    return run_picorl(**options).answer()


def trl(**options: Any) -> dict[str, Any]:
    return run_trl(**options).answer()


PARTS = {"compare": compare, "picorl": picorl, "trl": trl}

if __name__ == "__main__" and not run_child(PARTS):
    main(tyro.cli(Args, description=__doc__))
