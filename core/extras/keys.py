"""The API key of a server. No file and no message shows it, even if the server repeats it."""

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
    if len(key) >= 8:  # a shorter key is a word such as "any", for a server that needs none
        text = text.replace(key, "[key]")
    return " ".join(text.split())[:300]
