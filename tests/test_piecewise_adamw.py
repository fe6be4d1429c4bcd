"""AdamW with 8-bit moments, and with stochastic rounding, against torch's AdamW in float32."""

import io
from types import SimpleNamespace

import pytest
import torch

from core.config import Config
from core.extras import piecewise_adamw
from core.faults import UsageError
from core.loop.open import optimizer_for
from core.optimizer import MasterAdamW

pytest.importorskip("bitsandbytes", reason="needs picorl[quantize]")
KINDS = ("adamw8bit", "adamw_bf16_sr")
KINDS_WITH_MASTERS = ("adamw", "adamw8bit")
LR = 1e-3


def weight_of(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype))


def optimizer_of(kind, weight, lr=LR, **options):
    if kind != "adamw":
        options |= piecewise_adamw.optimizer_options(kind, options.pop("seed", 0))
    return MasterAdamW([{"params": [weight], "lr": lr}], weight_decay=0.0, **options)


def step(optimizer, gradient):
    for p in optimizer.masters:
        p.grad = gradient.to(p.dtype).view_as(p).clone()
    optimizer.step()


def gradients(shape, number, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(number)]


def moments(optimizer):
    return optimizer.adamw.state[optimizer.masters[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_small_tensors_in_float32_have_the_steps_of_torchs_adamw(kind):
    ours, theirs = weight_of(1000), weight_of(1000)
    optimizer = optimizer_of(kind, ours)
    adamw = torch.optim.AdamW([theirs], lr=LR, weight_decay=0.0)
    for gradient in gradients(1000, 5):
        step(optimizer, gradient)
        theirs.grad = gradient
        adamw.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * LR)


def test_the_pieces_of_a_tensor_give_the_step_of_the_whole(monkeypatch):
    results = []
    for piece in (2**22, 4096):  # the last of three pieces has 256 weights
        monkeypatch.setattr(piecewise_adamw, "PIECE", piece)
        weight = weight_of(2 * 4096 + 256)
        optimizer = optimizer_of("adamw_bf16_sr", weight)
        for gradient in gradients(len(weight), 3):
            step(optimizer, gradient)
        results.append(weight.detach())
    assert torch.equal(*results)


def test_stochastic_rounding_moves_weights_as_far_as_float32_on_average():
    """100 steps of 1e-6, each far below half the distance of two bfloat16 numbers near 0.02."""
    weight = weight_of(2**16, torch.bfloat16)
    start, sign = weight.detach().float(), gradients(2**16, 1)[0].sign()
    optimizer = optimizer_of("adamw_bf16_sr", weight, lr=1e-6)
    for _ in range(100):
        step(optimizer, sign)
    moved = (weight.detach().float() - start) * -sign
    assert (moved == 0).float().mean() > 0.1  # to the nearest, nearly all would stay
    assert moved.mean().item() == pytest.approx(100 * 1e-6, rel=0.05)


def test_a_number_is_rounded_up_as_often_as_it_is_near_to_the_number_above():
    step = 2**-7  # of bfloat16, from 1 to 2
    x = torch.tensor([1 + step / 4, -1 - step / 4, 1 + step]).repeat(10_000, 1)
    rounded = piecewise_adamw.round_stochastically(x, torch.Generator().manual_seed(0))
    assert torch.equal(rounded, rounded.bfloat16().float())
    down, up = torch.tensor([1, -1, 1 + step]), torch.tensor([1 + step, -1 - step, 1 + step])
    assert ((rounded == down) | (rounded == up)).all()
    ups = (rounded == up).float().mean(0).tolist()  # 0.25 with a standard error of 0.004
    assert ups == pytest.approx([0.25, 0.25, 1.0], abs=0.02)


def test_random_numbers_come_from_the_seed_and_the_step_and_from_nothing_else():
    def after(seed, before_each=lambda: None):
        weight = weight_of(4096, torch.bfloat16)
        optimizer = optimizer_of("adamw_bf16_sr", weight, lr=1e-5, seed=seed)
        for gradient in gradients(4096, 3):
            before_each()
            step(optimizer, gradient)
        return weight.detach()

    state = torch.get_rng_state()
    first = after(0)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, after(0, before_each=lambda: torch.rand(1)))
    assert not torch.equal(first, after(1))


def test_the_second_moment_of_bfloat16_weights_falls_where_gradients_end():
    weight = weight_of(4, torch.bfloat16)
    optimizer = optimizer_of("adamw_bf16_sr", weight)
    for gradient in (torch.ones(4), torch.zeros(4)):
        step(optimizer, gradient)
    second = moments(optimizer)["exp_avg_sq"]
    assert second.tolist() == pytest.approx([1e-3 * 0.999] * 4, rel=1e-5)


def test_a_device_without_an_8_bit_step_is_refused():
    policy = SimpleNamespace(device=torch.device("mps"), dtype=torch.float32)
    with pytest.raises(UsageError, match="no 8-bit step for MPS; add --device cpu"):
        optimizer_for(Config(optimizer="adamw8bit"), policy)


def test_checkpoints_keep_their_form():
    saved = optimizer_of("adamw8bit", weight_of((32, 256))).state_dict()["adamw"]
    [group], [state] = saved["param_groups"], saved["state"].values()
    assert group.keys() == {"params", "lr", "betas", "eps", "weight_decay"}
    form = {name: (tensor.dtype, [*tensor.shape]) for name, tensor in state.items()}
    codes, scales = (torch.uint8, [32 * 256]), (torch.float32, [32])
    assert form == {"step": (torch.float32, []), "exp_avg": codes, "exp_avg_scale": scales,
                    "exp_avg_sq": codes, "exp_avg_sq_scale": scales}  # fmt: skip


@pytest.mark.parametrize(
    "kind, dtype, offload",
    [
        ("adamw", torch.bfloat16, False), ("adamw8bit", torch.bfloat16, True),
        ("adamw_bf16_sr", torch.bfloat16, False),
    ],
)  # fmt: skip
def test_a_saved_optimizer_continues_exactly(kind, dtype, offload):
    """Also where the one that continues is offloaded and the saved one was not, or the reverse. The
    learning rate is that of the settings."""
    whole, part, resumed = (weight_of((32, 256), dtype) for _ in range(3))
    steps = gradients((32, 256), 6)
    optimizer = optimizer_of(kind, whole)
    for number, gradient in enumerate(steps):
        optimizer.set_lr(LR if number < 3 else 2 * LR)
        step(optimizer, gradient)
    first = optimizer_of(kind, part, offload=offload)
    for gradient in steps[:3]:
        step(first, gradient)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed.data.copy_(part)
    offload = not offload and kind in KINDS_WITH_MASTERS
    second = optimizer_of(kind, resumed, lr=2 * LR, offload=offload)
    second.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    for gradient in steps[3:]:
        step(second, gradient)
    assert torch.equal(whole, resumed)
