"""Mixtures of experts that are calibrated and quantized, and the engines that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors.numpy import load_file

from engines.bundle import EngineBundle
from engines.compile import build
from engines.load import find_target
from quantization.calibrate import calibrate
from quantization.calibration import Calibration
from quantization.checkpoint import KV_SCALES, QuantizedModel
from quantization.compressed_tensors import open_checkpoint
from quantization.quantize import quantize
from tapeout.artifact import Artifact
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.recipe import BaseRecipe, Calibrate, DataSource, KVCache, ModelSource, Plan, Quantize, Rule
from tapeout.schemes import FLOAT, Scheme
from tests.exported import family_graph
from tests.family_engines import texts, words
from tests.plans import written_plan

RULES = (
    Rule(match="layers.0.experts_up", scheme=Scheme(bits=4, symmetric=True)),
    Rule(match="layers.*.experts_down", scheme=Scheme(bits=6, symmetric=True)),
    Rule(match="layers.1.experts_up", scheme=Scheme(bits=8, group_size=64)),
    Rule(match="*", scheme=Scheme(bits=8, symmetric=True)),
)
SAMPLES, TOKENS = 16, 48  # of calibration


def recipe(rules: Sequence[Rule] = RULES, min_visits: int = 128) -> BaseRecipe:
    return BaseRecipe(
        model=ModelSource(source="file:model"),
        data=DataSource(source="file:data"),
        calibrate=Calibrate(samples=SAMPLES, tokens=TOKENS, min_visits=min_visits),
        plan=Plan(schemes=tuple(rules), embeddings=FLOAT, kv_cache=KVCache(dtype="int8")),
        quantize=Quantize(scale_grid=4),
    )


@dataclass(frozen=True)
class Mixture:
    family: str
    graph: Artifact[PortableGraph]
    calibration: Artifact[Calibration]
    quantized: Artifact[QuantizedModel]

    def build(self, folder: Path) -> Artifact[EngineBundle]:
        return build(
            self.graph,
            open_checkpoint(self.quantized.folder),
            folder,
            target=find_target("ort-cpu"),
            precision="mix",
            slots=2,
            kv_scales=load_file(self.quantized.folder / KV_SCALES),
            parents={},
        )


def calibrated(family: str, folder: Path, wanted: BaseRecipe) -> tuple[Artifact[PortableGraph], Artifact[Calibration]]:
    graph = family_graph(family)
    samples = texts(words(family, SAMPLES, TOKENS, 1))
    return graph, calibrate(wanted.calibrate, graph, samples, folder / "calibration")


def quantized(family: str, folder: Path, wanted: BaseRecipe | None = None) -> Mixture:
    wanted = wanted or recipe()
    graph, calibration = calibrated(family, folder, wanted)
    plan = written_plan(wanted, graph, folder / "plan")
    return Mixture(
        family, graph, calibration, quantize(wanted.quantize, graph, calibration, plan, folder / "quantized")
    )


def of_bits(*bits: int, group_size: Literal[16, 32] = 32, symmetric: bool = True) -> Scheme:
    found = Scheme.of_experts([Scheme(bits=b, group_size=group_size, symmetric=symmetric) for b in bits])
    assert found is not None
    return found


def group_named(family: str, name: str) -> LinearGroup:
    return next(group for group in family_graph(family).record.groups if group.name == name)
