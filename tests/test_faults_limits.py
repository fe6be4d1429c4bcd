"""Files that loop, grow or never end take bounded time, and end with one line."""

import os
import signal
import time

import pytest
from test_openai_sampler import chat, policy, sample, server  # noqa: F401

from core import chat_template, files
from core.interrupt import time_limit
from core.run_dir import read_config
from core.tiny import tiny_tokenizer
from core.types import UsageError

CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def in_seconds():
    with time_limit(20):
        yield


@pytest.mark.parametrize(("template", "said"), [
    ("{% for i in range(9999) %}{% for j in range(999) %}{% endfor %}{% endfor %}", "over 0.2 s"),
    ("{{ 'a' * 5000000 }}", "writes 5,000,000 characters"),
    ("{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "writes 9,899,901 characters"),
    ("{{ 'a' * 10 ** 18 }}", "MemoryError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ("{{ range(1000000) }}", "Range too big"),
])  # fmt: skip
def test_a_chat_template_without_end_is_one_line(template, said, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=r"^the chat template ") as error:
        chat_template.render(tokenizer, CHAT)
    assert said in str(error.value) and str(error.value).isprintable()


def test_a_limit_leaves_the_limit_around_it():
    signal.setitimer(signal.ITIMER_REAL, 15)
    with time_limit(1):
        pass
    assert 14 < signal.getitimer(signal.ITIMER_REAL)[0] <= 15


def test_settings_with_aliases_pipes_or_megabytes_are_one_line(tmp_path):
    levels = ["a: &a0 [x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 99)
    ]
    texts = [
        "\n".join([*levels, "env: *a98"]),
        "env:\n- &e [*e]",
        "env: " + "[" * 50_000,
        "#" * 2**21,
    ]
    texts.append("<<: &m {<<: [*m, *m]}")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.yaml").write_text(text)
    os.mkfifo(tmp_path / "pipe.yaml")
    started = time.monotonic()
    for file in tmp_path.iterdir():
        with pytest.raises(UsageError, match=f"^{file}: ") as error:
            read_config(file)
        assert len(str(error.value)) < 500 and "\n" not in str(error.value)
    assert time.monotonic() - started < 10


def test_a_pipe_or_a_foreign_path_in_a_sealed_folder_is_damage(tmp_path):
    with files.sealed(tmp_path / "a", {"n": 1}) as part:
        (part / "x").write_text("x")
    assert files.unseal(tmp_path / "a") == ({"n": 1}, "")
    state = (tmp_path / "a/state.json").read_text()
    (tmp_path / "a/state.json").write_text(state.replace('"x"', '"/dev/zero"'))
    assert files.unseal(tmp_path / "a")[1].startswith("cannot be read")
    (tmp_path / "a/state.json").write_text(state)
    os.mkfifo(tmp_path / "a/y")
    assert files.unseal(tmp_path / "a")[1] == "cannot be read (it has a pipe)"


def test_deep_json_of_a_server_is_one_line(server, policy):  # noqa: F811
    body = b"data: " + b"[" * 100_000 + b"\n\n"
    server.broken["pear"] = ({"Content-Type": "text/event-stream"}, body)
    with pytest.raises(UsageError, match="recursion"):
        sample(server, policy, [chat("pear")])
