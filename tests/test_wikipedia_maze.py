"""The maze of links: the bundled web, what pays, the parts, and hostile texts."""

import json
import re
import time
from zlib import crc32

import pytest

import environments.wikipedia_maze  # noqa: F401  (registers it)
from core.types import UsageError
from environments import pages
from environments.base import DEMO_SEEDS, EVAL_SEEDS
from environments.registry import make
from environments.wikipedia_maze import WikipediaMaze

LINKS = {title: pages.find_links(sections) for title, sections in pages.bundled().items()}


def visit(title):
    return json.dumps({"action": "visit_url", "url": title})


def started(start, target, **options):
    """A maze from one page to another, found among the seeds."""
    env = WikipediaMaze(**options)
    for seed in range(100_000):
        env.reset(seed)
        if (env.title, env.target) == (start, target):
            return env
    raise AssertionError("no seed")


def walk(env, *titles):
    return [env.step(visit(title)) for title in titles]


# --- the bundled web


def test_bundled_pages_have_short_sections_and_3_to_6_links_to_one_another():
    assert len(LINKS) >= 64
    for title, sections in pages.bundled().items():
        assert 2 <= len(sections) <= 3 and len(title) <= 25
        assert 3 <= len(LINKS[title]) <= 6 and title not in LINKS[title]
        assert set(LINKS[title]) <= set(LINKS)
        for heading, text in sections:
            assert heading and 1 <= len(re.findall(r"[.!](?: |$)", text)) <= 3
            assert len(text) < 150
            assert text.count("[") == text.count("]") == 2 * len(re.findall(r"\[\[.+?\]\]", text))


def test_bundled_titles_differ_when_folded():
    assert len({pages.fold(title) for title in LINKS}) == len(LINKS)


def test_bundled_web_is_strongly_connected_with_distances_of_1_to_6_and_more():
    seen = set()
    for target in LINKS:
        clicks = pages.clicks_to(target)
        assert set(clicks) == set(LINKS)
        seen |= set(clicks.values())
        for page, n in clicks.items():  # a distance is one more than that of the nearest link
            assert n == (0 if page == target else 1 + min(clicks[x] for x in LINKS[page]))
    assert set(range(7)) <= seen


# --- observations


def test_opening_shows_rules_target_page_text_and_links():
    env = WikipediaMaze()
    assert env.reset(401) == [
        {
            "role": "user",
            "content": 'Click links to the target. Think, then end with {"action": "visit_url", '
            '"url": "TITLE"}.\n'
            "Target: Sahara, 5 left\n"
            "Page: Egypt\n"
            "Land: Most people live beside the [[Nile]]; the rest of the land is [[Desert]].\n"
            "Rulers: Each great [[Pyramid]] is the tomb of a king. [[Cleopatra]] was the last "
            "queen.\n"
            "Beliefs: The goddess Bastet had the head of a [[Cat]].\n"
            "Links: Nile, Desert, Pyramid, Cleopatra, Cat",
        }
    ]


def test_in_brief_each_page_stands_alone_with_the_links_to_pages_not_seen():
    def read(text):
        target, links = text.removeprefix("Target: ").split("\nLinks: ")
        return target, links.split(", ")

    env, orders = WikipediaMaze(brief=True), set()
    target, links = read(env.reset(401)[0]["content"])
    assert target == "Sahara, 5 left"
    assert sorted(links) == ["Cat", "Cleopatra", "Desert", "Nile", "Pyramid"]
    step = env.step(visit("Nile"))
    target, links = read(step.message["content"])
    assert step.fresh and target == "Sahara, 4 left"
    assert sorted(links) == ["Paper", "Sahara", "Wheat"]  # but not Egypt
    for invalid in (visit("Egypt"), "no idea"):  # seen already; no action
        again = env.step(invalid)
        assert again.fresh and again.reward == -0.1 and again.message == step.message
    assert env.step(visit("Sahara")).info["correct"]
    for seed in range(300):
        opening = env.reset(seed)[0]["content"]
        assert len(opening) < 170
        orders |= {tuple(env.links)} if env.title == "Egypt" else set()
        assert read(opening)[1] == env.links
    assert len(orders) > 1  # the links are shuffled


def test_at_length_nothing_is_fresh_and_seen_pages_stay():
    env = WikipediaMaze()
    env.reset(401)
    step = env.step(visit("Nile"))
    assert not step.fresh and "[[Egypt]]" in step.message["content"]
    assert not env.step("no idea").fresh and env.step(visit("Egypt")).reward == 0


def test_same_seed_is_the_same_episode_and_reset_clears_everything():
    def episode(env, seed):
        texts = [env.reset(seed)[0]["content"], env.demonstrate()]
        for _ in range(3):
            texts.append(env.demonstrate(hasty=True))
            step = env.step(texts[-1])
            if step.done:
                return texts
            texts.append(step.message["content"])
        return texts

    used, first = WikipediaMaze(n_hops=3), WikipediaMaze(n_hops=3)
    plain = [episode(first, seed) for seed in (1, 2, EVAL_SEEDS[0])]
    for refused in range(3):
        used.reset(refused)
        used.step("?")
        used.step("?")
    assert [episode(used, seed) for seed in (1, 2, EVAL_SEEDS[0])] == plain
    assert plain[0] != plain[1]


@pytest.mark.parametrize("n_hops", range(1, 7))
def test_pairs_of_an_eighth_are_drawn_by_evaluation_seeds_only(n_hops):
    env = WikipediaMaze(n_hops=n_hops)
    for seeds, kept in ((range(200), False), (DEMO_SEEDS[:200], False), (EVAL_SEEDS[:200], True)):
        for seed in seeds:
            env.reset(seed)
            assert (crc32(f"{env.title}>{env.target}".encode()) % 8 == 0) == kept
            assert pages.clicks_to(env.target)[env.title] == n_hops


# --- rewards


def test_reaching_the_target_pays_1_and_a_visit_on_the_way_0():
    first, last = walk(started("Egypt", "Sahara"), "Nile", "Sahara")
    assert (first.reward, first.done, first.info) == (0.0, False, {"correct": False})
    assert (last.reward, last.done, last.message) == (1.0, True, None)
    assert last.info == {"correct": True, "visits": 2}


def test_last_visit_allowed_ends_without_the_target():
    env = started("Egypt", "Sahara", max_visits=2)
    first, last = walk(env, "Cat", "Egypt")
    assert first.message["content"].startswith("Target: Sahara, 1 left\nPage: Cat\n")
    assert (last.reward, last.done, last.message) == (0.0, True, None)
    assert last.info == {"correct": False, "visits": 2}


def test_max_visits_is_3_more_than_n_hops_unless_given():
    assert WikipediaMaze(n_hops=2).max_visits == 5
    assert WikipediaMaze(n_hops=2, max_visits=2).max_visits == 2


def test_dense_pays_each_step_nearer_once_and_never_over_half():
    env = started("Cat", "Sahara", n_hops=3, dense=True, max_visits=9)
    # 3 clicks away; Egypt is 2, Wheat farther, Nile 1
    steps = walk(env, "Wheat", "Egypt", "Cat", "Egypt", "Nile", "Egypt", "Nile", "Sahara")
    assert [step.reward for step in steps] == [0, 0.25, 0, 0, 0.25, 0, 0, 1.0]
    assert steps[-1].info["correct"]


@pytest.mark.parametrize("n_hops", [1, 2, 4])
def test_dense_rewards_of_a_perfect_walk_add_up_to_half(n_hops):
    env = WikipediaMaze(n_hops=n_hops, dense=True)
    for seed in range(50):
        env.reset(seed)
        rewards = [env.step(env.demonstrate()).reward for _ in range(n_hops)]
        assert rewards[:-1] == pytest.approx([0.5 / max(n_hops - 1, 1)] * (n_hops - 1))
        assert rewards[-1] == 1.0


@pytest.mark.parametrize("response", ["", "Nile", visit("Rome"), visit("Sahara"), '{"url": 3}'])
def test_invalid_actions_are_forgiven_twice_then_end_the_episode(response):
    env = started("Egypt", "Sahara")
    steps = [env.step(response) for _ in range(3)]
    assert [(s.reward, s.done) for s in steps] == [(-0.1, False), (-0.1, False), (-1.0, True)]
    assert '{"action": "visit_url", "url": "TITLE"}' in steps[0].message["content"]
    assert steps[2].message is None and steps[2].info["correct"] is False
    assert steps[2].info["visits"] == 0 and env.title == "Egypt"


def test_an_invalid_action_leaves_the_page_as_it_was():
    env = started("Egypt", "Sahara")
    assert env.step("?").reward == -0.1
    assert [s.reward for s in walk(env, "Nile", "Sahara")] == [0.0, 1.0]


# --- actions


@pytest.mark.parametrize(
    "response",
    [
        visit("Nile"),
        visit("nile"),
        visit(" NILE. "),
        'Egypt has the Nile. {"url": "Nile"} it is',
        visit("Cat") + " no, " + visit("Nile"),
        "<visit_url>Nile</visit_url>",
        "<visit_url>Cat</visit_url> or rather <visit_url>nile</visit_url>",
        "<visit_url>Cat</visit_url> but " + visit("Nile"),
        '{"visit_url": "Nile"}',
        "visit_url: Nile",
        'visit_url("Nile")',
        '{"action": "next_part"} is not needed ' + visit("Nile"),
    ],
)
def test_a_visit_may_be_said_in_these_ways(response):
    env = started("Egypt", "Sahara")
    assert env.step(response).info == {"correct": False} and env.title == "Nile"


@pytest.mark.parametrize(
    "name", ["Silk Road", "silk_road", "SILK ROAD", " silk  road", "'Silk_Road'"]
)
def test_case_spaces_and_underscores_of_a_title_are_free(name):
    env = started("Silk", "Pepper")
    env.step(visit(name))
    assert env.title == "Silk Road"


def test_an_action_that_is_not_allowed_is_not_replaced_by_an_earlier_one():
    env = started("Egypt", "Sahara")
    assert env.step(visit("Nile") + visit("Rome")).reward == -0.1


# --- parts


def test_a_long_page_comes_in_parts_and_links_of_all_parts_may_be_visited():
    env = started("Egypt", "Sahara", max_chunk=100)
    assert env.parts == [
        (("Land", dict(pages.bundled()["Egypt"])["Land"]),),
        (("Rulers", dict(pages.bundled()["Egypt"])["Rulers"]),),
        (("Beliefs", dict(pages.bundled()["Egypt"])["Beliefs"]),),
    ]
    shown = env._show().splitlines()
    assert shown[1] == 'Page: Egypt, part 1/3; for the next: {"action": "next_part"}'
    assert shown[2].startswith("Land: ") and shown[3:] == ["Links: Nile, Desert"]
    step = env.step('Read on. {"action": "next_part"}')
    assert (step.reward, step.done, step.info) == (0.0, False, {"correct": False})
    lines = step.message["content"].splitlines()
    assert lines[0] == "Target: Sahara, 5 left" and lines[3] == "Links: Pyramid, Cleopatra"
    last = env.step("<action>next_part</action>").message["content"].splitlines()
    assert last[1] == "Page: Egypt, part 3/3" and last[3] == "Links: Cat"
    assert env.step('{"action": "next_part"}').reward == -0.1  # there is no fourth
    assert env.step(visit("Nile")).info == {"correct": False} and env.title == "Nile"


def test_a_page_of_one_part_has_no_next():
    env = started("Egypt", "Sahara")
    assert env.step('{"action": "next_part"}').reward == -0.1


def test_parts_keep_to_their_size_and_lose_no_link():
    for sections in pages.bundled().values():
        for size in (100, 150, 600):
            parts = pages.split_parts(sections, size)
            for part in parts:
                assert sum(len(heading) + 2 + len(text) for heading, text in part) <= size
            assert [x for part in parts for x in part if pages.find_links((x,))]
            together = tuple(section for part in parts for section in part)
            assert pages.find_links(together) == pages.find_links(sections)
    assert pages.split_parts((), 100) == [()]


# --- demonstrations


@pytest.mark.parametrize(
    "options",
    [{"n_hops": n} for n in range(1, 7)]
    + [{"brief": True}, {"dense": True}, {"n_hops": 3, "max_visits": 3}],
)
def test_demonstrations_reach_the_target_in_n_hops_visits(options):
    env = WikipediaMaze(**options)
    for seed in [*range(150), *DEMO_SEEDS[:50], *EVAL_SEEDS[:50]]:
        env.reset(seed)
        for n in range(env.n_hops):
            text = env.demonstrate()
            assert text == env.demonstrate() and len(text) < 180
            step = env.step(text)
            assert step.done == (n == env.n_hops - 1)
        assert step.reward == 1.0 and step.info == {"correct": True, "visits": env.n_hops}


def test_a_demonstration_reads_on_until_it_has_seen_the_link():
    env = WikipediaMaze(max_chunk=100)
    read = 0
    for seed in range(100):
        env.reset(seed)
        step = env.step(text := env.demonstrate())
        while not step.done:
            read += text.endswith('{"action": "next_part"}')
            shown = step.message["content"]
            step = env.step(text := env.demonstrate())
            if '"url"' in text and "part" not in shown:
                assert json.loads(text[text.index("{") :])["url"] in shown
        assert step.info == {"correct": True, "visits": 2}
    assert read > 20


def test_a_demonstration_says_where_the_target_is_and_a_hasty_one_only_picks_a_link():
    env = started("Egypt", "Sahara")
    known = "The target is not on this page, it is on Salt, Desert, Camel, Nile. "
    assert all("Sahara" in LINKS[page] for page in ("Salt", "Desert", "Camel", "Nile"))
    assert env.demonstrate() == known + visit("Nile")
    hasty = env.demonstrate(hasty=True)
    assert hasty == env.demonstrate(hasty=True)
    assert json.loads(hasty)["url"] in LINKS["Egypt"]
    env.step(visit("Cat"))
    assert env.demonstrate() == known + visit("Egypt")
    env.step(visit("Egypt"))
    env.step(visit("Nile"))
    assert env.demonstrate() == "The target is on this page. " + visit("Sahara")


@pytest.mark.parametrize("brief", [False, True])
def test_whoever_wandered_is_shown_a_valid_way_on(brief):
    env, lost = WikipediaMaze(max_visits=12, max_chunk=100, brief=brief), 0
    for seed in range(150):
        env.reset(seed)
        step, turn = None, 0
        while step is None or not step.done:
            text = env.demonstrate(hasty=turn % 2 == 0)
            lost += "Nothing nearer is left" in text
            step = env.step(text)
            assert step.reward >= 0
            turn += 1
    assert (lost > 0) == brief


def test_hasty_demonstrations_are_valid_and_mostly_miss():
    env, reached = WikipediaMaze(), 0
    for seed in range(300):
        env.reset(seed)
        done = False
        while not done:
            step = env.step(env.demonstrate(hasty=True))
            assert step.reward >= 0
            done = step.done
        reached += step.info["correct"]
    assert 10 < reached < 150


# --- options


@pytest.mark.parametrize(
    "spec, complaint",
    [
        ("n_hops=0", "n_hops must be 1 to 6, not 0"),
        ("n_hops=7", "n_hops must be 1 to 6, not 7"),
        ("max_chunk=99", "max_chunk must be at least 100 characters, not 99"),
        ("max_visits=-1", "max_visits must be 0 or at least n_hops, not -1"),
        ("n_hops=3,max_visits=2", "max_visits must be 0 or at least n_hops, not 2"),
        ("start=Gold", "start and target must be two different titles, with live=true"),
    ],
)
def test_a_bad_option_is_one_clear_line(spec, complaint):
    with pytest.raises(UsageError, match=f"^--env wikipedia_maze:{spec}: {complaint}"):
        make(f"wikipedia_maze:{spec}")


HOSTILE = {
    "empty": "",
    "100 kB": "visit " * 17_000,
    "half JSON": '{"action": "visit_url", "url": "Ni',
    "openings": "{" * 100_000,
    "keys": '{"url":' * 15_000,
    "lists": '{"url":' + "[" * 100_000,
    "many actions": '{"url": []}' * 9_000,
    "tags": "<visit_url>" * 9_000,
    "tag pairs": "<visit_url></visit_url>" * 4_500,
    "plain": "visit_url(" * 10_000,
    "quotes": "visit_url" + "'\"" * 50_000,
    "title": visit("x" * 100_000),
    "spaces": visit(" " * 19_000),
    "surrogate": visit("x").replace("x", "\ud800"),
    "escaped surrogate": visit("\ud800"),
    "zero bytes": "\0" * 100_000,
    "numbers": '{"action": "visit_url", "url": ' + "9" * 5_000 + "}",
    "percent": visit("%" * 10_000),
    "null": "null",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_response_is_invalid_and_quickly_read(name):
    env = started("Egypt", "Sahara")
    begun = time.perf_counter()
    step = env.step(HOSTILE[name])
    assert time.perf_counter() - begun < 0.3
    assert (step.reward, step.done, step.info["correct"]) == (-0.1, False, False)
    assert step.message["content"].encode()
