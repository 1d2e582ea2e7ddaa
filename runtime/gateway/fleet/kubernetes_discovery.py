"""Engines that are the endpoints of a Kubernetes service.

Read from the API server once a second, with the service account of this pod: its EndpointSlices
(``discovery.k8s.io/v1``) list the pods that are ready. One that terminates is no longer listed, so its requests end and
no new ones come. Nothing but `list endpointslices` in the namespace is needed.
https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from pydantic import BaseModel, Field, ValidationError

from runtime.gateway.fleet.discovery import DiscoveryError, KubernetesService, Listing
from runtime.wire.address import Address, read_key
from tapeout.errors import one_line

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANSWER_SECONDS = 5.0


class _Conditions(BaseModel):
    """A value that is missing means yes, as the API says of ``ready``."""

    ready: bool | None = None


class _Endpoint(BaseModel):
    addresses: list[str]
    conditions: Annotated[_Conditions, Field(default_factory=_Conditions)]


class _Port(BaseModel):
    name: str | None = None
    port: int | None = None


class _Slice(BaseModel):
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(BaseModel):
    items: list[_Slice]


class KubernetesDiscovery:
    """A :class:`runtime.gateway.fleet.discovery.Discovery`. ``key``: a file. ``account``: of the pod, a folder."""

    def __init__(self, service: KubernetesService, key: Path | None, account: Path = ACCOUNT) -> None:
        self._service, self._key, self._account = service, key, account

    def read(self) -> Listing:
        """The token and the certificate are read at every look: both are replaced from time to time."""
        key = read_key(self._key)
        try:
            found = _SliceList.model_validate(self._ask())
        except KeyError as error:
            raise DiscoveryError(
                f"{error.args[0]} is not set", expected="a pod of Kubernetes", remedy="list the engines in the file"
            ) from error
        except URLError as error:
            raise self._error(one_line(error)) from error
        except (OSError, ValueError, ValidationError) as error:
            raise self._error(one_line(error, 300)) from error
        addresses = sorted({str(Address(host, port)) for one in found.items for host, port in self._places(one)})
        for address in addresses:
            Address.parse(address).require_key(key)
        return Listing(tuple(addresses), key)

    def _ask(self) -> object:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        namespace = self._service.namespace or (self._account / "namespace").read_text().strip()
        shown = f"[{host}]" if ":" in host else host
        request = Request(
            f"https://{shown}:{port}/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices"
            f"?labelSelector=kubernetes.io/service-name%3D{quote(self._service.service)}",
            headers={"authorization": f"Bearer {(self._account / 'token').read_text().strip()}"},
        )
        context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        with urlopen(request, timeout=ANSWER_SECONDS, context=context) as response:
            return json.load(response)

    def _places(self, found: _Slice) -> Iterator[tuple[str, int]]:
        ports = [one.port for one in found.ports or () if one.name == self._service.port and one.port is not None]
        for endpoint in found.endpoints or ():
            if endpoint.conditions.ready is not False and ports:
                yield endpoint.addresses[0], ports[0]

    def _error(self, why: str) -> DiscoveryError:
        return DiscoveryError(
            f"the endpoints of the service {self._service.service} cannot be read: {why}",
            expected="an API server that answers, and a service account that may list endpointslices",
            remedy="deploy/fleet/kubernetes.yaml has the role",
        )
