"""What a training pass holds is counted, and layers are computed twice when it is too much."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import load_small, rollouts_of, save_small

import train
from core import batching, memory
from core.config import Config, resolve
from core.memory import bytes_per_token, checkpoint_layers, set_micro_batch_budget
from core.model import Policy, load_policy
from core.optimizer import make_optimizer
from core.prefix_sharing import pack_groups
from core.types import OutOfMemory


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(
    ("kept", "low", "high"), [("", 10_000, 30_000), ("keep_freed_memory()", 0, 2000)]
)
def test_freed_memory_is_used_again_without_asking_the_system(kept, low, high):
    """Page faults of 30 tensors of 3 MB, 22,000 pages, made for the third time."""
    script = f"""
import resource, torch
from core.memory import keep_freed_memory
{kept}
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(750_000) for _ in range(30)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    system = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=system, capture_output=True,
                          text=True, check=True, cwd=Path(train.__file__).parent)  # fmt: skip
    assert low <= int(done.stdout) <= high


def test_bytes_per_token_are_those_of_a_linear_map_and_its_activation(policy):
    """Of x [T, 32] -> silu(x W) [T, 32]: x and x W are kept, 256 bytes a token, W is not."""
    policy.model.weight = torch.nn.Parameter(torch.randn(32, 32))

    def one_layer(ids, packed):
        x = torch.randn(1, ids.shape[1], 32, requires_grad=True) * 1.0
        return torch.nn.functional.silu(x @ policy.model.weight)

    policy.hidden_states = one_layer
    assert bytes_per_token(policy) == 2 * 32 * 4


@pytest.mark.parametrize("size", [2, 16])
def test_bytes_per_token_cover_a_packed_pass_whose_prompt_is_long(policy, size):
    """A prompt of 400 tokens is kept once per suffix of 10, in the keys and values."""
    kept = {}
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    packed = pack_groups([[0] * 400], [(0, [0] * 10)] * size)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        _hidden = policy.hidden_states(packed.input_ids, packed)
    real = sum(storage.nbytes() for storage in kept.values()) / packed.input_ids.numel()
    assert 0.95 * real < bytes_per_token(policy, size) < 1.25 * real
    if size == 16:
        assert real > 1.3 * bytes_per_token(policy)  # of separate sequences


def test_bytes_per_token_grow_with_the_layers_and_not_with_the_vocabulary(policy, tmp_path):
    deep = save_small("qwen3", tmp_path / "deep", num_hidden_layers=4)
    wide = save_small("qwen3", tmp_path / "wide", vocab_size=4096)
    two, four, more_words = (
        bytes_per_token(p)
        for p in (policy, *(load_policy(str(f), device="cpu") for f in (deep, wide)))
    )
    assert 1.7 < four / two < 2.0  # beside the layers there are an embedding and a norm
    assert more_words == pytest.approx(two, rel=0.01)


def gradients_of(policy, batch):
    """(Log-probs [B, N], gradients of all weights) of the supervised loss."""
    logprobs = torch.zeros_like(batch.rewards)
    policy.model.zero_grad()
    for micro in batching.micro_batches(policy, batch):
        found, _, _ = train.forward(policy, micro, temperature=1.0)
        (-found[micro.completion_mask].sum() / batch.num_tokens).backward()
        micro.scatter(found.detach(), into=logprobs)
    return logprobs, [p.grad.clone() for p in policy.trainable().values()]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_layers_computed_again_keep_less_and_give_the_same_gradients(small_folder, lora_rank):
    policy = load_small(small_folder, lora_rank=lora_rank, seed=1)
    batch = batching.to_rollout_batch(rollouts_of(num_groups=3, size=4, prompt=30))
    plain, expected = gradients_of(policy, batch)
    before = bytes_per_token(policy)
    checkpoint_layers(policy)
    assert len(policy.checkpointed_layers) == 2
    assert bytes_per_token(policy) < 0.8 * before  # its inputs, and one of its two layers at a time
    again, found = gradients_of(policy, batch)
    assert torch.equal(again, plain)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-6


def test_sampling_is_not_computed_twice(policy):
    checkpoint_layers(policy)
    with torch.no_grad():
        policy.hidden_states(torch.zeros(1, 4, dtype=torch.int64))
    assert not any(layer.training for layer in policy.checkpointed_layers)


@pytest.mark.parametrize(
    ("free", "asked", "mode", "at_once", "again"),
    [
        (None, None, "auto", memory.CPU_BUDGET, False),  # nothing is known of the memory
        (None, 100, "auto", 100, False),
        (None, None, "on", memory.CPU_BUDGET, True),
        (10**12, None, "auto", memory.MAX_BUDGET, False),
        (10**12, 5000, "auto", 5000, False),
        (10**12, None, "on", memory.MAX_BUDGET, True),
        (1.1e9, None, "auto", "fits", False),
        (0.7e9, None, "auto", "fits", True),  # the longest episode wouldn't fit
        (0.7e9, None, "off", "fits", False),
        (0.7e9, 3000, "auto", 3000, True),
        (0, None, "auto", memory.MIN_BUDGET, True),
    ],
)
def test_micro_batches_fit_into_what_is_free(
    policy, monkeypatch, free, asked, mode, at_once, again
):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    cfg = resolve(
        Config(model_id="x", max_tokens_per_micro_batch=asked, gradient_checkpointing=mode)
    )
    assert cfg.max_model_len == 8 * 1024 + 4096
    policy.max_length = cfg.max_model_len
    said = set_micro_batch_budget(policy, cfg, future_bytes=0)
    assert bool(policy.checkpointed_layers) == again
    if at_once == "fits":
        room = free - 4 * memory.LOGIT_COPIES * 2**25
        assert memory.MIN_BUDGET < policy.micro_batch_tokens < memory.MAX_BUDGET
        per_token = bytes_per_token(policy, cfg.group_size)
        assert policy.micro_batch_tokens * per_token == pytest.approx(0.7 * room, rel=0.01)
    else:
        assert policy.micro_batch_tokens == at_once
    assert bool(said) == (free is not None)


def test_layers_are_kept_if_the_longest_episode_of_the_model_fits(policy, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0.7e9)
    assert policy.max_length == 512  # of 12288 that the settings allow
    set_micro_batch_budget(policy, resolve(Config(model_id="x")), future_bytes=0)
    assert not policy.checkpointed_layers


def test_what_is_still_to_come_is_left_free(policy, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 2 * 10**9)
    cfg = resolve(Config(model_id="x"))
    set_micro_batch_budget(policy, cfg, future_bytes=0)
    most = policy.micro_batch_tokens
    set_micro_batch_budget(policy, cfg, future_bytes=10**9)
    assert policy.micro_batch_tokens < most


def test_a_run_leaves_room_for_its_gradients_in_float32(command, monkeypatch):
    left_free = []

    def record(policy, cfg, future_bytes):
        left_free.append((future_bytes, sum(p.numel() for p in policy.model.parameters())))
        return []

    monkeypatch.setattr(memory, "set_micro_batch_budget", record)
    flags = "--model-id tiny-random --num-updates 0 --eval-num-tasks 0 --dtype bfloat16".split()
    assert command(*flags)[0] == 0
    [(future_bytes, num_weights)] = left_free
    assert future_bytes == 4 * num_weights > 10**6


@pytest.mark.slow
def test_a_run_with_gradient_checkpointing_is_the_same_run(command):
    small = """--sft-steps 4 --sft-batch-size 4 --num-updates 2 --num-prompts 2 --group-size 4
        --eval-num-tasks 2 --max-tokens 12 --device cpu""".split()
    losses = []
    for mode in ("off", "on"):
        assert command(*small, "--gradient-checkpointing", mode, "--run-name", mode)[0] == 0
        lines = Path(f"runs/{mode}/metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1] and losses[0][-1] is not None


RAN_OUT = {
    "the GPU": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "the host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"
    ),
    "Python": lambda: MemoryError(),
    "Apple's GPU": lambda: RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
}


def scarce(monkeypatch, most, error=RAN_OUT["the GPU"]):
    """Let passes of more than `most` tokens run out of memory, after a part of their work."""
    plain, sizes = Policy.hidden_states, []

    def hidden_states(self, input_ids, tree=None):
        hidden = plain(self, input_ids, tree)
        tokens = input_ids.numel() if tree is None else tree.input_ids.numel()
        if torch.is_grad_enabled():
            sizes.append(tokens)
            if tokens > most:
                raise error()
        return hidden

    monkeypatch.setattr(Policy, "hidden_states", hidden_states)
    return sizes


def probe(policy, longest, **options):
    """Runs the probe where memory counts as scarce; returns the optimizer and the lines it said."""
    cfg = resolve(Config(max_model_len=longest, max_tokens=longest - 1, **options))
    optimizer, said = make_optimizer(policy, 0.1), []
    memory.probe_peak_memory(cfg, policy, optimizer, train.forward, said.append)
    return optimizer, said


@pytest.fixture
def scarce_host(monkeypatch):
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 0)


def test_a_budget_beyond_the_hosts_memory_or_a_gradient_step_is_lowered_without_a_trial(
    policy, monkeypatch
):
    sizes = scarce(monkeypatch, 10**6)
    free = 4 * 100 * (memory.bytes_per_token(policy, 8) + 5 * 50)
    monkeypatch.setattr(memory, "host_free_bytes", lambda: free)
    policy.micro_batch_tokens = 10**6
    _, said = probe(policy, longest=50)
    assert policy.micro_batch_tokens == 100 and max(sizes) == memory.PROBE_TOKENS
    # 128 rollouts of 50 tokens
    assert said == ["micro-batches of 6400 tokens may not fit in memory: taking 100"]
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 3 * free)
    policy.micro_batch_tokens = 10**6
    _, said = probe(policy, longest=50, num_minibatches=43)  # of 2 or 3 rollouts
    assert policy.micro_batch_tokens == 150 and not said


@pytest.mark.parametrize("whose", RAN_OUT)
def test_the_probe_halves_the_budget_until_the_largest_micro_batch_fits(
    policy, monkeypatch, scarce_host, whose
):
    policy.micro_batch_tokens = 400
    sizes = scarce(monkeypatch, 120, RAN_OUT[whose])
    optimizer, said = probe(policy, longest=50)
    assert policy.micro_batch_tokens == 100  # two sequences of 50 that share their first token
    assert sizes[-3:] == [8 * 49 + 1, 4 * 49 + 1, 2 * 49 + 1]
    assert len(said) == 2 and all("out of memory" in line for line in said)
    assert all(p.grad is None for p in optimizer.masters)


def test_the_probe_turns_checkpointing_on_if_one_sequence_is_too_much_and_then_gives_up(
    policy, monkeypatch, scarce_host
):
    policy.micro_batch_tokens = 80  # more than PROBE_TOKENS
    scarce(monkeypatch, 79)
    with pytest.raises(OutOfMemory, match=r"one sequence of 80 tokens.*--max-tokens"):
        probe(policy, longest=80)
    assert policy.checkpointed_layers
    policy.checkpointed_layers = []
    with pytest.raises(OutOfMemory):
        probe(policy, longest=80, gradient_checkpointing="off")
    assert not policy.checkpointed_layers


def test_the_probe_is_never_larger_than_all_rollouts_of_an_update(policy, scarce_host):
    policy.micro_batch_tokens = 10**9
    probe(policy, longest=20)  # 16 prompts x 8 rollouts of 20 tokens
    assert policy.micro_batch_tokens == 128 * 20


def test_the_probe_raises_errors_that_are_not_about_memory(policy, monkeypatch, scarce_host):
    scarce(monkeypatch, 0, lambda: RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        probe(policy, longest=200)


def test_the_probe_leaves_the_loss_scale_of_float16_alone(policy, scarce_host):
    optimizer, _ = probe(policy, longest=50)
    assert (optimizer.loss_scale, optimizer.steps_at_scale) == (1.0, 0)


SMALL = """--run-name a --sft-steps 2 --sft-batch-size 4 --num-updates 2 --num-prompts 2
    --group-size 4 --eval-num-tasks 0 --max-tokens 12 --max-model-len 200 --device cpu
    --save-every 1""".split()


def losses_of(run):
    lines = Path("runs", run, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line).get("loss") for line in lines]


def test_a_run_that_runs_out_of_memory_names_the_command_that_resumes_it_exactly(
    command, monkeypatch
):
    assert command(*SMALL)[0] == 0
    expected = losses_of("a")
    with monkeypatch.context() as patch:
        scarce(patch, 90)
        code, _, err = command(*SMALL, "--run-name", "b")
    assert code == 1 and err.count("\n") == 1 and "out of memory" in err
    advised = err.split("python train.py ")[1].split()
    # half of the 8 rollouts of 200 tokens that an update can have at most
    assert advised == ["--resume", "runs/b", "--max-tokens-per-micro-batch", "800"]
    assert not list(Path("runs/b").rglob(".part*"))
    advised[-1] = "64"
    scarce(monkeypatch, 90)
    assert command(*advised)[0] == 0
    assert losses_of("b") == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("free", "probed"), [(10**12, False), (10**6, True), (None, False)])
def test_the_largest_micro_batch_is_probed_where_memory_is_scarce(
    command, monkeypatch, free, probed
):
    monkeypatch.setattr(memory, "host_free_bytes", lambda: free)
    sizes = scarce(monkeypatch, 10**9)
    args = ["--sft-steps", "0", "--max-tokens-per-micro-batch", "500", "--num-updates", "1"]
    assert command(*SMALL, *args)[0] == 0
    # one sequence of 200 tokens, as the budget of 500 is lowered where memory is scarce
    assert (sizes[0] == memory.PROBE_TOKENS) == (free is not None)
    assert (200 in sizes) == probed and max(sizes) <= 200


def test_a_run_whose_longest_sequence_does_not_fit_ends_before_the_first_update(
    command, monkeypatch, scarce_host, qwen3_folder
):
    scarce(monkeypatch, 150)
    code, _, err = command(*SMALL, "--model-id", qwen3_folder)
    assert code == 1 and err.startswith("train.py: one sequence of 200 tokens")
    assert "update" not in Path("runs/a/metrics.jsonl").read_text()


def test_free_memory_of_the_host_is_told_in_bytes():
    free = memory.host_free_bytes()
    assert free is None or 10**7 < free < 10**14
