"""Errors a user can act on. Every message says what was found, what was expected, and what to do.

``TapeoutError`` is the only exception the command line turns into one line instead of a traceback.

    TapeoutError            exit 2
      RecipeError           params.yaml cannot be read or is invalid
      SourceError           a checkpoint or data set cannot be fetched or does not match its pin
      ArtifactError         an artifact is missing, half-written, changed or of the wrong kind
      ModelError            a model cannot be run layer by layer
      ExportError           a model cannot be exported
      QuantizationError     quantization produced something that is not a quantized model
      BuildError            a graph cannot be lowered to a target
      FingerprintError      a bundle was built for other hardware or libraries
      EvidenceError         reports are empty, unequal, non-finite or of another engine
      RegistryError         the registry refused, or another process changed it
      SignatureError        a signature is missing, forged or about something else, or a key cannot be used
      ResourceError         too little disk or memory for a stage
      RequestError          a generation request is invalid, too long or got broken logits
"""

from __future__ import annotations

import re
from enum import IntEnum


class ExitCode(IntEnum):
    """What the ``tapeout`` command returns to a shell or CI job."""

    PASS = 0
    GATE_FAILED = 1
    BROKEN = 2
    INCONCLUSIVE = 3


class TapeoutError(Exception):
    """One clear message in three parts; any part may be empty.

    >>> print(TapeoutError("no record.json in x", expected="a finished export", remedy="run `dvc repro export`"))
    no record.json in x
      expected: a finished export
      remedy:   run `dvc repro export`
    """

    def __init__(self, found: str, *, expected: str = "", remedy: str = "") -> None:
        self.found, self.expected, self.remedy = found, expected, remedy
        lines = [found]
        if expected:
            lines.append(f"  expected: {expected}")
        if remedy:
            lines.append(f"  remedy:   {remedy}")
        super().__init__("\n".join(lines))


def one_line(error: Exception, limit: int = 600) -> str:
    """An error for a log, or inside another message: without terminal colors and line breaks, and not endless.

    >>> one_line(ValueError("\\x1b[1mbad\\x1b[0m\\n  file"))
    'bad file'
    >>> one_line(TapeoutError("top_p is 2", expected="at most 1", remedy="send less"))
    'top_p is 2; expected: at most 1; send less'
    """
    text = str(error)
    if isinstance(error, TapeoutError):
        expected = f"expected: {error.expected}" if error.expected else ""
        text = "; ".join(part for part in (error.found, expected, error.remedy) if part)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]} …"


class RecipeError(TapeoutError): ...


class SourceError(TapeoutError): ...


class ArtifactError(TapeoutError): ...


class ModelError(TapeoutError): ...


class ExportError(TapeoutError): ...


class QuantizationError(TapeoutError): ...


class BuildError(TapeoutError): ...


class FingerprintError(TapeoutError): ...


class EvidenceError(TapeoutError): ...


class RegistryError(TapeoutError): ...


class SignatureError(TapeoutError): ...


class ResourceError(TapeoutError): ...


class DeviceError(TapeoutError):
    """A GPU or its driver failed while an engine ran."""


class RequestError(TapeoutError): ...
