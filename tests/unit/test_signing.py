"""Signed statements: the format, read by hand, and the mistakes that a user of keys can make."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tapeout import signing
from tapeout.errors import SignatureError
from tapeout.signing import (
    ModelStatement,
    Resource,
    Statement,
    SubjectDigest,
    TestResult,
    generate_keys,
    model_signature_path,
    model_statement,
    sign,
    verify_signature,
    write_signature,
)
from tests import judged


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    generate_keys(tmp_path / "a.key", tmp_path / "a.pub")
    return tmp_path / "a.key", tmp_path / "a.pub"


STATEMENT = Statement(
    subject=(Resource(name="record.json", digest=SubjectDigest(sha256="0" * 64)),),
    predicate=TestResult(
        result="FAILED",
        configuration=(Resource(name="policy", digest=SubjectDigest(sha256="1" * 64)),),
        passedTests=("kl",),
        failedTests=("accuracy",),
        outcome="INCONCLUSIVE",
        executed_on="cpu",
        model="tapeout-default",
        bundle="2" * 64,
        verdict="3" * 64,
        evidence={"EvalReport": "4" * 64},
    ),
)


def test_other_tools_can_read_what_is_signed(keys: tuple[Path, Path]) -> None:
    """A Sigstore bundle with a DSSE envelope, verified here as its specification says, without our code."""
    bundle = json.loads(sign(STATEMENT, keys[0]))
    pem = keys[1].read_bytes()
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert bundle["verificationMaterial"]["publicKey"]["hint"] == hashlib.sha256(pem).hexdigest()
    envelope = bundle["dsseEnvelope"]
    kind, payload = envelope["payloadType"], base64.b64decode(envelope["payload"])
    encoded = b" ".join((b"DSSEv1", str(len(kind)).encode(), kind.encode(), str(len(payload)).encode(), payload))
    key = serialization.load_pem_public_key(pem)
    assert isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1"
    key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), encoded, ec.ECDSA(hashes.SHA256()))
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["subject"] == [{"name": "record.json", "digest": {"sha256": "0" * 64}}]
    assert (statement["predicate"]["result"], statement["predicate"]["failedTests"]) == ("FAILED", ["accuracy"])


def test_the_files_of_a_bundle_are_signed_as_other_tools_expect_it(keys: tuple[Path, Path], tmp_path: Path) -> None:
    """The format that ``model_signing`` 1.1 verifies: every file, and a digest over their digests in order of names."""
    bundle = judged.write_bundle(tmp_path / "bundle", "weights")
    path = model_signature_path(bundle.folder)
    write_signature(path, sign(model_statement(bundle), keys[0]))
    assert verify_signature(path, keys[1], ModelStatement) == model_statement(bundle)
    statement = json.loads(base64.b64decode(json.loads(path.read_text())["dsseEnvelope"]["payload"]))
    assert statement["predicateType"] == "https://model_signing/signature/v1.0"
    assert statement["predicate"]["serialization"]["method"] == "files"
    digests = [hashlib.sha256((bundle.folder / name).read_bytes()) for name in ("model.onnx", "record.json")]
    listed = [(file["name"], file["algorithm"], file["digest"]) for file in statement["predicate"]["resources"]]
    names = ("model.onnx", "record.json")
    assert listed == [(name, "sha256", found.hexdigest()) for name, found in zip(names, digests, strict=True)]
    (subject,) = statement["subject"]
    assert subject["digest"]["sha256"] == hashlib.sha256(b"".join(found.digest() for found in digests)).hexdigest()
    with pytest.raises(SignatureError, match="signs another statement"):
        verify_signature(path, keys[1], Statement)  # a list of files is no verdict


def test_what_was_signed_is_what_is_read(keys: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "signed.json"
    path.write_text(sign(STATEMENT, keys[0]))
    assert verify_signature(path, keys[1], Statement) == STATEMENT


def test_only_the_owner_can_read_a_private_key_and_none_is_overwritten(keys: tuple[Path, Path]) -> None:
    assert keys[0].stat().st_mode & 0o777 == 0o600
    before = keys[0].read_bytes()
    for private, public in (keys, (keys[0], keys[1].with_name("b.pub")), (keys[0].with_name("b.key"), keys[1])):
        with pytest.raises(SignatureError, match="exists") as caught:
            generate_keys(private, public)
        assert caught.value.remedy
    assert keys[0].read_bytes() == before and not keys[0].with_name("b.key").exists()


def test_what_is_no_key_is_named(keys: tuple[Path, Path], tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP384R1()).public_key()
    (tmp_path / "p384.pub").write_bytes(
        other.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for path in (keys[0], tmp_path / "absent.pub", tmp_path / "p384.pub", tmp_path):
        with pytest.raises(SignatureError, match="holds no public key"):
            verify_signature(tmp_path / "signed.json", path, Statement)
    with pytest.raises(SignatureError, match="holds no private key"):
        sign(STATEMENT, keys[1])


def test_a_machine_without_cryptography_is_told(keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signing, "find_spec", lambda name: None)
    with pytest.raises(SignatureError, match="cryptography is not installed") as caught:
        sign(STATEMENT, keys[0])
    assert "tapeout[signing]" in caught.value.remedy
