"""runs/optimizer_memory: computed bytes a weight are those of the tensors, for tiny."""

import sys
from pathlib import Path

import pytest

from core.piecewise_adamw import PIECE

FOLDER = Path(__file__).parent.parent / "runs/optimizer_memory"
sys.path.append(str(FOLDER))
import table  # noqa: E402
from table import COMBINATIONS, QWEN3, SHARDED, TINY, fit  # noqa: E402

pytest.importorskip("torchao")


@pytest.mark.slow
@pytest.mark.parametrize("c", COMBINATIONS, ids=lambda c: f"{c.dtype} {c.flags}")
def test_tiny_takes_as_many_bytes_as_computed(c):
    if c.nf4:
        pytest.importorskip("bitsandbytes")
    found = table.measure("tiny", c)
    weights = fit.num_weights(TINY)
    assert found["device"] / weights == pytest.approx(c.bytes_a_weight(TINY), rel=2e-3)
    assert found["host"] / weights == pytest.approx(c.on_host(TINY), rel=2e-3)


def test_bytes_a_weight_are_those_of_the_docstring_of_the_optimizer():
    computed = {(c.dtype, c.flags): c.bytes_a_weight(TINY) for c in [*COMBINATIONS, SHARDED]}
    assert computed["bfloat16", "adamw"] == pytest.approx(2 + 4 + 4 + 8)
    assert computed["bfloat16", "adamw8bit"] == pytest.approx(2 + 4 + 4 + 2 + 8 / 256)
    assert computed["bfloat16", "adamw_bf16_sr"] == pytest.approx(2 + 2 + 2 + 4)
    assert computed["bfloat16", "adamw, offloaded"] == pytest.approx(2)
    assert computed["float32", "adamw"] == pytest.approx(4 + 4 + 8)
    assert computed["bfloat16", "adamw, 8 ranks"] == pytest.approx(2 + (4 + 4 + 8) / 8)


def test_the_published_numbers_of_weights():
    assert fit.num_weights(QWEN3["14B"]) == 14_768_307_200
    assert fit.num_weights(QWEN3["32B"]) == 32_762_123_264


def test_the_smallest_gpu_is_the_first_whose_memory_exceeds_the_peak():
    c, m = COMBINATIONS[4], QWEN3["0.6B"]
    peak = {gpu: c.memory(m, "cuda", gpu)["peak"] for gpu in (16, 24)}
    assert peak[16] > 0.9 * 16 - 1.5 and peak[24] < 0.9 * 24 - 1.5
    assert table.smallest_gpu(c, m) == f"{peak[24]:.1f}: 24"


def test_steps_in_pieces_have_small_temporaries():
    m = QWEN3["32B"]
    step = fit.memory(m, "cuda", 0, 1024, optimizer="adamw8bit")["step"]
    assert step * fit.GB == 53 * PIECE < 0.25 * fit.GB


def test_the_readme_has_the_computed_table_of_the_script():
    text = (FOLDER / "README.md").read_text()
    found = text.split("<!-- table computed -->\n")[1].split("\n<!-- end of table computed -->")[0]
    assert found.splitlines() == table.computed_lines()
