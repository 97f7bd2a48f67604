"""`GET /v1/models` and `GET /v1/models/{id}`; model names are parsed and token ids checked here.

`BASE` is the served model, `BASE:NAME` the same with that user's adapter. `BASE:latest` is the served model, too, as in
Ollama, where the caller has no adapter of that name.
"""

from collections.abc import Collection

from aiohttp import web

from edged.api.responses import Model, ModelList
from edged.api.services import Services, services_of
from edged.http.access import Caller, caller_of
from edged.http.errors import ApiError, bad_request
from edged.settings.load import USER_NAME
from edged.text.tokenizer import TokenizerError

_TAG = "latest"
"""The tag of Ollama's names that have none."""


def split_model(services: Services, caller: Caller, model: str | None) -> tuple[str, str | None]:
    """Return (the model's name as the answer states it, the adapter that it names). None is the base model.

    An adapter that has no version yet may be named: the base model answers. Raises ApiError.
    """
    base = services.model
    if not model or model == base:
        return base, None
    adapter = model.removeprefix(f"{base}:")
    if adapter == model or not USER_NAME.fullmatch(adapter):
        raise _unknown(services, model)
    if adapter == _TAG and not (caller.speaks_for(_TAG) and services.engine.version(_TAG)):
        return base, None
    return model, adapter


def check_tokens(services: Services, ids: Collection[int], param: str, of_text: bool = False) -> None:
    """Raise ApiError unless all are token ids of the model, and `of_text` none an image's; `param` is their field."""
    try:
        (services.tokenizer.check_text if of_text else services.tokenizer.check)(ids)
    except TokenizerError as error:
        raise bad_request(str(error), param) from None


def _unknown(services: Services, model: str) -> ApiError:
    base = services.model
    message = f'model "{model[:200]}" does not exist: use "{base}" or, with an adapter, "{base}:USER"'
    return ApiError(404, message, "model", "model_not_found")


async def list_models(request: web.Request) -> ModelList:
    """The base model, and one model for each adapter.

    Only adapters that the caller may speak for, and those of users whom its rule or token names.
    """
    services, caller = services_of(request), caller_of(request)
    adapters = sorted({*filter(caller.speaks_for, services.engine.adapters()), *_granted(caller)})
    return ModelList(object="list", data=[_model(services, adapter) for adapter in (None, *adapters)])


async def get_model(request: web.Request) -> Model:
    """One model."""
    services, caller = services_of(request), caller_of(request)
    name = request.match_info["id"]
    _, adapter = split_model(services, caller, name)
    caller.demand_user(adapter)
    if adapter is not None and services.engine.version(adapter) is None and adapter not in _granted(caller):
        raise _unknown(services, name)
    return _model(services, adapter)


def _granted(caller: Caller) -> list[str]:
    """Return the users that a caller is granted by name: they may ask before they have learned."""
    return [user for user in caller.users if USER_NAME.fullmatch(user) and caller.speaks_for(user)]


def _model(services: Services, adapter: str | None) -> Model:
    base = services.model
    return Model(
        id=base if adapter is None else f"{base}:{adapter}",
        object="model",
        created=int(services.started_at_s),
        owned_by="edged",
        max_model_len=services.engine.max_context_tokens,
        parent=None if adapter is None else base,
        adapter=adapter,
    )
