"""The maze of links on the bundled web: observations, rewards and demonstrations."""

import pytest

from environments.wikipedia_maze import WikipediaMaze, clicks_to


def walk(env, *titles):
    return [env.step(f'{{"action": "visit_url", "url": "{title}"}}') for title in titles]


def at(start, target, **options):
    """Returns an episode from one page to another."""
    env = WikipediaMaze(**options)
    env.train_pairs = [(start, target)]
    assert env.n_hops == clicks_to(target)[start]
    env.reset(0)
    return env


def test_brief_shows_each_page_in_a_new_context_with_the_unvisited_links_shuffled():
    env, openings = at("Egypt", "Sahara", brief=True), set()
    assert sorted(env.links) == ["Cat", "Cleopatra", "Desert", "Nile", "Pyramid"]
    (step,) = walk(env, "Nile")
    target, links = step.message["content"].split("\nLinks: ")
    assert step.fresh and target == "Target: Sahara, 4 left"
    assert sorted(links.split(", ")) == ["Paper", "Sahara", "Wheat"]  # without Egypt
    for again in (*walk(env, "Egypt"), env.step("no idea")):
        assert again.fresh and again.reward == -0.1 and again.message == step.message
    assert walk(env, "Sahara")[0].info["correct"]
    for seed in range(50):
        openings.add(opening := env.reset(seed)[0]["content"])
        assert opening == f"Target: Sahara, 5 left\nLinks: {', '.join(env.links)}"
    assert len(openings) > 10


def test_the_target_alone_is_rewarded_within_the_visits():
    steps = walk(at("Cat", "Sahara", n_hops=3), "Egypt", "Nile", "Sahara")
    assert [step.reward for step in steps] == [0, 0, 1.0]
    assert (steps[-1].done, steps[-1].message) == (True, None)
    assert steps[-1].info == {"correct": True, "visits": 3}
    steps = walk(at("Cat", "Sahara", n_hops=3), "Egypt", "Cat", "Egypt", "Cat", "Egypt", "Cat")
    assert [step.done for step in steps] == [False] * 5 + [True] and not steps[-1].info["correct"]


@pytest.mark.parametrize("brief", [False, True])
def test_a_demonstration_is_valid_after_any_detour(brief):
    env, num_lost = WikipediaMaze(brief=brief), 0
    env.max_visits = 12
    for seed in range(100):
        env.reset(seed)
        for turn in range(12):
            text = env.demonstrate(hasty=turn % 2 == 0)
            num_lost += "Nothing nearer is left" in text
            step = env.step(text)
            assert step.reward >= 0
            if step.done:
                break
    assert (num_lost > 0) == brief
