"""runs/benchmarks: what it counts, by hand, and that both sides do the same work."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.model import load_policy
from core.sampler import SamplingParams, TorchSampler

FOLDER = Path(__file__).parent.parent / "runs/benchmarks"
sys.path.append(str(FOLDER))
import continuous  # noqa: E402
import floor  # noqa: E402
import large_scale  # noqa: E402
import memory  # noqa: E402
import nanollm  # noqa: E402
import pairs  # noqa: E402
import scaling  # noqa: E402
import startup  # noqa: E402
import vs_generate  # noqa: E402
import vs_trl  # noqa: E402
from workload import SHAPES, Shape, repeated_prompts, save_model  # noqa: E402

#                width 2, MLP 3, 1 layer, 1 query and 1 key head of size 2, vocabulary 5
HAND = Shape(2, 3, 1, 1, 1, 2, 5)
WORK = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 3, "max_tokens": 3}


@dataclass
class Model:
    folder: str
    policy: object


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("minute"))
    save_model(folder, SHAPES["minute"])
    return Model(folder, load_policy(folder))


def test_floor_counts_operations_by_hand():
    # matrices: q, k, v, o of 2 x 2 and three of 2 x 3: 34 weights, 68 operations per token.
    # attention over c tokens: 2 for q·k and 2 for p·v, of 2 numbers each: 8c. Logits: 2 x 2 x 5.
    counts = floor.count(HAND, **WORK)
    assert HAND.layer_weights == 34
    prompt = 3 * 68 + 8 * (1 + 2 + 3)
    assert counts["prefill"].operations == 2 * (prompt + 20)
    # the first token of a completion comes from the prefill, the last is not fed back
    completion = 2 * 68 + 8 * (4 + 5)
    assert counts["decode"].operations == 4 * (completion + 2 * 20)
    logits = 4 * 3 * 20
    packed = 2 * prompt + 4 * completion
    assert counts["training, packed"].operations == 3 * (packed + logits)
    whole = 4 * (5 * 68 + 8 * (1 + 2 + 3 + 4 + 5))
    assert counts["training, unpacked"].operations == 3 * (whole + logits)


def test_floor_counts_bytes_by_hand():
    counts = floor.count(HAND, **WORK)
    weights = 4 * (34 + 10)  # with the embedding, which also computes the logits
    assert counts["prefill"].bytes_moved == weights
    # two steps read all weights; 4 rows read keys and values of 2 floats over 4 and 5 tokens
    assert counts["decode"].bytes_moved == 2 * weights + 4 * (4 + 5) * 4 * 4
    # read: D for q, k, v; 2 for o; D for gate, up; F for down. Written: 3 of 2, then D, 2F, D
    activations = 4 * ((2 + 6) + (2 + 2) + (2 + 6) + (3 + 2))
    assert counts["training, packed"].bytes_moved == 3 * ((6 + 8) * activations + weights)
    assert counts["optimiser"].bytes_moved == 7 * weights


def test_floor_is_the_longer_of_computing_and_moving():
    work = floor.Work(operations=6.0, bytes_moved=10.0)
    assert work.seconds(operations_per_s=2.0, bytes_per_s=10.0) == 3.0
    assert work.seconds(operations_per_s=6.0, bytes_per_s=2.0) == 5.0


@pytest.mark.parametrize("name", ["minute", "tiny"])
def test_shape_has_the_weights_of_the_model(model, name, tmp_path):
    folder, shape = model.folder, SHAPES[name]
    if name == "tiny":
        folder = str(tmp_path / "tiny")
        load_policy("tiny", tiny_folder=tmp_path / "tiny")
    built = AutoModelForCausalLM.from_pretrained(folder)
    matrices = [p.numel() for n, p in built.named_parameters() if p.ndim == 2 and "layers" in n]
    assert shape.layer_weights == sum(matrices)
    assert shape.width * shape.vocab == built.get_input_embeddings().weight.numel()


def test_scatter_seconds_by_hand():
    links = large_scale.Assumptions(inside_gb_s=2.0, outside_gb_s=1.0, latency_s=0.01)
    assert large_scale.scatter_seconds(8e9, 1, links) == 0.0
    # 8 GPUs: each sends 7/8 of 8 GB at 2 GB/s; 7 messages
    assert large_scale.scatter_seconds(8e9, 8, links) == pytest.approx(3.5 + 0.07)
    # 64 GPUs: besides, 7/8 of the 1 GB of each GPU at 1 GB/s; 7 more messages
    assert large_scale.scatter_seconds(8e9, 64, links) == pytest.approx(3.5 + 0.875 + 0.14)
    with pytest.raises(ValueError, match="do not fill nodes"):
        large_scale.scatter_seconds(8e9, 12, links)


# HAND has 44 weights and caches 2 * 2 bytes of 1 * 2 keys = 8 bytes per token
SLOW = large_scale.Assumptions(
    gpus_per_node=2, peak_tflops=1e-10, compute_share=1.0, memory_gb_s=1e-7, memory_share=1.0,
    decode_overhead_s=0.5, cache_gb=2 * 8e-9 * 6.5, inside_gb_s=1e-7, latency_s=0.0,
    rollouts_gb_s=1e-9, disk_gb_s=1e-9, save_every=2,
)  # fmt: skip
SHORT = large_scale.Batch(2, 2, prompt_tokens=4, micro_batch_tokens=8)


def test_sampling_starts_the_next_completion_where_one_ends():
    # 2 fit: (4 + (1 + 2 + 4.5) / 3 = 2.5) tokens each. Lengths 1 and 2 start, the third follows.
    # step 0-1: 2 rows hold 9 tokens; 1-2: 5.5 and 4.5; 2-4: the last alone holds 4 + 2
    assert weights_by_hand == large_scale.weights_of(HAND)
    moved = [88 + 8 * 9, 88 + 8 * 10, 88 + 8 * 6, 88 + 8 * 6]  # bytes, at 100 per second
    computed = [2 * 44 * 2 / 100, 2 * 44 * 2 / 100, 0.88, 0.88]
    expected = sum(0.5 + max(m / 100, c) for m, c in zip(moved, computed, strict=True))
    seconds = large_scale.sampling_seconds([1, 2, 3], SHORT, HAND, SLOW)
    assert seconds == pytest.approx(expected)


weights_by_hand = 34 + 2 * 5


def test_update_counts_training_and_what_the_backward_pass_does_not_hide(monkeypatch):
    monkeypatch.setattr(large_scale, "lengths_of", lambda batch: [2, 2, 2, 2])
    monkeypatch.setitem(large_scale.SHAPES, "hand", HAND)
    scale = large_scale.Scale((2,), "hand", 1, False, SHORT, SLOW)
    parts = large_scale.update_seconds(2, scale, dict.fromkeys(COSTS, 0.0))
    # 8 completion tokens and 2 prompts of 4 on 2 GPUs: 8 tokens each, one pass
    training = 8 * 44 * 8 / 100
    assert parts["training"] == pytest.approx(training)
    scatter = 0.5 * 4 * 44 / 100
    assert scatter < training * 6 / 8  # hidden
    assert parts["communication"] == pytest.approx(0.5 * 2 * 44 / 100)
    slower = dataclasses.replace(SLOW, inside_gb_s=1e-9)
    scale = dataclasses.replace(scale, assumptions=slower)
    parts = large_scale.update_seconds(2, scale, dict.fromkeys(COSTS, 0.0))
    assert parts["communication"] == pytest.approx(88 - training * 6 / 8 + 44)
    assert parts["stragglers"] == 0.0  # all lengths are equal


COSTS = "bytes pickle_s unpickle_s batch_s advantages_s metrics_s write_s".split()


def test_controller_handles_all_rollouts_on_every_rank():
    costs = dict(zip(COSTS, (2.0, 8.0, 0.25, 0.5, 0.125, 3.0, 1.0), strict=True))
    seconds = large_scale.controller_seconds(2, 44, [1, 2, 3, 4], SLOW, costs)
    exchange = (8.0 / 2 + 2.0 + 0.25) * 10
    assert seconds == exchange + 0.625 * 10 + 4.0 * 4 + 14 * 44 / 2
    alone = large_scale.controller_seconds(1, 44, [1, 2, 3, 4], SLOW, costs)
    assert alone == seconds - exchange


def test_half_is_wasted_where_an_update_takes_half_the_time_of_linear_scaling(monkeypatch):
    seconds = {8: 80.0, 16: 50.0, 32: 39.0, 64: 30.0}  # half of linear: 160 / 2 ^ k
    monkeypatch.setattr(large_scale, "update_seconds", lambda n, *_: {"sampling": seconds[n]})
    scale = large_scale.Scale(gpus=(8,))
    assert large_scale.half_wasted_at(scale, {}) == 64  # 32: 80 / 39 / 4 = 0.51
    growing = dataclasses.replace(scale, grows=True)
    seconds |= {16: 90.0, 32: 161.0}
    assert large_scale.half_wasted_at(growing, {}) == 32


def test_the_largest_loss_is_what_grows_most_against_linear_scaling():
    one = dict(zip(large_scale.PARTS, (80.0, 0.0, 80.0, 0.0, 6.0), strict=True))
    many = dict(zip(large_scale.PARTS, (30.0, 9.0, 10.0, 0.0, 5.0), strict=True))
    case = {"gpus": [8, 64], "grows": False, "updates": {"8": one, "64": many}}
    assert large_scale.largest_loss(case) == "sampling"  # 20 s more than 10
    assert large_scale.largest_loss(case | {"grows": True}) == "stragglers"


def test_controller_measures_all_its_costs():
    costs = large_scale.controller(1, large_scale.Batch(2, 2, median_tokens=20), count=4)
    assert list(costs) == ["bytes", *COSTS[1:]] and all(value > 0 for value in costs.values())


def test_scaling_reads_times_without_the_first_update(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    line = '{"update": %d, "time/rollout_s": %f, "time/train_s": %f, "tokens/sampled": 7}\n'
    metrics.write_text('{"sft_step": 1}\n' + line % (1, 99, 99) + line % (2, 1, 2) * 2)
    times = scaling.read_times(metrics)
    assert times == {"update_s": 3.0, "sampling_s": 1.0, "learning_s": 2.0, "sampled": 14}


def test_workload_never_ends_a_completion(model):
    prompts = repeated_prompts(model.policy, 2, 3, 20)  # asserts the length of each prompt
    assert len({tuple(ids) for ids in prompts}) == 2
    with torch.no_grad():
        logits = model.policy.causal_lm(input_ids=torch.tensor(prompts)).logits[:, -1]
    assert logits.softmax(-1)[:, model.policy.stop_ids].max() < 1e-12
    completions = TorchSampler(model.policy).sample(prompts, SamplingParams(100, seed=1))
    assert [len(completion.token_ids) for completion in completions] == [100] * 6


def test_vs_generate_samples_the_same_number_of_tokens_on_both_sides(model):
    work = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 12, "max_tokens": 6}
    for side in (vs_generate.ours, vs_generate.generate):
        assert side(model.folder, calls=2, **work)["sampled"] == [2 * 2 * 6] * 2


def test_continuous_samples_the_same_tokens_on_both_sides(tmp_path, capsys):
    """`measure` raises an error if it does not."""
    sizes = {"max_turns": 3, "mean_tokens": 4, "max_tokens": 8, "latency": (0.0, 0.02)}
    args = continuous.Args(rounds=1, model="tiny-random", **sizes)
    case = continuous.measure(args, str(tmp_path), episodes=6, instances=2)
    assert [len(answers) for answers in case["sides"].values()] == [1, 1]
    assert case["sides"]["in rounds"][0]["tokens"] > 6


def test_vs_trl_measures_steps_of_the_training_loop(model):
    work = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 12, "max_tokens": 6, "steps": 2}
    ours = vs_trl.picorl(model.folder, gpu=False, tokens=64, lora_rank=0, **work)
    assert ours["sampled"] == [2 * 2 * 6] * 3  # the first step warms up
    assert ours["prompt_tokens"] == 12 and len(ours["steps_s"]) == 2
    assert ours["sampling_s"] < ours["step_s"]


@pytest.mark.slow
def test_vs_trl_samples_the_same_number_of_tokens_in_trl(model):
    work = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 12, "max_tokens": 6, "steps": 2}
    settings = {"folder": model.folder, "gpu": False, "lora_rank": 0, "rows": 2}
    theirs = pairs.in_child(vs_trl.__file__, "trl", **settings, **work)
    assert theirs["sampled"] == [2 * 2 * 6] * 3
    assert theirs["prompt_tokens"] == 12 and len(theirs["steps_s"]) == 2


def test_memory_compares_passes_with_equal_gradients(model):
    group = memory.rollouts(group_size=3, prompt_tokens=7, completion_tokens=5, vocab=384)
    policy = load_policy(model.folder)
    policy.micro_batch_tokens = 17  # two micro-batches
    results = []
    for run in (memory.ours, memory.plain):
        policy.model.zero_grad()
        loss = run(policy, group)
        results.append([p.grad.clone() for p in policy.model.parameters()] + [loss])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_memory_cases_change_one_setting_at_a_time():
    first, *others = memory.grid(memory.Args())
    assert all(sum(case[k] != first[k] for k in first) == 1 for case in others)


def test_pairs_alternate_the_sides():
    order = []

    def side(name, seconds):
        return lambda: order.append(name) or {"s": seconds}

    results = pairs.alternate({"a": side("a", 1.0), "b": side("b", 4.0)}, 2, "s")
    assert order == ["a", "b", "a", "b"]
    assert pairs.ratios(*([x["s"] for x in results[name]] for name in "ab")) == [0.25, 0.25]


def test_a_failed_child_reports_its_error(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('out of prompts')")
    with pytest.raises(RuntimeError, match="ValueError: out of prompts"):
        pairs.in_child(str(script), "ours")


def test_profile_divides_the_time_by_kind_of_operation():
    from torch.profiler import ProfilerActivity, profile

    square = torch.ones(300, 300)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(50):
            (square @ square).add_(1).softmax(-1)
    seconds = floor.by_kind(profiler, took=10.0)
    assert seconds["matrices"] > seconds["other operations"] > 0 < seconds["attention"]
    assert sum(seconds.values()) == pytest.approx(10.0)


SCRIPTS = {
    "vs_trl": vs_trl.table, "vs_generate": vs_generate.table, "memory": memory.table,
    "floor": floor.table, "startup": startup.table, "scaling_ranks": scaling.ranks_table,
    "scaling_model": large_scale.table, "continuous": continuous.table,
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_readme_shows_the_recorded_results(name, tmp_path, monkeypatch):
    page, results = pairs.RESULTS / "README.md", pairs.RESULTS.glob(f"{name}-*.json")
    for file in (page, *results):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(pairs, "RESULTS", tmp_path)
    pairs.write_tables(name, SCRIPTS[name])
    assert (tmp_path / "README.md").read_text() == page.read_text()


def test_nanollm_table_names_what_failed_and_keeps_the_rest(monkeypatch, tmp_path, capsys):
    """NanoLLM fails at its start, plain vLLM in its second turn, and the backend not at all."""
    script = tmp_path / "child.py"
    script.write_text("""
import json, sys
name = next(a for a in sys.argv if a.startswith("--child=")).removeprefix("--child=")
input()
if name == "nanollm":
    print(json.dumps({"error": "UsageError: no kernels"}), flush=True)
    sys.exit(1)
print(json.dumps({"start_s": 1.0}), flush=True)
for turn, _ in enumerate(sys.stdin):
    if name == "vllm" and turn == 1:
        sys.exit(3)
    print(json.dumps({"tokens_per_s": 100.0}), flush=True)
""")
    monkeypatch.setattr(nanollm, "__file__", str(script))
    speed = nanollm.measure_speed(nanollm.Args(rounds=3), "folder")
    results = {"speed": speed} | {name: {"error": "x"} for name in ("full", "lora")}
    lines = nanollm.size_tables(results)
    assert "| NanoLLM | UsageError: no kernels | |" in lines
    assert "| plain vLLM | ended with exit code 3 | |" in lines
    assert "| vLLM's transformers backend, eager | 100 [100, 100] |  |" in lines
