"""The drill: each fault breaks its facts and no others, and what counts is what a repair does."""

import re
from pathlib import Path

import pytest

from core.workshop import drill
from core.workshop.drill_facts import FACTS, PROBES, ask_all
from core.workshop.drill_faults import FAULTS

SAME_IN_OTHER_WORDS = [  # right, and not our text
    ("group_advantages", "return ((groups - mean) / (std + 1e-4)).flatten()",
     "centred = groups - groups.sum(1, keepdim=True) / G\n"
     "    return (centred / (centred.square().mean(1, keepdim=True).sqrt() + 1e-8)).reshape(-1)"),
    ("compute_loss", "torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])",
     "torch.where(advantages[:, None] > 0, ratio.clamp(max=1 + CLIP), ratio.clamp(min=1 - CLIP))"
     " * advantages[:, None]"),
    ("compute_loss", "loss = ((BETA * kl - surrogate) * mask).sum() / mask.sum()",
     "loss = (BETA * kl - surrogate)[mask.bool()].mean()"),
    ("compute_loss", "(ref - logprobs).exp() - (ref - logprobs) - 1",
     "torch.expm1(ref - logprobs) + logprobs - ref"),
    ("update", "            optimizer.zero_grad()\n            loss.backward()\n",
     "            model.zero_grad(set_to_none=True)\n            loss.backward()\n"),
    ("update", "old = token_logprobs(model, ids, attention, mask.shape[1])",
     "order = torch.arange(len(ids))\n"
     "        old = torch.cat([token_logprobs(model, ids[i : i + 1], attention[i : i + 1],\n"
     "                                        mask.shape[1]) for i in order])"),
    ("token_logprobs", "return logits.log_softmax(-1).gather(-1, ids[:, -n:, None]).squeeze(-1)",
     "targets = ids[:, -n:]\n"
     "    return -torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, "
     "reduction='none')"),
    ("sample", "p.multinomial(1)",
     "torch.distributions.Categorical(logits=logits).sample()[:, None]"),
    ("reward", "return 1.0 if int(found[0]) == right else 0.1",
     "return 1.0 if found == [str(right)] else 0.1"),
    ("evaluate", "    *_, rewards = play(", "    with torch.random.fork_rng():\n"
     "        *_, rewards = play("),
    ("play", "encode(list(questions))", "encode(questions=list(questions))"),
    ("play", "return torch.cat([prompts, answers], 1), torch.cat([attention, mask], 1), mask",
     "ids = torch.hstack([prompts, answers])\n"
     "    return ids, torch.hstack([attention, mask]), mask"),
]  # fmt: skip
NEW_MISTAKES = [  # none of the drill's own
    ("kl - surrogate", "kl + surrogate", "good_tokens_rise"),
    ("ratio = (logprobs - old).exp()", "ratio = 1 + logprobs - old", "gradient_has_the_ratio"),
    ("- surrogate) * mask).sum()", "- surrogate)).sum()", "only_the_mask_is_trained"),
    ("(rewards == 1.0)", "(rewards > 0)", "accuracy_counts_the_right"),
    ("p.multinomial(1)", "p.argmax(-1, keepdim=True)", "draws_are_the_policys"),
    ("len(answers) < MAX_TOKENS and ", "", "answers_end"),
    ("< MAX_TOKENS", "<= MAX_TOKENS", "answers_end"),
    ("ended.all()", "ended.any()", "answers_end"),
    ("        attention = torch.cat([attention, torch.ones_like(last)], dim=1)\n", "",
     "draws_are_the_policys"),
    ("sum(env.counts.values())", "len(env.counts)", "tasks_know_their_answer"),
    ("answers.where(mask == 1, PAD)", "answers", "answers_meet_their_questions"),
    ("torch.cat([attention, mask], 1), mask", "torch.ones_like(torch.cat([attention, mask], 1)), "
     "mask", "padding_is_marked"),
    ("EVALUATED, greedy=True", "EVALUATED", "evaluation_is_greedy"),
    ("greedy=False", "greedy=True", "evaluation_is_greedy"),
    ("after = evaluate(model)", "after = evaluate(reference)", "evaluation_is_greedy"),
    ("prompts, attention = encode(", "torch.manual_seed(0)\n    prompts, attention = encode(",
     "draws_are_new"),
    ("(ref - logprobs).exp() - (ref - logprobs)", "(logprobs - ref).exp() - (logprobs - ref)",
     "kl_pulls_back"),
    ("ratio = (logprobs - old).exp()", "ratio = (logprobs - old).mean(1, keepdim=True).exp()"
     ".expand_as(old)", "gradient_has_the_ratio"),
    ("(model.parameters(), 1.0)", "(model.parameters(), 0.1)", "long_gradients_are_scaled"),
    ("lr=LEARNING_RATE", "lr=0 * LEARNING_RATE", "optimizer_has_the_policy"),
    ("        advantages = group_advantages", "        optimizer = torch.optim.AdamW("
     "model.parameters(), lr=LEARNING_RATE)\n        advantages = group_advantages",
     "optimizer_has_the_policy"),
    ("model, prompts, attention, greedy)", "model, prompts, attention, greedy)\n"
     "    right = right[1:] + right[:1]", "answers_meet_their_questions"),
]  # fmt: skip


def fails(text: str) -> set[str]:
    return set(ask_all(drill.as_module(text)))


def test_every_fact_holds_for_the_loop_without_a_fault() -> None:
    assert fails(drill.SOURCE) == set()
    assert sorted(name for names in PROBES.values() for name in names) == sorted(FACTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_breaks_its_facts_and_no_others(name: str) -> None:
    assert fails(drill.with_faults([name])) == set(FAULTS[name].breaks)


def test_every_fault_is_drawn_and_three_do_not_hide_one_another() -> None:
    drawn = [drill.draw(seed) for seed in range(80)]
    assert {name for names in drawn for name in names} == set(FAULTS)
    for names in drawn:
        assert len({FAULTS[name].function for name in names}) == 3
    for names in drawn[:5]:
        broken = {fact for name in names for fact in FAULTS[name].breaks}
        assert fails(drill.with_faults(names)) == broken


@pytest.mark.parametrize(("function", "ours", "theirs"), SAME_IN_OTHER_WORDS)
def test_a_right_repair_counts_whatever_its_words(function: str, ours: str, theirs: str) -> None:
    assert drill.SOURCE.count(ours) == 1 and f"def {function}" in drill.SOURCE
    assert fails(drill.SOURCE.replace(ours, theirs)) == set()


@pytest.mark.parametrize(("ours", "theirs", "fact"), NEW_MISTAKES)
def test_a_new_mistake_breaks_a_fact(ours: str, theirs: str, fact: str) -> None:
    assert drill.SOURCE.count(ours) == 1
    assert fact in fails(drill.SOURCE.replace(ours, theirs))


def test_a_new_mistake_is_named_and_not_counted(tmp_path: Path) -> None:
    file = tmp_path / "drill.py"
    file.write_text(drill.SOURCE.replace("kl - surrogate", "kl + surrogate"), encoding="utf-8")
    left, new = drill.check(file, drill.draw(1))
    assert left == [] and any(FACTS["good_tokens_rise"] in sentence for sentence in new)


def test_repairing_one_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "drill.py"
    drill.write(1, file)
    names = drill.draw(1)
    first_line = file.read_text(encoding="utf-8").partition("\n")[0]
    assert drill.seed_of(file) == 1 and len(file.read_text(encoding="utf-8").splitlines()) <= 150
    for repaired in range(4):
        text = drill.with_faults(names[repaired:])
        unrelated = re.sub(r"\blogits\b", "scores", text.replace("scores", "found"))
        unrelated = unrelated.replace(".scores", ".logits") + "\n# a comment\n"
        file.write_text(re.sub(r'^"""', first_line + "\n", unrelated, count=1), encoding="utf-8")
        assert drill.check(file, names) == (names[repaired:], [])
        code = drill.execute(["--check", "--file", str(file)])
        assert code == (0 if repaired == 3 else 1)
        assert f"{repaired} of 3 repaired." in capsys.readouterr().out


def test_hints_narrow_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are about the first fault that is left."""
    file, names = tmp_path / "drill.py", drill.draw(1)
    drill.write(1, file)
    head = file.read_text(encoding="utf-8").partition("\n")[0]
    file.write_text(re.sub('^"""', head + "\n", drill.with_faults(names[1:])), encoding="utf-8")
    shown = []
    for level in ("1", "2", "3"):
        assert drill.execute(["--file", str(file), "--hint", level]) == 0
        shown.append(capsys.readouterr().out)
    assert "accuracy" in shown[0] and f"`{FAULTS[names[1]].function}`" in shown[1]
    lines = shown[2].partition(": ")[2].strip().split(" .. ")
    assert all(line in drill.SOURCE for line in lines)
    assert not all(line in file.read_text(encoding="utf-8") for line in lines)
    assert drill.execute(["--file", str(file), "--answers"]) == 0
    answers = capsys.readouterr().out
    assert all(FAULTS[name].source in answers for name in names)


def test_every_fault_was_measured_and_five_runs_without_one() -> None:
    assert all(drill.measured(name) for name in FAULTS)
    assert all(run["before"] < 0.5 and run["accuracy"] > 0.9 for run in drill.measured("none"))
    assert len(drill.measured("none")) == 5


def test_an_import_may_go(tmp_path: Path) -> None:
    """As with a reference that is loaded, not copied."""
    file = tmp_path / "drill.py"
    text = drill.SOURCE.replace("import copy\n", "")
    again = "AutoModelForCausalLM.from_pretrained(PRETRAINED)"
    file.write_text(text.replace("copy.deepcopy(model)", again), encoding="utf-8")
    assert drill.check(file, drill.draw(1)) == ([], [])


def test_mistakes_are_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "drill.py"
    assert drill.execute(["--file", str(file), "--check"]) == 2
    assert "python -m core.workshop.drill" in capsys.readouterr().err
    drill.write(1, file)
    given = file.read_text(encoding="utf-8")
    assert drill.execute(["--file", str(file), "--seed", "2"]) == 2
    assert file.read_text(encoding="utf-8") == given and "rename" in capsys.readouterr().err
    file.write_text(given.replace("Drill 1", "Exercise"), encoding="utf-8")
    assert drill.execute(["--file", str(file), "--check"]) == 2
    file.write_text(given + "\nsyntax error", encoding="utf-8")
    assert drill.execute(["--file", str(file), "--check"]) == 2
    file.write_text(given.replace("def play(", "def plays("), encoding="utf-8")
    assert drill.execute(["--file", str(file), "--check"]) == 2
    assert "lacks play" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        drill.execute(["--hint", "4"])


@pytest.mark.slow
def test_the_loop_without_a_fault_learns() -> None:
    before, after = drill.as_module(drill.SOURCE).train(seed=5)
    assert before < 0.5 and after > 0.9
