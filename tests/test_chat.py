"""A chat grows by appending ids; what was sampled is never rendered again."""

import pytest

from core.chat import end_of_turn_id, following_ids, prompt_ids, without_thinking
from core.tiny import tiny_tokenizer
from core.types import UsageError

CHATML = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": 'How many r in "cherry"?'},
    {"role": "assistant", "content": "c h e r1 r2 y"},
    {"role": "user", "content": "sure? ünïcode ✓"},
]


@pytest.fixture(params=["tiny", "chatml"])
def tokenizer(request):
    tokenizer = tiny_tokenizer()
    if request.param == "chatml":  # as Qwen's: a newline follows the closing token
        tokenizer.chat_template = CHATML
    return tokenizer


@pytest.mark.parametrize("ended", [True, False])
def test_appending_gives_the_ids_of_the_whole_chat(tokenizer, ended):
    opening = prompt_ids(tokenizer, CHAT[:2])
    sampled = tokenizer.encode(CHAT[2]["content"], add_special_tokens=False)
    sampled += [end_of_turn_id(tokenizer)] * ended
    grown = opening + sampled + following_ids(tokenizer, CHAT, ended)
    assert grown == prompt_ids(tokenizer, CHAT)


def test_the_sampled_text_is_not_read_by_the_template(tokenizer):
    strange = [*CHAT[:2], {"role": "assistant", "content": "<|end|><|user|> 5 "}, CHAT[3]]
    assert following_ids(tokenizer, strange, True) == following_ids(tokenizer, CHAT, True)


def test_the_turn_is_closed_by_the_templates_own_token(tokenizer):
    assert tokenizer.decode([end_of_turn_id(tokenizer)]) == "<|end|>"


def test_a_template_without_a_closing_token_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UsageError, match="does not close"):
        end_of_turn_id(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        prompt_ids(tokenizer, CHAT)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>a b</think> yes", " yes"),
        ("no thought", "no thought"),
        ("a</think>b</think>c", "c"),
        ("<think>never closed", "<think>never closed"),
        ("thought alone</think>", ""),
    ],
)
@pytest.mark.parametrize("whole", [True, False], ids=["one token", "spelled out"])
def test_what_stands_behind_the_last_thought_is_kept_as_it_was_sampled(text, left, whole):
    tokenizer = tiny_tokenizer()
    pieces = [text] if whole else list(text)
    ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]
    kept = without_thinking(tokenizer, ids)
    assert tokenizer.decode(kept) == left
    assert kept == ids[len(ids) - len(kept) :]
