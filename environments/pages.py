"""The bundled web of `pages.json`, and what can be told of any page: its links and its parts.

A page is a tuple of sections; in their texts a link is written [[Title]]. Every bundled page is
within reach of every other.

>>> find_links(bundled()["Nile"])
['Sahara', 'Wheat', 'Egypt', 'Paper']
>>> clicks_to("Sahara")["Nile"], clicks_to("Sahara")["Egypt"]
(1, 2)
"""

import json
import re
import textwrap
from functools import cache
from pathlib import Path

LINK = re.compile(r"\[\[([^\[\]]+)\]\]")

Sections = tuple[tuple[str, str], ...]  # heading ("" for none), text


@cache
def bundled() -> dict[str, Sections]:
    pages = json.loads(Path(__file__).with_name("pages.json").read_text(encoding="utf-8"))
    return {title: tuple(sections.items()) for title, sections in pages.items()}


@cache
def clicks_to(target: str) -> dict[str, int]:
    """How many clicks the shortest path from each bundled page to `target` takes."""
    links = {title: find_links(sections) for title, sections in bundled().items()}
    clicks, n = {target: 0}, 0
    while len(clicks) < len(links):
        n += 1
        farther = [page for page in links if page not in clicks]
        clicks |= {page: n for page in farther if not clicks.keys().isdisjoint(links[page])}
    return clicks


def shortest_path(start: str, target: str) -> list[str]:
    """The pages of a shortest path, both ends included; of several, the one by the first links.

    >>> shortest_path("Egypt", "Sahara")
    ['Egypt', 'Nile', 'Sahara']
    """
    clicks, path = clicks_to(target), [start]
    while path[-1] != target:
        links = find_links(bundled()[path[-1]])
        path.append(next(link for link in links if clicks[link] < clicks[path[-1]]))
    return path


@cache
def linking_to(target: str) -> list[str]:
    """The bundled pages with a link to `target`, those first that most pages link to.

    >>> linking_to("Sahara")
    ['Salt', 'Desert', 'Camel', 'Nile', 'Elephant']
    """
    links = [find_links(sections) for sections in bundled().values()]
    found = [title for title, own in zip(bundled(), links, strict=True) if target in own]
    return sorted(found, key=lambda title: -sum(title in own for own in links))


@cache
def pairs_apart(n_hops: int) -> list[tuple[str, str]]:
    """All (start, target) of the bundled web whose shortest path takes `n_hops` clicks."""
    pages = bundled()
    return [(start, to) for to in pages for start in pages if clicks_to(to)[start] == n_hops]


def find_links(sections: Sections) -> list[str]:
    """The titles linked to, each once, in order."""
    return list(dict.fromkeys(link for _, text in sections for link in LINK.findall(text)))


def split_parts(sections: Sections, size: int) -> list[Sections]:
    """Parts of at most `size` characters: whole sections where they fit, and links kept whole.

    >>> split_parts((("A", "One [[x y]]."), ("B", "Two."), ("", "Three [[z]].")), 22)
    [(('A', 'One [[x y]].'), ('B', 'Two.')), (('', 'Three [[z]].'),)]
    """
    parts: list[Sections] = [()]
    room = size
    for heading, text in sections:
        bound = LINK.sub(lambda link: link[0].replace(" ", "\u00a0"), text)
        width = max(size - len(heading) - 2, size // 2)
        for piece in textwrap.wrap(bound, width, break_on_hyphens=False):
            length = len(heading) + 2 + len(piece)
            if parts[-1] and length > room:
                parts.append(())
                room = size
            parts[-1] += ((heading, piece.replace("\u00a0", " ")),)
            room -= length
    return parts


def fold(title: str) -> str:
    """A title as titles are compared: in any case, with spaces for underscores, quotes aside.

    >>> fold(" 'silk_ROAD'. ")
    'silk road'
    """
    return " ".join(title[:1000].replace("_", " ").split()).strip("\"'`.[] ").casefold()
