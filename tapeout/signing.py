"""Signed statements about a bundle: in-toto statements in DSSE envelopes, kept as Sigstore bundles beside it.

The verdict (https://in-toto.io/attestation/test-result/v0.1) is about the sha256 of the bundle's ``record.json``,
which holds the sha256 of every other file. It names verdict and evidence by digest, so one signature covers them too.
The model signature (OpenSSF model signing, https://github.com/sigstore/model-transparency) lists every file of the
bundle: it says nothing about quality, and tools that know nothing of Tapeout verify it.
Keys are ECDSA over P-256 in PEM files; the signature is ECDSA with SHA-256 over the envelope's pre-authentication
encoding (https://github.com/secure-systems-lab/dsse). ``cryptography`` is imported when a key is used, and only then.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from tapeout.artifact import RECORD, Artifact, Frozen, canonical_json
from tapeout.errors import SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

PRIVATE_KEY, PUBLIC_KEY = "TAPEOUT_PRIVATE_KEY", "TAPEOUT_PUBLIC_KEY"  # environment variables: paths of PEM files
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
MODEL_SIGNATURE = "https://model_signing/signature/v1.0"
SIGSTORE_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_REMEDY = "sign it: `tapeout register --key tapeout.key`, or `tapeout gate --key tapeout.key`"


class SubjectDigest(Frozen):
    sha256: str


class Resource(Frozen):
    """An in-toto resource descriptor: a name, and the sha256 of what it stands for."""

    name: str
    digest: SubjectDigest


class TestResult(Frozen):
    """The predicate. ``result`` is FAILED unless every check passed; ``outcome`` tells FAIL from INCONCLUSIVE."""

    __test__ = False  # not a test for pytest

    result: Literal["PASSED", "FAILED"]
    configuration: tuple[Resource, ...]  # the policy that it was judged by
    passedTests: tuple[str, ...]  # noqa: N815 (the format's own names)
    failedTests: tuple[str, ...]  # noqa: N815
    outcome: str
    executed_on: str | None  # hardware and level of the evidence
    model: str  # the registered model that it was judged for
    bundle: str  # digests, as records have them
    verdict: str
    evidence: dict[str, str]
    facts: dict[str, float] = Field(
        default_factory=dict
    )  # what was measured, beside the checks; a level's evidence has none


class Statement(Frozen):
    type_: Literal["https://in-toto.io/Statement/v1"] = Field(default=STATEMENT, alias="_type")
    subject: tuple[Resource, ...]
    predicateType: Literal["https://in-toto.io/attestation/test-result/v0.1"] = TEST_RESULT  # noqa: N815
    predicate: TestResult


class SignedFile(Frozen):
    name: str
    algorithm: Literal["sha256"] = "sha256"
    digest: str


class Serialization(Frozen):
    """How the verifier hashes the folder: every file by itself, nothing left out."""

    method: Literal["files"] = "files"
    hash_type: Literal["sha256"] = "sha256"
    allow_symlinks: Literal[False] = False
    ignore_paths: tuple[str, ...] = ()


class ModelFiles(Frozen):
    serialization: Serialization = Serialization()
    resources: tuple[SignedFile, ...]


class ModelStatement(Frozen):
    type_: Literal["https://in-toto.io/Statement/v1"] = Field(default=STATEMENT, alias="_type")
    subject: tuple[Resource, ...]
    predicateType: Literal["https://model_signing/signature/v1.0"] = MODEL_SIGNATURE  # noqa: N815
    predicate: ModelFiles


S = TypeVar("S", Statement, ModelStatement)


def model_statement(bundle: Artifact[Any]) -> ModelStatement:
    """Every file of a bundle with its sha256, as recorded. The subject's digest is over the files' digests, by name."""
    digests = {name: entry.sha256 for name, entry in bundle.files.items()}
    digests[RECORD] = record_resource(bundle.folder).digest.sha256
    files = tuple(SignedFile(name=name, digest=digests[name]) for name in sorted(digests))
    whole = hashlib.sha256(b"".join(bytes.fromhex(file.digest) for file in files)).hexdigest()
    subject = Resource(name=f"sha256-{bundle.digest}", digest=SubjectDigest(sha256=whole))
    return ModelStatement(subject=(subject,), predicate=ModelFiles(resources=files))


def signature_path(folder: Path) -> Path:
    """Of the verdict. Beside an artifact, not in it: an artifact holds only what its record lists."""
    return folder.with_name(f"{folder.name}.sigstore.json")


def model_signature_path(folder: Path) -> Path:
    """Of the files: what ``model_signing verify key FOLDER --signature PATH --public_key KEY`` reads."""
    return folder.with_name(f"{folder.name}.model.sig")


def write_signature(path: Path, text: str) -> None:
    """Write what :func:`sign` gave, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        raise SignatureError(
            f"cannot write {path}: {error.strerror}", remedy="free disk space or fix the permissions"
        ) from error


def key_from_environment(name: str) -> Path | None:
    return Path(value) if (value := os.environ.get(name)) else None


def generate_keys(private: Path, public: Path) -> None:
    """Write a new pair of keys; neither file may exist. Only its owner can read the private one."""
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    for path in (private, public):
        if path.exists() or path.is_symlink():
            raise SignatureError(f"{path} exists", expected="new files", remedy="choose another --out, or remove it")
    key = ec.generate_private_key(ec.SECP256R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    shown = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        for path, content, mode in ((private, secret, 0o600), (public, shown, 0o644)):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
                stream.write(content)
    except OSError as error:
        raise SignatureError(
            f"cannot write {private} and {public}: {error.strerror}", remedy="choose another --out"
        ) from error


def sign(statement: Statement | ModelStatement, private_key: Path) -> str:
    """The signed statement as the text of a Sigstore bundle."""
    key = _private_key(private_key)
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    payload = canonical_json(statement.model_dump(mode="json", by_alias=True))
    signature = key.sign(_encode(PAYLOAD_TYPE, payload), ec.ECDSA(hashes.SHA256()))
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
    }
    bundle = {
        "mediaType": SIGSTORE_BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": _hint(key.public_key())}, "tlogEntries": []},
        "dsseEnvelope": envelope,
    }
    return json.dumps(bundle, indent=1) + "\n"


def _require_cryptography() -> None:
    if find_spec("cryptography") is None:
        raise SignatureError(
            "the package cryptography is not installed",
            expected="it beside tapeout, where a key is given",
            remedy="pip install 'tapeout[signing]'",
        )


def verify_signature(path: Path, public_key: Path, kind: type[S]) -> S:
    """The statement in a signed file. :class:`SignatureError` if it is missing, malformed, or by another key.

    Nothing of the payload is parsed before its signature has been verified.
    """
    key = _public_key(public_key)
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    if not path.is_file():
        raise SignatureError(f"no signature at {path}", expected=f"one by {public_key}", remedy=_REMEDY)
    try:
        envelope: Any = json.loads(path.read_bytes())["dsseEnvelope"]
        payload_type, payload = envelope["payloadType"], base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(entry["sig"], validate=True) for entry in envelope["signatures"]]
    except (OSError, ValueError, KeyError, TypeError, binascii.Error) as error:
        raise SignatureError(
            f"{path} is not a signature: {error}", expected="a Sigstore bundle with a DSSE envelope", remedy=_REMEDY
        ) from error
    if payload_type != PAYLOAD_TYPE or len(signatures) != 1:
        raise SignatureError(
            f"{path} has {len(signatures)} signatures of {payload_type}",
            expected=f"one of {PAYLOAD_TYPE}",
            remedy=_REMEDY,
        )
    try:
        key.verify(signatures[0], _encode(payload_type, payload), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise SignatureError(
            f"{path} is not signed by {public_key}, or was changed since",
            expected=f"a signature by the key {_hint(key)[:12]}",
            remedy=f"{_REMEDY}; or correct {PUBLIC_KEY} or register.public_key",
        ) from error
    try:
        return kind.model_validate_json(payload)
    except ValidationError as error:
        raise SignatureError(
            f"{path} signs another statement: {error.error_count()} fields differ",
            expected=f"a statement {kind.model_fields['predicateType'].default}",
            remedy=_REMEDY,
        ) from error


def require_signed_pass(bundle: Artifact[Any], public_key: Path) -> Statement:
    """The signed statement beside the bundle; :class:`SignatureError` unless it says that this very bundle passed."""
    path = signature_path(bundle.folder)
    statement = verify_signature(path, public_key, Statement)
    require_about(statement, bundle.folder, bundle.digest, path)
    if statement.predicate.result != "PASSED":
        raise SignatureError(
            f"{path} says that the bundle was judged {statement.predicate.outcome}",
            expected="a signed PASS",
            remedy="open a bundle that passed",
        )
    return statement


def require_about(statement: Statement, folder: Path, digest: str, path: Path) -> None:
    """:class:`SignatureError` if the statement is about another bundle than the one in ``folder``."""
    subject = record_resource(folder)
    if statement.subject != (subject,) or statement.predicate.bundle != digest:
        raise SignatureError(
            f"{path} is about bundle {statement.predicate.bundle[:12]}",
            expected=f"a statement about {folder}, bundle {digest[:12]}",
            remedy=_REMEDY,
        )


def record_resource(folder: Path) -> Resource:
    """The record of an artifact as the subject of a statement."""
    content = (folder / RECORD).read_bytes()
    return Resource(name=RECORD, digest=SubjectDigest(sha256=hashlib.sha256(content).hexdigest()))


def require_same(found: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """:class:`SignatureError` naming the first field in which a signed statement differs from what lies there."""
    for name, value in expected.items():
        if found[name] != value:
            raise SignatureError(
                f"{path} signs another {name}",
                expected="the evidence and the verdict that were signed",
                remedy=_REMEDY,
            )


def _encode(kind: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def _hint(key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives import serialization

    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _private_key(path: Path) -> EllipticCurvePrivateKey:
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise _no_key(path, "private", error) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _no_key(path, "private", "another kind of key")
    return key


def _public_key(path: Path) -> EllipticCurvePublicKey:
    _require_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise _no_key(path, "public", error) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _no_key(path, "public", "another kind of key")
    return key


def _no_key(path: Path, kind: str, reason: Exception | str) -> SignatureError:
    text = reason.strerror if isinstance(reason, OSError) else str(reason)
    return SignatureError(
        f"{path} holds no {kind} key: {text}",
        expected=f"an unencrypted P-256 {kind} key, as PEM",
        remedy=f"make a pair with `tapeout keygen`, or correct TAPEOUT_{kind.upper()}_KEY",
    )
