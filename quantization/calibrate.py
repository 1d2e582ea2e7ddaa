"""Calibrate: run samples of text through the float checkpoint and keep what quantization needs to know of it.

One pass through the model, layer by layer: every sample goes through a layer before the next one is loaded. Memory
holds one layer's weights and the sums over one layer's inputs; hidden states lie in a file. Each finished layer is
kept, so that an interrupted run goes on where it was.

Experts of a mixture have statistics of their own, each of the tokens that chose it (calibration.py).

B, S  batch (1) and tokens of a sample      K  input channels of a group      H, D  KV heads and head size
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from quantization.calibration import (
    HEAD_FILE,
    SAMPLES_FILE,
    Calibration,
    CalibrationSample,
    ExpertVisits,
    layer_file,
    sample_hash,
    samples_hash,
    statistics_file,
)
from quantization.hidden_states import HiddenStates
from quantization.input_sums import ExpertSums, GroupSums
from quantization.needs import calibration_needs
from quantization.statistics import Array
from quantization.units import kind_of, layer_of
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError, SourceError
from tapeout.layer_stream import LayerStream
from tapeout.operators import state_changed
from tapeout.operators.experts import DOWN_INPUT, UNITS
from tapeout.operators.experts.in_torch import experts_changed, inner_channels
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.progress import ProgressBar
from tapeout.recipe import Calibrate
from tapeout.resources import require
from tapeout.tensor_writer import write_tensors
from tapeout.work_folder import is_kept, keep, source_hash, work_folder

MIN_TOKENS = 8
STAND_INS = 4  # times calibrate.min_visits: tokens that a starved expert is shown (docs/negative-results.md)
LIBRARIES = ("torch", "transformers", "tokenizers")


def calibrate(
    settings: Calibrate,
    graph: Artifact[PortableGraph],
    texts: Sequence[str],
    folder: Path,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Artifact[Calibration]:
    """Write the Calibration of ``graph`` over exactly ``calibrate.samples`` texts; see calibration.py for its content.

    :class:`SourceError` for samples that are too few, too short or repeated, :class:`QuantizationError` for a model
    that computes NaN or infinity or does not reach one of its linears.
    """
    if settings.tokens > graph.record.max_positions:
        raise QuantizationError(
            f"calibrate.tokens is {settings.tokens}, and the graph has {graph.record.max_positions} positions",
            expected="samples that fit the model",
            remedy=f"lower calibrate.tokens to at most {graph.record.max_positions}",
        )
    tokenizer: Any = Tokenizer.from_file(str(graph.folder / "tokenizer.json"))  # as engines encode
    samples = _tokenize(tokenizer, texts, settings)
    fit_samples = len(samples) - settings.holdout_samples
    described = [
        CalibrationSample(sample_hash=sample_hash(sample), tokens=len(sample), holdout=i >= fit_samples)
        for i, sample in enumerate(samples)
    ]
    record = Calibration(
        asked=settings,
        samples_hash=samples_hash(described),
        samples=len(samples),
        holdout_samples=len(samples) - fit_samples,
        tokens_per_sample=settings.tokens,
        tokens=sum(map(len, samples)),
        layers=graph.record.layers,
        statistics=tuple(sorted({HEAD_FILE, *map(layer_file, range(graph.record.layers))})),
        versions={name: version(name) for name in LIBRARIES},
    )
    require("calibrate", calibration_needs(graph.record, record.tokens), folder.parent, progress)
    key = {"graph": graph.digest, "record": record.model_dump(), "code": source_hash(Path(__file__).parent)}
    with work_folder(folder, key) as work:
        _run(graph, samples, fit_samples, settings.min_visits, work)
        with artifact.create(folder, Calibration) as draft:
            (draft.folder / "statistics").mkdir()
            for name in record.statistics:
                (draft.folder / name).hardlink_to(work / name)
            (draft.folder / SAMPLES_FILE).write_text("".join(sample.model_dump_json() + "\n" for sample in described))
            visits = _visits(graph.record, work)
            for note in filter(None, (layer.note(settings.min_visits) for layer in visits)):
                progress(note)
            draft.finish(record.model_copy(update={"visits": visits}), parents={"graph": graph})
    return artifact.load(folder, Calibration)


def _visits(graph: PortableGraph, folder: Path) -> tuple[ExpertVisits, ...]:
    """Of every module of experts, from the files of ``folder``."""
    modules: dict[str, list[str]] = {}
    for group in graph.groups:
        if group.experts:
            modules.setdefault(_module_of(group), []).append(group.name)
    found: list[ExpertVisits] = []
    for names in modules.values():
        with safe_open(folder / statistics_file(names[0]), framework="numpy") as file:
            fit, holdout = file.get_tensor(f"{names[0]}.visits").tolist()
        found.append(ExpertVisits(groups=tuple(names), fit=tuple(fit), holdout=tuple(holdout)))
    return tuple(found)


def _run(
    graph: Artifact[PortableGraph], samples: Sequence[Sequence[int]], fit_samples: int, min_visits: int, work: Path
) -> None:
    """Write the statistics files of every layer that ``work`` lacks, and the head's."""
    (work / "statistics").mkdir(exist_ok=True)
    stream = LayerStream(graph.folder)
    states = HiddenStates(work, [len(sample) for sample in samples])
    if not all(is_kept(work / layer_file(layer)) for layer in range(states.layer)):
        states.start_again()  # states before a layer that is damaged are gone
    pair = _pair_norm(graph.record, stream.model.config.get_text_config())
    inputs = [torch.tensor([list(sample)]) for sample in samples]
    least = min_visits, -(-min_visits * (len(samples) - fit_samples) // fit_samples)
    stand_ins = -(-STAND_INS * min_visits // fit_samples)
    total, done = (len(stream) + 1) * len(samples), states.layer * len(samples)  # a sample through a layer
    with ProgressBar(title="calibrating", unit="sample", total=total, done=done) as progress:
        for layer in range(states.layer, len(stream)):
            groups = [group for group in graph.record.groups if layer_of(group) == layer]
            caches = {layer: _KVRange(pair)} if layer in graph.record.cached_layers else {}
            with stream.loaded(layer), _observe(stream.model, groups, caches, least, stand_ins) as observer:
                for number, tokens in enumerate(inputs):
                    with observer.sample(holdout=number >= fit_samples):
                        states.write(stream.run(layer, states.read(number), input_ids=tokens))
                    progress.update()
                _write(observer.results(), work / layer_file(layer))
            states.advance()
        outside = [group for group in graph.record.groups if layer_of(group) is None]
        with _observe(stream.model, outside, {}, least, stand_ins) as observer:
            for number, tokens in enumerate(inputs):
                with observer.sample(holdout=number >= fit_samples), suppress(_AllSeen):
                    observer.stop_early = True
                    stream.finish(states.read(number), input_ids=tokens)
                progress.update()
            _write(observer.results(), work / HEAD_FILE)


def _write(tensors: dict[str, Array], path: Path) -> None:
    partial = path.with_suffix(".partial")
    write_tensors(partial, tensors)
    keep(partial, path)


def _tokenize(tokenizer: Any, texts: Sequence[str], wanted: Calibrate) -> list[list[int]]:
    """Token ids of each sample, cut at ``calibrate.tokens``; special tokens as the tokenizer adds them."""
    if len(texts) != wanted.samples or len(texts) < 2:
        raise SourceError(
            f"{len(texts)} samples of calibration text",
            expected=f"calibrate.samples = {wanted.samples}, and at least 2: one to fit on and one held out",
            remedy="set calibrate.samples to what the data set has, or choose another data set",
        )
    tokenizer.enable_truncation(wanted.tokens)
    samples: list[list[int]] = [tokenizer.encode(text).ids for text in texts]
    first_seen: dict[tuple[int, ...], int] = {}
    for number, sample in enumerate(samples):
        if len(sample) < MIN_TOKENS:
            raise SourceError(
                f"calibration sample {number} has {len(sample)} tokens",
                expected=f"at least {MIN_TOKENS}",
                remedy="choose a column with longer text, or leave short samples out",
            )
        twin = first_seen.setdefault(tuple(sample), number)
        if twin != number:
            raise SourceError(
                f"calibration samples {twin} and {number} hold the same {len(sample)} tokens",
                expected="different samples: a repeated one weighs double, and held out it proves nothing",
                remedy="drop repeated samples before choosing",
            )
    return samples


class _KVRange:
    """Running maxima over the keys and values ``[1, H, S, D]`` of one layer; layers may differ in H and D."""

    def __init__(self, pair: Callable[[Tensor], Tensor]) -> None:
        self.pair = pair
        self.maxima: dict[str, Tensor] = {}

    def add(self, part: str, kept: Tensor) -> None:
        """``part``: key or value."""
        seen = {f"{part[0]}_absmax": kept.abs()}
        if part == "key":
            seen["k_pair_absmax"] = self.pair(kept)
        for name, magnitude in seen.items():
            largest = magnitude.amax((0, 2))
            self.maxima[name] = torch.maximum(self.maxima.get(name, largest), largest)


class _AllSeen(Exception):  # noqa: N818 - not an error: the rest of the forward pass is not needed
    """Everything watched has been seen in this sample."""


class _Observer:
    """Collects what hooks see of some groups and caches, sample by sample."""

    def __init__(
        self,
        groups: Sequence[LinearGroup],
        caches: dict[int, _KVRange],
        least_visits: tuple[int, int],
        stand_ins: int,
    ) -> None:
        self.groups = {group.name: GroupSums(group.in_features) for group in groups if not group.experts}
        self.experts = {
            group.name: ExpertSums(group.experts, group.in_features, least_visits) for group in groups if group.experts
        }
        self.stand_ins = stand_ins  # for an expert, of a sample, at most
        self.caches = caches
        self.missing: set[str] = set()
        self.holdout = False
        self.stop_early = False  # leave the model once all is seen: the matmul of the output head is not needed

    @contextmanager
    def sample(self, *, holdout: bool) -> Generator[None]:
        """One sample through what is watched."""
        self.holdout = holdout
        cached = (_cache_name(layer, part) for layer in self.caches for part in ("key", "value"))
        self.missing = {*self.groups, *self.experts, *cached}
        for sums in self.experts.values():
            sums.begin(holdout=holdout)
        yield
        if self.missing:
            raise QuantizationError(
                f"the model ran without reaching {', '.join(sorted(self.missing))}",
                expected="every linear of the exported graph, once per sample",
                remedy="export the model again; if it persists, its modules do not match its graph",
            )

    def see_inputs(self, group: str, inputs: Tensor) -> None:
        self._mark(group)
        inputs = inputs.reshape(-1, inputs.shape[-1])
        if not inputs.isfinite().all():
            raise _not_finite(f"the input of {group}", inputs)
        self.groups[group].add(inputs, holdout=self.holdout)
        if self.stop_early and not self.missing:
            raise _AllSeen

    def see_expert(self, group: str, expert: int, inputs: Tensor, weight: Tensor) -> None:
        self.missing.discard(group)
        if not inputs.isfinite().all():
            raise _not_finite(f"the input of {group}, expert {expert},", inputs)
        self.experts[group].add(expert, inputs, weight, holdout=self.holdout)

    def see_tokens(self, group: str, module: torch.nn.Module, x: Tensor, index: Tensor) -> None:
        """All tokens ``[T, H]`` of a sample, and the experts that each chose ``[T, k]``. ``group``: of what experts
        read that they have computed themselves.
        """
        sums = self.experts[group]
        for expert in sums.starved(holdout=self.holdout):
            others = torch.where((index != expert).all(1))[0]
            if count := min(len(others), self.stand_ins):
                spread = torch.arange(count) * len(others) // count
                inputs = inner_channels(module, expert, x[others[spread]])
                if not inputs.isfinite().all():
                    raise _not_finite(f"the input of {group}, expert {expert}, for tokens of others,", inputs)
                sums.add_stand_ins(expert, inputs)

    def see_cache(self, layer: int, part: str, kept: Tensor) -> Tensor:
        self._mark(_cache_name(layer, part))
        self.caches[layer].add(part, kept)
        return kept

    def results(self) -> dict[str, Array]:
        """The tensors of a statistics file; :class:`QuantizationError` names the first that is not finite."""
        tensors: dict[str, Array] = {}
        for name, sums in (self.groups | self.experts).items():
            tensors |= {f"{name}.{part}": array for part, array in sums.results().items()}
        for layer, cache in self.caches.items():
            for part, tensor in cache.maxima.items():
                if not tensor.isfinite().all():
                    raise _not_finite(f"layers.{layer}.{part}", tensor)
                tensors[f"layers.{layer}.{part}"] = tensor.numpy()
        return tensors

    def _mark(self, name: str) -> None:
        if name not in self.missing:
            raise QuantizationError(
                f"{name} was reached twice in one sample",
                expected="once: layers that share one module cannot have statistics of their own",
                remedy="choose a dense decoder without shared layers",
            )
        self.missing.remove(name)


def _not_finite(name: str, tensor: Tensor) -> QuantizationError:
    return QuantizationError(
        f"{name} holds {int((~tensor.isfinite()).sum())} values that are NaN or infinite",
        expected="finite activations in float32",
        remedy="check the source checkpoint: it computes NaN or overflows on this text",
    )


def _cache_name(layer: int, part: str) -> str:
    return f"layers.{layer}.{part}"


@contextmanager
def _observe(
    model: Any,
    groups: Sequence[LinearGroup],
    caches: dict[int, _KVRange],
    least_visits: tuple[int, int],
    stand_ins: int,
) -> Generator[_Observer]:
    observer = _Observer(groups, caches, least_visits, stand_ins)
    experts = {
        (model.get_submodule(_module_of(group)), number): group.name
        for group in groups
        for number, unit in UNITS.items()
        if group.experts and kind_of(group).startswith(unit)
    }

    def see(module: torch.nn.Module, number: int, expert: int, inputs: Tensor, weight: Tensor) -> Tensor:
        if (module, number) in experts:
            observer.see_expert(experts[module, number], expert, inputs, weight)
        return inputs

    def seen(module: torch.nn.Module, x: Tensor, index: Tensor) -> None:
        if (module, DOWN_INPUT) in experts:
            observer.see_tokens(experts[module, DOWN_INPUT], module, x, index)

    handles: list[Any] = []
    try:
        for group in groups:
            if group.experts:
                continue

            def hook(_: Any, inputs: tuple[Tensor, ...], name: str = group.name) -> None:
                observer.see_inputs(name, inputs[0])

            handles.append(_reader(model, group).register_forward_pre_hook(hook))
        with state_changed(model, observer.see_cache), experts_changed(model, see, seen) if experts else nullcontext():
            yield observer
    finally:
        for handle in handles:
            handle.remove()


def _reader(model: Any, group: LinearGroup) -> torch.nn.Module:
    """The module that reads the group's input. A tied head goes by its embedding's name, so it is asked for."""
    if group.name == "lm_head":
        return model.get_output_embeddings()
    return model.get_submodule(group.members[0].removesuffix(".weight"))


def _module_of(experts: LinearGroup) -> str:
    """The module whose parameter a group of experts is."""
    return experts.members[0].rpartition(".")[0]


def _pair_norm(graph: PortableGraph, config: Any) -> Callable[[Tensor], Tensor]:
    """``[..., D]`` keys to the norm of each channel and its rotary partner, same shape.

    Models that rotate only the first part of a head (``partial_rotary_factor``) pair channels within that part, those
    with latent attention within the last (``qk_rope_head_dim``). Where kinds of layers rotate different parts, a whole
    head is taken for both.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [of_layers for of_layers in rope.values() if isinstance(of_layers, dict)] or [rope]
    parts = {of_layers.get("partial_rotary_factor", 1.0) for of_layers in kinds}
    part = min(parts) if len(parts) == 1 else 1.0
    last = getattr(config, "qk_rope_head_dim", 0)

    def norm(key: Tensor) -> Tensor:
        size = key.shape[-1]
        rotated = last or int(size * part)
        first = size - last if last else 0
        channel = torch.arange(rotated)
        partner = torch.arange(size)
        if graph.rotary == "half":
            partner[first : first + rotated] = first + (channel + rotated // 2) % rotated
        elif graph.rotary == "interleaved":
            partner[first : first + rotated] = first + (channel ^ 1)
        alone = partner == torch.arange(size)
        return torch.where(alone, key.abs(), torch.hypot(key, key[..., partner]))

    return norm
