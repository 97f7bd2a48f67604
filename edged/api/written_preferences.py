"""The written preferences that prompts have, in memory: no request waits for the store."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from sqlite_utils import Database

from edged.align.feedback.pair import IMPORT_REASONS, Record, VersionPublished
from edged.store import Store
from edged.store.feedback import LEARNED, WrittenPreference, all_preferences, get_preference, undo_distilled
from edged.text.preference import NO_SYSTEM_TURN, why_unusable
from edged.text.tokenizer import Tokenizer


class WrittenPreferences:
    """Users' words on the answers that they want, as far as their prompts have them."""

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        self._store, self._tokenizer = store, tokenizer
        self._texts: dict[str, str] = {}
        self.without_effect: set[str] = set()
        """The users whose preference hardly changes answers, as far as is known since the start."""

    def load(self) -> None:
        """Read the preferences of all users, before the first request."""
        for row in self._store.read(all_preferences):
            self._take(row.adapter, row)

    @property
    def pending(self) -> list[str]:
        """The users whose prompts have a preference, which is to be learned."""
        return list(self._texts)

    def in_prompt(self, adapter: str | None) -> str:
        """Return what prompts of an adapter's chats have in their system turn; "" for nothing."""
        return self._texts.get(adapter or "", "")

    def why_left_out(self, preference: WrittenPreference) -> str:
        """Return why prompts do not have a preference; "" where they do."""
        if preference.distilled >= LEARNED:
            return "learned: answers follow it without it in the prompt"
        if not self._tokenizer.has_system_turn:
            return NO_SYSTEM_TURN
        # It may have been written for another model.
        return why_unusable(self._tokenizer, preference.text)

    def note(self, preference: WrittenPreference) -> str:
        """Return what is made of a preference, in words."""
        known = "in the system prompt of every chat"
        if preference.adapter in self.without_effect:
            known += "; this model hardly answers otherwise with it: write it in whole sentences"
        return self.why_left_out(preference) or known

    def change(self, adapter: str, write: Callable[[Database], object]) -> Future[WrittenPreference | None]:
        """Have `write` change the stored preference of an adapter; it resolves to what is stored then, once prompts
        have it. Any thread may call this.

        The writer thread takes changes in, in the order of their commits.
        """
        changed: Future[WrittenPreference | None] = Future()
        # A caller who leaves takes nothing back.
        changed.set_running_or_notify_cancel()

        def settle(written: Future[WrittenPreference | None]) -> None:
            try:
                changed.set_result(self._take(adapter, written.result()))
            except Exception as error:
                changed.set_exception(error)

        self._store.write(lambda db: (write(db), get_preference(db, adapter))[1]).add_done_callback(settle)
        return changed

    def on_records(self, records: Sequence[Record]) -> None:
        """Put a preference back into prompts where an adapter's weights are others than those that learned it."""
        for record in records:
            if isinstance(record, VersionPublished) and (
                record.restored is not None or record.is_start or record.reason in IMPORT_REASONS
            ):
                self.change(record.adapter, partial(undo_distilled, adapter=record.adapter))

    def _take(self, adapter: str, found: WrittenPreference | None) -> WrittenPreference | None:
        if found is None or found.text != self._texts.get(adapter):
            self.without_effect.discard(adapter)
        if found is None or self.why_left_out(found):
            self._texts.pop(adapter, None)
        else:
            self._texts[adapter] = found.text
        return found
