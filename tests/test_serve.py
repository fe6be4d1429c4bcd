"""`python -m core.serve`: a trained policy behind OpenAI's API."""

import os
import re
import signal
import subprocess
import sys

import openai
import pytest

from core.tiny import PRETRAINED


@pytest.fixture
def served():
    """The address of a server in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "core.serve",
        str(PRETRAINED),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline()
        try:
            yield re.search(r"http://127\.0\.0\.1:\d+/v1", line)[0]
        finally:
            os.kill(process.pid, signal.SIGINT)
            assert process.wait() == 0


def test_it_answers_as_the_policy_and_keeps_the_conversation(served):
    client = openai.OpenAI(base_url=served, api_key="any", max_retries=0)
    messages = [{"role": "user", "content": 'How many r in "cherry"? Work it out, then end with '
                                            "<answer>number</answer>."}]  # fmt: skip

    def ask(**options):
        return client.chat.completions.create(model="m", messages=messages, **options)

    greedy, again, short = ask(), ask(temperature=0), ask(max_tokens=2)
    text = greedy.choices[0].message.content
    assert "<answer>" in text and again.choices[0].message.content == text
    assert short.usage.completion_tokens == 2 and short.choices[0].finish_reason == "length"
    drawn = ask(temperature=1.0, n=4)
    assert len({c.message.content for c in drawn.choices}) > 1
    messages += [greedy.choices[0].message, {"role": "user", "content": "And now?"}]
    longer = ask(max_tokens=1)
    assert longer.usage.prompt_tokens > greedy.usage.total_tokens
    with pytest.raises(openai.BadRequestError, match="temperature must be"):
        ask(temperature=-1)
    messages = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(openai.BadRequestError, match="do not fit"):
        ask()
    messages = [{"role": "user", "content": "Hi"}]
    assert ask(max_tokens=4, temperature=1e-39).choices[0].message.content  # greedy
    body = {"input": "Hi", "model": "m", "extra_body": {"n": 2}}  # which no response has
    assert client.responses.create(**body, max_output_tokens=16).output_text
    assert ask(max_tokens=1).usage.completion_tokens == 1  # it still answers
