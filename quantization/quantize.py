"""The quantize stage: a float checkpoint and its calibration become a QuantizedModel, one layer at a time.

Every linear is rounded to nearest first; that is the comparison. Then, per group of linears that share an input, AWQ
input scales are searched; under each of identity and the best of them, group scales are fitted and GPTQ is run on
them. What is kept has the lowest output error on calibration rows none of these was fitted to (DESIGN rule 3).

A scale ``s`` on a linear's input is undone by its producer. Where the producer is a quantized linear, its rows are
divided by ``s`` after rounding: that divides their group scales and leaves the codes alone, so the order in which
groups are treated does not matter.
"""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from threadpoolctl import threadpool_limits

from quantization import awq
from quantization.calibration import Calibration
from quantization.checkpoint import KVScales, KVScheme, LinearReport, QuantizedModel
from quantization.compressed_tensors import (
    Checkpoint,
    CheckpointWriter,
    open_checkpoint,
    quantization_config,
)
from quantization.embedding_rounding import round_table
from quantization.group_search import float_report, quantize_group
from quantization.kv_cache import BITS
from quantization.plan import PrecisionPlan
from quantization.proof import prove, take_census
from quantization.rounding import (
    FloatArray,
    QuantizedLinear,
    storable,
)
from quantization.statistics import kv_scales, read_statistics
from quantization.units import (
    EMBEDDING,
    HEAD,
    Formats,
    by_layer,
    formats,
    formats_of,
    head_with,
    out_by_in,
    planned_formats,
    sink_of,
    tables_of,
)
from tapeout.artifact import Artifact, create, load
from tapeout.errors import QuantizationError
from tapeout.portable_graph import LinearGroup, PortableGraph, ScaleSink
from tapeout.recipe import KVCache, Quantize, Recipe

_PROGRESS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TextColumn("layers"),
    TimeElapsedColumn(),
)
LAYERS_AT_ONCE = 2  # numpy releases the interpreter; two layers in memory at most
_REPLACED = re.compile(r"(.*\.safetensors|.*\.safetensors\.index\.json|.*\.onnx(\.data)?|record\.json|config\.json)")


@dataclass
class LayerResult:
    """What one layer's groups became. ``tensors`` holds every parameter that differs from the source."""

    tensors: dict[str, QuantizedLinear | FloatArray] = field(default_factory=dict)
    reports: list[LinearReport] = field(default_factory=list)
    value_scale: FloatArray | None = None  # [kv_heads * head_size] that value channels were divided by


def quantize(
    recipe: Recipe,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    plan: Artifact[PrecisionPlan],
    folder: Path,
) -> Artifact[QuantizedModel]:
    """Write the QuantizedModel to ``folder``. Reads and holds two layers at a time.

    :class:`QuantizationError` for a calibration or a plan of another graph, weights or statistics that are not finite,
    and a result that its proof says is not a quantized model.
    """
    settings, kv_cache = recipe.quantize, plan.record.kv_cache.settings
    for made, how, remedy in ((calibration, "calibrated", "calibrate"), (plan, "planned", "plan")):
        if (parent := made.parents.get("graph")) != graph.ref:
            raise QuantizationError(
                f"{made.folder} was {how} on graph {parent.digest[:12] if parent else 'unknown'}",
                expected=f"graph {graph.digest[:12]} in {graph.folder}",
                remedy=f"run `dvc repro {remedy}`",
            )
    source = open_checkpoint(graph.folder)
    stored, notes = formats(graph.record, plan.record.kernels, plan.record.embeddings.kernel)
    layers = by_layer(graph.record)
    reports: list[LinearReport] = []
    cache: dict[str, FloatArray] = {}
    with create(folder, QuantizedModel) as draft:
        writer = CheckpointWriter(draft.folder)
        written: set[str] = set()
        with (
            threadpool_limits(1),  # two layers side by side: products inside one must not fight for the same cores
            Progress(*_PROGRESS) as progress,
            ThreadPoolExecutor(LAYERS_AT_ONCE) as pool,
        ):
            task = progress.add_task("quantizing", total=len(layers))
            for start in range(0, len(layers), LAYERS_AT_ONCE):
                batch = layers[start : start + LAYERS_AT_ONCE]
                results = pool.map(
                    lambda item: _quantize_layer(graph.record, source, item[1], calibration, stored, settings), batch
                )
                for (layer, groups), result in zip(batch, results, strict=True):
                    for name, tensor in sorted(result.tensors.items()):
                        _write(writer, name, tensor)
                    written.update(result.tensors)
                    reports.extend(result.reports)
                    if kv_cache.dtype in BITS and layer.startswith("layers."):
                        scales = kv_scales(layer, calibration, kv_cache, result.value_scale)
                        cache.update(scales)
                        if kv_cache.granularity == "per_tensor":
                            for part, array in _published_kv_scales(groups, layer, scales).items():
                                writer.add(part, array)
                    progress.advance(task)
        for name, tied_to in tables_of(graph.record).items():
            report = _write_table(writer, source, name, tied_to, stored, calibration, graph.record, settings)
            written.add(name)
            reports.append(report)
        for name in source.names():
            if name not in written:
                writer.add(name, source.tensor(name))
        writer.finish()
        if cache:
            KVScales(cache, BITS[kv_cache.dtype]).write(draft.folder)
        _copy_companions(graph.folder, draft.folder)
        _write_config(graph, stored, kv_cache, draft.folder)

        result = open_checkpoint(draft.folder)
        census = [take_census(result, name) for name in result.names()]
        proof = prove(census, planned_formats(graph.record, stored), in_bytes=tables_of(graph.record))
        if not proof.passed:
            raise QuantizationError(
                "this is not a quantized model: " + "; ".join(proof.reasons[:10]),
                expected="every planned tensor quantized, with fitted, finite scales",
                remedy="compare plan.kernels with the units that `tapeout inspect artifacts/graph` lists",
            )
        for note in notes:
            Console().print(f"note: {note}")
        record = QuantizedModel(
            method=settings.method,
            linears=tuple(reports),
            kv_cache=KVScheme(dtype=kv_cache.dtype, granularity=kv_cache.granularity),
            proof=proof,
            source_bytes=sum(source.stored_bytes(name) for name in source.names()),
            notes=tuple(notes),
        )
        draft.finish(record, parents={"graph": graph, "calibration": calibration, "plan": plan})
    return load(folder, QuantizedModel)


def _quantize_layer(
    graph: PortableGraph,
    source: Checkpoint,
    groups: list[LinearGroup],
    calibration: Artifact[Calibration],
    stored: Formats,
    settings: Quantize,
) -> LayerResult:
    result = LayerResult()
    folds: list[tuple[FloatArray, ScaleSink]] = []
    for group in groups:
        fmt = stored[group.name]
        weights = [out_by_in(source.tensor(name), group) for name in group.members]
        if fmt is None:
            result.tensors.update(zip(group.members, weights, strict=True))
            result.reports.extend(float_report(group, i) for i in range(len(weights)))
            continue
        statistics = read_statistics(calibration, group)
        sink = sink_of(group, graph)
        scale, linears, reports = quantize_group(group, weights, statistics, fmt, settings, sink)
        result.tensors.update(zip(group.members, linears, strict=True))
        result.reports.extend(reports)
        if sink is not None and not scale.is_identity:
            folds.append((scale.values, sink))
    for scale, sink in folds:
        _fold(result, source, scale, sink)
        if sink.kind == "linear" and sink.head_size:
            result.value_scale = awq.producer_scale(scale, sink)
    for group in groups:
        for name in group.members:
            kept = result.tensors[name]
            if not isinstance(kept, QuantizedLinear):
                result.tensors[name] = out_by_in(kept, group)  # back to how the source stores it
    return result


def _fold(result: LayerResult, source: Checkpoint, scale: FloatArray, sink: ScaleSink) -> None:
    producer = result.tensors.get(sink.weight)
    if isinstance(producer, QuantizedLinear):
        folded = awq.absorb(producer.scales, scale, sink)
        result.tensors[sink.weight] = replace(producer, scales=storable(folded))
    else:
        result.tensors[sink.weight] = awq.absorb(
            source.tensor(sink.weight) if producer is None else producer, scale, sink
        )
    if sink.bias is not None:
        bias = result.tensors.get(sink.bias)
        assert not isinstance(bias, QuantizedLinear)
        result.tensors[sink.bias] = awq.absorb_bias(source.tensor(sink.bias) if bias is None else bias, scale, sink)


def _write(writer: CheckpointWriter, name: str, tensor: QuantizedLinear | FloatArray) -> None:
    if isinstance(tensor, QuantizedLinear):
        writer.add_linear(name, tensor)
    else:
        writer.add(name, tensor)


def _write_table(
    writer: CheckpointWriter,
    source: Checkpoint,
    name: str,
    tied_to: str | None,
    stored: Formats,
    calibration: Artifact[Calibration],
    graph: PortableGraph,
    settings: Quantize,
) -> LinearReport:
    weight = source.tensor(name)
    fmt = stored[EMBEDDING] if name == graph.embedding else stored[HEAD]
    head = head_with(graph, name)
    rounded = None
    if fmt is None:
        writer.add(name, weight)
    else:
        statistics = None if head is None else read_statistics(calibration, head)
        rounded = round_table(weight, fmt, statistics, settings)
        writer.add_table(name, rounded.linear, tied_to=tied_to)
    return LinearReport(
        name=name,
        group=EMBEDDING if head is None else HEAD,
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        bits=32 if fmt is None else fmt.bits,
        group_size=0 if fmt is None else fmt.group_size,
        symmetric=True,
        method="float" if rounded is None else rounded.method,
        input_scale="identity",
        error_rtn=0.0 if rounded is None else rounded.error_rtn,
        error=0.0 if rounded is None else rounded.error,
    )


def _published_kv_scales(groups: list[LinearGroup], layer: str, scales: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """One scale per tensor, where compressed-tensors looks for it: on the attention module."""
    projection = next(group for group in groups if group.name == f"{layer}.qkv").members[0]
    attention = projection.rsplit(".", 2)[0]
    return {f"{attention}.{part}_scale": scales[f"{layer}.{part}_scale"].reshape(-1)[:1] for part in ("k", "v")}


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template and generation config: everything but weights, graphs and what is written anew."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not _REPLACED.fullmatch(path.name):
            shutil.copyfile(path, target / path.name)


def _write_config(graph: Artifact[PortableGraph], stored: Formats, kv_cache: KVCache, target: Path) -> None:
    config: dict[str, Any] = json.loads((graph.folder / "config.json").read_text())
    linears, tables, ignored = formats_of(graph.record, stored)
    kv_cache_scheme = None
    if kv_cache.dtype in BITS and kv_cache.granularity == "per_tensor":
        bits = BITS[kv_cache.dtype]
        kv_cache_scheme = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        **quantization_config(linears, tables, ignored),
        "kv_cache_scheme": kv_cache_scheme,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
