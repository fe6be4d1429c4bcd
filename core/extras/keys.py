"""The keys of servers. They appear in no file and no message, although a server may repeat them."""

import os

from core.faults import UsageError

MIN_KEY = 8  # characters of a value of a header that is taken for a key


def api_key() -> str:
    """The key in OPENAI_API_KEY, or "". Raises UsageError if no header can hold it."""
    key = _key()
    if not (key.isascii() and key.isprintable()):
        raise UsageError("OPENAI_API_KEY has characters that no header can hold")
    return key


def without_keys(text: str) -> str:
    """`text` without the API key and those in OPENAI_CUSTOM_HEADERS."""
    headers = os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines()
    own = [word for line in headers for word in line.split()[-1:] if len(word) >= MIN_KEY]
    for key in filter(None, (_key(), *own)):
        text = text.replace(key, "[key]")
    return text


def safe_line(text: str) -> str:
    """`text` as it may be shown: one line of at most 300 characters, without keys."""
    return " ".join(without_keys(text).split())[:300]


def _key() -> str:
    return os.environ.get("OPENAI_API_KEY", "").strip()
