"""`GET /v1/quarantine` and `POST /v1/quarantine/{pair}`: pairs that look poisoned, and what somebody decides.

Owns these routes. Must not know why a pair looks poisoned. Who may call them is the application's matter; that a caller
decides about no other user's pair is checked here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from sqlite_utils import Database

from edged.align.pair import PairRetired, PairState
from edged.api import wire
from edged.api.access import Caller, caller_of
from edged.api.errors import ApiError, bad_request, not_found
from edged.api.schemas import QuarantineRequest, parse_json, validate
from edged.api.services import services_of
from edged.config import USER_NAME
from edged.store import quarantine, utc_now, utc_text

_MOST = 500
"""Pairs that one answer lists."""


async def list_quarantined(request: web.Request) -> web.Response:
    """The newest pairs that wait for a decision (of `?user=NAME`), and how many there are."""
    services = services_of(request)
    user = request.query.get("user")
    if user is not None and not USER_NAME.fullmatch(user):
        raise bad_request(f'"{user[:80]}" cannot name a user', "user")
    caller = caller_of(request)
    if not caller.may("admin") and not (user and caller.speaks_for(user)):
        raise ApiError(403, "only an admin sees all users' pairs: give ?user=NAME of your own", kind="permission_error")

    def read(db: Database) -> dict[str, Any]:
        found = quarantine.quarantined(db, user, _MOST)
        return {"pairs": found, "count": quarantine.count_quarantined(db, user)}

    body = await asyncio.to_thread(services.store.read, read)
    return web.json_response(body, dumps=wire.dumps)


async def decide(request: web.Request) -> web.Response:
    """Release a pair, which is learned from then, or drop it."""
    services, pair_id = services_of(request), _pair_id(request)
    body = validate(QuarantineRequest, parse_json(await request.read()))
    owner = await asyncio.to_thread(services.store.read, lambda db: quarantine.owner_of(db, pair_id))
    caller = caller_of(request)
    if owner is None or not (caller.may("admin") or caller.speaks_for(owner[0])):
        # Whether another user's pair is there is not for everybody to know.
        raise not_found(f"pair {pair_id} is not in quarantine: see GET /v1/quarantine", "pair", "unknown_pair")
    adapter = owner[0]
    decision: quarantine.Decision = "released" if body.action == "release" else "dropped"
    if decision == "released":
        _demand_release(caller, adapter)

    def write(db: Database) -> tuple[bool, int]:
        decided = quarantine.decide(db, pair_id, decision, utc_text(utc_now()))
        return decided, quarantine.count_quarantined(db, adapter)

    decided, left = await asyncio.shield(asyncio.wrap_future(services.store.write(write)))
    if not decided:
        raise ApiError(
            409, f"pair {pair_id} was {owner[1] or 'decided about'} already", param="pair", code="already_decided"
        )
    services.feed.tell_outcomes([_outcome(adapter, pair_id, decision)])
    if not left:
        services.engine.calm(adapter)
    if decision == "released":
        services.teacher.learn_soon((pair_id,))
    answer = {"pair_id": pair_id, "adapter": adapter, "decision": decision, "left": left}
    return web.json_response(answer, dumps=wire.dumps)


def _outcome(adapter: str, pair_id: int, decision: quarantine.Decision) -> PairRetired:
    """What a decision makes of a pair, for those who watch."""
    state: PairState = "queued" if decision == "released" else "skipped"
    return PairRetired(pair_id, adapter, state, 0, 0, f"{decision} from quarantine")


def _demand_release(caller: Caller, adapter: str) -> None:
    """Raises ApiError (403) unless the caller may have `adapter` learn what looks poisoned, which is then trusted.

    Who may teach an adapter that others use could otherwise poison it and wave it through.
    """
    if not caller.may("admin") and caller.tenant != adapter:
        raise ApiError(
            403,
            f'releasing what "{adapter}" was taught needs the role "admin", unless it is the caller\'s own account; '
            f"{caller.label} may drop it ({caller.rule})",
            code="forbidden_role",
            kind="permission_error",
        )


def _pair_id(request: web.Request) -> int:
    text = request.match_info["pair"]
    if not (text.isascii() and text.isdigit() and len(text) < 18):
        raise not_found(f'"{text[:40]}" is not the number of a pair: see GET /v1/quarantine', "pair", "unknown_pair")
    return int(text)
