"""What a training pass holds is counted, and layers are computed twice when it is too much."""

import pytest
import torch
from conftest import load_small, rollouts_of

from core import batching, memory
from core.config import Config, resolve
from core.faults import OutOfMemory, ran_out
from core.memory import bytes_per_token, checkpoint_layers, set_micro_batch_budget
from core.optimizer import make_optimizer
from core.policy import Policy
from core.scoring import predict


def test_bytes_per_token_are_those_of_a_linear_map_and_its_activation(policy):
    """Of x [T, 32] -> silu(x W) [T, 32]: x and x W are kept, 256 bytes a token, W is not."""
    policy.model.weight = torch.nn.Parameter(torch.randn(32, 32))

    def one_layer(ids, packed):
        x = torch.randn(1, ids.shape[1], 32, requires_grad=True) * 1.0
        return torch.nn.functional.silu(x @ policy.model.weight)

    policy.hidden_states = one_layer
    assert bytes_per_token(policy) == 2 * 32 * 4


def gradients_of(policy, batch):
    """(Log-probs [S], gradients of all weights) of the supervised loss."""
    logprobs = torch.zeros_like(batch.env_rewards)
    policy.model.zero_grad()
    for micro in batching.micro_batches(policy, batch):
        found = predict(policy, micro, temperature=1.0)["logprobs"]
        (-found.sum() / len(batch)).backward()
        logprobs[micro.numbers] = found.detach()
    return logprobs, [p.grad.clone() for p in policy.trainable().values()]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_layers_computed_again_keep_less_and_give_the_same_gradients(qwen3_folder, lora_rank):
    policy = load_small(qwen3_folder, lora_rank=lora_rank, seed=1)
    batch = batching.to_tokens(rollouts_of(num_groups=3, size=4, prompt=30))
    plain, expected = gradients_of(policy, batch)
    before = bytes_per_token(policy)
    checkpoint_layers(policy)
    assert len(policy.checkpointed_layers) == 2
    # its inputs, and one of its two layers at a time
    assert 0.4 * before < bytes_per_token(policy) < 0.8 * before
    again, found = gradients_of(policy, batch)
    assert torch.equal(again, plain)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("free", "asked", "mode", "at_once", "again"),
    [
        (None, None, "on", memory.CPU_BUDGET, True),  # nothing is known of the memory
        (None, 100, "auto", 100, False),
        (10**12, None, "auto", memory.MAX_BUDGET, False),
        (0.7e9, None, "auto", "fits", True),  # the longest episode wouldn't fit
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
    said = set_micro_batch_budget(policy, cfg, future_bytes=2**20)
    assert bool(policy.checkpointed_layers) == again
    if at_once == "fits":
        room = free - 2**20 - 4 * memory.LOGIT_COPIES * 2**25
        assert memory.MIN_BUDGET < policy.micro_batch_tokens < memory.MAX_BUDGET
        per_token = bytes_per_token(policy, cfg.group_size)
        assert policy.micro_batch_tokens * per_token == pytest.approx(0.7 * room, rel=0.01)
    else:
        assert policy.micro_batch_tokens == at_once
    assert bool(said) == (free is not None)


def on_gpu():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_the_errors_of_all_devices_are_told_from_others():
    on_cpu = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    assert all(map(ran_out, (on_gpu(), on_cpu, MemoryError())))
    assert not ran_out(RuntimeError("shapes differ"))


def scarce(monkeypatch, most):
    """Let passes of more than `most` tokens run out of memory, after a part of their work."""
    plain, sizes = Policy.hidden_states, []

    def hidden_states(self, input_ids, tree=None):
        hidden = plain(self, input_ids, tree)
        tokens = input_ids.numel() if tree is None else tree.input_ids.numel()
        if torch.is_grad_enabled():
            sizes.append(tokens)
            if tokens > most:
                raise on_gpu()
        return hidden

    monkeypatch.setattr(Policy, "hidden_states", hidden_states)
    return sizes


@pytest.fixture
def probe(policy, monkeypatch):
    """Runs the probe where memory counts as scarce; returns the optimizer and the lines it said."""
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 0)

    def run(longest, **options):
        cfg = resolve(Config(max_model_len=longest, max_tokens=longest - 1, **options))
        optimizer, said = make_optimizer(policy, 0.1), []
        memory.probe_peak_memory(cfg, policy, optimizer, said.append)
        return optimizer, said

    return run


def test_the_probe_halves_the_budget_until_the_largest_micro_batch_fits(policy, monkeypatch, probe):
    policy.micro_batch_tokens = 400
    sizes = scarce(monkeypatch, 120)
    optimizer, said = probe(longest=50)
    assert policy.micro_batch_tokens == 100  # two sequences of 50
    assert sizes[-3:] == [400, 200, 100]
    assert len(said) == 2 and all("out of memory" in line for line in said)
    assert all(p.grad is None for p in optimizer.masters)
    assert (optimizer.loss_scale, optimizer.steps_at_scale) == (1.0, 0)


def test_the_probe_turns_checkpointing_on_if_one_sequence_is_too_much_and_then_gives_up(
    policy, monkeypatch, probe
):
    policy.micro_batch_tokens = 80  # more than PROBE_TOKENS
    scarce(monkeypatch, 79)
    with pytest.raises(OutOfMemory, match=r"one sequence of 80 tokens.*--max-tokens"):
        probe(longest=80)
    assert policy.checkpointed_layers


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ({"num_prompts": 2, "group_size": 4}, 8),
        ({"num_prompts": 2, "group_size": 4, "num_minibatches": 3}, 3),
        ({"num_prompts": 2, "group_size": 4, "sft_steps": 1, "sft_batch_size": 9}, 9),
        ({"num_updates": 0, "sft_steps": 1, "sft_batch_size": 5}, 5),
    ],
)
def test_the_largest_micro_batch_has_the_rollouts_of_a_gradient_step(
    policy, probe, settings, largest
):
    policy.micro_batch_tokens = 10**6
    probe(longest=50, **settings)
    assert policy.micro_batch_tokens == largest * 50


SMALL = """--run-name a --sft-steps 2 --sft-batch-size 4 --num-updates 2 --num-prompts 2
    --group-size 4 --eval-num-tasks 0 --max-tokens 12 --max-model-len 200 --device cpu
    --save-every 1""".split()


def test_a_run_that_runs_out_of_memory_names_the_command_that_resumes_it(command, monkeypatch):
    with monkeypatch.context() as patch:
        scarce(patch, 90)
        code, _, err = command(*SMALL)
    assert code == 1 and err.count("\n") == 1 and "out of memory" in err
    advised = err.split("python train.py ")[1].split()
    # half of the 8 rollouts of 200 tokens that an update can have at most
    assert advised == ["--resume", "runs/a", "--max-tokens-per-micro-batch", "800"]
    scarce(monkeypatch, 90)
    assert command(*advised[:-1], "64")[0] == 0
