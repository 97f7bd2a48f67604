"""`/v1/feedback`: take feedback, export the pairs, and report the progress of a feedback's pairs."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from sqlite_utils import Database

from edged.align.feedback.pair_formats import export_pair
from edged.align.feedback.pair_tokens import demand_rows
from edged.align.feedback.signals import (
    Feedback,
    FeedbackError,
    FeedbackResult,
    record_pair,
    record_signal,
    unknown_completion,
)
from edged.api.generation import STORED_WITHIN_S
from edged.api.models import check_tokens
from edged.api.requests import (
    PairRequest,
    RatingRequest,
    SignalRequest,
    parse_feedback,
    queried_user,
    read_body,
    reading_turn,
)
from edged.api.responses import FeedbackProgress, FeedbackTaken, PairProgress
from edged.api.services import Services, services_of
from edged.http.access import Caller, caller_of
from edged.http.errors import ApiError, bad_request, send_pieces
from edged.http.json_format import dumps
from edged.store import utc_now, utc_text
from edged.store.completions import answer_of_choice, newest_of_request, users_of_completion
from edged.store.feedback import get_pairs, get_signal, pair_ids_of, progress_of
from edged.store.fleet.leases import pairs_shown
from edged.store.jobs.jobs import open_job_of
from edged.store.user_quota import PairQueueFull

_EXPORT_ROWS = 32
"""Pairs that an export reads and sends at a time."""
_LONGEST_ID = 64
BY_ITSELF = "nothing: it goes on by itself"
"""The step that settles what waits only for its turn."""


async def post_feedback(request: web.Request) -> FeedbackTaken:
    """Take a signal, a pair or a rating; 200 means that it is on disk."""
    services, caller = services_of(request), caller_of(request)
    body = await read_body(request, parse_feedback)
    caller.demand_person(body.user)
    if services.store.suspect:
        raise ApiError(503, services.store.suspect, code="store_suspect")
    user = body.user or caller.tenant
    services.limits.feedback(user)
    told: dict[str, Any]
    if isinstance(body, SignalRequest):
        told = {"chosen": body.text}
    else:
        told = {**body.model_dump(exclude_none=True), "chosen": body.chosen, "rejected": body.rejected}
    check_tokens(services, told.get("prompt_ids") or (), "prompt_ids", of_text=True)
    if services.tokenizer.refuses:
        async with reading_turn(caller.tenant):
            await asyncio.to_thread(demand_rows, services.tokenizer, told)
    # Shielded from the client's disconnect: feedback that was sent is stored.
    try:
        result = await asyncio.shield(_store(body, caller, services))
    except PairQueueFull:
        services.limits.no_feedback(user)
        raise
    pair_ids, reason, duplicate = list(result.pair_ids), result.reason or None, result.duplicate
    return FeedbackTaken(
        id=result.feedback_id, object="feedback", pair_ids=pair_ids, reason=reason, duplicate=duplicate
    )


async def _store(
    body: SignalRequest | PairRequest | RatingRequest, caller: Caller, services: Services
) -> FeedbackResult:
    """Store feedback when it is its account's turn, and have it learned."""
    async with services.limits.writing(caller.tenant):
        written = services.store.write(lambda db: _record(db, body, caller, services))
        written.add_done_callback(services.feedback_intake.learn_from)
        stored = asyncio.wrap_future(written)
        await asyncio.wait([stored], timeout=STORED_WITHIN_S)
        if not written.done() and written.cancel():
            services.limits.no_feedback(body.user or caller.tenant)
            told = f"it could not be stored within {STORED_WITHIN_S:g} s: another program holds the database"
            raise ApiError(503, f"{told}; close that program, and send it again", code="store_busy", retry_after_s=5.0)
        return await stored


def _record(
    db: Database, body: SignalRequest | PairRequest | RatingRequest, caller: Caller, services: Services
) -> FeedbackResult:
    """Store feedback, if the caller may report it and there is room.

    Raises FeedbackError, StorageFull or PairQueueFull.
    """
    quota, settings = services.quota, services.settings
    about, users = _completion(db, body, caller) if isinstance(body, SignalRequest) else (None, {body.user})
    for user in users:
        quota.demand_room(db, user)
    if isinstance(body, SignalRequest):
        if (found := answer_of_choice(db, str(about), body.choice)) is None:
            several = f'completion "{about}" answers several prompts: give `choice` as its "index" in the answer'
            raise FeedbackError(several, "bad_choice")
        about, choice = found
        told = body.model_dump(exclude={"request_id"}) | {"completion_id": about, "choice": choice}
        report = Feedback(**told, account=caller.tenant, named=caller.users)
        result = record_signal(db, report, utc_now(), settings)
    else:
        messages = [message.plain() for message in body.messages] if body.messages is not None else None
        pair = (body.user, body.chosen, body.rejected)
        prompt = (messages, body.prompt, body.prompt_ids)
        by: dict[str, Any] = {"account": caller.tenant, "named": caller.users}
        by["imported"] = isinstance(body, PairRequest) and body.imported
        by["single"] = isinstance(body, RatingRequest)
        result = record_pair(db, *pair, utc_now(), *prompt, body.weight, settings, **by)
    for user in users:
        quota.learned(db, user, () if result.duplicate else result.pair_ids)
        services.reading_speeds.forget(user)
    return result


def _completion(db: Database, body: SignalRequest, caller: Caller) -> tuple[str, set[str]]:
    """Return the completion that a signal is about, the newest of a request's, and its users.

    Raises FeedbackError for one that is unknown or another's: the same, so that it reveals nothing.
    """
    name = body.completion_id or newest_of_request(db, body.request_id or "", caller.speaks_for)
    users = users_of_completion(db, name) if name is not None else set[str]()
    if name is None or not all(map(caller.speaks_for, users)):
        raise unknown_completion(body.completion_id or body.request_id or "")
    return name, users


async def get_feedback(request: web.Request) -> web.StreamResponse:
    """All pairs, or those of one user, as JSON lines.

    Where another node of a fleet writes a user's adapter, that one shows the pairs that it has on its disk.

    Only pairs of users that the caller may speak for (or of `?user=NAME`, from `?since=` on), in the shape that
    `edged feedback import --format edged` takes. `since` is an ISO date or time in UTC.
    """
    services, caller = services_of(request), caller_of(request)
    user = queried_user(request)
    since = _since(request.query.get("since", ""))
    here = services.settings.api.node

    def shown(db: Database) -> list[int]:
        return pairs_shown(db, pair_ids_of(db, user, since, caller.speaks_for), here)

    ids = await asyncio.to_thread(services.store.read, shown)
    pieces = (_export(services, ids[first : first + _EXPORT_ROWS]) for first in range(0, len(ids), _EXPORT_ROWS))
    headers = {"Content-Type": "application/jsonl; charset=utf-8"}
    return await send_pieces(request, "an export", headers, lambda: next(pieces, None))


def _export(services: Services, pair_ids: Sequence[int]) -> bytes:
    pairs = services.store.read(lambda db: get_pairs(db, pair_ids))
    return "".join(dumps(export_pair(pair)) + "\n" for pair in pairs).encode()


def _since(text: str) -> str:
    """Parse `?since=` into the time format of the database; "" for none. Raises ApiError."""
    if not text:
        return ""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise bad_request(f'since = "{text[:40]}" is not a date or time such as 2025-01-31', "since") from None
    try:
        return utc_text(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    except OverflowError:
        return ""


async def get_feedback_progress(request: web.Request) -> FeedbackProgress:
    """What became of a feedback's pairs, or what they wait for."""
    return await asyncio.to_thread(_progress, services_of(request), caller_of(request), request.match_info["id"])


def _progress(services: Services, caller: Caller, feedback_id: str) -> FeedbackProgress:
    """Build the answer. Raises ApiError (404) for a feedback that is unknown or another user's."""

    def read(db: Database) -> tuple[Any, list[dict[str, Any]], str] | None:
        signal = get_signal(db, feedback_id)
        if signal is None or not caller.speaks_for(signal.user):
            return None
        rows = progress_of(db, signal.pair_ids)
        job = open_job_of(db, rows[0]["adapter"], services.feedback_intake.ref_model) if rows else ""
        return signal, rows, job

    if not feedback_id.isascii() or len(feedback_id) > _LONGEST_ID or (found := services.store.read(read)) is None:
        # The same error for both, so that it does not reveal that another user's feedback exists.
        message = f'feedback "{feedback_id[:_LONGEST_ID]}" is not known: give the id that POST /v1/feedback answered'
        raise ApiError(404, message, "id", "unknown_feedback")
    signal, rows, job = found
    obstacles, blocked = obstacles_of(services, any(row["single"] and row["state"] == "queued" for row in rows), job)
    if rows and services.engine.follows(rows[0]["adapter"]):
        obstacles, blocked = [("the node of the fleet that teaches it", BY_ITSELF)], False
    pairs = [_pair_progress(row, [why for why, _ in obstacles]) for row in rows]
    waits = any(pair.waits_for for pair in pairs)
    about: dict[str, Any] = {"id": signal.id, "user": signal.user, "reason": signal.reason or None, "pairs": pairs}
    return FeedbackProgress(object="feedback.progress", settled=not waits, blocked=waits and blocked, **about)


def _pair_progress(row: dict[str, Any], reasons: list[str]) -> PairProgress:
    """Build one pair's progress, also as a sentence. `reasons` are why queued pairs wait for their step."""
    name, note, state = row["adapter"], row["note"], row["state"]
    version, seconds = row["trained_version"], row["seconds"]
    waits_for = None
    if state == "queued":
        before = f"{row['before']} pair{'s' * (row['before'] > 1)} before it" if row["before"] else ""
        waits_for = "; ".join(filter(None, (before, *reasons))) or f"the next step of {name}"
    after = "" if seconds is None else f" after {seconds:.1f} s" if seconds < 60 else f" after {seconds / 60:.0f} min"
    text = {
        "queued": f"waits: {waits_for}",
        "trained": f"learned{f' as {name}@{version}' if version else ''}{after}",
        "learnt": f"{f'{name}@{version}' if version else name} knew it already: {note}",
        "held_out": f"kept as a test: {name}'s versions are measured by it, and none learns it",
        "quarantined": f"held: {note}; if this was you: edged quarantine release --user {name}",
        "skipped": f"not learned: {note}",
    }[state]
    about = {"pair_id": row["id"], "adapter": name, "state": state, "version": version, "seconds": seconds}
    return PairProgress(**about, waits_for=waits_for, text=text)


def obstacles_of(services: Services, single: bool, job: str) -> tuple[list[tuple[str, str]], bool]:
    """Return (why queued pairs wait, each with the step that settles it; whether none is learned until somebody acts).

    `single` says that single ratings are among them; `job` is the open one that trains their adapter, "" for none.
    """
    tuning, settings = services.engine.finetuning.report(), services.settings
    blocked, found = True, []
    if not settings.align.enabled:
        found.append(
            ("learning is switched off (align.enabled = false)", "set align.enabled = true, then edged reload")
        )
    elif not tuning["enabled"]:
        why = f"fine-tuning is paused{': ' * bool(tuning['reason'])}{tuning['reason']}"
        found.append((why, "edged doctor"))
    else:
        blocked = False
        if tuning["held"]:
            governors = services.governors.report
            why = "; ".join(filter(None, [governors["memory"]["reason"], *governors["power"]["reasons"]]))
            found.append((f"governors hold fine-tuning back: {why}", BY_ITSELF))
        elif tuning["reason"]:
            found.append((tuning["reason"], BY_ITSELF))
    if late := tuning["pairs_waiting"]:
        most = f"feedback.pairs_per_hour = {settings.feedback.pairs_per_hour}"
        found.append((f"its hour: {most}, {late} wait", BY_ITSELF))
    if job:
        found.append((f"fine-tuning job {job}", BY_ITSELF))
    if single and settings.align.unpaired == "off":
        blocked, off = True, 'single ratings are not learned (align.unpaired = "off")'
        found.append((off, 'set align.unpaired = "apo", then edged reload'))
    return found, blocked
