"""Chat templates with the structure of well-known models': prompts, stops, and second turns.

Each is written after the public template, without its tools. The tokenizer has one token per byte.
"""

from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from core.chat_template import (
    check_template,
    end_of_turn_id,
    prompt_ids,
    set_template_options,
    without_opened_thought,
)
from core.config import parse_template_options
from core.model import Policy
from core.rollouts import AgentState, RolloutCollector
from core.sampler import to_completion
from core.types import Rollout, UsageError

HI, SO = ({"role": "user", "content": text} for text in ("Hi", "So?"))
EACH, END = "{% for m in messages %}", "{% endfor %}"


def opens(header):
    """The end of a template that writes `header` before a new answer."""
    return END + "{% if add_generation_prompt %}" + header + "{% endif %}"


def opens_in_loop(header):
    return "{% if loop.last and add_generation_prompt %}" + header + "{% endif %}" + END


CHATML = EACH + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
LLAMA3 = (
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim "
    "+ '<|eot_id|>' }}"
)
LLAMA3_HEADER = "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
THINKING = (  # as Qwen3's and QwQ's: answers in the history have no thoughts
    EACH + "{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1] %}"
    "{{ '<|im_start|>assistant\n' + said.lstrip('\n') + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
)
SMOLLM3 = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% set mode = '/think' if enable_thinking else '/no_think' %}"
    "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %B %Y') + '\nReasoning: ' + mode }}"
    "{{ '<|im_end|>\n' }}" + EACH + "{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n')"
    " + m.content.lstrip('\n') + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    + opens(
        "{{ '<|im_start|>assistant\n' + ('' if enable_thinking else '<think>\n\n</think>\n') }}"
    )
)
R1 = (
    "{{ bos_token }}" + EACH + "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
    "{% else %}{% set said = m.content.split('</think>')[-1] %}"
    "{{ '<｜Assistant｜>' + said + '<｜end▁of▁sentence｜>' }}{% endif %}"
    + opens("{{ '<｜Assistant｜><think>\n' }}")
)
GLM = (
    "[gMASK]<sop>" + EACH + "{{ '<|' + m.role + '|>\n' + m.content.split('</think>')[-1].strip() }}"
)
GPT_OSS = (
    "{{ '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') + '\nReasoning: ' }}"
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "{{ reasoning_effort + '<|end|>' }}" + EACH + "{% if m.role == 'user' %}"
    "{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% else %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    + opens("<|start|>assistant")
)


class Known(NamedTuple):
    template: str
    special: str  # special tokens
    opening: str  # the first prompt, to "Hi"
    end: str  # the token that ends an answer
    after: str  # between this token and the second answer, with the message "So?"
    options: str = ""
    history_end: str = ""  # the token that the history has in place of `end`


KNOWN = {
    "llama 2": Known(
        "{% if messages[0].role == 'system' %}{% set chat = messages[1:] %}{% set system = "
        "'<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% else %}{% set chat = messages "
        "%}{% set system = '' %}{% endif %}{% for m in chat %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() }}"
        "{{ ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}"
        "{% endfor %}",
        "<s> </s>", "<s>[INST] Hi [/INST]", "</s>", "<s>[INST] So? [/INST]",
    ),
    "mistral": Known(
        "{{ bos_token }}" + EACH + "{% if m.role == 'user' %}{{ '[INST] ' + m.content }}"
        "{{ '[/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}" + END,
        "<s> </s> [INST] [/INST]", "<s>[INST] Hi[/INST]", "</s>", "[INST] So?[/INST]",
    ),
    "llama 3": Known(
        "{{ bos_token }}" + EACH + LLAMA3 + END + LLAMA3_HEADER,  # its first version
        "<s> <|eot_id|> <|start_header_id|> <|end_header_id|>",
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nSo?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama 3.2": Known(
        "{% if not date_string is defined %}{% if strftime_now is defined %}"
        "{% set date_string = strftime_now('%d %b %Y') %}{% else %}"
        "{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}"
        "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' }}"
        "{{ date_string + '\n\n<|eot_id|>' }}" + EACH + LLAMA3 + opens(LLAMA3_HEADER),
        "<s> <|eot_id|> <|start_header_id|> <|end_header_id|>",
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 09 Mar 2025\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nSo?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "qwen 2.5": Known(
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
        "{% endif %}" + CHATML + opens("{{ '<|im_start|>assistant\n' }}"),
        "<|endoftext|> <|im_end|> <|im_start|>",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n", "<|im_end|>",
        "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen 3": Known(
        THINKING + opens("{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and "
                         "enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"),
        "<|endoftext|> <|im_end|> <|im_start|>",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|im_end|>",
        "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        options="enable_thinking=false",
    ),
    "qwen 3 thinking": Known(
        THINKING + opens("{{ '<|im_start|>assistant\n<think>\n' }}"),
        "<|endoftext|> <|im_end|> <|im_start|>",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n", "<|im_end|>",
        "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "smollm 3": Known(
        SMOLLM3, "<|end_of_text|> <|im_end|> <|im_start|>",
        "<|im_start|>system\nToday: 09 March 2025\nReasoning: /no_think<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
        "<|im_end|>",
        "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
        options="enable_thinking=false",
    ),
    "gemma": Known(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + "
        "'\n\n' %}{% set chat = messages[1:] %}{% else %}{% set first = '' %}"
        "{% set chat = messages %}{% endif %}{% for m in chat %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{{ (first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}"
        + opens("{{ '<start_of_turn>model\n' }}"),
        "<bos> <eos> <start_of_turn> <end_of_turn>",
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>",
        "\n<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi 3": Known(
        EACH + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}" + END
        + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
        "{% else %}{{ eos_token }}{% endif %}",
        "<|endoftext|> <|endoftext|> <|end|> <|user|> <|assistant|>",
        "<|user|>\nHi<|end|>\n<|assistant|>\n", "<|end|>",
        "\n<|user|>\nSo?<|end|>\n<|assistant|>\n",
    ),
    "phi 4": Known(
        EACH + "{% if m.role == 'user' %}{{ '<|im_start|>user<|im_sep|>' + m.content }}"
        "{{ '<|im_end|><|im_start|>assistant<|im_sep|>' }}{% else %}"
        "{{ m.content + '<|im_end|>' }}{% endif %}" + END,
        "<|endoftext|> <|im_end|> <|im_start|> <|im_sep|>",
        "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>", "<|im_end|>",
        "<|im_start|>user<|im_sep|>So?<|im_end|><|im_start|>assistant<|im_sep|>",
    ),
    "olmo 2": Known(
        "{{ bos_token }}" + EACH + "{% if m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content "
        "+ eos_token + ('' if loop.last else '\n') }}{% else %}"
        "{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}"
        + opens_in_loop("{{ '<|assistant|>\n' }}"),
        "<|endoftext|> <|endoftext|>", "<|endoftext|><|user|>\nHi\n<|assistant|>\n",
        "<|endoftext|>", "\n<|user|>\nSo?\n<|assistant|>\n",
    ),
    "zephyr": Known(
        EACH + "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}"
        + opens_in_loop("{{ '<|assistant|>\n' }}"),
        "<s> </s>", "<|user|>\nHi</s>\n<|assistant|>\n", "</s>",
        "\n<|user|>\nSo?</s>\n<|assistant|>\n",
    ),
    "cohere": Known(
        "{{ bos_token }}" + EACH + "{{ '<|START_OF_TURN_TOKEN|>' + ('<|USER_TOKEN|>' if m.role == "
        "'user' else '<|CHATBOT_TOKEN|>') + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
        + opens("{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"),
        "<BOS_TOKEN> <|END_OF_TURN_TOKEN|> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> "
        "<|CHATBOT_TOKEN|>",
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>So?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "granite": Known(
        EACH + "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content }}"
        "{{ '<|end_of_text|>\n' }}" + opens("{{ '<|start_of_role|>assistant<|end_of_role|>' }}"),
        "<|end_of_text|> <|end_of_text|> <|start_of_role|> <|end_of_role|>",
        "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>",
        "\n<|start_of_role|>user<|end_of_role|>So?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "exaone 3.5": Known(
        EACH + "{{ '[|' + m.role + '|]' + m.content }}"
        "{{ '[|endofturn|]\n' if m.role == 'assistant' else '\n' }}"
        + opens("{{ '[|assistant|]' }}"),
        "[BOS] [|endofturn|] [|user|] [|assistant|]", "[|user|]Hi\n[|assistant|]",
        "[|endofturn|]", "\n[|user|]So?\n[|assistant|]",
    ),
    "deepseek r1": Known(
        R1, "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>\n", "<｜end▁of▁sentence｜>",
        "<｜User｜>So?<｜Assistant｜><think>\n",
    ),
    "glm 4": Known(
        GLM + opens("{{ '<|assistant|>\n' }}"),
        "<sop> <|endoftext|> [gMASK] <|user|> <|assistant|> <|observation|>",
        "[gMASK]<sop><|user|>\nHi<|assistant|>\n", "<|user|>", "\nSo?<|assistant|>\n",
    ),
    "glm z1": Known(
        GLM + opens("{{ '<|assistant|>\n<think>' }}"),
        "<sop> <|endoftext|> [gMASK] <|user|> <|assistant|> <|observation|>",
        "[gMASK]<sop><|user|>\nHi<|assistant|>\n<think>", "<|user|>",
        "\nSo?<|assistant|>\n<think>",
    ),
    "gpt-oss": Known(
        GPT_OSS, "<|startoftext|> <|return|> <|start|> <|end|> <|message|> <|channel|>",
        "<|start|>system<|message|>Date: 2025-03-09\nReasoning: low<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant", "<|return|>",
        "<|start|>user<|message|>So?<|end|><|start|>assistant",
        options="reasoning_effort=low", history_end="<|end|>",
    ),
}  # fmt: skip


def tokenizer_of(name, added=("<think>", "</think>"), date="2025-03-09"):
    known = KNOWN[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(known.special.split())
    core.add_tokens(list(added))
    bos, eos = known.special.split()[:2]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, chat_template=known.template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    set_template_options(tokenizer, parse_template_options(known.options), date)
    return tokenizer


def second_prompt(tokenizer, answer, end, drop_thinking=False):
    """The ids of the first prompt with a sampled answer, and those of the prompt after it."""
    stops = [end_of_turn_id(tokenizer), tokenizer.eos_token_id]
    policy = Policy(None, tokenizer, torch.device("cpu"), stops, stops[0], max_length=4096)
    collector = RolloutCollector(policy, max_turns=2, drop_thinking=drop_thinking)
    agent = AgentState(0, Rollout("", "", 0, 0), [HI])
    collector.set_prompt(agent)
    ids = tokenizer.encode(answer + end, add_special_tokens=False)
    sampled = agent.prompt_ids + ids
    collector.add_completion(agent, to_completion(policy, ids, []))
    agent.chat.append(SO)
    collector.set_prompt(agent)
    return sampled, agent.prompt_ids


@pytest.mark.parametrize("name", KNOWN)
def test_known_template_opens_and_ends_a_turn(name):
    tokenizer, known = tokenizer_of(name), KNOWN[name]
    check_template(tokenizer)
    assert tokenizer.decode(prompt_ids(tokenizer, [HI])) == known.opening
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids(known.end)


@pytest.mark.parametrize("name", KNOWN)
def test_known_template_appends_a_second_turn_to_the_sampled_ids(name):
    tokenizer, known = tokenizer_of(name), KNOWN[name]
    sampled, prompt = second_prompt(tokenizer, "Yes", known.end)
    history_end = known.history_end or known.end
    assert tokenizer.decode(prompt) == known.opening + "Yes" + history_end + known.after
    kept = sampled[:-1] if known.history_end else sampled
    assert prompt[: len(kept)] == kept


@pytest.mark.parametrize("name", KNOWN)
def test_known_template_closes_a_turn_that_was_cut_off(name):
    tokenizer, known = tokenizer_of(name), KNOWN[name]
    sampled, prompt = second_prompt(tokenizer, "Yes", "")
    space = " " if name == "llama 2" else ""  # its template puts one before the token
    end = space + (known.history_end or known.end)
    assert tokenizer.decode(prompt) == known.opening + "Yes" + end + known.after
    assert prompt[: len(sampled)] == sampled


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("deepseek r1", "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"),
        ("qwen 3 thinking", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen 3", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ("glm z1", "[gMASK]<sop><|user|>\nHi<|assistant|>\n"),
        ("smollm 3", KNOWN["smollm 3"].opening),  # its history keeps <think></think>
        ("llama 3", KNOWN["llama 3"].opening),
    ],
)
@pytest.mark.parametrize("as_token", [True, False])
def test_dropped_thinking_includes_a_think_tag_that_the_prompt_opened(name, opening, as_token):
    tokenizer = tokenizer_of(name, ["<think>", "</think>"] if as_token else [])
    known = KNOWN[name]
    _, prompt = second_prompt(tokenizer, "hm</think>Yes", known.end, drop_thinking=True)
    assert tokenizer.decode(prompt) == opening + "Yes" + known.end + known.after
    _, prompt = second_prompt(tokenizer, "Yes", known.end, drop_thinking=True)
    assert tokenizer.decode(prompt) == opening + "Yes" + known.end + known.after


def test_a_think_tag_of_the_user_is_not_taken_for_one_of_the_prompt():
    tokenizer = tokenizer_of("llama 3")
    ids = prompt_ids(tokenizer, [{"role": "user", "content": "<think>"}])
    assert without_opened_thought(tokenizer, ids) == ids


@pytest.mark.parametrize("name", ["glm 4", "phi 3"])
def test_another_stop_token_is_replaced_by_that_of_the_template(name):
    tokenizer, known = tokenizer_of(name), KNOWN[name]
    sampled, prompt = second_prompt(tokenizer, "Yes", "<|endoftext|>")
    assert tokenizer.decode(prompt) == known.opening + "Yes" + known.end + known.after
    assert prompt[: len(sampled) - 1] == sampled[:-1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML + END, "ignores add_generation_prompt.*'<|im_start|>assistant"),
        (CHATML.replace("m.content", "m.content | upper") + opens("<|im_start|>"), "rewrites"),
        (CHATML.replace("m.content", "m.content.replace('<', '&lt;')") + opens("<|im_start|>"),
         "rewrites"),
        (CHATML.replace("m.content", "m.content.split() | join(' ')") + opens("<|im_start|>"),
         "rewrites"),
        (CHATML.replace("messages", "messages[-2:]") + opens("<|im_start|>"), "leaves out"),
    ],
)  # fmt: skip
def test_a_template_that_would_train_on_other_text_is_refused(template, message):
    tokenizer = tokenizer_of("qwen 2.5", date="")
    tokenizer.chat_template = template
    assert tokenizer.decode([end_of_turn_id(tokenizer)]) == "<|im_end|>"
    with pytest.raises(UsageError, match=message) as error:
        check_template(tokenizer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", ["thinking", "messages", "add_generation_prompt", "tokenize"])
def test_an_option_that_the_template_does_not_read_is_refused(option):
    with pytest.raises(UsageError, match=f"--template-options {option}"):
        set_template_options(tokenizer_of("smollm 3"), {option: True}, "")


def test_values_of_template_options_are_booleans_numbers_or_text():
    text = 'a=true,b=False,c=512,d=0.5,e=low,f="7",g=null,h=26 Jul 2024'
    expected = {"a": True, "b": False, "c": 512, "d": 0.5, "e": "low", "f": "7", "g": None}
    assert parse_template_options(text) == expected | {"h": "26 Jul 2024"}
