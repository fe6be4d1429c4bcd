"""Fetches one article of a live wiki with the MediaWiki API. It connects to one host only.

`action=parse&prop=text` returns the article as HTML. `read_sections` keeps the headings and
paragraphs, and writes each link to another article as [[Title]]; it drops tables, footnotes and
images.

>>> read_sections('<h2>Source</h2><p>Salt is in <a href="/wiki/Sea_water#Uses">the sea</a>.</p>')
(('Source', 'Salt is in [[Sea water]].'),)
"""

import json
import re
import time
from functools import lru_cache
from html.parser import HTMLParser
from urllib.parse import unquote

from environments.base import EnvFailure, UsageError
from environments.plumbing.pages import Sections

TIMEOUT = 10.0  # seconds: to connect, for each read, and for the whole answer
MAX_BYTES = 8_000_000  # of an answer; about twice the longest articles
USER_AGENT = {"User-Agent": "picoRL/0.1 (wikipedia_maze: reinforcement learning environment)"}
MISSING = ("missingtitle", "invalidtitle", "pagecannotexist")  # error codes of the API
ARTICLE = "/wiki/"  # path of the articles of a MediaWiki
HOST = re.compile(r"(https://[\w.-]+(?::\d+)?|http://(?:127\.0\.0\.1|localhost)(?::\d+)?)/")
TITLES = [  # of start and target, unless given
    *("Albert Einstein", "Brazil", "Chess", "Chocolate", "Coffee", "DNA", "Elephant", "Gold"),
    *("Japan", "Jazz", "Jupiter", "London", "Mathematics", "Moon", "Opera", "Volcano"),
]
SKIPPED = {"table", "style", "script", "math", "sup"}  # "sup" contains footnote numbers


class FetchError(Exception):
    """The wiki has no such article, or one that is too long."""


def article_address(base_url: str) -> str:
    """Returns the address of an article without its title.

    Raises UsageError for a `base_url` that is not an https address (or http to this machine).

    >>> article_address("https://en.wikipedia.org/w/api.php")
    'https://en.wikipedia.org/wiki/'
    """
    host = HOST.match(base_url)
    if host is None:
        raise UsageError(f"base_url must be https://HOST/../api.php, not {base_url!r}")
    return host[1] + ARTICLE


def pairs(start: str, target: str) -> list[tuple[str, str]]:
    """Returns all (start, target) of two different titles; "" stands for any of TITLES."""
    starts, targets = ([title] if title else TITLES for title in (start, target))
    return [(a, b) for a in starts for b in targets if a != b]


@lru_cache(maxsize=256)  # all rollouts of a group must see the same text
def fetch_page(base_url: str, title: str) -> tuple[str, Sections]:
    """Returns the title (after redirects within the wiki) and the sections of an article.

    Raises FetchError if there is no such article or if it exceeds MAX_BYTES, and EnvFailure if the
    wiki does not answer within TIMEOUT or not as the API does.
    """
    import httpx

    query = {"action": "parse", "page": title, "prop": "text", "redirects": "1"}
    query |= {"disableeditsection": "1", "disabletoc": "1", "format": "json", "formatversion": "2"}
    body, deadline = bytearray(), time.monotonic() + TIMEOUT
    try:
        # Do not follow HTTP redirects: they could lead to another host.
        client = httpx.Client(headers=USER_AGENT, timeout=TIMEOUT, follow_redirects=False)
        with client, client.stream("GET", base_url, params=query) as response:
            if response.status_code != 200:
                raise EnvFailure(f"{title}: HTTP status {response.status_code}")
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise FetchError(f"{title}: over {MAX_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise EnvFailure(f"{title}: over {TIMEOUT} seconds")
        answer = json.loads(body)
        if "error" in answer:
            code = answer["error"]["code"]
            raise (FetchError if code in MISSING else EnvFailure)(f"{title}: {code!a}")
        # JSON can contain lone surrogates; replace them
        name, html = (
            answer["parse"][key].encode("utf-8", "replace").decode() for key in ("title", "text")
        )
        return name, read_sections(html)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise EnvFailure(f"{title}: {type(error).__name__}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise EnvFailure(f"{title}: not an answer of a MediaWiki API") from None


def read_sections(html: str) -> Sections:
    """Returns the sections of an article that have text; the heading of the first is empty."""
    reader = _Reader()
    reader.feed(html)
    sections = (
        (" ".join(heading.split()), " ".join(text.split())) for heading, text in reader.parts
    )
    return tuple((heading, text) for heading, text in sections if text)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [["", ""]]  # [heading, text] of each section
        self.place: int | None = None  # where text goes: 0 heading, 1 text, None nowhere
        self.skipped: list[str] = []  # open tags of a skipped element and of its kind inside it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
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

    def handle_endtag(self, tag: str) -> None:
        if self.skipped and tag == self.skipped[0]:
            self.skipped.pop()
        elif not self.skipped and tag in ("h2", "h3", "p"):
            self.place = None
            self.parts[-1][1] += " "

    def handle_data(self, data: str) -> None:
        if self.place is not None and not self.skipped:
            self.parts[-1][self.place] += data.replace("[[", "[")


def _linked_title(href: str) -> str:
    """Returns the title of the article at `href`; "" for any other page, such as "File:..."."""
    title = unquote(href.removeprefix(ARTICLE).partition("#")[0])
    title = " ".join(title.replace("_", " ").split())
    other_kind = ":" in title and ": " not in title  # "2001: A Space Odyssey" is an article
    return "" if not href.startswith(ARTICLE) or other_kind or set("[]|") & set(title) else title
