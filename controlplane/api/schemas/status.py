"""The state of the installation, and lists of records, as the API answers them."""

from __future__ import annotations

from pydantic import BaseModel

from controlplane.api.schemas.models import DeploymentView, ModelView, OperationView


class DeviceView(BaseModel):
    node: str
    index: int
    kind: str
    totalBytes: int
    freeBytes: int


class EngineView(BaseModel):
    """Of one worker group of `host`."""

    host: str
    group: str = ""
    status: str
    message: str
    replicas: int
    variants: list[str]


class StatusView(BaseModel):
    version: str
    revision: int
    devices: list[DeviceView]
    engines: list[EngineView]


class Models(BaseModel):
    models: list[ModelView]


class Deployments(BaseModel):
    deployments: list[DeploymentView]


class Operations(BaseModel):
    operations: list[OperationView]
