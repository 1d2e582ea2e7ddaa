"""compressed-tensors: what ``config.json`` says of it, read and written, and what both vLLM and transformers load.

The QuantizedModel itself is such a checkpoint (``quantization/compressed_tensors.py``), and transformers loads it. vLLM
loads no quantized embedding in that form, transformers no packed zero points: these two are what this format leaves
out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quantization.checkpoint_formats import FLOAT_STORED, Parameter, ParameterPlace
from quantization.stored import REMEDY, Declared, Strategy, channels_of_block, mapping, whole
from tapeout import expert_codes
from tapeout.errors import QuantizationError
from tapeout.formats import formats
from tapeout.integers import Integers
from tapeout.number_format import Coded, Tensors
from tapeout.packed_codes import BYTES
from tapeout.quantized import QuantizedWeight, format_of
from tapeout.schemes import FLOAT, Scheme

if TYPE_CHECKING:  # an export reads this layout, and depends on no QuantizedModel
    from quantization.checkpoint_formats.source import ExportSource

LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
CLASS = "Linear"  # a target that is the class of a module
ANY = "*"  # number of an expert
SIGNED_BYTES = "8-bit symmetric"


@dataclass(frozen=True)
class CompressedTensors:
    name: str = "compressed-tensors"
    recipe: str = "symmetric: true for every rule of plan.schemes, and plan.embeddings {bits: 32}"

    def places(self, source: ExportSource) -> list[ParameterPlace]:
        return [ParameterPlace(parameter, *_place(parameter)) for parameter in source.parameters]

    def write(
        self, source: ExportSource, places: Sequence[ParameterPlace], folder: Path, advance: Callable[[], None]
    ) -> None:
        schemes: dict[str, Scheme] = {}

        def encoded(place: ParameterPlace) -> Tensors:
            linear, shared = source.codes(place.parameter), place.parameter.shared
            linear = (shared and linear.widened(shared.bits)) or linear
            stored = _signed(linear) if place.stored == SIGNED_BYTES else linear
            schemes[place.parameter.name] = stored.scheme
            return format_of(stored.scheme).encode(stored.coded)

        source.write_weights(places, folder, encoded, advance)
        quantization = quantization_config(schemes, {}, source.in_float(places))
        source.write_config(folder, quantization | {"kv_cache_scheme": None})


def _place(parameter: Parameter) -> tuple[str, str]:
    """How it is stored, and the reason, as :class:`ParameterPlace` has them."""
    scheme = parameter.shared or parameter.scheme
    if scheme == FLOAT:
        return FLOAT_STORED, ""
    if parameter.embedding:
        return FLOAT_STORED, "vLLM loads no quantized embedding or lm_head that transformers loads too"
    if not isinstance(format_of(scheme), Integers):
        return FLOAT_STORED, f"transformers and vLLM are not known to load {scheme.format} alike"
    if scheme.symmetric:
        return scheme.name, "" if scheme == parameter.scheme else "vLLM takes one scheme for all experts of a layer"
    return SIGNED_BYTES if scheme.bits < 8 else FLOAT_STORED, "transformers loads no packed zero points"


def _signed(linear: QuantizedWeight) -> QuantizedWeight:
    """An asymmetric linear of at most 7 bits on a symmetric 8-bit grid: the same weights, codes less zero points."""
    assert linear.zero_points is not None
    scheme = linear.scheme.in_format("int8").model_copy(update={"symmetric": True})
    levels = linear.codes.astype(np.int16) - np.repeat(linear.zero_points, linear.group_size, axis=1)
    return replace(
        linear, codes=(levels + format_of(scheme).midpoint).astype(np.uint8), zero_points=None, scheme=scheme
    )


def quantization_config(
    linears: Mapping[str, Scheme], embeddings: Mapping[str, Scheme], ignored: Iterable[str]
) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``: one group per way to store, its modules as regular expressions.

    ``linears`` and ``embeddings`` map parameter names to schemes; ``ignored`` are the modules left in float.
    """
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, scheme in linears.items():
        layout = expert_codes.LAYOUT if scheme.expert_bits else format_of(scheme).layout
        stored = {"format": layout, **format_of(scheme).arguments(scheme)}
        groups.setdefault(json.dumps(stored), (stored, []))[1].append(name.removesuffix(".weight"))
    for name, scheme in embeddings.items():
        stored = {"format": BYTES, "weights": format_of(scheme).arguments(scheme)["weights"]}
        groups.setdefault(json.dumps(stored), (stored, []))[1].append(name.removesuffix(".weight"))
    encodings = {stored["format"] for stored, _ in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": encodings.pop() if len(encodings) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": module_patterns(name.removesuffix(".weight") for name in ignored),
        "config_groups": {
            f"group_{number}": {"targets": module_patterns(modules), **stored}
            for number, (_, (stored, modules)) in enumerate(sorted(groups.items()))
        },
    }


def module_patterns(modules: Iterable[str]) -> list[str]:
    r"""Module names as anchored regular expressions, the names that differ in one layer number merged.

    Experts of a layer are all stored alike, so their numbers are any.

    >>> module_patterns(["m.0.o", "m.2.o", "head"])
    ['re:^head$', 're:^m\\.(0|2)\\.o$']
    >>> module_patterns(["m.0.experts.0.up", "m.0.experts.1.up"])
    ['re:^m\\.(0)\\.experts\\.\\d+\\.up$']
    """
    merged: dict[tuple[str, str], set[int]] = {}
    for module in dict.fromkeys(re.sub(r"(?<=\.experts\.)\d+(?=\.)", ANY, module) for module in modules):
        match = re.search(r"(?<=\.)\d+(?=\.)", module)
        before, number, after = (
            (module[: match.start()], int(match.group()), module[match.end() :]) if match else (module, -1, "")
        )
        merged.setdefault((before, after), set()).add(number)
    patterns: list[str] = []
    for (before, after), numbers in sorted(merged.items()):
        middle = "" if numbers == {-1} else f"({'|'.join(str(n) for n in sorted(numbers))})"
        pattern = f"re:^{re.escape(before)}{middle}{re.escape(after)}$"
        patterns.append(pattern.replace(re.escape(ANY), r"\d+"))
    return patterns


def declared(module: str, config: Mapping[str, Any]) -> Declared:
    """By quantization_config; what is not said has the defaults of compressed-tensors."""
    group, weights = _group_of(module, config)
    layout, kind = group.get("format") or config["format"], weights.get("type", "int")
    if layout not in LAYOUTS:
        raise QuantizationError(
            f"quantization_config says that the weight of {module} is stored in {layout}",
            expected=f"one of {', '.join(LAYOUTS)}",
            remedy=REMEDY,
        )
    if layout == "naive-quantized":
        layout = f"{kind}-quantized"
    if kind not in ("int", "float") or (kind == "float") != (layout == "float-quantized"):
        raise QuantizationError(
            f"quantization_config says that the weight of {module} has codes of type {kind} in {layout}",
            expected="type float in float-quantized, type int elsewhere",
            remedy=REMEDY,
        )
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    blocks: dict[Strategy, Callable[[], tuple[int | None, int | None]]] = {
        "tensor": lambda: (None, None),
        "channel": lambda: (1, None),
        "group": lambda: (1, whole("group_size", size)),
        "block": lambda: channels_of_block("block_structure", weights.get("block_structure")),
    }
    names: dict[str, Strategy] = {name: name for name in blocks}
    known = names.get(strategy) if isinstance(strategy, str) else None
    if known is None:
        raise QuantizationError(
            f"quantization_config says one scale per {strategy} for the weight of {module}",
            expected=f"one of {', '.join(blocks)}",
            remedy=REMEDY,
        )
    return Declared(
        layout,
        known,
        blocks[known](),
        bits=whole("num_bits", weights.get("num_bits", 8)),
        symmetric=bool(weights.get("symmetric", True)),
        sorted=weights.get("actorder") in ("group", "dynamic", True),
    )


def _group_of(module: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The one of ``config_groups`` that says how the weight of a module is stored, and its arguments of weights."""
    found: list[tuple[tuple[int, str], Mapping[str, Any], Mapping[str, Any]]] = []
    for name, value in mapping("config_groups", config.get("config_groups")).items():
        group = mapping(name, value)
        if weights := mapping("weights", group.get("weights")):
            found += [
                (_order(target), group, weights)
                for target in _targets(group)
                if target == CLASS or _is_named(module, target)
            ]
    if found:
        _, group, weights = min(found, key=lambda one: one[0])
        return group, weights
    raise QuantizationError(
        f"quantization_config does not say how the weight of {module} is stored",
        expected="a group of config_groups whose targets match it",
        remedy="complete config.json",
    )


def _order(target: str) -> tuple[int, str]:
    """As compressed-tensors has it (``utils/match.py``): names go before regular expressions, and classes come last."""
    return (2 if target == CLASS else int(target.startswith("re:"))), target


def _targets(group: Mapping[str, Any]) -> list[str]:
    targets: Any = group.get("targets", [])
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in cast("list[Any]", targets)):
        raise QuantizationError(
            f"quantization_config says targets {targets!r}", expected="a list of texts", remedy=REMEDY
        )
    return cast("list[str]", targets)


def _is_named(module: str, target: str) -> bool:
    pattern = target.removeprefix("re:")
    if target == pattern:
        return module.endswith(target)
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise QuantizationError(
            f"quantization_config has the target {target!r}: {error}", expected="a regular expression", remedy=REMEDY
        ) from error


def unpacked(module: str, tensors: Tensors, declared: Declared) -> Coded:
    """The codes and zero points of ``pack-quantized``. :class:`QuantizationError` for bits that are read in no way."""
    packings = [f for f in formats().values() if isinstance(f, Integers) and f.grouped and f.bits == declared.bits]
    if not packings:
        raise QuantizationError(
            f"{module} is packed in {declared.bits} bits",
            expected="4, 5, 6 or 8 bits",
            remedy="take the float checkpoint that it was made from",
        )
    coded = packings[0].decode(tensors)
    midpoint = np.full((1, 1), packings[0].midpoint, np.uint8)
    return coded if coded.zero_points is not None else coded._replace(zero_points=midpoint)
