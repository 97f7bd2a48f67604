"""`POST /v1/feedback` and `GET /v1/feedback`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import UTC, datetime

from aiohttp import web
from sqlite_utils import Database

from edged.align.feedback.pair_formats import export_pair
from edged.align.feedback.signals import Feedback, FeedbackResult, record_pair, record_signal, unknown_completion
from edged.api import query
from edged.api.access import Caller, caller_of
from edged.api.errors import bad_request, send_pieces, unavailable
from edged.api.models import check_tokens
from edged.api.openai_format import dumps
from edged.api.requests import PairRequest, SignalRequest, parse_feedback, read_body
from edged.api.responses import FeedbackTaken
from edged.api.services import Services, services_of
from edged.settings.load import FeedbackSettings
from edged.store import utc_now, utc_text
from edged.store.completions import users_of_completion
from edged.store.feedback import get_pairs, pair_ids_of
from edged.store.user_quota import UserQuota

_EXPORT_ROWS = 256
"""Pairs that are read and sent at a time."""


async def post_feedback(request: web.Request) -> FeedbackTaken:
    """Take a signal or a pair. 200 means that it is on disk."""
    services, caller = services_of(request), caller_of(request)
    body = await read_body(request, parse_feedback)
    caller.demand_user(body.user)
    if services.store.suspect:
        raise unavailable(services.store.suspect, "store_suspect")
    services.limits.feedback(body.user or caller.tenant)
    if isinstance(body, PairRequest):
        check_tokens(services, body.prompt_ids or (), "prompt_ids")
    weights = services.settings.feedback
    written = services.store.write(lambda db: _record(db, body, caller, services.footprint, weights))
    written.add_done_callback(lambda done: _learn(services, done))
    # Whether the client still listens makes no difference to what it reported.
    result = await asyncio.shield(asyncio.wrap_future(written))
    return FeedbackTaken(
        id=result.feedback_id,
        object="feedback",
        pair_ids=list(result.pair_ids),
        reason=result.reason or None,
        duplicate=result.duplicate,
    )


async def get_feedback(request: web.Request) -> web.StreamResponse:
    """All pairs of those whom the caller may speak for (or of `?user=NAME`, from `?since=` on) as JSON lines.

    They have the shape that `edged feedback import --format edged` takes. `since` is an ISO date or time in UTC.
    """
    services, caller = services_of(request), caller_of(request)
    user = query.user_name(request)
    caller.demand_user(user)
    since = _since(request.query.get("since", ""))
    ids = await asyncio.to_thread(services.store.read, lambda db: pair_ids_of(db, user, since, caller.speaks_for))
    parts = (_export(services, ids[first : first + _EXPORT_ROWS]) for first in range(0, len(ids), _EXPORT_ROWS))
    headers = {"Content-Type": "application/jsonl; charset=utf-8"}
    return await send_pieces(request, "an export", headers, lambda: next(parts, None))


def _since(text: str) -> str:
    """A moment as the database writes it; "" for none. Raises ApiError."""
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


def _record(
    db: Database, body: SignalRequest | PairRequest, caller: Caller, footprint: UserQuota, settings: FeedbackSettings
) -> FeedbackResult:
    """Store it, if it is the caller's to report and there is room for it. Raises FeedbackError or StorageFull."""
    users = {body.user} if isinstance(body, PairRequest) else users_of_completion(db, body.completion_id)
    if isinstance(body, SignalRequest) and not all(map(caller.speaks_for, users)):
        # Nor does it say that there is such a one.
        raise unknown_completion(body.completion_id)
    for user in users:
        footprint.demand_room(db, user)
    if isinstance(body, SignalRequest):
        said = (body.signal, body.choice, body.text, body.seconds)
        report = Feedback(body.user, body.completion_id, *said, account=caller.tenant)
        result = record_signal(db, report, utc_now(), settings)
    else:
        messages = [message.plain() for message in body.messages] if body.messages is not None else None
        pair = (body.user, body.chosen, body.rejected)
        about = (messages, body.prompt, body.prompt_ids)
        result = record_pair(db, *pair, utc_now(), *about, body.weight, settings, caller.tenant)
    for user in users:
        footprint.learned(db, user, () if result.duplicate else result.pair_ids)
    return result


def _learn(services: Services, written: Future[FeedbackResult]) -> None:
    """Once it is on disk: have new pairs learned. Runs on the store's thread."""
    if not written.cancelled() and not written.exception() and not written.result().duplicate:
        services.feedback_intake.learn_soon(written.result().pair_ids)


def _export(services: Services, pair_ids: Sequence[int]) -> bytes:
    pairs = services.store.read(lambda db: get_pairs(db, pair_ids))
    return "".join(dumps(export_pair(pair)) + "\n" for pair in pairs).encode()
