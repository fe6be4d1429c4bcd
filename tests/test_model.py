"""core/model.py and core/tiny.py: loading, logits, adapters, export."""

import errno
import json
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import load_small, save_small
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from core.chat_template import prompt_ids
from core.checkpoint import export_model
from core.model import load_policy, pick_device
from core.optimizer import make_optimizer
from core.tiny import PRETRAINED, tiny_tokenizer, write_tiny
from core.types import UsageError

IDS = torch.tensor([[65, 66, 67, 68]])


def test_the_weights_of_tiny_random_depend_on_the_seed_only(tmp_path):
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny("tiny-random", tmp_path / name, seed)
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert not torch.equal(*(w["model.layers.0.mlp.up_proj.weight"] for w in weights[::2]))


def test_tiny_and_tiny_random_are_the_same_qwen3_with_other_weights(tmp_path):
    tiny, other = (
        load_policy(name, device="cpu", tiny_folder=tmp_path / name)
        for name in ("tiny", "tiny-random")
    )
    shapes = [{n: p.shape for n, p in policy.trainable().items()} for policy in (tiny, other)]
    assert tiny.model.config.model_type == "qwen3" and shapes[0] == shapes[1]
    assert 0.7e6 < sum(p.numel() for p in tiny.model.parameters()) < 1.3e6
    weights = [policy.model.model.norm.weight for policy in (tiny, other)]
    assert not torch.equal(*weights)
    files = sum(file.stat().st_size for file in PRETRAINED.iterdir())
    assert files < 8_000_000  # in the repository


@pytest.mark.parametrize("name", ["tiny", "tiny-random"])
def test_a_damaged_copy_of_tiny_is_made_again_with_one_line(tmp_path, capsys, name):
    load_policy(name, device="cpu", tiny_folder=tmp_path / "base", seed=3)
    made = {f.name: f.read_bytes() for f in (tmp_path / "base").iterdir()}
    for file in ("model.safetensors", "tokenizer.json", "state.json"):
        (tmp_path / "base" / file).write_bytes(made[file][:-20] + bytes(20))
        load_policy(name, device="cpu", tiny_folder=tmp_path / "base", seed=3)
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "making it again" in err
        assert {f.name: f.read_bytes() for f in (tmp_path / "base").iterdir()} == made


def test_a_run_copies_tiny_once_and_keeps_its_copy(tmp_path, monkeypatch):
    load_policy("tiny", device="cpu", tiny_folder=tmp_path / "base")
    copied = {f.name: f.read_bytes() for f in (tmp_path / "base").iterdir()}
    assert copied["model.safetensors"] == (PRETRAINED / "model.safetensors").read_bytes()
    monkeypatch.setattr("core.model.write_tiny", None)  # the copy counts, not the package's files
    load_policy("tiny", device="cpu", tiny_folder=tmp_path / "base")


def test_a_copy_of_tiny_that_a_killed_run_left_is_replaced(tmp_path):
    (tmp_path / ".part-base").mkdir()
    (tmp_path / ".part-base/model.safetensors").write_bytes(b"half")
    load_policy("tiny", device="cpu", tiny_folder=tmp_path / "base")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_full_disk_while_tiny_is_copied_has_its_error_number(tmp_path, monkeypatch):
    def copyfile(source, target, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(OSError, match="No space left") as error:
        load_policy("tiny", device="cpu", tiny_folder=tmp_path / "base")
    assert error.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_tiny_tokenizer_decodes_any_text_after_a_reload(qwen3_folder):
    tokenizer = AutoTokenizer.from_pretrained(qwen3_folder)
    text = 'How many r in "cherry"? <answer>3</answer>\n\t ünï ✓ 日本 then  out'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("<answer>") in ids


def test_logits_equal_those_of_the_model_in_every_family(small_folder):
    policy = load_small(small_folder)
    with torch.no_grad():
        ours = policy.to_logits(policy.hidden_states(IDS)[0])
        theirs = policy.model(IDS).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert policy.stop_ids == [policy.tokenizer.eos_token_id]


def test_right_padding_does_not_change_the_tokens_before_it(small_folder):
    policy = load_small(small_folder)
    padded = torch.cat([IDS, torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        alone, with_padding = policy.hidden_states(IDS), policy.hidden_states(padded)[:, :4]
    assert torch.allclose(alone, with_padding, atol=1e-5)


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("value_head", [False, True])
def test_the_optimizer_contains_every_trainable_parameter(qwen3_folder, lora_rank, value_head):
    policy = load_small(qwen3_folder, lora_rank=lora_rank, value_head=value_head)
    optimized = {id(p) for p in make_optimizer(policy, 1e-3).masters}
    expected = [p for p in policy.model.parameters() if p.requires_grad]
    expected += list(policy.value_head.parameters()) if value_head else []
    assert optimized == {id(p) for p in expected}


def test_lora_trains_float32_adapters_and_leaves_the_base_unchanged(qwen3_folder):
    policy = load_small(qwen3_folder, dtype="bfloat16", lora_rank=4)
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


def test_loading_a_model_with_lora_shows_no_warning_of_the_libraries(qwen3_folder):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        load_small(qwen3_folder, lora_rank=2)
    assert [str(w.message) for w in shown if w.category is FutureWarning] == []


def test_an_exported_model_loads_with_transformers(small_folder, tmp_path):
    policy = load_small(small_folder)
    with torch.no_grad():
        next(iter(policy.trainable().values())).mul_(1.1)
    model = AutoModelForCausalLM.from_pretrained(export_model(tmp_path, policy))
    assert torch.equal(model(IDS).logits, policy.model(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template


def test_an_exported_adapter_loads_with_peft(small_folder, tmp_path):
    from peft import PeftModel

    policy = load_small(small_folder, lora_rank=2)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_()
    base = AutoModelForCausalLM.from_pretrained(small_folder)
    model = PeftModel.from_pretrained(base, export_model(tmp_path, policy))
    assert torch.allclose(model(IDS).logits, policy.model(IDS).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_id": "no/such-folder/at-all"}, "can't be loaded"),
        ({"model_id": "./missing"}, "no model in this folder"),
        ({"device": "cuda"}, "no such device"),
        ({"device": "tpu9"}, "--device must be"),
        ({"device": "meta"}, "--device must be"),
    ],
)
def test_an_invalid_model_or_device_is_reported_in_one_line(qwen3_folder, changes, message):
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    options = {"model_id": str(qwen3_folder), "device": "cpu", **changes}
    with pytest.raises(UsageError, match=message) as error:
        load_policy(options.pop("model_id"), **options)
    assert "\n" not in str(error.value)


def test_a_folder_with_only_an_adapter_asks_for_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(UsageError, match="give its base model"):
        load_policy(str(tmp_path), device="cpu")


def test_device_auto_is_the_cpu_without_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"


def test_the_number_of_logits_in_a_chunk_does_not_grow_with_the_vocabulary(policy, monkeypatch):
    config = policy.causal_lm.config
    for vocabulary in (384, 32_000, 151_936):
        monkeypatch.setattr(config, "vocab_size", vocabulary)
        assert 2**24 < policy.logits_chunk * vocabulary <= 2**25


@pytest.mark.parametrize(
    ("gb", "chunk"), [(2, 220), (8, 220), (24, 3 * 2**25 // 151_936), (80, 1766), (141, 1766)]
)
def test_a_chunk_of_logits_takes_a_64th_of_a_gpu_and_at_most_1_gib(policy, monkeypatch, gb, chunk):
    gpu = SimpleNamespace(total_memory=gb * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(policy, "device", torch.device("cuda"))
    monkeypatch.setattr(policy.causal_lm.config, "vocab_size", 151_936)
    assert policy.logits_chunk == chunk


def test_only_special_tokens_that_the_template_does_not_write_may_be_beyond_the_embedding(tmp_path):
    tokenizer = tiny_tokenizer()
    folder = save_small("qwen3", tmp_path, vocab_size=len(tokenizer))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    tokenizer.save_pretrained(folder)
    policy = load_policy(str(folder), device="cpu")
    ids = prompt_ids(policy.tokenizer, [{"role": "user", "content": "<|image|>"}])
    assert max(ids) < len(tokenizer) - 1  # the message is read as characters
    tokenizer.add_tokens(["cherry"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UsageError, match=f"the token {len(tokenizer) - 1}, which is beyond"):
        load_policy(str(folder), device="cpu")


def test_completions_end_at_the_stop_tokens_of_both_configs(tmp_path):
    save_small("qwen3", tmp_path, eos_token_id=[1, 7, 9])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 8]}))
    policy = load_policy(str(tmp_path), device="cpu")
    assert policy.stop_ids == sorted({1, 7, 8, 9, policy.end_of_turn_id})


def test_a_model_without_a_context_length_is_refused_in_one_line(tmp_path):
    tokenizer = tiny_tokenizer()
    config = RecurrentGemmaConfig(
        vocab_size=704, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, lru_width=32, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"not supported: its config\.json has no max_position"):
        load_policy(str(tmp_path), device="cpu")


def test_a_config_of_another_architecture_is_refused(tmp_path):
    """Qwen3 as Llama: all that Llama has is there, but the norms of queries and keys would go."""
    folder = save_small("qwen3", tmp_path, attention_bias=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(UsageError, match=r"no use for 4 of them, such as .*k_norm"):
        load_policy(str(folder), device="cpu")


def test_a_model_whose_config_asks_for_attentions_can_be_exported(tmp_path):
    folder = save_small("qwen3", tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"output_attentions": True}))
    assert export_model(tmp_path, load_policy(str(folder), device="cpu")).is_dir()


def test_a_tokenizer_without_a_token_for_unknown_words_is_refused(tmp_path):
    folder = save_small("qwen3", tmp_path)
    file = folder / "tokenizer.json"
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model": words}))
    with pytest.raises(UsageError, match=r"can't be loaded: .*UNK"):
        load_policy(str(folder), device="cpu")
