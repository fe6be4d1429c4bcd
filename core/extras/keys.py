"""The keys of servers. They appear in no file and no message, although a server may repeat them."""

import os

from core.faults import UsageError

MIN_KEY = 8  # characters; servers that need no key get a shorter text, such as "any"


def api_key() -> str:
    """The key in OPENAI_API_KEY, or "". Raises UsageError if no header can hold it."""
    key = _key()
    if not (key.isascii() and key.isprintable()):
        raise UsageError("OPENAI_API_KEY has characters that no header can hold")
    return key


def without_keys(text: str) -> str:
    """`text` without the API key and those in OPENAI_CUSTOM_HEADERS."""
    headers = os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines()
    keys = [_key(), *(word for line in headers for word in line.split()[-1:])]
    for key in (key for key in keys if len(key) >= MIN_KEY):
        text = text.replace(key, "[key]")
    return text


def safe_line(text: str) -> str:
    """`text` as it may be shown: one line of at most 300 characters, without keys."""
    return " ".join(without_keys(text).split())[:300]


def _key() -> str:
    return os.environ.get("OPENAI_API_KEY", "").strip()
