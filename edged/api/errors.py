"""Which of edged's exceptions a client gets as an error, and how."""

import logging

from edged.align.adapters.adapter import AdapterError
from edged.align.feedback.signals import FeedbackError
from edged.api.admission import LimitReached
from edged.engine.request import EngineBusy, EngineStopping, FirstTokenLate, RequestRefused
from edged.http.errors import ApiError
from edged.settings.load import ConfigError
from edged.store import StoreError
from edged.store.user_quota import PairQueueFull, StorageFull
from edged.text.tokenizer import TokenizerError

log = logging.getLogger("edged.api")

_ANSWERS: dict[type[Exception], tuple[int, str]] = {
    EngineStopping: (503, "stopping"),
    LimitReached: (429, "rate_limit_reached"),
    FirstTokenLate: (429, "first_token_late"),
    EngineBusy: (429, "queue_full"),
    RequestRefused: (400, "request_refused"),
    TokenizerError: (400, "bad_text"),
    PairQueueFull: (429, "pair_queue_full"),
    StorageFull: (403, "storage_full"),
    ConfigError: (400, "bad_settings"),
    StoreError: (503, "store_failed"),
    AdapterError: (409, "adapter_unusable"),
}
"""The status and code of each exception whose message the client gets."""


def as_api_error(error: Exception) -> ApiError:
    """Return the error response for an exception; an unforeseen one is logged, and the client gets no details."""
    for kind, (status, code) in _ANSWERS.items():
        if isinstance(error, kind):
            if isinstance(error, StoreError):
                log.error("%s", error)
            retry_after_s, user = getattr(error, "retry_after_s", 1.0), getattr(error, "user", None)
            return ApiError(status, str(error), code=code, retry_after_s=retry_after_s, user=user)
    match error:
        case ApiError():
            return error
        case FeedbackError():
            return ApiError(404 if error.kind == "unknown_completion" else 400, str(error), code=error.kind)
        case ConnectionResetError():
            # The client is gone and will not read this.
            log.debug("a client left before its answer began")
            return ApiError(503, "the client left", code="client_left")
        case _:
            log.error("a request failed", exc_info=error)
            return ApiError(500, "edged failed on this request; its log has the details", code="internal_error")
