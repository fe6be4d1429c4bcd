"""Low-precision weights lose no update: float32 masters, and loss scaling for float16."""

import io
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import needs
from torch import nn

from core.config import Config
from core.faults import UsageError
from core.optimizer import (
    FIRST_SCALE,
    GROWTH_INTERVAL,
    MIN_SCALE,
    MasterAdamW,
    adamw_8bit,
    fused_adamw,
    optimizer_for,
)

needs_bitsandbytes = needs("quantize", "bitsandbytes")
KINDS = [fused_adamw, pytest.param(adamw_8bit, marks=needs_bitsandbytes)]


def optimizer_of(*weights, lr=0.1, **options):
    return MasterAdamW([{"params": [*weights], "lr": lr}], **options)


def test_bfloat16_weights_move_at_a_learning_rate_of_1e_6():
    """100 steps of Adam, each about as large as the learning rate, reach the float32 result."""
    generator = torch.Generator().manual_seed(0)  # weights as small as those of language models
    weight = nn.Parameter((torch.randn(4096, generator=generator) * 0.02).bfloat16())
    gradient, start = torch.randn(4096, generator=generator).sign(), weight.detach().float()
    optimizer = optimizer_of(weight, lr=1e-6)
    for _ in range(100):
        optimizer.backward((weight * gradient.bfloat16()).sum().float())
        optimizer.clip_and_step(max_norm=0)
    moved = weight.detach().float() - start
    expected = (start - 100e-6 * gradient).bfloat16().float() - start
    assert (moved != 0).float().mean() > 0.4
    assert (moved - expected).abs().max() <= (start.abs() / 128).max()
    assert (moved * -gradient).mean().item() == pytest.approx(100e-6, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_right_after_a_sampler_has_laid_out_a_weight_in_another_order(kind):
    start, gradient = torch.arange(6.0).view(2, 3), torch.tensor([[1.0, -2, 0.1], [3, 5, -0.5]])
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    usual = nn.Parameter(torch.ones(1))  # in the usual order, beside the other
    optimizer = optimizer_of(ours, usual, make_adamw=kind)
    adamw = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0)
    place = torch.zeros(3, 2).t()
    ours.data = place.copy_(start)
    for number in range(3):
        optimizer.backward((ours * gradient * (number + ours.detach())).sum())
        (theirs * gradient * (number + theirs.detach())).sum().backward()
        optimizer.clip_and_step(max_norm=0)
        adamw.step()
        adamw.zero_grad()
    torch.testing.assert_close(ours, theirs)
    assert ours.data_ptr() == place.data_ptr()


def test_bfloat16_gradients_of_micro_batches_add_up_in_float32():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = optimizer_of(weight)
    for scale in [1.0] + [2.0**-9] * 8:  # in bfloat16, 1 + 2**-9 rounds to 1
        (weight * scale).sum().backward()
    assert optimizer.masters[0].grad.item() == 1 + 8 * 2.0**-9
    assert weight.grad is None


def float16_step(weight, optimizer, gradient):
    optimizer.backward((weight.float() * gradient).sum())
    return optimizer.clip_and_step(max_norm=0)


def float16_weight():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    return weight, optimizer_of(weight, loss_scale=FIRST_SCALE)


def test_float16_losses_are_scaled_and_an_overflow_skips_the_step_and_halves_the_scale():
    weight, optimizer = float16_weight()
    norm, stepped = float16_step(weight, optimizer, 100)  # 100 · 65536 exceeds float16's 65504
    assert not stepped and not math.isfinite(norm) and (weight == 1).all()
    assert optimizer.loss_scale == FIRST_SCALE / 2
    assert all(p.grad is None for p in optimizer.masters)
    while not stepped:  # until the scaled gradient fits
        norm, stepped = float16_step(weight, optimizer, 100)
    assert norm == pytest.approx(100 * math.sqrt(2)) and (weight < 1).all()
    assert optimizer.loss_scale == 2.0**9  # the largest power of two below 65504 / 100
    optimizer.loss_scale = MIN_SCALE
    assert not float16_step(weight, optimizer, torch.inf)[1]
    assert optimizer.loss_scale == MIN_SCALE


def test_the_scale_doubles_after_many_steps_and_is_a_part_of_the_state():
    weight, optimizer = float16_weight()
    optimizer.steps_at_scale = GROWTH_INTERVAL - 2
    for expected in (FIRST_SCALE, 2 * FIRST_SCALE, 2 * FIRST_SCALE):
        norm, stepped = float16_step(weight, optimizer, 1e-8)  # rounds to 0 without the scale
        assert stepped and norm == pytest.approx(1e-8 * math.sqrt(2), rel=0.01)
        assert optimizer.loss_scale == expected
    other = float16_weight()[1]
    other.load_state_dict(optimizer.state_dict())
    other.clip_and_step(1.0, finite_loss=False)  # which no scale has caused
    assert (other.loss_scale, other.steps_at_scale) == (2 * FIRST_SCALE, 1)


def test_a_loss_that_no_output_changes_needs_no_backward_pass():
    weight = nn.Parameter(torch.ones(2))
    optimizer, output = optimizer_of(weight), weight * 2
    optimizer.backward((output * 0).sum(), [output, None])
    assert weight.grad is None
    optimizer.backward((output * 3).sum(), [output, None])
    assert (weight.grad.tolist(), output.grad.tolist()) == ([6, 6], [3, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_optimizer_continues_exactly(kind, dtype):
    """The learning rate is that of the settings."""

    def steps(optimizer, numbers):
        for number in numbers:
            [master] = optimizer.masters
            generator = torch.Generator().manual_seed(number)
            master.grad = torch.randn(master.shape, generator=generator)
            optimizer.set_lr(1e-3 if number < 3 else 2e-3)
            optimizer.step()

    start = torch.randn((32, 256), generator=torch.Generator().manual_seed(9)) * 0.02
    whole, part = (nn.Parameter(start.to(dtype, copy=True)) for _ in range(2))
    steps(optimizer_of(whole, make_adamw=kind), range(6))
    first, file = optimizer_of(part, make_adamw=kind), io.BytesIO()
    steps(first, range(3))
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = nn.Parameter(part.detach().clone())
    second = optimizer_of(resumed, lr=2e-3, make_adamw=kind)
    second.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    assert second.adamw.param_groups[0]["lr"] == 2e-3
    steps(second, range(3, 6))
    assert torch.equal(whole, resumed) and not torch.equal(whole, part)


@needs_bitsandbytes
def test_a_moment_of_8_bits_takes_a_byte_and_a_64th_from_the_start():
    weight = nn.Parameter(torch.ones(256, 256))
    [moments] = adamw_8bit([{"params": [weight], "lr": 1e-6}]).state.values()
    each = [moments[name] for name in ("state1", "absmax1", "state2", "absmax2")]
    assert sum(x.nbytes for x in each) == 2 * (1 + 4 / 256) * 256 * 256


def test_a_device_without_an_8_bit_step_is_refused():
    policy = SimpleNamespace(device=torch.device("mps"), dtype=torch.float32)
    with pytest.raises(UsageError, match="no 8-bit step for MPS; add --device cpu"):
        optimizer_for(Config(optimizer="adamw8bit"), policy)
