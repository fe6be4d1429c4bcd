"""Constrained sampling: answers that follow a JSON schema.

    pip install -e ".[constrain]"

llguidance makes a grammar of the schema. Before each token it says which ones the grammar allows;
the others get probability 0, and what is left is the distribution that is sampled and trained
(algorithms/token_logprobs.py). The end of the turn is allowed where the JSON is complete.
Properties are in the order of the schema, and separated as json.dumps does it: free whitespace
would let a small model write nothing else. Where the chat template has thoughts, one may come
first, and where the request has tools, calls may come instead; both are free text.
"""

import json
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from core.config import is_installed
from core.faults import UsageError
from core.policy import Policy
from environments.plumbing.tools import END_OF_THOUGHT, THOUGHT

WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def matcher(policy: Policy, schema: dict[str, Any], prompt: list[int], call: str = "") -> Any:
    """An llguidance.LLMatcher at the start of an answer with this schema, to be copied.

    `prompt`: the ids before the answer; `call`: what a call of a tool begins with; "": there are no
    tools. Raises UsageError if llguidance is missing or broken, or cannot follow the schema.
    """
    if not is_installed("llguidance"):
        raise UsageError('llguidance is not installed: pip install -e ".[constrain]"')
    try:
        import llguidance.hf  # noqa: F401
    except Exception as error:  # a broken one may raise anything
        raise UsageError(f"llguidance cannot be imported: {error}"[:200]) from None
    tokenizer, schema = policy.tokenizer, schema | {"x-guidance": WRITTEN}
    vocab_size = policy.causal_lm.config.get_text_config().vocab_size
    thought, end = "may begin", str(tokenizer.decode(prompt[-4:])).rstrip()
    if end.endswith(END_OF_THOUGHT) or THOUGHT not in str(tokenizer.chat_template):
        thought = ""
    elif end.endswith(THOUGHT):
        thought = "has begun"
    of_tokenizer = tokenizer, vocab_size, tuple(policy.stop_ids)
    return _matcher(*of_tokenizer, json.dumps(schema), thought, call)


@lru_cache(maxsize=64)
def _matcher(
    tokenizer: Tokenizer, vocab_size: int, stop_ids: tuple[int, ...], schema: str, thought: str,
    call: str,
) -> Any:  # fmt: skip
    from llguidance import LLMatcher

    begin, end = (tokenizer.get_vocab().get(word) for word in (THOUGHT, END_OF_THOUGHT))
    rules, start = [f"answer: %json {schema}"], "answer"
    if call:
        ids = tokenizer.encode(call, add_special_tokens=False)
        rules.append(f"calls: {' '.join(f'<[{i}]>' for i in ids)} <[*]>*")
        start = "(answer | calls)"
    if thought and begin is not None and end is not None:
        others = ",".join(map(str, (end, *stop_ids)))
        rules.append(f"thought: <[^{others}]>* <[{end}]> /\\n{{0,2}}/")
        start = f"thought {start}" if thought == "has begun" else f"(<[{begin}]> thought)? {start}"
    grammar = "\n".join([f"start: {start}", *rules])
    made = LLMatcher(_tokenizer(tokenizer, vocab_size, stop_ids), grammar, log_level=0)
    if made.is_error():
        raise UsageError(" ".join(f"llguidance: {made.get_error()}".split())[:200])
    return made


@lru_cache(maxsize=1)  # takes a second
def _tokenizer(tokenizer: Any, vocab_size: int, stop_ids: tuple[int, ...]) -> Any:
    from llguidance import hf

    try:
        return hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=[*stop_ids])
    except ValueError as error:  # it has no tokenizer.json
        raise UsageError(f"llguidance: {error}") from None
