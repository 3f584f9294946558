"""The state of the installation, and lists of records, as the API answers them."""

from __future__ import annotations

from controlplane.management.schemas.common import View
from controlplane.management.schemas.models import DeploymentView, ModelView, OperationView


class DeviceView(View):
    node: str
    index: int
    kind: str
    totalBytes: int
    freeBytes: int


class EngineView(View):
    """The engine of one worker group of `host`."""

    host: str
    group: str = ""
    status: str
    message: str
    replicas: int
    variants: list[str]


class StatusView(View):
    version: str
    revision: int
    devices: list[DeviceView]
    engines: list[EngineView]


class Models(View):
    models: list[ModelView]


class Deployments(View):
    deployments: list[DeploymentView]


class Operations(View):
    operations: list[OperationView]
