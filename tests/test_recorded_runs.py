"""runs/: the recorded runs support what their pages say, and the scripts write those pages."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from core.metrics import before_after
from core.run_log import read_records
from environments import registry
from environments.registry import ENVIRONMENTS

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs"
sys.path.append(str(RUNS))
import record  # noqa: E402

ALWAYS_1 = 0.25  # accuracy of always answering 1 in letter_counting


def script(path):
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    module = importlib.util.module_from_spec(spec)
    known = dict(ENVIRONMENTS)
    spec.loader.exec_module(module)
    ENVIRONMENTS.clear()  # a script may register an environment, which other tests must not see
    ENVIRONMENTS.update(known)
    return module


def last_evaluation(path):
    ((env, _, last),) = before_after(read_records(path))
    return {key: last[f"eval/{env}/{key}"] for key in ("accuracy", "ci_low", "ci_high")}


@pytest.mark.parametrize("algo", ["grpo", "reinforce", "ppo"])
def test_default_runs_end_above_the_trivial_baseline(algo):
    for seed in range(5):
        after = last_evaluation(RUNS / f"letter_counting_tiny/{algo}-seed{seed}.jsonl")
        assert after["ci_low"] > 0.94 > ALWAYS_1


def test_vllm_run_ends_within_the_interval_of_the_torch_run():
    vllm = last_evaluation(RUNS / "letter_counting_vllm/vllm.jsonl")
    torch_run = last_evaluation(RUNS / "letter_counting_vllm/torch.jsonl")
    assert torch_run["ci_low"] <= vllm["accuracy"] <= torch_run["ci_high"]


def test_a_policy_learns_to_call_the_calculator():
    for seed in (0, 1):
        records = read_records(RUNS / f"tools_tiny/calculator-seed{seed}.jsonl")
        ((env, first, last),) = before_after(records)
        assert first[f"eval/{env}/ci_high"] < 0.5 < 0.9 < last[f"eval/{env}/ci_low"]
        assert last[f"eval/{env}/pass_at_1"] > first[f"eval/{env}/pass_at_1"] + 0.3
        assert last[f"eval/{env}/called"] > 0.9


def test_a_model_in_4_bits_learns_and_its_sampler_differs_by_rounding():
    for name in ("letters-nf4-seed0", "letters-nf4-seed1", "sums-nf4"):
        records = read_records(RUNS / f"qlora/{name}.jsonl")
        ((env, first, last),) = before_after(records)
        assert first[f"eval/{env}/ci_high"] < last[f"eval/{env}/ci_low"]
        assert max(r.get("gap/logprob_max", 0) for r in records) < 1e-3
        memory = json.loads((RUNS / f"qlora/{name}.memory.json").read_text())
        plain = name.replace("nf4", "lora")
        whole = json.loads((RUNS / f"qlora/{plain}.memory.json").read_text())
        assert memory["base_weights"] == whole["base_weights"] == whole["base_bytes"] / 4
        assert memory["base_bytes"] < 0.32 * whole["base_bytes"]


def test_too_high_a_learning_rate_ends_below_the_trivial_baseline():
    after = last_evaluation(RUNS / "what_goes_wrong/high_rate.jsonl")
    assert after["ci_high"] < ALWAYS_1
    assert last_evaluation(RUNS / "what_goes_wrong/healthy.jsonl")["ci_low"] > ALWAYS_1


@pytest.mark.parametrize(
    "name",
    ["letter_counting_tiny", "algorithms_tiny", "environments_tiny", "letter_counting_vllm",
     "opponents_tiny", "own_environments", "pretrain_tiny", "precision", "qlora",
     "tools_tiny", "what_goes_wrong"],
)  # fmt: skip
def test_page_has_the_table_of_its_script(name, monkeypatch):
    monkeypatch.syspath_prepend(str(RUNS / name))
    table = "\n".join(script(RUNS / name / "reproduce.py").table())
    assert table in (RUNS / name / "README.md").read_text()


def test_the_recipe_of_tiny_is_that_of_its_page(monkeypatch):
    monkeypatch.syspath_prepend(str(RUNS / "pretrain_tiny"))
    recipe = script(RUNS / "pretrain_tiny/reproduce.py")
    page = (RUNS / "pretrain_tiny/README.md").read_text()
    for spec, number in recipe.DEMONSTRATIONS.items():
        if not spec.startswith("reward_hacking"):  # its three worlds share a row
            assert f"| `{spec}` | {number} |" in page
    total = sum(recipe.DEMONSTRATIONS.values())
    assert f"{recipe.STEPS:,} supervised steps" in page and f"{total} in each step" in page
    losses = [r["sft/loss"] for r in read_records(RUNS / "pretrain_tiny/metrics.jsonl")
              if "sft/loss" in r]  # fmt: skip
    assert len(losses) == recipe.STEPS / 20 and losses[0] > 2 > 0.25 > sum(losses[-9:]) / 9


def test_tiny_keeps_the_tokenizer_of_its_recipe(monkeypatch):
    monkeypatch.syspath_prepend(str(RUNS / "pretrain_tiny"))
    from core.tiny import tiny_tokenizer

    made = script(RUNS / "pretrain_tiny/tokenizer.py").make_tokenizer()
    assert made.get_vocab() == tiny_tokenizer().get_vocab()


def test_write_table_replaces_the_lines_between_the_marks(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- table x -->\nold\n<!-- end of table x -->\nb\n")
    record.write_table(tmp_path, ["new"], "x")
    assert page.read_text() == "a\n<!-- table x -->\nnew\n<!-- end of table x -->\nb\n"
    with pytest.raises(ValueError, match="no marks for: table y"):
        record.write_table(tmp_path, [], "y")


def test_make_run_keeps_the_metrics_the_time_and_the_version(tmp_path, monkeypatch):
    folder, repository = tmp_path / "some_runs", tmp_path / "repository"
    (repository / "runs").mkdir(parents=True)
    folder.mkdir()
    (repository / "train.py").write_text(
        "import json, pathlib, sys\n"
        "run = pathlib.Path('runs', sys.argv[-1])\n"
        "run.mkdir()\n"
        "(run / 'metrics.jsonl').write_text(json.dumps({'flags': sys.argv[1:-2]}))\n"
    )
    monkeypatch.setattr(record, "ROOT", repository)
    monkeypatch.setattr(record, "commit", lambda: "abc1234")
    record.make_run(folder, "grpo-seed0", "--seed 0")
    assert json.loads((folder / "grpo-seed0.jsonl").read_text()) == {"flags": ["--seed", "0"]}
    assert "train.py" in json.loads((folder / "sources.json").read_text())
    assert list(record.read_seconds(folder)) == ["grpo-seed0"]
    assert "commit abc1234" in record.recorded_with(folder)
    assert not list((repository / "runs").iterdir())


def test_chosen_runs_are_those_named_or_missing(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").touch()

    def chosen(*args):
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *args])
        return record.chosen_runs("", tmp_path, ["a", "b"])

    assert chosen() == ["a", "b"] and chosen("b") == ["b"] and chosen("--draw") == []
    assert chosen("--missing") == ["b"]
    with pytest.raises(SystemExit):
        chosen("c")


def test_wrong_clip_does_not_bound_the_ratio(monkeypatch):
    from algorithms import grpo

    broken = script(RUNS / "what_goes_wrong/broken.py")
    monkeypatch.setattr(grpo, "compute_loss", grpo.compute_loss)  # restored after the test
    ones = torch.ones(1, 1)
    options = grpo.with_loss_type(grpo.Options())

    def loss():
        ratio_2 = torch.log(2 * ones)
        return grpo.compute_loss(ratio_2, 0 * ones, ones, ones.bool(), ones, ones, options)[0]

    assert loss() == pytest.approx(-1.28)
    broken.wrong_clip()
    assert loss() == pytest.approx(-2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags",
    [("retokenised", []), ("merged_adapter", ["--lora-rank", "4", "--dtype", "bfloat16"])],
)
def test_broken_runs_show_the_mistake_in_a_metric(name, flags, tmp_path, monkeypatch):
    import subprocess

    tiny = """--model-id tiny-random --num-updates 2 --sft-steps 2 --sft-batch-size 2
        --num-prompts 2 --group-size 2 --eval-num-tasks 2 --max-tokens 16 --lr 1e-2
        --run-name a""".split()
    command = [sys.executable, RUNS / "what_goes_wrong/broken.py", name, *flags, *tiny]
    subprocess.run(command, cwd=tmp_path, check=True)
    last = read_records(tmp_path / "runs/a/metrics.jsonl")[-1]
    assert last["base/drift" if name == "merged_adapter" else "gap/logprob_max"] > 1e-4


SCRIPTS = [file for file in RUNS.glob("*/*.py") if (file.parent / "README.md").exists()]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_scripts_import_only_names_that_exist(file, monkeypatch):
    monkeypatch.setattr("sys.path", [str(file.parent), *sys.path])
    built_in = {k: v for k, v in registry.ENVIRONMENTS.items() if isinstance(v, str)}
    monkeypatch.setattr(registry, "ENVIRONMENTS", built_in)  # a script may register its own
    script(file)
