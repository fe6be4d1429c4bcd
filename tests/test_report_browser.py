"""A run's page in a real browser: quick, offline, right, for the keyboard and for a phone.

These tests need chromium and playwright and never skip: `pytest -m browser`.
"""

import math
import random
import shutil
import statistics
import time
from collections import defaultdict

import pytest
from test_report import CONFIG, data_of, evaluated, look, row, write_run

from core.report.compare import write_comparison, write_report

pytestmark = pytest.mark.browser

FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()
UPDATES, GROUPS, TRIES, TOKENS = 100, 8, 8, 16
EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>&lt; \ud800"
NAME = "a<img src=x onerror=window.pwned=3>"  # of the run: it may hold what a folder's name may
TRICKS = [
    "<script>window.pwned = 4</script>",
    "</SCRIPT\t><script>window.pwned = 5</script >",
    "<!--", "<!--<script>", "--><script>window.pwned = 6</script><!--", "--!>", "]]>", "<?x ?>",
    "&lt;script&gt;window.pwned = 7&lt;/script&gt;", "&#60;img src=x onerror=window.pwned=8&#x3E;",
    "&amp;lt;b&amp;gt; &ltb&gt &nbsp; &", "\\u003cscript\\u003ewindow.pwned=9\\u003c/script\\u003e",
    "\u2028window.pwned = 10\u2029", "\\", "\"}]};window.pwned=11//", "`${window.pwned = 12}`",
    "'\"><svg onload=window.pwned=13>", "<style>*{display:none}</style><base href=//evil.example/>",
    "<iframe srcdoc='<script>parent.pwned=14</script>'>", "</div></article></body></html><b>x</b>",
    "<math><mi//xlink:href='data:x,<script>window.pwned=15</script>'>", "$data {{7*7}} $&", "\0<b>",
    "javascript:window.pwned=16", "\u202e<b>\ufeff\u200b", "__proto__", "constructor",
]  # fmt: skip


def synthetic(seed):
    """Metrics and rows of 100 updates x 64 rollouts x 16 tokens looked at, always the same."""
    rng, metrics, rows = random.Random(seed), [], []
    for update in range(UPDATES + 1):
        record = {"update": update, "reward/mean": rng.random(), "reward/std": 0.3}
        metrics.append(record | {"loss": rng.gauss(0, 1), "tokens/sampled": 1024})
        if update % 50 == 0:
            metrics[-1] |= evaluated(update, 0.2 + update / 200)
            rows += [row("eval", update, s, f"at {update} {EVIL}", float(rng.random() < 0.5))
                     for s in range(8)]  # fmt: skip
        for group in range(GROUPS if update else 0):
            sure = group == 3  # all paid alike
            for attempt in range(TRIES):
                paid = 0.5 if sure else rng.choice([0.0, 0.1, round(rng.random(), 3), 1.0])
                rows.append(rollout(rng, update, group, attempt, paid))
    return metrics, rows


def rollout(rng, update, group, attempt, paid):
    texts = [rng.choice(["a ", "r1", " <b>", "\n", "&amp;", "é"]) for _ in range(TOKENS)]
    sampler = [-round(rng.expovariate(1), 4) for _ in texts]
    trainer = [round(x + rng.gauss(0, 0.01), 4) for x in sampler]
    after = [round(x + rng.gauss(0, 0.2), 4) for x in trainer]
    tried = row("train", update, group, f"try {attempt} at {update}.{group}", paid)
    seen = look(texts, sampler, trainer, after, [round(paid - 0.4, 4)] * TOKENS)
    hit_token_limit = rng.random() < 0.1
    return tried | {"token_traces": [seen], "tokens": TOKENS, "hit_token_limit": hit_token_limit}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(path of the report, its rows); the fifth update holds text that would like to be markup."""
    folder = tmp_path_factory.mktemp("runs") / NAME
    metrics, rows = synthetic(0)
    config = {**CONFIG, "env": [EVIL], "model_id": EVIL}
    metrics += [{"update": UPDATES, f"info/{EVIL}": 1.0}]
    for r in rows:
        if r["kind"] == "train" and r["update"] == 5:
            r["messages"][0] = {"role": EVIL, "content": EVIL}
            r["messages"][1]["content"] = EVIL
            r["agent"], r["error"], r["info"] = EVIL, EVIL, {EVIL: EVIL}
            r["token_traces"][0]["text"][0] = EVIL
    return write_report(write_run(folder, metrics, rows, config), config), rows


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Open a file and wait until it is ready; no request but for the file, no complaint, nothing of
    a model's text run, until the test ends."""
    context, asked, complaints, pages = None, [], [], []

    def go(path, width=1280, height=900, **settings):
        nonlocal context
        context = chromium.new_context(viewport={"width": width, "height": height}, **settings)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=10_000)
        pages.append(page)
        return page

    yield go
    assert complaints == []
    assert len(asked) == len(pages) and all(url.startswith("file:///") for url in asked)
    assert all(page.evaluate("typeof window.pwned") == "undefined" for page in pages)
    context.close()


def of_update(rows, update):
    """The groups of an update, in order."""
    groups = defaultdict(list)
    for r in rows:
        if (r["kind"], r["update"]) == ("train", update):
            groups[r["group_id"]].append(r)
    return [groups[i] for i in sorted(groups)]


def choose_update(page, update):
    page.locator("#update").fill(str(update - 1))
    assert page.locator("#at").inner_text() == f"update {update} of {UPDATES}"


def shown_groups(page):
    """Which tasks the rows show, top to bottom."""
    return [int(t.split()[1]) for t in page.locator("#groups .q").all_inner_texts()]


def test_100_updates_of_64_rollouts_are_small_and_open_within_2_s(run, visit):
    path, _ = run
    assert path.stat().st_size <= 10_000_000
    took = []
    for _ in range(3):  # the best of three: other programs may be busy
        started = time.perf_counter()
        page = visit(path)
        took.append(time.perf_counter() - started)
    assert min(took) <= 2
    assert page.locator("#update").get_attribute("max") == str(UPDATES - 1)
    assert page.locator("#groups article").count() == GROUPS
    assert "left out" not in page.locator("#about").inner_text()


@pytest.mark.parametrize(
    ("by", "worth"), [("best", max), ("mean", statistics.fmean), ("spread", statistics.pstdev)]
)
def test_groups_are_sorted_by_return(run, visit, by, worth):
    path, rows = run
    page = visit(path)
    choose_update(page, 40)
    groups = of_update(rows, 40)
    assert shown_groups(page) == [*range(GROUPS)]
    page.select_option("#sort", by)
    value = [worth([r["return"] for r in group]) for group in groups]
    right = sorted(range(GROUPS), key=lambda i: -round(value[i], 9))
    assert shown_groups(page) == right != [*range(GROUPS)]
    labels = page.locator("#groups article").first.locator(".marks button").all_inner_texts()
    paid = [float(label.split()[1]) for label in labels]
    best_first = sorted((r["return"] for r in groups[right[0]]), reverse=True)
    assert paid == pytest.approx(best_first, abs=0.00501)


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("", lambda r: True),
        ("right", lambda r: r["info"]["correct"]),
        ("wrong", lambda r: not r["info"]["correct"]),
        ("cut off", lambda r: r["hit_token_limit"]),
        ("with spread", lambda r: r["group_id"] != 3),
    ],
)
def test_filters_keep_what_they_say(run, visit, name, keep):
    path, rows = run
    page = visit(path)
    choose_update(page, 41)
    page.select_option("#filter", name)
    kept = [[r for r in group if keep(r)] for group in of_update(rows, 41)]
    number, groups = sum(map(len, kept)), sum(map(bool, kept))
    assert page.locator("#groups .marks button").count() == number
    plural = ["group" + "s" * (groups != 1), "rollout" + "s" * (number != 1)]
    assert page.locator("#count").inner_text() == f"{groups} {plural[0]}, {number} {plural[1]}"


def test_search_finds_a_rollout_in_this_or_in_all_updates(run, visit):
    page = visit(run[0])
    choose_update(page, 30)
    page.fill("#search", "TRY 3 at 77.")
    assert page.locator("#count").inner_text() == "0 groups, 0 rollouts"
    page.check("#everywhere")
    assert page.locator("#count").inner_text() == f"{GROUPS} groups, {GROUPS} rollouts"
    page.fill("#search", "try 3 at 77.4")
    assert page.locator("#groups .q").all_inner_texts() == ["update 77: task 4"]
    page.fill("#search", "")
    assert page.locator("#count").inner_text() == "800 groups, 6,400 rollouts"
    assert page.locator("#groups article").count() == 40  # and the others on demand
    page.get_by_role("button", name="show more (760 left)").click()
    assert page.locator("#groups article").count() == 80


def test_a_token_shows_its_own_numbers(run, visit):
    path, rows = run
    page = visit(path)
    choose_update(page, 62)
    place, attempt, at = 2, 5, 9
    group = of_update(rows, 62)[place]
    article = page.locator("#groups article").nth(place)
    assert "task 2" in article.inner_text()
    article.get_by_role("button", name=f"rollout {attempt + 1}:").click()
    seen = group[attempt]["token_traces"][0]
    article.get_by_role("option").nth(at).click()
    lens = article.locator(".lens")
    facts = dict(
        zip(lens.locator("dt").all_inner_texts(), lens.locator("dd").all_inner_texts(), strict=True)
    )
    sampler, trainer, after, advantage = (
        seen[name][at] for name in ("sampler", "trainer", "after", "advantage")
    )
    change = after - trainer
    expected = {
        "p, sampler": math.exp(sampler), "p, trainer": math.exp(trainer),
        "p, after": math.exp(after), "trainer / sampler": math.exp(trainer - sampler),
        "after / before": math.exp(change), "advantage": advantage, "log-prob change": change,
        "product of both": advantage * change,
    }  # fmt: skip
    assert facts.keys() == expected.keys()
    for name, value in expected.items():
        assert float(facts[name].replace("−", "-")) == pytest.approx(value, abs=0.000051), name
    told = lens.inner_text()
    assert f"token {at + 1} of {TOKENS}" in told
    worth = "Better" if advantage > 0 else "Worse"
    assert f"{worth} than its group" in told
    assert ("made likelier" if change > 0 else "made less likely") in told
    text = seen["text"][at].replace("\n", "⏎\n")
    assert lens.locator(".what").text_content() == f"“{text}”"


def test_tokens_differ_in_more_than_colour(run, visit):
    path, rows = run
    page = visit(path)
    choose_update(page, 62)
    article = page.locator("#groups article").nth(2)
    article.get_by_role("button", name="rollout 6:").click()
    seen = of_update(rows, 62)[2][5]["token_traces"][0]
    looks = article.get_by_role("option").evaluate_all(
        """all => all.map(token => getComputedStyle(token)).map(style => [
            style.borderBottomStyle, style.backgroundImage !== "none",
            parseFloat(style.borderBottomWidth)])"""
    )
    kinds = set()
    columns = (seen[name] for name in ("trainer", "after", "advantage"))
    for (style, hatched, width), (trainer, after, advantage) in zip(
        looks, zip(*columns, strict=True), strict=True
    ):
        assert style == ("solid" if after > trainer else "dotted")
        assert hatched == ((after - trainer) * advantage < 0)  # against what it was paid for
        assert width >= 1
        kinds.add((style, hatched))
    assert len(kinds) == 2  # of one advantage: as asked, and against it
    products = [abs((b - a) * c) for a, b, c in zip(seen["trainer"], seen["after"],
                                                    seen["advantage"], strict=True)]  # fmt: skip
    most, least = products.index(max(products)), products.index(min(products))
    assert looks[most][2] > looks[least][2]  # the stronger, the thicker


def test_the_keyboard_is_enough(run, visit):
    page = visit(run[0])
    focused = "document.activeElement"
    for _ in range(60):  # from the top of the page to the first rollout
        page.keyboard.press("Tab")
        if page.evaluate(f"{focused}.closest('.marks') !== null"):
            break
        style = page.evaluate(f"getComputedStyle({focused}).outlineStyle")
        assert style != "none", page.evaluate(f"{focused}.outerHTML")
    page.keyboard.press("p")
    assert page.locator("#at").inner_text() == f"update {UPDATES - 1} of {UPDATES}"
    page.keyboard.press("n")
    page.locator("#groups .marks button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator(".open").count() == 1
    chosen = page.evaluate(f"{focused}.ariaLabel")
    for _ in range(3):  # past the close button to the tokens
        page.keyboard.press("Tab")
        if page.evaluate(f"{focused}.getAttribute('role')") == "option":
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "token 3 of 16" in page.locator(".lens").inner_text()
    page.keyboard.press("End")
    assert "token 16 of 16" in page.locator(".lens").inner_text()
    assert page.locator("[role=option][aria-selected=true]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".open").count() == 0
    assert page.evaluate(f"{focused}.ariaLabel") == chosen
    page.keyboard.press("/")
    page.keyboard.type("np")  # typed, not obeyed
    assert page.locator("#search").input_value() == "np"
    assert page.locator("#at").inner_text() == f"update {UPDATES} of {UPDATES}"


def test_charts_are_read_with_the_arrow_keys(run, visit):
    page = visit(run[0])
    chart = page.locator("#charts .card").first
    assert chart.locator("output").inner_text() == "update 100: 0.7 [0.6, 0.8]"
    chart.locator("svg").focus()
    page.keyboard.press("ArrowLeft")
    assert chart.locator("output").inner_text() == "update 50: 0.45 [0.35, 0.55]"


def test_a_phone_needs_no_scrolling_sideways(run, visit):
    page = visit(run[0], 390, 844)
    choose_update(page, 5)  # with its long words that nothing breaks
    page.locator("#groups .marks button").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = (
        page.locator("#pairs .two")
        .first.locator("> div")
        .evaluate_all("all => all.map(e => e.getBoundingClientRect().left)")
    )
    assert boxes[0] == boxes[1]  # one below the other


def test_no_text_becomes_markup(run, visit):
    page = visit(run[0])
    choose_update(page, 5)
    article = page.locator("#groups article").first
    article.locator(".marks button").first.click()
    told = article.text_content()
    assert told.count(EVIL) >= 5  # question, role, what was asked, a token, the error
    assert article.locator("img, script, b b").count() == 0
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2
    assert EVIL in page.locator("#about").text_content()
    assert NAME in page.title()
    assert EVIL in page.locator("#pairs").text_content()
    page.locator("#charts select").select_option(f"info/{EVIL}")
    assert f"info/{EVIL}" in page.locator("#charts h3").last.text_content()


def tricky_page(folder, texts):
    """Write a page of two runs with each text wherever a text may stand; returns its path."""
    folder.mkdir()
    names = [text.replace("/", "|").replace("\0", "0") for text in texts]
    runs = []
    for i, (text, name) in enumerate(zip(texts, names, strict=True)):
        seen = look([text, "b"], *[[-0.5, -0.25]] * 4)
        shared = {"asked": text, "info": {"correct": i > 3, text: text}, "env": text, "agent": text}
        rows = [
            row("eval", 0, 1, text, **shared),
            row("train", 1, 1, text, error=text, token_traces=[seen], **shared),
            row("eval", 1, 1, text, 1.0, **shared),
        ]
        metrics = [
            {"update": update, f"info/{text}": 1.0, f"eval/{text}/accuracy": 0.5,
             f"eval/{text}/ci_low": 0.25, f"eval/{text}/ci_high": 0.75}
            for update in (0, 1)
        ]  # fmt: skip
        config = {"algo": text, "env": [text], "model_id": text, "seed": 0, "device": text}
        runs.append(write_run(folder / f"{i} {name}", metrics, rows, config))
    return write_comparison(runs, folder / "compare.html")


def test_no_trick_in_any_text_becomes_markup(tmp_path, visit):
    """The page has the very elements that it has with harmless texts, and shows each to the letter.

    The texts are those of prompts, completions, tokens, environments, agents, metrics, settings and
    runs.
    """
    elements = []
    for name, texts in (("tricky", TRICKS), ("plain", [f"plain {i}" for i in range(len(TRICKS))])):
        page = visit(tricky_page(tmp_path / name, texts))
        page.locator("details summary").first.click()
        tags = []
        for i, text in enumerate(texts):
            page.select_option("#left", str(2 * i))
            page.select_option("#right", str(2 * i + 1))
            assert page.locator("#pairs .text").all_text_contents() == [text] * 3
            page.select_option("#run", str(i))
            page.locator("#groups .marks button").first.click()
            shown = page.locator("#groups").text_content()
            assert shown.count(text.replace("\t", "⇥\t")) >= 2, text
            assert page.locator(".open .text").first.text_content() == text
            assert f"Its environment failed: {text}" in page.locator(".open").text_content()
            tags.append(page.evaluate("[...document.querySelectorAll('*')].map(e => e.localName)"))
        about = page.locator("#about").text_content()
        assert all(text in about for text in texts)
        elements.append(tags)
    assert elements[0] == elements[1]
    assert len(elements[0][0]) > 500


def test_pairs_show_the_same_task_before_and_after(run, visit):
    path, rows = run
    page = visit(path)
    right = {(r["update"], r["seed"]): r["info"]["correct"] for r in rows if r["kind"] == "eval"}
    gained = [s for s in range(8) if not right[0, s] and right[100, s]]
    lost = [s for s in range(8) if right[0, s] and not right[100, s]]
    told = page.locator("#paired").inner_text()
    assert f"{len(gained)} from wrong to right, {len(lost)} from right to wrong" in told
    page.select_option("#change", "wrong to right")
    articles = page.locator("#pairs article")
    assert [a.locator(".text").first.inner_text() for a in articles.all()] == [
        f"task {s}" for s in gained
    ]
    for article in articles.all():
        before, after = article.locator(".two > div").all_inner_texts()
        assert "✗ wrong" in before and "at 0 " in before
        assert "✓ right" in after and "at 100 " in after


def test_a_rollout_without_looks_says_so(tmp_path, visit):
    rows = [row("train", 1, 1, "plain", 1.0), row("train", 1, 1, "other")]
    page = visit(write_report(write_run(tmp_path / "old", [{"update": 1}], rows), CONFIG))
    page.locator("#groups .marks button").first.click()
    told = page.locator(".open").inner_text()
    assert "plain" in told and "not looked at" in told
    assert page.locator(".lens").count() == 0


def test_a_run_without_anything_is_still_a_page(tmp_path, visit):
    page = visit(write_report(write_run(tmp_path / "new"), CONFIG))
    told = page.locator("body").inner_text()
    for words in ("Not evaluated yet", "not measured", "None to compare", "no training rollouts"):
        assert words in told


def test_a_comparison_tells_runs_apart_without_colour(tmp_path, visit):
    names = ["first", "second", NAME]
    runs = []
    for i, name in enumerate(names):
        metrics = [
            evaluated(0, 0.2),
            {"update": 1, "reward/mean": 0.1 * i},
            evaluated(2, 0.5 + i / 9),
        ]
        rows = [row("eval", u, 1, f"{i} at {u}", float(u > 0)) for u in (0, 2)]
        rows.append(row("train", 1, 1, f"by {i}"))
        runs.append(write_run(tmp_path / name, metrics, rows))
    page = visit(write_comparison(runs, tmp_path / "compare.html"))
    chart = page.locator("#charts .card").first
    lines = chart.locator("path[fill=none]").evaluate_all(
        "all => all.map(e => e.getAttribute('stroke-dasharray'))"
    )
    assert len(set(lines)) == 3
    letters = chart.locator("svg text").all_text_contents()
    assert letters[-3:] == ["A", "B", "C"]
    assert NAME in chart.locator("output").inner_text()
    sides = page.locator("#pairs .two > div").all_inner_texts()
    assert "A first, after update 2" in sides[0] and "B second, after update 2" in sides[1]
    page.select_option("#run", "2")
    page.locator("#groups .marks button").first.click()
    assert "by 2" in page.locator(".open").inner_text()


def test_warnings_are_listed_and_marked_in_the_curves(tmp_path, visit):
    metrics = [{"update": u, "reward/mean": u / 9, "sft/loss": 1.0} for u in range(1, 9)]
    metrics[4]["warnings"] = {"kl_runaway": f"KL 0.3 {EVIL}", EVIL: "new here"}
    metrics[6]["warnings"] = {"kl_runaway": "KL 0.4"}
    page = visit(write_report(write_run(tmp_path / "wrong", metrics), CONFIG))
    first, second = page.locator("#warnings li").all_inner_texts()
    assert "kl_runaway at update 5, 7: the policy moves away too fast" in first
    assert "KL 0.3 </script><script>" in first and "new here" in second
    assert "2 warnings, below" in page.locator("#about").inner_text()
    chart = page.locator("#charts .card").nth(1)
    marks = chart.locator(".alarm")
    assert marks.locator("text").all_text_contents() == ["1", "1", "2"]
    at = [
        float(x)
        for x in marks.locator("line").evaluate_all("a => a.map(e => e.getAttribute('x1'))")
    ]
    assert at[0] == at[2] < at[1]
    boxes = [marks.locator("text").nth(i).bounding_box() for i in (0, 2)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]  # both can be read
    chart.locator("svg").focus()
    page.keyboard.press("ArrowLeft")
    assert chart.locator("output").inner_text() == "update 7: 0.778 · warning 1: kl_runaway"
    page.locator("#charts select").select_option("sft/loss")  # its axis is of warm-start steps
    assert page.locator("#charts .card").last.locator(".alarm").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_run_without_warnings_shows_none(run, visit):
    page = visit(run[0])
    assert page.locator("#warnings li").count() == page.locator(".alarm").count() == 0
    assert "warning" not in page.locator("#about").inner_text()


def test_nothing_was_left_out_of_the_page_under_test(run):
    path, rows = run
    (data,) = data_of(path.read_text(encoding="utf-8"))
    assert sum(len(g["r"]) for s in data["segments"] for g in s["g"]) == len(rows)
    assert data["left"] == []
