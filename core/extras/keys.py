"""The API key of a server: in no file and no message, although a server may repeat it."""

import os

from core.faults import UsageError


def api_key() -> str:
    """The key in OPENAI_API_KEY, or "". Raises UsageError if no header can hold it."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError("OPENAI_API_KEY has characters that no header can hold")
    return key


def safe_line(text: str) -> str:
    """`text` as it may be shown: one line of at most 300 characters, without the key."""
    key = api_key()
    if len(key) >= 8:  # not "any", for a server that needs none
        text = text.replace(key, "[key]")
    return " ".join(text.split())[:300]
