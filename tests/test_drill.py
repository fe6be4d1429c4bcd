"""The drill: every fault is found, every right repair accepted, whatever its words."""

from pathlib import Path

import pytest

from core.workshop import drill
from core.workshop import grpo_on_one_page as page

SOURCE = drill.RIGHT.read_text(encoding="utf-8")
LOSS = "-(surrogate * mask).sum() / mask.sum()"
REPAIRS = {  # fault: our text, and the same in other words
    "end_left_out": (
        "(ends.cumsum(1) - ends == 0)",
        "(torch.cat([ends[:, :1] * 0, ends[:, :-1]], 1).cummax(1).values == 0)",
    ),
    "off_by_one": ("[:, -n - 1 : -1] /", "[:, :-1][:, -n:] /"),
    "temperature_left_out": (
        "-n - 1 : -1] / TEMPERATURE  # [B, n, V]\n    return logits.log",
        "-n - 1 : -1]\n    return (logits / TEMPERATURE).log",
    ),
    "padding_is_seen": ("(ids, attention_mask=attention)", "(ids, attention)"),
    "deviation_of_the_batch": (
        "groups.std(1, keepdim=True)",
        "groups.std(1, correction=0)[:, None]",
    ),
    "maximum": (
        "torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])",
        "advantages[:, None] * torch.where(advantages[:, None] > 0, ratio.clamp(max=1 + CLIP),"
        " ratio.clamp(min=1 - CLIP))",
    ),
    "groups_interleaved": ("rewards.view(-1, G)", "torch.stack(rewards.split(G))"),
    "mean_with_padding": (LOSS, "-surrogate[mask.bool()].mean()"),
    "mean_of_row_means": (LOSS, "-(mask / mask.sum() * surrogate).sum()"),
    "old_is_renewed": ("(logprobs, old[rows],", "(logprobs, old.index_select(0, rows).detach(),"),
    "gradients_add_up": ("            optimizer.zero_grad()\n", "            model.zero_grad()\n"),
    "advantages_not_shuffled": ("advantages[rows]", "advantages.gather(0, rows)"),
}
NO_REPAIRS = [  # our text, and another
    ("[:, -n - 1 : -1]", "[:, -n - 2 : -2]"),
    ("-n - 1 : -1] / TEMPERATURE", "-n - 1 : -1] / TEMPERATURE**2"),
    ("groups.std(1, keepdim=True)", "groups.var(1, keepdim=True)"),
    ("(std + 1e-4)", "1.0"),
    (LOSS, LOSS[1:]),
    ("(logprobs, old[rows],", "(logprobs, logprobs,"),
    ("optimizer.zero_grad()", "optimizer.zero_grad() if _ == 0 else None"),
    ("advantages[rows]", "advantages[rows.flip(0)]"),
    ("def update(", "def renamed("),
]
FILE = Path("drill.py")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def changed(ours, theirs):
    """The page with another text in the place of ours."""
    assert SOURCE.count(ours) == 1, ours
    return SOURCE.replace(ours, theirs)


@pytest.mark.parametrize("pair", NO_REPAIRS, ids=range(len(NO_REPAIRS)))
def test_a_wrong_repair_is_refused(pair):
    FILE.write_text(changed(*pair), encoding="utf-8")
    assert "This does not hold yet: " in drill.check(drill.load(FILE))


@pytest.mark.parametrize("seed", range(1, 13))
def test_a_fault_is_refused_and_a_repair_in_other_words_is_named(capsys, seed):
    name = drill.ALL[seed - 1][0]
    assert drill.execute(["--seed", str(seed)]) == 0 and drill.execute(["--check"]) == 1
    assert "This does not hold yet: " in capsys.readouterr().out
    repaired = drill.TITLE.format(seed) + changed(*REPAIRS[name]).partition('"""\n')[2]
    FILE.write_text(repaired, encoding="utf-8")
    assert drill.execute(["--check"]) == 0
    assert f"Right. The fault was {name}: " in capsys.readouterr().out


def test_mistakes_are_said_in_a_line(capsys):
    for text, arguments, message in (
        (None, ["--check"], "there is no"),
        ("x = 1", [], "rename or delete it"),
        ("x = 1", ["--check"], "the drill's number"),
        ('"""Drill 1:"""\nx = ', ["--check"], "SyntaxError"),
    ):
        if text:
            FILE.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit, match="2"):
            drill.execute(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_loop_without_a_fault_learns():
    before, after = page.train(seed=5)
    assert before < 0.5 and after > 0.9
