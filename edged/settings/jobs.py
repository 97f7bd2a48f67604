"""The settings `[jobs]`: fine-tuning by file."""

from typing import Annotated

from pydantic import Field

from edged.settings.access import Section, setting

Count = Annotated[int, Field(ge=1)]


class JobSettings(Section):
    """Fine-tuning jobs over uploaded files: docs/jobs.md."""

    enabled: bool = setting(True, "take files and jobs; off: both are refused, and jobs that wait go on waiting")
    learning_rate: float = setting(1e-4, "AdamW's highest step size of a job with learning_rate_multiplier 1", gt=0.0)
    files_mb: Count = setting(1024, "bytes of all files that are kept of an account / 2^20")
    turn_s: float = setting(60.0, "time after which a job of another account has its turn", gt=0.0)
    max_waiting: Count = setting(8, "jobs of an account that may wait or run; beyond it the API answers 429")
