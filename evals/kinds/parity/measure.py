"""Parity: does the engine compute what the quantized checkpoint it was built from says?

Judged with every linear of the reference locked to what the engine returned for it, so that each is held to its own
work (quantization/reference.py says why), and attention, too, where the engine computes it in 16 bits; both running
freely is kept beside it. The engine and the reference are
plain functions here, so this module needs neither torch nor the checkpoint format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engines.protocol import FloatArray, IntArray
from evals.kind import Context, ReferenceModel
from evals.kinds.parity import KIND, ParityItem, ParityReport, ParitySettings
from evals.kinds.parity.embedding import HeadRows, embedding_error
from evals.kinds.parity.reference_logits import REFERENCE_FILE, ReferenceLogits
from evals.kinds.text import HeldOutSettings
from evals.text import joined, kl_divergences, token_hash
from tapeout.artifact import Artifact, Parents
from tapeout.errors import EvidenceError
from tapeout.fingerprint import Fingerprint
from tapeout.progress import ProgressBar
from tapeout.state import LayerState, Recurrent

if TYPE_CHECKING:
    from engines.target import Probe

TINY = 1e-30


def measure(context: Context, folder: Path) -> None:
    """The stage of `evals/kinds/parity/`."""
    text, count = context.section(HeldOutSettings), context.section(ParitySettings).parity_documents
    quantized, reference = context.reference()
    texts = context.encode(context.heldout_texts(text.documents)[:count])
    candidate = context.bundle("candidate")
    parity(
        context.probe(),
        reference,
        [ids[: text.document_tokens] for ids in texts],
        folder,
        max_tokens=candidate.record.io.max_tokens,
        head=context.head(),
        candidate=candidate.digest,
        built_from=quantized.digest,
        executed_on=context.executed_on(),
        parents={"candidate": candidate, "quantized": quantized},
        state=candidate.record.io.state,
    )


def parity(
    probe: Probe,
    reference: ReferenceModel,
    documents: Sequence[Sequence[int]],
    folder: Path,
    *,
    max_tokens: int,
    head: str,
    candidate: str,
    built_from: str,
    executed_on: Fingerprint,
    parents: Parents,
    state: Sequence[LayerState] = (),
) -> Artifact[ParityReport]:
    """Write the ParityReport; ``head``: the output head's parameter; ``candidate``, ``built_from``: digests.

    ``state``: of the candidate's layers.

    ``max_tokens``: positions of the engine; all documents joined to one of that length are compared, too.
    """
    rows, logits = HeadRows(), ReferenceLogits()
    items = compare(probe, reference, documents, head=head, rows=rows, logits=logits)
    whole = [joined(documents, max_tokens)]
    items += compare(probe, reference, whole, head=head, rows=rows, logits=logits, free=False)
    embedding = embedding_error(probe.embedding(), reference.embedding())
    record = ParityReport(
        candidate=candidate,
        built_from=built_from,
        documents=len(items),
        vocabulary=rows.vocabulary,
        max_tokens=max_tokens,
        attention=tuple(items[0].attention_errors),
        states=tuple(items[0].state_errors),
        half_states=half_states(state),
        experts={name: len(visits) for name, visits in items[0].visits.items()},
        embedding=embedding,
        head=rows.error(),
        executed_on=executed_on,
    )
    return KIND.write(
        folder,
        record,
        parents=parents,
        items=items,
        metrics=parity_metrics(items),
        add_files=lambda draft: logits.save(draft / REFERENCE_FILE),
    )


def half_states(state: Sequence[LayerState]) -> tuple[str, ...]:
    """Names of recurrent state in bfloat16, as a probe has them."""
    recurrent = [one for one in state if isinstance(one, Recurrent)]
    return tuple(f"{o.layer}.{tensor.name}" for o in recurrent for tensor in o.tensors if tensor.dtype == "bfloat16")


def compare(
    probe: Probe,
    reference: ReferenceModel,
    documents: Sequence[Sequence[int]],
    *,
    head: str,
    rows: HeadRows | None = None,
    logits: ReferenceLogits | None = None,
    free: bool = True,
) -> list[ParityItem]:
    """KL(reference || engine) in nats and top-token agreement at every position of every document.

    ``probe(tokens)`` gives the engine's logits ``[S, V]`` and each linear's output. The output head is not locked: its
    logits are what is compared, and what is added to ``rows`` and ``logits``. ``free``: compare both running freely,
    too.
    :class:`EvidenceError` when there is nothing to compare, when shapes differ, or when
    a logit is not finite.
    """
    if not documents:
        raise EvidenceError(
            "no documents to compare", expected="at least one", remedy="check data.source and evaluate.documents"
        )
    return [
        _compare_document(probe, reference, tokens, head, rows, logits, free)
        for tokens in ProgressBar(documents, title="parity", unit="document")
    ]


def parity_metrics(items: Sequence[ParityItem]) -> dict[str, float]:
    """Flat numbers for ``dvc metrics``."""
    tokens = sum(item.tokens for item in items)
    free = [item for item in items if item.free_kl_sum is not None]
    freely = sum(item.tokens for item in free)
    return {
        "kl": sum(item.kl_sum for item in items) / tokens,
        "top_token": sum(item.agree for item in items) / tokens,
        "worst_error": max(item.worst_error for item in items),
        "position_error": max(item.position_error for item in items),
        "free_kl": sum(item.free_kl_sum or 0.0 for item in free) / max(freely, 1),
        "free_top_token": sum(item.free_agree or 0 for item in free) / max(freely, 1),
    }


def _compare_document(
    probe: Probe,
    reference: ReferenceModel,
    tokens: Sequence[int],
    head: str,
    rows: HeadRows | None,
    logits: ReferenceLogits | None,
    free: bool,
) -> ParityItem:
    actual, outputs = probe(tokens)
    teacher_forced, errors = reference.teacher_forced(
        tokens, {name: value for name, value in outputs.items() if name != head}, probe.attention()
    )
    attention = reference.attention_errors()
    chosen, experts = probe.choices(), reference.experts()
    visits = {
        name: tuple(np.bincount(found.ravel(), minlength=experts[name]).tolist())
        for name, found in reference.choices().items()
    }
    routed = _same_choices(chosen, reference.choices())
    del outputs
    _require_comparable(actual, teacher_forced, len(tokens))
    _require_errors(errors)
    _require_finite(attention, "attention before ")
    kl, agree = (
        kl_divergences(teacher_forced, actual),
        int((teacher_forced.argmax(axis=1) == actual.argmax(axis=1)).sum()),
    )
    if rows is not None:
        rows.add(teacher_forced, actual)
    del teacher_forced  # before more is allocated: as large as `actual`
    if logits is not None:
        logits.add(tokens, actual)
    position = max(errors, key=lambda name: errors[name][1])
    item = ParityItem(
        doc_hash=token_hash(tokens),
        tokens=len(tokens),
        kl_sum=float(kl.sum()),
        kl_max=float(kl.max()),
        agree=agree,
        errors={name: whole for name, (whole, _) in errors.items()},
        attention_errors={name: whole for name, (whole, _) in attention.items()},
        attention_position_error=max((worst for _, worst in attention.values()), default=0.0),
        state_errors=_state_errors(probe.states(), reference.states()),
        state_kl_sum=_state_kl(reference, tokens),
        visits=visits,
        routed=routed,
        position_error=errors[position][1],
        position_linear=position,
    )
    if not free:
        return item
    unlocked = reference(tokens)
    _require_comparable(actual, unlocked, len(tokens))
    return item.model_copy(
        update={
            "free_kl_sum": float(kl_divergences(unlocked, actual).sum()),
            "free_agree": int((unlocked.argmax(axis=1) == actual.argmax(axis=1)).sum()),
            "free_routed": _same_choices(chosen, reference.choices()),
        }
    )


def _same_choices(actual: Mapping[str, IntArray], expected: Mapping[str, IntArray]) -> dict[str, int]:
    """By layer, for how many tokens both chose the same experts ``[S, k]``, in any order."""
    if actual.keys() != expected.keys():
        raise EvidenceError(
            f"the engine shows the choices of {len(actual)} layers with experts, the reference has {len(expected)}",
            expected="the choices of every layer, in both",
            remedy="build the bundle again: its record names the experts",
        )
    return {name: _same_rows(np.sort(actual[name]), np.sort(own)) for name, own in expected.items()}


def _same_rows(actual: IntArray, expected: IntArray) -> int:
    return int((actual == expected).all(axis=1).sum()) if actual.shape == expected.shape else 0


def _state_kl(reference: ReferenceModel, tokens: Sequence[int]) -> float | None:
    """What states of fewer bits cost, in nats; None where there are none."""
    if (found := reference.state_rounding(tokens)) is None:
        return None
    for logits in found:
        _require_comparable(logits, logits, len(tokens))
    return float(kl_divergences(*found).sum())


def _state_errors(found: Mapping[str, FloatArray], expected: Mapping[str, Sequence[FloatArray]]) -> dict[str, float]:
    """Of each recurrent state, the root mean square of its error over that of the state.

    Given the same outputs of linears, both compute it in float32. A name has a number where a layer has several states
    of it.
    """
    left = {name: iter(states) for name, states in expected.items()}
    errors: dict[str, float] = {}
    for name, state in found.items():
        own = next(left.get(name.rpartition(".")[2].rstrip("0123456789"), iter(())), None)
        if own is None or own.shape != state.shape:
            raise EvidenceError(
                f"{name} is {state.shape} in the engine and {None if own is None else own.shape} in the reference",
                expected="the recurrent state of every layer, in both",
                remedy="report the model: its state cannot be compared",
            )
        off, size = (float(np.square(values, dtype=np.float64).sum()) for values in (state - own, own))
        errors[name] = math.sqrt(off / max(size, TINY))
    return errors


def _require_errors(errors: Mapping[str, tuple[float, float]]) -> None:
    """A linear that the reference cannot compute does not show in the logits: the engine's output replaces it there."""
    if not errors:
        raise EvidenceError(
            "the engine's graph has no linear to compare but the output head",
            expected="the output of every linear",
            remedy="build the bundle again: its record names the linears",
        )
    _require_finite(errors)


def _require_finite(errors: Mapping[str, tuple[float, float]], what: str = "") -> None:
    for name, (whole, worst) in errors.items():
        if not (math.isfinite(whole) and math.isfinite(worst)):
            raise EvidenceError(
                f"the error of {what}{name} is {whole}, {worst} at the worst position",
                expected="finite outputs of the engine and of the reference",
                remedy="`tapeout inspect` shows the scales and kernels; then quantize and build again",
            )


def _require_comparable(actual: FloatArray, expected: FloatArray, tokens: int) -> None:
    if actual.shape != expected.shape or len(actual) != tokens:
        raise EvidenceError(
            f"{actual.shape} logits from the engine, {expected.shape} from the reference for {tokens} tokens",
            expected="one row per token over the same vocabulary",
            remedy="build the engine from the quantized model it is compared with",
        )
    for who, logits in (("engine", actual), ("reference", expected)):
        if not np.isfinite(logits).all():
            bad = int(np.flatnonzero(~np.isfinite(logits).all(axis=1))[0])
            raise EvidenceError(
                f"the {who} returned NaN or infinite logits at position {bad}",
                expected="finite float32 logits",
                remedy="`tapeout inspect` shows the scales and kernels; then quantize and build again",
            )
