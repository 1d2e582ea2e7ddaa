"""From a builder to a machine that only serves, through a real MLflow server that passes artifacts through.

The serving machine's processes can import what ``tapeout[serve,signing]`` installs and nothing else
(tests/serving_machine.py). Each defect is planted where it would happen: in the server's store, on the network, on the
disk, or by a kill.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import os
import re
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import certifi
import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from engines.bundle import EngineBundle
from pipeline.recipe import Recipe
from pipeline.registry.access import RestRegistry
from pipeline.registry.promotion import promote, rollback
from pipeline.registry.register import register
from pipeline.registry.tracking import connect, http_session
from pipeline.registry.versions import model_id_of
from tapeout.artifact import load
from tapeout.errors import RegistryError
from tapeout.signing import generate_keys
from tests import command, judged, serving_machine, web
from tests.command import COMMAND, ROOT
from tests.judged import edit_record
from tests.registries import empty_registry
from tests.slow_proxy import proxy

WEIGHTS_BYTES = 8 << 20
MLFLOW = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]


@contextmanager
def mlflow_server(
    folder: Path, *, certificate: Path | None = None, artifact_root: str = "", **options: Any
) -> Iterator[int]:
    """The port of a tracking server that keeps everything in ``folder``. ``certificate``: with its key, for TLS.

    ``artifact_root``: where clients put artifacts themselves, which the server then does not pass through.
    """
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = ["--backend-store-uri", empty_registry(folder)]
    if artifact_root:
        places += ["--no-serve-artifacts", "--default-artifact-root", artifact_root]
    else:
        places += ["--serve-artifacts", "--artifacts-destination", str(folder / "store")]
    if certificate:
        places += ["--uvicorn-opts", f"--ssl-certfile {certificate}"]
    variables = {**os.environ, "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    variables.pop("MLFLOW_TRACKING_URI", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*MLFLOW, "--port", str(port), *places],
            stdout=log,
            stderr=log,
            env=variables,
            cwd=folder,
            start_new_session=True,
            **options,
        )
    try:
        until = time.monotonic() + 240
        url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}/health"
        while True:
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            try:
                if web.get(url, timeout=5).status_code == 200:
                    break
            except httpx2.HTTPError:
                time.sleep(0.2)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Its port, and the folder that artifacts lie in."""
    folder = tmp_path_factory.mktemp("mlflow") / "server"
    with mlflow_server(folder) as port:
        yield port, folder / "store"


@dataclass
class Builder:
    """Builds and registers under a model name of its own. ``serving``: the folder of the other machine."""

    port: int
    store: Path
    folder: Path
    recipe: Recipe

    @property
    def name(self) -> str:
        return self.recipe.register_.model_name

    @property
    def serving(self) -> Path:
        return self.folder / "serving"

    def submit(self, weights: str, *, key: Path | None = None, **judgement: Any) -> str:
        """Judge and register; the bundle's digest."""
        artifacts = self.folder / f"run-{weights[:8]}"
        verdict = judged.write_run(artifacts, weights, judged_by=self.recipe, **judgement)
        bundle = load(artifacts / "candidate", EngineBundle)
        register(self.recipe, verdict, bundle, artifacts, key=key, repair=True)
        return bundle.digest

    def stored(self, number: int) -> Path:
        """Where the server keeps the bundle of a version."""
        with connect(write=False) as client:
            version = client.get_model_version(self.name, str(number))
            location = client.get_logged_model(model_id_of(version.source)).artifact_location
        return self.store / location.removeprefix("mlflow-artifacts:/")

    def pull(
        self,
        *words: str,
        port: int | None = None,
        extras: tuple[str, ...] = (*serving_machine.EXTRAS, "judging"),
        more: dict[str, str] | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """``tapeout pull`` on the other machine. ``extras``: of tapeout, which are installed there.

        ``more``: environment variables.
        """
        uri = {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port or self.port}"}
        variables = serving_machine.environment(self.serving, extras=extras, **uri | (more or {}))
        words = ("pull", *(words or (f"models:/{self.name}@champion",)), "--json")
        return serving_machine.run(self.serving, variables, *words, **options)

    def pulled(self, digest: str) -> bool:
        """The bundle is in the other machine's store, whole."""
        folder = self.serving / "bundles" / digest
        if not folder.is_dir():
            return False
        load(folder, EngineBundle).verify()
        return True

    def refuses(self, words: str, *options: str, **more: Any) -> None:
        done = self.pull(*options, **more)
        assert done.returncode == 2, done.stdout + done.stderr
        assert re.search(words, done.stderr), done.stderr
        assert "remedy:" in done.stderr and "Traceback" not in done.stderr
        assert not [path for path in (self.serving / "bundles").glob("[!.]*") if path.is_dir()]


@pytest.fixture
def builder(
    server: tuple[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Builder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server[0]}")
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return Builder(*server, tmp_path, judged.recipe(register={"model_name": name, "experiment": name}))


def big(letter: str) -> str:
    return letter * WEIGHTS_BYTES


def test_a_machine_that_only_serves_has_neither_torch_nor_mlflow(tmp_path: Path) -> None:
    variables = serving_machine.environment(tmp_path)
    for module in ("torch", "mlflow", "transformers", "scipy"):
        done = subprocess.run([sys.executable, "-c", f"import {module}"], env=variables, capture_output=True, text=True)
        assert "this machine only serves" in done.stderr


def test_a_bundle_is_stored_once_and_pulled_once(builder: Builder) -> None:
    digest = builder.submit(big("a"))
    before = builder.stored(1)
    builder.refuses("no alias|not found|champion", f"models:/{builder.name}@champion")
    promote(builder.recipe)
    first = json.loads(builder.pull().stdout)
    assert (first["digest"], first["version"], first["outcome"]) == (digest, 1, "PASS")
    assert first["fetched_bytes"] == WEIGHTS_BYTES and builder.pulled(digest)
    assert json.loads(builder.pull().stdout)["fetched_bytes"] == 0
    assert builder.submit(big("a"), evidence=judged.good(0.011)) == digest  # judged again, on other evidence
    assert builder.stored(2) == before
    assert json.loads(builder.pull(f"models:/{builder.name}/2").stdout)["fetched_bytes"] == 0


@dataclass(frozen=True)
class Bucket:
    """Of a server that speaks S3. ``variables``: what a client of it needs in its environment."""

    client: Any
    name: str
    variables: dict[str, str]

    def keys(self, ending: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name)["Contents"]
        return [one["Key"] for one in found if one["Key"].endswith(ending)]

    def read(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def write(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    import boto3
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    variables = {
        "MLFLOW_S3_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    client: Any = boto3.client("s3", endpoint_url=variables["MLFLOW_S3_ENDPOINT_URL"])  # pyright: ignore[reportUnknownMemberType]
    client.create_bucket(Bucket="models")
    yield Bucket(client, "models", variables)
    running.stop()


def test_artifacts_in_s3_that_the_server_does_not_pass_through(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builder and serving machine speak S3 themselves; the latter with what ``tapeout[s3]`` installs, and no more."""
    with mlflow_server(tmp_path / "server", artifact_root=f"s3://{bucket.name}/mlflow") as port:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        name = {"model_name": "in-s3", "experiment": "in-s3"}
        builder = Builder(port, tmp_path / "server" / "store", tmp_path, judged.recipe(register=name))
        digest = builder.submit(big("s"))
        promote(builder.recipe)
        assert not builder.store.exists()
        (weights,) = bucket.keys("model.onnx")
        content = bucket.read(weights)
        pull: Any = partial(builder.pull, extras=(*serving_machine.EXTRAS, "s3"), more=bucket.variables)
        builder.refuses("takes the package 'mlflow'", extras=serving_machine.EXTRAS)
        store_down = {"MLFLOW_S3_ENDPOINT_URL": "http://127.0.0.1:1"}
        done = pull(more=bucket.variables | store_down)
        assert done.returncode == 2 and "the registry does not give" in done.stderr, done.stderr
        assert "fault in tapeout" not in done.stderr and "Downloading artifacts" not in done.stderr, done.stderr
        # A byte that was flipped in the store, and a file that is gone from it; the builder repairs both.
        bucket.write(weights, content[:-1] + bytes([content[-1] ^ 1]))
        done = pull()
        assert done.returncode == 2 and re.search(r"model\.onnx has sha256", done.stderr), done.stderr
        bucket.client.delete_object(Bucket=bucket.name, Key=weights)
        done = pull()
        assert done.returncode == 2 and "the registry does not give model.onnx" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and not builder.pulled(digest)
        builder.submit(big("s"))
        done = pull()
        assert done.returncode == 0 and builder.pulled(digest), done.stderr
        # A store that is down, or goes down before an upload: the next attempt goes on.
        with monkeypatch.context() as patch:
            patch.setenv(*next(iter(store_down.items())))
            with pytest.raises(RegistryError, match="store of the registry's files refused"):
                builder.submit(big("t"))
        from mlflow import MlflowClient

        with monkeypatch.context() as patch:
            upload = MlflowClient.log_model_artifact

            def down(*arguments: Any) -> None:
                patch.setenv(*next(iter(store_down.items())))
                upload(*arguments)

            patch.setattr(MlflowClient, "log_model_artifact", down)
            with pytest.raises(RegistryError, match="store did not take"):
                builder.submit(big("t"))
        builder.submit(big("t"), against=digest)


def test_a_store_whose_client_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("boto3", "botocore"):
        monkeypatch.setitem(sys.modules, name, None)
    registry = RestRegistry("http://127.0.0.1:1", http_session())
    with pytest.raises(RegistryError, match=r"does not give model\.onnx") as caught:
        registry.fetch("s3://models/mlflow", "model.onnx", tmp_path / "model.onnx")
    assert "pip install 'tapeout[s3]'" in str(caught.value.remedy)


def test_what_was_judged_otherwise_is_not_pulled(builder: Builder) -> None:
    digest = builder.submit(big("b"), evidence=judged.good(0.345))
    builder.refuses("was judged FAIL", f"models:/{builder.name}/1")
    assert builder.pull(f"models:/{builder.name}/1", "--unsafe").returncode == 0 and builder.pulled(digest)


def test_a_pull_that_was_killed_continues_at_the_byte(builder: Builder) -> None:
    digest = builder.submit(big("c"))
    promote(builder.recipe)
    half = WEIGHTS_BYTES // 2
    with proxy(builder.port, limit=half) as slow:
        variables = serving_machine.environment(builder.serving, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{slow.port}")
        words = [*COMMAND, "pull", f"models:/{builder.name}@champion"]
        process = subprocess.Popen(words, cwd=builder.serving, env=variables)
        assert slow.reached.wait(120)
        time.sleep(1)  # for what has passed to be written
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not builder.pulled(digest)
        (part,) = builder.serving.glob("bundles/.*.incoming/*.part")
        arrived = part.stat().st_size
        assert arrived > half // 2
        slow.release()
        time.sleep(0.5)  # for what was held back to be dropped
        before = slow.passed
        done = builder.pull(port=slow.port)
        assert done.returncode == 0 and builder.pulled(digest), done.stderr
        assert json.loads(done.stdout)["fetched_bytes"] == WEIGHTS_BYTES - arrived
        assert slow.passed - before < WEIGHTS_BYTES - arrived + (1 << 18)  # and some headers


def test_an_alias_that_moves_during_a_pull_changes_nothing(builder: Builder) -> None:
    digest = builder.submit(big("d"))
    promote(builder.recipe)
    other = builder.submit(big("e"), against=digest)
    with proxy(builder.port, limit=WEIGHTS_BYTES // 2) as slow:
        found: list[subprocess.CompletedProcess[str]] = []
        pulling = threading.Thread(target=lambda: found.append(builder.pull(port=slow.port)))
        pulling.start()
        assert slow.reached.wait(120)
        assert promote(builder.recipe).champion == 2
        slow.release()
        pulling.join()
    assert json.loads(found[0].stdout)["digest"] == digest and builder.pulled(digest)
    assert json.loads(builder.pull().stdout)["digest"] == other


def test_an_alias_of_a_deleted_version_is_named(builder: Builder) -> None:
    """By both who asks the server: the machine that builds, through MLflow, and the one that only serves."""
    digest = builder.submit("x")
    promote(builder.recipe)
    builder.submit("y", against=digest)
    with sqlite3.connect(builder.store.parent / "mlflow.db") as raw:  # MLflow's own call removes the aliases as well
        query = "UPDATE model_versions SET current_stage = 'Deleted_Internal' WHERE version = 1 AND name = ?"
        assert raw.execute(query, (builder.name,)).rowcount == 1
    for move in (promote, rollback):
        with pytest.raises(RegistryError) as caught:
            move(builder.recipe)
        assert move is rollback or "delete_registered_model_alias" in caught.value.remedy
    builder.refuses("champion of .* a version that was deleted(.|\n)*delete_registered_model_alias")


def test_files_that_were_changed_in_the_store_are_refused_and_repaired(builder: Builder) -> None:
    digest = builder.submit(big("f"))
    promote(builder.recipe)
    stored = builder.stored(1)
    weights, record = stored / "model.onnx", stored / "record.json"
    content = bytearray(weights.read_bytes())
    content[WEIGHTS_BYTES // 2] ^= 1
    weights.write_bytes(content)
    builder.refuses(r"model\.onnx has sha256")
    builder.submit(big("f"))
    assert builder.pull().returncode == 0 and builder.pulled(digest)
    # Whoever reaches the server may overwrite what is registered: MLflow keeps no hash of it.
    url = f"http://127.0.0.1:{builder.port}/api/2.0/mlflow-artifacts/artifacts/{record.relative_to(builder.store)}"
    other = builder.folder / "run-ffffffff" / "baseline" / "record.json"
    assert web.put(url, content=other.read_bytes()).status_code == 200
    subprocess.run(["rm", "-rf", builder.serving / "bundles"], check=True)
    builder.refuses("its bundle is")


def test_signed_versions(builder: Builder) -> None:
    keys = builder.folder / "ours.key", builder.folder / "ours.pub"
    generate_keys(*keys)
    digest = builder.submit(big("g"))
    promote(builder.recipe)
    champion = f"models:/{builder.name}@champion"
    builder.refuses("no public key is given", champion, "--require-signature")
    trusted = (champion, "--public-key", str(keys[1]))
    builder.refuses("is not signed", *trusted)
    builder.submit(big("g"), key=keys[0])
    done = builder.pull(*trusted, "--require-signature")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["signed"] and builder.pulled(digest)
    subprocess.run(["rm", "-rf", builder.serving / "bundles"], check=True)
    theirs = builder.folder / "theirs.key", builder.folder / "theirs.pub"
    generate_keys(*theirs)
    builder.refuses("is not signed by", champion, "--public-key", str(theirs[1]))
    # A signature of another bundle, put in the place of this one's.
    builder.submit(big("h"), key=keys[0], against=digest)
    with connect(write=False) as client:
        runs = [client.get_model_version(builder.name, number).run_id for number in ("1", "2")]
        for name in ("verdict.sigstore.json", "model.sig"):
            taken = client.download_artifacts(runs[1], f"evidence/{name}", str(builder.folder))
            client.log_artifact(runs[0], taken, "evidence")
    builder.refuses("is about bundle", *trusted)


def test_a_pull_can_judge_again_by_its_own_recipe(builder: Builder) -> None:
    """A forger who can write to the registry: consistent digests and tags do not help without the evidence."""
    builder.submit(big("l"), evidence=judged.good(0.345))
    version, recipe = f"models:/{builder.name}/1", builder.folder / "params.yaml"
    judged.write_params(recipe, builder.recipe)
    judge = (version, "--judge-by", str(recipe))
    with connect(write=False) as client:
        run = client.get_model_version(builder.name, "1").run_id or ""
        logged = Path(client.download_artifacts(run, "verdict", str(builder.folder)))
        edit_record(logged, lambda body: body["record"].update(outcome="PASS"))
        client.log_artifact(run, str(logged / "record.json"), "verdict")
        digest = json.loads((logged / "record.json").read_text())["digest"]
        client.set_model_version_tag(builder.name, "1", "tapeout.verdict", digest)
        client.set_model_version_tag(builder.name, "1", "tapeout.outcome", "PASS")
    builder.refuses("the evidence gives another verdict than the recorded PASS: FAIL", *judge)
    builder.refuses("scipy is not installed", *judge, extras=serving_machine.EXTRAS)
    assert builder.pull(version).returncode == 0, "without --judge-by, only a signature would tell"
    shutil.rmtree(builder.serving / "bundles")
    good = builder.submit(big("m"))
    judge = (f"models:/{builder.name}/2", *judge[1:])
    done = builder.pull(*judge)
    assert done.returncode == 0 and builder.pulled(good), done.stderr
    shutil.rmtree(builder.serving / "bundles")
    # A report of another run in the place of the one that was judged.
    with connect(write=False) as client:
        run = client.get_model_version(builder.name, "2").run_id or ""
        other = builder.folder / "run-llllllll" / "evaluation"
        client.log_artifacts(run, str(other), "evidence/evaluation")
    builder.refuses("is not intact", *judge)
    builder.submit(big("m"))
    assert builder.pull(*judge).returncode == 0
    shutil.rmtree(builder.serving / "bundles")
    judged.write_params(recipe, judged.recipe(gate={"max_kl": 0.02}, register=builder.recipe.register_.model_dump()))
    builder.refuses("by another policy than the one in force: gate.max_kl is 0.03 there and 0.02", *judge)


def test_a_full_disk_where_bundles_are_pulled(builder: Builder) -> None:
    digest = builder.submit(big("i"))
    promote(builder.recipe)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (WEIGHTS_BYTES // 2, WEIGHTS_BYTES // 2))
    builder.refuses("cannot keep the bundle", preexec_fn=limit)
    (part,) = builder.serving.glob("bundles/.*.incoming/*.part")
    assert part.stat().st_size <= WEIGHTS_BYTES // 2
    assert builder.pull().returncode == 0 and builder.pulled(digest)


def test_a_full_store_and_a_store_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (WEIGHTS_BYTES // 2, WEIGHTS_BYTES // 2))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with mlflow_server(tmp_path / "server", preexec_fn=limit) as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        builder = Builder(port, tmp_path / "server" / "store", tmp_path, judged.recipe())
        with pytest.raises(RegistryError, match=r"did not take model\.onnx") as caught:
            builder.submit(big("j"))
        assert "run `tapeout register` again" in caught.value.remedy
        with connect(write=False) as client:
            assert not client.search_model_versions()
    with pytest.raises(RegistryError, match="no MLflow server answers"):
        builder.submit(big("j"))
    builder.refuses("no MLflow server answers")


def self_signed(path: Path) -> None:
    """A certificate of 127.0.0.1, which nobody trusts, and its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "registry")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(private + made.public_bytes(pem))


def test_a_server_with_a_certificate_of_a_private_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    certificate = tmp_path / "registry.pem"
    self_signed(certificate)
    with mlflow_server(tmp_path / "server", certificate=certificate) as port:
        secure = {"MLFLOW_TRACKING_URI": f"https://127.0.0.1:{port}"}
        monkeypatch.setenv("MLFLOW_TRACKING_URI", secure["MLFLOW_TRACKING_URI"])
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())  # which does not know the authority
        builder = Builder(port, tmp_path / "server" / "store", tmp_path, judged.recipe())
        with pytest.raises(RegistryError, match=r"no secure connection to https://.*self-signed certificate"):
            builder.submit("n")
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(certificate))
        digest = builder.submit("n")
        version = f"models:/{builder.name}/1"
        builder.refuses("no secure connection to https://.*self-signed certificate", version, more=secure)
        missing = secure | {"MLFLOW_TRACKING_SERVER_CERT_PATH": "nowhere.pem"}
        builder.refuses("no secure connection to https://.*nowhere.pem", version, more=missing)
        for variable in ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE"):
            done = builder.pull(version, more=secure | {variable: str(certificate)})
            assert done.returncode == 0 and builder.pulled(digest), done.stderr
            shutil.rmtree(builder.serving / "bundles")


def test_an_upload_that_was_killed_is_continued(builder: Builder) -> None:
    """The builder dies while the weights are on their way: nothing is registered, and the next attempt is whole."""
    program = (
        "import os, signal, sys, threading; from pathlib import Path; from tests import judged\n"
        "from tests.integration.test_registry_to_server import Builder, big\n"
        f"builder = Builder({builder.port}, Path({str(builder.store)!r}), Path({str(builder.folder)!r}),\n"
        f"    judged.recipe(register={{'model_name': {builder.name!r}, 'experiment': {builder.name!r}}}))\n"
        "builder.submit(big('k'))\n"
    )
    with proxy(builder.port, limit=WEIGHTS_BYTES // 2, uploads=True) as held:
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{held.port}"}
        process = subprocess.Popen([sys.executable, "-c", program], env=variables, cwd=builder.folder)
        assert held.reached.wait(180)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    with connect(write=False) as client:
        assert not [v for v in client.search_model_versions() if v.name == builder.name]
    digest = builder.submit(big("k"))
    promote(builder.recipe)
    assert builder.pull().returncode == 0 and builder.pulled(digest)


@pytest.fixture(scope="module")
def write_engine() -> Callable[..., object]:
    """Writes a bundle of the tiny llama as the candidate of a run; what it was made from makes it another engine."""
    from engines.compile import build
    from engines.load import graph_target
    from quantization.compressed_tensors import open_checkpoint
    from tests.exported import tiny_graph

    graph = tiny_graph()

    def write(folder: Path, _: str, **parents: Any) -> object:
        return build(
            graph,
            open_checkpoint(graph.folder),
            folder,
            target=graph_target("ort-cpu"),
            precision="float32",
            slots=4,
            kv_scales={},
            parents=parents,
        )

    return write


@contextmanager
def served(builder: Builder, *options: str) -> Iterator[tuple[str, list[str]]]:
    """``tapeout serve`` of the champion on the other machine: its address, and what it logs."""
    variables = serving_machine.environment(builder.serving, MLFLOW_TRACKING_URI=os.environ["MLFLOW_TRACKING_URI"])
    champion = f"models:/{builder.name}@champion"
    words = (champion, "--follow-seconds", "0.5", *options)
    with command.served(*words, variables=variables, folder=builder.serving) as running:
        yield running.url, running.log
        assert running.stop() == 0


async def _stream(client: httpx2.AsyncClient, failed: list[str]) -> None:
    """One chat, streamed to its end."""
    body = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 48, "stream": True}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body | {"temperature": 0}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        if answer.status_code != 200 or lines[-1] != "data: [DONE]" or any('"error"' in line for line in lines):
            failed.append(f"{answer.status_code}: {lines[-2:]}")
    except httpx2.HTTPError as error:
        failed.append(repr(error))


async def _under_load(url: str, change: Callable[[], object], wanted: Callable[[str], bool]) -> tuple[int, list[str]]:
    """Three clients that stream without a pause, from before ``change`` until ``wanted(digest that is served)``."""
    done, failed, answered = asyncio.Event(), list[str](), 0

    async def ask(client: httpx2.AsyncClient) -> None:
        nonlocal answered
        while not done.is_set():
            await _stream(client, failed)
            answered += 1

    async with web.async_client(base_url=url, timeout=60) as client:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(ask(client))
            while answered < 3 and not failed:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(change)
            until = time.monotonic() + 120
            while time.monotonic() < until:
                models = (await client.get("/v1/models")).json()["data"]
                if wanted(models[0]["digest"]):
                    break
                await asyncio.sleep(0.1)
            before = answered
            while answered < before + 3 and not failed:
                await asyncio.sleep(0.05)
            done.set()
        models = (await client.get("/v1/models")).json()["data"]
    assert wanted(models[0]["digest"]), "the change did not come"
    return answered, failed


def test_a_champion_is_served_and_followed_elsewhere(builder: Builder, write_engine: Callable[..., object]) -> None:
    keys = builder.folder / "a.key", builder.folder / "a.pub"
    generate_keys(*keys)
    first = builder.submit("8", key=keys[0], write_candidate=write_engine)
    promote(builder.recipe)
    second = builder.submit("6", key=keys[0], write_candidate=write_engine, against=first)
    with served(builder, "--public-key", str(keys[1])) as (url, log):
        assert web.get(f"{url}/v1/models").json()["data"][0]["digest"] == first
        answered, failed = asyncio.run(_under_load(url, lambda: promote(builder.recipe), second.__eq__))
        assert not failed and answered >= 6
        # A champion that passed, and does not open: the engine that is served stays.
        broken = builder.submit("broken", key=keys[0], against=second)
        promote(builder.recipe)
        until = time.monotonic() + 60
        while not any("the engine stays as it is" in line for line in log) and time.monotonic() < until:
            time.sleep(0.1)
        assert any("the engine stays as it is" in line for line in log), "".join(log)
        assert builder.pulled(broken)
        assert web.get(f"{url}/v1/models").json()["data"][0]["digest"] == second
        _, failed = asyncio.run(_under_load(url, lambda: rollback(builder.recipe), second.__eq__))
        assert not failed
