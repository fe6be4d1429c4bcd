"""The bundled web and the functions on its pages."""

from environments import pages

LINKS = {title: pages.find_links(sections) for title, sections in pages.bundled().items()}


def test_clicks_to_is_the_length_of_the_shortest_path_between_any_two_pages():
    lengths = set()
    for target in LINKS:
        clicks = pages.clicks_to(target)
        assert set(clicks) == set(LINKS)
        lengths |= set(clicks.values())
        for page, n in clicks.items():
            assert n == (0 if page == target else 1 + min(clicks[link] for link in LINKS[page]))
    assert set(range(7)) <= lengths


def test_parts_have_at_most_the_given_size_and_keep_all_links():
    for sections in pages.bundled().values():
        for size in (100, 150, 600):
            parts = pages.split_parts(sections, size)
            for part in parts:
                assert sum(len(heading) + 2 + len(text) for heading, text in part) <= size
            together = tuple(section for part in parts for section in part)
            assert pages.find_links(together) == pages.find_links(sections)
    assert pages.split_parts((), 100) == [()]
