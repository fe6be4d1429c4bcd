"""Connect four: lines in all directions, the search, what pays, and retries."""

import random
import re
import time

import pytest

from core.types import UsageError
from environments.connect4 import (
    ConnectFour,
    best_moves,
    has_line,
    legal,
    search,
    show,
    stone,
    wins,
)
from environments.registry import make

EMPTY = "\n".join(["......."] * 6)


def stones(text):
    """A board of rows, top row first and upper rows optional, as X's and O's bits."""
    rows = text.split()[::-1]
    return tuple(
        sum(1 << 7 * c + r for r, row in enumerate(rows) for c in range(7) if row[c] == side)
        for side in "XO"
    )


def at(text, opponent="random", depth=4):
    """A game in the middle, X to move."""
    env = ConnectFour(opponent, depth)
    env.reset(0)
    env.x, env.o = stones(text)
    return env


def play(env, seed, hasty=False):
    """All that was said and paid in an episode as it is demonstrated."""
    said, rewards = [env.reset(seed)[0]["content"]], []
    while True:
        response = env.demonstrate(hasty)
        step = env.step(response)
        said += [response, step.message and step.message["content"]]
        rewards.append(step.reward)
        if step.done:
            return said, rewards, step


def test_show_writes_the_top_row_first():
    board = "...X...\n..XO...\nO.OX..X"
    assert show(*stones(board)) == "\n".join([*["......."] * 3, board])
    assert show(0, 0) == EMPTY


@pytest.mark.parametrize("option", ["opponent=perfect", "depth=0", "depth=7"])
def test_an_impossible_option_is_refused_in_one_line(option):
    with pytest.raises(UsageError) as refusal:
        make(f"connect4:{option}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "board",
    [
        "XXXX...",
        "...XXXX",
        "X...... X...... X...... X......",
        "......X ......X ......X ......X ....... .......",
        "...X... ..X.... .X..... X......",
        "X...... .X..... ..X.... ...X...",
        "......X .....X. ....X.. ...X... ....... .......",
        "...X... ....X.. .....X. ......X ....... .......",
    ],
)
def test_four_in_a_line_win_in_all_four_directions_up_to_the_edges(board):
    mine, theirs = stones(board)
    assert has_line(mine) and not has_line(theirs)
    assert all(not has_line(mine & ~(1 << bit)) for bit in range(49) if mine >> bit & 1)


@pytest.mark.parametrize(
    "board",
    [
        "XXX.XXX",
        "XXX.... X...... X......",
        # neighbours as bits, but not on the board: a column's top and the next one's bottom
        "X...... X...... ....... ....... ....... .X.....",
        "X...... X...... X...... ....... ....... .X.....",
        "......X ....... ....... ....... X......",
    ],
)
def test_stones_that_make_no_line_do_not_win(board):
    assert not has_line(stones(board)[0])


def test_every_line_of_four_on_the_board_is_found_and_nothing_else_is():
    lines = {
        frozenset((c + k * right, r + k * up) for k in range(4))
        for c in range(7)
        for r in range(6)
        for right, up in [(1, 0), (0, 1), (1, 1), (1, -1)]
        if c + 3 * right < 7 and 0 <= r + 3 * up < 6
    }
    assert len(lines) == 69
    for line in lines:
        assert has_line(sum(1 << 7 * c + r for c, r in line))
    rng = random.Random(0)
    for _ in range(2000):
        cells = rng.sample([(c, r) for c in range(7) for r in range(6)], 14)
        expected = any(line <= set(cells) for line in lines)
        assert has_line(sum(1 << 7 * c + r for c, r in cells)) is expected


def test_a_stone_falls_on_the_ones_below_and_a_full_column_is_closed():
    taken = 0
    for row in range(6):
        assert 2 in legal(taken)
        bit = stone(taken, 2)
        assert bit == 1 << 14 + row
        taken |= bit
    assert legal(taken) == [3, 4, 1, 5, 0, 6]
    assert stone(taken, 3) == 1 << 21


def test_wins_are_the_columns_that_complete_a_line():
    mine, theirs = stones("O...... O...... O.XXX..")
    assert wins(mine, theirs) == [1, 5]
    assert wins(theirs, mine) == [0]


def plain_minimax(own, other, depth):
    """The search without pruning, written from the rules."""
    if depth == 0 or not legal(own | other):
        return 0
    if wins(own, other):
        return depth
    return max(
        -plain_minimax(other, own | stone(own | other, c), depth - 1) for c in legal(own | other)
    )


def test_search_is_minimax():
    rng = random.Random(0)
    scores = set()
    for _ in range(150):
        own = other = 0
        for _ in range(rng.randrange(8, 30)):
            if not legal(own | other):
                break
            after = own | stone(own | other, rng.choice(legal(own | other)))
            own, other = other, after
            if has_line(other):
                own = other = 0
        score = search(own, other, 3)
        assert score == plain_minimax(own, other, 3)
        scores.add(score)
        moves = best_moves(own, other, 3)
        assert moves
        for column in legal(own | other):
            after = own | stone(own | other, column)
            here = 3 if has_line(after) else -plain_minimax(other, after, 2)
            assert (here == score) is (column in moves)
    assert {-2.0, 0.0, 1.0, 3.0} <= scores


def test_minimax_wins_blocks_and_sees_a_double_threat():
    assert best_moves(*stones("XXX.OOO"), 4) == [3]  # wins, rather than blocks
    assert best_moves(*stones("O.....X O.....X O......"), 2) == [0]
    # three in the middle of the lowest row with both ends open win: two ways, one block
    assert best_moves(*stones("O...... O.XX..."), 4) == [4]


def test_minimax_beats_the_random_player():
    last = [play(ConnectFour("minimax"), seed, hasty=True)[1][-1] for seed in range(40)]
    assert last.count(-1.0) >= 38


def test_a_minimax_move_takes_less_than_100_ms():
    slowest = 0.0
    for seed in range(3):
        env = ConnectFour("minimax", 4)
        env.reset(seed)
        done = False
        while not done:
            response = env.demonstrate()
            started = time.perf_counter()
            done = env.step(response).done
            slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 0.1  # seconds


def test_the_seed_decides_who_begins():
    boards = [ConnectFour().reset(seed)[0]["content"].partition("\n")[2] for seed in range(200)]
    assert {board.count("X") for board in boards} == {0}
    assert 70 < boards.count(EMPTY) < 130
    assert len(set(boards)) == 8  # empty, and O in each of seven columns


@pytest.mark.parametrize("opponent", ["random", "minimax"])
def test_same_seed_is_the_same_episode_whatever_was_played_before(opponent):
    env = ConnectFour(opponent, depth=2)
    first = [play(env, 3), play(env, 3, hasty=True)]
    assert any(play(env, seed)[0] != first[0][0] for seed in range(4, 8))
    env.reset(3)
    for _ in range(3):
        env.step("no move at all")
    random.seed(0)
    assert [play(env, 3), play(env, 3, hasty=True)] == first
    new = ConnectFour(opponent, depth=2)
    assert [play(new, 3), play(new, 3, hasty=True)] == first


def test_demonstrations_beat_the_random_opponent():
    for seed in range(200):
        _, rewards, step = play(ConnectFour(), seed)
        assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
        assert step.info == {"correct": True}


def test_demonstrations_mostly_beat_minimax():
    last = [play(ConnectFour("minimax", 3), seed)[1][-1] for seed in range(20)]
    assert last.count(1.0) >= 16


def test_a_demonstration_names_what_wins_and_what_must_be_blocked_and_changes_nothing():
    env = at("O...... O...... O.XXX..")
    before = env.x, env.o, env.rng.getstate()
    for _ in range(2):
        # 2 and 6 are as good and as near the middle; the left one is tried first
        assert env.demonstrate() == "X wins: 2 6. O wins: 1. <move>2</move>"
        assert env.demonstrate(hasty=True) == env.demonstrate(hasty=True)
    assert (env.x, env.o, env.rng.getstate()) == before
    assert env.step(env.demonstrate()).reward == 1.0


def test_a_hasty_demonstration_is_an_open_column_drawn_evenly():
    counts = dict.fromkeys("1234567", 0)
    for seed in range(700):
        env = ConnectFour()
        env.reset(seed)
        counts[re.fullmatch("<move>([1-7])</move>", env.demonstrate(hasty=True))[1]] += 1
    assert min(counts.values()) > 60


def test_a_win_pays_1():
    step = at("OOO.... XXX....").step("<move>4</move>")
    assert (step.message, step.reward, step.done) == (None, 1.0, True)
    assert step.info == {"correct": True}


def test_a_loss_pays_minus_1():
    step = at("X...... OOO.XX.", "minimax", 1).step("<move>7</move>")
    assert (step.message, step.reward, step.done) == (None, -1.0, True)
    assert step.info == {"correct": False}


NEARLY_FULL = """
.OXOXOX
XOXOXOX
OXOXOXO
OXOXOXO
XOXOXOX
XOXOXOX
"""


def test_a_full_board_without_a_line_pays_0():
    for last in ("X", "O"):  # who drops the 42nd stone
        board = NEARLY_FULL if last == "X" else NEARLY_FULL.replace(".O", "..", 1)
        assert not any(map(has_line, stones(board)))
        step = at(board).step("<move>1</move>")
        assert (step.message, step.reward, step.done) == (None, 0.0, True)
        assert step.info == {"correct": False}


@pytest.mark.parametrize(
    "response",
    [
        "<move>4</move>",
        '{"move": 4}',
        "4",
        " 4.\n",
        "My move is 4.",
        "column 4",
        "I drop in 4",
        "<move>1</move> no: <move>4</move>",
        "<move>4</move> or <move>8</move>",
    ],
)
def test_the_last_well_formed_move_counts_in_each_form(response):
    env = at("OO.....")
    step = env.step(response)
    assert step.reward == 0 and env.x == 1 << 21
    first, board = step.message["content"].split("\n", 1)
    assert re.fullmatch("O drops in [1-7]\\.", first) and board == show(env.x, env.o)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "I resign",
        "44",
        "<move>0</move>",
        "<move>8</move>",
        "<move>four</move>",
        '{"move": 4.0}',
        '{"move": true}',
        "<move>1</move>",  # full
        "<move>4</move> no, <move>1</move>",  # the last is full: no falling back
    ],
)
def test_an_invalid_move_is_forgiven_twice_then_forfeits(response):
    env = at("O...... X...... O...... X...... O...... X......")
    before = env.x, env.o
    for _ in range(2):
        step = env.step(response)
        assert (step.reward, step.done) == (-0.1, False)
        assert step.message["content"] == "End with <move>column</move>; open: 2 3 4 5 6 7"
        assert step.info == {"correct": False, "invalid": True}
    step = env.step(response)
    assert (step.message, step.reward, step.done) == (None, -1.0, True)
    assert step.info["correct"] is False and (env.x, env.o) == before
    env.reset(0)
    assert [env.step("?").done for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    "response",
    [
        "column " * 14_000,
        "column 5 " * 11_000 + "?x",
        "5" + "." * 100_000 + "x",
        " " * 100_000 + "x",
        "<move>" * 16_000,
        "</move>" * 14_000,
        '{"move": ' * 11_000,
        "[" * 100_000,
        "<move>\ud800</move>",
        "<move>" + "9" * 90_000 + "</move>",
        "\0" * 1000,
    ],
)
def test_a_hostile_response_is_refused_at_once(response):
    env = at("O......")
    started = time.perf_counter()
    step = env.step(response)
    assert time.perf_counter() - started < 0.5  # seconds
    assert (step.reward, step.done) == (-0.1, False)


def test_messages_are_short():
    for seed in range(20):
        said, _, _ = play(ConnectFour(), seed)
        assert len(said[0]) < 200
        assert all(len(text) < 70 for text in said[1:] if text)
