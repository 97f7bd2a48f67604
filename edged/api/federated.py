"""`/v1/federated`: what this box takes part in, who agreed, what has left, and the rounds that a hub asks for."""

import asyncio
import re
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web
from sqlite_utils import Database

from edged.api.adapters import receive
from edged.api.requests import ConsentRequest, queried_user, read_body
from edged.api.responses import (
    ConsentGiven,
    ConsentRevoked,
    Federation,
    FederationLedger,
    RoundBegun,
    RoundDropped,
    RoundOffer,
    RoundState,
)
from edged.api.rounds import OpenRound, Rounds
from edged.api.services import Services, services_of
from edged.federated.campaign_file import CampaignRefused
from edged.federated.records import RecordRefused, RoundFile
from edged.federated.terms import consent_text
from edged.http.access import caller_of
from edged.http.errors import ApiError, bad_request, upload_in_time
from edged.settings.access import NO_USER_NAME, USER_NAME
from edged.store import utc_now, utc_text
from edged.store.data_dir import SCRATCH
from edged.store.federated.consents import Consent, all_consents, revoke_consent, set_consent
from edged.store.federated.ledger import ledger_lines, spent

_SHA256 = re.compile("[0-9a-f]{64}")
_TOKENS = 256
"""Tokens of a prompt by whose price the box's speed is told."""


async def get_federation(request: web.Request) -> Federation:
    """What this box takes part in, the text that users agree to, and who of those that the caller speaks for did.

    A consent counts while the settings make the text that it was given to.
    """
    services, caller = services_of(request), caller_of(request)
    rounds, box = services.rounds, services.rounds.settings

    def read(db: Database) -> list[dict[str, Any]]:
        return [
            {**asdict(consent), "counts": consent.text_sha256 == rounds.text_sha256, "rounds": spent(db, user)[0]}
            for user, consent in all_consents(db).items()
            if caller.speaks_for(user)
        ]

    return Federation(
        enabled=box.enabled,
        model=rounds.model,
        rank=rounds.spec.rank,
        guarantee=box.noise > 0,
        terms=box.model_dump(),
        text=consent_text(box),
        text_sha256=rounds.text_sha256,
        consents=await asyncio.to_thread(services.store.read, read),
    )


async def put_consent(request: web.Request) -> ConsentGiven:
    """Agree, for a user, to take part in rounds.

    The body has the hash of the text that the user was shown; that of another text is refused.
    """
    services, user = services_of(request), _user(request)
    shown = (await read_body(request, ConsentRequest.checked)).text_sha256
    _demand_enabled(services)
    if shown != services.rounds.text_sha256:
        way_out = "the settings have changed, or it was another box's; show the text of now"
        raise ApiError(409, f"that is not the text that users agree to here: {way_out}", "text_sha256", "other_text")
    consent = Consent(user, utc_text(utc_now()), caller_of(request).tenant, shown)
    await asyncio.wrap_future(services.store.write(lambda db: set_consent(db, consent)))
    return ConsentGiven(user=user, agreed_at=consent.created_at, text_sha256=shown)


async def delete_consent(request: web.Request) -> ConsentRevoked:
    """Revoke a user's consent.

    A round under way ends, and a record that waits is dropped; what has left is in others' sums.
    """
    services, user = services_of(request), _user(request)
    revoked = await asyncio.wrap_future(services.store.write(lambda db: revoke_consent(db, user)))
    await services.rounds.forget_user(user)
    return ConsentRevoked(user=user, revoked=revoked)


async def get_ledger(request: web.Request) -> FederationLedger:
    """What has left this box: all records, or that of `?sha256=`.

    The role federated may ask for one record, and is not told whose it was.
    """
    services, caller = services_of(request), caller_of(request)
    sha256 = request.query.get("sha256")
    if sha256 is None:
        caller.demand_role("admin")
    elif not _SHA256.fullmatch(sha256):
        raise bad_request(f'sha256 = "{sha256[:80]}" is no SHA-256: give 64 hex digits', "sha256")
    lines = await asyncio.to_thread(services.store.read, lambda db: ledger_lines(db, sha256))
    if not caller.may("admin"):
        lines = [{**line, "user": None} for line in lines]
    return FederationLedger(ledger=lines)


async def get_offer(request: web.Request) -> RoundOffer:
    """What this box offers to rounds, in classes: nobody is named."""
    services = services_of(request)
    rounds, box = _enabled(services), services.rounds.settings
    able = await rounds.participants(box.noise, box.min_pairs)
    reading, cost = services.monitor.latest, services.engine.scheduler.cost
    memory = reading.gpu_memory_total_bytes or reading.memory_total_bytes
    busy = rounds.latest.id if rounds.latest is not None and rounds.latest.state == "training" else None
    at_rest = not (services.event_router.open_requests or services.engine.finetuning.pairs_queued)
    free = busy is None and services.engine.finetuning.opens_steps and not await rounds.rests()
    return RoundOffer(
        model=rounds.model,
        rank=rounds.spec.rank,
        memory_mb=_class(memory >> 20),
        tokens_per_s=_class(int(_TOKENS / max(cost.prompt_s(_TOKENS), 1e-9))),
        participants=_class(len(able)),
        idle=free and (at_rest or box.when == "always"),
        busy=busy,
        terms=box.model_dump(exclude={"enabled", "when"}),
    )


def _class(number: int) -> int:
    """Return the power of two that is not over a number; 0 of 0."""
    return 1 << number.bit_length() - 1 if number else 0


async def begin_round(request: web.Request) -> RoundBegun:
    """Begin a round of a round file; an admin may name its participant (`?user=`), else the box chooses."""
    services, user = services_of(request), queried_user(request)
    rounds = _enabled(services)
    if user is not None:
        caller_of(request).demand_role("admin")
    most = rounds.settings.max_update_mb << 20
    folder = services.store.path.parent
    with tempfile.NamedTemporaryFile(prefix=f"{SCRATCH}round-", dir=folder) as scratch:
        path = Path(scratch.name)
        async with upload_in_time(services.settings.limits.body_s, min(most, request.content_length or most)):
            await receive(request, path, most, "the round file is larger than federated.max_update_mb allows")
        try:
            file = await asyncio.to_thread(RoundFile.read, path, most)
        except (RecordRefused, CampaignRefused) as error:
            told = str(error).replace(str(path), "the round file")
            raise bad_request(told, code="round_refused") from None
    begun = await rounds.begin(file, user)
    return RoundBegun(id=begun.id)


async def get_round(request: web.Request) -> RoundState:
    """How far a round is."""
    rounds, current = _round(request)
    progress = rounds.progress() if current.state == "training" else 1.0
    return RoundState(id=current.id, state=current.state, reason=current.reason, progress=progress)


async def get_record(request: web.Request) -> web.Response:
    """A round's record, a safetensors file; the ledger has its line before its first byte leaves."""
    rounds, current = _round(request)
    return web.Response(body=await rounds.leave(current), content_type="application/octet-stream")


async def drop_round(request: web.Request) -> RoundDropped:
    """End a round under way, or drop its record."""
    rounds, current = _round(request)
    await rounds.drop(current, "it was dropped")
    rounds.latest = None
    return RoundDropped(id=current.id, dropped=True)


def _demand_enabled(services: Services) -> None:
    if not services.rounds.settings.enabled:
        raise ApiError(409, "this box takes part in no federation: federated.enabled is off", code="not_federated")


def _enabled(services: Services) -> Rounds:
    _demand_enabled(services)
    return services.rounds


def _round(request: web.Request) -> tuple[Rounds, OpenRound]:
    rounds, asked = services_of(request).rounds, request.match_info["id"]
    if rounds.latest is None or rounds.latest.id != asked:
        told = f'there is no round "{asked[:80]}": a later one began, it was dropped, or the daemon started anew'
        raise ApiError(404, told, "id", "unknown_round")
    return rounds, rounds.latest


def _user(request: web.Request) -> str:
    user = request.match_info["user"]
    if not USER_NAME.fullmatch(user):
        raise bad_request(NO_USER_NAME.format(user[:80]), "user")
    return user
