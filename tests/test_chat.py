"""`python -m core.chat`: which weights answer, exact conversations, tasks, the command line."""

import io
import itertools
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

import train
from core.chat_template import prompt_ids
from core.config import Config
from core.extras import chat
from core.report import curves
from core.sampler import SamplingParams, TorchSampler
from core.terminal.console import printable
from core.tiny import tiny_tokenizer
from core.types import Message
from environments.base import EVAL_SEEDS, Env, Step
from environments.plumbing import registry

QUESTION = 'How many r in "cherry"?'
MAX_TOKENS = 10
SMALL = f"""--num-updates 1 --num-prompts 2 --group-size 4 --eval-num-tasks 0 --save-every 1
    --lr 0.05 --sft-lr 0.05 --sft-batch-size 2 --max-tokens {MAX_TOKENS} --env two_turns
    --device cpu""".split()
KINDS = {
    "full": "--model-id tiny-random --sft-steps 2",
    "lora": "--model-id QWEN3 --lora-rank 2 --algo ppo",
}


class TwoTurns(Env):
    """Two turns; the reward of each is the length of the response."""

    def reset(self, seed: int) -> list[Message]:
        self.turn = 0
        return [{"role": "user", "content": f"Task {seed}."}]

    def step(self, response: str) -> Step:
        self.turn += 1
        more = None if self.turn == 2 else Message(role="user", content="More.")
        return Step(more, float(len(response)), self.turn == 2, {"correct": True})

    def demonstrate(self, hasty: bool = False) -> str:
        return "a b c"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def runs(tmp_path_factory, qwen3_folder):
    """One finished run of each kind, by kind."""
    folder = tmp_path_factory.mktemp("chat")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ENVIRONMENTS, "two_turns", TwoTurns)
        patch.setattr(curves, "draw_curves", lambda *_: None)
        patch.chdir(folder)
        for kind, flags in KINDS.items():
            flags = flags.replace("QWEN3", str(qwen3_folder)).split()
            assert train.execute([*SMALL, *flags, "--run-name", kind]) == 0
        yield {kind: folder / "runs" / kind for kind in KINDS}


@pytest.fixture
def talk(monkeypatch, capsys):
    """Runs `python -m core.chat ARGS` with piped lines; returns (exit code, stdout, stderr)."""

    def talk(*args, lines=QUESTION, stdin=None):
        monkeypatch.setattr("sys.stdin", stdin or io.StringIO(lines))
        capsys.readouterr()
        return chat.execute([*map(str, args), "--device", "cpu"]), *capsys.readouterr()

    return talk


PARAMS = SamplingParams(MAX_TOKENS, temperature=0.0)


def expected(kind, run, before=False):
    """What the trained model (or the one before training) answers to QUESTION: greedily, by
    Hugging Face's model without a cache."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    base = run / "base" if kind == "full" else settings["model_id"]
    folder = base if before or kind == "lora" else run / "model"
    tokenizer = tiny_tokenizer()
    ids = prompt_ids(tokenizer, [{"role": "user", "content": QUESTION}])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if kind == "lora" and not before:
        model = PeftModel.from_pretrained(model, run / "model")
    drawn = []
    while len(drawn) < MAX_TOKENS and tokenizer.eos_token_id not in drawn:
        drawn.append(int(model.eval()(torch.tensor([ids + drawn])).logits[0, -1].argmax()))
    return printable(tokenizer.decode(drawn, skip_special_tokens=True))


@pytest.mark.parametrize("kind", KINDS)
def test_before_shows_both_models_and_writes_nothing_into_the_folder_of_the_run(
    kind, runs, talk, monkeypatch
):
    monkeypatch.chdir(runs[kind].parents[1])

    def files():
        return {path: path.stat().st_mtime_ns for path in [runs[kind], *runs[kind].rglob("*")]}

    files_before = files()
    before, after = expected(kind, runs[kind], before=True), expected(kind, runs[kind])
    assert before != after
    code, out, err = talk(kind, "--before")  # by its name
    assert code == 0 and out.startswith(f"before: {before}\ntrained: {after}\n")
    assert ("without the 2 warm-start steps" in err) == (kind == "full")
    assert files() == files_before


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_exported_weights_answers_with_its_newest_checkpoint(
    kind, runs, talk, tmp_path
):
    run = Path(shutil.copytree(runs[kind], tmp_path / "copy"))
    shutil.rmtree(run / "model")
    if kind == "full":  # an export that is older than the checkpoint, as in a resumed run
        shutil.copytree(run / "base", run / "model")
        settings = yaml.safe_load((run / "config.yaml").read_text()) | {"num_updates": 9}
        (run / "config.yaml").write_text(yaml.safe_dump(settings))
    code, out, err = talk(run)
    assert (code, out) == (0, expected(kind, runs[kind]) + "\n")
    assert re.search(f"{run}/checkpoint/00000[02]-000002 ", err)  # after update 1


def test_each_prompt_begins_with_the_ids_that_were_sampled_and_ctrl_c_leaves_no_trace(policy):
    def interrupt(text):
        raise KeyboardInterrupt

    texts: list[str] = []
    asked, speaker = ("one", "two", "three"), chat.Speaker("model", policy, Config())
    with pytest.raises(KeyboardInterrupt):
        chat.answer(speaker, "one", PARAMS, interrupt)
    assert not speaker.agent.rollout.turns and not speaker.agent.chat
    found = [chat.answer(speaker, text, PARAMS, texts.append) for text in asked]
    turns, sampler = speaker.agent.rollout.turns, TorchSampler(speaker.policy)
    for turn, completion in zip(turns, found, strict=True):
        assert completion == sampler.sample([turn.prompt_ids], PARAMS)[0]
    for earlier, later in itertools.pairwise(turns):
        context = earlier.prompt_ids + earlier.completion_ids
        assert later.prompt_ids[: len(context)] == context
    assert found[-1].text.startswith(texts[-1].rstrip("\ufffd")) and texts[-1]


def test_in_a_terminal_a_full_context_is_one_line_and_reset_helps(talk, qwen3_folder, monkeypatch):
    typed = iter(["a " * 150, "b " * 150, "/reset", "one"])

    def type_line(prompt):
        if line := next(typed, ""):
            return line
        raise EOFError  # Ctrl-D

    monkeypatch.setattr("builtins.input", type_line)
    code, out, err = talk(qwen3_folder, "--max-tokens", 3, stdin=Terminal())
    assert code == 0 and err.count("does not fit") == 1
    assert [line[:7] for line in out.splitlines() if line] == ["model: "] * 3


def test_task_plays_the_held_out_tasks_and_shows_all_turns_and_rewards(runs, talk):
    code, out, _ = talk(runs["lora"], "--before", lines="/task\n/task\n")
    assert code == 0
    episodes = out.split("user: Task ")[1:]
    seeds = [re.match(r"\d+", text)[0] for text in episodes]
    assert seeds == [str(seed) for seed in EVAL_SEEDS[:2] for _ in range(2)]
    for episode, label in zip(episodes, ["before", "trained"] * 2, strict=True):
        pattern = rf"{label}: (.*)\nuser: More\.\n{label}: (.*)\n(reward .*)\n"
        first, second, rewards = re.search(pattern, episode, re.S).groups()
        lengths = [len(first), len(second)]
        assert rewards == f"reward {sum(lengths)} (+{lengths[0]} +{lengths[1]}) · correct True"
