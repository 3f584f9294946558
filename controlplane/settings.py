"""Configuration: environment variables with the prefix OSTINATO_, and their defaults for one machine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from controlplane.api_keys import UNSENDABLE, is_sendable
from controlplane.template_arguments import template_arguments_of
from placement.types import CostMeasure
from workers.addresses import Ports

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

NO_GPUS = "none"


class Settings(BaseSettings):
    """Every knob of one installation. The same code runs embedded and in production; only these differ."""

    model_config = SettingsConfigDict(
        env_prefix="OSTINATO_", extra="ignore", frozen=True, hide_input_in_errors=True
    )

    home: Path = Field(default=Path.home() / ".ostinato", description="Caches, logs and the SQLite file.")
    store_url: str = Field(default="", description="sqlite:///FILE or redis://HOST; empty: SQLite in home.")
    allowed_roots: str = Field(default="", description="Folders (':'-separated) sources may be read from.")
    allowed_hosts: str = Field(
        default="",
        description="Names by which the API may be asked, by comma. Empty: any; but only this machine's where"
        " there is no key and the API listens on loopback.",
    )
    cors_origins: str = Field(
        default="",
        description="Whose pages may ask from a browser, by comma, as https://chat.example.com; *: all."
        " Empty: none but those under the API's own names.",
    )
    http_host: str = Field(default="127.0.0.1", description="Where the API listens.")
    metrics_host: str = Field(
        default="127.0.0.1",
        description="Where each process serves its metrics; 0.0.0.0 if Prometheus is on another node.",
    )
    metrics_ports: str = Field(
        default="9464-9527",
        description="Ports of each node for that; a process takes the first free one. Empty: any.",
    )
    worker_host: str = Field(
        default="127.0.0.1",
        description="Where engines listen for gateways; 0.0.0.0 if they are on other nodes.",
    )
    http_port: int = Field(default=8000, ge=1, le=65535)
    dashboard: bool = Field(
        default=True, description="Whether `ostinato up` starts Ray's dashboard, which takes 1 GB of memory."
    )
    api_key: str = Field(default="", description="Bearer token asked of every client; empty: none.")
    tenants: str = Field(
        default="",
        description="A YAML or JSON file of tenants and the SHA-256 of their keys; empty: one tenant.",
    )
    tenant_folders: bool = Field(
        default=True,
        description="A tenant's files must lie in the folder of its name in an allowed root; 0: anywhere.",
    )
    audit_log: str = Field(
        default="audit.jsonl",
        description="A file of lines of JSON, one for each change asked for; a relative path is in home. "
        "-: standard output; empty: none.",
    )
    gateway_replicas: int = Field(default=1, ge=1, le=64)
    gateways_per_node: int = Field(
        default=0,
        ge=0,
        le=64,
        description="So many gateways on a node at most; 0: any number. One without a node waits for one.",
    )
    sheds_load: bool = Field(
        default=True, description="A gateway refuses what it cannot do in time, by tenants' shares."
    )
    engine: str = Field(
        default="vllm",
        pattern=r"^(vllm|echo(:[0-9]+(\.[0-9]+)?)?)$",
        description="vllm; or a fake for benchmarks: echo, or echo:S, which takes S seconds to a token.",
    )
    engine_dtype: str = Field(
        default="auto", description="vLLM's dtype; auto: float32 on CPU, else bfloat16."
    )
    max_model_len: int = Field(
        default=100_000_000,
        ge=16,
        description="The most tokens of a prompt and its answer that any deployment may have.",
    )
    concurrency: int = Field(
        default=1024, ge=1, description="The most requests at once that any deployment's engines may run."
    )
    max_variants: int = Field(
        default=128, ge=1, description="The most slots for variants that any deployment may have."
    )
    variant_host_bytes: int = Field(
        default=64 << 30,
        ge=1 << 20,
        description="The most host memory of a rank that may keep variants ready.",
    )
    max_lora_rank: int = Field(
        default=256, ge=1, le=512, description="The largest LoRA rank that may be registered and deployed."
    )
    profile_seconds: float = Field(
        default=600.0,
        ge=0,
        description="Longest that measuring a new architecture may take; 0: nothing is measured.",
    )
    profile_bytes: int = Field(
        default=8 << 30,
        ge=1 << 20,
        description="Memory of a device that measuring may take; never more than is free.",
    )
    artifacts: str = Field(
        default="",
        description="The folder of deltas that are made here; all nodes see it. Empty: `artifacts` in home.",
    )
    gpus: str = Field(
        default="",
        description="Indices of each node's GPUs that are ours, as 0,1 or none, or by node: a=0,1;b=none;2. "
        "Empty: those that CUDA_VISIBLE_DEVICES leaves.",
    )
    headroom: float = Field(
        default=0.03, ge=0, lt=1, description="Share of each device's memory that no placement takes."
    )
    cost_measure: CostMeasure = Field(
        default=CostMeasure.MEMORY_LATENCY,
        description="What minCost minimises: memoryLatency (GiB x s of a request), memory or gpuHours.",
    )
    template_arguments: str = Field(
        default="",
        description="Variables of your chat templates that requests may set, by comma, beside those of known "
        "models.",
    )
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    start_limit_s: float = Field(
        default=1800.0, gt=0, description="A group whose engine does not run after so long is placed anew."
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="Longest a request may take in all.")

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("artifacts", "tenants")
    @classmethod
    def _absolute_file(cls, value: str) -> str:
        """Every process of the cluster reads it, each from a working folder of its own."""
        return str(Path(value).expanduser().absolute()) if value else ""

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, value: str) -> str:
        """With another one nobody could ask."""
        if value and not is_sendable(value):
            raise ValueError(UNSENDABLE)
        return value

    @field_validator("gpus")
    @classmethod
    def _readable(cls, value: str) -> str:
        gpus_of(value, "")
        return value

    @field_validator("template_arguments")
    @classmethod
    def _only_of_templates(cls, value: str) -> str:
        template_arguments_of(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        for origin in _parts(value):
            scheme, _, host = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not host or "/" in host):
                raise ValueError(f"expected origins as https://chat.example.com, or *; got {origin!r}")
        return value

    @field_validator("metrics_ports")
    @classmethod
    def _ports(cls, value: str) -> str:
        Ports.parse(value)
        return value

    @property
    def metrics_port_range(self) -> Ports:
        return Ports.parse(self.metrics_ports)

    @property
    def is_vllm(self) -> bool:
        return self.engine == "vllm"

    @property
    def measures(self) -> bool:
        """Whether new architectures are measured."""
        return self.is_vllm and self.profile_seconds > 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names by which the API may be asked; none: any."""
        named = _parts(self.allowed_hosts)
        local = self.http_host in ("127.0.0.1", "localhost", "::1")
        if not named and (self.api_key or not local):
            return ()
        return (*LOOPBACK_NAMES, *named)

    @property
    def local_url(self) -> str:
        """The API's, as this machine reaches it."""
        everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
        host = everywhere.get(self.http_host, self.http_host)
        return f"http://[{host}]:{self.http_port}" if ":" in host else f"http://{host}:{self.http_port}"

    @property
    def origins(self) -> tuple[str, ...]:
        """Whose pages may ask beside those of `hosts`; `*`: all."""
        return _parts(self.cors_origins)

    @property
    def resolved_store_url(self) -> str:
        return self.store_url or f"sqlite:///{self.home / 'state.db'}"

    @property
    def roots(self) -> tuple[Path, ...]:
        """Allowed source folders; the home's own caches and the deltas made here always are."""
        return (*self._named_roots, (self.home / "models").resolve(), self.artifacts_folder.resolve())

    def roots_of(self, tenant: str) -> tuple[Path, ...]:
        """Where the files must lie that a tenant names; of "", the installation, in any of the roots."""
        if not tenant or not self.tenant_folders:
            return self.roots
        return tuple(root / tenant for root in self._named_roots)

    @property
    def _named_roots(self) -> list[Path]:
        return [Path(part).expanduser().resolve() for part in self.allowed_roots.split(":") if part]

    @property
    def artifacts_folder(self) -> Path:
        return Path(self.artifacts) if self.artifacts else self.home / "artifacts"

    def as_env(self) -> dict[str, str]:
        """These settings as environment variables, for the processes of the cluster."""
        return {f"OSTINATO_{name.upper()}": _text(value) for name, value in self.model_dump().items()}


def _parts(text: str) -> tuple[str, ...]:
    """Of a list by comma."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def gpus_of(text: str, node: str) -> tuple[int, ...] | None:
    """Which of a node's GPUs are ours, as a setting says it: `0,1` of every node; by node: `a=0,1;b=none;2`.

    Returns indices, ascending; None: all. What names the node goes before what is for every node.

    Errors: ValueError for what is no such list.
    """
    lists: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, listed = part.rpartition("=")
        if name.strip() in lists or (equals and not name.strip()):
            raise _unreadable(text, f"each node once, and by its name, got {part!r}")
        lists[name.strip()] = _indices(text, listed)
    return lists.get(node, lists.get(""))


def _indices(text: str, listed: str) -> tuple[int, ...]:
    if listed.strip() == NO_GPUS:
        return ()
    parts = [part.strip() for part in listed.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise _unreadable(text, f"indices, got {listed!r}")
    return tuple(sorted({int(part) for part in parts}))


def _unreadable(text: str, expected: str) -> ValueError:
    return ValueError(f"cannot read {text!r}: expected {expected}; write it like 0,1 or a=0,1;b={NO_GPUS};2")
