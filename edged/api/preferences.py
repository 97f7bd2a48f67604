"""`/v1/adapters/{name}/preference` and `/strike`: what users want in words, and what is not to be believed of them."""

import asyncio
from collections.abc import Callable

from aiohttp import web
from sqlite_utils import Database

from edged.api.adapters import adapter_name, demand_writer
from edged.api.requests import PreferenceRequest, StrikeRequest, read_body
from edged.api.responses import Preference, Struck
from edged.api.services import Services, services_of
from edged.http.access import caller_of
from edged.http.errors import ApiError, bad_request
from edged.store import feedback, utc_now, utc_text
from edged.store.feedback import WrittenPreference
from edged.store.jobs.jobs import checkpoint_of
from edged.text.preference import why_unusable

_MAX_STRUCK = 1000
"""Most struck beliefs of one adapter."""


async def get_preference(request: web.Request) -> Preference:
    """What a user wants of all answers, in words; `text` is null where nothing is written."""
    services, name = services_of(request), _taught(request)
    found = await asyncio.to_thread(services.store.read, lambda db: feedback.get_preference(db, name))
    return _answer(services, name, found)


async def put_preference(request: web.Request) -> Preference:
    """Write what a user wants of all answers.

    From the next chat answer on it is in the system prompt, where the model's chat template has one.
    """
    services, name, caller = services_of(request), _taught(request), caller_of(request)
    text = (await read_body(request, PreferenceRequest.checked)).text
    _count(services, name)
    if problem := await asyncio.to_thread(why_unusable, services.tokenizer, text):
        raise bad_request(f'"text": {problem}', "text")
    written = WrittenPreference(name, text, utc_text(utc_now()), caller.tenant)

    def write(db: Database) -> None:
        _demand_teachable(db, name)
        feedback.set_preference(db, written)

    return _answer(services, name, await _change(services, name, write))


async def _change(services: Services, name: str, write: Callable[[Database], None]) -> WrittenPreference | None:
    """Change a preference; what was distilled of another text is undone, and the new one is to be learned."""
    demand_writer(services, name)
    before = await asyncio.to_thread(services.store.read, lambda db: feedback.get_preference(db, name))
    found = await asyncio.wrap_future(services.preferences.change(name, write))
    changed = before is not None and before.distilled > 0 and (found is None or found.text != before.text)
    if before is not None and changed and services.engine.version(name):
        await services.practice.undo(name, before.created_at)
    services.practice.on_taste(name)
    services.feed.tell_changed(name)
    return found


async def delete_preference(request: web.Request) -> Preference:
    """Delete what a user wants of all answers."""
    services, name = services_of(request), _taught(request)
    return _answer(services, name, await _change(services, name, lambda db: feedback.delete_preference(db, name)))


async def strike(request: web.Request) -> Struck:
    """Have the taste model of an adapter not believe something; `undo` lets it believe that again."""
    services, name = services_of(request), _taught(request)
    body = await read_body(request, StrikeRequest.checked)
    demand_writer(services, name)
    _count(services, name)

    def write(db: Database) -> tuple[set[str], bool]:
        _demand_teachable(db, name)
        before = feedback.struck(db, name)
        if body.undo:
            feedback.unstrike(db, name, body.key)
        else:
            feedback.strike(db, name, body.key, utc_text(utc_now()))
        if len(keys := feedback.struck(db, name)) > _MAX_STRUCK:
            raise bad_request(f"{_MAX_STRUCK} lines of {name} are struck: no more are taken", "key")
        return keys, keys != before

    taste = await services.tastes.of(name)
    believed = taste is not None and any(belief.key == body.key for belief in taste.beliefs())
    struck, changed = await asyncio.wrap_future(services.store.write(write))
    if changed:
        services.tastes.refit(name)
        services.feed.tell_changed(name)
    if changed and believed:
        # What nothing was practised by asks for no practice anew.
        await services.practice.relearn(name)
    return Struck(adapter=name, struck=sorted(struck))


def _taught(request: web.Request) -> str:
    """The adapter that a URL names, which the caller may teach. Raises ApiError."""
    name = adapter_name(request)
    caller_of(request).demand_person(name)
    return name


def _count(services: Services, name: str) -> None:
    """Count a change as feedback. Raises LimitReached, or ApiError (503) where the disk is not to be trusted."""
    if services.store.suspect:
        raise ApiError(503, services.store.suspect, code="store_suspect")
    services.limits.feedback(name)


def _demand_teachable(db: Database, name: str) -> None:
    """Raise ApiError (409) for a checkpoint of a fine-tuning job."""
    if job := checkpoint_of(db, name):
        told = f'adapter "{name}" is a checkpoint of job "{job}", which stays as it is: nothing teaches it'
        raise ApiError(409, told, code="checkpoint")


def _answer(services: Services, name: str, found: WrittenPreference | None) -> Preference:
    kept = found or WrittenPreference(name, "", "", None)
    left_out = services.preferences.why_left_out(kept) if found else "nothing is written"
    note = services.preferences.note(kept) if found else left_out
    about = {"adapter": name, "text": kept.text or None, "created_at": kept.created_at or None}
    return Preference(**about, distilled=kept.distilled, in_prompt=not left_out, note=note)
