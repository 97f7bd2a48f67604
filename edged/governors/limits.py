"""What governors see of the engine, and what they allow it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """What the engine holds and has done, at one moment."""

    page_bytes: int
    """Of one page of K/V."""
    pages: int
    """All pages that the engine was made with."""
    resident_pages: int
    """Those that take memory now."""
    live_pages: int
    """Those of them that answers and fine-tune steps hold; the others are caches."""
    running: int
    """Sequences that hold pages."""
    max_sequences: int
    """As it is set."""
    gives_back: bool
    """Whether pages that nobody holds go back to the box; those in a GPU's own memory never were the box's."""
    prunes: bool
    """Whether sequences can be pruned at all."""
    drift: float
    """How many times longer work takes now than usual."""
    serving_s: float
    """Device seconds since start, for prompts and answers."""
    finetune_s: float
    output_tokens: int
    pairs_trained: int


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine may do; as made here: everything."""

    pages: int | None = None
    """Most pages of K/V that take memory; None: all."""
    prune: bool = False
    """Long answers are pruned whether the cache is full or not."""
    finetune_share: float = 1.0
    """Share of the time that fine-tuning may work; at 0 no step is open."""
    release: bool = False
    """What fine-tuning and idle adapters hold is given back to the system."""
    sequences: int | None = None
    """Most sequences at once; None: as set."""
