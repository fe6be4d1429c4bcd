"""`python -m core.chat`: which weights answer, exact conversations, tasks, the command line."""

import io
import itertools
import re
import shutil
import signal
from types import SimpleNamespace
from unittest.mock import Mock

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
from environments.base import EVAL_SEEDS, Env, Step
from environments.plumbing import registry

QUESTION = 'How many r in "cherry"?'
SMALL = """--num-updates 1 --num-prompts 2 --group-size 4 --eval-num-tasks 0 --save-every 1
    --lr 0.05 --sft-lr 0.05 --sft-batch-size 2 --max-tokens 10 --env two_turns
    --device cpu""".split()
KINDS = {
    "full": "--model-id tiny-random --sft-steps 2",
    "lora": "--model-id QWEN3 --lora-rank 2 --algo ppo --lr 1",
}


class TwoTurns(Env):
    """The reward of each turn is the length of the response."""

    def reset(self, seed):
        self.turn = 0
        return [{"role": "user", "content": f"Task {seed}."}]

    def step(self, response):
        self.turn += 1
        more = None if self.turn == 2 else {"role": "user", "content": "More."}
        return Step(more, float(len(response)), self.turn == 2, {"correct": True})

    def demonstrate(self, hasty=False):
        return "a b c"


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
    """`python -m core.chat ARGS` with piped lines; returns (exit code, stdout, stderr)."""

    def talk(*args, lines=QUESTION, stdin=None):
        monkeypatch.setattr("sys.stdin", stdin or io.StringIO(lines))
        capsys.readouterr()
        return chat.execute([*map(str, args), "--device", "cpu"]), *capsys.readouterr()

    return talk


def greedy_answer(folder, adapters=None):
    """What the model in a folder answers to QUESTION, by Hugging Face's generate."""
    tokenizer, model = tiny_tokenizer(), AutoModelForCausalLM.from_pretrained(folder)
    if adapters:
        model = PeftModel.from_pretrained(model, adapters)
    ids = prompt_ids(tokenizer, [{"role": "user", "content": QUESTION}])
    drawn = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=10, do_sample=False,
                           eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    return printable(tokenizer.decode(drawn[0, len(ids) :], skip_special_tokens=True))


@pytest.mark.parametrize("kind", KINDS)
def test_which_weights_answer_and_the_folder_of_the_run_stays_as_it_is(
    kind, runs, talk, tmp_path, monkeypatch
):
    run = shutil.copytree(runs[kind], tmp_path / "runs" / kind)
    monkeypatch.chdir(tmp_path)

    def files():
        return {path: path.stat().st_mtime_ns for path in [run, *run.rglob("*")]}

    settings = yaml.safe_load((run / "config.yaml").read_text())
    base = run / "base" if kind == "full" else settings["model_id"]
    model = (run / "model",) if kind == "full" else (base, run / "model")
    first, trained, files_before = greedy_answer(base), greedy_answer(*model), files()
    assert first != trained
    code, out, err = talk(kind, "--before")  # by its name
    assert code == 0 and out == f"before: {first}\ntrained: {trained}\n"
    assert ("without the 2 warm-start steps" in err) == (kind == "full")
    assert files() == files_before
    shutil.rmtree(run / "model")  # without it the newest checkpoint answers
    if kind == "full":  # as if the model of before were older, in a run that goes on
        shutil.copytree(run / "base", run / "model")
        (run / "config.yaml").write_text(yaml.safe_dump(settings | {"num_updates": 9}))
    code, out, err = talk(run)
    assert (code, out) == (0, f"{trained}\n")
    assert re.search(f"{run}/checkpoint/00000[02]-000002 ", err)  # after update 1


def test_each_prompt_begins_with_the_ids_that_were_sampled_and_ctrl_c_leaves_no_trace(
    policy, capsys, monkeypatch
):
    params, speaker = SamplingParams(10, temperature=0.0), chat.Speaker("model", policy, Config())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TorchSampler, "step", lambda _: signal.raise_signal(signal.SIGINT))
        chat.answer(speaker, "one", params)
    assert not speaker.agent.rollout.turns and not speaker.agent.chat
    for text in ("one", "two", "three"):
        chat.answer(speaker, text, params)
    turns, sampler = speaker.agent.rollout.turns, TorchSampler(speaker.policy)
    completions = [sampler.sample([turn.prompt_ids], params)[0] for turn in turns]
    assert [c.token_ids for c in completions] == [turn.completion_ids for turn in turns]
    shown = "".join(f"{printable(c.text)}\n" for c in completions)
    assert capsys.readouterr().out == f"\n{shown}"
    for earlier, later in itertools.pairwise(turns):
        context = earlier.prompt_ids + earlier.completion_ids
        assert later.prompt_ids[: len(context)] == context


def test_in_a_terminal_a_full_context_is_one_line_and_reset_helps(talk, qwen3_folder, monkeypatch):
    typed = Mock(side_effect=["a " * 150, "b " * 150, "/reset", "one", EOFError])  # Ctrl-D
    monkeypatch.setattr("builtins.input", typed)
    terminal = SimpleNamespace(isatty=lambda: True)
    code, out, err = talk(qwen3_folder, "--max-tokens", 3, stdin=terminal)
    assert code == 0 and err.count("does not fit") == 1
    assert [line[:7] for line in out.splitlines() if line] == ["model: "] * 2


def test_task_plays_the_held_out_tasks_and_shows_all_turns_and_rewards(runs, talk):
    code, out, _ = talk(runs["lora"], "--before", lines="/task\n/task\n")
    assert code == 0
    pattern = r"user: Task (\d+)\.\n(\w+): (.*?)\nuser: More\.\n\2: (.*?)\n(reward [^\n]*)\n"
    episodes = re.findall(pattern, out, re.DOTALL)
    who = [(str(seed), label) for seed in EVAL_SEEDS[:2] for label in ("before", "trained")]
    assert [episode[:2] for episode in episodes] == who
    for *_, first, second, rewards in episodes:
        total = len(first) + len(second)
        assert rewards == f"reward {total} (+{len(first)} +{len(second)}) · correct True"
