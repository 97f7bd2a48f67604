"""The engine's use, which governors read, and the engine's limits, which they set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """The resources that the engine holds and the work it has done, at one moment."""

    page_bytes: int
    """Bytes of one page of K/V."""
    pages: int
    """All pages that the engine was made with."""
    resident_pages: int
    """Pages that take memory now."""
    live_pages: int
    """Resident pages that answers and fine-tune steps hold; the others are caches."""
    running: int
    """Sequences that hold pages."""
    max_sequences: int
    """Most sequences at once, as the settings have it."""
    gives_back: bool
    """Whether unused pages are given back to the box; pages in a GPU's own memory never were the box's."""
    prunes: bool
    """Whether sequences can be pruned at all."""
    drift: float
    """Time that work takes now, over the usual time."""
    serving_s: float
    """Device seconds since start, for prompts and answers."""
    finetune_s: float
    output_tokens: int
    pairs_trained: int


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine; the defaults allow everything."""

    pages: int | None = None
    """Most pages of K/V that take memory; None: all."""
    prune: bool = False
    """Whether long answers are pruned even while the cache is not full."""
    finetune_share: float = 1.0
    """Share of the time that fine-tuning may work; at 0 no step is open."""
    release: bool = False
    """Whether the memory that fine-tuning and idle adapters hold is given back to the system."""
    sequences: int | None = None
    """Most sequences at once; None: as set."""
