"""`python -m core.serve`: a trained policy behind OpenAI's API."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Queue
from threading import Event

import httpx
import openai
import pytest

from core.config import Config
from core.episodes import RolloutCollector
from core.extras import serve
from core.extras.chat import Speaker
from core.sampler import SamplingParams, TorchSampler
from core.tiny import PRETRAINED
from environments.adapters.endpoint import Endpoint, read_ask


@pytest.fixture
def served(monkeypatch):
    """The address of a server in a thread; a Ctrl-C ends it."""
    made, ended = Queue(), Event()

    class Noted(Endpoint):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.only.receive = partial(until_ended, self.only.receive)
            made.put(self.url)

    def until_ended(receive, timeout):
        if ended.is_set():
            raise KeyboardInterrupt
        return receive(timeout)

    monkeypatch.setattr(serve, "Endpoint", Noted)
    flags = serve.parse([str(PRETRAINED), "--port", "0", "--device", "cpu"])
    with ThreadPoolExecutor(1) as pool:
        code = pool.submit(serve.main, *flags)
        try:
            yield made.get(timeout=60)
        finally:
            ended.set()
    assert code.result() == 0


def test_it_answers_as_the_policy_and_keeps_the_conversation(served):
    client = openai.OpenAI(base_url=served, api_key="any", max_retries=0)
    messages = [{"role": "user", "content": 'How many r in "cherry"? Work it out, then end with '
                                            "<answer>number</answer>."}]  # fmt: skip

    def ask(**options):
        return client.chat.completions.create(model="m", messages=messages, **options)

    greedy, again, short = ask(), ask(temperature=0), ask(max_tokens=2)
    text = greedy.choices[0].message.content
    assert "<answer>" in text and again.choices[0].message.content == text
    assert f"{ask(stop='</answer>').choices[0].message.content}</answer>" == text
    assert short.usage.completion_tokens == 2 and short.choices[0].finish_reason == "length"
    drawn = ask(temperature=1.0, n=4)
    assert len(drawn.choices) == 4 and len({c.message.content for c in drawn.choices}) > 1
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
    assert ask(max_tokens=4, temperature=1, top_p=0).choices[0].message.content  # as well
    schema = '{"items": ' * 950 + "{}" + "}" * 950  # deeper than the stack of the main thread
    body = '{"messages": [{"role": "user", "content": "Hi"}], "response_format": {"schema": %s}}'
    url = f"{served}/chat/completions"
    assert httpx.post(url, content=body % schema, trust_env=False).status_code == 400
    body = {"input": "Hi", "model": "m", "extra_body": {"n": 2}}  # which no response has
    assert client.responses.create(**body, max_output_tokens=16).output_text
    assert ask(max_tokens=1).usage.completion_tokens == 1  # it still answers


def test_requests_with_settings_of_their_own_are_sampled_in_one_batch(policy, monkeypatch):
    endpoint, collector, steps = Endpoint(any_key=True), RolloutCollector(policy, 1), []
    wanted = [
        {"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 1.5, "seed": -1},
        {"temperature": 1, "seed": 3, "n": 2}, {"temperature": 0.7, "top_p": 0.5, "seed": 4},
    ]  # fmt: skip
    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    body = {"messages": chat, "max_tokens": 8}
    asks = [read_ask(endpoint.only, "/v1/chat/completions", body | own) for own in wanted]

    def receive(timeout):
        if all(ask.outcome.done() for ask in asks):
            raise KeyboardInterrupt
        return [] if steps else asks

    class Recorder(TorchSampler):
        def step(self):
            steps.append(len(self.batch) + len(self.waiting))
            return super().step()

    monkeypatch.setattr(endpoint.only, "receive", receive)
    monkeypatch.setattr(serve, "TorchSampler", Recorder)
    with pytest.raises(KeyboardInterrupt):
        serve.answer_all(endpoint, Speaker("model", collector), Config(temperature=0))
    endpoint.close()
    assert steps[0] == 6 and len(steps) <= 8
    ids = collector.renderer.opening_ids(chat, ())
    for ask, own in zip(asks, wanted, strict=True):
        seed = own.get("seed", 0) % 2**63
        params = SamplingParams(8, own["temperature"], own.get("top_p", 1.0), seed=seed)
        alone = TorchSampler(policy).sample([ids] * ask.n, params)
        answers = [choice["message"]["content"] for choice in ask.outcome.result()["choices"]]
        assert answers == [completion.text for completion in alone]
