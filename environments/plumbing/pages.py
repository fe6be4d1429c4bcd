"""The bundled web of `pages.json`, and functions for the links of a page.

A page is a tuple of sections, (heading, text); a link in a text is written [[Title]]. Every bundled
page can be reached from every other one.

>>> find_links(bundled()["Nile"])
['Sahara', 'Wheat', 'Egypt', 'Paper']
>>> clicks_to("Sahara")["Nile"], clicks_to("Sahara")["Egypt"]
(1, 2)
"""

import json
import re
from functools import cache
from pathlib import Path

LINK = re.compile(r"\[\[([^\[\]]+)\]\]")
MAX_TITLE = 1000  # characters

Sections = tuple[tuple[str, str], ...]  # (heading, text)


@cache
def bundled() -> dict[str, Sections]:
    """Returns the sections of each bundled page, by title."""
    pages = json.loads(Path(__file__).with_name("pages.json").read_text(encoding="utf-8"))
    return {title: tuple(sections.items()) for title, sections in pages.items()}


@cache
def clicks_to(target: str) -> dict[str, int]:
    """Returns the length of the shortest path from each bundled page to `target`, in clicks."""
    links = {title: find_links(sections) for title, sections in bundled().items()}
    clicks, distance = {target: 0}, 0
    while len(clicks) < len(links):
        distance += 1
        unknown = [page for page in links if page not in clicks]
        clicks |= {page: distance for page in unknown if not clicks.keys().isdisjoint(links[page])}
    return clicks


@cache
def linking_to(target: str) -> list[str]:
    """Returns the bundled pages with a link to `target`, those with the most incoming links first.

    >>> linking_to("Sahara")
    ['Salt', 'Desert', 'Camel', 'Nile', 'Elephant']
    """
    links = {title: find_links(sections) for title, sections in bundled().items()}
    sources = [title for title in links if target in links[title]]
    return sorted(sources, key=lambda title: -sum(title in titles for titles in links.values()))


@cache
def pairs_apart(n_hops: int) -> list[tuple[str, str]]:
    """Returns all (start, target) of the bundled web with a shortest path of `n_hops` clicks."""
    pages = bundled()
    return [(start, to) for to in pages for start in pages if clicks_to(to)[start] == n_hops]


def find_links(sections: Sections) -> list[str]:
    """Returns the titles of all links in order, without duplicates."""
    return list(dict.fromkeys(link for _, text in sections for link in LINK.findall(text)))


def fold(title: str) -> str:
    """Normalizes a title for comparison: case, underscores, surrounding quotes and brackets.

    >>> fold(" 'silk_ROAD'. ")
    'silk road'
    """
    return " ".join(title[:MAX_TITLE].replace("_", " ").split()).strip("\"'`.[] ").casefold()
