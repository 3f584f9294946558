"""One launch of a group's ranks from this process: its environment, and its cleanup and error after a
failure.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from profiler import inside
from profiler.checkpoint import read_model
from profiler.errors import CheckpointError
from profiler.model_files import CONFIG
from profiler.weight_files import weight_files
from workers.group import processes
from workers.group.journal import verdict
from workers.group.members import Rendezvous, device_environment, members_of, network_arguments
from workers.group.plan import VARIABLE, plan_of
from workers.messages import EngineConfig, RankReport
from workers.model_view import HeldView, hold_view, sweep_views
from workers.variant_config import ADDRESS_VARIABLE
from workers.vllm_environment import LOOPBACK, environment, put, share_cores, vllm_cache

FOLDER = "ostinato-group-"
VIEWS = "ostinato-models"
MAX_ENTRIES = 10_000  # of a model's folder


class LaunchError(RuntimeError):
    """A group could not start or continue; the message has the rank that failed and the reason."""


class Launch:
    """The `number`-th member of a group, on the node at `host_ip`; a group of one member uses loopback.

    Any thread may call `abort`, during the engine's start or later.
    """

    def __init__(
        self,
        config: EngineConfig,
        rendezvous: Rendezvous | None = None,
        host_ip: str = LOOPBACK,
        number: int = 0,
    ) -> None:
        self.members = members_of(config)
        self.member = self.members[number]
        self.reason = ""
        self._config = config
        self._rendezvous = rendezvous
        self._host_ip = host_ip
        self._journals: Path | None = None
        self._model: Path | None = None
        self._view: HeldView | None = None
        self._before: set[psutil.Process] = set()
        self._lock = threading.Lock()

    @property
    def bus(self) -> str:
        """The address on which the engine's scheduler listens; known after `begin`."""
        return os.environ[ADDRESS_VARIABLE]

    def scratch(self, name: str) -> Path:
        """A path for files of this launch, which are removed with it; known after `begin`."""
        if self._journals is None:
            raise RuntimeError("the launch's files were requested before the launch began")
        return self._journals / name

    @property
    def config(self) -> EngineConfig:
        """The configuration for vLLM: its model has exactly the files that registration read."""
        return replace(self._config, model_path=str(self._model or self._config.model_path))

    def begin(self) -> None:
        """Set this process's environment for the ranks that it will start. Raises LaunchError."""
        _check_links(self._config)
        _check_content(self._config)
        self._before = processes.children()
        _sweep()
        self._journals = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        self._view = _model_view(self._config, self._journals)
        self._model = self._view.path if self._view is not None else None
        host_ip = self._host_ip if self._rendezvous else LOOPBACK
        put(environment(self._config.layers_per_stage, host_ip, self._config.on_gpu))
        put(device_environment(self.member))
        put(plan_of(self._config, self._journals).as_environment())
        here = f"ipc://{self._journals}/bus"
        os.environ[ADDRESS_VARIABLE] = self._rendezvous.bus if self._rendezvous else here
        if self._rendezvous is not None:
            _use_interface_of(self._host_ip)
        if not self._config.on_gpu:
            share_cores(self._neighbours())

    def _neighbours(self) -> int:
        """The number of the group's ranks on this member's node."""
        return sum(rank.node == self.member.node for rank in self._config.ranks)

    def network_arguments(self) -> dict[str, str | int]:
        return network_arguments(self.members, self.member.number, self._rendezvous)

    def blame(self, error: Exception) -> Exception:
        """The error to raise instead of vLLM's message that its core did not start."""
        if self.reason:
            return LaunchError(self.reason)
        if self._journals is None:
            return error
        cause = verdict(self._journals, self.member.ranks, "")
        return LaunchError(cause) if cause else error

    def abort(self, reason: str) -> None:
        """End the ranks here, as the group lost a member. Callers that wait for them then fail."""
        with self._lock:
            self.reason = self.reason or reason
        processes.end(self._started())

    def _started(self) -> set[psutil.Process]:
        return processes.children() - self._before if self._journals is not None else set()

    def close(self) -> None:
        """End all remaining processes, and remove the files."""
        processes.end(self._started())
        if self._view is not None:
            self._view.release()
            self._view = None
        if self._journals is not None:
            processes.finish_tracker()
            shutil.rmtree(self._journals, ignore_errors=True)
            os.environ.pop(VARIABLE, None)
            self._journals = None


def _check_links(config: EngineConfig) -> None:
    """Check links as at registration, since vLLM opens the model's files by their paths. Raises
    LaunchError.
    """
    folder, roots = Path(config.model_path), inside.here(map(Path, config.roots))
    if not roots or not folder.is_dir():
        return
    try:
        link = inside.link_outside(folder, roots, MAX_ENTRIES)
    except (OSError, CheckpointError) as e:
        raise LaunchError(f"the model's folder cannot be read: {e}") from e
    if link is not None:
        raise LaunchError(
            f"{link} links to a file outside the folders that this installation reads from; put the file "
            "itself there"
        )


def _check_content(config: EngineConfig) -> None:
    """Check that the weights are the registered ones. Raises LaunchError."""
    if not config.fingerprint:
        return
    try:
        now = read_model(Path(config.model_path)).fingerprint
    except CheckpointError as e:
        raise LaunchError(f"the model's files can no longer be read: {e}") from e
    if now != config.fingerprint:
        raise LaunchError(
            f"the weights in {config.model_path} differ from those registered as {config.name}; restore the "
            "registered files, or register the present files under a new name"
        )


def _model_view(config: EngineConfig, journals: Path) -> HeldView | None:
    """The view of the model's folder for vLLM: in its cache, or with the journals if the cache is not
    writable.

    Views that no engine uses are removed. None if the folder is not on this machine. Raises LaunchError.
    """
    folder = Path(config.model_path)
    if not (folder / CONFIG).is_file():
        return None
    weights = config.load_format != "dummy" or _has_weights(folder)
    try:
        try:
            held = hold_view(folder, Path(vllm_cache()) / VIEWS, weights=weights)
            sweep_views(Path(vllm_cache()) / VIEWS)
            return held
        except OSError:
            return hold_view(folder, journals / VIEWS, weights=weights)
    except (OSError, CheckpointError) as e:
        raise LaunchError(f"the model's files cannot be prepared for the engine: {e}") from e


def _has_weights(folder: Path) -> bool:
    """Whether a model whose weights the engine makes up also has files of weights: variants are checked
    against their headers.
    """
    try:
        return bool(weight_files(folder))
    except CheckpointError:
        return False


def _sweep() -> None:
    """Remove the folders of launches whose processes were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        pid = path.name.removeprefix(FOLDER).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _use_interface_of(host_ip: str) -> None:
    """Make Gloo and NCCL use this address's network interface, unless the user chose one.

    By default they use the interface of the host's name, or any.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host_ip for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def reports_of(config: EngineConfig, measured: Sequence[Mapping[str, Any]]) -> tuple[RankReport, ...]:
    """The reported memory of every rank (`PlannedRank.rank_memory`), together with its plan."""
    return tuple(
        RankReport(
            node=config.ranks[report["rank"]].node,
            device_kind=config.ranks[report["rank"]].device_kind,
            device_index=config.ranks[report["rank"]].device_index,
            layers=config.ranks[report["rank"]].layers,
            planned_bytes=config.ranks[report["rank"]].memory_bytes,
            **report,
        )
        for report in sorted(measured, key=lambda report: int(report["rank"]))
    )
