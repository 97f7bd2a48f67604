"""Pairs in a store and what training says of them, in short calls."""

from __future__ import annotations

from typing import Any

from edged.align.feedback.pair import PairRetired, PairScored, VersionPublished
from edged.align.feedback.signals import record_pair
from edged.store import Store, utc_now


def queue_pairs(store: Store, count: int, user: str = "ada") -> list[int]:
    """Ids of `count` fresh explicit pairs of `user`."""
    start = store.read(lambda db: db.execute("SELECT count(*) FROM pairs").fetchone()[0])
    futures = [
        store.write(lambda db, i=i: record_pair(db, user, f"good {i}", f"bad {i}", utc_now(), prompt="Well?"))
        for i in range(start, start + count)
    ]
    return [future.result().pair_ids[0] for future in futures]


def scored(pair_id: int, version: int = 0, margin: float = 0.5, difference: float = 1.0, **more: Any) -> PairScored:
    """A prequential score unless `split` says otherwise; the chosen answer has log-probability -10."""
    return PairScored(
        **{
            "pair_id": pair_id,
            "adapter": "ada",
            "version": version,
            "split": "prequential",
            "chosen_logp": -10.0,
            "rejected_logp": -10.0 - difference,
            "ref_chosen_logp": -11.0,
            "ref_rejected_logp": -12.0,
            "reward_margin": margin,
            "loss": 0.5,
            **more,
        }
    )


def trained(pair_id: int, version: int, state: str = "trained", epochs: int = 1, adapter: str = "ada") -> PairRetired:
    """The outcome of a pair that `version` was the first to have learned from."""
    return PairRetired(pair_id, adapter, state, version, epochs)  # type: ignore[arg-type]


def published(version: int, adapter: str = "ada", **more: Any) -> VersionPublished:
    """A trained version."""
    return VersionPublished(
        **{"adapter": adapter, "version": version, "parent": version - 1, "reason": "trained", **more}
    )
