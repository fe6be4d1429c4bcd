"""`python -m environments`: the list, an episode to watch, an episode to play."""

import re

import pytest

import environments.__main__ as command
from core.types import UsageError
from environments.base import MultiAgentEnv, Step
from environments.registry import list_envs

NEEDS_A_SERVER = {"openenv", "remote"}  # the one runs elsewhere, the other plays one of these
SHOWN = [
    *sorted(set(list_envs()) - NEEDS_A_SERVER), "tic_tac_toe:opponent=self",
    "iterated_game:opponent=self", "gymnasium:id=Acrobot-v1,max_steps=9",
    "textarena:id=ConnectFour-v0", "textarena:id=Poker-v0", "remote:env=snake",
]  # fmt: skip


def total(out):
    return float(re.search(r"sum of rewards: (\S+)\n$", out)[1])


def test_the_list_names_every_environment_with_its_keys(capsys):
    command.main([])
    out = capsys.readouterr().out
    assert all(name[:8] in out for name in list_envs())
    assert "n_hops" in out and "opponent" in out


@pytest.mark.parametrize("spec", SHOWN)
def test_every_environment_can_be_watched_and_the_seed_decides_the_episode(spec, capsys):
    seen = []
    for _ in range(2):
        command.main(["show", spec, "--seed", "5"])
        seen.append(capsys.readouterr().out)
    assert seen[0] == seen[1]
    paid = [float(x) for x in re.findall(r" ?reward ([+-]\S+)\n", seen[0])]
    assert paid and total(seen[0]) == pytest.approx(sum(paid), abs=0.01)
    assert ("demonstrator: " in seen[0]) != ("random player: " in seen[0])


def test_a_random_player_plays_well_formed_moves_and_not_always_the_same(capsys):
    for spec in ("tic_tac_toe:opponent=self", "iterated_game:opponent=self", "textarena"):
        episodes = set()
        for seed in range(8):
            command.main(["show", spec, "--seed", str(seed)])
            out = capsys.readouterr().out
            assert "random player: " in out and "-0.1" not in out and "'invalid': True" not in out
            episodes.add(tuple(re.findall("random player: .*", out)))
        assert len(episodes) > 4


def test_what_a_person_types_is_played(monkeypatch, capsys):
    typed = iter(["no idea", "<move>5</move>", *(f"<move>{i}</move>" for i in range(1, 10))])
    monkeypatch.setattr(command.CONSOLE, "input", lambda prompt: next(typed))
    command.main(["play", "tic_tac_toe:opponent=perfect", "--seed", "2"])
    out = capsys.readouterr().out
    assert "reward -0.1" in out and "O takes" in out and "demonstrator" not in out
    assert total(out) <= 0


class Silent(MultiAgentEnv):
    def reset(self, seed):
        return {"a": [{"role": "user", "content": "Say something, [Player 1]."}]}

    def step(self, responses):
        return {"a": Step(None, 0.0, True)}


def test_where_nobody_can_be_watched_one_line_says_so(capsys):
    with pytest.raises(UsageError, match="no random player: play it instead"):
        command.episode(Silent(), seed=0, by_hand=False)
