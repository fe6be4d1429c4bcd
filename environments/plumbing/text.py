"""Looks at texts of others (completions, messages, names), and makes them safe to show."""

import io
import re
import sys

# Everything but text, tabs and line breaks; also surrogates and marks that reorder a line
CONTROL_CHARACTERS = re.compile(r"[^\n\t -~\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")
# The same in ASCII JSON, without surrogates and line ends, which a page may show
ESCAPED = re.compile(r"(\\\\)|\\u00(?:[01][0-9a-f]|7f|[89][0-9a-f])|\\u20(?:2[a-e]|6[6-9])|\\[bf]")
# (a mark that begins a turn, one that follows it), in the templates of many models
MARKS = [
    ("<|im_start|>", "<|im_end|>"), ("<|start_header_id|>", "<|end_header_id|>"),
    ("<start_of_turn>", "<end_of_turn>"), ("<|user|>", "<|assistant|>"), ("[INST]", "[/INST]"),
]  # fmt: skip


def printable(text: str) -> str:
    """`text` without control characters, which would act on the terminal: for all foreign text.

    >>> printable("a\\x1b[2J\\nb")
    'a�[2J\\nb'
    """
    return CONTROL_CHARACTERS.sub("\ufffd", text)


def printable_json(text: str) -> str:
    """ASCII JSON without control characters and bidirectional marks, for all foreign text in pages.

    >>> print(printable_json(r'["a\\u001b[2J\\n", "\\\\u202e \\u202e"]'))
    ["a\\ufffd[2J\\n", "\\\\u202e \\ufffd"]
    """
    return ESCAPED.sub(lambda match: match[1] or r"\ufffd", text)


def is_rendered(text: str) -> bool:
    """Whether a text seems to contain the marks of a chat template, which would add its own."""
    return any(text.lstrip().startswith(first) and second in text for first, second in MARKS)


def print_any_character() -> None:
    """Lets stdout print ? for characters that its encoding lacks, as ✓ in a pipe on Windows."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has another stdout
        sys.stdout.reconfigure(errors="replace")


def one_line(error: BaseException | str) -> str:
    """A text, or the message of an error, without line breaks and control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
