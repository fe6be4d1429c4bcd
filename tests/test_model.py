"""core/policy.py, core/loading.py and core/tiny.py: loading, logits, adapters, export."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import load_small, save_small
from safetensors.torch import load_file, save_file
from small_models import train
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.chat_template import prompt_ids
from core.config import Config
from core.context import Renderer
from core.faults import UsageError
from core.files.checkpoint import export_model
from core.files.models import folder_of_model, load_exported
from core.loading import load_policy
from core.policy import max_logits
from core.tiny import PRETRAINED

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
IDS = torch.tensor([[65, 66, 67, 68]])


def load(folder, **options):
    return load_policy(Config(device="cpu", **options), str(folder))


def logits_of(policy):
    return policy.to_logits(policy.hidden_states(IDS)[0])


def test_random_weights_follow_the_seed_until_a_run_has_trained_from_them(tmp_path):
    """As with --resume RUN --seed 1."""
    copy = folder_of_model("tiny", tmp_path / "tiny")
    assert load(copy).size() == "0.88M weights, 0.88M trained, cpu"
    found = []
    for base, seed, has_trained in ("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("b", 1, 0):
        folder_of_model("tiny-random", tmp_path / base, seed, has_trained)
        found.append((tmp_path / base / "model.safetensors").read_bytes())
    assert found[0] != found[1] == found[2] == found[3]


def test_lora_trains_float32_adapters_and_leaves_the_base_unchanged(qwen3_folder):
    options = {"dtype": "bfloat16", "lora_rank": 4}
    policy, other = load_small(qwen3_folder, **options), load_small(qwen3_folder, seed=1, **options)
    pairs = zip(policy.trainable().values(), other.trainable().values(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)  # the seed draws them
    base = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    train(policy)
    assert all(torch.equal(p, base[n]) for n, p in policy.model.named_parameters() if n in base)
    assert all(p.abs().sum() > 0 for p in policy.trainable().values())


def test_tokens_that_were_added_without_embeddings(tmp_path):
    """A message has its characters, a demonstration is refused, and so is a template with one."""
    folder = save_small("Qwen3", tmp_path, vocab_size=704)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = [f"<extra_{i}>" for i in range(704 - len(tokenizer))] + ["<plan>"]
    tokenizer.add_tokens(names)  # the others have embeddings
    tokenizer.save_pretrained(folder)
    policy = load(folder)
    ids = prompt_ids(policy.tokenizer, [{"role": "user", "content": f"<plan>{names[-2]}"}])
    assert max(ids) == 703 and "<plan><extra_" in policy.tokenizer.decode(ids)
    with pytest.raises(UsageError, match="'<plan>', which has no embedding"):
        Renderer(policy).demonstration("<plan>")
    tokenizer.chat_template += "{% if add_generation_prompt %}<plan>{% endif %}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(UsageError, match="704 embeddings, and its tokenizer or chat template more"):
        load(folder)
    other = save_small("Qwen3", tmp_path / "b", vocab_size=600, pad_token_id=None, eos_token_id=1)
    with pytest.raises(UsageError, match="600 embeddings"):
        load(other)


def test_completions_end_at_the_stop_tokens_of_both_configs(tmp_path):
    save_small("Qwen3", tmp_path, eos_token_id=[1, 7, 9])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 8]}))
    policy = load(tmp_path)
    assert policy.stop_ids == sorted({1, 7, 8, 9, policy.end_of_turn_id})


def test_what_a_trainer_left_in_a_config_does_not_decide_how_we_compute(tmp_path):
    config = save_small("Qwen3", tmp_path) / "config.json"
    plain, saved = load(tmp_path), json.loads(config.read_text())
    outputs = {"output_attentions": True, "return_dict": False}
    for odd in ({"attn_implementation": "flash_attention_2"}, outputs):
        config.write_text(json.dumps(saved | odd))
        again = load(tmp_path)
        assert again.shares_prefixes and torch.equal(logits_of(again), logits_of(plain))


def test_half_of_a_download_is_refused(tmp_path):
    folder = save_small("Qwen3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    for damaged in (weights, weights | {"model.norm.weight": norm[:8].clone()}):
        save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError, match=r"1 of its weights .* model.norm.weight"):
            load(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3519576\n"
NO_MODELS = {  # what is given, its files, and what the message names
    "lfs": ({"config.json": "{}", "tokenizer.json": POINTER}, "tokenizer.json is a pointer"),
    "torch": ({"config.json": "{}", "pytorch_model.bin": ""}, "save_pretrained"),
    "gguf/model.gguf": ({}, "GGUF"),
    "models--me--small": ({"snapshots/abc/config.json": "{}"}, "take models--me--small/snapshots"),
    "empty": ({"NOTE.txt": ""}, "a run's is runs/NAME/model"),
    "https://example.com/me/small": ({}, "no model in this folder"),
    "words": ({"config.json": '{"model_type": "qwen3"}'}, "add tokenizer.json"),
    "images": ({"config.json": '{"model_type": "qwen2_vl"}'}, "qwen2_vl is not a language model"),
    "bytes": ({"config.json": '{"model_type": "qwen3", "quantization_config": {"quant_method": '
                              '"bitsandbytes", "load_in_8bit": true}}'}, "--lora-rank 16"),
}  # fmt: skip


@pytest.mark.parametrize("given", NO_MODELS)
def test_what_cannot_be_loaded_or_trained_is_named(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    files, named = NO_MODELS[given]
    if given == "bytes":
        shutil.copytree(PRETRAINED, given)
    for name, text in files.items():
        Path(given, name).parent.mkdir(parents=True, exist_ok=True)
        Path(given, name).write_text(text)
    with pytest.raises(UsageError, match=named) as caught:
        load(given)
    assert str(caught.value).startswith(f"--model-id {given}: ") and "\n" not in str(caught.value)


# --- adapters


def test_the_adapters_of_a_run_are_trained_on(tmp_path, monkeypatch):
    """As with --model-id runs/a/model --lora-rank 2; the folder of the run has moved since."""
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    policy = load(folder_of_model("tiny-random", Path("runs/a/base")), lora_rank=2)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_()
        expected = logits_of(policy)
    model = export_model(Path("runs/a"), policy).absolute()
    monkeypatch.chdir(tmp_path.parent)  # PEFT finds the base from any folder
    theirs = AutoPeftModelForCausalLM.from_pretrained(model)(IDS).logits[0]
    torch.testing.assert_close(theirs, expected)
    folder = model.parent.rename(tmp_path / "runs/moved") / "model"
    again = load(folder, lora_rank=2)
    assert torch.equal(logits_of(again), expected)
    assert again.lora_rank == 2 and again.trainable().keys() == policy.trainable().keys()
    for wrong in (4, 0):
        with pytest.raises(UsageError, match="--lora-rank 2"):
            load(folder, lora_rank=wrong)
    other = load_policy(Config(device="cpu"), str(folder), flag="opponent")
    assert other.lora_rank == 2  # it is not trained


def save_adapters(folder, base, **options):
    """Adapters as PEFT saves them."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 2, "target_modules": "all-linear"} | options
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


ADAPTERS = {  # what people train elsewhere: settings of PEFT's LoraConfig
    "saved_head": {"modules_to_save": ["lm_head"], "lora_dropout": 0.5},
    "ranks": {"rank_pattern": {"q_proj": 4}, "use_rslora": True, "lora_alpha": 3},
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_any_kind_of_lora_load_for_training_and_as_the_model_of_a_run(
    qwen3_folder, tmp_path, kind
):
    from peft import AutoPeftModelForCausalLM

    given = tmp_path / "given"
    save_adapters(given, qwen3_folder, **ADAPTERS[kind])
    shutil.copy(qwen3_folder / "config.json", given)  # as some trainers do
    policy = load(given, lora_rank=2)
    assert policy.lora_rank == (4 if kind == "ranks" else 2)
    logits_of(policy).logsumexp(-1).sum().backward()
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        plain, reference = load_small(qwen3_folder), replace(policy, disables_adapters=True)
        torch.testing.assert_close(logits_of(plain), logits_of(reference))  # the base's head, too
        export_model(tmp_path / "run", policy)
        (tmp_path / "run/config.yaml").write_text(f"model_id: {given}\nlora_rank: 2\n")
        exported = load_exported(Config(device="cpu", max_model_len=512), tmp_path / "run", "model")
        theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
        expected = logits_of(policy)
        assert torch.equal(logits_of(exported), expected)
        assert torch.allclose(theirs(IDS).logits[0], expected, atol=1e-5)


BASE = "base_model_name_or_path"


@pytest.mark.parametrize(("changes", "named"), [
    ({"peft_type": "IA3"}, "adapters of the kind IA3"), ({BASE: None}, "for the base model None"),
    ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter"),
    ({BASE: 3, "target_modules": ["q_proj"]}, "2 weights"),  # of so many layers
    ({BASE: 1}, "14 weights, such as .*layers.1"),
    ({BASE: "no/such/base"}, "its base no/such/base .adapter_config.json.: no model in this"),
])  # fmt: skip
def test_adapters_that_cannot_be_loaded_are_refused(qwen3_folder, tmp_path, changes, named):
    options = {k: v for k, v in changes.items() if k == "target_modules"}
    save_adapters(tmp_path, qwen3_folder, **options)
    saved = json.loads((tmp_path / "adapter_config.json").read_text()) | changes
    if isinstance(saved[BASE], int):
        saved[BASE] = str(save_small("Qwen3", tmp_path / "o", num_hidden_layers=saved[BASE]))
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    with pytest.raises(UsageError, match=named):
        load(tmp_path, lora_rank=2)


def test_a_chunk_of_logits_takes_a_64th_of_a_gpu_and_128_mib_to_1_gib(policy):
    vocabulary = policy.causal_lm.config.vocab_size
    assert policy.logits_chunk == 2**25 // vocabulary
    found = [max_logits(gb * 2**30) for gb in (2, 24, 141)]
    assert found == [2**25, 3 * 2**25, 2**28]
