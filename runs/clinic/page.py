"""Writes the tables and the picture of README.md from the runs of data/.

python runs/clinic/page.py
"""

import statistics
from pathlib import Path
from typing import Any

import faults
import record
import score
from entries import Fault
from figures import figure, panel

from core.report.curves import INK, RED

HERE = Path(__file__).resolve().parent
REPOSITORIES = {
    "TRL": "huggingface/trl", "verl": "verl-project/verl", "vLLM": "vllm-project/vllm",
    "Search-R1": "PeterGriffinJin/Search-R1",
    "ToolRL": "qiancheng0/ToolRL", "Logic-RL": "Unakar/Logic-RL", "open-r1": "huggingface/open-r1",
    "ChatGLM-Efficient-Tuning": "hiyouga/ChatGLM-Efficient-Tuning", "AReaL": "areal-project/AReaL",
    "prime-rl": "PrimeIntellect-ai/prime-rl", "LLaMA-Factory": "hiyouga/LlamaFactory",
    "hello-agents": "datawhalechina/hello-agents", "OpenRLHF": "OpenRLHF/OpenRLHF",
    "adapters": "adapter-hub/adapters", "open-rl": "gke-labs/open-rl",
    "open-instruct": "allenai/open-instruct", "TinyZero": "Jiayi-Pan/TinyZero",
    "evalscope": "modelscope/evalscope", "smolagents": "huggingface/smolagents",
    "BALROG": "balrog-ai/BALROG", "NeMo-RL": "NVIDIA-NeMo/RL",
    "WebAgent-R1": "weizhepei/WebAgent-R1", "verifiers": "PrimeIntellect-ai/verifiers",
    "ms-swift": "modelscope/ms-swift", "transformers": "huggingface/transformers",
    "OpenTau": "TensorAuto/OpenTau", "NLPDL-2025Fall": "linhaowei1/NLPDL-2025Fall",
    "tinker-feedback": "thinking-machines-lab/tinker-feedback", "tt-metal": "tenstorrent/tt-metal",
    "verl-omni": "verl-project/verl-omni", "torchtitan": "pytorch/torchtitan",
    "verl-SpeCo": "verl-project/verl-SpeCo", "rllm": "rllm-org/rllm",
    "grpo-flat": "XU-YIJIE/grpo-flat", "d1": "dllm-reasoning/d1", "ROLL": "alibaba/ROLL",
    "trlx": "CarperAI/trlx", "xtuner": "InternLM/xtuner", "LiteLLM": "BerriAI/litellm",
    "inspect_ai": "UKGovernmentBEIS/inspect_ai", "tensorforce": "tensorforce/tensorforce",
    "higgsfield": "higgsfield-ai/higgsfield", "UniRL": "Tencent-Hunyuan/UniRL",
    "rl-prompt": "mingkaid/rl-prompt", "ballbeam-gym": "simon-larsson/ballbeam-gym",
    "NLE": "facebookresearch/nle", "pg-is-all-you-need": "MrSyee/pg-is-all-you-need",
    "flow_grpo": "yifan123/flow_grpo", "Visual-RFT": "Liuziyu77/Visual-RFT",
}  # fmt: skip
DETECTORS = {
    "ours": "core/diagnostics.py",
    "reward_and_kl": "look at reward and KL",
    "toolkit": "the rules of Microsoft's post-training-toolkit",
    "toolkit_at_once": "the same with a tenth of the patience",
}


def main() -> None:
    made = {kind: [*score.runs_of(kind)] for kind in ("faults", "twins", "held_out")}
    first = {run["name"]: records for run, records in made["faults"] if run["seed"] == 0}
    twins = {run["name"]: records for run, records in made["twins"]}
    alarms: dict[str, list[dict[str, int]]] = {}
    for run, records in made["faults"]:
        found = score.first_alarms(score.ours, run, records)
        alarms.setdefault(run["name"], []).append(found)
    draw(first, twins, alarms)
    for run, records in made["held_out"]:
        first[run["name"]] = records
        alarms[run["name"]] = [score.first_alarms(score.ours, run, records)]
    tables = ("twenty", faults.FAULTS), ("more", faults.MORE), ("held_out", faults.HELD_OUT)
    for name, of in tables:
        record.write_table(HERE, table(of, first, twins, alarms), name)
    record.write_table(HERE, scores(), "scores")


def links(source: str) -> str:
    """Issue numbers as links.

    >>> links("verl #5635, #7, arXiv:2403.17031").count("https")
    3
    """
    shown, repository = [], ""
    for name in source.split(", "):
        project, _, number = name.partition("#")
        own = project.strip() if "/" in project else repository
        repository = REPOSITORIES.get(project.strip(), own)
        to = f"https://github.com/{repository}/issues/{number}"
        if not number:
            to = f"https://arxiv.org/abs/{name.removeprefix('arXiv:')}"
        shown.append(f"[{name}]({to})")
    return ", ".join(shown)


def table(
    of: dict[str, Fault], first: dict[str, Any], twins: dict[str, Any], alarms: dict[str, Any]
) -> list[str]:
    """A row per fault, as Markdown."""
    rows = []
    for name, fault in of.items():
        what = " ".join((fault.install.__doc__ or "").split())
        last = first[name][-1]["update"]
        healthy = twins.get(twin_of(fault))
        accuracies = [accuracy(healthy, last)] if healthy else []
        accuracies.append(accuracy(first[name], last))
        updates = [found.get(fault.warning) for found in alarms[name]]
        named = " ".join("-" if update is None else str(update) for update in updates)
        others = {other for found in alarms[name] for other in found} - {fault.warning}
        by = [f"`{fault.warning}`"] * any(update is not None for update in updates)
        by += [f"({', '.join(sorted(others))})"] * bool(others)
        rows.append([f"`{name}`", links(fault.source), what, " → ".join(accuracies), named,
                     " ".join(by) or "nothing"])  # fmt: skip
    return record.markdown("fault | reported in | what is wrong | held-out accuracy: healthy → "
                           "broken | named at update (by seed) | by", rows)  # fmt: skip


def twin_of(fault: Fault) -> str:
    """The healthy run beside a fault: with its flags, unless these are the fault."""
    return "default" if "--max-tokens 3" in fault.flags else fault.flags or "default"


def accuracy(records: score.Records, last: int) -> str:
    """The held-out accuracy of the latest evaluation up to an update."""
    values = [x for r in records for name, x in r.items()
              if name.endswith("/accuracy") and r["update"] <= last]  # fmt: skip
    return f"{values[-1]:.2f}"


def scores() -> list[str]:
    """A row per detector, as Markdown."""
    rows = []
    for name, what in DETECTORS.items():
        detect = score.load(name)
        found = score.score(detect, ("faults", "healthy"))
        held = score.score(detect, ("held_out",))
        row = [what]
        for of in ({*faults.FAULTS}, {*faults.MORE}, {*held["named"]}):
            named = (found["named"] | held["named"]).items()
            updates = [update for fault, update in named if fault in of]
            row.append(f"{sum(x <= 3 for x in updates)}, {sum(x < score.NEVER for x in updates)} "
                       f"of {len(updates)}")  # fmt: skip
        wrong = [len(alarms) for alarms in found["false"].values()]
        rows.append([*row, f"{statistics.fmean(wrong):.3f} ({sum(wrong)} in {len(wrong)})"])
    return record.markdown("detector | the twenty: by update 3, by the end | the others | held out "
                           "| false alarms per healthy run", rows)  # fmt: skip


def series(records: score.Records, metric: str) -> tuple[list[int], list[float]]:
    """The updates and the values of a metric."""
    of = metric.split(" / ")  # one metric, or the quotient of two
    rows = [r for r in records if r.get("update") and all(part in r for part in of)]
    points = [(r["update"], r[of[0]] / (r[of[1]] if of[1:] else 1)) for r in rows]
    return [update for update, _ in points], [value for _, value in points]


def draw(first: dict[str, Any], twins: dict[str, Any], alarms: dict[str, Any]) -> None:
    """A panel for each of the twenty: the metric that shows it, healthy (grey) and broken."""
    title = "Twenty bugs that raise no error: what each does to a metric (grey: the healthy run)"
    with figure(HERE / "curves.png", title, 4, 5, (13.5, 8.1)) as axes:
        for axis, (name, fault) in zip(axes, faults.FAULTS.items(), strict=True):
            both = twins[twin_of(fault)], first[name]
            curves = [series(records, fault.metric) for records in both]
            last = curves[1][0][-1]
            shown = [n for n, update in enumerate(curves[0][0]) if update <= last]
            axis.plot(*([x[n] for n in shown] for x in curves[0]), color="#9a9aa5", linewidth=3.5)
            axis.plot(*curves[1], color=RED, linewidth=2)
            if fault.metric.startswith("gap/logprob"):
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
                axis.minorticks_off()
            panel(axis, name.replace("_", " "), size=11)
            short = fault.metric.replace("letter_counting/", "").replace(" / ", " /\n")
            axis.set_ylabel(short, fontsize=8)
            axis.tick_params(labelsize=7)
            axis.set_xlim(0.5, last + 0.5)
            found = alarms[name][0]
            update = found.get(fault.warning)
            if update:
                axis.axvline(update, color=INK, linewidth=1, linestyle=":")
            sign = "no warning" if update is None else f"update {update}: {fault.warning}"
            axis.set_xlabel(sign.replace("_", " "), fontsize=9,
                            color=INK if update is not None else "#9a9aa5")  # fmt: skip


if __name__ == "__main__":
    main()
