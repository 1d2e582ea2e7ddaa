"""What the native engine of ort-cpu binds for each kind of state: buffers, slots, and copies of them.

The session is a stand-in that reads and writes what is bound; tests/integration/test_recurrent_models.py has real ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines.bundle import BLOCK_TABLE, BLOCK_TOKENS, GREEDY, NEXT_TOKENS, OFFSETS, SLOTS, STARTS, IOContract
from engines.protocol import Entry
from engines.targets.ort_cpu import paged_engine
from engines.targets.ort_cpu.paged_engine import PagedEngine
from tapeout.errors import RequestError
from tapeout.state import Paged, Recurrent, StateTensor
from tests.judged import write_bundle

V, MODULUS, BEGIN = 101, 9973, 1  # states are exact in float32
KEYS = Paged(layer=0, tensors=(StateTensor(name="key", shape=(1, 1), dtype="float32"),))
STATE = Recurrent(layer=1, tensors=(StateTensor(name="state", shape=(2,), dtype="float32"),), snapshot_tokens=128)
KINDS = {"paged": (KEYS,), "recurrent": (STATE,), "mixed": (KEYS, STATE)}


def chain(state: float, token: int) -> int:
    return (int(state) * 31 + token + 1) % MODULUS


class Session:
    """Both kinds of state are the chain of all tokens before; logits are one-hot at their mean."""

    def io_binding(self) -> Any:
        bound: dict[str, Any] = {}

        def bind(name: str, device: str, number: int, dtype: Any, shape: Sequence[int], address: int) -> None:
            count = prod(shape)
            memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
            bound[name] = np.frombuffer(memory, dtype, count).reshape(shape)

        return SimpleNamespace(bind_input=bind, bind_output=bind, arrays=bound)

    def run_with_iobinding(self, binding: Any) -> None:
        arrays = binding.arrays
        keys, state = arrays.get("past_key_values.0.key"), arrays.get("past_key_values.1.state")
        assert (SLOTS in arrays) == (state is not None) and (BLOCK_TABLE in arrays) == (keys is not None)
        found: list[float] = []
        for number, start in enumerate(arrays[STARTS]):
            first, end = arrays[OFFSETS][number : number + 2]
            for position, token in enumerate(arrays["input_ids"][0, first:end], start):
                states = list[int]()
                if keys is not None:
                    places = [(arrays[BLOCK_TABLE][number, p // 64], 0, p % 64, 0) for p in (position - 1, position)]
                    states.append(chain(keys[places[0]] if position else BEGIN, token))
                    keys[places[1]] = states[-1]
                if state is not None:
                    slot = arrays[SLOTS][number]
                    states.append(chain(state[slot, 1] if position else BEGIN, token))
                    state[slot] = states[-1]
                found.append(sum(states) / len(states))
        if arrays.get(GREEDY):
            arrays[NEXT_TOKENS][:] = np.array(found)[arrays["logit_positions"]] % V
            return
        arrays["logits"][:] = np.arange(V) == np.array(found)[arrays["logit_positions"]][:, None] % V


def engine_of(
    kind: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshots: int | None = None,
    *,
    chooses: bool = False,
) -> PagedEngine:
    """Of three sequences. Runs are of 7 tokens. ``chooses``: tokens are found in the graph."""
    bundle = write_bundle(folder / "bundle", "weights")
    inputs = [OFFSETS, STARTS, *([BLOCK_TABLE] if kind != "recurrent" else []), *([SLOTS] if kind != "paged" else [])]
    inputs += [GREEDY] if chooses else []
    io = bundle.record.io.model_copy(
        update={"inputs": tuple(inputs), "state": KINDS[kind], "max_tokens": 256, "vocab_size": V}
    )
    bundle = SimpleNamespace(record=bundle.record.model_copy(update={"io": io}), folder=bundle.folder, digest="d")
    monkeypatch.setattr(paged_engine, "open_session", lambda *_: Session())
    monkeypatch.setattr(paged_engine, "library_of", lambda _: None)
    monkeypatch.setattr(paged_engine, "RUN_TOKENS", 7)
    return PagedEngine(bundle, threads=1, sequences=3, snapshots=snapshots)  # pyright: ignore[reportArgumentType]


def alone(tokens: Sequence[int]) -> list[int]:
    """The token after each."""
    state, chosen = BEGIN, list[int]()
    for token in tokens:
        state = chain(state, token)
        chosen.append(state % V)
    return chosen


def fed(kind: str, tokens: Sequence[int], start: int, place: int, **more: Any) -> Entry:
    blocks = range(4 * place, 4 * place + 4) if kind != "recurrent" else ()
    slot = {} if kind == "paged" else {"slot": place}
    return Entry(tokens, start, blocks, positions=range(len(tokens)), **slot, **more)


def chosen(engine: PagedEngine, *batch: Entry) -> list[list[int]]:
    results = engine.step(batch)
    assert not [result.error for result in results if result.error]
    return [[] if result.tokens is None else result.tokens.tolist() for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_in_one_step_have_state_of_their_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(kind, tmp_path, monkeypatch)
    one, other = list(range(70)), [5, 6, 7]
    assert chosen(engine, fed(kind, one[:69], 0, 2), fed(kind, other[:1], 0, 0)) == [alone(one)[:69], alone(other)[:1]]
    assert chosen(engine, fed(kind, one[69:], 69, 2), fed(kind, other[1:], 1, 0)) == [alone(one)[69:], alone(other)[1:]]
    assert chosen(engine, fed(kind, other, 0, 2)) == [alone(other)], "a sequence begins from zeros"
    engine.close()
    engine.close()


@pytest.mark.parametrize("first", [1, 3])
def test_an_entry_of_two_runs_has_the_tokens_of_both(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which one chooses tokens in the graph, and the other gives logits, which another entry wants."""
    engine = engine_of("paged", tmp_path, monkeypatch, chooses=True)
    split, ahead, beside = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9]
    batch = [fed("paged", ahead, 0, 0), fed("paged", split, 0, 1), fed("paged", beside, 0, 2)]
    batch[0 if first == 1 else 2] = batch[0 if first == 1 else 2]._replace(wanted="logits")
    results = engine.step(batch)
    assert not any(result.error for result in results)
    assert results[1].tokens is not None and results[1].tokens.tolist() == alone(split)


@pytest.mark.parametrize("kind", ["recurrent", "mixed"])
def test_snapshots_are_the_state_at_their_positions(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = engine_of(kind, tmp_path, monkeypatch), list(range(1, 21))
    first = fed(kind, tokens, 0, 0, snapshots=[(4, 3), (14, 4), (20, 5)])
    assert chosen(engine, first, fed(kind, [9, 9], 0, 1)) == [alone(tokens), alone([9, 9])]
    for start, snapshot in ((4, 3), (14, 4)):
        engine.copy_state(snapshot, 2)
        rest = fed(kind, tokens[start:], start, 0)  # in the blocks that it has
        assert chosen(engine, rest._replace(slot=2)) == [alone(tokens)[start:]]
    (result,) = engine.step([fed(kind, [3], 19, 0)._replace(slot=5)])
    assert "holds the state of 20 positions" in str(result.error)


@pytest.mark.parametrize("kind", KINDS)
def test_capabilities_are_those_of_the_state(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(kind, tmp_path, monkeypatch)
    has = engine.capabilities
    paged, recurrent = kind != "recurrent", kind != "paged"
    assert (has.blocks, has.block_bytes) == (12 * paged, 4 * BLOCK_TOKENS * paged)
    assert (has.slots, has.slot_bytes, has.snapshot_tokens) == (6 * recurrent, 8 * recurrent, 128 * recurrent)
    assert not engine.prepare(1) or paged


@pytest.mark.parametrize(("snapshots", "slots"), [(None, 6), (0, 3), (5, 8)])
def test_snapshots_have_a_number_of_their_own(
    snapshots: int | None, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("mixed", tmp_path, monkeypatch, snapshots)
    assert engine.capabilities.slots == slots
    io = IOContract(inputs=(), state=KINDS["mixed"], max_tokens=256, slots=3, vocab_size=V)
    held = 3 * 256 * io.token_bytes + slots * io.slot_bytes
    assert [io.sequences_in(memory, snapshots) for memory in (held, held - 1, 0)] == [3, 2, 0]


@pytest.mark.parametrize("kind", [kind for kind, state in KINDS.items() if any(type(s) is Recurrent for s in state)])
def test_snapshots_are_a_share_of_all_memory_of_state(kind: str) -> None:
    io = IOContract(inputs=(), state=KINDS[kind], max_tokens=256, slots=3, vocab_size=V)
    each = 256 * io.token_bytes + io.slot_bytes
    for share in (0.0, 0.1, 0.5, 0.9):
        snapshots = io.snapshots_in(share, 3)
        assert snapshots * io.slot_bytes <= share * (3 * each + snapshots * io.slot_bytes) + 1e-6
        assert (snapshots + 1) * io.slot_bytes > share * (3 * each + (snapshots + 1) * io.slot_bytes)
        memory = 10 * each
        bounded = io.snapshots_in(share, 3, memory)
        assert 0 <= share * memory - bounded * io.slot_bytes < io.slot_bytes
        assert io.sequences_in(memory, bounded) * each + bounded * io.slot_bytes <= memory
    assert IOContract(inputs=(), state=(), max_tokens=256, slots=3, vocab_size=V).snapshots_in(0.5, 3) == 0


def test_a_step_that_failed_leaves_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the session fails after it has written some state. What it left is never continued."""
    engine = engine_of("mixed", tmp_path, monkeypatch)
    chosen(engine, fed("mixed", [1, 2], 0, 0))

    def fail(self: Session, binding: Any) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "run_with_iobinding", fail)
        with pytest.raises(RuntimeError, match="planted"):
            engine.step([fed("mixed", [3], 2, 0)])
    (result,) = engine.step([fed("mixed", [3], 2, 0)])
    assert "holds an unknown state" in str(result.error)
    assert chosen(engine, fed("mixed", [1, 2], 0, 0)) == [alone([1, 2])]


def test_a_dense_engine_has_no_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("paged", tmp_path, monkeypatch)
    (result,) = engine.step([fed("paged", [1], 0, 0)._replace(slot=0)])
    assert "no recurrent state" in str(result.error)
    with pytest.raises(RequestError, match="state slots"):
        engine.copy_state(0, 1)
