"""core/extras/league.py: Elo ratings by maximum likelihood, and the games that they are made of."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import load_small

from core.config import Config, resolve
from core.extras import league
from core.extras.league import rate
from core.run import checkpoint
from core.run import folder as run_dir
from environments import registry
from environments.template import Nim


def ratings(won, drawn=None):
    won = np.array(won, dtype=float)
    found = rate([*"abc"][: len(won)], won, np.zeros_like(won) if drawn is None else drawn)
    return {rating.name: rating for rating in found}


def test_two_players_differ_by_the_odds_of_the_score():
    # 3 of 4 games and half of the drawn game of the prior: 3.5 of 5, odds 0.7 / 0.3
    table = ratings([[0, 3], [1, 0]])
    assert table["a"].elo - table["b"].elo == pytest.approx(400 * math.log10(7 / 3))
    assert table["a"].elo + table["b"].elo == pytest.approx(0)
    assert (table["a"].won, table["a"].drawn, table["a"].lost) == (3, 0, 1)


def test_the_interval_of_equal_players_is_that_of_a_proportion():
    # n games with p = 1/2: information n/4 for the difference, so a variance of 1/n for each rating
    drawn = np.array([[0, 15], [15, 0]], dtype=float)
    table = ratings([[0, 42], [42, 0]], drawn)  # 99 games and one of the prior
    half = 1.96 * math.sqrt(1 / 100) * 400 / math.log(10)
    assert table["a"].high == pytest.approx(half) and table["a"].low == pytest.approx(-half)


def test_three_players_get_back_the_ratings_that_made_their_scores():
    elo = np.array([200.0, 50.0, -250.0])
    expected = 1 / (1 + 10 ** ((elo[None, :] - elo[:, None]) / 400))
    table = ratings(1e8 * expected * (1 - np.eye(3)))  # one drawn game more hardly counts
    assert [table[name].elo for name in "abc"] == pytest.approx(elo.tolist())


def test_a_player_who_always_wins_or_never_plays_has_a_finite_rating():
    table = ratings([[0, 10], [0, 0]])
    assert table["a"].elo - table["b"].elo == pytest.approx(400 * math.log10(10.5 / 0.5))
    table = ratings(np.zeros((3, 3)))
    assert all(r.elo == 0 and math.isfinite(r.high) and r.high > 300 for r in table.values())
    assert next(iter(ratings([[0, 1, 1], [5, 0, 5], [1, 1, 0]]))) == "b"


@pytest.fixture
def run(qwen3_folder, tmp_path, monkeypatch):
    class Short(Nim):
        """Any response is a move."""

        def reset(self, seed):
            super().reset(seed)
            self.stones = 5 + seed % 3
            return {"first": [self._message()]}

        def step(self, responses):
            ((agent, text),) = responses.items()
            taken = min(self.stones, 1 + len(text) % 3)
            return super().step({agent: f"<move>{taken}</move>"})

    known = registry.ENVIRONMENTS | {"short": Short}
    monkeypatch.setattr(registry, "ENVIRONMENTS", known)
    monkeypatch.chdir(tmp_path)
    cfg = Config(model_id=str(qwen3_folder), env=("short:opponent=older:1",), max_tokens=3)
    folder = Path("runs/a")
    folder.mkdir(parents=True)
    run_dir.write_config(folder, run_dir.config_to_dict(resolve(cfg)))
    checkpoint.export_model(folder, load_small(qwen3_folder))
    return folder


def test_every_pair_plays_all_seeds_in_both_seats(run, capsys):
    assert league.run([str(run), "guess", "demonstrate", "--games", "2"]) == 0
    table = json.loads((run / "league.json").read_text())
    assert {row["name"] for row in table["players"]} == {"runs/a", "guess", "demonstrate"}
    for row in table["players"]:  # against 2 others, in 2 seats, 2 seeds; Nim has no draws
        assert row["won"] + row["lost"] == 8 and row["drawn"] == 0
        assert row["low"] < row["elo"] < row["high"]
    assert '"league":{"env":"short"' in (run / "report.html").read_text()
    assert "runs/a" in capsys.readouterr().out
    first = (run / "league.json").read_bytes()
    assert league.run([str(run), "guess", "demonstrate", "--games", "2"]) == 0
    assert (run / "league.json").read_bytes() == first


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["guess"], "name a run and other players, each once"),
        (["runs/a", "--env", "letter_counting"], "needs a game that names its two `agents`"),
    ],
)
def test_a_league_without_players_or_game_is_one_line(run, capsys, args, reason):
    assert league.run(args) == 2
    err = capsys.readouterr().err
    assert reason in err and len(err.splitlines()) == 1
    assert not (run / "league.json").exists()
