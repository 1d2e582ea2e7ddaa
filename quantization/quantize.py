"""The quantize stage: a float checkpoint and its calibration become a QuantizedModel, layer by layer.

Each finished layer is kept, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from quantization.calibration import Calibration
from quantization.checkpoint import KVScales, KVScheme, QuantizedModel
from quantization.checkpoint_formats.compressed import quantization_config
from quantization.compressed_tensors import Checkpoint, ResumableWriter, open_checkpoint
from quantization.kv_cache import BITS
from quantization.needs import SEARCH_BYTES, quantization_needs
from quantization.plan import PrecisionPlan
from quantization.proof import count_tensors, prove
from quantization.quantized_layers import LayersJob, MemoryBudget
from quantization.units import HEAD, Schemes, embeddings_of, fitted_schemes, out_by_in, quantized_ones, stored_schemes
from tapeout.artifact import Artifact, create, load
from tapeout.errors import QuantizationError
from tapeout.number_format import FloatArray
from tapeout.portable_graph import PortableGraph
from tapeout.progress import ProgressBar
from tapeout.recipe import KVCache, Quantize
from tapeout.resources import require
from tapeout.schemes import FLOAT
from tapeout.work_folder import source_hash, work_folder

_REPLACED = re.compile(r"(.*\.safetensors|.*\.safetensors\.index\.json|.*\.onnx(\.data)?|record\.json|config\.json)")


def quantize(
    settings: Quantize,
    graph: Artifact[PortableGraph],
    calibration: Artifact[Calibration],
    plan: Artifact[PrecisionPlan],
    folder: Path,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Artifact[QuantizedModel]:
    """Write the QuantizedModel to ``folder``. Memory is bounded by the largest tensor and group, not by the model.

    :class:`QuantizationError` for a calibration or a plan of another graph, weights or statistics that are not finite,
    and a result that its proof says is not a quantized model.
    """
    kv_cache = plan.record.kv_cache.settings
    for made, how, remedy in ((calibration, "calibrated", "calibrate"), (plan, "planned", "plan")):
        if (parent := made.parents.get("graph")) != graph.ref:
            raise QuantizationError(
                f"{made.folder} was {how} on graph {parent.digest[:12] if parent else 'unknown'}",
                expected=f"graph {graph.digest[:12]} in {graph.folder}",
                remedy=f"run `dvc repro {remedy}`",
            )
    source = open_checkpoint(graph.folder)
    stored, notes = fitted_schemes(graph.record, plan.record.schemes, plan.record.embeddings.scheme)
    require("quantize", quantization_needs(graph.record, stored), folder.parent, progress)
    key = {"parents": [graph.digest, calibration.digest, plan.digest], "settings": settings.model_dump(mode="json")}
    with (
        work_folder(folder, key | {"code": source_hash(Path(__file__).parent)}) as work,
        create(folder, QuantizedModel) as draft,
    ):
        writer = ResumableWriter(draft.folder, work)
        job = LayersJob(graph.record, source, calibration, stored, settings, kv_cache, MemoryBudget(SEARCH_BYTES))
        reports, cache = job.write(writer)
        writer.finish()
        if cache:
            KVScales(cache, kv_cache.dtype).write(draft.folder)
        _copy_companions(graph.folder, draft.folder)
        _write_config(graph, stored, kv_cache, draft.folder)

        result = open_checkpoint(draft.folder)
        inventory = [
            tensor
            for name in ProgressBar(result.names(), title="proof of quantization", unit="tensor")
            for tensor in count_tensors(result, name, partial(_source_weight, graph.record, source, name))
        ]
        linears, embeddings = map(quantized_ones, stored_schemes(graph.record, stored))
        kept = embeddings_of(graph.record)  # of tied parameters one lies in the file
        planned = linears | {name: scheme for name, scheme in embeddings.items() if name in kept}
        proof = prove(inventory, planned, in_bytes=kept)
        if not proof.passed:
            raise QuantizationError(
                "this is not a quantized model: " + "; ".join(proof.reasons[:10]),
                expected="every planned tensor quantized, with fitted, finite scales",
                remedy="compare plan.schemes with the units that `tapeout inspect artifacts/graph` lists",
            )
        visited = (layer.note(calibration.record.asked.min_visits) for layer in calibration.record.visits)
        notes += filter(None, visited)
        for note in notes:
            Console().print(f"note: {note}")
        record = QuantizedModel(
            asked=settings,
            linears=tuple(reports),
            kv_cache=KVScheme(dtype=kv_cache.dtype, granularity=kv_cache.granularity),
            recurrent_state=plan.record.recurrent_state.dtype,
            proof=proof,
            source_bytes=sum(source.stored_bytes(name) for name in source.names()),
            notes=tuple(notes),
        )
        draft.finish(record, parents={"graph": graph, "calibration": calibration, "plan": plan})
    return load(folder, QuantizedModel)


def _source_weight(graph: PortableGraph, source: Checkpoint, name: str, expert: int | None) -> FloatArray:
    """``[N, K]``."""
    group = next((group for group in graph.groups if name in group.members and group.name != HEAD), None)
    weight = source.tensor(name) if expert is None else source.part(name, expert)
    return weight if group is None else out_by_in(weight, group)


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template and generation config: everything but weights, graphs and what is written anew."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not _REPLACED.fullmatch(path.name):
            shutil.copyfile(path, target / path.name)


def _write_config(graph: Artifact[PortableGraph], stored: Schemes, kv_cache: KVCache, target: Path) -> None:
    config: dict[str, Any] = json.loads((graph.folder / "config.json").read_text())
    linears, embeddings = stored_schemes(graph.record, stored)
    ignored = [name for name, scheme in (linears | embeddings).items() if scheme == FLOAT]
    kv_cache_scheme = None
    if kv_cache.dtype in BITS and kv_cache.granularity == "per_tensor":
        kind = "float" if kv_cache.dtype == "fp8" else "int"
        kv_cache_scheme = {"num_bits": BITS[kv_cache.dtype], "type": kind} | {
            "symmetric": True,
            "strategy": "tensor",
            "dynamic": False,
        }
    config["quantization_config"] = {
        **quantization_config(quantized_ones(linears), quantized_ones(embeddings), ignored),
        "kv_cache_scheme": kv_cache_scheme,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
