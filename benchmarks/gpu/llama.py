"""Bundles of the target ``cuda`` in the shape of a llama with random weights, written where they run.

Eight billion parameters cannot be carried to a machine that is had for minutes, and their build takes longer than that.
So the plan is written down here; a test compares it with the one that a build makes of such a model. Weights tell of
speed, and of results that must agree with each other, and nothing of quality.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from engines.bundle import BLOCK_TOKENS, NEXT_TOKENS, EngineBundle, IOContract
from engines.kernels.cuda import HOST, HOST_FILE, cubin_file, parameters
from engines.kernels.cuda.packing import chunks_of, tiles_of
from engines.kernels.cuda.parameters import ARGMAX_PARTS
from engines.kernels.cuda.plan import (
    CONSTANTS_FILE,
    ENDED,
    LINEAR_ENDED,
    LINEAR_SUMS,
    PLAN_FILE,
    RANKING,
    VERSION,
    WEIGHTS_FILE,
    LaunchPlan,
    PlacedTensor,
    PlanOperation,
    PlanValue,
)
from tapeout.artifact import Artifact, FileEntry
from tapeout.file_hashes import sha256_file
from tapeout.fingerprint import Fingerprint
from tapeout.state import Paged, StateTensor

ALIGNMENT = 4096
RANDOM_BYTES = 1 << 26  # of codes; larger weights repeat them
EPSILON = float(np.float32(1e-5))


@dataclass(frozen=True)
class Shape:
    """``group``: input channels that share a scale. ``bits``: of linears; lm_head and the embedding have eight."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    max_tokens: int
    bits: int = 4
    group: int = 64
    int8_cache: bool = True

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Outputs and input channels of a layer's."""
        inner = self.heads * self.head_size
        return {
            "qkv": (inner + 2 * self.kv_heads * self.head_size, self.hidden),
            "o": (self.hidden, inner),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def weight_bytes(self) -> int:
        """Of linears with scales in float16, which a decode step reads."""
        each = sum(n * k for n, k in self.linears.values())
        per_weight = self.bits / 8 + 2 / self.group
        return round(self.layers * each * per_weight + self.vocabulary * self.hidden * (1 + 2 / self.group))

    def cache_bytes(self, tokens: int) -> int:
        """Of keys and values of so many tokens."""
        return 2 * self.layers * self.kv_heads * self.head_size * tokens * (1 if self.int8_cache else 2)


EIGHT_BILLION = Shape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192)
SMALL = Shape("small", 2, 256, 4, 2, 64, 704, 2003, 1024)
TINY = Shape("tiny", 1, 64, 2, 1, 64, 128, 203, 640)  # for a run without a GPU


def plan_of(shape: Shape) -> LaunchPlan:
    """Without tensors."""
    return _Plan(shape).made


def tensors_of(shape: Shape) -> Iterator[tuple[str, str, int]]:
    """Name, what it holds, and bytes of every tensor that a plan reads."""

    def weight(name: str, outputs: int, columns: int, bits: int) -> Iterator[tuple[str, str, int]]:
        yield f"{name}.codes", "codes", tiles_of(outputs) * chunks_of(columns) * 128 * bits
        yield f"{name}.scales", f"scales {bits} {columns}", 2 * 16 * tiles_of(outputs) * (columns // shape.group)

    for layer in range(shape.layers):
        for name, (outputs, columns) in shape.linears.items():
            yield from weight(f"layers.{layer}.{name}", outputs, columns, shape.bits)
        for name in ("input_norm", "post_attention_norm"):
            yield f"layers.{layer}.{name}", "norm", 4 * shape.hidden
        for name in ("k_scale", "v_scale") if shape.int8_cache else ():
            yield f"layers.{layer}.{name}", "cache scales", 4 * shape.kv_heads * shape.head_size
    yield from weight("lm_head", shape.vocabulary, shape.hidden, 8)
    yield "norm", "norm", 4 * shape.hidden
    for name in ("cosines", "sines"):
        yield name, name, 4 * shape.max_tokens * shape.head_size // 2


def write_bundle(folder: Path, shape: Shape, kernels: Path, level: str) -> Artifact[EngineBundle]:
    """``kernels``: a folder with the host's library and machine code of ``level``, as :mod:`prepare` makes it."""
    (folder / "kernels").mkdir(parents=True)
    for name in (HOST_FILE, *([cubin_file(level)] if level != HOST else [])):
        shutil.copyfile(kernels / Path(name).name, folder / name)
    places, end = dict[str, PlacedTensor](), 0
    with (folder / WEIGHTS_FILE).open("wb") as file:
        for name, kind, size in tensors_of(shape):
            file.write(bytes(-end % ALIGNMENT))
            end += -end % ALIGNMENT
            places[name] = PlacedTensor(file=WEIGHTS_FILE, offset=end, nbytes=size)
            for piece in _content(shape, kind, size):
                file.write(piece)
            end += size
    (folder / CONSTANTS_FILE).write_bytes(b"")
    plan = plan_of(shape).model_copy(update={"tensors": places})
    (folder / PLAN_FILE).write_text(plan.model_dump_json())
    files = {}
    for path in (folder / "kernels").iterdir():
        files[f"kernels/{path.name}"] = FileEntry(sha256_file(path), path.stat().st_size)
    return Artifact(folder, _record(shape, level), files, {}, f"random weights of {shape.name}")


def _content(shape: Shape, kind: str, size: int) -> Iterator[bytes | memoryview]:
    """Bytes of a tensor, in pieces. Activations keep their size over the layers."""
    rng = np.random.default_rng(size)
    if kind == "codes":
        for first in range(0, size, RANDOM_BYTES):
            yield memoryview(_random_codes())[: size - first]
    elif kind.startswith("scales"):
        _, bits, columns = kind.split()
        spread = 2 ** int(bits) / 12**0.5  # of codes that are all equally likely
        yield _random_scales(size, 1 / (spread * int(columns) ** 0.5))
    elif kind == "norm":
        yield rng.uniform(0.5, 1.5, size // 4).astype(np.float32).tobytes()
    elif kind == "cache scales":
        yield np.full(size // 4, 0.03, np.float32).tobytes()
    else:
        half = shape.head_size // 2
        angles = np.outer(np.arange(shape.max_tokens), 500000.0 ** -(np.arange(half) / half))
        yield {"cosines": np.cos, "sines": np.sin}[kind](angles).astype(np.float32).tobytes()


@cache
def _random_codes() -> bytes:
    return np.random.default_rng(0).bytes(RANDOM_BYTES)


@cache
def _random_scales(size: int, typical: float) -> bytes:
    scales = np.random.default_rng(size).uniform(0.5, 1.5, size // 2) * typical
    return scales.astype(np.float16).tobytes()


def _record(shape: Shape, level: str) -> EngineBundle:
    dtype = "int8" if shape.int8_cache else "float16"
    sizes = (shape.kv_heads, shape.head_size)
    tensors = tuple(StateTensor(name=name, shape=sizes, dtype=dtype) for name in ("key", "value"))
    io = IOContract(
        inputs=(),
        state=tuple(Paged(layer=layer, tensors=tensors) for layer in range(shape.layers)),
        max_tokens=shape.max_tokens,
        slots=1,
        vocab_size=shape.vocabulary,
    )
    hardware = Fingerprint(machine=platform.machine(), features=(), libraries={}, level=level, emulated=level == HOST)
    return EngineBundle(
        precision=f"random w{shape.bits}",
        io=io,
        operator_counts={},
        passes=(),
        weight_bytes=shape.weight_bytes,
        step_bytes=shape.weight_bytes,
        plan={},
        linear_outputs=(),
        stop_tokens=(),
        target="cuda",
        hardware=(hardware,),
    )


class _Plan:
    """The operations of a step, in order. Values are called by what they are."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self._operations, self._values = shape, list[PlanOperation](), dict[str, PlanValue]()
        self._gather()
        total, added = "embedding", ""
        for layer in range(shape.layers):
            total, added = self._layer(f"layers.{layer}", layer, total, added)
        self._add("finite", "norm.rows", {"a": total, "b": added}, {"K": shape.hidden}, writes=())
        normed = self._norm("norm.rows", "norm", total, added, "", wanted=True)
        self._linear("lm_head", "logits", normed, shape.vocabulary, shape.hidden, 8, wanted=True)
        self._argmax()
        self.made = LaunchPlan(
            version=VERSION,
            operations=tuple(self._operations),
            values=self._values,
            tensors={},
            heads=shape.heads,
            head_size=shape.head_size,
            vocabulary=shape.vocabulary,
            logits="logits",
        )

    def _layer(self, name: str, layer: int, total: str, added: str) -> tuple[str, str]:
        """Its residual sum, and what is still to be added to that."""
        shape, s = self._shape, self._shape.linears
        new_total = f"{name}.qkv.sum" if added else total
        x = self._norm(f"{name}.qkv.norm", f"{name}.input_norm", total, added, new_total if added else "")
        self._linear(f"{name}.qkv", f"{name}.qkv.y", x, *s["qkv"], shape.bits)
        self._attention(name, layer)
        self._linear(f"{name}.o", f"{name}.o.y", f"{name}.attention", *s["o"], shape.bits)
        last = f"{name}.gate_up.sum"
        x = self._norm(f"{name}.gate_up.norm", f"{name}.post_attention_norm", new_total, f"{name}.o.y", last)
        self._linear(f"{name}.gate_up", f"{name}.gate_up.y", x, *s["gate_up"], shape.bits)
        gated = self._value(f"{name}.gated", 2 * shape.intermediate)
        pointers = {"x": f"{name}.gate_up.y", "y": gated}
        self._add("gated", f"{name}.down.y", pointers, {"K": shape.intermediate})
        self._linear(f"{name}.down", f"{name}.down.y", gated, *s["down"], shape.bits)
        return last, f"{name}.down.y"

    def _gather(self) -> None:
        numbers, pointers = self._weight("lm_head", self._shape.vocabulary, self._shape.hidden, 8)
        pointers["y"] = self._value("embedding", 4 * self._shape.hidden)
        self._add("gather", "embedding", pointers, numbers)

    def _norm(self, y: str, weight: str, a: str, b: str, total: str, *, wanted: bool = False) -> str:
        columns = self._shape.hidden
        pointers = {"a": a, "weight": weight, "y": self._value(y, 2 * columns, wanted)}
        if b:
            pointers["b"] = b
        if total:
            pointers["sum"] = self._value(total, 4 * columns)
        numbers = {"K": columns, "epsilon": EPSILON}
        self._add("norm", y, pointers, numbers, writes=("y", "sum"), wanted=wanted)
        return y

    def _linear(
        self, weight: str, y: str, x: str, outputs: int, columns: int, bits: int, *, wanted: bool = False
    ) -> None:
        numbers, pointers = self._weight(weight, outputs, columns, bits)
        pointers |= {"x": x, "y": self._value(y, 4 * outputs, wanted), "sums": LINEAR_SUMS, "ended": LINEAR_ENDED}
        self._add("linear", y, pointers, numbers, wanted=wanted)

    def _attention(self, name: str, layer: int) -> None:
        s = self._shape
        inner = s.heads * s.head_size
        pointers = {
            "qkv": f"{name}.qkv.y",
            "key_cache": f"past_key_values.{layer}.key",
            "value_cache": f"past_key_values.{layer}.value",
            "query": self._value(f"{name}.query", 2 * inner),
            "part_sums": "attention.sums",
            "part_rows": "attention.rows",
            "ended": ENDED,
            "y": self._value(f"{name}.attention", 2 * inner),
            "cosines": "cosines",
            "sines": "sines",
        }
        if s.int8_cache:
            pointers |= {"key_scales": f"{name}.k_scale", "value_scales": f"{name}.v_scale"}
        scale = float(np.float32(s.head_size**-0.5))
        numbers = {"H": s.heads, "KV": s.kv_heads, "D": s.head_size, "fp8": 0, "interleaved": 0,
                   "window": 0, "scale": scale, "softcap": 0.0, "epsilon": 0.0}  # fmt: skip
        self._add("attention", f"{name}.attention", pointers, numbers, writes=("y", "query"))

    def _argmax(self) -> None:
        self._values |= {
            NEXT_TOKENS: PlanValue(wanted=True, row_bytes=8),
            "argmax.max": PlanValue(wanted=True, row_bytes=4 * ARGMAX_PARTS),
            "argmax.index": PlanValue(wanted=True, row_bytes=4 * ARGMAX_PARTS),
            RANKING: PlanValue(wanted=True, row_bytes=parameters.RANKING.itemsize),
        }
        scratch = {"part_max": "argmax.max", "part_index": "argmax.index"}
        pointers = {"logits": "logits", **scratch, "ranking": RANKING, "y": NEXT_TOKENS}
        numbers: dict[str, int | float] = {"N": self._shape.vocabulary}
        self._add("choose", "logits", pointers, numbers, writes=("y", "ranking", *scratch), wanted=True)

    def _weight(
        self, name: str, outputs: int, columns: int, bits: int
    ) -> tuple[dict[str, int | float], dict[str, str]]:
        shift = self._shape.group.bit_length() - 1
        numbers: dict[str, int | float] = {"weight.N": outputs, "weight.K": columns, "weight.bits": bits,
                                           "weight.group_shift": shift, "weight.half_scales": 1,
                                           "weight.e4m3": 0}  # fmt: skip
        return numbers, {"weight.codes": f"{name}.codes", "weight.scales": f"{name}.scales"}

    def _value(self, name: str, row_bytes: int, wanted: bool = False) -> str:
        self._values[name] = PlanValue(wanted=wanted, row_bytes=row_bytes)
        return name

    def _add(
        self,
        kind: str,
        name: str,
        pointers: dict[str, str],
        numbers: dict[str, int | float],
        *,
        writes: tuple[str, ...] = ("y",),
        wanted: bool = False,
    ) -> None:
        self._operations.append(
            PlanOperation(kind=kind, name=name, pointers=pointers, numbers=numbers, writes=writes, wanted=wanted)
        )


def blocks_of(shape: Shape, sequence: int) -> range:
    """Of a sequence of full length."""
    each = -(-shape.max_tokens // BLOCK_TOKENS)
    return range(sequence * each, (sequence + 1) * each)
