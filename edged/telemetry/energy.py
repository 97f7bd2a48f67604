"""The energy account: joules of serving, fine-tuning and idleness, from power and the device's busy seconds."""

_LONGEST_S = 10.0
"""Longest gap between two readings that counts; a longer one is a sleep, whose power is not known."""


class EnergyMeter:
    """A meter of joules since the first reading with a power.

    A span's energy goes to serving and fine-tuning as the device was busy with each in it; what is left is idle. The
    power of a span is the mean of those at its ends.
    """

    def __init__(self) -> None:
        self._joules = {"serving_j": 0.0, "finetune_j": 0.0, "idle_j": 0.0}
        self._output_tokens = self._pairs = 0
        """Tokens served and pairs learned in the same time."""
        self._last: tuple[float, float, float, float, int, int] | None = None

    def add(
        self, now: float, power_w: float | None, serving_s: float, finetune_s: float, output_tokens: int, pairs: int
    ) -> None:
        """Add a reading, with the device's seconds, the tokens and the pairs since start."""
        if power_w is None:
            self._last = None
            return
        last, self._last = self._last, (now, power_w, serving_s, finetune_s, output_tokens, pairs)
        if last is None or not 0.0 < now - last[0] <= _LONGEST_S:
            return
        span_s, mean_w = now - last[0], (power_w + last[1]) / 2.0
        serving, finetune = serving_s - last[2], finetune_s - last[3]
        # An iteration is counted when it ends, so a span may be charged more seconds than it has.
        scale = min(1.0, span_s / (serving + finetune)) if serving + finetune > 0.0 else 0.0
        self._joules["serving_j"] += mean_w * serving * scale
        self._joules["finetune_j"] += mean_w * finetune * scale
        self._joules["idle_j"] += mean_w * (span_s - (serving + finetune) * scale)
        self._output_tokens += output_tokens - last[4]
        self._pairs += pairs - last[5]

    def report(self) -> dict[str, float | None] | None:
        """Joules, by kind and for each token and pair; None where no power was ever read."""
        if not any(self._joules.values()):
            return None
        per_token = self._joules["serving_j"] / self._output_tokens if self._output_tokens else None
        per_pair = self._joules["finetune_j"] / self._pairs if self._pairs else None
        return {**self._joules, "joules_per_output_token": per_token, "joules_per_pair": per_pair}
