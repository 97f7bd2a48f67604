"""The taste models of users: fitted to their signals on a thread of their own, and kept while they are in use."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from edged.align.taste.features import features
from edged.align.taste.model import Taste
from edged.align.taste.opinions import opinions_of, question_of
from edged.store import Store
from edged.store.feedback import PairRow, struck

log = logging.getLogger("edged.api")
_SURE, _LEARNABLE = 0.42, 0.5
"""The least share of choices of one of two that are the user's: for a taste model to decide, and to be learned from."""
_SURE_OF, _FEW = 0.52, 10
"""Practice follows a taste where more than this share is right under prompts like its own, from so many prompts on."""
_MOST_KEPT = 256
"""Number of models in memory; the one that was asked for longest ago is fitted anew when it is asked for again."""
ALIKE, _LEAST_WEIGHT, _SLOPE = 0.3, 0.1, 0.5
"""The share of a pick's weight under which its answers are liked alike, the least that is left, and how it grows with
`Taste.difference`."""
_FIT_WITHIN_S = 0.2
"""Time for which a request waits for a model that is not in memory."""


def is_sure(taste: Taste) -> bool:
    """Whether a taste model is sure enough to choose answers: a choice in vain costs no more than room."""
    return taste.tested and taste.sure > _SURE


def is_learnable(taste: Taste) -> bool:
    """Whether a taste model is sure enough to label practice, and to weigh signals."""
    return taste.sure > _LEARNABLE


def is_sure_of(taste: Taste, question: str, answers: Sequence[str]) -> bool:
    """Whether practice may follow a taste under a question: what is liked under other topics may not count there."""
    return taste.prompts < _FEW or taste.sure_of(question, answers) > _SURE_OF


class Tastes:
    """The taste model of each user that has given signals. Used on the event loop, but for `refit` and `renew`."""

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store, self._loop = store, loop
        self._fitted: OrderedDict[str, Taste | None] = OrderedDict()
        """Models by adapter; None for one without signals."""
        self._fits: dict[str, Future[Taste | None]] = {}
        """Fits that are queued or under way."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edged-taste")
        self.changed: Callable[[str], None] = lambda adapter: None
        """Called on the event loop when an adapter's model was fitted anew."""

    async def of(self, adapter: str | None) -> Taste | None:
        """Return an adapter's model; None where it has none, or its fit takes longer than a request may wait."""
        if adapter is None:
            return None
        if adapter not in self._fitted:
            fit = self._fits.get(adapter) or self._fit(adapter)
            await asyncio.wait([asyncio.wrap_future(fit)], timeout=_FIT_WITHIN_S)
        if adapter in self._fitted:
            self._fitted.move_to_end(adapter)
        return self._fitted.get(adapter)

    @property
    def fitted(self) -> list[str]:
        """The adapters whose models are in memory, the one that was asked for last at the end."""
        return [name for name, taste in self._fitted.items() if taste is not None]

    def refit(self, adapter: str) -> None:
        """Fit an adapter's model to the signals that the store has now; any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._fit, adapter)

    def difference(self, row: PairRow) -> float:
        """Return the share of a pick's weight that is left: less where the user likes both answers alike, as far as
        is known; any thread may call this."""
        taste = self._fitted.get(row.adapter)
        if row.source != "chosen" or taste is None or not is_learnable(taste):
            return 1.0
        # A pick against what is believed is news, and weighs as much as one that agrees as clearly.
        apart = taste.difference(question_of(row.messages, row.prompt), row.chosen.text, row.rejected.text)
        return max(_LEAST_WEIGHT, min(1.0, _SLOPE * apart))

    def renew(self) -> None:
        """Fit all models anew, since signals were erased; any thread may call this."""

        def renew_all() -> None:
            # What is under way has read signals that are gone: its result is not taken.
            names = {*self._fitted, *self._fits}
            self._fits.clear()
            self._thread.submit(features.cache_clear)
            for adapter in names:
                self._fit(adapter)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(renew_all)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fit(self, adapter: str) -> Future[Taste | None]:
        """Queue a fit; one that waits already will read the signals when its turn comes."""
        waiting = self._fits.get(adapter)
        if waiting is not None and not waiting.running() and not waiting.done():
            return waiting
        fit = self._fits[adapter] = self._thread.submit(self._fit_now, adapter)
        fit.add_done_callback(partial(self._tell, adapter))
        return fit

    def _fit_now(self, adapter: str) -> Taste | None:
        opinions, keys = self._store.read(lambda db: (opinions_of(db, adapter), struck(db, adapter)))
        if not opinions:
            return None
        taste = Taste.fit(opinions, keys)
        # What takes longest is computed here, and not when a request asks.
        taste.likes("", "", apart=True)
        taste.edit("")
        return taste if taste.sure else None

    def _tell(self, adapter: str, fit: Future[Taste | None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._done, adapter, fit)

    def _done(self, adapter: str, fit: Future[Taste | None]) -> None:
        if self._fits.get(adapter) is not fit:
            return
        del self._fits[adapter]
        if fit.cancelled():
            return
        if error := fit.exception():
            log.error("the taste model of %s could not be fitted: %s", adapter, error)
        self._fitted[adapter] = None if error else fit.result()
        self._fitted.move_to_end(adapter)
        while len(self._fitted) > _MOST_KEPT:
            self._fitted.popitem(last=False)
        self.changed(adapter)
