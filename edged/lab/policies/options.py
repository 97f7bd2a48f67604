"""Options of the laboratory's policies."""

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from edged.scheduler.policies.options import Options, QuantumOptions
from edged.settings.access import setting
from edged.settings.load import Count, Positive


class IntervalOptions(Options):
    """The intervals of periodic fine-tuning."""

    retrain_every_s: Positive = setting(30.0, "interval at which fine-tuning is due")


class GapOptions(IntervalOptions, QuantumOptions):
    """The options of retraining in the gaps of serving."""


class EkyaOptions(IntervalOptions):
    """The options of Ekya."""

    retrain_window_s: float = setting(0.0, "how long training may stop serving; 0: half retrain_every_s", ge=0.0)

    @field_validator("retrain_window_s")
    @classmethod
    def _leaves_time_to_serve(cls, window_s: float, info: ValidationInfo) -> float:
        every_s = info.data.get("retrain_every_s", window_s + 1.0)
        if window_s >= every_s:
            message = "it must be shorter than retrain_every_s ({every_s} s), or nothing is ever served"
            raise PydanticCustomError("window", message, {"every_s": every_s})
        return window_s


class TemporalOptions(Options):
    """The options of temporal sharing."""

    temporal_every: Count = setting(128, "iterations that serve between two groups of pairs")
