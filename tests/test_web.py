"""The page of `python -m environments play SPEC --web`: its server, and its parts in a browser."""

import http.client
import json
import socket
import threading
from functools import partial

import pytest

from environments.base import Env, Step, UsageError
from environments.parsing import user
from environments.plumbing.registry import make
from environments.plumbing.web import Episode, Page


@pytest.fixture
def serve():
    """Serves an environment; returns its page."""
    ended, threads = threading.Event(), []

    def work(page):
        while not ended.is_set():
            page.work()
        page.server.close()

    def serve(env, name="env", **talkers):
        page = Page(Episode(env, name, 1, {}, talkers=talkers))
        threads.append(threading.Thread(target=work, args=(page,)))
        threads[-1].start()
        return page

    yield serve
    ended.set()
    for thread in threads:
        thread.join()


def ask(server, path, body=None, **headers):
    """(status, headers, text) of a request"""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", **headers}
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, headers)
    response = connection.getresponse()
    result = response.status, dict(response.getheaders()), response.read().decode()
    connection.close()
    return result


def test_episode_is_played_by_requests(serve):
    server = serve(make("tic_tac_toe:opponent=perfect"))
    state = json.loads(ask(server, "/state")[2])
    assert state["waiting"] == [{"agent": "player", "players": ["demonstrator", "random player"]}]
    status, _, text = ask(server, "/act", {"agent": "player", "text": "I resign"})
    state = json.loads(text)
    assert status == 200
    assert state["log"][1] == {"agent": "player", "speaker": "you", "text": "I resign"}
    assert state["log"][2]["reward"] == -0.1 and state["returns"] == {"player": -0.1}
    while state["waiting"]:
        state = json.loads(ask(server, "/act", {"agent": "player", "player": "demonstrator"})[2])
    assert state["log"][-2]["done"] and state["returns"]["player"] == -0.1  # perfect play: a draw
    assert state["log"][-1]["text"].startswith("A draw. Board: ")
    state = json.loads(ask(server, "/new", {"seed": 5})[2])
    assert state["seed"] == 5 and len(state["log"]) == 1 and state["returns"] == {}


def test_each_talker_hears_its_own_conversation_only(serve):
    heard = []

    def respond(name, chat):
        if len(chat) > 3:
            raise UsageError("no room left")
        heard.append((name, [message["content"] for message in chat]))
        return f"{name} {len(chat)}"

    talkers = {name: partial(respond, name) for name in ("before", "trained")}
    server = serve(make("letter_counting"), **talkers)
    for text in ("one", "two"):
        state = json.loads(ask(server, "/talk", {"text": text})[2])
    assert heard[2:] == [(name, ["one", f"{name} 1", "two"]) for name in talkers]
    said = [(row["speaker"], row["text"]) for row in state["talk"]]
    assert said[3:] == [("you", "two"), ("before", "before 3"), ("trained", "trained 3")]
    assert len(said) == 6 and len(state["log"]) == 1 and state["talkers"] == [*talkers]
    status, _, text = ask(server, "/talk", {"text": "three"})  # does not fit: nothing changes
    assert (status, json.loads(text)["error"]) == (400, "no room left")
    assert json.loads(ask(server, "/state")[2])["talk"] == state["talk"]
    assert json.loads(ask(server, "/talk", {"text": ""})[2])["talk"] == []


@pytest.mark.parametrize("headers", [
    {"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Content-Type": "text/plain"},
])  # fmt: skip
def test_request_of_another_site_is_refused(serve, headers):
    server = serve(make("letter_counting"))
    status, _, _ = ask(server, "/act", {"agent": "player", "text": "x"}, **headers)
    assert status == 403 and len(json.loads(ask(server, "/state")[2])["log"]) == 1
    if "Host" in headers:
        assert ask(server, "/state", **headers)[0] == 403


def test_page_allows_its_own_script_only_and_is_on_loopback(serve):
    server = serve(make("letter_counting"))
    status, headers, text = ask(server, "/")
    nonce = headers["content-security-policy"].split("'nonce-")[1].split("'")[0]
    assert status == 200 and f'<script nonce="{nonce}">' in text and "innerHTML" not in text
    assert "default-src 'none'" in headers["content-security-policy"]
    assert server.server.address[0] == "127.0.0.1"
    assert nonce not in ask(server, "/")[2]


@pytest.fixture
def visit(tab, serve):
    """Opens the page of an environment; in the end it has fetched nothing else."""
    page, requests, _ = tab
    page.set_viewport_size({"width": 400, "height": 800})
    homes = ["data:"]

    def visit(*args, **kwargs):
        server = serve(*args, **kwargs)
        homes.append(f"http://127.0.0.1:{server.port}/")
        page.goto(homes[-1])
        page.wait_for_selector("html[data-ready]")
        return page

    yield visit
    assert all(url.startswith(tuple(homes)) for url in requests)
    assert page.evaluate("document.body.scrollWidth <= innerWidth")  # no sideways scrolling


def ready(page, rows):
    page.wait_for_selector(f"html[data-ready='{rows}']")


@pytest.mark.browser
def test_board_is_clicked_until_the_game_is_over(visit):
    page = visit(make("tic_tac_toe"))
    assert page.locator(".board").count() == 1
    moves = 0
    while not page.locator("#end").is_visible():
        rows = int(page.get_attribute("html", "data-ready"))
        page.locator(".board button").first.click()
        moves += 1
        page.wait_for_selector(f"html:not([data-ready='{rows}'])")
    assert page.locator(".board").last.locator("button").count() == 0
    assert page.locator(".board").count() == moves + 1  # also the last one
    assert "The episode is over: return" in page.inner_text("#end")
    assert page.inner_text("article.response >> nth=0").endswith("</move>")
    assert page.locator(".reward").count() == moves


@pytest.mark.browser
def test_choices_and_typed_answers_get_the_form_that_the_task_asks_for(visit):
    page = visit(make("wikipedia_maze"))
    page.click("#choices button:text-is('Sun')")
    ready(page, 4)
    assert page.inner_text("article.response p") == '{"action": "visit_url", "url": "Sun"}'
    page = visit(make("letter_counting"))
    page.fill("#text", "2")
    assert page.inner_text("#hint") == "sends <answer>2</answer>"
    page.press("#text", "Enter")
    ready(page, 3)
    assert page.inner_text("article.response p") == "<answer>2</answer>"
    assert page.inner_text(".reward") == "reward +0.1"
    page.click("#next")
    ready(page, 1)
    assert page.input_value("#seed") == "2"


class Failing(Env):
    def reset(self, seed):
        return [user("?")]

    def step(self, response):
        raise SystemExit(response)


def test_an_environment_that_ends_the_program_and_too_long_a_text_are_errors(serve):
    server, long = serve(Failing()), "x" * 1_000_000
    for text, status, error in (
        ("bye", 400, "SystemExit: bye"), (long, 413, "a request has at most 1,000,000 bytes"),
    ):  # fmt: skip
        found, _, answer = ask(server, "/act", {"agent": "player", "text": text})
        assert (found, json.loads(answer)["error"]) == (status, error)
    assert ask(server, "/state")[0] == 200


def test_a_browser_that_leaves_ends_nothing():
    page = Page(Episode(make("letter_counting"), "env", 1))
    with socket.create_connection(page.server.address) as connection:
        connection.sendall(f"GET /state HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n\r\n".encode())
        call, answer = page.calls.get()
    while not answer.cancelled():
        pass
    page.calls.put((call, answer))
    page.work()
    page.server.close()


class Hostile(Env):
    TEXT = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'> \u202e"

    def reset(self, seed):
        return [user(self.TEXT)]

    def step(self, response):
        return Step(user(response), 0.0, False, {self.TEXT: self.TEXT})


@pytest.mark.browser
def test_hostile_text_is_shown_and_not_run(visit):
    page = visit(Hostile(), name=Hostile.TEXT)
    page.fill("#text", Hostile.TEXT)
    page.click("#send")
    ready(page, 4)
    shown = Hostile.TEXT.replace("\u202e", "\ufffd")
    assert page.inner_text("#env") == shown
    assert page.locator("article p").all_text_contents() == [shown] * 3
