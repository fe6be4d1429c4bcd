"""Runs train.py, and writes memory.json: the bytes of the base weights and of the process.

python runs/qlora/measured.py --lora-rank 16 --quantize nf4 --run-name a
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

import train  # noqa: E402
from core.config import Config  # noqa: E402
from core.loop import open as opening  # noqa: E402
from core.policy import Policy, num_weights  # noqa: E402


def num_bytes(parameter: Any) -> int:
    """Bytes of a parameter, with its scales if it is quantized."""
    state = getattr(parameter, "quant_state", None)
    scales = state.absmax.nbytes + state.state2.absmax.nbytes if state else 0
    return parameter.nbytes + scales


def execute(args: list[str]) -> int:
    load, measured = opening.load_run_policy, dict[str, Any]()

    def load_and_measure(cfg: Config, folder: Path, *rest: Any) -> Policy:
        policy = load(cfg, folder, *rest)
        named = policy.model.named_parameters()
        base = [p for name, p in named if "lora_" not in name]
        measured["base_weights"] = sum(map(num_weights, base))
        measured["base_bytes"] = sum(map(num_bytes, base))
        measured["folder"] = folder
        return policy

    opening.load_run_policy = load_and_measure
    code = train.execute(args)
    # on Linux in units of 1024 bytes
    measured["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = measured.pop("folder", None)
    if code == 0 and folder:
        (folder / "memory.json").write_text(json.dumps(measured, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(execute(sys.argv[1:]))
