"""Engines for tests that need the protocol but no compiled bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.protocol import FloatArray, TokenArray
from tapeout.fingerprint import Fingerprint

MACHINE = Fingerprint(machine="x86_64", features=("avx2",), libraries={"onnxruntime": "1.0"})


class HistoryEngine:
    """Seeded logits that depend on every token a slot holds, in order, so any bookkeeping mistake shows.

    ``noise`` perturbs the logits with a second seed: two engines of one seed and different noise are a baseline and
    a slightly worse candidate. Reading a position that was never written fails at once.
    """

    STATES = 997

    def __init__(
        self, vocab_size: int = 32, *, slots: int = 3, max_tokens: int = 64, seed: int = 0, noise: float = 0.0
    ) -> None:
        self.vocab_size, self.slots, self.max_tokens = vocab_size, slots, max_tokens
        self.digest = f"{seed:032x}{int(noise * 1e6):032x}"
        table = np.random.default_rng(seed).normal(size=(self.STATES, vocab_size))
        table += noise * np.random.default_rng(seed + 1).normal(size=table.shape)
        self.table = (2 * table).astype(np.float32)
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.calls: list[tuple[str, int]] = []  # kind, tokens fed

    def logits_after(self, tokens: Sequence[int]) -> FloatArray:
        state = 1
        for token in tokens:
            state = (state * 31 + token + 1) % self.STATES
        return self.table[state]

    def prefill(
        self, slot: int, tokens: Sequence[int], *, start: int = 0, positions: Sequence[int] | None = None
    ) -> FloatArray:
        assert len(tokens) > 0 and 0 <= start <= len(self.held[slot]), "continues positions that were never written"
        assert start + len(tokens) <= self.max_tokens
        self.calls.append(("prefill", len(tokens)))
        held = self.held[slot] = self.held[slot][:start] + [int(token) for token in tokens]
        wanted = [len(tokens) - 1] if positions is None else list(positions)
        return np.stack([self.logits_after(held[: start + position + 1]) for position in wanted])

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> FloatArray:
        assert len(tokens) == len(lengths) > 0
        self.calls.append(("decode", len(tokens)))
        result: list[FloatArray] = []
        for slot, (token, length) in enumerate(zip(tokens, lengths, strict=True), start=first_slot):
            assert length <= len(self.held[slot]), "continues positions that were never written"
            assert length < self.max_tokens
            self.held[slot] = [*self.held[slot][:length], int(token)]
            result.append(self.logits_after(self.held[slot]))
        return np.stack(result)

    def decode_greedy(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> TokenArray:
        return self.decode(tokens, lengths, first_slot=first_slot).argmax(axis=1)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        assert length <= len(self.held[source]), "copies positions that were never written"
        self.held[target] = self.held[source][:length]

    def close(self) -> None: ...


class TorchEngine:
    """A transformers causal language model with one KV cache per slot."""

    def __init__(self, model: Any, *, slots: int = 4, max_tokens: int = 256, digest: str = "torch") -> None:
        from transformers import DynamicCache

        self.model, self.slots, self.max_tokens, self.digest = model.eval(), slots, max_tokens, digest
        self.vocab_size = int(model.config.vocab_size)
        self.caches: list[Any] = [DynamicCache(config=model.config) for _ in range(slots)]

    def prefill(
        self, slot: int, tokens: Sequence[int], *, start: int = 0, positions: Sequence[int] | None = None
    ) -> FloatArray:
        import torch

        cache = self.caches[slot]
        assert start <= cache.get_seq_length() and start + len(tokens) <= self.max_tokens
        _crop(cache, start)
        wanted = [len(tokens) - 1] if positions is None else list(positions)
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([list(tokens)]),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=torch.tensor(wanted),
            )
        return output.logits[0].float().numpy()

    def decode(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> FloatArray:
        return np.concatenate(
            [
                self.prefill(slot, [token], start=length)
                for slot, (token, length) in enumerate(zip(tokens, lengths, strict=True), start=first_slot)
            ]
        )

    def decode_greedy(self, tokens: Sequence[int], lengths: Sequence[int], *, first_slot: int = 0) -> TokenArray:
        return self.decode(tokens, lengths, first_slot=first_slot).argmax(axis=1)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        import copy

        self.caches[target] = copy.deepcopy(self.caches[source])
        _crop(self.caches[target], length)

    def close(self) -> None: ...


def _crop(cache: Any, length: int) -> None:
    if cache.get_seq_length() > length:
        cache.crop(length - cache.get_seq_length())  # transformers takes the number of tokens to remove, negative
