"""`--algo scratch`: the participant's functions with the signatures of an algorithm."""

from pathlib import Path

import pytest
import torch
from test_workshop import solved

from algorithms import grpo, ppo, reinforce
from algorithms.tokens import Tokens
from core import sampler
from core.algorithm import options_of
from core.config import Config
from core.faults import UsageError
from core.files.run_log import read_records
from core.sampler import SamplingParams
from core.workshop import checker
from core.workshop.as_algorithm import Exercises, Options, load_scratch
from core.workshop.mistakes import BUG

OPTIONS = grpo.Options("grpo", "group", 0.2, 0.2, "token")


def make_algorithm(
    folder: Path, exercises: tuple[int, ...] = (3, 5, 8), **others: str
) -> Exercises:
    (folder / "scratch.py").write_text(solved(**others), encoding="utf-8")
    return Exercises(checker.load(folder / "scratch.py"), exercises)


def solved_up_to(number: int) -> str:
    """The text of scratch.py with the exercises after `number` not written yet."""
    later = [e.name for e in checker.EXERCISES[number:9]]
    return solved(**{name: f"def {name}(*_):\n    raise TODO\n" for name in later})


def make_tokens() -> Tokens:
    """20 tokens of 6 rollouts of one turn; groups of 3, 2 and 1 rollouts in mixed order. Two tokens
    have weight 0, as --mask-truncated-completions gives them."""
    generator = torch.Generator().manual_seed(1)
    logprobs, old, advantages, rewards, values = torch.randn(5, 20, generator=generator)
    rollout = torch.arange(6).repeat_interleave(torch.tensor([5, 1, 3, 4, 2, 5]))
    counted = torch.ones(20).index_fill(0, torch.tensor([9, 10]), 0)
    return Tokens(sequence=rollout, rollout=rollout, turn=0 * rollout, rewards=rewards,
                  group=torch.tensor([7, 1, 7, 1, 7, 4])[rollout], in_loss=rollout != 3,
                  old_logprobs=logprobs + 0.4 * old, old_values=values, advantages=advantages,
                  importance_weights=2 * values.sigmoid(), discounts=torch.ones(20),
                  token_weights=counted / 20, logprobs=logprobs.requires_grad_())  # fmt: skip


def test_loss_and_gradient_of_exercise_4_are_those_of_reinforce(tmp_path):
    results = []
    for module in (make_algorithm(tmp_path, (3, 4)), reinforce):
        tokens = make_tokens()
        loss, metrics = module.compute_loss(tokens, None)
        results.append((loss, *torch.autograd.grad(loss, tokens.logprobs), metrics))
    torch.testing.assert_close(*(result[:2] for result in results), atol=1e-6, rtol=1e-5)
    assert results[0][2] == pytest.approx(results[1][2])


@pytest.mark.parametrize("exercises, algo, options", [
    ((3, 5), grpo, OPTIONS), ((10, 5), reinforce, reinforce.Options("group")),
    ((5, 7), ppo, ppo.Options()),
])  # fmt: skip
def test_advantages_are_those_of_the_library(tmp_path, exercises, algo, options):
    ours = make_algorithm(tmp_path, exercises).compute_advantages(make_tokens(), None)
    theirs = algo.compute_advantages(make_tokens(), options)
    torch.testing.assert_close(ours, theirs if algo is ppo else {"advantages": theirs})


def test_draw_returns_the_log_prob_of_the_token_and_follows_the_numbers(tmp_path):
    draw = make_algorithm(tmp_path).draw
    logits, params = torch.randn(40, 9), SamplingParams(1, temperature=0.5)
    (ids, logprobs), (again, _), (other, _) = (
        draw(logits, params, torch.full((40,), number)) for number in (0.3, 0.3, 0.4)
    )
    assert torch.equal(ids, again) and not torch.equal(ids, other)
    expected = (logits / 0.5).log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    assert torch.allclose(logprobs, expected)


@pytest.mark.parametrize("code, message", [("x.nope", "AttributeError"), ("x[:1]", "shape")])
def test_wrong_code_is_one_line_that_names_the_exercise(tmp_path, code, message):
    text = f"def clipped_loss(x, old, a, mask, clip=0.2):\n    return {code}\n"
    with pytest.raises(UsageError, match=f"^[^\n]*exercise 5[^\n]*{message}[^\n]*$"):
        make_algorithm(tmp_path, clipped_loss=text).compute_loss(make_tokens(), OPTIONS)


WRONG = solved().replace("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(1 - clip)")


@pytest.mark.parametrize("text, settings, used, wrong", [
    (solved_up_to(4), {}, "3, 4", []), (solved(), {}, "3, 5, 8", []),
    (solved(), {"kl_coef": 0.1, "options": Options("10", "4")}, "4, 6, 8, 10", []),
    (solved_up_to(0), {}, "needs exercise 3 .* exercise 4", []),
    (solved_up_to(5), {"kl_coef": 0.1}, "needs exercise 6", []),
    # 9 is not used, and the bug of 10 has not been repaired
    (WRONG.replace("optimizer.step()", "pass").replace(*BUG), {"options": Options("10")},
     "5, 8, 10", ["exercise 5", "exercise 10"]),
], ids=range(6))  # fmt: skip
def test_load_uses_what_is_written_and_remarks_what_is_wrong(
    tmp_path, monkeypatch, text, settings, used, wrong
):
    monkeypatch.chdir(tmp_path)
    Path("scratch.py").write_text(text, encoding="utf-8")
    cfg = Config(algo="scratch", **{"options": Options(), **settings})
    if "needs" in used:
        with pytest.raises(UsageError, match=used):
            load_scratch(cfg)
        return
    algorithm = load_scratch(cfg)
    assert algorithm.variant == f"exercises {used}"
    assert [remark.split(" is ")[0] for remark in algorithm.remarks] == wrong
    assert (algorithm.draw is sampler.draw) == ("8" not in used)


SHORT = """--num-updates 1 --num-prompts 2 --group-size 4 --num-epochs 2
    --num-minibatches 2 --max-tokens 12 --max-turns 2 --eval-num-tasks 0 --lr 1e-3""".split()


def test_solutions_train_as_the_library_does(command):
    """With the library's sampler, exercise 8 not being written yet: the same metrics."""
    text = solved(sample="def sample(logits, temperature, generator):\n    raise TODO\n")
    Path("scratch.py").write_text(text, encoding="utf-8")
    shared = [*SHORT, "--kl-coef", "0.3", "--tis-cap", "0"]
    code, out, _ = command(*shared, "--algo", "scratch", "--run-name", "mine")
    assert code == 0 and "picoRL · scratch (exercises 3, 5, 6) · letter_counting" in out
    ours = "--grpo.loss-type grpo --grpo.aggregation token --kl-estimator k3".split()
    assert command(*shared, *ours, "--run-name", "ours")[0] == 0
    a, b = (read_records(Path(f"runs/{name}/metrics.jsonl"))[-1] for name in ("mine", "ours"))
    assert a.keys() == b.keys()
    assert all(b[name] > 0 for name in ("grad/norm", "kl/reference", "clip/high_fraction"))
    numbers = {k: v for k, v in b.items() if type(v) is float and not k.startswith("time/")}
    # rounding grows with the number, and differs between processors
    assert {k: a[k] for k in numbers} == pytest.approx(numbers, rel=3e-5, abs=1e-5)
    assert Path("runs/mine/scratch.py").read_text(encoding="utf-8") == text


def test_a_copy_of_scratch_may_have_any_name_and_a_whole_algorithm_that_of_scratch(tmp_path):
    whole = "from algorithms.grpo import Options, compute_advantages, compute_loss\n"
    for name, text, module in (
        ("copy.py", solved(), "core.workshop.as_algorithm"),
        ("scratch.py", whole, "algorithms.grpo"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert options_of(str(tmp_path / name)).__module__ == module
