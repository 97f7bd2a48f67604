"""The page pool: which pages of K/V storage are free, and how many holders the others have."""

from collections.abc import Iterable, Mapping, Sequence


class OutOfPages(RuntimeError):
    """The error for wanting more pages than are free; nothing was allocated."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"wanted {wanted} pages, {free} are free: evict cached pages or preempt a sequence first")
        self.wanted = wanted
        self.free = free


class PagePool:
    """A pool of `pages` pages of `page_size` tokens each, numbered from 0; operations are O(1) per page.

    A page has one reference for each sequence that holds it, and one more while the prefix trie keeps it
    (`adopt`, `abandon`). The pool counts the pages that only the trie keeps: those can be evicted at once.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {pages} pages of {page_size} tokens holds nothing: both must be at least 1")
        self.pages = pages
        self.page_size = page_size
        self.capacity = pages
        """Pages from this number on are retired: they are not allocated."""
        self.touched = 0
        """No page from this number on was allocated since it was last retired."""
        self.evictable_pages = 0
        """Number of pages that only the prefix trie holds."""
        self._references = [0] * pages
        self._adopted = bytearray(pages)
        self._free = list(range(pages - 1, -1, -1))  # a stack: the page freed last is the warmest

    @property
    def free_pages(self) -> int:
        """Number of pages without a holder."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Return the number of holders of `page`, the trie included; 0 when it is free."""
        return self._references[page]

    def is_adopted(self, page: int) -> bool:
        """Whether the prefix trie keeps `page`."""
        return bool(self._adopted[page])

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages with one reference each. Raises OutOfPages, and then allocates none."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
            if page >= self.touched:
                self.touched = page + 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`; ValueError for a page that is free."""
        for page in pages:
            references = self._references[page]
            if references == 0:
                raise ValueError(f"page {page} is free: only an allocated page can be retained")
            if references == 1 and self._adopted[page]:
                self.evictable_pages -= 1
            self._references[page] = references + 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference to each of `pages`; ValueError for a page that the caller cannot hold."""
        for page in pages:
            references = self._references[page] - 1
            if references < self._adopted[page]:
                raise ValueError(f"page {page} was released more often than it was retained")
            self._references[page] = references
            if references == 0:
                self._free.append(page)
            elif references == 1 and self._adopted[page]:
                self.evictable_pages += 1

    def adopt(self, page: int) -> None:
        """Give the prefix trie a reference to `page`; the caller still holds it, so it is not evictable yet."""
        if self._adopted[page]:
            raise ValueError(f"page {page} is in the prefix trie already")
        self.retain((page,))
        self._adopted[page] = 1

    def abandon(self, page: int) -> bool:
        """Drop the prefix trie's reference to `page`. True when that freed it, False when a sequence still holds it."""
        if not self._adopted[page]:
            raise ValueError(f"page {page} is not in the prefix trie")
        if self._references[page] == 1:
            self.evictable_pages -= 1
        self._adopted[page] = 0
        self.release((page,))
        return self._references[page] == 0

    def held_from(self, first: int) -> list[int]:
        """Return the held pages from `first` on, in order; linear in the number of pages."""
        return [page for page in range(first, self.capacity) if self._references[page]]

    def places(self, pages: Sequence[int], below: int) -> dict[int, int]:
        """Return a free page below `below` for each of the held `pages`, to copy it there before `move`.

        Raises OutOfPages.
        """
        free = sorted(page for page in self._free if page < below)
        if len(pages) > len(free):
            raise OutOfPages(len(pages), len(free))
        return dict(zip(pages, free, strict=False))

    def move(self, moved: Mapping[int, int]) -> None:
        """Move the references of held pages to free ones, as `places` returns them.

        The holders must update their page numbers.
        """
        for old, new in moved.items():
            self._references[new], self._references[old] = self._references[old], 0
            self._adopted[new], self._adopted[old] = self._adopted[old], 0
        taken = set(moved.values())
        self._free = [*(page for page in self._free if page not in taken), *moved]

    def resize(self, capacity: int) -> None:
        """Retire the pages from `capacity` on, or bring those below it back; ValueError for one that is held."""
        if not 1 <= capacity <= self.pages:
            raise ValueError(f"a capacity of {capacity} pages is not between 1 and {self.pages}")
        if held := self.held_from(capacity):
            raise ValueError(f"page {held[0]} is held: only free pages can be retired")
        self._free = [page for page in self._free if page < capacity]
        # New pages are allocated last, since the system may not have given their memory yet.
        self._free[:0] = range(capacity - 1, self.capacity - 1, -1)
        self.capacity, self.touched = capacity, min(self.touched, capacity)
