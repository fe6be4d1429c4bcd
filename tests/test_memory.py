"""What a training pass holds is counted, and layers are computed twice when it is too much."""

import pytest
import torch
from conftest import load_small, rollouts_of

from core import batching, memory
from core.config import Config, resolve
from core.faults import OutOfMemory
from core.memory import bytes_per_token, checkpoint_layers, set_micro_batch_budget
from core.optimizer import make_optimizer
from core.policy import Policy
from core.scoring import predict


def test_bytes_per_token_are_those_of_a_linear_map_and_its_activation(policy):
    """Of x [T, 32] -> silu(x W) [T, 32]: x and x W are kept, 256 bytes a token, W is not."""
    policy.model.weight = torch.nn.Parameter(torch.randn(32, 32))

    def one_layer(ids):
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
        logprobs[micro.indices] = found.detach()
    return logprobs, [p.grad.clone() for p in policy.trainable().values()]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_layers_computed_again_keep_less_and_give_the_same_gradients(qwen3_folder, lora_rank):
    policy = load_small(qwen3_folder, lora_rank=lora_rank, seed=1)
    batch = batching.to_tokens(rollouts_of(num_groups=3, size=4, prompt=30))
    plain, expected = gradients_of(policy, batch)
    before = bytes_per_token(policy)
    checkpoint_layers(policy)
    assert len(policy.checkpointed_layers) == 2
    assert bytes_per_token(policy) < 0.4 * before  # of each layer its input
    again, found = gradients_of(policy, batch)
    assert torch.equal(again, plain)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-6


SHORT = {"num_prompts": 2, "group_size": 4, "max_model_len": 50, "max_tokens": 49}
UNTRAINED = {"num_updates": 0, "sft_steps": 1, "sft_batch_size": 5}


@pytest.mark.parametrize(("free", "settings", "tokens"), [
    (None, {}, memory.CPU_BUDGET),  # nothing is known of the memory
    (None, {"max_tokens_per_micro_batch": 100}, 100),
    (10**12, {}, memory.CPU_BUDGET),
    (0.95e9, {}, 6946),  # 0.25 · (950,000,000 - 2^20 - 5 · 4 · 2^25) / 10,000
    (0, {}, memory.MIN_BUDGET),
    # no more than the rollouts of a gradient step, of 50 tokens each
    (None, SHORT, 8 * 50), (None, SHORT | {"num_minibatches": 3}, 3 * 50),
    (None, SHORT | {"sft_steps": 1, "sft_batch_size": 9}, 9 * 50), (None, SHORT | UNTRAINED, 250),
])  # fmt: skip
def test_micro_batches_fit_into_what_is_free(policy, monkeypatch, free, settings, tokens):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(memory, "bytes_per_token", lambda policy: 10_000)
    policy.max_length = settings.get("max_model_len", 4096)
    cfg = resolve(Config(model_id="x", **settings))
    set_micro_batch_budget(policy, cfg, future_bytes=2**20)
    assert policy.micro_batch_tokens == tokens


def scarce(monkeypatch, most):
    """Let passes of more than `most` tokens run out of memory, after a part of their work."""
    plain, sizes = Policy.hidden_states, []

    def hidden_states(self, input_ids, tree=None):
        hidden = plain(self, input_ids, tree)
        tokens = input_ids.numel() if tree is None else tree.input_ids.numel()
        if torch.is_grad_enabled():
            sizes.append(tokens)
            if tokens > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return hidden

    monkeypatch.setattr(Policy, "hidden_states", hidden_states)
    return sizes


def test_the_probe_halves_the_budget_then_recomputes_layers_and_gives_up(policy, monkeypatch):
    monkeypatch.setattr(memory, "RAISES", {"cpu"})
    sizes, said = scarce(monkeypatch, 120), []
    optimizer, cfg = make_optimizer(policy, 0.1), resolve(Config())
    policy.micro_batch_tokens, policy.max_length = 400, 50
    memory.probe_peak_memory(cfg, policy, optimizer, said.append)
    assert policy.micro_batch_tokens == 100  # two sequences of 50
    assert sizes == [400, 200, 100] and not policy.checkpointed_layers
    assert len(said) == 2 and all("out of memory" in line for line in said)
    assert all(p.grad is None for p in optimizer.masters)
    assert (optimizer.loss_scale, optimizer.steps_at_scale) == (1.0, 0)
    policy.max_length = 200
    with pytest.raises(OutOfMemory, match=r"one sequence of 200 tokens.*--max-tokens"):
        memory.probe_peak_memory(cfg, policy, optimizer, said.append)
    assert policy.checkpointed_layers and sizes[3:] == [200, 200]


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
