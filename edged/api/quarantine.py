"""`GET` and `POST /v1/quarantine`, `POST /v1/quarantine/{pair}`: list, release and drop pairs that look poisoned.

The application checks the caller's role; the handlers check that the pairs are of users the caller may speak for.
"""

import asyncio

from aiohttp import web
from sqlite_utils import Database

from edged.align.feedback.pair import PairRetired, PairState
from edged.api.requests import QuarantineRequest, UserQuarantineRequest, queried_user, read_body
from edged.api.responses import AllDecided, Decided, Quarantine
from edged.api.services import Services, services_of
from edged.http.access import Caller, caller_of
from edged.http.errors import ApiError
from edged.store import quarantine, utc_now, utc_text

_MOST = 500
"""The most pairs that an answer lists."""


async def list_quarantined(request: web.Request) -> Quarantine:
    """Pairs that look poisoned and wait for a decision.

    The newest ones (of `?user=NAME`), and the count of all.
    """
    user, caller = queried_user(request), caller_of(request)
    if not caller.may("admin") and not (user and caller.speaks_for(user)):
        raise ApiError(403, "only an admin sees all users' pairs: give ?user=NAME of your own")

    def read(db: Database) -> Quarantine:
        found = quarantine.quarantined(db, user, _MOST)
        return Quarantine(pairs=found, count=quarantine.count_quarantined(db, user))

    return await asyncio.to_thread(services_of(request).store.read, read)


async def decide(request: web.Request) -> Decided:
    """Release or drop such a pair.

    A released pair is queued for training.
    """
    services, pair_id = services_of(request), _pair_id(request)
    body = await read_body(request, QuarantineRequest.checked)
    owner = await asyncio.to_thread(services.store.read, lambda db: quarantine.owner_of(db, pair_id))
    caller = caller_of(request)
    if owner is None or not (caller.may("admin") or caller.speaks_for(owner[0])):
        # The same error for both, so that it does not reveal that another user's pair exists.
        raise ApiError(404, f"pair {pair_id} is not in quarantine: see GET /v1/quarantine", "pair", "unknown_pair")
    decision, decided, left = await _decide(services, caller, owner[0], body.action, pair_id)
    if not decided:
        message = f"pair {pair_id} was {owner[1] or 'decided about'} already"
        raise ApiError(409, message, "pair", "already_decided")
    return Decided(pair_id=pair_id, adapter=owner[0], decision=decision, left=left)


async def decide_all(request: web.Request) -> AllDecided:
    """Release or drop all such pairs of a user."""
    body = await read_body(request, UserQuarantineRequest.checked)
    decision, decided, left = await _decide(services_of(request), caller_of(request), body.user, body.action)
    return AllDecided(user=body.user, decision=decision, pair_ids=decided, left=left)


async def _decide(
    services: Services, caller: Caller, adapter: str, action: str, pair_id: int | None = None
) -> tuple[quarantine.Decision, list[int], int]:
    """Release or drop a pair, or all of an adapter's; return (decision, ids decided, pairs that still wait).

    Raises ApiError (403) for a release that only an admin or the user's own account may make: released pairs are
    trusted, so whoever may train a shared adapter could otherwise poison it and release the poison.
    """
    if action == "release" and not caller.may("admin") and caller.tenant != adapter:
        unless = f"unless it is the caller's own account; {caller.label} may drop it ({caller.rule})"
        message = f'releasing what "{adapter}" was taught needs the role "admin", {unless}'
        raise ApiError(403, message, code="forbidden_role")
    decision: quarantine.Decision = "released" if action == "release" else "dropped"
    state: PairState = "queued" if action == "release" else "skipped"

    def write(db: Database) -> tuple[list[int], int]:
        asked = quarantine.waiting_ids(db, adapter) if pair_id is None else [pair_id]
        decided = [each for each in asked if quarantine.decide(db, each, decision, utc_text(utc_now()))]
        return decided, quarantine.count_quarantined(db, adapter)

    async def decide() -> tuple[quarantine.Decision, list[int], int]:
        decided, left = await asyncio.wrap_future(services.store.write(write))
        why = f"{decision} from quarantine"
        services.feed.tell_outcomes([PairRetired(each, adapter, state, 0, 0, why) for each in decided])
        if decided and not left:
            services.engine.clear_alarm(adapter)
        if decision == "released":
            services.feedback_intake.learn_soon(decided)
        return decision, decided, left

    # Shielded from the client's disconnect: a decision that was sent is carried out.
    return await asyncio.shield(decide())


def _pair_id(request: web.Request) -> int:
    """The pair's id in the URL. Raises ApiError (404)."""
    text = request.match_info["pair"]
    if not (text.isascii() and text.isdigit() and len(text) < 18):
        message = f'"{text[:40]}" is not the number of a pair: see GET /v1/quarantine'
        raise ApiError(404, message, "pair", "unknown_pair")
    return int(text)
