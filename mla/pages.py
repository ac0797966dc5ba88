"""Which request owns which page of a paged cache, on the host: the bookkeeping of `mla.cache.PagedCache`."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


class OutOfPages(RuntimeError):
    """A call needs more pages than are free; the cache is as it was before the call.

    Args:
        needed: pages that the call needs.
        free: pages that are free.
    """

    def __init__(self, needed: int, free: int):
        super().__init__(needed, free)
        self.needed, self.free = needed, free

    def __str__(self) -> str:
        return (
            f"PagedCache: expected a call that needs no more than the {self.free} free pages, got one that needs "
            f"{self.needed}; free requests first, or build a larger cache"
        )


@dataclass
class Request:
    """A request of `length` tokens, which are in `pages`, `page_size` tokens each."""

    pages: array
    length: int


@dataclass(frozen=True)
class Growth:
    """What lengthening requests asks of the pool.

    Args:
        shared, own: pages to copy, and where to, before anything is written.
        slots: of the new tokens, request by request; slot `page * page_size + i` is row i of a page.
    """

    shared: list[int]
    own: list[int]
    slots: list[int]


class PageLedger:
    """The owners of num_pages pages of page_size tokens.

    A request holds `ceil(length / page_size)` pages. Requests share pages after `fork`; a shared page is never
    written: whoever appends to a partly filled one first gets a copy of it.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(self, num_pages: int, page_size: int):
        for name, size in (("num_pages", num_pages), ("page_size", page_size)):
            if size < 1:
                raise ValueError(f"{name}: expected a positive number, got {size}")
        self.page_size = page_size
        self._references = [0] * num_pages
        # pages are taken from the end
        self._free = list(range(num_pages - 1, -1, -1))
        self._requests: dict[int, Request] = {}
        self._num_allocated = 0

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    @property
    def requests(self) -> list[int]:
        """The requests in the cache, in the order in which they came."""
        return list(self._requests)

    def length(self, request: int) -> int:
        """Tokens of a request, those reserved but not yet written included.

        Raises:
            ValueError: the request is not in the cache.
        """
        return self._look_up([request])[0].length

    def allocate(self) -> int:
        """Add a request without tokens, and return its number, which is never given out again."""
        return self._add(array("i"), 0)

    def fork(self, request: int, num_tokens: int | None = None) -> int:
        """Add a request that begins with the first tokens of another one, and return its number.

        Their pages are shared, and nothing is copied yet. Write what was reserved of them first, in all layers.

        Args:
            request: the one to share with.
            num_tokens: how many tokens are shared; default: all.

        Raises:
            ValueError: the request is not in the cache, or has fewer tokens.
        """
        (parent,) = self._look_up([request])
        length = parent.length if num_tokens is None else num_tokens
        if not 0 <= length <= parent.length:
            raise ValueError(
                f"num_tokens: expected 0 to {parent.length}, the length of request {request}, got {num_tokens}"
            )
        pages = parent.pages[: self._pages_for(length)]
        for page in pages:
            self._references[page] += 1
        return self._add(pages, length)

    def _add(self, pages: array, length: int) -> int:
        number = self._num_allocated
        self._num_allocated += 1
        self._requests[number] = Request(pages, length)
        return number

    def _remove(self, requests: Sequence[int]) -> list[int]:
        """Remove requests, and return the pages that are free now and were not before."""
        self._look_up(requests, once=True)
        freed = []
        for number in requests:
            for page in self._requests.pop(number).pages:
                self._references[page] -= 1
                if not self._references[page]:
                    freed.append(page)
        self._free += freed
        return freed

    def _lengthen(self, requests: Sequence[int], counts: Sequence[int]) -> Growth:
        """Lengthen requests by so many tokens each, or change nothing and raise what `PagedCache.reserve` says."""
        if len(counts) != len(requests) or any(count < 0 for count in counts):
            raise ValueError(
                f"num_tokens: expected a number from 0 up for each of {len(requests)} requests, got {list(counts)}"
            )
        grown = list(zip(self._look_up(requests, once=True), counts, strict=True))
        sharing = self._sharing_their_last_page(grown)
        needed = len(sharing) + sum(self._pages_for(r.length + count) - len(r.pages) for r, count in grown)
        if needed > len(self._free):
            raise OutOfPages(needed, len(self._free))

        shared, own = [request.pages[-1] for request in sharing], self._take(len(sharing))
        for request, page in zip(sharing, own, strict=True):
            self._references[request.pages[-1]] -= 1
            request.pages[-1] = page
        slots = []
        for request, count in grown:
            start, request.length = request.length, request.length + count
            request.pages.extend(self._take(self._pages_for(request.length) - len(request.pages)))
            slots += self._slots(request.pages, start, request.length)
        return Growth(shared, own, slots)

    def _sharing_their_last_page(self, grown: list[tuple[Request, int]]) -> list[Request]:
        """The requests that need a copy of their last page before they can be lengthened."""
        sharing, leaving = [], Counter()
        for request, count in grown:
            if count and request.length % self.page_size:
                page = request.pages[-1]
                # of the requests that share a page, the last to leave it keeps it
                if self._references[page] - leaving[page] > 1:
                    leaving[page] += 1
                    sharing.append(request)
        return sharing

    def _look_up(self, requests: Sequence[int], once: bool = False) -> list[Request]:
        for number in requests:
            if number not in self._requests:
                was_here = isinstance(number, int) and 0 <= number < self._num_allocated
                raise ValueError(
                    f"requests: expected requests in the cache, got {number!r}, which "
                    f"{'was freed' if was_here else 'was never allocated'}"
                )
        if once and len(set(requests)) < len(requests):
            twice = next(number for number, count in Counter(requests).items() if count > 1)
            raise ValueError(f"requests: expected each at most once, got {twice} more than once")
        return [self._requests[number] for number in requests]

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def _take(self, num_pages: int) -> list[int]:
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _slots(self, pages: array, start: int, end: int) -> list[int]:
        """The slots of tokens start to end of a request."""
        slots = []
        while start < end:
            index, offset = divmod(start, self.page_size)
            count = min(self.page_size - offset, end - start)
            first = pages[index] * self.page_size + offset
            slots += range(first, first + count)
            start += count
        return slots
