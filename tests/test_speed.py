"""What runs/benchmarks/speed counts and computes by hand; both sides of a pair do equal work."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.chat_template import prompt_ids
from core.model import load_policy
from core.sampler import SamplingParams, TorchSampler
from core.tiny import save_tiny

FOLDER = Path(__file__).parent.parent / "runs/benchmarks/speed"
sys.path.append(str(FOLDER))
import floor  # noqa: E402
import memory  # noqa: E402
import pairs  # noqa: E402
import scaling  # noqa: E402
import startup  # noqa: E402
import vs_generate  # noqa: E402
import vs_trl  # noqa: E402
from workload import LETTERS, SHAPES, Shape, grouped, prompt, save_model  # noqa: E402

#                width 2, MLP 3, 1 layer, 1 head and 1 of keys of size 2, vocabulary 5
HAND = Shape(2, 3, 1, 1, 1, 2, 5)
WORK = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 3, "max_tokens": 3}
SCRIPTS = (
    "vs_trl", "vs_generate", "memory", "floor", "scaling_ranks", "scaling_model", "startup",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("minute")
    save_model(str(where), SHAPES["minute"])
    return str(where)


def test_floor_counts_a_shape_by_hand():
    # matrices: q, k, v, o of 2 x 2, and three of 2 x 3: 34 weights, 68 operations a token.
    # attention over c tokens: 2 for q.k and 2 for p.v, of 2 numbers each: 8 c. Logits: 2 x 2 x 5.
    found = floor.count(HAND, **WORK)
    assert HAND.layer_weights == 34
    # a prompt: 3 tokens over 1, 2, 3; two of them, a row of logits each
    a_prompt = 3 * 68 + 8 * (1 + 2 + 3)
    assert found["prefill"].operations == 2 * (a_prompt + 20)
    # a completion: its first token comes from the prefill, its last is not fed: 2 over 4 and 5
    a_completion = 2 * 68 + 8 * (4 + 5)
    assert found["decode"].operations == 4 * (a_completion + 2 * 20)
    logits = 4 * 3 * 20
    packed = 2 * a_prompt + 4 * a_completion
    assert found["training, packed"].operations == 3 * (packed + logits)
    whole = 4 * (5 * 68 + 8 * (1 + 2 + 3 + 4 + 5))
    assert found["training, unpacked"].operations == 3 * (whole + logits)


def test_floor_counts_bytes_by_hand():
    found = floor.count(HAND, **WORK)
    weights = 4 * (34 + 10)  # with the embedding, that the logits are made with
    assert found["prefill"].bytes_moved == weights
    # two steps read all weights; keys and values of 2 floats, of 4 rows over 4 and 5 tokens
    assert found["decode"].bytes_moved == 2 * weights + 4 * (4 + 5) * 4 * 4
    # read: D for q, k, v; 2 for o; D for gate, up; F for down. Written: 3 of 2, then D, 2 F, D
    passed = 4 * ((2 + 6) + (2 + 2) + (2 + 6) + (3 + 2))
    assert found["training, packed"].bytes_moved == 3 * ((6 + 8) * passed + weights)
    assert found["optimiser"].bytes_moved == 7 * weights


def test_floor_counts_the_weights_that_the_model_has(folder):
    model, shape = AutoModelForCausalLM.from_pretrained(folder), SHAPES["minute"]
    matrices = [p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    assert shape.layer_weights == sum(matrices)
    assert shape.width * shape.vocab == model.get_input_embeddings().weight.numel()


def test_floor_of_a_phase_is_the_longer_of_both():
    work = floor.Work(operations=6.0, bytes_moved=10.0)
    assert work.seconds(operations_per_s=2.0, bytes_per_s=10.0) == 3.0
    assert work.seconds(operations_per_s=6.0, bytes_per_s=2.0) == 5.0


def test_all_reduce_within_a_node_by_hand():
    links = scaling.Links(8, inside_gb_s=2.0, outside_gb_s=1.0, latency_s=0.0)
    # 8 GPUs: each sends 7/8 of 8 GB twice, at 2 GB/s
    assert scaling.all_reduce_seconds(8e9, 8, links) == pytest.approx(7.0)
    assert scaling.all_reduce_seconds(8e9, 1, links) == 0.0


def test_all_reduce_among_nodes_by_hand():
    links = scaling.Links(8, inside_gb_s=2.0, outside_gb_s=1.0, latency_s=0.01)
    # besides the 7 s within: 7/8 of each GPU's 1 GB twice at 1 GB/s; 14 + 14 messages
    assert scaling.all_reduce_seconds(8e9, 64, links) == pytest.approx(7.0 + 1.75 + 0.28)
    with pytest.raises(ValueError, match="don't fill nodes"):
        scaling.all_reduce_seconds(8e9, 12, links)


def test_scaling_of_an_update_by_hand():
    links = scaling.Links(8, inside_gb_s=2.0, latency_s=0.0, straggling=1.25)
    alone = scaling.update_seconds(8.0, 4.0, 8e9, 1, links)
    assert alone == {"sampling": 8.0, "learning": 4.0, "all-reduce": 0.0, "update": 12.0}
    # a share of one eighth takes what was measured for it: more than an eighth of the sampling
    shared = scaling.update_seconds(2.0, 0.5, 8e9, 8, links)
    assert shared["sampling"] == 2.5 and shared["all-reduce"] == pytest.approx(7.0)
    assert shared["update"] == pytest.approx(10.0)


def test_scaling_counts_the_adapters_that_peft_makes(folder):
    policy = load_policy(folder, lora_rank=4)
    trained = sum(p.numel() for p in policy.trainable().values())
    assert scaling.adapters(folder, 4) == trained


def test_scaling_reads_an_updates_time_without_the_first(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    line = '{"update": %d, "time/rollout_s": %f, "time/train_s": %f, "tokens/sampled": 7}\n'
    metrics.write_text('{"sft_step": 1}\n' + line % (1, 99, 99) + line % (2, 1, 2) * 2)
    found = scaling.read_times(metrics)
    assert found == {"update_s": 3.0, "sampling_s": 1.0, "learning_s": 2.0, "sampled": 14}


def test_workload_prompts_have_their_length(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for length in (10, 50, 200):
        for seed in range(20):
            assert len(prompt_ids(tokenizer, prompt(seed, length))) == length
    assert prompt(0, 50) != prompt(1, 50)
    assert not set(LETTERS) & set("aeiouy")  # no word without one of them


def test_workload_never_ends(folder):
    policy = load_policy(folder)
    ids = torch.tensor(grouped(policy, 4, 1, 30))
    with torch.no_grad():
        probability = policy.causal_lm(input_ids=ids).logits[:, -1].softmax(-1)
    assert probability[:, policy.stop_ids].max() < 1e-12
    asked = grouped(policy, 2, 3, 20)
    written = TorchSampler(policy).sample(asked, SamplingParams(300, seed=1))
    assert [len(completion.token_ids) for completion in written] == [300] * 6


def test_vs_generate_both_sides_sample_as_many_tokens(folder):
    work = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 12, "max_tokens": 6}
    for side in (vs_generate.ours, vs_generate.generate):
        assert side(folder, calls=2, **work)["sampled"] == [2 * 2 * 6] * 2


@pytest.mark.slow
def test_vs_trl_both_sides_sample_as_many_tokens(folder):
    work = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 12, "max_tokens": 6, "steps": 2}
    script = vs_trl.__file__
    given = {"folder": folder, "gpu": False, "lora_rank": 0, **work}
    ours = pairs.in_child(script, "picorl", tokens=64, **given)
    theirs = pairs.in_child(script, "trl", rows=2, **given)
    for found in (ours, theirs):
        assert found["sampled"] == [2 * 2 * 6] * 3  # one step to warm up
        assert found["prompt_tokens"] == 12
        assert len(found["steps_s"]) == 2


def test_memory_both_passes_compute_the_same_loss(folder):
    policy = load_policy(folder)
    group = memory.rollouts(group_size=3, prompt_tokens=7, completion_tokens=5, vocab=384)
    policy.micro_batch_tokens = 17  # two passes of ours
    gradients = []
    for run in (memory.ours, memory.plain):
        policy.model.zero_grad()
        loss = run(policy, group)
        gradients.append([p.grad.clone() for p in policy.model.parameters()] + [loss])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_memory_changes_one_thing_at_a_time():
    cases = memory.grid(memory.Args())
    first = cases[0]
    assert first["vocab"] == 150_000
    assert all(sum(case[k] != first[k] for k in first) == 1 for case in cases[1:])


def test_pairs_compare_what_ran_side_by_side():
    order = []

    def side(name, seconds):
        return lambda: order.append(name) or {"s": seconds}

    found = pairs.in_turn({"a": side("a", 1.0), "b": side("b", 4.0)}, 2, "s")
    assert order == ["a", "b", "a", "b"]
    assert pairs.ratios(*([x["s"] for x in found[name]] for name in "ab")) == [0.25, 0.25]
    assert pairs.verdict(0.6, 0.6) == "at most 0.6: met"
    assert pairs.verdict(1.4, 1.5, at_most=False) == "at least 1.5: missed"


def test_pairs_tell_why_a_child_failed():
    with pytest.raises(RuntimeError, match="KeyError: 'no such part'"):
        pairs.in_child(vs_generate.__file__, "no such part")


def test_tables_have_a_cell_for_each_heading():
    sizes = {"num_prompts": 2, "group_size": 2, "prompt_tokens": 50, "max_tokens": 3, "budget": 12}
    step = {"step_s": 2.0, "sampling_s": 1.0}
    on_gpu = step | {"memory_gb": {"training": 3.0, "all": 4.0}}
    trained = sizes | {"size": "4M", "lora_rank": 0}
    rate = {"tokens_per_s": 5.0}
    passes = {"vocab": 150_000, "group_size": 2, "prompt_tokens": 3, "completion_tokens": 4}
    counted = {name: vars(work) for name, work in floor.count(HAND, **WORK).items()}
    rates = {"many": 1e9, "decode": 1e9, "copy": 1e9}
    spent = {"spent": {"learning": {"matrices": 3.0, "attention": 0.0, "the rest": 1.0}}}
    limits = sizes | spent | {"rates": rates, "floor": counted, "measured": [step]}
    waits = {"`--help`": [{"seconds": 1.4}], "first update": [{"seconds": 70, "warm_start": 60}]}
    devices = {"1": [step], "8": [step]}
    shared = sizes | {"shape": "4M", "devices": devices, "gradient_bytes": 8, "lora_rank": 4}
    launched = {"update_s": 3.0, "sampling_s": 1.0, "learning_s": 2.0}
    tables = [
        vs_trl.table([trained | {"sides": {"picoRL": [step], "TRL": [step]}}]),
        vs_trl.table([trained | {"sides": {"picoRL": [on_gpu], "TRL": [on_gpu]}}]),
        vs_generate.table(
            [sizes | {"shape": "4M", "sides": {"TorchSampler": [rate], "generate": [rate]}}]
        ),
        memory.table([passes | {"sides": {"picoRL": [{"peak_mb": 1}], "plain": [{"peak_mb": 2}]}}]),
        floor.table([limits])[:-6],
        floor.spent_table([limits]),
        startup.table([{"waits": waits, "operations": 3e9, "rate": 2e9}]),
        scaling.model_table([shared | {"links": vars(scaling.Links())}]),
        scaling.ranks_table(
            [sizes | {"shape": "4M", "ranks": 2, "sides": {"1": [launched], "2": [launched]}}]
        ),
    ]
    for lines in tables:
        rows = [line for line in lines if line.startswith("|")]
        assert len(rows) > 2 and len({row.count("|") for row in rows}) == 1, rows
    assert "1.00 [1.00, 1.00] of it | at most 0.6: missed" in tables[0][-1]
    assert floor.table([limits])[-5:-2] == floor.spent_table([limits])
    assert floor.spent_table([limits])[-1] == "| 50 | learning | 75% | 0% | 25% |"


def test_the_floor_of_the_warm_start_counts_the_tiny_policy_as_it_is(tmp_path):
    save_tiny(tmp_path, 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = startup.warm_start()
    assert SHAPES["tiny"].vocab == model.config.vocab_size
    trained = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    tokens_of_a_step = 32 * 44  # about, by hand: a prompt of 38, an answer of 4 or 16
    assert SHAPES["tiny"].layer_weights == trained
    assert found["operations"] == pytest.approx(6 * trained * 800 * tokens_of_a_step, rel=0.25)


def test_what_is_profiled_is_all_of_the_time_by_kind():
    spent: dict = {}
    square = torch.ones(300, 300)

    def multiply(times):
        for _ in range(times):
            (square @ square).add_(1).softmax(-1)
        return times

    started = time.perf_counter()
    assert floor.watched(multiply, "learning", spent)(100) == 100
    took = time.perf_counter() - started
    seconds = spent["learning"]
    assert list(seconds) == ["matrices", "attention", "other operations", "Python and the rest"]
    assert seconds["matrices"] > seconds["other operations"] > 0 < seconds["attention"]
    assert sum(seconds.values()) <= took + 0.001


def test_page_has_marks_for_every_table(tmp_path):
    page = tmp_path / "README.md"
    page.write_text((FOLDER / "README.md").read_text())
    for name in SCRIPTS:
        pairs.write_table(page, name, [f"| of {name} |"])
        pairs.write_table(page, name, [f"| of {name}, again |"])
        assert page.read_text().count(f"| of {name}") == 1
    with pytest.raises(ValueError, match="no marks"):
        pairs.write_table(page, "nothing", [])


def test_page_commands_are_understood():
    for script in ("vs_trl", "vs_generate", "memory", "floor", "scaling", "startup"):
        done = subprocess.run(
            [sys.executable, str(FOLDER / f"{script}.py"), "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0 and "--rounds" in done.stdout, script
