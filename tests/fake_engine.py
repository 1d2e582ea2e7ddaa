"""Engines for tests that need the protocol but no compiled bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engines.kernels.sampling import SamplingRow
from engines.protocol import Draw, EngineCapabilities, Entry, Filters, FloatArray, Ranked, Result, WholeSteps
from engines.sequences import Sequences
from engines.slot_engine import SlotEngine
from engines.step_inputs import NO_SLOTS, Int64Array, check, result_of
from runtime.engine.draw import draw
from tapeout.fingerprint import Fingerprint

MACHINE = Fingerprint(machine="x86_64", features=("avx2",), libraries={"onnxruntime": "1.0"})


class HistoryEngine(WholeSteps):
    """Seeded logits that depend on every token of a sequence, in order, so any bookkeeping mistake shows.

    ``noise`` perturbs the logits with a second seed: two engines of one seed and different noise are a baseline and
    a slightly worse candidate. ``block_tokens``: of a block; by default one block holds a whole sequence. Reading a
    position that was never written fails at once.
    """

    STATES = 997

    def __init__(
        self,
        vocab_size: int = 32,
        *,
        slots: int = 3,
        max_tokens: int = 64,
        seed: int = 0,
        noise: float = 0.0,
        block_tokens: int = 0,
    ) -> None:
        size = block_tokens or max_tokens
        blocks = slots * -(-max_tokens // size)
        self.capabilities = EngineCapabilities(
            block_tokens=size,
            blocks=blocks,
            block_bytes=size,
            max_batch=slots,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            shares_blocks=bool(block_tokens),
            chooses_tokens=False,
        )
        self.digest = f"{seed:032x}{int(noise * 1e6):032x}"
        table = np.random.default_rng(seed).normal(size=(self.STATES, vocab_size))
        table += noise * np.random.default_rng(seed + 1).normal(size=table.shape)
        self.table = (2 * table).astype(np.float32)
        self.held: list[list[int | None]] = [[None] * size for _ in range(blocks)]
        self.steps: list[list[int]] = []  # tokens of each entry
        self.prepared: list[int] = []  # blocks that each call of prepare expects
        self.work_ahead = 0  # calls of prepare until there is nothing more to do

    def logits_after(self, tokens: Sequence[int]) -> FloatArray:
        state = 1
        for token in tokens:
            state = (state * 31 + token + 1) % self.STATES
        return self.table[state]

    def step(self, batch: Sequence[Entry]) -> list[Result]:
        errors = check(batch, self.capabilities)
        self.steps.append([len(entry.tokens) for entry in batch])
        return [Result(error=error) if error else self._feed(entry) for entry, error in zip(batch, errors, strict=True)]

    def _feed(self, entry: Entry) -> Result:
        size, end = self.capabilities.block_tokens, entry.start + len(entry.tokens)
        for position, token in enumerate(entry.tokens, start=entry.start):
            self.held[entry.blocks[position // size]][position % size] = int(token)
        whole = [self.held[entry.blocks[position // size]][position % size] for position in range(end)]
        history = [token for token in whole if token is not None]
        assert len(history) == end, "continues positions that were never written"
        wanted = [len(entry.tokens) - 1] if entry.positions is None else entry.positions
        if not len(wanted):
            return Result()
        return chosen(entry, np.stack([self.logits_after(history[: entry.start + at + 1]) for at in wanted]))

    def prepare(self, ahead: int) -> bool:
        self.prepared.append(ahead)
        return len(self.prepared) < self.work_ahead

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        assert None not in self.held[source][:tokens], "copies positions that were never written"
        self.held[target][:tokens] = self.held[source][:tokens]

    def read_block(self, block: int, content: memoryview) -> None:
        held = [token for token in self.held[block] if token is not None]
        assert len(held) == len(content), "reads positions that were never written"
        content[:] = bytes(held)

    def write_block(self, block: int, content: memoryview) -> None:
        self.held[block][:] = list(content)

    def copy_state(self, source: int, target: int) -> None:
        NO_SLOTS.copy(source, target)

    def close(self) -> None: ...


def chosen(entry: Entry, logits: FloatArray) -> Result:
    """What an entry wants of logits ``[P, V]``, of an engine that draws, too."""
    if entry.draw is None and entry.ranked is None:
        return result_of(entry, logits)
    filters, random = entry.draw or Draw(Filters(0.0, 0, 1.0, 0), [0] * len(logits))
    tokens, ranked = list[int](), list[Ranked]()
    for row, bits in zip(logits, random, strict=True):
        drawn = draw(SamplingRow(row, filters, bits, top=entry.ranked))
        assert isinstance(drawn.token, int)
        tokens.append(drawn.token)
        likeliest = [(token, float(row[token])) for token in drawn.likeliest]
        ranked.append(Ranked(drawn.normalizer, float(row[drawn.token]), likeliest))
    return Result(np.array(tokens), ranked=None if entry.ranked is None else ranked)


class History(Sequences):
    """Sequences over a :class:`HistoryEngine`."""

    engine: HistoryEngine

    def __init__(self, vocab_size: int = 32, **options: Any) -> None:
        super().__init__(HistoryEngine(vocab_size, **options))


class TorchEngine(SlotEngine):
    """A transformers causal language model with one KV cache per slot."""

    def __init__(self, model: Any, *, slots: int = 4, max_tokens: int = 256, digest: str = "torch") -> None:
        from transformers import DynamicCache

        self.model, self.digest, self.prompt_tokens = model.eval(), digest, max_tokens
        self.capabilities = EngineCapabilities(
            block_tokens=max_tokens,
            blocks=slots,
            block_bytes=0,
            max_batch=slots,
            max_tokens=max_tokens,
            vocab_size=int(model.config.vocab_size),
            shares_blocks=False,
            chooses_tokens=False,
        )
        self.caches: list[Any] = [DynamicCache(config=model.config) for _ in range(slots)]

    def prefill(self, slot: int, tokens: Sequence[int], start: int, positions: Sequence[int]) -> FloatArray:
        import torch

        cache = self.caches[slot]
        assert start <= cache.get_seq_length()
        _crop(cache, start)
        with torch.inference_mode():
            output = self.model(
                input_ids=torch.tensor([list(tokens)]),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=torch.tensor(list(positions), dtype=torch.int64),
            )
        return output.logits[0].float().numpy()

    def decode(self, first_slot: int, tokens: Int64Array, starts: Int64Array) -> FloatArray:
        return np.concatenate(
            [
                self.prefill(slot, [token], start, [0])
                for slot, (token, start) in enumerate(zip(tokens.tolist(), starts.tolist(), strict=True), first_slot)
            ]
        )

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        import copy

        self.caches[target] = copy.deepcopy(self.caches[source])
        _crop(self.caches[target], tokens)

    def close(self) -> None: ...


def _crop(cache: Any, length: int) -> None:
    if cache.get_seq_length() > length:
        cache.crop(length - cache.get_seq_length())  # transformers takes the number of tokens to remove, negative
