"""Which formats `tapeout gate` writes, and where. Without ``--format``, the environment says which CI it runs in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evals.ci.comment import comment
from evals.ci.document import document
from evals.ci.github import outputs
from evals.ci.gitlab import code_quality, metrics
from evals.ci.junit import junit
from evals.ci.markdown import SUMMARY_BYTES, summary
from evals.ci.result import CiError, GateResult
from evals.ci.sarif import sarif

GITHUB, NONE, COMMENT = "github", "none", "comment"


@dataclass(frozen=True)
class ReportFormat:
    file: str
    text: Callable[[GateResult], str]


def verdict_json(result: GateResult) -> str:
    return json.dumps(document(result.model, None, result.verdict, result.digest), indent=1, allow_nan=False) + "\n"


def statement_json(result: GateResult) -> str:
    return json.dumps(result.statement.model_dump(mode="json", by_alias=True), indent=1) + "\n"


FORMATS: Mapping[str, ReportFormat] = {
    "json": ReportFormat("verdict.json", verdict_json),
    "markdown": ReportFormat("summary.md", summary),
    "junit": ReportFormat("junit.xml", junit),
    "gitlab-metrics": ReportFormat("metrics.txt", metrics),
    "gitlab-quality": ReportFormat("gl-code-quality-report.json", code_quality),
    "sarif": ReportFormat("tapeout.sarif", sarif),
    "intoto": ReportFormat("statement.json", statement_json),
    COMMENT: ReportFormat("comment.md", comment),
}
# By the variable that a CI system sets in every job.
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "GITHUB_ACTIONS": (GITHUB, "json", "junit", "sarif", "intoto"),
    "GITLAB_CI": ("json", "markdown", "junit", "gitlab-metrics", "gitlab-quality", "intoto"),
    "JENKINS_URL": ("json", "markdown", "junit", "intoto"),
    "BUILDKITE": ("json", "markdown", "junit", "intoto"),
}


def chosen(asked: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The formats that were asked for, or else those of the CI system; :class:`CiError` for one that is not known.

    >>> chosen([], {"JENKINS_URL": "http://ci"}), chosen(["sarif"], {"JENKINS_URL": "http://ci"}), chosen([], {})
    (('json', 'markdown', 'junit', 'intoto'), ('sarif',), ())
    """
    if unknown := [name for name in asked if name not in (GITHUB, NONE, *FORMATS)]:
        raise CiError(
            f"there is no format {unknown[0]!r}", expected=f"--format with {', '.join((GITHUB, *FORMATS))} or none"
        )
    if asked:
        return tuple(name for name in dict.fromkeys(asked) if name != NONE)
    return next((formats for variable, formats in SYSTEMS.items() if environment.get(variable)), ())


def write(result: GateResult, formats: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[Path]:
    """Write the files of all ``formats``, each whole or not at all. For GitHub, append to the files that it names."""
    written = [_replace(folder / FORMATS[name].file, FORMATS[name].text(result)) for name in formats if name in FORMATS]
    if GITHUB in formats:
        if path := environment.get("GITHUB_STEP_SUMMARY"):
            left = SUMMARY_BYTES - (Path(path).stat().st_size if Path(path).exists() else 0)
            if len((text := summary(result, left)).encode()) <= left:  # else GitHub would drop what is there, too
                _append(Path(path), text)
        if path := environment.get("GITHUB_OUTPUT"):
            _append(Path(path), outputs(result))
    return written


def _replace(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        if partial.is_file():
            partial.unlink()
        raise _not_written(path, error) from error
    return path


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: Path, error: OSError) -> CiError:
    return CiError(
        f"cannot write {path}: {error.strerror}",
        expected="a folder for the files that CI reads",
        remedy="choose another with --out, or free disk space",
    )
