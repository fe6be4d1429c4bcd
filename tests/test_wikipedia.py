"""The live wiki, against a local HTTP server: text, links, redirects and failed requests."""

import json
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import pytest
from conftest import loopback
from test_wikipedia_maze import visit, walk

from core.types import UsageError
from environments.base import EnvFailure
from environments.plumbing import wikipedia
from environments.wikipedia_maze import WikipediaMaze

ARTICLES = {
    "Salt": '<p>Salt is in <a href="/wiki/Sea_water#Uses" title="Sea water">the <b>sea</b></a> and '
    '<a href="/wiki/Rock_(geology)">rock</a>.<sup class="reference"><a href="#n1">[1]</a></sup></p>'
    '<div class="mw-heading mw-heading2"><h2 id="Use">Use</h2></div><p>In <a href="/wiki/Food">food'
    '</a>; see <a href="/wiki/File:S.jpg">a picture</a>, <a href="/w/index.php?title=X">x</a> and '
    '<a href="https://evil.example/wiki/Evil">elsewhere</a>.</p><table><tr><td><p><a href="/wiki/'
    'Box">Box</a></p></td></tr></table><h2>References</h2><ol><li>none</li></ol>',
    "Sea": '<p>It tastes of <a href="/wiki/Salt">salt</a> &amp; '
    'is <a href="/wiki/Deep">deep</a>.</p>',
    "Deep": "<p>It leads <a href='/wiki/Sea'>back</a>.</p>",
    "Food": '<p>It needs <a href="/wiki/Broken">x</a>, <a href="/wiki/Fail">f</a>, '
    '<a href="/wiki/Gone">g</a>, <a href="/wiki/Odd_%22%C3%A9%22">q</a>.</p>',
}
OTHER_HOSTS = [  # links of a page; the policy asks for them too
    *("//evil.example/wiki/Evil", "https://evil.example/wiki/Evil", "http:/evil.example/wiki/Evil"),
    *("\\\\evil.example\\wiki\\Evil", "https://127.0.0.1@evil.example/wiki/Evil"),
    *("javascript:alert(1)", "data:text/html,Evil"),
]
TITLES = ["/evil.example/A", "../../evil.example/B?c=d&page=C", "@evil.example"]  # valid titles
LINKS = [*OTHER_HOSTS, *(f"/wiki/{title}" for title in (*TITLES, "Away"))]
ARTICLES["Home"] = "<base href='//evil.example/'>" + "".join(
    f'<p>see <a href="{link}">x</a></p>' for link in LINKS
)
ARTICLES |= dict.fromkeys(TITLES, ARTICLES["Deep"])
REDIRECTS = {"Sea water": "Sea", "Ocean": "Sea"}


class Wiki(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        assert (query["action"], query["prop"], query["format"]) == ("parse", "text", "json")
        title = REDIRECTS.get(query["page"], query["page"])
        self.send_response({"Fail": 500, "Away": 302}.get(title, 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Location", self.server.elsewhere)  # read in a redirect
        self.send_header("Refresh", f"0; url={self.server.elsewhere}")
        self.end_headers()
        if title in ARTICLES:
            answer = {"parse": {"title": title, "pageid": 1, "text": ARTICLES[title]}}
        else:
            answer = {"error": {"code": "missingtitle", "info": "It doesn't exist."}}
        body = "<html>" if title == "Broken" else json.dumps(answer)
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def servers(monkeypatch):
    """A wiki, and another host to which `Away` is a redirect; `asked`: the paths of requests."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    wikipedia.fetch_page.cache_clear()
    with loopback(Wiki) as here, loopback(Wiki) as there:
        here.elsewhere = there.elsewhere = url_of(there)
        yield here, there
    wikipedia.fetch_page.cache_clear()


@pytest.fixture
def wiki(servers):
    return url_of(servers[0])


def url_of(server):
    return f"{server.url}/w/api.php"


def live(wiki, start="Salt", target="Deep", **options):
    return WikipediaMaze(live=True, base_url=wiki, start=start, target=target, **options)


def test_a_page_has_its_paragraphs_headings_and_links_to_articles(wiki):
    env = live(wiki)
    assert env.reset(0)[0]["content"].splitlines()[1:] == [
        "Target: Deep, 5 left",
        "Page: Salt",
        "Salt is in [[Sea water]] and [[Rock (geology)]].",
        "Use: In [[Food]]; see a picture, x and elsewhere.",
        "Links: Sea water, Rock (geology), Food",
    ]
    links = live(wiki, start="Food").reset(0)[0]["content"].splitlines()[-1]
    assert links.endswith('Gone, Odd "é"')


def test_a_visit_follows_redirects_within_the_wiki(wiki):
    env = live(wiki)
    env.reset(0)
    steps = walk(env, "sea_water", "Deep")
    assert steps[0].message["content"].splitlines()[1:] == [
        "Page: Sea",
        "It tastes of [[Salt]] & is [[Deep]].",
        "Links: Salt, Deep",
    ]
    assert (steps[1].reward, steps[1].done) == (1.0, True)
    assert steps[1].info == {"correct": True, "visits": 2}
    env = live(wiki, target="Ocean")  # a redirect to Sea
    env.reset(0)
    assert walk(env, "Sea water")[0].info["correct"] is True


@pytest.mark.parametrize("title", ["Broken", "Fail"])
def test_a_wrong_answer_of_the_wiki_is_a_failure_and_no_reward(wiki, title):
    env = live(wiki, start="Food")
    env.reset(0)
    with pytest.raises(EnvFailure, match=f"{title}: "):
        env.step(visit(title))


def test_a_page_that_does_not_exist_ends_the_episode_with_reward_0(wiki):
    env = live(wiki, start="Food")
    env.reset(0)
    step = env.step(visit("Gone"))
    assert (step.reward, step.done, step.message) == (0.0, True, None)
    assert step.info["correct"] is False and step.info["visits"] == 1
    assert step.info["error"].startswith("Gone: ")


def test_no_other_host_is_asked(servers):
    here, there = servers
    env = live(url_of(here), start="Home", max_visits=99)
    for wish in OTHER_HOSTS:
        env.reset(0)
        assert env.links == [*TITLES, "Away"]
        assert env.step(visit(wish)).reward < 0  # not a link of this page
    for title in TITLES:
        env.reset(0)
        assert not env.step(visit(title)).done
    env.reset(0)
    with pytest.raises(EnvFailure, match="Away: HTTP status 302"):
        env.step(visit("Away"))
    assert len(here.asked) > 4 and there.asked == []
    assert all(path.startswith("/w/api.php?action=parse&page=") for path in here.asked)
    for hidden in ("https://en.wikipedia.org@evil.example/api.php", "//evil.example/"):
        with pytest.raises(UsageError, match="base_url"):
            live(hidden)
