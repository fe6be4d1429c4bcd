"""train.py with a sampler whose matrices are rounded, on tasks that `tiny` can just solve.

python runs/precision/rounded.py int4 --env sanity --tis-cap 2     # or float8, none
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1]))

import torch  # noqa: E402

import core.loop.open as opening  # noqa: E402
import train  # noqa: E402
from core.policy import Policy  # noqa: E402
from core.sampler import Sampler, TorchSampler  # noqa: E402
from environments.plumbing.registry import register  # noqa: E402
from environments.reverse import Reverse  # noqa: E402


@register("sanity")
class Sanity(Reverse):
    """`reverse` with one word, on the seeds in tasks.txt."""

    def __init__(self) -> None:
        super().__init__(turns=1)
        self.seeds = [int(seed) for seed in (HERE / "tasks.txt").read_text().split()]

    def reset(self, seed: int) -> list:
        return super().reset(self.seeds[seed % len(self.seeds)])


class RoundedSampler(TorchSampler):
    """Samples with all matrices rounded to `kind`; outside of `with sampler:` they are exact."""

    def __init__(self, policy: Policy, kind: str) -> None:
        super().__init__(policy)
        self.kind = kind
        self.exact: list[tuple[torch.Tensor, torch.Tensor]] = []  # weight, its value in training

    @torch.no_grad()
    def __enter__(self) -> Sampler:
        for weight in self.policy.causal_lm.parameters():
            if weight.dim() == 2:
                self.exact.append((weight, weight.clone()))
                weight.copy_(rounded(weight, self.kind))
        return self

    @torch.no_grad()
    def __exit__(self, *exc_info: object) -> None:
        for weight, value in self.exact:
            weight.copy_(value)
        self.exact = []


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The nearest values of float8 (e4m3) or int4 (-7 to 7), with a scale for each row.

    >>> rounded(torch.tensor([[0.7, 0.26, -0.04]]), "int4")
    tensor([[0.7000, 0.3000, 0.0000]])
    """
    float8 = torch.float8_e4m3fn
    largest = torch.finfo(float8).max if kind == "float8" else 7.0
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    scaled = weight / scale
    return scale * (scaled.to(float8).to(weight.dtype) if kind == "float8" else scaled.round())


if __name__ == "__main__":
    kind, *flags = sys.argv[1:] or [""]
    if kind not in ("none", "int4", "float8"):
        sys.exit(__doc__)
    if kind != "none":
        opening.make_sampler = lambda name, policy, *_, **__: RoundedSampler(policy, kind)
    sys.exit(train.execute(flags))
