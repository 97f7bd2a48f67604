"""Does a user's next message take back the question before it? Simple rules over English words.

Owns these heuristics. Must not know the store. They err towards saying no: a missed correction costs one pair, an
invented one teaches the wrong thing.
"""

from __future__ import annotations

import re

from edged.store.completions import Message

_CORRECTION = re.compile(
    r"""\s*(?:(?:no|nope|sorry|hm+|actually|but)\b[\s,.:!-]*)?(?:
        (?:that|this|it)(?:'s|’s|\sis|\swas|\sisn't|\sisn’t)\s(?:not|wrong|incorrect|a\swrong)\b
      | (?:wrong|incorrect)\b
      | not\s(?:what|quite|right|correct|like\sthat)\b
      | i\s(?:meant|mean|said|asked|wanted|did\snot|didn't|didn’t)\b
      | you\s(?:misunderstood|missed|did\snot|didn't|didn’t|forgot)\b
      | (?:please\s)?(?:try|answer|explain|say|write|do)\s(?:it\s|that\s|this\s)?again\b
      | (?:please\s)?(?:rephrase|rewrite|redo|shorten)\b
      | (?:make\s(?:it|that)\s|please\s)?(?:be\s)?(?:much\s|a\sbit\s)?(?:shorter|longer|simpler|briefer|less|more)\b
        (?=\s*(?:please|formal|casual|polite|detailed|brief|[,.!]|$))
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_FLAT_NO = re.compile(r"\s*(?:no|nope|wrong)\s*[,.!]*\s*$", re.IGNORECASE)
_COMMON = (
    "a an and any are as at be can could did do does for from give had has have how i in is it its me my of on or our "
    "please should so some tell that the their them then there these they this to us was we were what when where which "
    "who whose why will with would you your s"
)
_STOP_WORDS = frozenset(_COMMON.split())
_SAME_SHARE = 0.6
"""Share of content words (intersection over union) from which two questions are the same one."""
_MIN_WORDS = 2


def is_correction(text: str) -> bool:
    """Whether a message opens with words that reject the answer: "No, I meant ...", "try again", "shorter, please"."""
    return bool(_CORRECTION.match(text) or _FLAT_NO.match(text))


def is_rephrase(asked: str, asks: str) -> bool:
    """Whether two messages put the same question: they share most of their content words.

    "What is the capital of France?" and "Which city is France's capital?" do; one about Germany's does not.
    """
    before, after = _content_words(asked), _content_words(asks)
    if min(len(before), len(after)) < _MIN_WORDS:
        return asked.strip().lower() == asks.strip().lower() != ""
    return len(before & after) / len(before | after) >= _SAME_SHARE


def content_text(message: Message) -> str:
    """A message's text; of a list of content parts, the text parts joined."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part)


def _content_words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if word not in _STOP_WORDS}
