"""KV-cache pages of sequences: allocated, found in the prefix trie, shared, freed."""

from dataclasses import asdict
from typing import Any

from edged.cache.page_pool import PagePool
from edged.cache.prefix_trie import PrefixTrie
from edged.engine.kv.offload import KvOffload
from edged.engine.kv.state import ZEROS, SlotPair, StateStore
from edged.engine.sequence import Sequence


class KvPages:
    """The page pool, the trie of shared prefixes and their offload store.

    The engine thread alone changes them; others call `report` and read `available`.
    """

    def __init__(
        self,
        pool: PagePool,
        shares_prefixes: bool,
        offload: KvOffload | None = None,
        states: StateStore | None = None,
        copies: int = 0,
        copied_every: int = 0,
    ) -> None:
        """The trie stays empty unless `shares_prefixes`; without an `offload` evicted prefixes are lost.

        `states` are those that layers keep beside K/V, if any: a sequence that has pages has a slot, too. At most
        `copies` of them are kept in the trie, of an answer one after each `copied_every` tokens, and the latest alone.
        """
        self.states, self._copies, self._copied_every = states, copies, copied_every
        self.pool, self.shares_prefixes, self.offload = pool, shares_prefixes, offload
        self.trie = PrefixTrie(pool, offload, states.release if states is not None else None)
        self.page_size = pool.page_size

    @property
    def waits_for_prefixes(self) -> bool:
        """Whether a prompt may wait for another that begins like it: with states it could not go on from where they
        part."""
        return self.shares_prefixes and self.states is None

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can give."""
        return self.pool.free_pages + self.pool.evictable_pages

    def allocate(self, pages: int) -> list[int]:
        """Allocate pages, evicting shared prefixes that no sequence uses. Raises OutOfPages."""
        if pages > self.pool.free_pages:
            self.trie.evict(pages - self.pool.free_pages)
        return self.pool.allocate(pages)

    def grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Give a sequence pages for up to `num_tokens` more; returns how many of them it has now. Raises OutOfPages."""
        num_tokens = min(num_tokens, len(sequence.token_ids) - sequence.computed)
        needed = -(-(sequence.rows + num_tokens) // self.page_size) - len(sequence.pages)
        if self.states is not None and not sequence.state:
            sequence.state = self.states.acquire()
        if needed > 0:
            sequence.add_pages(self.allocate(needed))
        return num_tokens

    def reach(self, sequence: Sequence, num_tokens: int) -> int:
        """Give a sequence free pages for up to `num_tokens` beyond its own; returns for how many it has them now."""
        room = len(sequence.pages) * self.page_size - sequence.rows - 1
        needed = -(-(num_tokens - room) // self.page_size)
        # Pages that are few are for prompts.
        if 0 < needed <= self.pool.free_pages - self.pool.capacity // 4:
            sequence.add_pages(self.pool.allocate(needed))
            room += needed * self.page_size
        return max(0, min(num_tokens, room))

    def match_prefix(self, sequence: Sequence, reserve: int, first: bool) -> None:
        """Give an admitted sequence the pages of the longest shared prefix, if there is one.

        Offloaded pages are copied into free ones, of which `reserve` are left to the others of this iteration. When a
        sequence is not admitted for the `first` time, the prefix found is its own and counts as no hit.
        """
        if not self.shares_prefixes or sequence.request.sampling.prompt_logprobs:
            return
        if self.states is None:
            pages = self.trie.match(sequence.trie_key, sequence.token_ids, reserve, counted=first)
        else:
            pages, state, met = self.trie.match_state(sequence.trie_key, sequence.token_ids, reserve, counted=first)
            # Where another prompt left this one, and at the last border: the next prompt leaves there, or this is it.
            last = (len(sequence.token_ids) - 1) // self.page_size * self.page_size
            sequence.borders = (met, last) if met < last else (last,)
            if pages:
                sequence.state = self.states.acquire()
                self.states.copy(state, sequence.state)
        if pages:
            sequence.add_pages(pages)
            sequence.computed = sequence.copied = len(pages) * self.page_size
            if first:
                sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
                self.trie.stats.earlier_tokens += sequence.computed * (sequence.kv_version != sequence.version)

    def share(self, sequence: Sequence) -> None:
        """Let later sequences of the adapter use the full pages that this one computed, in the place of earlier
        versions'."""
        if self.shares_prefixes and sequence.shareable and sequence.computed:
            full = sequence.computed // self.page_size
            token_ids = sequence.token_ids[: full * self.page_size]
            self.trie.insert(sequence.trie_key, token_ids, sequence.pages[:full])
            if sequence.version == sequence.kv_version > 0:
                self.trie.supersede(sequence.trie_key, token_ids)

    def up_to_border(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` are computed before the states are to be copied."""
        return min([num_tokens, *(at - sequence.computed for at in sequence.borders if at > sequence.computed)])

    def copy_states(self, sequence: Sequence) -> None:
        """Keep a copy of a sequence's states for later prompts that begin with the same tokens, if one is due here."""
        at = sequence.computed
        if self.states is None or not self.shares_prefixes or at % self.page_size or not sequence.shareable:
            return
        wanted = at in sequence.borders
        if not wanted and not (sequence.decoding and at >= sequence.copied + self._copied_every):
            return
        key, token_ids, slot = sequence.trie_key, sequence.token_ids[:at], 0
        self.share(sequence)
        sequence.copied = at
        if not self._copies or not self.trie.has_room_for_state(key, token_ids):
            return
        if not wanted and sequence.interim:
            slot = self.trie.take_state(key, token_ids[: sequence.interim])
        if not slot:
            if self.trie.states == self._copies:
                self.trie.drop_oldest_state()
            slot = self.states.acquire()
        self.states.copy(sequence.state, slot)
        self.trie.keep_state(key, token_ids, slot)
        sequence.interim = sequence.interim if wanted else at

    def begin_step(self) -> SlotPair:
        """Take the slots of a fine-tune step, for the states of the pair whose forward is under way."""
        return (ZEROS, ZEROS) if self.states is None else (self.states.acquire(), self.states.acquire())

    def end_step(self, slots: SlotPair) -> None:
        """Give the slots of `begin_step` back."""
        if self.states is not None:
            self.states.release(slots)

    def free(self, sequence: Sequence) -> None:
        """Free a sequence's pages and reset it to nothing computed."""
        self.pool.release(sequence.pages)
        sequence.pages, sequence.computed = [], 0
        if self.states is not None and sequence.state:
            self.states.release([sequence.state])
            sequence.state = ZEROS
        sequence.copied = sequence.interim = 0
        sequence.compacted = sequence.watch = sequence.draft = None

    def report(self, page_bytes: int) -> dict[str, Any]:
        """Return the status' parts on pages, of `page_bytes` each, and on shared prefixes.

        `hit_tokens` were not computed again; `restored_tokens` of them were offloaded, and `earlier_tokens` of an
        earlier version.
        """
        pool, trie, stats, offload = self.pool, self.trie, self.trie.stats, self.offload
        return {
            "pages": {
                "total": pool.pages - 1,
                "free": pool.free_pages,
                "cached": pool.evictable_pages,
                "retired": pool.pages - pool.capacity,
                "page_size": pool.page_size,
                "bytes_per_page": page_bytes,
            },
            "prefix": {
                **asdict(stats),
                "hit_share": stats.hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
                "spill": {
                    "kind": offload.kind if offload is not None else "off",
                    "pages": trie.offloaded_pages,
                    "capacity": offload.capacity if offload is not None else 0,
                },
            },
        }
