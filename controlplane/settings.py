"""Configuration: environment variables with the prefix OSTINATO_, and their defaults for one machine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from controlplane.api_keys import UNSENDABLE, is_sendable
from controlplane.template_arguments import template_arguments_of
from placement.types import CostMeasure
from workers.addresses import Ports
from workers.fetching.remote_source import SourceKind

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

NO_GPUS = "none"


class Settings(BaseSettings):
    """All settings of one installation. The same code runs embedded and in production; only these differ."""

    model_config = SettingsConfigDict(
        env_prefix="OSTINATO_", extra="ignore", frozen=True, hide_input_in_errors=True
    )

    home: Path = Field(
        default=Path.home() / ".ostinato", description="Folder of caches, logs and the SQLite file."
    )
    store_url: str = Field(
        default="", description="`sqlite:///FILE` or `redis://HOST:PORT/DB`; empty: SQLite in home."
    )
    allowed_roots: str = Field(
        default="", description="Folders, separated by `:`, from which models and variants may be read."
    )
    sources: str = Field(
        default="hf",
        description="Sources to fetch from in addition to folders, separated by commas: `hf`, `s3`, `gs`, "
        "`https`, or beginnings of URIs as `hf://my-org/`. Empty: folders only.",
    )
    source_bytes: int = Field(
        default=0,
        ge=0,
        description="Most bytes of fetched models on a node; those not in use are evicted. 0: as much as the "
        "disk has.",
    )
    source_credentials: str = Field(
        default="",
        description="YAML or JSON file of tenants' credentials for sources, on every node. Empty: the "
        "installation has only the credentials in its environment.",
    )
    source_private_hosts: str = Field(
        default="",
        description="Hosts of sources, separated by commas, whose addresses need not be public.",
    )
    allowed_hosts: str = Field(
        default="",
        description="Names, separated by commas, by which clients may call the API. Empty: any name; without "
        "a key on loopback, only this machine's names.",
    )
    cors_origins: str = Field(
        default="",
        description="Origins, separated by commas, whose pages may call from a browser, as "
        "`https://chat.example.com`; `*`: all.",
    )
    http_host: str = Field(default="127.0.0.1", description="Address on which the API listens.")
    metrics_host: str = Field(
        default="127.0.0.1",
        description="Address on which each process serves metrics; `0.0.0.0` for a Prometheus on another "
        "node.",
    )
    metrics_ports: str = Field(
        default="9464-9527",
        description="Ports of each node for metrics; a process takes the first free port. Empty: any port.",
    )
    worker_host: str = Field(
        default="127.0.0.1",
        description="Address on which engines listen for gateways; `0.0.0.0` with several nodes.",
    )
    http_port: int = Field(default=8000, ge=1, le=65535, description="Port on which the API listens.")
    dashboard: bool = Field(
        default=True, description="`ostinato up` starts Ray's dashboard, which takes 1 GB of memory."
    )
    api_key: str = Field(default="", description="Bearer token that every client must send; empty: none.")
    tenants: str = Field(
        default="",
        description="YAML or JSON file of tenants and the SHA-256 of their keys; empty: one tenant.",
    )
    tenant_folders: bool = Field(
        default=True,
        description="A tenant's files must be in the folder of its name in an allowed root; 0: in any "
        "allowed root.",
    )
    audit_log: str = Field(
        default="audit.jsonl",
        description="File of the audit log, relative to home; `-`: standard output; empty: no log.",
    )
    gateway_replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of gateways; `ostinato up` starts two on a machine with 4 cores or more.",
    )
    gateways_per_node: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Most gateways on one node; 0: any number. A gateway without a node waits.",
    )
    sheds_load: bool = Field(
        default=True,
        description="A gateway refuses, by tenants' shares, requests that it cannot handle in time.",
    )
    engine: str = Field(
        default="vllm",
        pattern=r"^(vllm|echo(:[0-9]+(\.[0-9]+)?)?)$",
        description="`vllm`, or a fake for benchmarks: `echo`, or `echo:S`, which takes S seconds for a "
        "token.",
    )
    engine_dtype: str = Field(
        default="auto", description="vLLM's dtype; `auto`: float32 on CPUs, bfloat16 on GPUs."
    )
    max_model_len: int = Field(
        default=100_000_000,
        ge=16,
        description="Most tokens of prompt and answer that a deployment may have.",
    )
    concurrency: int = Field(
        default=1024, ge=1, description="Most requests at once that a deployment's engines may run."
    )
    max_variants: int = Field(
        default=128, ge=1, description="Most slots for variants that a deployment may have."
    )
    variant_host_bytes: int = Field(
        default=64 << 30,
        ge=1 << 20,
        description="Most host memory of a rank that may keep variants ready.",
    )
    max_lora_rank: int = Field(
        default=256, ge=1, le=512, description="Largest LoRA rank that may be registered and deployed."
    )
    profile_seconds: float = Field(
        default=600.0,
        ge=0,
        description="Longest time to measure a new architecture; 0: nothing is measured.",
    )
    profile_bytes: int = Field(
        default=8 << 30,
        ge=1 << 20,
        description="Most device memory that measuring may take; at most nine tenths of the free memory.",
    )
    artifacts: str = Field(
        default="",
        description="Folder of deltas made here, visible to all nodes. Empty: `artifacts` in home.",
    )
    gpus: str = Field(
        default="",
        description="Indices of each node's GPUs to use: `0,1`, `none`, or by node `a=0,1;b=none;2`. Empty: "
        "the GPUs in CUDA_VISIBLE_DEVICES, or all.",
    )
    headroom: float = Field(
        default=0.03, ge=0, lt=1, description="Share of each device's memory that placement leaves free."
    )
    cost_measure: CostMeasure = Field(
        default=CostMeasure.MEMORY_LATENCY,
        description="What minCost minimises: `memoryLatency` (GiB x s of a request), `memory` or `gpuHours`.",
    )
    template_arguments: str = Field(
        default="",
        description="Variables of chat templates, separated by commas, that requests may set in addition to "
        "well-known variables.",
    )
    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="Largest body of a request.")
    start_limit_s: float = Field(
        default=1800.0,
        gt=0,
        description="A worker group whose engine does not run after this time is placed again.",
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="Longest time for a request.")

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("artifacts", "tenants", "source_credentials")
    @classmethod
    def _absolute_file(cls, value: str) -> str:
        """Make the path absolute: every process of the cluster reads it, from its own working folder."""
        return str(Path(value).expanduser().absolute()) if value else ""

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, value: str) -> str:
        """Refuse a key that no client can send."""
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
                raise ValueError(f"expected origins such as https://chat.example.com, or *; got {origin!r}")
        return value

    @field_validator("sources")
    @classmethod
    def _known_sources(cls, value: str) -> str:
        for entry in _parts(value):
            kind, _, rest = entry.partition("://")
            if kind not in set(SourceKind) or (rest == "" and "/" in entry):
                raise ValueError(
                    f"expected hf, s3, gs, https, or the beginning of a URI of these; got {entry!r}"
                )
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
        """Tell whether new architectures are measured."""
        return self.is_vllm and self.profile_seconds > 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names by which clients may call the API; empty: any."""
        named = _parts(self.allowed_hosts)
        local = self.http_host in ("127.0.0.1", "localhost", "::1")
        if not named and (self.api_key or not local):
            return ()
        return (*LOOPBACK_NAMES, *named)

    @property
    def local_url(self) -> str:
        """The API's URL on this machine."""
        everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
        host = everywhere.get(self.http_host, self.http_host)
        return f"http://[{host}]:{self.http_port}" if ":" in host else f"http://{host}:{self.http_port}"

    @property
    def origins(self) -> tuple[str, ...]:
        """Sites whose pages may send requests in addition to `hosts`; `*`: all."""
        return _parts(self.cors_origins)

    @property
    def resolved_store_url(self) -> str:
        return self.store_url or f"sqlite:///{self.home / 'state.db'}"

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders that engines read: those that may be named, and fetched files."""
        return (*self._nameable_roots, self.fetched_folder.resolve())

    @property
    def _nameable_roots(self) -> tuple[Path, ...]:
        """Allowed source folders; the home's own caches and the deltas made here are always allowed."""
        return (*self._named_roots, (self.home / "models").resolve(), self.artifacts_folder.resolve())

    @property
    def fetched_folder(self) -> Path:
        """The folder of fetched models, on every node. Only what was fetched for a model is read there."""
        return self.home / "fetched"

    @property
    def allowed_sources(self) -> tuple[str, ...]:
        return _parts(self.sources)

    @property
    def private_hosts(self) -> tuple[str, ...]:
        return tuple(host.lower() for host in _parts(self.source_private_hosts))

    def roots_of(self, tenant: str) -> tuple[Path, ...]:
        """The folders where a tenant's files must lie; for "", the installation, any of the roots."""
        if not tenant or not self.tenant_folders:
            return self._nameable_roots
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
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def gpus_of(text: str, node: str) -> tuple[int, ...] | None:
    """The GPUs of a node that the setting allows: `0,1` for every node; by node: `a=0,1;b=none;2`.

    Returns indices, ascending; None: all. A part that names the node has priority over a part for every node.
    Errors: ValueError for an invalid list.
    """
    lists: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, listed = part.rpartition("=")
        if name.strip() in lists or (equals and not name.strip()):
            raise _unreadable(text, f"each node once, by its name, got {part!r}")
        lists[name.strip()] = _indices(text, listed)
    return lists.get(node, lists.get(""))


def _indices(text: str, listed: str) -> tuple[int, ...]:
    if listed.strip() == NO_GPUS:
        return ()
    parts = [part.strip() for part in listed.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise _unreadable(text, f"indices of GPUs, got {listed!r}")
    return tuple(sorted({int(part) for part in parts}))


def _unreadable(text: str, expected: str) -> ValueError:
    return ValueError(f"cannot read {text!r}: expected {expected}; write it like 0,1 or a=0,1;b={NO_GPUS};2")
