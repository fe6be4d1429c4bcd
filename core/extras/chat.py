"""Talk to a policy in the terminal: the policy of a run, finished or not, or any model.

    python -m core.chat runs/mine                  # greedy answers, as in evaluation
    python -m core.chat runs/mine --before         # the model before training answers first
    python -m core.chat Qwen/Qwen3-0.6B --temperature 0.7
    cat question.txt | python -m core.chat runs/mine      # prints only the answer

A finished run answers with the weights of its model/, any other run with its newest checkpoint. The
folder of the run is only read. A conversation is one agent of core/episodes.py, so it keeps each
answer as the token ids that were sampled, as training does. Without a terminal each line of the
input is one message. Answers go to stdout, everything else goes to stderr.
"""

from core.terminal import cli

if __name__ == "__main__":
    cli.say_loading()

# isort: split
import copy
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from core import config, settings, tasks
from core.chat_template import clean_message
from core.config import Config
from core.context import Agent
from core.episodes import RolloutCollector
from core.extras import programs
from core.faults import Fault, UsageError
from core.files.checkpoint import copy_weights, find_checkpoint
from core.files.models import base_model, folder_of_model, frozen_settings, load_exported
from core.files.run_log import METRICS, read_records
from core.loading import has_adapters, load_policy
from core.memory import out_of_memory_as_one_line
from core.policy import Policy
from core.results import num_updates
from core.sampler import SamplingParams, TorchSampler, params_of, to_completion
from core.seeds import derive_seed
from core.settings import find_run, known_runs
from core.tasks import Task
from core.types import Message, Rollout
from environments.base import EVAL_SEEDS, RunInfo
from environments.plumbing.registry import begin_run
from environments.plumbing.text import one_line, printable

COMMANDS = "/task: play a held-out task · /reset: forget the conversation · Ctrl-D: end"
TINY_HINT = "tiny knows only its tasks' wording, one task per conversation: try /task"


class Speaker:
    """A policy with its tokenizer, and the conversation so far."""

    def __init__(self, label: str, policy: Policy, cfg: Config):
        self.label, self.policy = label, policy  # before, trained or model
        self.collector = RolloutCollector(
            policy, cfg.max_turns, cfg.env_timeout, cfg.system_prompt, say=_note
        )
        self.collector.play_program = programs.play_program
        self.reset()

    def reset(self) -> None:
        self.agent = Agent(self.collector.renderer, Rollout("", "", 0, 0))


def execute(args: list[str]) -> int:
    """Runs `python -m core.chat ARGS`; `cli.execute` reports its errors."""
    return cli.execute(main, args, parse, "core.chat")


def parse(args: list[str]) -> tuple[Path | None, bool, Config]:
    """The folder of the run (None for another model), whether --before is there, and the settings.

    The settings are those of the run, or of a default run, with the flags of train.py in `args`.
    Without --temperature answers are greedy. Raises UsageError.
    """
    if not args or args[0].startswith("-"):
        raise UsageError(f"name a run or a model first, such as runs/mine or tiny; {known_runs()}")
    name, folder = args[0], Path(args[0]).expanduser()
    flags = [word for word in args[1:] if word != "--before"]
    is_built_in = name in ("tiny", config.SMOLLM2)
    run = None if is_built_in else find_run(name)
    is_hub_id = "/" in name and config.RUNS not in folder.parents
    if not (run or is_built_in or folder.exists() or is_hub_id):
        raise UsageError(f"{name}: there is no such run; {known_runs()}")
    if "--before" in args and not run:
        raise UsageError(f"--before needs a run; {name} is none")
    source = f"--config={run}" if run else f"--model-id={name}"
    cfg = config.resolve(settings.parse([source, *flags]))
    if not any(flag.startswith("--temperature") for flag in flags):
        cfg = replace(cfg, temperature=0.0, top_p=1.0, top_k=0)
    return run, "--before" in args, cfg


def main(parsed: tuple[Path | None, bool, Config]) -> int:
    """Answers each line that is typed or piped in. Returns the exit code."""
    _, _, cfg = parsed
    begin_run(RunInfo([*map(str, cfg.env)], [*map(str, cfg.eval_env or cfg.env)]))
    with out_of_memory_as_one_line(lambda: "Use --dtype bfloat16, --device cpu or a smaller model"):
        speakers = load_speakers(*parsed)
    interactive = sys.stdin.isatty()
    if interactive:
        _note(f"{COMMANDS}\n{TINY_HINT}" if cfg.model_id == "tiny" else COMMANDS)
    num_played = 0
    for number, line in enumerate(read_lines() if interactive else sys.stdin):
        text = line.strip()
        params = params_of(cfg, derive_seed(cfg.seed, number))
        num_played += text == "/task"
        try:
            for speaker in speakers if text else []:
                if text == "/task":
                    play(speaker, cfg, num_played - 1, params)
                elif text == "/reset":
                    speaker.reset()
                else:
                    label = f"{speaker.label}: " if interactive or len(speakers) > 1 else ""
                    answer(speaker, text, params, label)
        except (UsageError, Fault, KeyboardInterrupt) as error:
            if not interactive:
                raise
            _note(one_line(error) or "stopped")
    return 0


def read_lines() -> Iterator[str]:
    """Asks for lines, with arrow keys and a history, until Ctrl-D or Ctrl-C."""
    with suppress(ImportError):
        import readline  # noqa: F401  (`input` uses it from then on)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("you: ")
    print()


def load_speakers(run: Path | None, before: bool, cfg: Config) -> list[Speaker]:
    """Loads the trained policy, or the model; with `before`, first the model before training."""
    if not run:
        policy = load_policy(cfg, folder_of_model(cfg.model_id), flag="model")
        _note(f"{cfg.model_id} · {policy.size()}")
        return [Speaker("model", policy, cfg)]
    policy, source = load_trained(cfg, run)
    _note(f"{source} · {policy.size()}")
    speakers = [Speaker("trained", policy, cfg)]
    if before:
        if cfg.sft_steps:
            _note(f"before: {cfg.model_id}, without the {cfg.sft_steps} warm-start steps")
        first = replace(policy, disables_adapters=True)  # the same weights without them
        if not policy.lora_rank or has_adapters(cfg.model_id):
            first = load_policy(frozen_settings(cfg), base_model(run, cfg.model_id), flag="model")
        speakers.insert(0, Speaker("before", first, cfg))
    return speakers


def load_trained(cfg: Config, folder: Path) -> tuple[Policy, Path]:
    """The policy of a run, and the folder of its weights. Raises UsageError if there is none.

    If a finished run is resumed with more updates, its model/ is out of date until it finishes
    again; until then the newest checkpoint answers.
    """
    exported = folder / "model"
    if exported.is_dir() and num_updates(read_records(folder / METRICS)) >= cfg.num_updates:
        return load_exported(cfg, folder, "model"), exported
    checkpoint, _ = find_checkpoint(folder)
    if not checkpoint:
        raise UsageError(f"{folder}: no checkpoint yet; --save-every sets when a run saves one")
    has_value_head = "value_head" in config.needs(cfg)  # saved in the checkpoint, not used here
    base = base_model(folder, cfg.model_id)
    policy = load_policy(cfg, base, value_head=has_value_head, flag="model")
    copy_weights(checkpoint, policy.trainable(), same_dtype=False)
    return policy, checkpoint


def answer(speaker: Speaker, question: str, params: SamplingParams, label: str = "") -> None:
    """Prints the answer while it is sampled, after `label`, and adds both to the conversation.

    Raises UsageError if the conversation does not fit into the context; then, and after Ctrl-C, it
    is unchanged.
    """
    policy, present = speaker.policy, speaker.agent
    agent = replace(present, rollout=copy.deepcopy(present.rollout), chat=[*present.chat])
    message: Message = {"role": "user", "content": question}
    sampler = TorchSampler(policy)
    num_printed = 0  # characters of the answer

    def print_more() -> None:
        nonlocal num_printed
        for partial in sampler.batch:  # its last character may not be complete yet
            text = to_completion(policy, partial.token_ids, []).text.rstrip("\ufffd")
            print(printable(text)[num_printed:], end="", flush=True)
            num_printed = len(printable(text))

    if agent.chat:
        agent.chat.append(clean_message(message))
    else:
        agent.begin([message])
    agent.set_prompt()
    if agent.context_full:
        limit = policy.max_length
        raise UsageError(f"the conversation does not fit into {limit} tokens: /reset forgets it")
    print(label, end="")
    try:
        with policy.adapters():
            [completion] = sampler.sample([agent.prompt_ids], params, print_more)
        print(printable(completion.text)[num_printed:], end="")
    finally:
        print()
    agent.add(completion)
    speaker.agent = agent
    if completion.finish_reason == "length":
        _note(f"cut off after --max-tokens {params.max_tokens}")


def play(speaker: Speaker, cfg: Config, number: int, params: SamplingParams) -> None:
    """Plays held-out task `number`, from 0, apart from the conversation; prints its messages and
    rewards. Environments take turns."""
    envs = tasks.held_out_envs(cfg)
    task = Task(envs[number % len(envs)], EVAL_SEEDS[number // len(envs)], group_id=0)
    with speaker.policy.adapters():
        rollouts = speaker.collector.collect([task], TorchSampler(speaker.policy), params)
    for rollout in rollouts:
        _note(f"held-out task of {task.env.short}, seed {task.seed}, {rollout.agent}")
        for message in rollout.messages:
            role = speaker.label if message["role"] == "assistant" else message["role"]
            print(printable(f"{role}: {message['content']}"))
        rewards = " ".join(f"{turn.reward:+g}" for turn in rollout.turns)
        facts = [f"reward {rollout.episode_return:g} ({rewards})"]
        facts += [f"{key} {value}" for key, value in rollout.info.items()]
        facts += ["truncated"] if rollout.episode_truncated else []
        facts += [f"the environment failed: {rollout.error}"] if rollout.error else []
        print(printable(" · ".join(facts)))


def _note(text: str) -> None:
    print(printable(text), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
