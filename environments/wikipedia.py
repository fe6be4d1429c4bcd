"""One article of a live wiki, over the MediaWiki API: one host is asked, and nothing else.

The answer to `action=parse&prop=text` is the article as HTML. Of it the headings and paragraphs are
kept, and each link to another article as [[Title]]; tables, notes and pictures are left out.

>>> read_sections('<h2>Source</h2><p>Salt is in <a href="/wiki/Sea_water#Uses">the sea</a>.</p>')
(('Source', 'Salt is in [[Sea water]].'),)
"""

import json
import re
import time
from functools import lru_cache
from html.parser import HTMLParser
from urllib.parse import unquote

from core.types import UsageError
from environments.pages import Sections

TIMEOUT = 10.0  # seconds, for a connection, for each read, and for the whole answer
MAX_BYTES = 8_000_000  # of an answer; the longest articles are about half of it
USER_AGENT = {"User-Agent": "picoRL/0.1 (wikipedia_maze: reinforcement learning environment)"}
ARTICLE = "/wiki/"  # where MediaWiki keeps its articles
HOST = re.compile(r"(https://[\w.-]+(?::\d+)?|http://(?:127\.0\.0\.1|localhost)(?::\d+)?)/")
TITLES = [  # to walk between, where none is given
    *("Albert Einstein", "Brazil", "Chess", "Chocolate", "Coffee", "DNA", "Elephant", "Gold"),
    *("Japan", "Jazz", "Jupiter", "London", "Mathematics", "Moon", "Opera", "Volcano"),
]
SKIPPED = {"table", "style", "script", "math", "sup"}  # "sup" holds the numbers of notes


class FetchError(Exception):
    """The article could not be had."""


def article_address(base_url: str) -> str:
    """What stands before a title in an article's address; UsageError for a `base_url` unfit.

    >>> article_address("https://en.wikipedia.org/w/api.php")
    'https://en.wikipedia.org/wiki/'
    """
    host = HOST.match(base_url)
    if host is None:
        raise UsageError(f"base_url is https://HOST/../api.php, not {base_url!r}")
    return host[1] + ARTICLE


def pairs(start: str, target: str) -> list[tuple[str, str]]:
    """All (start, target) of two different articles; "": any of TITLES."""
    starts, targets = ([title] if title else TITLES for title in (start, target))
    return [(a, b) for a in starts for b in targets if a != b]


@lru_cache(maxsize=256)  # a group's rollouts ask for the same article, and shall see the same text
def fetch_page(base_url: str, title: str) -> tuple[str, Sections]:
    """The article's own title (redirects of the wiki resolved) and its sections; or FetchError."""
    import httpx

    query = {"action": "parse", "page": title, "prop": "text", "redirects": "1"}
    query |= {"disableeditsection": "1", "disabletoc": "1", "format": "json", "formatversion": "2"}
    body, latest = bytearray(), time.monotonic() + TIMEOUT
    try:
        # no HTTP redirect is followed: it could lead to another host, and an API has no need of one
        client = httpx.Client(headers=USER_AGENT, timeout=TIMEOUT, follow_redirects=False)
        with client, client.stream("GET", base_url, params=query) as response:
            if response.status_code != 200:
                raise FetchError(f"{title}: HTTP status {response.status_code}")
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_BYTES or time.monotonic() > latest:
                    raise FetchError(f"{title}: over {MAX_BYTES} bytes or {TIMEOUT} seconds")
        answer = json.loads(body)
        if "error" in answer:
            raise FetchError(f"{title}: {answer['error']['code']!a}")
        found = (answer["parse"][key].encode("utf-8", "replace") for key in ("title", "text"))
        name, html = (text.decode() for text in found)  # without the lone surrogates JSON can spell
        return name, read_sections(html)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise FetchError(f"{title}: {type(error).__name__}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise FetchError(f"{title}: the answer is not that of a MediaWiki API") from None


def read_sections(html: str) -> Sections:
    """The sections of an article that have text, each with its heading ('' for the first)."""
    reader = _Reader()
    reader.feed(html)
    tidy = ((" ".join(heading.split()), " ".join(text.split())) for heading, text in reader.parts)
    return tuple((heading, text) for heading, text in tidy if text)


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.parts = [["", ""]]  # heading, text
        self.place = None  # what text is added to: 0 the heading, 1 the text, None neither
        self.skipped = []  # open elements that are left out: a table and the tables in it, ..

    def handle_starttag(self, tag, attrs):
        href = dict(attrs).get("href") or ""
        title = _linked_title(href) if tag == "a" and self.place == 1 else ""
        if self.skipped:
            self.skipped += [tag] * (tag == self.skipped[0])
        elif title or tag in SKIPPED:
            self.skipped = [tag]
            self.parts[-1][1] += f"[[{title}]]" if title else ""
        elif tag in ("h2", "h3"):
            self.parts.append(["", ""])
            self.place = 0
        elif tag == "p":
            self.place = 1

    def handle_endtag(self, tag):
        if self.skipped and tag == self.skipped[0]:
            self.skipped.pop()
        elif not self.skipped and tag in ("h2", "h3", "p"):
            self.place = None
            self.parts[-1][1] += " "

    def handle_data(self, data):
        if self.place is not None and not self.skipped:
            self.parts[-1][self.place] += data.replace("[[", "[")


def _linked_title(href: str) -> str:
    """The article that `href` leads to; '' for other pages, such as "File:..."."""
    title = unquote(href.removeprefix(ARTICLE).partition("#")[0])
    title = " ".join(title.replace("_", " ").split())
    other_kind = ":" in title and ": " not in title  # "2001: A Space Odyssey" is an article
    return "" if not href.startswith(ARTICLE) or other_kind or set("[]|") & set(title) else title
