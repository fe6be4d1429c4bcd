"""Follow links from a start page to a target page.

The pages are the bundled web of `plumbing/pages.json`: a hundred short pages, each reachable from
every other one. A page has sections, a heading and a text each; a link is written [[Title]].

Observation: the current page, after one line of rules in the first message.

>>> env = WikipediaMaze(n_hops=2)
>>> opening = env.reset(seed=409)
>>> env.demonstrate()
'The target is not on this page, it is on Sun. {"action": "visit_url", "url": "Sun"}'
>>> print(env.step(env.demonstrate()).message["content"])
Target: Star, 4 left
Page: Sun
Star: The Sun is the [[Star]] at the centre of our planetary system.
Rays: Its [[Light]] takes about eight minutes to reach us.
Worship: In ancient [[Egypt]] the sun god Ra was among the greatest gods.
Links: Star, Light, Egypt
>>> env.step("<visit_url>star</visit_url>").reward
1.0

The case of a title does not matter. `brief` is for policies as small as tiny: no rules and no text,
only the links to unvisited pages, shuffled, and each page in a new context.

Reward of a response:

    1.0     the target; only then `info["correct"]` is True
    0       any other visit, also the last one
    -0.1    an invalid action, twice per episode; the third costs -1 and ends it

One pair (start, target) in eight is reserved for evaluation seeds.
"""

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from environments.base import EVAL_SEEDS, Env, Message, Step, check_range, is_held_out
from environments.parsing import Retries, read_action, user

FORM = '{"action": "visit_url", "url": "TITLE"}'
PLAIN = r"visit_url[\"'`:=(\s]{1,9}([^\n\"'`)]{1,300})"  # visit_url: TITLE
PAGES = Path(__file__).parent / "plumbing/pages.json"
LINK = re.compile(r"\[\[([^\[\]]+)\]\]")
MAX_NAMED = 4  # pages in a demonstration, which must fit the context of a tiny policy
MAX_HOPS = 6  # there are too few pairs with more


class WikipediaMaze(Env):
    """`n_hops`: clicks on the shortest path, of n_hops + 3 visits. `brief`: links only."""

    def __init__(self, n_hops: int = 2, brief: bool = False):
        check_range("n_hops", n_hops, 1, MAX_HOPS)
        self.n_hops, self.max_visits, self.brief = n_hops, n_hops + 3, brief
        pairs: list[tuple[str, str]] = []
        for target in pages():
            pairs += [(start, target) for start in pages() if clicks_to(target)[start] == n_hops]
        self.eval_pairs = [pair for pair in pairs if is_held_out(">".join(pair))]
        self.train_pairs = sorted({*pairs} - {*self.eval_pairs})

    def reset(self, seed: int) -> list[Message]:
        self.rng = random.Random(f"wikipedia_maze {seed}")
        start, target = self.rng.choice(self.eval_pairs if seed in EVAL_SEEDS else self.train_pairs)
        self.retries = Retries()
        self.visits, self.target = 0, target
        self.visited: set[str] = set()
        self._open(target)  # only draws random numbers, as the recorded runs did
        self.visited.clear()
        self._open(start)
        self.clicks = clicks_to(target)
        rules = "" if self.brief else f"Click links to the target. Think, then end with {FORM}.\n"
        return [user(rules + self._show())]

    def step(self, response: str) -> Step:
        title = read_action(response, "url", _title)
        title = title or read_action(response, "visit_url", _title, plain=PLAIN)
        link = {_title(link): link for link in self.links}.get(title)
        if link is None:
            return self._refuse("No link of this page." if title else "No action found.")
        self.visits += 1
        self._open(link)
        correct = self.title == self.target
        if correct or self.visits == self.max_visits or not self.links:
            return Step(None, float(correct), True, {"correct": correct, "visits": self.visits})
        return Step(user(self._show()), 0.0, False, {"correct": False}, self.brief)

    def demonstrate(self, hasty: bool = False) -> str:
        """Names pages with a link to the target and visits a closer page; `hasty`: any link."""
        if hasty:
            return _visit(self.guess)
        nearer = [link for link in self.links if self.clicks[link] < self.clicks[self.title]]
        if not nearer:  # `brief` hides visited pages
            return f"Nothing nearer is left. {_visit(self.guess)}"
        if self.target in nearer:
            return f"The target is on this page. {_visit(self.target)}"
        sources = ", ".join(linking_to(self.target)[:MAX_NAMED])
        return f"The target is not on this page, it is on {sources}. {_visit(nearer[0])}"

    def _open(self, title: str) -> None:
        self.title, self.links = title, links()[title]
        self.visited.add(title)
        if self.brief:
            self.links = [link for link in self.links if link not in self.visited]
            self.rng.shuffle(self.links)
        self.guess = self.rng.choice(self.links or [""])

    def _show(self) -> str:
        lines = [f"Target: {self.target}, {self.max_visits - self.visits} left"]
        if not self.brief:
            sections = pages()[self.title].items()
            lines += [f"Page: {self.title}", *(f"{head}: {text}" for head, text in sections)]
        return "\n".join([*lines, f"Links: {', '.join(self.links)}"])

    def _refuse(self, problem: str) -> Step:
        step = self.retries.refuse(f"{problem} End with {FORM}.", visits=self.visits)
        if step.done or not self.brief:
            return step
        return replace(step, message=user(self._show()), fresh=True)  # the links, not the hint


@cache
def pages() -> dict[str, dict[str, str]]:
    """Returns the texts of each page, by title and heading."""
    texts: dict[str, dict[str, str]] = json.loads(PAGES.read_text(encoding="utf-8"))
    return texts


@cache
def links() -> dict[str, list[str]]:
    """Returns the titles of all links of each page, in order, without duplicates.

    >>> links()["Nile"]
    ['Sahara', 'Wheat', 'Egypt', 'Paper']
    """
    texts = {title: " ".join(sections.values()) for title, sections in pages().items()}
    return {title: list(dict.fromkeys(LINK.findall(text))) for title, text in texts.items()}


@cache
def clicks_to(target: str) -> dict[str, int]:
    """Returns the length of the shortest path from each page to `target`, in clicks.

    >>> clicks_to("Sahara")["Nile"], clicks_to("Sahara")["Egypt"]
    (1, 2)
    """
    clicks, distance = {target: 0}, 0
    while len(clicks) < len(pages()):
        distance += 1
        unknown = [page for page in pages() if page not in clicks]
        clicks |= {page: distance for page in unknown if clicks.keys() & links()[page]}
    return clicks


@cache
def linking_to(target: str) -> list[str]:
    """Returns the pages with a link to `target`, those with the most incoming links first.

    >>> linking_to("Sahara")
    ['Salt', 'Desert', 'Camel', 'Nile', 'Elephant']
    """
    sources = [title for title in pages() if target in links()[title]]
    return sorted(sources, key=lambda title: -sum(title in titles for titles in links().values()))


def _title(value: Any) -> str | None:
    """The title in lower case without underscores and surrounding quotes and brackets; None if
    `value` is no text or nothing is left of it.

    >>> _title(" 'silk_ROAD'. ")
    'silk road'
    """
    if not isinstance(value, str):
        return None
    return " ".join(value.replace("_", " ").split()).strip("\"'`.[] ").casefold() or None


def _visit(link: str) -> str:
    return json.dumps({"action": "visit_url", "url": link}, ensure_ascii=False)
