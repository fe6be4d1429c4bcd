"""The page of `python -m environments play SPEC --web`: requests, and what a browser shows."""

import asyncio
import threading

import httpx
import pytest

from environments.base import Env, Step
from environments.parsing import user
from environments.plumbing.registry import make
from environments.plumbing.web import Episode, Page

HOSTILE = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'> \u202e"


class Hostile(Env):
    def reset(self, seed):
        return [user(HOSTILE)]

    def step(self, response):
        if response == "bye":
            raise SystemExit("bye")
        return Step(user(asyncio.run(asyncio.sleep(0, response))), 0.0, False, {HOSTILE: HOSTILE})


@pytest.fixture
def serve():
    """Serves the page of an environment; returns a client of it."""
    ended, threads = threading.Event(), []

    def work(page):
        while not ended.is_set():
            page.work()
        page.close()

    def serve(env, name="x"):
        page = Page(Episode(env, name, 1))
        threads.append(threading.Thread(target=work, args=(page,)))
        threads[-1].start()
        return httpx.Client(base_url=f"http://127.0.0.1:{page.address[1]}/")

    yield serve
    ended.set()
    for thread in threads:
        thread.join()


def test_an_episode_is_played_by_requests(serve):
    client = serve(make("tic_tac_toe:opponent=perfect"))
    assert client.get("state").json()["waiting"] == ["player"]
    for text in ("I resign", *(f"<move>{cell}</move>" for cell in range(1, 10))):
        found = client.post("move", json={"agent": "player", "text": text})
    state = client.get("state").json()
    assert state["log"][1] == {"agent": "player", "speaker": "you", "text": "I resign"}
    assert state["log"][2]["reward"] == -0.1
    assert [row["done"] for row in state["log"] if "reward" in row][-1]
    assert (found.status_code, found.json()) == (400, {"error": "player is not asked to act"})
    state = client.post("move", json={"seed": 5}).json()
    assert state["seed"] == 5 and len(state["log"]) == 1 and state["returns"] == {}


def test_nonsense_and_an_environment_that_exits_are_errors_and_other_sites_are_refused(serve):
    client, kind = serve(Hostile()), {"content-type": "application/json"}
    for body in (b"{", b"[1]", b'{"seed": "x"}', b'{"agent": "player", "text": "bye"}'):
        found = client.post("move", content=body, headers=kind)
        assert found.status_code == 400 and found.json()["error"], body
    assert client.post("move", content=b'{"seed": 2}').status_code == 403  # as a form would
    assert client.get("state", headers={"host": "evil.example"}).status_code == 403
    assert client.get("state").json()["seed"] == 1


@pytest.mark.browser
def test_moves_are_clicked_and_hostile_text_is_shown_and_not_run(tab, serve):
    page, requests, _ = tab
    homes = ["data:"]

    def visit(*env):
        homes.append(str(serve(*env).base_url))
        page.goto(homes[-1])
        page.wait_for_selector("html[data-ready]")

    visit(make("tic_tac_toe"))
    while not page.locator("#end").is_visible():
        rows = page.get_attribute("html", "data-ready")
        page.locator("td button").first.click()
        page.wait_for_selector(f"html:not([data-ready='{rows}'])")
    visit(make("letter_counting"))
    page.fill("#text", "2")
    page.press("#text", "Enter")
    page.wait_for_selector(".reward")
    visit(Hostile(), HOSTILE)
    page.fill("#text", HOSTILE)
    page.click("#send")
    page.wait_for_selector("html[data-ready='4']")
    shown = HOSTILE.replace("\u202e", "\ufffd")
    assert page.inner_text("#name") == shown
    assert page.locator("article p").all_text_contents() == [shown] * 3
    assert all(url.startswith(tuple(homes)) for url in requests)  # nothing else is fetched
