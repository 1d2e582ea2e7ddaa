"""How many prompts have gone on from the same place: is a prefix one conversation's, or do many begin with it?

The last block of a prompt that any engine has says so. A conversation that goes on has another one at each turn, a
system prompt the same one for each conversation that begins with it. Pure bookkeeping, of bounded size.
"""

from __future__ import annotations

from collections import OrderedDict

from runtime.wire.messages import KEY_BYTES

MOST_PREFIXES = 16_384


class PrefixUses:
    """``most``: prefixes that are remembered, those that were used last."""

    def __init__(self, most: int = MOST_PREFIXES) -> None:
        self._uses: OrderedDict[bytes, int] = OrderedDict()  # by the short key of the last block
        self._most = most

    def __len__(self) -> int:
        return len(self._uses)

    def of(self, key: bytes) -> int:
        """Prompts so far whose last known block has this key.

        >>> uses = PrefixUses(most=2)
        >>> for key in (b"a", b"b", b"a", b"c"):
        ...     uses.add(key)
        >>> [uses.of(key) for key in (b"a", b"b", b"c")]
        [2, 0, 1]
        """
        return self._uses.get(key[:KEY_BYTES], 0)

    def add(self, key: bytes) -> None:
        """One more."""
        short = key[:KEY_BYTES]
        self._uses[short] = self._uses.pop(short, 0) + 1
        if len(self._uses) > self._most:
            self._uses.popitem(last=False)
