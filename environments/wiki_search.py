"""Find the missing word or number of a sentence on one of the bundled pages, with two tools.

The pages are those of `pages.json`, about a hundred, each of two or three sections. A task is a
sentence with a gap: a number, or the title of another page. One sentence in eight is reserved for
evaluation.

Observation: one user message, for example

    What is missing in "Edward Jenner used cowpox in ___."? Search the pages, then end with
    <answer>..</answer>.

Tools: `search(query)` returns the titles of the three pages with the most words of the query;
`read(title)` returns a page. Reward of the first response without a call:

    0      no <answer>..</answer>
    0.1    a wrong answer
    1.0    the missing word or number, in any case; only then `info["correct"]` is True

`info["read"]` says whether the policy has read the page. `max_calls` limits the calls of an
episode: after them the tools return an error.

>>> env = WikiSearch()
>>> env.reset(seed=3)[0]["content"].partition('"')[2].partition('"')[0]
'Bartolomeo Cristofori built the first one in Italy about ___.'
>>> env.demonstrate()
'<tool_call>{"name": "search", "arguments": {"query": "Bartolomeo Cristofori built"}}</tool_call>'
>>> env.search("Bartolomeo Cristofori built")
'Piano, Isaac Newton, Carbon'
>>> env.read("Piano").partition(".")[0]
'Invention: Bartolomeo Cristofori built the first one in Italy about 1700'
"""

import random
import re
from functools import cache
from typing import NamedTuple

from environments.base import EVAL_SEEDS, Env, Message, Step, UsageError, is_held_out
from environments.parsing import user
from environments.plumbing.math_answers import find_answer
from environments.plumbing.pages import LINK, bundled, fold
from environments.plumbing.tools import call_text

GAP = "___"
NUMBER = re.compile(r"(?<![\w,])\d[\d,]*\d(?![\w,])")  # of two digits or more
WORD = re.compile(r"\w+")
MAX_FOUND = 3  # pages of a search
MAX_QUERY = 300  # characters that a search reads


class Gap(NamedTuple):
    title: str  # of the page
    sentence: str  # with the gap
    answer: str


class WikiSearch(Env):
    """One gap, filled with the help of `search` and `read`. `max_calls`: 1 or more."""

    def __init__(self, max_calls: int = 6):
        if max_calls < 1:
            raise UsageError(f"max_calls must be 1 or more, not {max_calls}")
        self.max_calls = max_calls
        self.tools = [self.search, self.read]

    def reset(self, seed: int) -> list[Message]:
        rng = random.Random(f"wiki_search {seed}")
        self.task = rng.choice(gaps(seed in EVAL_SEEDS))
        answers = {gap.answer for gap in gaps(False) if gap.answer != self.task.answer}
        self.guess = rng.choice(sorted(answers))
        self.num_calls, self.found, self.seen = 0, "", ""
        ask = "Search the pages, then end with <answer>..</answer>."
        return [user(f'What is missing in "{self.task.sentence}"? {ask}')]

    def search(self, query: str) -> str:
        """
        Search the pages.

        Args:
            query: Words that the page contains.

        Returns:
            Titles of pages, the best first.
        """
        if problem := self._count_call():
            return problem
        words = set(words_of(query[:MAX_QUERY]))
        scores = {title: len(words & page) for title, page in words_by_page().items()}
        titles = sorted((t for t in scores if scores[t]), key=lambda title: -scores[title])
        self.found = ", ".join(titles[:MAX_FOUND])
        return self.found or "no page has these words"

    def read(self, title: str) -> str:
        """
        Read a page.

        Args:
            title: Title of the page.
        """
        if problem := self._count_call():
            return problem
        titles = {fold(name): name for name in bundled()}
        name = titles.get(fold(title))
        if name is None:
            return f"error: there is no page {title[:50]!r}"
        if name == self.task.title:
            self.seen = name
        return "\n".join(f"{heading}: {plain(text)}" for heading, text in bundled()[name])

    def step(self, response: str) -> Step:
        answer = find_answer(response)
        correct = answer is not None and fold(answer) == fold(self.task.answer)
        reward = 1.0 if correct else 0.0 if answer is None else 0.1
        return Step(None, reward, True, {"correct": correct, "read": bool(self.seen)})

    def demonstrate(self, hasty: bool = False) -> str:
        """Searches for rare words, reads the page, then answers; `hasty`: another gap's answer."""
        if hasty:
            return f"<answer>{self.guess}</answer>"
        if self.seen or self.num_calls >= self.max_calls:
            return f"<answer>{self.task.answer}</answer>"
        if self.task.title in self.found.split(", "):
            return call_text("read", title=self.task.title)
        return call_text("search", query=rare_words(self.task.sentence))

    def _count_call(self) -> str:
        self.num_calls += 1
        return "" if self.num_calls <= self.max_calls else "error: no calls are left; answer"


@cache
def gaps(held_out: bool) -> list[Gap]:
    """All tasks of evaluation, or all others."""
    found: dict[str, Gap] = {}
    for title, sections in bundled().items():
        for _, text in sections:
            for sentence in re.split(r"(?<=[.?!]) (?=[A-Z\[])", text):
                if is_held_out(plain(sentence)) != held_out:
                    continue
                for match in [*LINK.finditer(sentence), *NUMBER.finditer(sentence)]:
                    gap = plain(sentence[: match.start()] + GAP + sentence[match.end() :])
                    found.setdefault(gap, Gap(title, gap, plain(match[0])))
    return list(found.values())


@cache
def words_by_page() -> dict[str, set[str]]:
    """The words of each bundled page, with those of its title, in lower case."""
    return {
        title: set(words_of(plain(f"{title} {' '.join(map(' '.join, sections))}")))
        for title, sections in bundled().items()
    }


def words_of(text: str) -> list[str]:
    """The words of a text in lower case."""
    return WORD.findall(text.lower())


def rare_words(sentence: str) -> str:
    """The three words of a sentence that the fewest pages have.

    >>> rare_words("Edward Jenner used cowpox in ___.")
    'Edward Jenner cowpox'
    """
    pages = words_by_page().values()
    words = [w for w in WORD.findall(sentence) if w != GAP]
    counts = {word: sum(word.lower() in page for page in pages) for word in words}
    return " ".join(sorted(counts, key=lambda word: counts[word])[:3])


def plain(text: str) -> str:
    """A text without the brackets of links."""
    return LINK.sub(r"\1", text)
