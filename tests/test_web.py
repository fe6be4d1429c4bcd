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


@pytest.fixture
def visit(tab, serve):
    """Opens the page of an environment; in the end it has fetched nothing else."""
    page, requests, _ = tab
    page.set_viewport_size({"width": 400, "height": 800})
    homes = ["data:"]

    def visit(*env):
        homes.append(str(serve(*env).base_url))
        page.goto(homes[-1])
        page.wait_for_selector("html[data-ready]")
        return page

    yield visit
    assert all(url.startswith(tuple(homes)) for url in requests)
    assert page.evaluate("document.body.scrollWidth <= innerWidth")  # no sideways scrolling


@pytest.mark.browser
def test_a_board_is_clicked_until_the_game_is_over_and_played_again(visit):
    page = visit(make("tic_tac_toe"))
    while not page.locator("#end").is_visible():
        rows = page.get_attribute("html", "data-ready")
        page.locator("td button").first.click()
        page.wait_for_selector(f"html:not([data-ready='{rows}'])")
    assert page.locator("td button").count() == 0 and "return" in page.inner_text("#end")
    page.click("#next")
    page.wait_for_selector("html[data-ready='1']")
    assert page.input_value("#seed") == "2" and not page.locator("#end").is_visible()


@pytest.mark.browser
def test_answers_get_the_form_of_the_task_and_hostile_text_is_shown_and_not_run(visit):
    page = visit(make("wikipedia_maze"))
    page.click("#choices button:text-is('Sun')")
    page.wait_for_selector("article.you")
    assert page.inner_text("article.you p") == '{"action": "visit_url", "url": "Sun"}'
    page = visit(make("letter_counting"))
    page.fill("#text", "2")
    assert page.inner_text("#hint") == "sends <answer>2</answer>"
    page.press("#text", "Enter")
    page.wait_for_selector(".reward")
    page = visit(Hostile(), HOSTILE)
    page.fill("#text", HOSTILE)
    page.click("#send")
    page.wait_for_selector("html[data-ready='4']")
    shown = HOSTILE.replace("\u202e", "\ufffd")
    assert page.inner_text("#name") == shown
    assert page.locator("article p").all_text_contents() == [shown] * 3
