"""Answers that follow a JSON schema: sampled from, and trained on, what its grammar allows."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from conftest import needs
from jsonschema import validate
from test_programs import collect, write  # noqa: F401 (a fixture)

from core.batching import to_tokens
from core.extras import constrain
from core.files.run_log import read_records
from core.sampler import Request, SamplingParams, TorchSampler
from core.scoring import score_tokens
from core.tiny import tiny_tokenizer
from core.types import Rollout, Turn

pytestmark = needs("constrain", "llguidance")
SCHEMA = {"type": "object", "required": ["né", "at", "ok"], "additionalProperties": False,
          "properties": {"né": {"type": "string", "maxLength": 9}, "ok": {"type": "boolean"},
                         "at": {"type": "integer", "minimum": 0, "maximum": 99}}}  # fmt: skip
PROGRAM = f"""
import json
def run(task, client):
    wanted = {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {SCHEMA}}}}}
    asked = [{{"role": "user", "content": str(task["n"])}}]
    answer = client.chat.completions.create(model="m", messages=asked, response_format=wanted)
    text = answer.choices[0].message.content
    try:
        return {{"reward": json.loads(text)["at"] / 100, "parsed": True}}
    except ValueError:
        return {{"reward": 0, "parsed": False}}
"""
SETTINGS = [{}, {"temperature": 0.0}, {"temperature": 2.0, "top_p": 0.6, "top_k": 4}]


def sample(policy, params, schema, odd=None, sampler=None):
    """Requests with a schema, or `odd` ones with another, their completions, a batch of a row for
    each, and the log-probs that training computes."""
    sampler, ended = sampler or TorchSampler(policy), {}
    schemas = [schema, schema if odd is None else odd] * 6
    matchers = [constrain.matcher(policy, s, []) if s else None for s in schemas]
    requests = [Request(policy.tokenizer.encode(f"{n} Hi"), params, 3, n, matcher=matcher)
                for n, matcher in enumerate(matchers)]  # fmt: skip
    for request in requests:
        sampler.add(request)
    while len(ended) < len(requests):
        ended |= sampler.step()
    turns = [Turn(r.prompt, (c := ended[r]).token_ids, c.logprobs, c.finish_reason,
                  kept_ids=c.kept_ids) for r in requests]  # fmt: skip
    batch = to_tokens([Rollout("", "", 0, 0, turns=[turn]) for turn in turns])
    scored = score_tokens(policy, batch, params.temperature or 1.0)["logprobs"]
    rows = scored.split([len(turn.completion_ids) for turn in turns])
    return requests, [ended[request] for request in requests], batch, rows


def ids_of(kept):
    """The ids of the bits that are set."""
    if isinstance(kept, list):
        return kept
    return [8 * i + bit for i, byte in enumerate(kept) for bit in range(8) if byte >> bit & 1]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_distribution_of_each_token_by_hand(policy, setting):
    """Of what can come next the tokens that top-k and top-p keep; the end where a number is one."""
    texts, params = ["1", "2", "13", "139"], replace(SamplingParams(20), **setting)
    words = {policy.tokenizer.decode([i]): i for i in range(len(policy.tokenizer))}
    found = sample(policy, params, {"enum": [int(text) for text in texts]})
    for request, completion, row in zip(*found[:2], found[3], strict=True):
        ids, written, start = completion.token_ids, "", len(request.prompt) - 1
        hidden = policy.hidden_states(torch.tensor([request.prompt + ids]))[0, start:-1]
        for n, logits in enumerate(policy.to_logits(hidden) / (params.temperature or 1.0)):
            left = [text[len(written) :] for text in texts if text.startswith(written)]
            fits = {words[x[:end]] for x in left for end in (1, 2, 3) if x[:end] in words}
            fits |= {*policy.stop_ids} if "" in left else set()
            likely = sorted(fits, key=lambda i: -logits[i])[: params.top_k or None]
            probs = logits[likely].softmax(0).tolist()
            if params.temperature:
                likely = [i for k, i in enumerate(likely) if sum(probs[:k]) < params.top_p]
            else:
                assert ids[n] == likely[0]
            assert {*ids_of(completion.kept_ids[n])} == {*likely}
            wanted = (logits[ids[n]] - logits[likely].logsumexp(0)).item()
            assert [completion.logprobs[n], row[n].item()] == pytest.approx([wanted] * 2, abs=1e-4)
            written += policy.tokenizer.decode([ids[n]])
        assert completion.text in texts and completion.finish_reason == "stop"


def test_a_batch_has_requests_with_and_without_a_schema(policy):
    """Whose answers are the same with others beside them, and after memory ran out."""

    class RunsOut(TorchSampler):
        fails, say = [0, 0, 1], str

        def _sample_tokens(self):
            super()._sample_tokens()
            if self.fails and self.fails.pop(0):
                raise MemoryError

    params, sampler = SamplingParams(31), RunsOut(policy)
    _, mixed, batch, scored = sample(policy, params, SCHEMA, odd={}, sampler=sampler)
    _, whole, *_ = sample(policy, params, SCHEMA)
    assert sampler.max_batch == 6
    assert [c.token_ids for c in mixed[::2]] == [c.token_ids for c in whole[::2]]
    gap = (torch.cat(scored) - batch.sampler_logprobs).abs()
    assert gap.max() < 1e-4 and gap.mean() < 1e-5
    assert [c.kept_ids is None for c in mixed] == [False, True] * 6
    for completion in whole:
        if len(completion.token_ids) < 31:
            validate(json.loads(completion.text), SCHEMA)
    assert {c.finish_reason for c in whole} == {"stop", "length"}


def test_an_agent_gets_the_answers_that_it_asks_for_and_is_trained_on_them(
    command, qwen3_folder, write, tmp_path  # noqa: F811
):  # fmt: skip
    code, out, err = command(
        "--model-id", qwen3_folder, "--env", write(PROGRAM), "--num-prompts", 2, "--group-size", 4,
        "--num-updates", 1, "--max-tokens", 80, "--eval-num-tasks", 0, "--run-name", "x",
    )  # fmt: skip
    assert (code, err) == (0, "")
    *_, record = read_records(tmp_path / "runs" / "x" / "metrics.jsonl")
    assert record["info/parsed"] == 1 and record["reward/std"] > 0 and record["update/steps"] == 1
    assert 0 < record["gap/logprob_max"] < 1e-5 and record["weights/mean"] == pytest.approx(1)
    assert record["length/hit_token_limit"] == 0 and "JSON schema" not in out


class Other(TorchSampler):
    constrains = False


@pytest.mark.parametrize(
    ("lacks", "sampler", "keyword", "why"),
    [("package", TorchSampler, "", 'not installed: pip install -e ".[constrain]"'),
     ("module", TorchSampler, "", "llguidance cannot be imported: "),
     ("", Other, "", "--sampler torch"), ("", TorchSampler, "'not': {}, ", '["not"]')],
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_in_the_prompt_which_is_said_once(
    policy, write, monkeypatch, lacks, sampler, keyword, why  # noqa: F811
):  # fmt: skip
    said, spec = [], write(PROGRAM.replace("'maxLength'", f"{keyword}'maxLength'"))
    monkeypatch.setattr(constrain, "is_installed", lambda name: lacks != "package")
    if lacks == "module":
        monkeypatch.setitem(sys.modules, "llguidance.hf", None)  # to import it raises
    rollouts = collect(policy, spec, 4, say=said.append, sampler=sampler(policy))
    assert not any(rollout.error or rollout.info["parsed"] for rollout in rollouts)
    assert all("maxLength" in policy.tokenizer.decode(r.turns[0].prompt_ids) for r in rollouts)
    assert why in said.pop() and not said


NAMED = {"$defs": {"N": {"type": "integer"}}, "type": "object", "required": ["a"],
         "properties": {"a": {"$ref": "#/$defs/N"}, "b": {"type": ["null", "number"]}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "call", "fits", "fails"),
    [
        ("<think>\n\n</think>\n", "", ['{"a": 1}'], ['<think></think>{"a": 1}', "<tool_call>"]),
        ("", "", ['{"a": 1}', '{"a": 12, "b": null}', '<think>{}"\n</think>{"a": 1}',
                  '<think></think>\n\n{"a": 1}'],
         ['{"a":1}', '{"a": 1', '{"b": null}', '{"a": "1"}', CALL, "Hm</think>", "<think>Hm", " "]),
        ("<think>\n", "", ['Hm</think>\n{"a": 1}'], ['{"a": 1}', "</think>"]),
        ("", "<tool_call>", [CALL, f"<think>Hm</think>{CALL}", '{"a": 1}'], ["Hm", "<tool", "[]"]),
    ],
)  # fmt: skip
def test_a_thought_may_come_first_and_a_call_instead(policy, prompt, call, fits, fails):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ '<think>' }}"
    policy = replace(policy, tokenizer=tokenizer)
    prompt = tokenizer.encode(prompt)
    for text in (*fits, *fails):
        matcher = constrain.matcher(policy, NAMED, prompt, call).deep_copy()
        ids = [*tokenizer.encode(text, add_special_tokens=False), policy.end_of_turn_id]
        allowed = [i in ids_of(matcher.compute_bitmask()) and matcher.consume_token(i) for i in ids]
        assert all(allowed) == (text in fits), text
