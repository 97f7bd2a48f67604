"""What is kept of a bearer token: the one place that makes and checks of tokens share.

Must not import anything slow: a command does.
"""

import hashlib


def token_hash(token: str) -> str:
    """SHA-256 in hex digits. A token has 256 random bits, so that nobody guesses it back from a plain hash."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
