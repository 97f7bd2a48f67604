"""The person who reads an answer while it is made, and the quality of that experience (QoE; Andes 2.3.1, 2.4.1).

A reader takes the first token no earlier than `ideal_s` and then at most `pace` tokens a second; what comes earlier
waits to be read, and a wait for a token delays all later ones.
"""

from dataclasses import dataclass

GOOD_QOE = 0.95
"""QoE from which on a reader counts as well served (Andes 2.6.2)."""
TOKENS_PER_WORD = 1.39
"""Tokens of a word of text: the paper's 4.8 tokens a second over 207.5 words a minute."""
SPOKEN_WORDS_PER_MINUTE = {"en": 150.0, "zh": 158.0, "ko": 150.0, "fr": 195.0, "es": 218.0}
"""Speeds of speech by language (Andes, Table 2.2)."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A reader's speed in tokens a second, and the seconds to the first token that are no wait for them."""

    tokens_per_s: float
    ttft_s: float = 1.0


@dataclass(slots=True)
class Reader:
    """A reader's timeline, in seconds of the injected clock: constant time and room per token."""

    pace: float
    """Tokens a second."""
    ideal_s: float
    """Moment at which the first token is expected."""
    tokens: int = 0
    """Number of tokens delivered."""
    read_s: float = 0.0
    """Moment at which the latest token is read; meaningless before the first."""
    delay_s: float = 0.0
    """Eq. 2.1: by how much the tokens are read later than expected, in sum."""

    def take(self, now: float) -> None:
        """Take a token that is delivered `now`."""
        self.read_s = max(now, self.dry_s)
        self.delay_s += self.read_s - self.ideal_s - self.tokens / self.pace
        self.tokens += 1

    @property
    def dry_s(self) -> float:
        """Moment at which the reader has nothing left to read: the next token's deadline."""
        return self.read_s + 1.0 / self.pace if self.tokens else self.ideal_s

    @property
    def stall_s(self) -> float:
        """Seconds that the reader has waited for tokens so far, beyond the expected wait for the first."""
        return self.read_s - self.ideal_s - (self.tokens - 1) / self.pace if self.tokens else 0.0

    @property
    def qoe(self) -> float:
        """1 - delay / whole, where whole reaches to the end of reading the last token: 1 exactly where nobody waited.

        0 before the first token, as in the paper.
        """
        return self._qoe(self.dry_s)

    @property
    def qoe_paper(self) -> float:
        """Eq. 2.3, where whole (Eq. 2.2) reaches to the begin of reading the last token; 1 where it is 0 / 0."""
        return self._qoe(self.read_s)

    def _qoe(self, horizon_s: float) -> float:
        if not self.tokens:
            return 0.0
        whole_s = self.tokens * (horizon_s - self.ideal_s) - self.tokens * (self.tokens - 1) / (2.0 * self.pace)
        return min(1.0, max(0.0, 1.0 - self.delay_s / whole_s)) if whole_s > 0.0 and self.delay_s > 0.0 else 1.0

    def gain(self, now: float, horizon_s: float, starts_s: float, tokens_per_s: float) -> float:
        """Return Eq. 2.4 over the next `horizon_s`: QoE of being served, less that of waiting.

        Served, the next token comes in `starts_s`, and `tokens_per_s` from there on. A share of the area that a reader
        without waits would have read by then: 0 where nothing is expected yet.
        """
        left_s = max(0.0, self.dry_s - now)
        if left_s >= horizon_s:
            return 0.0
        lost = loss_waiting(self.pace, left_s, horizon_s)
        lost -= loss_served(self.pace, left_s, horizon_s, starts_s, tokens_per_s)
        return lost / self._expected(now + horizon_s)

    def loss(self, now: float, horizon_s: float, wait_s: float) -> float:
        """Return the QoE, as in `gain`, that waiting for `wait_s` costs: 0 where there is text for as long."""
        left_s = max(0.0, self.dry_s - now)
        wait_s = min(wait_s, horizon_s)
        return loss_waiting(self.pace, left_s, wait_s) / self._expected(now + horizon_s) if left_s < wait_s else 0.0

    def _expected(self, moment: float) -> float:
        """Return the token-seconds that a reader without waits would have read by `moment`, after `ideal_s`."""
        return 0.5 * self.pace * (moment - self.ideal_s) ** 2


def loss_waiting(pace: float, left_s: float, horizon_s: float) -> float:
    """Return the token-seconds that a reader with text for `left_s` loses within `horizon_s` when nothing comes.

    What was lost before goes on being lost whatever is done, and is in neither loss.
    """
    return 0.5 * pace * max(0.0, horizon_s - left_s) ** 2


def loss_served(pace: float, left_s: float, horizon_s: float, starts_s: float, tokens_per_s: float) -> float:
    """Return the token-seconds that are lost where tokens come at `tokens_per_s` from `starts_s` on."""
    starts_s = min(starts_s, horizon_s)
    stall_s, short = max(0.0, starts_s - left_s), max(0.0, pace - tokens_per_s)
    lost = 0.5 * pace * stall_s * stall_s + pace * stall_s * (horizon_s - starts_s)
    if short:
        dry_s = starts_s if stall_s else (pace * left_s - tokens_per_s * starts_s) / short
        lost += 0.5 * short * max(0.0, horizon_s - dry_s) ** 2
    return lost
