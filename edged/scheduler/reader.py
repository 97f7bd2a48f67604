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
    num_tokens: int = 0
    """Number of tokens delivered."""
    read_s: float = 0.0
    """Moment at which the latest token is read; meaningless before the first."""
    delay_s: float = 0.0
    """Eq. 2.1: by how much the tokens are read later than expected, in sum."""

    def take(self, now: float) -> None:
        """Take a token that is delivered `now`."""
        self.read_s = max(now, self.dry_s)
        self.delay_s += self.read_s - self.ideal_s - self.num_tokens / self.pace
        self.num_tokens += 1

    @property
    def dry_s(self) -> float:
        """Moment at which the reader has nothing left to read: the next token's deadline."""
        return self.read_s + 1.0 / self.pace if self.num_tokens else self.ideal_s

    @property
    def stall_s(self) -> float:
        """Seconds that the reader has waited for tokens so far, beyond the expected wait for the first."""
        # Rounded, it can be a little less than none.
        return max(0.0, self.read_s - self.ideal_s - (self.num_tokens - 1) / self.pace) if self.num_tokens else 0.0

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
        if not self.num_tokens:
            return 0.0
        whole_s = self.num_tokens * (horizon_s - self.ideal_s) - self.num_tokens * (self.num_tokens - 1) / (
            2.0 * self.pace
        )
        return min(1.0, max(0.0, 1.0 - self.delay_s / whole_s)) if whole_s > 0.0 and self.delay_s > 0.0 else 1.0

    def gain(self, now: float, horizon_s: float, starts_s: float, tokens_per_s: float) -> float:
        """Return `gain` of being served from `starts_s` after `now` on."""
        left_s = max(0.0, self.dry_s - now)
        if left_s >= horizon_s:
            return 0.0
        return gain(self.pace, left_s, now + horizon_s - self.ideal_s, horizon_s, starts_s, tokens_per_s)

    def loss(self, now: float, horizon_s: float, wait_s: float) -> float:
        """Return the QoE, as in `gain`, that waiting for `wait_s` costs: 0 where there is text for as long."""
        left_s, wait_s = max(0.0, self.dry_s - now), min(wait_s, horizon_s)
        if left_s >= wait_s:
            return 0.0
        return loss_waiting(self.pace, left_s, wait_s) / (0.5 * self.pace * (now + horizon_s - self.ideal_s) ** 2)


def gain(
    pace: float, left_s: float, expected_s: float, horizon_s: float, starts_s: float, tokens_per_s: float
) -> float:
    """Return Eq. 2.4 over the next `horizon_s`: QoE of being served, less that of waiting; of numbers or of arrays.

    Served, the next token comes in `starts_s`, and `tokens_per_s`, which is finite, from there on. The reader has text
    for `left_s`, and is expected to have read for `expected_s` by then; it is a share of what they would have read.
    """
    lost = loss_waiting(pace, left_s, horizon_s) - loss_served(pace, left_s, horizon_s, starts_s, tokens_per_s)
    return lost / (0.5 * pace * expected_s * expected_s)


def _above(difference: float) -> float:
    """Return a difference where it is above 0, else 0."""
    return 0.5 * (difference + abs(difference))


def loss_waiting(pace: float, left_s: float, horizon_s: float) -> float:
    """Return the token-seconds that a reader with text for `left_s` loses within `horizon_s` when nothing comes.

    What was lost before goes on being lost whatever is done, and is in neither loss.
    """
    return 0.5 * pace * _above(horizon_s - left_s) ** 2


def loss_served(pace: float, left_s: float, horizon_s: float, starts_s: float, tokens_per_s: float) -> float:
    """Return the token-seconds that are lost where tokens come at `tokens_per_s` from `starts_s` on."""
    starts_s = horizon_s - _above(horizon_s - starts_s)
    stall_s, short = _above(starts_s - left_s), _above(pace - tokens_per_s)
    stalls, slow = stall_s > 0.0, short > 0.0
    dry_s = stalls * starts_s + (1 - stalls) * (pace * left_s - tokens_per_s * starts_s) / (short + (1 - slow))
    lost = 0.5 * pace * stall_s * stall_s + pace * stall_s * (horizon_s - starts_s)
    return lost + 0.5 * short * _above(horizon_s - dry_s) ** 2
