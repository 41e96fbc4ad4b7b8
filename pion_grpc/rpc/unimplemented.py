"""Services of the contract that this server does not have: every call says so, with a reason."""

from typing import Any, NoReturn

from google.protobuf.descriptor import ServiceDescriptor

from pion_grpc.errors import NoBackend
from pion_grpc.rpc.service import Call


class UnimplementedService:
    """Answers every method of a service with UNIMPLEMENTED."""

    def __init__(self, descriptor: ServiceDescriptor, why: str) -> None:
        self._why = why
        self._name = descriptor.name
        self._methods = {method.name for method in descriptor.methods}

    def __getattr__(self, name: str) -> Any:
        if name not in self._methods:
            raise AttributeError(name)

        def refuse(request: object, call: Call) -> NoReturn:
            raise NoBackend(f"{self._name}.{name} {self._why}")

        return refuse
