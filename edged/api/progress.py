"""`GET /v1/feedback/{id}`: what became of a feedback's pairs, or what they wait for."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from sqlite_utils import Database

from edged.api.access import Caller, caller_of
from edged.api.errors import not_found
from edged.api.responses import FeedbackProgress, PairProgress
from edged.api.services import Services, services_of
from edged.store.feedback import get_signal, progress_of

_LONGEST_ID = 64


async def get_feedback_progress(request: web.Request) -> FeedbackProgress:
    """Each pair's state, the version that learned it and after how long; or what it waits for."""
    feedback_id = request.match_info["id"]
    body = await asyncio.to_thread(_progress, services_of(request), caller_of(request), feedback_id)
    if body is None:
        # Whether another user's feedback is there is not for everybody to know.
        raise not_found(
            f'feedback "{feedback_id[:_LONGEST_ID]}" is not known: give the id that POST /v1/feedback answered',
            "id",
            "unknown_feedback",
        )
    return body


def _progress(services: Services, caller: Caller, feedback_id: str) -> FeedbackProgress | None:
    """The answer's body; None for a feedback that is not there, or is none of the caller's."""

    def read(db: Database) -> tuple[Any, list[dict[str, Any]]] | None:
        signal = get_signal(db, feedback_id)
        return (signal, progress_of(db, signal.pair_ids)) if signal and caller.speaks_for(signal.user) else None

    if not feedback_id.isascii() or len(feedback_id) > _LONGEST_ID or (found := services.store.read(read)) is None:
        return None
    signal, rows = found
    tuning = services.engine.finetuning.report()
    obstacle, blocked = _obstacle(services, tuning)
    per_hour, late = services.settings.feedback.pairs_per_hour, tuning["pairs_waiting"]
    reasons = [obstacle, f"its hour: feedback.pairs_per_hour = {per_hour}, {late} wait" if late else ""]
    pairs = [_told(row, _waits_for(row, reasons)) for row in rows]
    waits = any(pair.waits_for for pair in pairs)
    return FeedbackProgress(
        id=signal.id,
        object="feedback.progress",
        user=signal.user,
        reason=signal.reason or None,
        settled=not waits,
        blocked=waits and blocked,
        pairs=pairs,
    )


def _told(row: dict[str, Any], waits_for: str | None) -> PairProgress:
    """One pair as the answer shows it, with a sentence that says the same."""
    name, note, version, seconds = row["adapter"], row["note"], row["trained_version"], row["seconds"]
    after = "" if seconds is None else f" after {seconds:.1f} s" if seconds < 60 else f" after {seconds / 60:.0f} min"
    texts = {
        "queued": f"waits: {waits_for}",
        "trained": f"learned{f' as {name}@{version}' if version else ''}{after}",
        "learnt": f"{f'{name}@{version}' if version else name} knew it already: {note}",
        "held_out": f"kept as a test: {name}'s versions are measured by it, and none learns it",
        "quarantined": f"held: {note}; if this was you: edged quarantine release --user {name}",
        "skipped": f"not learned: {note}",
    }
    return PairProgress(
        pair_id=row["id"],
        adapter=name,
        state=row["state"],
        version=version,
        seconds=seconds,
        waits_for=waits_for,
        text=texts[row["state"]],
    )


def _waits_for(row: dict[str, Any], reasons: list[str]) -> str | None:
    """What stands between a queued pair and its step, also of those `reasons`; None for a pair with its outcome."""
    if row["state"] != "queued":
        return None
    before = f"{row['before']} pair{'s' * (row['before'] > 1)} before it" if row["before"] else ""
    return "; ".join(filter(None, (before, *reasons))) or f"the next step of {row['adapter']}"


def _obstacle(services: Services, tuning: dict[str, Any]) -> tuple[str, bool]:
    """(why no pair is learned just now, or ""; whether it stays so until somebody changes it)."""
    if not services.settings.align.enabled:
        return "learning is switched off (align.enabled = false)", True
    if not tuning["enabled"]:
        return f"fine-tuning is paused{': ' * bool(tuning['reason'])}{tuning['reason']}", True
    if tuning["held"]:
        governors = services.governors.report()
        why = [governors["memory"]["reason"], *governors["power"]["reasons"]]
        return f"governors hold fine-tuning back: {'; '.join(filter(None, why))}", False
    return tuning["reason"], False
