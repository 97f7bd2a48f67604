"""Options of policies, the table `scheduler.options`: a row names its own, and its parts read what they need."""

from typing import Self

from edged.settings.access import Section, setting
from edged.settings.load import Count, Positive, SchedulerSettings, Share


class Options(Section):
    """The options of a policy; here it has none."""

    @classmethod
    def of(cls, settings: SchedulerSettings) -> Self:
        """Read these options; the table may hold others' beside them. Raises ValidationError."""
        return cls.model_validate(
            {name: settings.options[name] for name in settings.options if name in cls.model_fields}
        )


class QuantumOptions(Options):
    """The length of fine-tuning by itself."""

    idle_quantum_ms: Positive = setting(50.0, "fine-tuning per iteration when nothing is served")


class PackingOptions(Options):
    """The constants of MACE's Algorithm 1."""

    lambda_memory: float = setting(1.0, "lambda1 of MACE 4.2: weight of unused memory", ge=0.0)
    lambda_latency: float = setting(1.0, "lambda2 of MACE 4.2: weight of latency mismatch", ge=0.0)
    tau_memory: Share = setting(0.95, "tau_mem of Algorithm 1: share of pages at which a bin closes")
    tau_tasks: Count = setting(256, "tau_task of Algorithm 1: tasks looked at in one decision")


class MaceOptions(PackingOptions, QuantumOptions):
    """The options of MACE and its ablations."""

    gamma: float = setting(0.1, "gamma of MACE 4.1: weight of the DPO loss in a priority", ge=0.0)
    reader_reserve_s: float = setting(
        2.0, "text that readers keep in hand, in seconds of reading, beside prompts and fine-tuning", ge=0.0
    )


class AndesOptions(MaceOptions):
    """The options of Andes, which serves as MACE does but for whom it lets in."""

    reader_horizon_s: Positive = setting(10.0, "span over which it is told what serving a reader gains")


class SloOptions(Options):
    """The options of FlexLLM and of spatial sharing."""

    slo_ms: float = setting(0.0, "longest iteration; 0: the least TBT target of those who are served", ge=0.0)
