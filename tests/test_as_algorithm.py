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

SCRATCH = Path("scratch.py")
GRPO = grpo.Options("grpo", "group", 0.2, 0.2, "token")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_algorithm(exercises: tuple[int, ...] = (3, 5, 8), **others: str) -> Exercises:
    SCRATCH.write_text(solved(**others), encoding="utf-8")
    return Exercises(checker.load(SCRATCH), exercises)


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


@pytest.mark.parametrize("exercises, algo, options", [
    ((3, 5), grpo, GRPO), ((4, 10), reinforce, reinforce.Options("group")),
    ((5, 7), ppo, ppo.Options()),
])  # fmt: skip
def test_advantages_and_loss_are_those_of_the_library(exercises, algo, options):
    results = []
    for module in (make_algorithm(exercises), algo):
        tokens = make_tokens()
        found = module.compute_advantages(tokens, options)
        tokens.add(found if isinstance(found, dict) else {"advantages": found})
        tokens.values = tokens.old_values  # so the values have no error in the clip
        loss, metrics = module.compute_loss(tokens, options)
        [gradient] = torch.autograd.grad(loss, tokens.logprobs)
        results.append(([*tokens.vectors().values(), loss, gradient], metrics))
    (ours, metrics), (theirs, same) = results
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert metrics == pytest.approx(same)


def test_draw_returns_the_log_prob_of_the_token_and_follows_the_numbers():
    draw = make_algorithm().draw
    logits, params = torch.randn(40, 9), SamplingParams(1, temperature=0.5)
    (ids, logprobs), (again, _), (other, _) = (
        draw(logits, params, torch.full((40,), number)) for number in (0.3, 0.3, 0.4)
    )
    assert torch.equal(ids, again) and not torch.equal(ids, other)
    expected = (logits / 0.5).log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    assert torch.allclose(logprobs, expected)


@pytest.mark.parametrize("code, message", [("x.nope", "AttributeError"), ("x[:1]", "shape")])
def test_wrong_code_is_one_line_that_names_the_exercise(code, message):
    text = f"def clipped_loss(x, old, a, mask, clip=0.2):\n    return {code}\n"
    with pytest.raises(UsageError, match=f"^[^\n]*exercise 5[^\n]*{message}[^\n]*$"):
        make_algorithm(clipped_loss=text).compute_loss(make_tokens(), GRPO)


# 9 is not used, and the bug of 10 has not been repaired
WRONG = solved().replace("ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(1 - clip)")
WRONG = WRONG.replace("optimizer.step()", "pass").replace(*BUG)


@pytest.mark.parametrize("text, settings, used, wrong", [
    (solved_up_to(4), {}, "3, 4", []), (solved(), {}, "3, 5, 8", []),
    (solved(), {"kl_coef": 0.1, "options": Options("10", "4")}, "4, 6, 8, 10", []),
    (solved_up_to(0), {}, "needs exercise 3 .* exercise 4", []),
    (solved_up_to(5), {"kl_coef": 0.1}, "needs exercise 6", []),
    (WRONG, {"options": Options("10")}, "5, 8, 10", ["exercise 5", "exercise 10"]),
], ids=range(6))  # fmt: skip
def test_load_uses_what_is_written_and_remarks_what_is_wrong(text, settings, used, wrong):
    SCRATCH.write_text(text, encoding="utf-8")
    cfg = Config(algo="scratch", **{"options": Options(), **settings})
    if "needs" in used:
        with pytest.raises(UsageError, match=used):
            load_scratch(cfg)
        return
    algorithm = load_scratch(cfg)
    assert algorithm.variant == f"exercises {used}"
    assert [remark.split(" is ")[0] for remark in algorithm.remarks] == wrong
    assert (algorithm.draw is sampler.draw) == ("8" not in used)


SHORT = """--num-updates 1 --num-prompts 2 --group-size 4 --num-epochs 2 --num-minibatches 2
    --max-tokens 12 --max-turns 2 --eval-num-tasks 0 --lr 1e-3 --kl-coef 0.3 --tis-cap 0""".split()


def test_solutions_train_as_the_library_does(command):
    """With the library's sampler, exercise 8 not being written yet: the same metrics."""
    text = solved(sample="def sample(logits, temperature, generator):\n    raise TODO\n")
    SCRATCH.write_text(text, encoding="utf-8")
    code, out, _ = command(*SHORT, "--algo", "scratch", "--run-name", "mine")
    assert code == 0 and "picoRL · scratch (exercises 3, 5, 6) · letter_counting" in out
    ours = "--grpo.loss-type grpo --grpo.aggregation token --kl-estimator k3".split()
    assert command(*SHORT, *ours, "--run-name", "ours")[0] == 0
    a, b = (read_records(Path(f"runs/{name}/metrics.jsonl"))[-1] for name in ("mine", "ours"))
    assert a.keys() == b.keys()
    assert all(b[name] > 0 for name in ("grad/norm", "kl/reference", "clip/high_fraction"))
    numbers = {k: v for k, v in b.items() if type(v) is float and not k.startswith("time/")}
    # rounding grows with the number, and differs between processors
    assert {k: a[k] for k in numbers} == pytest.approx(numbers, rel=3e-5, abs=1e-5)
    assert Path("runs/mine/scratch.py").read_text(encoding="utf-8") == text


def test_a_copy_of_scratch_may_have_any_name_and_a_whole_algorithm_that_of_scratch():
    whole = "from algorithms.grpo import Options, compute_advantages, compute_loss\n"
    for name, text, module in (
        ("copy.py", solved(), "core.workshop.as_algorithm"),
        ("scratch.py", whole, "algorithms.grpo"),
    ):
        Path(name).write_text(text, encoding="utf-8")
        assert options_of(str(Path(name).absolute())).__module__ == module
