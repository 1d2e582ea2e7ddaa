"""Calibrate: run samples of text through the float checkpoint and keep what quantization needs to know of it.

Statistics are sums, updated sample by sample, so memory does not grow with the text. It grows with the square of the
channels, so at most ``calibrate.layers_per_pass`` layers are watched at once; the next pass reads the samples again.

B, S  batch (1) and tokens of a sample      K  input channels of a group      H, D  KV heads and head size
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from quantization.attention_hook import kv_function
from quantization.calibration import (
    SAMPLES_FILE,
    Calibration,
    CalibrationSample,
    layer_file,
    sample_hash,
    samples_hash,
    statistics_file,
)
from tapeout import artifact
from tapeout.artifact import Artifact
from tapeout.errors import QuantizationError, SourceError
from tapeout.portable_graph import LinearGroup, PortableGraph
from tapeout.recipe import Calibrate

MIN_TOKENS = 8
GRAM_BLOCK = 256  # a Gram matrix is summed in row blocks from the diagonal on: 5/8 of the work at 1,024 channels


def calibrate(
    settings: Calibrate, graph: Artifact[PortableGraph], texts: Sequence[str], folder: Path
) -> Artifact[Calibration]:
    """Write the Calibration of ``graph`` over exactly ``calibrate.samples`` texts; see calibration.py for its content.

    :class:`SourceError` for samples that are too few, too short or repeated, :class:`QuantizationError` for a model
    that computes NaN or infinity or does not reach one of its linears.
    """
    from transformers import AutoModelForCausalLM

    if settings.tokens > graph.record.max_positions:
        raise QuantizationError(
            f"calibrate.tokens is {settings.tokens}, and the graph has {graph.record.max_positions} positions",
            expected="samples that fit the model",
            remedy=f"lower calibrate.tokens to at most {graph.record.max_positions}",
        )
    tokenizer: Any = Tokenizer.from_file(str(graph.folder / "tokenizer.json"))  # as engines encode
    samples = _tokenize(tokenizer, texts, settings)
    fit_samples = len(samples) - settings.holdout_samples
    model: Any = AutoModelForCausalLM.from_pretrained(graph.folder, dtype=torch.float32).eval()
    passes = list(_passes(graph.record, settings.layers_per_pass))
    described = [
        CalibrationSample(sample_hash=sample_hash(sample), tokens=len(sample), holdout=i >= fit_samples)
        for i, sample in enumerate(samples)
    ]
    with artifact.create(folder, Calibration) as draft, Progress(*Progress.get_default_columns()) as progress:
        (draft.folder / "statistics").mkdir()
        task = progress.add_task("calibrating", total=len(passes) * len(samples))
        written: list[str] = []
        for watched in passes:
            with _observe(model, graph.record, watched) as observer:
                for number, sample in enumerate(samples):
                    observer.read(sample, holdout=number >= fit_samples)
                    progress.advance(task)
            for file in watched.files:
                save_file(observer.results(file), draft.folder / file)
                written.append(file)
        (draft.folder / SAMPLES_FILE).write_text("".join(sample.model_dump_json() + "\n" for sample in described))
        record = Calibration(
            samples_hash=samples_hash(described),
            samples=len(samples),
            holdout_samples=len(samples) - fit_samples,
            tokens_per_sample=settings.tokens,
            tokens=sum(map(len, samples)),
            layers=graph.record.layers,
            statistics=tuple(sorted(written)),
            versions={name: version(name) for name in ("torch", "transformers", "tokenizers")},
        )
        draft.finish(record, parents={"graph": graph})
    return artifact.load(folder, Calibration)


@dataclass(frozen=True)
class _Watched:
    """What one pass over the samples keeps statistics of."""

    files: tuple[str, ...]
    layers: frozenset[int]
    groups: tuple[LinearGroup, ...]


def _passes(graph: PortableGraph, layers_per_pass: int) -> Iterator[_Watched]:
    """Runs of neighbouring layers; what lies outside the layers (the output head) joins the last."""
    for start in range(0, graph.layers, layers_per_pass):
        layers = range(start, min(start + layers_per_pass, graph.layers))
        files = [layer_file(layer) for layer in layers]
        if layers.stop == graph.layers:
            files += sorted({statistics_file(group.name) for group in graph.groups} - _layer_files(graph))
        groups = tuple(group for group in graph.groups if statistics_file(group.name) in files)
        yield _Watched(tuple(files), frozenset(layers), groups)


def _layer_files(graph: PortableGraph) -> set[str]:
    return {layer_file(layer) for layer in range(graph.layers)}


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


class _GroupSums:
    """Running sums over the inputs ``[S, K]`` of one linear group."""

    def __init__(self, channels: int) -> None:
        self.gram = torch.zeros(channels, channels)
        self.gram_holdout = torch.zeros(channels, channels)
        self.abs_sum = torch.zeros(channels, dtype=torch.float64)
        self.abs_max = torch.zeros(channels)
        self.tokens = self.holdout_tokens = 0

    def add(self, inputs: Tensor, *, holdout: bool) -> None:
        if holdout:
            _add_upper(self.gram_holdout, inputs)
            self.holdout_tokens += len(inputs)
            return
        _add_upper(self.gram, inputs)
        magnitude = inputs.abs()
        self.abs_sum += magnitude.sum(0, dtype=torch.float64)
        torch.maximum(self.abs_max, magnitude.amax(0), out=self.abs_max)
        self.tokens += len(inputs)

    def results(self) -> dict[str, Tensor]:
        """The means; the sums are used up."""
        return {
            "gram": _mirror(self.gram.div_(self.tokens)),
            "gram_holdout": _mirror(self.gram_holdout.div_(self.holdout_tokens)),
            "mean_abs": (self.abs_sum / self.tokens).float(),
            "max_abs": self.abs_max,
        }


def _add_upper(gram: Tensor, inputs: Tensor) -> None:
    """Add ``inputsᵀ inputs`` to the upper triangle of ``gram [K, K]``, in whole blocks; below it is left undefined."""
    for start in range(0, len(gram), GRAM_BLOCK):
        gram[start : start + GRAM_BLOCK, start:].addmm_(inputs[:, start : start + GRAM_BLOCK].T, inputs[:, start:])


def _mirror(gram: Tensor) -> Tensor:
    return gram.triu_().add_(gram.triu(1).T)


class _KVRange:
    """Running maxima over the keys and values ``[1, H, S, D]`` of one layer; layers may differ in H and D."""

    def __init__(self, pair: Callable[[Tensor], Tensor]) -> None:
        self.pair = pair
        self.maxima: dict[str, Tensor] = {}

    def add(self, key: Tensor, value: Tensor) -> None:
        seen = {"k_absmax": key.abs(), "v_absmax": value.abs(), "k_pair_absmax": self.pair(key)}
        for name, magnitude in seen.items():
            largest = magnitude.amax((0, 2))
            self.maxima[name] = torch.maximum(self.maxima.get(name, largest), largest)


class _AllSeen(Exception):  # noqa: N818 - not an error: the rest of the forward pass is not needed
    """Everything watched has been seen in this sample."""


class _Observer:
    """Feeds samples to the model and collects what its hooks see."""

    def __init__(self, model: Any, graph: PortableGraph, watched: _Watched) -> None:
        self.model, self.watched = model, watched
        pair = _pair_norm(graph, model.config.get_text_config())
        self.groups = {group.name: _GroupSums(group.in_features) for group in watched.groups}
        self.caches = {layer: _KVRange(pair) for layer in sorted(watched.layers)}
        self.missing: set[str] = set()
        self.holdout = False

    def read(self, sample: Sequence[int], *, holdout: bool) -> None:
        self.holdout = holdout
        self.missing = {*self.groups, *(_cache_name(layer) for layer in self.caches)}
        try:
            with torch.inference_mode():
                self.model(input_ids=torch.tensor([sample]), use_cache=False)
        except _AllSeen:
            return
        raise QuantizationError(
            f"the model ran without reaching {', '.join(sorted(self.missing))}",
            expected="every linear of the exported graph, once per sample",
            remedy="export the model again; if it persists, its modules do not match its graph",
        )

    def see_inputs(self, group: str, inputs: Tensor) -> None:
        self._mark(group)
        self.groups[group].add(inputs.reshape(-1, inputs.shape[-1]), holdout=self.holdout)
        self._stop_early()

    def see_cache(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.caches:
            self._mark(_cache_name(layer))
            self.caches[layer].add(key, value)
            self._stop_early()
        return key, value

    def results(self, file: str) -> dict[str, Tensor]:
        """The tensors of one statistics file; :class:`QuantizationError` names the layer of one that is not finite."""
        tensors: dict[str, Tensor] = {}
        for name, sums in self.groups.items():
            if statistics_file(name) == file:
                tensors |= {f"{name}.{part}": tensor for part, tensor in sums.results().items()}
        for layer, cache in self.caches.items():
            if layer_file(layer) == file:
                tensors |= {f"layers.{layer}.{part}": tensor for part, tensor in cache.maxima.items()}
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise QuantizationError(
                    f"{name} holds {int((~tensor.isfinite()).sum())} values that are NaN or infinite",
                    expected="finite activations in float32",
                    remedy="check the source checkpoint: it computes NaN or overflows on this text",
                )
        return tensors

    def _mark(self, name: str) -> None:
        if name not in self.missing:
            raise QuantizationError(
                f"{name} was reached twice in one sample",
                expected="once: layers that share one module cannot have statistics of their own",
                remedy="choose a dense decoder without shared layers",
            )
        self.missing.remove(name)

    def _stop_early(self) -> None:
        """Skip what follows the last watched input: layers of the next pass, or the matmul of the output head."""
        if not self.missing:
            raise _AllSeen


def _cache_name(layer: int) -> str:
    return f"layers.{layer}.kv_cache"


@contextmanager
def _observe(model: Any, graph: PortableGraph, watched: _Watched) -> Generator[_Observer]:
    observer = _Observer(model, graph, watched)
    handles: list[Any] = []
    try:
        for group in watched.groups:
            module = _reader(model, group)

            def hook(_: Any, inputs: tuple[Tensor, ...], name: str = group.name) -> None:
                observer.see_inputs(name, inputs[0])

            handles.append(module.register_forward_pre_hook(hook))
        with kv_function(model, observer.see_cache):
            yield observer
    finally:
        for handle in handles:
            handle.remove()


def _reader(model: Any, group: LinearGroup) -> torch.nn.Module:
    """The module that reads the group's input. A tied head goes by its embedding's name, so it is asked for."""
    if group.name == "lm_head":
        return model.get_output_embeddings()
    return model.get_submodule(group.members[0].removesuffix(".weight"))


def _pair_norm(graph: PortableGraph, config: Any) -> Callable[[Tensor], Tensor]:
    """``[..., D]`` keys to the norm of each channel and its rotary partner, same shape.

    Models that rotate only the first part of a head (``partial_rotary_factor``) pair channels within that part, those
    with latent attention within the last (``qk_rope_head_dim``).
    """
    part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)

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
