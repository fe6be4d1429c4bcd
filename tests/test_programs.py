"""Agent programs as environments: their requests, their rewards, and the ids that are trained."""

import json
import os
import sys
import threading
import time
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import SimpleNamespace

import pytest
from conftest import AGENTS, wait_for_the_end_of

from core import pool
from core.batching import to_tokens
from core.calls import in_thread
from core.config import Config
from core.context import Renderer
from core.episodes import RolloutCollector
from core.extras import programs
from core.loading import load_policy
from core.sampler import SamplingParams, TorchSampler
from core.tasks import Task
from core.tiny import PRETRAINED
from core.types import Completion, Rollout
from environments.adapters import agent, endpoint
from environments.base import EVAL_SEEDS, EndRun, UsageError
from environments.plumbing import event_loop
from environments.plumbing.registry import EnvSpec, make

RECORDED = AGENTS.parents[1] / "runs" / "agents"
CHAOS = """
import copy
import random
from concurrent.futures import ThreadPoolExecutor

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {
    "type": "object", "properties": {"at": {"type": "string", "description": "What."}}}}}
TEXTS = ["hi", "né 🎲 日本", "<|im_end|> forged", " spaces ", "a" * 40, "<think>?</think>", ""]


def ask(client, messages, seed, tools, wants_json):
    rng = random.Random(seed)
    body = {"model": "m", "messages": messages, "max_tokens": rng.choice([3, 12, 99])}
    if tools:
        body["tools"] = [TOOL]
    if wants_json:
        schema = {"schema": {"type": "object", "description": "<|im_end|>"}}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if rng.random() < 0.2:
        body["n"] = 2
    if rng.random() < 0.2:
        body["stop"] = ["e", "zz"]
    completion = client.chat.completions.create(**body)
    found = [choice.message.model_dump(exclude_none=True) for choice in completion.choices]
    return [message | {"tag": f"{completion.id} {i}"} for i, message in enumerate(found)]


def run(task, client):
    rng = random.Random(f"{task['n']}")
    tools, wants_json = rng.random() < 0.6, task["n"] % 2
    conversations = [[{"role": "user", "content": "What is 1 + 1?"}]]
    if rng.random() < 0.5:
        conversations.append([{"role": "system", "content": "Be brief."},
                              {"role": "user", "content": "What is 1 + 1?"}])
    for _ in range(task["rounds"]):
        chosen = rng.sample(range(len(conversations)), min(len(conversations), rng.randint(1, 3)))
        seeds = [rng.random() for _ in chosen]
        with ThreadPoolExecutor(3) as pool:  # parallel calls
            found = [*pool.map(lambda i, s: ask(client, conversations[i], s, tools, wants_json),
                                  chosen, seeds)]
        for place, answers in zip(chosen, found):
            before, kinds = conversations[place], rng.random()
            conversations[place] = [*before, rng.choice(answers)]
            if kinds < 0.3:  # a branch from here
                conversations.append(copy.deepcopy(conversations[place]))
            if kinds > 0.8:  # an edit of an earlier message: what follows it is no longer known
                edited = copy.deepcopy(before)[: rng.randrange(len(before)) + 1]
                edited[-1]["content"] = (edited[-1].get("content") or "") + " edited"
                edited[-1].pop("tag", None)
                is_answer = edited[-1]["role"] == "assistant"
                conversations.append(edited + is_answer * [{"role": "user", "content": "Go on."}])
        for messages in conversations:
            if messages[-1]["role"] == "assistant":
                calls = messages[-1].get("tool_calls") or []
                results = [{"role": "tool", "tool_call_id": c["id"], "content": rng.choice(TEXTS)}
                           for c in calls]
                rng.shuffle(results)
                messages += results or [{"role": "user", "content": rng.choice(TEXTS)}]
    return {"reward": 1.0, "conversations": len(conversations)}
"""

ONE_REQUEST = """
def run(task, client):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    return 1.0
"""
CALL = '<tool_call>{"name": "look", "arguments": {"at":   "é"}}</tool_call>'


NEEDS = {
    "plain": "openai", "typed": "pydantic_ai", "sdk": "agents", "small": "smolagents",
    "with_litellm": "litellm", "with_langgraph": "langgraph",
    "with_semantic_kernel": "semantic_kernel", "with_node": "node",
}  # fmt: skip


class Recorder(TorchSampler):
    """Remembers every completion by its prompt; a third of them are calls of a tool."""

    def __init__(self, policy):
        super().__init__(policy)
        self.sampled = []

    def step(self):
        ended = [(request, self.changed(completion)) for request, completion in super().step()]
        self.sampled += [(tuple(r.prompt), c) for r, c in ended]
        return ended

    def changed(self, completion):
        kind = sum(completion.token_ids) % 9
        if kind > 3:
            return completion
        text = ["", "<think>hm</think>\n", "A word first. ", "  "][kind] + CALL * (1 + kind % 2)
        ids = [*self.policy.tokenizer.encode(text), self.policy.end_of_turn_id]
        return Completion(ids, [-0.5] * len(ids), text, "stop")


class Calculating(Recorder):
    """Half of the completions call the calculator of environments/agents."""

    def changed(self, completion):
        if len(self.sampled) % 2:
            return completion
        text = CALL.replace("look", "calculate").replace('"at":   "é"', '"expression": "1 + 1"')
        ids = [*self.policy.tokenizer.encode(text), self.policy.end_of_turn_id]
        return Completion(ids, [-0.5] * len(ids), text, "stop")


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Programs are looked at, and interrupted, every few milliseconds."""
    for module, name in ((agent, "POLL"), (endpoint, "PAUSE")):
        monkeypatch.setattr(module, name, 0.01)


@pytest.fixture
def write(tmp_path):
    """Writes a program and its tasks; returns the spec of its environment."""

    def write(text, rows=None, **options):
        (tmp_path / "program.py").write_text(text)
        rows = rows or [{"n": n} for n in range(64)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"run": f"{tmp_path}/program.py:run", "data": f"{tmp_path}/rows.jsonl"} | options
        sys.modules.pop("program", None)
        return "agent:" + ",".join(f"{k}={v}" for k, v in options.items() if v != "")

    return write


def collect(policy, spec, num=4, max_turns=40, max_tokens=16, sampler=None, say=None, **options):
    say = say or (lambda line: None)
    collector = RolloutCollector(
        policy, max_turns, play_program=programs.play_program, say=say, **options
    )
    tasks = [Task(spec, seed, seed) for seed in range(num)]
    try:
        return collector.collect(tasks, sampler or TorchSampler(policy), SamplingParams(max_tokens))
    finally:
        collector.close()


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.seeds) for seed in range(1, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_trained_is_what_was_sampled(policy, write, monkeypatch, seed, num_episodes=8):
    """Random conversations: every token once, in its own context, and extensions go on."""
    known, continued = {}, []  # ids up to an answer, by the id of the answer and its index
    add, prompt = programs.Conversations.add, programs.Conversations.prompt

    def note(self, ask, made, completion, rollout):
        count = sum(tag.startswith(f"chatcmpl-{ask.id} ") for tag in known)
        known[f"chatcmpl-{ask.id} {count}"] = made.ids + completion.token_ids
        return add(self, ask, made, completion, rollout)

    def check(self, ask):
        found = prompt(self, ask)
        tags = [message["tag"] for message in ask.body["messages"] if "tag" in message]
        if tags:
            ids = known[tags[-1]]
            continued.append(found.ids[: len(ids)] == ids)
        return found

    monkeypatch.setattr(programs.Conversations, "add", note)
    monkeypatch.setattr(programs.Conversations, "prompt", check)
    sampler = Recorder(policy)
    rows = [{"n": 999 * seed + n, "rounds": 3 + n % 3} for n in range(999)]
    rollouts = collect(policy, write(CHAOS, rows), num_episodes, sampler=sampler)
    assert [r.error for r in rollouts] == [""] * num_episodes
    sampled = Counter((p, tuple(c.token_ids), tuple(c.logprobs)) for p, c in sampler.sampled)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert len(turns) > 4 * num_episodes
    assert len(continued) > 2 * num_episodes and all(continued)
    for turn in turns:  # what a stop sequence cuts off is not trained on
        key = tuple(turn.prompt_ids), tuple(turn.completion_ids), tuple(turn.sampler_logprobs)
        if key not in sampled:
            n = len(key[1])
            key = next(s for s in sampled if s[0] == key[0] and (s[1][:n], s[2][:n]) == key[1:])
        sampled[key] -= 1
        assert sampled[key] >= 0
    assert sum(sampled.values()) == 0
    batch = to_tokens(rollouts)
    trained = Counter(number for s in batch.sequences for number in s.numbers if number >= 0)
    assert set(trained.values()) == {1} and len(trained) == sum(r.num_tokens for r in rollouts)
    contexts = {tuple(turn.prompt_ids + turn.completion_ids) for turn in turns}
    for sequence in batch.sequences:  # up to each sampled token: a prompt and what followed it
        end = max(i for i, place in enumerate(sequence.numbers) if place >= 0) + 1
        assert tuple(sequence.token_ids[:end]) in contexts


def test_rewards_info_and_held_out_tasks(policy, write):
    spec = write("""
def run(row, client):
    for _ in range(2):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    return {"reward": row["n"] / 32, "turns": [0.25, 0.5], "cost": 7}
""")
    env, held_out = make(spec), make(spec).test
    assert [row["n"] for row in sorted(env.train + env.test, key=lambda r: r["n"])] == [*range(64)]
    assert 0 < len(held_out) < 20
    for rollout in collect(policy, spec, 8):
        n = int(rollout.info["row"].removeprefix("rows.jsonl:")) - 1
        assert [turn.reward for turn in rollout.turns] == [0.25, 0.5 + n / 32]
        assert rollout.info["correct"] == (n >= 32)
        assert rollout.info["cost"] == 7 and {"n": n} in env.train
        assert not rollout.episode_truncated
    env.reset(EVAL_SEEDS[0])
    env.refuse(env.asks[0], "beyond a limit", "limit")
    env.reset(EVAL_SEEDS[1])
    assert env.asks and not env.over_limit  # which was of the episode before
    env.close()


FAILURES = {  # statement: the error of its episode, or the reward
    "1 / 0": 0.0,
    "return None": 0.0,
    "return {'reward': 1, 'score': {1, 2}}": 0.0,
    "raise KeyboardInterrupt": 0.0,
    "return {'reward': 1, 'turns': [1, 1]}": "ValueError: 2 rewards in `turns`, and 1 turns",
    "raise ExceptionGroup('tools', [EnvFailure('no search')])": "EnvFailure: no search",
    "[safe(client) for _ in range(9)]; raise EnvFailure('late')": "EnvFailure: late",
    "after(httpx.ConnectTimeout('no judge'))": "EnvFailure: ConnectTimeout: no judge (program.py,",
    "raise TimeoutError('no judge')": "EnvFailure: TimeoutError: no judge (program.py, line 21); "
    "if the policy's answers cause it: zero_on=TimeoutError",
    "during('KeyError(1)')": 0.0,
    "during('KeyError(1) from None')": 0.0,  # handled: no excuse
    "during('KeyError(1) from error')": "EnvFailure: ConnectionError: handled (program.py,",
    "httpx.Response(503, request=httpx.Request('', 'http://a')).raise_for_status()": "EnvFailure: ",
    "httpx.Response(429, request=httpx.Request('', 'http://a')).raise_for_status()": "EnvFailure: ",
    "while True: pass": "TimeoutError: the program did nothing for 0.2 seconds",
    "raise Odd('x')": 0.0,  # of `zero_on`
    "after(httpx.ConnectError('of an address that the policy chose'))": 0.0,
    "for _ in range(9): ask(client)": 0.0,  # more than --max-turns
    "[safe(client) for _ in range(9)]; return 0.5": 0.5,
    "[safe(client) for _ in range(9)]; raise ConnectionError('as a framework calls it')": 0.0,
}


@pytest.mark.parametrize("statement", FAILURES)
def test_a_program_that_fails_costs_its_episode_alone(policy, write, statement):
    wanted = FAILURES[statement]
    hangs = "did nothing" in str(wanted)  # then all may: no time is right on a busy machine
    rows, timeout = [{"n": n, "fails": n % 2} for n in range(64)], 0.2 if hangs else 300
    spec = write(f'''
import httpx
from environments.base import EnvFailure
class Odd(ConnectionError): pass
def ask(client):
    client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "?"}}])
def safe(client):
    try:
        ask(client)
    except Exception:
        pass
def after(error):
    try:
        raise error
    except Exception:
        raise RuntimeError("the tool failed") from error
def run(task, client):
    client = client.with_options(max_retries=0)
    ask(client)
    if task["fails"]:
        {statement}
    return 1.0
def during(raised):
    try:
        raise ConnectionError("handled")
    except ConnectionError as error:
        exec(f"raise {{raised}}")
''', rows, zero_on="program.Odd httpx.ConnectError", timeout=timeout)  # fmt: skip
    threads = threading.active_count()
    rollouts = collect(policy, spec, 4, max_turns=4)
    failing = [r for r in rollouts if r.episode_return != 1]
    assert failing and (hangs or len(failing) < 4)
    for rollout in rollouts:
        if rollout not in failing:
            assert not rollout.error and not rollout.episode_truncated
        elif isinstance(wanted, str):
            assert rollout.error.startswith(wanted)
            assert rollout.env_failure == wanted.startswith("EnvFailure")
        else:
            assert (rollout.error, rollout.episode_return) == ("", wanted)
            assert rollout.episode_truncated == ("range(9)" in statement)
    wait_for(lambda: threading.active_count() <= threads + 2 * len(rollouts))


@pytest.mark.parametrize("options, wanted", [({}, -1.5), ({"error_reward": -3}, -3)])
def test_breaking_the_program_does_not_pay(policy, write, options, wanted):
    """It earns the lowest return of the batch, turns included, and the cause is said once."""
    spec = write("""
def run(task, client):
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    if task["n"] % 2:
        raise KeyError(task["n"])
    return {"reward": -0.5 - (task["n"] % 4) / 4, "turns": [-0.5]}
""", **options)  # fmt: skip
    said = []
    rollouts = collect(policy, spec, 12, say=said.append)
    assert {r.episode_return for r in rollouts if r.info["agent_error"]} == {wanted}
    assert {r.episode_return for r in rollouts if not r.info["agent_error"]} == {-1.0, -1.5}
    [line] = said
    assert line.startswith("an agent ended with KeyError") and "(program.py, line 5)" in line


CAUSES = {
    "client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': IMAGE}])":
        "ValueError: no request of the program was answered: only contents of text are supported",
    "client.moderations.create(input='x')":
        "TimeoutError: 100 requests got no answer: /v1/moderations: there is no such",
}  # fmt: skip


@pytest.mark.parametrize("statement", CAUSES)
def test_a_failure_names_why_nothing_was_answered(policy, write, monkeypatch, statement):
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")  # which the own client does not ask
    spec = write(f"""
IMAGE = [{{"type": "image_url", "image_url": {{"url": "data:,"}}}}]
def run(task, client):
    for _ in range({999 if "100 requests" in CAUSES[statement] else 1}):
        try:
            {statement}
        except Exception:
            pass
    return 1.0
""")
    [rollout] = collect(policy, spec, 1)
    assert rollout.error.startswith(CAUSES[statement])


SHARING = """
import asyncio, os, queue, subprocess, sys, threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from multiprocessing.pool import ThreadPool
import anyio.to_thread, httpx
from openai import AsyncOpenAI, OpenAI
DEFAULT, POOL, QUEUE = None, ThreadPoolExecutor(2), queue.Queue()
GATE, LOCK, WORKER, HTTP = threading.Barrier(4), threading.Lock(), [], httpx.Client()
MANY, FULL = [], asyncio.Event()
SCRIPT = "import os, openai; openai.OpenAI().responses.create(model='m', input=os.environ['SAY'])"
def ask(client, task):
    client.responses.create(model="m", input=f"I am {task['n']}")
def work():
    while job := QUEUE.get():
        future, function, *args = job
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
def through(*args):
    QUEUE.put((future := Future(), *args))
    future.result()
def start(begin):
    with LOCK:
        WORKER or WORKER.append(begin())
def begin(task, base_url, api_key, **options):
    global DEFAULT
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, **options)
    ask(client, task)
    DEFAULT = DEFAULT or client
    return client
def run(task, base_url, api_key):
    client = begin(task, base_url, api_key)
    GATE.wait()
    BODY
    return 1.0
"""
ASYNC = """
async def run(task, base_url, api_key):
    client = await asyncio.to_thread(begin, task, base_url, api_key)
    loop = asyncio.get_running_loop()
    MANY.append(1)
    if len(MANY) == 4:
        FULL.set()
    await FULL.wait()
    BODY
    return 1.0
"""
MIXED_UP = {  # what a program does after it has asked with its own client
    "a client of the module": "ask(DEFAULT, task)",
    "the connections of the module": "ask(OpenAI(base_url=base_url, api_key=DEFAULT.api_key, "
    "http_client=HTTP), task); ask(DEFAULT, task)",
    "os.environ, a process": "os.environ['OPENAI_API_KEY'] = api_key; subprocess.run([sys."
    "executable, '-c', SCRIPT], env={**os.environ, 'OPENAI_BASE_URL': base_url, 'SAY': '?'})",
    "a thread": "ThreadPool(1).apply(ask, (DEFAULT, task))",
    "a pool of the module": "POOL.submit(ask, DEFAULT, task).result()",
    "threads of the module": "start(lambda: ThreadPool(1)); WORKER[0].apply(ask, (DEFAULT, task))",
    "a worker of the module": "start(lambda: threading.Thread(target=work, daemon=True).start() "
    "or 1); through(ask, DEFAULT, task)",
    "a job of the module": "start(lambda: POOL.submit(work)); through(ask, DEFAULT, task)",
    "await an executor": "await loop.run_in_executor(None, ask, DEFAULT, task)",
    "await a task": """
    async def serve(asked):
        while True:
            client, future = await asked.get()
            future.set_result(await client.responses.create(model="m", input="?"))
    asyncs = AsyncOpenAI(base_url=base_url, api_key=api_key)
    if not WORKER:
        WORKER[:] = [asyncio.Queue(), asyncs]
        WORKER.append(asyncio.create_task(serve(WORKER[0])))
    future = loop.create_future()
    WORKER[0].put_nowait((WORKER[1], future))
    await future""",
}  # fmt: skip
OWN = {  # the same, with the client of the program
    "the connections of the module": "ask(OpenAI(base_url=base_url, api_key=api_key, "
    "http_client=HTTP), task)",
    "a process": "subprocess.run([sys.executable, '-c', SCRIPT], check=True, env=os.environ | "
    "{'OPENAI_API_KEY': api_key, 'OPENAI_BASE_URL': base_url, 'SAY': f'I am {task[\"n\"]}'})",
    "threads": "ThreadPool(2).map(partial(ask, client), [task]); t = threading.Thread(target=ask, "
    "args=(client, task)); t.start(); t.join(); [*ThreadPoolExecutor(2).map(ask, [client] * 2, "
    "[task] * 2)]",
    "a pool of the module": "POOL.submit(ask, client, task).result()",
    "a worker of the module": "start(lambda: threading.Thread(target=work, daemon=True).start() "
    "or 1); through(copy_context().run, ask, client, task)",
    "await executors": "await loop.run_in_executor(None, ask, client, task); await "
    "asyncio.to_thread(ask, client, task); await anyio.to_thread.run_sync(ask, client, task)",
    "await a task that is not awaited": "asyncio.create_task(AsyncOpenAI(base_url=base_url, "
    "api_key=api_key).responses.create(model='m', input='late')); await asyncio.sleep(0)",
}  # fmt: skip


def sharing(ways, how):
    """A program whose copies share what they should not, or may."""
    head, _, body = SHARING.partition("def run(")
    return head + (ASYNC if "await" in how else "def run(" + body).replace("BODY", ways[how])


@pytest.mark.parametrize("how", MIXED_UP)
def test_a_request_that_may_be_of_another_episode_ends_the_run(policy, write, monkeypatch, how):
    monkeypatch.setattr(agent.Program, "patience", 0.05)
    monkeypatch.setattr(agent, "GRACE", 0.5)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with pytest.raises(EndRun, match=r"share one process.* Three ways out"):
        collect(policy, write(sharing(MIXED_UP, how)), 4)
    for module in [module for name, module in [*sys.modules.items()] if "program" in name]:
        if "QUEUE" in vars(module):  # ends `work`: at its exit Python waits for jobs of executors
            module.QUEUE.put(None)


@pytest.mark.parametrize("how", OWN)
def test_a_program_may_ask_from_wherever_it_likes(policy, write, monkeypatch, how):
    monkeypatch.setattr(agent.Program, "patience", 0.05)
    rollouts = collect(policy, write(sharing(OWN, how)), 4)
    assert [(r.error, r.episode_return) for r in rollouts] == [("", 1.0)] * 4
    for rollout in rollouts:
        n = int(rollout.info["row"].removeprefix("rows.jsonl:")) - 1
        said = {m["content"] for m in rollout.messages if m["role"] == "user"}
        assert said - {"late"} == {f"I am {n}"}
        assert len(rollout.turns) >= (1 if "not awaited" in how else 2)


def test_an_error_that_leaves_a_task_costs_its_episode_alone(policy, write, monkeypatch):
    monkeypatch.setattr(agent, "GRACE", 0.1)
    spec = write("""
import asyncio, openai
async def turns(client, answered):
    await client.responses.create(model="m", input="?")
    answered.set()
    await asyncio.sleep(3600)
async def breaks(client, task, answered):
    await client.responses.create(model="m", input="!")
    if task["n"] % 2:
        await answered.wait()
        raise KeyError("of an answer")
async def run(task, base_url, api_key):
    client, answered = openai.AsyncOpenAI(base_url=base_url, api_key=api_key), asyncio.Event()
    begun = asyncio.create_task(turns(client, answered))
    breaking = breaks(client, task, answered)
    await asyncio.gather(begun, breaking) if task["n"] % 2 else begun.cancel()
    if task["n"] % 2 == 0:
        await breaking
    return 1.0
""")
    rollouts = collect(policy, spec, 8)
    broken = [r for r in rollouts if r.error]
    assert 0 < len(broken) < 8 and all(r.episode_return == 1 for r in rollouts if not r.error)
    assert all(r.env_failure and "goes on after the agent's end" in r.error for r in broken)


@pytest.mark.parametrize("ends", ["return 1.0", "start(lambda: OpenAI(base_url=base_url, "
                                  "api_key=api_key)); ask(WORKER[0], task)"])  # fmt: skip
def test_a_program_that_has_not_asked_itself_ends_the_run(policy, write, ends):
    program = SHARING.partition("def run(")[0]
    program += f"def run(task, base_url, api_key):\n    {ends}\n    return 1.0"
    with pytest.raises(EndRun, match="share one process"):
        collect(policy, write(program), 4)


def test_one_program_after_the_other_may_share_what_it_likes(policy, write):
    program = sharing({"": "POOL.submit(work); through(ask, client, task)"}, "")
    program = program.replace("GATE.wait()", "os.environ['OPENAI_API_KEY'] = api_key")
    rollouts = collect(policy, write(program), 3, env_instances=1)
    assert [(r.error, r.episode_return) for r in rollouts] == [("", 1.0)] * 3


def test_async_programs_share_a_loop_with_what_their_module_has_made(policy, write):
    spec = write("""
import asyncio, httpx, openai
HTTP, LOCK, FULL, count = httpx.AsyncClient(), asyncio.Lock(), asyncio.Event(), 0
async def run(task, base_url, api_key):
    global count
    async with LOCK:
        await asyncio.sleep(0)
        count += 1
    if count >= 3:
        FULL.set()
    await FULL.wait()
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    asked = [client.responses.create(model="m", input="?") for _ in range(2)]
    await asyncio.gather(*asked)
    return count
""")
    for _ in range(2):
        rollouts = collect(policy, spec, 3)
        assert [(r.error, len(r.turns)) for r in rollouts] == [("", 2)] * 3
        assert all(r.episode_return >= 3 for r in rollouts)


BLOCKS = """
import threading, time
time.sleep(0.2)  # so that all episodes have begun before the first environment is built
ONE = threading.Lock()
def run(task, client):
    with ONE:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    return 1.0
"""


@pytest.mark.parametrize("alone", ["", "true"])
def test_programs_that_wait_for_each_other_are_passed_over(policy, write, monkeypatch, alone):
    monkeypatch.setattr(agent.Program, "patience", 0.1)
    said = []
    rollouts = collect(policy, write(BLOCKS, alone=alone), 4, say=said.append)
    assert [(r.error, r.episode_return) for r in rollouts] == [("", 1.0)] * 4
    assert said == ([] if alone else [agent.BLOCKED])


def test_a_program_waits_for_the_slowest_one_so_that_a_run_repeats(policy, write):
    """The samplers get the requests of a round in one piece, whatever time each program takes."""
    spec = write("""
import time
def run(task, client):
    for turn in range(2):
        time.sleep(0.05 * ((task["n"] + turn) % 3))
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
    return 1.0
""")
    sampler, sizes = TorchSampler(policy), []
    step = sampler.step
    sampler.step = lambda: sizes.append(len(sampler.waiting)) or step()
    collect(policy, spec, 6, max_tokens=1, sampler=sampler)
    assert sizes == [6, 6]


def test_time_in_which_another_program_keeps_the_loop_is_not_the_programs(
    write, monkeypatch, tmp_path
):
    monkeypatch.setattr(event_loop, "PATIENCE", 0.1)
    spec = write(f"""
import asyncio, pathlib, threading
ended = threading.Event()
begun = pathlib.Path("{tmp_path}/begun")
async def run(task):
    if not begun.exists():
        begun.touch()
        async def child():
            ended.wait()
        await asyncio.gather(child())
    await asyncio.sleep(600)
""", timeout=900)  # fmt: skip
    first, second = make(spec), make(spec)
    waits = [in_thread(partial(first.reset, 0))]
    wait_for((tmp_path / "begun").exists)
    waits.append(in_thread(partial(second.reset, 1)))
    wait_for(lambda: second.play is not None and second.play.task is not None)
    loop = second.play.task[1]
    wait_for(lambda: event_loop.at_work(loop) is not None)
    wait_for(second.play.waits_for_another)
    assert not first.play.waits_for_another()
    second.timeout, looks = 0.0, second.num_looks
    wait_for(lambda: second.num_looks > looks + 2)
    assert not waits[1].done()
    first.timeout, second.timeout = 0.0, 900.0
    with pytest.raises(TimeoutError, match="did nothing for 0 seconds"):
        waits[0].result(60)
    wait_for(lambda: event_loop._loop() is not loop)  # others get a loop of their own
    first.function.__globals__["ended"].set()
    second.close()
    wait_for(lambda: event_loop.at_work(loop) is None)


def test_far_too_much_text_is_refused_without_tokenizing_it(policy, monkeypatch):
    texts, encode = [], policy.tokenizer.encode
    spy = lambda text, **options: texts.append(text) or encode(text, **options)  # noqa: E731
    monkeypatch.setattr(policy.tokenizer, "encode", spy)
    words = "word " * 400_000
    for content, arguments, description in ((words, "", ""), ("", words, ""), ("", "", words)):
        said = {"role": "user", "content": content, "calls": [("a", "x", arguments)]}
        ask = asked([said], tools=[{"description": description}])
        with pytest.raises(endpoint.Refused, match="do not fit into 512 tokens"):
            programs.Conversations(Renderer(policy)).prompt(ask)
    assert max(map(len, texts)) < 100_000


def test_the_time_of_sampling_is_not_the_programs(policy, write, monkeypatch):
    class Slow(TorchSampler):
        def step(self):
            monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=lambda: 1000 + now()))
            return super().step()

    now = time.monotonic
    spec = write(ONE_REQUEST, timeout=300)  # fmt: skip
    [rollout] = collect(policy, spec, 1, sampler=Slow(policy))
    assert (rollout.error, rollout.episode_return) == ("", 1.0)


def test_a_request_stays_within_the_limits_of_the_run(policy, write):
    """Two requests at the same time for two answers each, with --max-turns 3."""
    spec = write("""
from concurrent.futures import ThreadPoolExecutor
def run(task, client):
    def ask(_):
        try:
            client.with_options(max_retries=0).chat.completions.create(
                model="m", n=2, max_tokens=most, messages=[{"role": "user", "content": "?"}])
        except Exception:
            pass
    most = 2 if task["n"] % 2 else 99
    [*ThreadPoolExecutor(2).map(ask, range(2))]
    return {"reward": 1, "most": min(most, 5)}
""")
    for rollout in collect(policy, spec, 4, max_turns=3, max_tokens=5):
        assert [m["role"] for m in rollout.messages] == ["user", "assistant", "assistant"]
        first, second = (turn.completion_ids for turn in rollout.turns)
        assert first != second and max(len(first), len(second)) <= rollout.info["most"]


def test_a_prompt_needs_room_for_a_token(policy, write):
    spec = write(ONE_REQUEST)
    [rollout] = collect(policy, spec, 1)
    policy.max_length = len(rollout.turns[0].prompt_ids) + 1
    [rollout] = collect(policy, spec, 1)
    assert [len(turn.completion_ids) for turn in rollout.turns] == [1]
    policy.max_length -= 1
    assert "tokens do not fit into" in collect(policy, spec, 1)[0].error


def test_a_stop_sequence_cuts_after_the_token_that_completes_it(policy):
    text = "What is 1 + 1? It is 2, and no more."
    ids = policy.tokenizer.encode(text)
    logprobs, kept = [-float(n) for n in range(len(ids))], [[i] for i in ids]
    whole = Completion(ids, logprobs, text, "length", kept)
    cut = programs.cut_at(policy, whole, ["", "more", "is 2"])
    n = len(cut.token_ids)
    decoded = [policy.tokenizer.decode(ids[:end]) for end in (n - 1, n)]
    assert [("is 2" in part) for part in decoded] == [False, True]
    assert (cut.token_ids, cut.logprobs, cut.kept_ids) == (
        ids[:n], whole.logprobs[:n], whole.kept_ids[:n]
    )  # fmt: skip
    assert (cut.text, cut.finish_reason) == ("What is 1 + 1? It ", "stop")
    assert programs.cut_at(policy, whole, ["", "never"]) is whole
    assert programs.cut_at(policy, whole, [text[0]]).token_ids == ids[:1]


def test_an_edited_conversation_has_its_calls_as_they_were_sampled(policy):
    tool = {"name": "look", "description": "Look.", "parameters": {}}
    tools = [{"type": "function", "function": tool}]
    conversations, rollout = programs.Conversations(Renderer(policy)), Rollout("", "", 0, 0)

    def prompt(*messages):
        ask = asked(messages, tools=tools)
        return ask, conversations.prompt(ask)

    ids = [*policy.tokenizer.encode(CALL), policy.end_of_turn_id]
    completion = Completion(ids, [-0.5] * len(ids), CALL, "stop")
    [call] = conversations.add(*prompt(("user", "?")), completion, rollout).calls
    texts = []
    for calls in ([call], [("other", *call[1:])], [(*call[:2], '{"at": "b"}')]):
        answer = {"role": "assistant", "content": "", "calls": calls}
        _, edited = prompt(("user", "? edited"), answer, ("tool", "ok"))
        texts.append(policy.tokenizer.decode(edited.ids))
    assert [CALL in text for text in texts] == [True, False, False] and '"at": "b"' in texts[2]


def test_turns_are_in_the_order_of_their_requests_whatever_they_continue(policy, write):
    spec = write("""
def run(task, client):
    def ask(messages):
        answer = client.chat.completions.create(model="m", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "on"}]
    main = [{"role": "user", "content": "main"}]
    ask(main)
    ask([{"role": "user", "content": "another"}])
    ask(main)
    task["list"].append(1)
    return {"reward": 100, "turns": [1, 2, 3], "length": len(task["list"])}
""", [{"n": n, "list": []} for n in range(9)])  # fmt: skip
    for rollout in collect(policy, spec, 12):
        first, _, third = (turn.prompt_ids for turn in rollout.turns)
        assert third[: len(first)] == first
        assert [turn.reward for turn in rollout.turns] == [1, 2, 103]
        assert rollout.info["length"] == 1  # the change of the task stays in its episode
        assert len(to_tokens([rollout]).sequences) == 2


def test_a_thread_that_has_ended_is_not_interrupted(monkeypatch):
    """Its id may be that of another thread."""
    play, alive = agent.Play(session=None, running=True), iter([True, False])
    play.thread = SimpleNamespace(is_alive=lambda: next(alive), join=lambda seconds: play.end())
    monkeypatch.setattr(agent, "ctypes", None)  # the interruption would raise
    play._interrupt()


def test_a_reset_ends_the_program_of_the_episode_before(write):
    env = make(write("def run(task):\n    while True: pass"))
    in_thread(partial(env.reset, 0))
    wait_for(lambda: env.play and hasattr(env.play, "thread") and env.play.thread.is_alive())
    first = env.play.thread
    in_thread(partial(env.reset, 1))
    wait_for(lambda: not first.is_alive())
    wait_for(lambda: env.play is not None and env.play.thread is not first)
    wait_for(env.play.thread.is_alive)
    env.close()


def asked(messages, **body):
    """A request with these messages: (role, content), or as the endpoint reads them."""
    tools = body.pop("tools", [])
    read = [{"calls": [], "thought": ""} | (m if isinstance(m, dict) else
            {"role": m[0], "content": m[1]}) for m in messages]  # fmt: skip
    return endpoint.Ask(None, body, read, tools)


def test_what_the_run_samples_otherwise_is_named():
    params, said = SamplingParams(4), [("user", "?"), ("assistant", "I")]
    usual = {"temperature": 1, "top_p": 1, "top_k": -1, "tool_choice": "auto", "min_p": 0,
             "response_format": {"type": "text"}, "parallel_tool_calls": True, "stream": True,
             "logit_bias": {}}  # fmt: skip
    assert programs.differences(asked(said[:1], **usual), params) == []
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    other = asked(said, temperature=0.25, top_k=5, seed=3, min_p=0.1, tools=[tool],
                  response_format={"type": "json_object"})  # fmt: skip
    assert programs.differences(other, params) == [
        "temperature 0.25", "top_k 5", "seed", "min_p", "response_format", "strict", "a prefill",
    ]  # fmt: skip


def test_the_schema_of_an_answer_is_in_the_prompt(policy):
    schema = {"type": "object", "properties": {"né": {"type": "number"}}}
    wanted = {"type": "json_schema", "name": "x", "schema": schema}
    for body, count in (
        ({"response_format": {"type": "json_schema", "json_schema": wanted}}, 1),
        ({"text": {"format": wanted}}, 1),  # of the responses API
        ({"response_format": {"type": "text"}}, 0),
    ):
        prompt = programs.Conversations(Renderer(policy)).prompt(asked([("user", "?")], **body))
        text = policy.tokenizer.decode(prompt.ids)
        assert text.count('{"type": "object", "properties": {"né": {"type": "number"}}}') == count


def wait_for(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happens")


COMMANDS = {  # program in Python, the error of its episode, or the reward
    "print('a line'); print(json.dumps({'reward': 0.5, 'cost': len(text)}))": 0.5,
    "print(subprocess.Popen(['sleep', '600']).pid, file=open('child', 'a')); print(1)": 1.0,
    "print('well done')": 0.0,
    "sys.exit('no wood')": 0.0,
    "print('no wood', file=sys.stderr); sys.exit(75)": "EnvFailure: ",
}


@pytest.mark.parametrize("statement", COMMANDS)
def test_a_command_of_any_language(policy, write, tmp_path, monkeypatch, statement):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(f"""
import json, os, subprocess, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({{"model": "m", "messages": [{{"role": "user", "content": str(task["n"])}}]}})
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode(), headers)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
{statement}
""")
    command = f"{sys.executable} {tmp_path}/agent.py"
    wanted = COMMANDS[statement]
    for rollout in collect(policy, write("", run="", command=command), 2):
        if isinstance(wanted, str):
            assert rollout.error.startswith(wanted) and len(rollout.turns) == 1
            assert "code 75: no wood" in rollout.error
        else:
            assert (rollout.error, rollout.episode_return) == ("", wanted)
    if "Popen" in statement:  # its children end with it
        children = [int(line) for line in Path("child").read_text().split()]
        assert len(children) == 2
        for pid in children:
            wait_for_the_end_of(pid)


def test_a_program_in_a_container_reaches_an_endpoint_on_an_address_of_its_own(policy, write):
    if sys.platform != "linux":
        pytest.skip("there is no address 127.0.0.2")
    program = ONE_REQUEST.replace("1.0", "float(client.base_url.host == '127.0.0.2')")
    [rollout] = collect(policy, write(program, host="127.0.0.2"), 1)
    assert (rollout.error, rollout.episode_return) == ("", 1.0)


def test_so_many_programs_run_at_once(write, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert pool.most_at_once(EnvSpec.read(write(""))) == 64
    assert pool.most_at_once(EnvSpec.read(write("", run="", command="true"))) == 3 + 4


@pytest.mark.parametrize("options, reason", [
    ({"run": ""}, "name either run"), ({"data": ""}, "set data="), ({"timeout": 0}, "timeout must"),
    ({"command": "true"}, "name either run"), ({"zero_on": "Typo"}, "zero_on=Typo: that is no"),
    ({"zero_on": "os.sep"}, "no exc"), ({"error_reward": "nan"}, "nan"),
    ({"host": "0.0.0.0"}, "no single address"),
    ({"host": "192.0.2.1"}, "host=192.0.2.1: .*; name an IPv4 address"),
])  # fmt: skip
def test_wrong_options_are_refused(write, options, reason):
    with pytest.raises(UsageError, match=reason):
        make(write("def run(task): pass", **options))


@pytest.mark.parametrize("name", [
    # a framework is imported for seconds
    pytest.param(name, marks=pytest.mark.slow if name in ("typed", "sdk", "small") else ())
    for name in NEEDS
])  # fmt: skip
def test_agents_of_frameworks_play_to_their_end(name):
    """Most answers are nonsense, which no framework may turn into a failure."""
    if not (find_spec(NEEDS[name]) or which(NEEDS[name])):
        pytest.skip(f"{NEEDS[name]} is not installed")
    folder = RECORDED if name.startswith("with_") else AGENTS
    program = f"run={folder}/{name}.py:run"
    if name == "with_node":
        program = f"command=node {folder}/{name}.mjs"
    spec = f"agent:{program},data={AGENTS}/sums.jsonl"
    policy = load_policy(Config(device="cpu"), str(PRETRAINED))
    sampler = Calculating(policy)
    rollouts = collect(policy, spec, 2, max_turns=8, max_tokens=32, sampler=sampler)
    assert [r.error for r in rollouts] == [""] * 2
    assert all(r.turns for r in rollouts)
    assert name == "small" or {tool[-9:] for r in rollouts for tool in r.for_log["tools"]} == {
        "calculate"
    }
    assert any(
        m["role"] == "tool" or "Observation:" in m["content"] for r in rollouts for m in r.messages
    )
