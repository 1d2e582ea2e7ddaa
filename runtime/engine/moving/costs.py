"""What a fetch costs: bytes over the measured speed of its link, against the engine's own measured step costs."""

from __future__ import annotations

BYTES_PER_SECOND = 500e6  # of a link that was not used yet; loopback has twice that, 10 Gbit Ethernet too
FIXED_SECONDS = 0.003  # of a fetch, whatever its size
WEIGHT = 0.3  # of the last measurement
MEASURED_BYTES = 1 << 20  # fetches of less say nothing about speed
MOST_LINKS = 64  # whose speeds are known: addresses change where engines come and go
PAUSE_SECONDS = 5.0  # that nothing is fetched over a link that has failed


class LinkCosts:
    """Of the links to other engines, by their addresses. ``block_bytes``, ``block_tokens``: of a block."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self._bytes, self._tokens = block_bytes, block_tokens
        self._speeds: dict[str, float] = {}  # those that were measured last at the end
        self._paused: dict[str, float] = {}  # until when

    @property
    def block_seconds(self) -> float:
        """To fetch a block, by the mean of the links that were used."""
        speeds = self._speeds.values()
        return self._bytes / (sum(speeds) / len(speeds) if speeds else BYTES_PER_SECOND)

    def seconds(self, address: str, blocks: int) -> float:
        """That a fetch of so many blocks should take."""
        return FIXED_SECONDS + blocks * self._bytes / self._speeds.get(address, BYTES_PER_SECOND)

    def worth(self, address: str, blocks: int, prompt_seconds: float) -> bool:
        """Whether blocks come sooner than they are computed. ``prompt_seconds``: of a token; 0 until it is known.

        >>> costs = LinkCosts(block_bytes=737_280, block_tokens=64)
        >>> costs.worth("tcp:10.0.0.1:7000", 32, 0.0002)  # 50 ms, against 410
        True
        >>> costs.observe("tcp:10.0.0.1:7000", 32, 4.0)
        >>> costs.worth("tcp:10.0.0.1:7000", 32, 0.0002)
        False
        """
        return not prompt_seconds or self.seconds(address, blocks) < blocks * self._tokens * prompt_seconds

    def observe(self, address: str, blocks: int, seconds: float) -> None:
        """So many blocks came in so many seconds."""
        if seconds <= 0 or blocks * self._bytes < MEASURED_BYTES:
            return
        speed = blocks * self._bytes / max(seconds - FIXED_SECONDS, 0.1 * seconds)
        before = self._speeds.pop(address, None)
        self._speeds[address] = speed if before is None else before + WEIGHT * (speed - before)
        if len(self._speeds) > MOST_LINKS:
            del self._speeds[next(iter(self._speeds))]

    def paused_until(self, address: str) -> float:
        """Until when nothing is fetched there."""
        return self._paused.get(address, 0.0)

    def failed(self, address: str, now: float) -> None:
        """A fetch did not end well: nothing is fetched there for a while."""
        self._paused = {other: until for other, until in self._paused.items() if until > now}
        self._paused[address] = now + PAUSE_SECONDS
