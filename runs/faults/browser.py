"""Puts markup and scripts into the texts of a run, and opens its report and the comparison.

    python runs/faults/reproduce.py --only browser --tries 50

A failure: a text ran as a script, the page asked for another file, raised an error, or is not
complete after 10 seconds. Needs chromium and playwright.
"""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from core.report.page import write_page, write_report  # noqa: E402

Case = tuple[str, Callable[[], str]]  # a name, and what returns "" or says in a line what failed
SETTINGS = {
    "algo": "grpo", "env": ["letter_counting"], "eval_env": ["letter_counting"], "seed": 0,
    "model_id": "tiny", "num_updates": 2, "eval_num_tasks": 4, "grpo": {}, "ppo": {},
}  # fmt: skip
CODE = [
    "window.ran=1", "<script>window.ran=1</script>", "<img src=x onerror=window.ran=1>",
    "<svg/onload=window.ran=1>", "<iframe srcdoc='<script>parent.ran=1</script>'>",
    "<base href=//x/>", "<link rel=stylesheet href=//x/y>",
    "<meta http-equiv=refresh content=0;url=//x>", "<style>*{display:none}</style>",
    "javascript:window.ran=1", "<form action=//x><input autofocus onfocus=window.ran=1>",
    "<math><mi//xlink:href='data:x,<script>window.ran=1</script>'>",
    "<details open ontoggle=window.ran=1>", "<template><script>window.ran=1</script></template>",
    "`${window.ran=1}`", "$& $` $' $$ $<x>", "{{7*7}} {% x %}", "__proto__", "constructor",
]  # fmt: skip
OPENERS = [
    "", "</script>", "</SCRIPT\t>", "-->", "<!--", "<!--<script>", "\"}]}</script>", "'", '"', "\\",
    "]]>", "</title></style></textarea></div></article></body></html>", "\u2028", "\0", "\ud800",
    "&lt;", "&#60;", "\\u003c", "\r\n", "\u202e", "\ufeff",
]  # fmt: skip
ENCODINGS: list[Callable[[str], str]] = [
    str, str, str.upper, lambda s: s.replace("<", "&lt;"), lambda s: s.replace("<", "\\u003c"),
    lambda s: s.replace("<", "&#x3C;"), lambda s: s.replace("<", "＜"), lambda s: s * 30,
]  # fmt: skip


def cases(rng: random.Random) -> Iterator[Case]:
    """Tries without end."""
    from playwright.sync_api import sync_playwright

    flags = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking".split()
    with (
        tempfile.TemporaryDirectory(prefix="picorl-browser-") as folder,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags) as browser,
    ):
        tab, seen = browser.new_page(), []  # type: ignore[var-annotated]
        tab.on("request", lambda request: seen.append(f"asked for {request.url}"))
        tab.on("pageerror", lambda error: seen.append(f"error: {error}"))
        for number in range(sys.maxsize):
            texts = [text(rng) for _ in range(12)]
            path = Path(folder, f"try{number}")
            yield f"report {texts[0][:40]!r}", lambda p=path, t=texts: opened(tab, seen, p, t)


def text(rng: random.Random) -> str:
    """A text that a page must show and not obey."""
    code = rng.choice(ENCODINGS)(rng.choice(OPENERS) + rng.choice(CODE))
    return "".join(rng.choice(["", "a", "\n", " "]) + code for _ in range(rng.randint(1, 3)))


def opened(tab: Any, seen: list[str], folder: Path, texts: list[str]) -> str:
    """Writes a run with these texts, opens its pages; "" or what went wrong."""
    run = folder / "a"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records(texts)))
    (run / "rollouts.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in rollouts(texts)))
    settings = SETTINGS | {"model_id": texts[10].replace("\0", ""), "env": [texts[11]]}
    pages = [write_report(run, settings)]
    write_page(folder / "compare.html", [(run, settings), (run, settings)])
    pages.append(folder / "compare.html")
    try:
        for page in pages:
            seen.clear()
            tab.goto(page.as_uri())
            tab.wait_for_selector("html[data-ready]", timeout=10_000)
            wrong = [line for line in seen if line != f"asked for {page.as_uri()}"]
            if tab.evaluate("typeof window.ran") != "undefined":
                wrong.append("a text ran")
            if wrong:
                return f"{page.name}: {wrong[:2]} with {texts}"
        return ""
    finally:
        shutil.rmtree(folder)


def records(texts: list[str]) -> list[dict[str, Any]]:
    """metrics.jsonl: texts as names of metrics and in warnings."""
    made = []
    for update in range(3):
        record: dict[str, Any] = {"update": update, "reward/mean": 0.5, "loss": 0.1}
        record |= {f"eval/{texts[9]}/accuracy": 0.5, f"eval/{texts[9]}/ci_low": 0.4,
                   f"eval/{texts[9]}/ci_high": 0.6, f"info/{texts[8]}": 1.0}  # fmt: skip
        if update == 1:
            record["warnings"] = {texts[7]: texts[6]}
        made.append(record)
    return made


def rollouts(texts: list[str]) -> list[dict[str, Any]]:
    """rollouts.jsonl: texts as messages, infos, errors and tokens."""
    made = []
    for kind, update in (("eval", 0), ("train", 1), ("train", 2), ("eval", 2)):
        for seed in range(2):
            trace = {name: [-0.5, -0.25] for name in ("sampler", "trainer", "after", "advantages")}
            made.append({
                "kind": kind, "update": update, "env": texts[11], "agent": "player", "seed": seed,
                "group_id": 0, "return": 0.5, "rewards": [0.5], "tokens": 2, "error": texts[5],
                "hit_token_limit": False, "episode_truncated": False,
                "info": {texts[4]: 1.0, "correct": 1.0, "note": texts[3]},
                "messages": [{"role": "user", "content": texts[0]},
                             {"role": "assistant", "content": texts[1]}],
                "token_traces": [{"tokens": texts[1:3], **trace}] if kind == "train" else [],
            })  # fmt: skip
    return made
