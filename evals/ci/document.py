"""``verdict.json``: the verdict as programs read it, and the JSON Schema of it in docs/verdict.schema.json.

`python -m evals.ci.document` writes the schema again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from evals.verdict import Verdict
from tapeout.artifact import Frozen

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "verdict.schema.json"


class Heading(Frozen):
    """What a document says besides the fields of the verdict."""

    schema_version: int
    model: str = Field(description="Registered name of the model")
    version: int | None = Field(description="Version in the registry; null before it is registered")
    digest: str = Field(description="Of the verdict")
    exit_code: int = Field(description="Of `tapeout gate`: 0 PASS, 1 FAIL, 3 INCONCLUSIVE")
    headline: str = Field(description="Why the outcome is what it is, in one sentence")


def document(model: str, version: int | None, verdict: Verdict, digest: str) -> dict[str, Any]:
    heading = Heading(
        schema_version=verdict.schema_version,
        model=model,
        version=version,
        digest=digest,
        exit_code=verdict.exit_code,
        headline=verdict.headline,
    )
    return heading.model_dump(mode="json") | verdict.model_dump(mode="json")


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of :func:`document`."""
    heading, verdict = (model.model_json_schema(mode="serialization") for model in (Heading, Verdict))
    return verdict | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:tapeout:verdict:{Verdict.schema_version}",
        "title": "Verdict",
        "description": "Written by `tapeout gate --json` and `--format json`; answered by GET /verdict/NAME/VERSION",
        "properties": heading["properties"] | verdict["properties"],
        "required": [*heading["required"], *verdict["required"]],
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text())
