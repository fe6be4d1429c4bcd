"""Low precision loses no update: float32 masters stand behind it; float16's losses are scaled."""

import math

import pytest
import torch
from conftest import save_small

from core import checkpoint, memory
from core.model import load_policy
from core.optimizer import LEAST_SCALE, PATIENCE, SCALE, MasterAdamW, make_optimizer

LR = 1e-6


def weights_and_gradients(dtype):
    """Weights of the size that language models have, and gradients of one sign each."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter((torch.randn(4096, generator=generator) * 0.02).to(dtype))
    return weight, torch.randn(4096, generator=generator).sign()


def steps(optimizer, weight, gradient, number):
    for _ in range(number):
        optimizer.backward((weight * gradient.to(weight.dtype)).sum().float())
        optimizer.clip_and_step(max_norm=0)


def test_bfloat16_weights_move_at_a_learning_rate_of_1e_6():
    """After 100 steps of Adam, each of about the learning rate, they are where float32 ones are, to
    the precision of bfloat16."""
    weight, gradient = weights_and_gradients(torch.bfloat16)
    start = weight.detach().float()
    steps(MasterAdamW([{"params": [weight], "lr": LR}], weight_decay=0.0), weight, gradient, 100)
    moved = weight.detach().float() - start
    expected = (start - 100 * LR * gradient).bfloat16().float() - start
    assert (moved != 0).float().mean() > 0.4
    assert (moved - expected).abs().max() <= (start.abs() / 128).max()
    assert (moved * -gradient).mean().item() == pytest.approx(100 * LR, rel=0.1)


def test_without_masters_hardly_any_of_them_would_move():
    """What the masters are for: torch's own AdamW on the same bfloat16 weights."""
    weight, gradient = weights_and_gradients(torch.bfloat16)
    start = weight.detach().clone()
    adamw = torch.optim.AdamW([weight], lr=LR, weight_decay=0.0)
    for _ in range(100):
        weight.grad = gradient.bfloat16()
        adamw.step()
    assert (weight.detach() != start).float().mean() < 0.1


def test_float16_learns_from_gradients_that_it_could_not_hold():
    """Gradients of 1e-8 are 0 in float16; times the scale they are not."""
    weight = torch.nn.Parameter(torch.full((8,), 0.5, dtype=torch.float16))
    optimizer = MasterAdamW([{"params": [weight], "lr": 1e-2}], weight_decay=0.0)
    assert (torch.full((8,), 1e-8).half() == 0).all()
    tiny = torch.full((8,), 1e-8)
    optimizer.backward((weight.float() * tiny).sum())
    assert optimizer.clip_and_step(max_norm=0)[0] == 0
    assert (weight == 0.5).all()
    optimizer.scale = SCALE
    optimizer.backward((weight.float() * tiny).sum())
    norm, stepped = optimizer.clip_and_step(max_norm=0)
    assert stepped and norm == pytest.approx(1e-8 * math.sqrt(8), rel=0.01)
    assert (weight < 0.5).all()


def test_an_overflow_halves_the_scale_and_drops_the_gradients():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = MasterAdamW([{"params": [weight], "lr": 0.1}], weight_decay=0.0)
    optimizer.scale = SCALE
    optimizer.backward((weight.float() * 100).sum())  # 100 * 65536 is beyond float16's 65504
    assert optimizer.overflowed() and optimizer.scale == SCALE / 2
    assert all(p.grad is None for p in optimizer.masters)
    optimizer.scale = LEAST_SCALE  # not an overflow of the scale's making
    optimizer.backward((weight.float() * torch.inf).sum())
    assert not optimizer.overflowed()
    assert optimizer.clip_and_step(0) == (torch.inf, False) and (weight == 1).all()


def test_the_scale_doubles_after_quiet_steps_and_comes_back_with_a_checkpoint(tmp_path):
    folder = save_small("qwen3", tmp_path / "model")
    policy = load_policy(str(folder), device="cpu", dtype="float16")
    optimizer = make_optimizer(policy, 1e-4)
    assert optimizer.scale == SCALE
    optimizer.steps_at_scale = PATIENCE - 2
    ids = torch.tensor([[65, 66, 67]])
    for expected in (SCALE, 2 * SCALE):
        loss = policy.to_logits(policy.hidden_states(ids)[0]).log_softmax(-1)[:, 5].mean() * 1e-3
        optimizer.backward(loss)
        assert not optimizer.overflowed() and optimizer.clip_and_step(1.0)[1]
        assert optimizer.scale == expected
    (tmp_path / "config.yaml").write_text("algo: grpo\n")
    saved = checkpoint.save_checkpoint(tmp_path, policy, optimizer, {"sft_step": 0, "update": 1})
    again = load_policy(str(folder), device="cpu", dtype="float16")
    other = make_optimizer(again, 1e-4)
    checkpoint.load_checkpoint(saved, again, other)
    assert (other.scale, other.steps_at_scale) == (2 * SCALE, 0)


def test_gradients_in_float16_are_those_of_float32_to_its_precision(tmp_path):
    folder = save_small("qwen3", tmp_path / "model")
    found = {}
    for dtype in ("float32", "float16"):
        policy = load_policy(str(folder), device="cpu", dtype=dtype)
        optimizer = make_optimizer(policy, 1e-4)

        class Here:
            display = None

        here = Here()
        here.policy, here.optimizer = policy, optimizer

        def one_pass(policy=policy, optimizer=optimizer):
            ids = torch.tensor([[65, 66, 67, 68]])
            logprobs = policy.to_logits(policy.hidden_states(ids)[0]).log_softmax(-1)
            optimizer.backward(-logprobs[:, 70].sum())

        memory.attempt(here, 4, one_pass)  # half the scale, until nothing overflows
        found[dtype] = torch.cat([p.grad.flatten() for p in optimizer.masters]) / optimizer.scale
    gap = (found["float16"] - found["float32"]).norm() / found["float32"].norm()
    assert gap < 0.02


def test_a_run_in_float16_learns_and_resumes_to_the_same(command):
    import json
    from pathlib import Path

    small = """--dtype float16 --sft-steps 6 --sft-batch-size 4 --num-updates 3 --num-prompts 2
        --group-size 4 --eval-num-tasks 0 --save-every 1 --max-tokens 16
        --device cpu --no-cache""".split()

    def metrics(run):
        records = map(json.loads, Path("runs", run, "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in r.items() if not k.startswith("time/")} for r in records]

    assert command("--run-name", "whole", *small)[0] == 0
    assert command("--run-name", "part", *small, "--num-updates", "1")[0] == 0
    assert command("--resume", "runs/part", "--num-updates", "3")[0] == 0
    whole = metrics("whole")
    assert whole == metrics("part")
    assert all(r["update/skipped"] == 0 and r["grad/norm"] >= 0 for r in whole[-3:])
    assert whole[0]["sft/loss"] > 0


def test_a_loss_that_is_not_finite_leaves_the_scale_and_takes_no_step():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = MasterAdamW([{"params": [weight], "lr": 0.1}], weight_decay=0.0)
    optimizer.scale = SCALE
    optimizer.backward((weight.float() * torch.nan).sum())
    assert not optimizer.overflowed() and optimizer.scale == SCALE
    assert not optimizer.clip_and_step(0)[1] and (weight == 1).all()
    optimizer.backward((weight.float() * 1e-3).sum())  # the next one is a new one
    assert not optimizer.overflowed() and optimizer.clip_and_step(0)[1] and (weight < 1).all()


def test_a_backward_that_breaks_off_leaves_no_gradient_behind():
    """Memory may run out in the very hook that takes the gradient over."""
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = MasterAdamW([{"params": weights, "lr": 0.1}], weight_decay=0.0)

    def full(p):
        raise torch.OutOfMemoryError("CUDA out of memory")

    hooks = [w.register_post_accumulate_grad_hook(full) for w in weights]
    weights[0].grad = torch.full((3,), 7.0, dtype=torch.bfloat16)  # taken over by no hook
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.backward(sum(w.float().sum() for w in weights))
    for hook in hooks:
        hook.remove()
    optimizer.zero_grad()
    optimizer.backward(sum(w.float().sum() for w in weights))
    assert [p.grad.tolist() for p in optimizer.masters] == [[1, 1, 1]] * 2
