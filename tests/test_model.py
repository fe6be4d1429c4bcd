"""core/policy.py, core/loading.py and core/tiny.py: loading, logits, adapters, export."""

import json
import shutil
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import torch
from conftest import load_small, loopback, save_small
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import loading
from core.chat_template import prompt_ids
from core.config import Config
from core.context import Renderer
from core.faults import UsageError
from core.files.checkpoint import export_model
from core.files.models import folder_of_model, load_exported
from core.loading import load_policy
from core.optimizer import make_optimizer
from core.policy import max_logits
from core.tiny import PRETRAINED, write_tiny

IDS = torch.tensor([[65, 66, 67, 68]])


def test_the_weights_of_tiny_random_depend_on_the_seed_only(tmp_path):
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny("tiny-random", tmp_path / name, seed)
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert not torch.equal(*(w["model.layers.0.mlp.up_proj.weight"] for w in weights[::2]))


def test_a_run_keeps_its_copy_of_tiny(tmp_path):
    policy = load_policy(Config(device="cpu"), folder_of_model("tiny", tmp_path / "base"))
    assert policy.model.config.model_type == "qwen3"
    assert 0.7e6 < sum(p.numel() for p in policy.model.parameters()) < 1.3e6
    copied = (tmp_path / "base/model.safetensors").read_bytes()
    assert copied == (PRETRAINED / "model.safetensors").read_bytes()
    (tmp_path / "base/NOTE.txt").touch()
    folder_of_model("tiny", tmp_path / "base")
    assert (tmp_path / "base/NOTE.txt").exists()  # it is not made again


def test_random_weights_follow_the_seed_until_a_run_has_trained_from_them(tmp_path):
    """As with --resume RUN --seed 1."""
    base, found = tmp_path / "base", []
    for seed, has_trained in ((0, False), (1, False), (0, True)):
        folder_of_model("tiny-random", base, seed, has_trained)
        found.append(load_file(base / "model.safetensors")["model.embed_tokens.weight"])
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_optimizer_contains_every_trainable_parameter(qwen3_folder, lora_rank):
    policy = load_small(qwen3_folder, lora_rank=lora_rank, value_head=True)
    optimized = {id(p) for p in make_optimizer(policy, 1e-3).masters}
    expected = [p for p in policy.model.parameters() if p.requires_grad]
    assert optimized == {id(p) for p in [*expected, *policy.value_head.parameters()]}


def test_lora_trains_float32_adapters_and_leaves_the_base_unchanged(qwen3_folder):
    policy = load_small(qwen3_folder, dtype="bfloat16", lora_rank=4)
    other = load_small(qwen3_folder, dtype="bfloat16", lora_rank=4, seed=1)
    pairs = zip(policy.trainable().values(), other.trainable().values(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)  # the seed draws them
    base = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    optimizer = make_optimizer(policy, 0.1)
    for _ in range(2):
        policy.to_logits(policy.hidden_states(IDS)[0]).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(p, base[n]) for n, p in policy.model.named_parameters() if n in base)
    assert all(p.abs().sum() > 0 for p in policy.trainable().values())


def test_tokens_that_were_added_without_embeddings(tmp_path):
    """The template may not write one, a message has its characters, a demonstration is refused."""
    folder = save_small("Qwen3", tmp_path, vocab_size=704)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = [f"<extra_{i}>" for i in range(704 - len(tokenizer))] + ["<plan>"]
    tokenizer.add_tokens(names)  # the others have embeddings
    tokenizer.save_pretrained(folder)
    policy = load_policy(Config(device="cpu"), str(folder))
    assert "no embedding of 1 tokens" in policy.remarks[0] and "'<plan>'" in policy.remarks[0]
    ids = prompt_ids(policy.tokenizer, [{"role": "user", "content": f"<plan>{names[-2]}"}])
    assert max(ids) == 703 and "<plan><extra_" in policy.tokenizer.decode(ids)
    with pytest.raises(UsageError, match="demonstration has '<plan>', which has no embedding"):
        Renderer(policy).demonstration("<plan>")
    tokenizer.chat_template += "{% if add_generation_prompt %}<plan>{% endif %}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(UsageError, match="writes '<plan>', a token that was added and has no emb"):
        load_policy(Config(device="cpu"), str(folder))
    resized = AutoModelForCausalLM.from_pretrained(folder)
    resized.resize_token_embeddings(len(tokenizer))
    resized.save_pretrained(folder)
    assert load_policy(Config(device="cpu"), str(folder)).remarks == []
    other = save_small("Qwen3", tmp_path / "b", vocab_size=600, pad_token_id=None, eos_token_id=1)
    with pytest.raises(UsageError, match=r"has \d+ tokens and the model 600 embeddings"):
        load_policy(Config(device="cpu"), str(other))


def test_completions_end_at_the_stop_tokens_of_both_configs(tmp_path):
    save_small("Qwen3", tmp_path, eos_token_id=[1, 7, 9])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 8]}))
    policy = load_policy(Config(device="cpu"), str(tmp_path))
    assert policy.stop_ids == sorted({1, 7, 8, 9, policy.end_of_turn_id})


def test_half_of_a_download_is_refused(tmp_path):
    folder = save_small("Qwen3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    for damaged in (weights, weights | {"model.norm.weight": norm[:8].clone()}):
        save_file(damaged, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError, match=r"1 of its weights .* model.norm.weight"):
            load_policy(Config(device="cpu"), str(folder))
    save_file(weights | {"model.norm.weight": norm}, folder / "model.safetensors")
    load_policy(Config(device="cpu"), str(folder))


def test_the_adapters_of_a_run_are_trained_on(tmp_path):
    """As with --model-id runs/a/model --lora-rank 2; the folder of the run has moved since."""
    first = tmp_path / "runs/first"
    options = {"device": "cpu", "lora_rank": 2}
    policy = load_policy(Config(**options), folder_of_model("tiny-random", first / "base"))
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_()
    export_model(first, policy)
    folder = str(first.rename(tmp_path / "runs/moved") / "model")
    again = load_policy(Config(**options), folder)
    assert again.trainable().keys() == policy.trainable().keys()
    logits = [p.to_logits(p.hidden_states(IDS)[0]) for p in (policy, again)]
    assert torch.equal(*logits) and again.lora_rank == 2
    for wrong in (4, 0):
        with pytest.raises(UsageError, match="--lora-rank 2"):
            load_policy(Config(device="cpu", lora_rank=wrong), folder)
    assert load_policy(Config(device="cpu"), folder, flag="opponent").lora_rank == 2  # not trained


ADAPTERS = {  # what people train elsewhere: settings of PEFT's LoraConfig
    "dropout": {"lora_dropout": 0.5},
    "saved_head": {"modules_to_save": ["lm_head"]},
    "ranks": {"rank_pattern": {"q_proj": 4}, "use_rslora": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_any_kind_of_lora_load_for_training_and_as_the_model_of_a_run(
    qwen3_folder, tmp_path, kind
):
    from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model

    own = {"task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3, "target_modules": "all-linear"}
    base = AutoModelForCausalLM.from_pretrained(qwen3_folder)
    get_peft_model(base, LoraConfig(**own | ADAPTERS[kind])).save_pretrained(tmp_path / "given")
    given = str(tmp_path / "given")
    policy = load_policy(Config(device="cpu", lora_rank=2), given)
    assert policy.lora_rank == (4 if kind == "ranks" else 2)
    policy.to_logits(policy.hidden_states(IDS)[0]).logsumexp(-1).sum().backward()
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        plain, reference = load_small(qwen3_folder), replace(policy, disables_adapters=True)
        logits = [p.to_logits(p.hidden_states(IDS)[0]) for p in (plain, reference)]
    torch.testing.assert_close(*logits)  # its head, too, is that of the base
    export_model(tmp_path / "run", policy)
    (tmp_path / "run/config.yaml").write_text(f"model_id: {given}\nlora_rank: 2\n")
    exported = load_exported(Config(device="cpu", max_model_len=512), tmp_path / "run", "model")
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
    with torch.no_grad():
        expected = policy.to_logits(policy.hidden_states(IDS)[0])
        found = [exported.to_logits(exported.hidden_states(IDS)[0]), theirs(IDS).logits[0]]
    assert torch.equal(found[0], expected) and torch.allclose(found[1], expected, atol=1e-5)


@pytest.fixture(scope="module")
def adapters(qwen3_folder, tmp_path_factory):
    """A folder of adapters, as PEFT saves them, that change the base model's logits."""
    from peft import LoraConfig, get_peft_model

    base, folder = (
        load_policy(Config(device="cpu"), str(qwen3_folder)).model,
        tmp_path_factory.mktemp("a"),
    )
    own = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules="all-linear")
    model = get_peft_model(base, own)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_() if "lora_B" in name else None
        expected = model(IDS).logits[0]
    model.save_pretrained(folder)
    return folder, expected


LYING_THERE = {  # beside adapter_config.json: files of the adapters, of a whole model; the outcome
    "only adapters": (["adapter_model.safetensors"], [], "adapted"),
    "the base's config": (["adapter_model.safetensors"], ["config.json"], "adapted"),
    "of torch": (["adapter_model.bin"], ["config.json"], "adapted"),
    "both": (["adapter_model.safetensors"], ["config.json", "model.safetensors"], "both"),
    "sharded": (["adapter_model.safetensors"], ["config.json", "model-*", "*.index.json"], "both"),
    "both, one in torch's": ([], ["config.json", "pytorch_model.bin"], "both"),
    "no adapters": ([], ["config.json", "model.safetensors"], "both"),
    "neither": ([], ["config.json"], "no adapter_model.safetensors"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("kind", LYING_THERE)
def test_what_lies_in_a_folder_decides_whether_it_is_a_model(
    adapters, qwen3_folder, tmp_path, kind
):
    theirs, whole, outcome = LYING_THERE[kind]
    shutil.copytree(qwen3_folder, tmp_path / "whole", dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(qwen3_folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    torch.save(model.state_dict(), tmp_path / "whole/pytorch_model.bin")
    weights = load_file(adapters[0] / "adapter_model.safetensors")
    torch.save(weights, tmp_path / "adapter_model.bin")
    (tmp_path / "given").mkdir()
    for name in ("adapter_config.json", "token*", "chat*", *theirs, *whole):
        for folder in (adapters[0], tmp_path, tmp_path / "whole", tmp_path / "sharded"):
            for file in folder.glob(name):
                shutil.copy(file, tmp_path / "given")
    given = str(tmp_path / "given")
    if outcome == "adapted":
        policy = load_policy(Config(device="cpu", lora_rank=2), given)
        found = policy.to_logits(policy.hidden_states(IDS)[0])
        torch.testing.assert_close(found, adapters[1], atol=1e-4, rtol=0)
        return
    match = "a whole model and LoRA adapters: move" if outcome == "both" else outcome
    for rank in (0, 2) if outcome == "both" else (2,):
        with pytest.raises(UsageError, match=match):
            load_policy(Config(device="cpu", lora_rank=rank), given)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(("changes", "words"), [
    ({"peft_type": "IA3"}, "adapters of the kind IA3"),
    ({"base_model_name_or_path": None}, "for the base model None"),
    ({"base_model_name_or_path": "more layers", "target_modules": ["q_proj"]},
     "of another model than .*: 2 weights, such as .*layers.2.*q_proj"),
    ({"base_model_name_or_path": "fewer layers"}, "14 weights, such as .*layers.1"),
])  # fmt: skip
def test_adapters_that_are_no_lora_or_of_another_base_are_refused(
    qwen3_folder, tmp_path, changes, words
):
    from peft import LoraConfig, get_peft_model

    modules = changes.get("target_modules", "all-linear")
    own = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=modules)
    base = AutoModelForCausalLM.from_pretrained(qwen3_folder)
    get_peft_model(base, own).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    if str(changes.get("base_model_name_or_path")).endswith("layers"):
        count = 3 if "more" in changes["base_model_name_or_path"] else 1
        other = save_small("Qwen3", tmp_path / "other", num_hidden_layers=count)
        saved["base_model_name_or_path"] = str(other)
    else:
        saved |= changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    with pytest.raises(UsageError, match=words):
        load_policy(Config(device="cpu", lora_rank=2), str(tmp_path))


def test_adapters_of_the_hub_are_not_taken_for_their_base(
    adapters, qwen3_folder, tmp_path, monkeypatch
):
    cached = tmp_path / "models--me--adapters"
    shutil.copytree(qwen3_folder, cached / "snapshots/abc", ignore=lambda *_: ["model.safetensors"])
    shutil.copytree(adapters[0], cached / "snapshots/abc", dirs_exist_ok=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "reads_cache", lambda *_: True)
    with pytest.raises(UsageError, match="it is LoRA adapters: download them to a folder"):
        load_policy(Config(device="cpu", lora_rank=2), "me/adapters")


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_peft_opens_the_adapters_of_a_run_from_any_folder(tmp_path, monkeypatch):
    from peft import AutoPeftModelForCausalLM

    monkeypatch.chdir(tmp_path)
    policy = load_policy(
        Config(device="cpu", lora_rank=2), folder_of_model("tiny-random", Path("run/base"))
    )
    model = export_model(Path("run"), policy).absolute()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with torch.no_grad():
        theirs = AutoPeftModelForCausalLM.from_pretrained(model)(IDS).logits[0]
        torch.testing.assert_close(theirs, policy.to_logits(policy.hidden_states(IDS)[0]))


def test_a_chunk_of_logits_takes_a_64th_of_a_gpu_and_128_mib_to_1_gib(policy):
    vocabulary = policy.causal_lm.config.vocab_size
    assert policy.logits_chunk == 2**25 // vocabulary
    found = [max_logits(gb * 2**30) for gb in (2, 24, 141)]
    assert found == [2**25, 3 * 2**25, 2**28]


def test_a_hub_that_does_not_answer_is_asked_once_and_then_the_cache(
    tmp_path, qwen3_folder, monkeypatch
):
    asked = []

    class Silent(BaseHTTPRequestHandler):
        def handle(self):
            asked.append(self.rfile.readline())

    cached = tmp_path / "models--me--small"
    shutil.copytree(qwen3_folder, cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with loopback(Silent) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        load_policy(Config(device="cpu"), "me/small")
        refused = f"--model-id me/other: .*{server.url} cannot be reached .*tiny or smollm2"
        with pytest.raises(UsageError, match=refused):
            load_policy(Config(device="cpu"), "me/other")
    asked = [line for line in asked if b" /api/" not in line]  # of huggingface_hub about itself
    assert asked == [b"HEAD / HTTP/1.1\r\n"] * 2
