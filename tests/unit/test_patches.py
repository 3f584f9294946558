"""Patches lie in folders `patches`, and a developer has read what they replace, in the installed versions."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import controlplane.runtime.patches
import profiler.patches
import workers.patches
from profiler.patches.target import Target
from testkit import module_rules, package_sources

ROOT = Path(__file__).parents[2]
FOLDERS = (profiler.patches, workers.patches, controlplane.runtime.patches)
# Replacements outside of folders `patches`, and why.
ELSEWHERE = {
    "profiler/compiled.py": {"numba.config.CACHE_DIR"},  # a setting, as numba documents it
    # The application and the connections of a server that is about to start.
    "controlplane/runtime/replica_http.py": {"config.app"},
}
# Private names that modules use without replacing them: the module, and the names.
PRIVATE = {
    "controlplane/runtime/ray_cluster.py": {"ray._private.worker._global_node.get_logs_dir_path"},
    "controlplane/runtime/replica_http.py": {
        "ray.serve._private.common.RequestMetadata",
        "ray.serve._private.constants.RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD",
    },
    "controlplane/runtime/serve.py": {"ray.serve.context._get_global_client"},
    "workers/kernels/nvrtc.py": {"torch._C._cuda_getCurrentRawStream"},
}


def patches() -> Iterator[ModuleType]:
    """Every module that is one patch."""
    for folder in FOLDERS:
        for found in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            if not found.ispkg and found.name != Target.__module__:
                yield importlib.import_module(found.name)


def targets(value: Any) -> Iterator[Target]:
    if isinstance(value, Target):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from targets(part)


def all_targets() -> list[Any]:
    found = {
        f"{module.__name__}: {target.path}": target
        for module in patches()
        for value in vars(module).values()
        for target in targets(value)
    }
    return [pytest.param(target, id=name) for name, target in found.items()]


@pytest.mark.parametrize("target", all_targets())
def test_a_target_is_one_that_a_developer_read(target: Target) -> None:
    """Where this fails: read the target's new source and its patch, then note the version and the digest."""
    package = target.module.partition(".")[0]
    if package_sources.folder_of(package) is None:
        pytest.skip(f"{package} is not installed")
    now = package_sources.digest(target.module, target.name)
    installed = package_sources.version_of(package)
    assert now in target.read.values(), (
        f"no developer has read {target.path} as {package} {installed} has it: digest {now}"
    )


@pytest.mark.parametrize("target", [one for one in all_targets() if one.values[0].parameters])
def test_a_target_takes_the_parameters_that_its_replacement_uses(target: Target) -> None:
    if package_sources.folder_of(target.module.partition(".")[0]) is None:
        pytest.skip("it is not installed")
    parameters = iter(package_sources.parameters_of(target.module, target.name))
    assert all(parameter in parameters for parameter in target.parameters)


def test_each_patch_says_what_it_replaces() -> None:
    silent = [m.__name__ for m in patches() if not any(True for v in vars(m).values() for _ in targets(v))]
    assert silent == []


def test_no_other_module_replaces_a_part_of_a_package() -> None:
    found = {
        str(path.relative_to(ROOT)): replaced
        for path in module_rules.modules(ROOT)
        if (replaced := module_rules.replacements(ast.parse(path.read_text())))
    }
    assert found == ELSEWHERE


def test_private_names_are_listed() -> None:
    """Each may go with any new version: the list says who would notice."""
    found = {
        str(path.relative_to(ROOT)): names
        for path in module_rules.modules(ROOT)
        if (names := module_rules.private_names(ast.parse(path.read_text())))
    }
    assert found == PRIVATE


SAMPLE = """
import numpy
import os
from ray.serve._private import long_poll
from ray.serve import api
import workers.engine as ours

def made(): ...

def change(owner, self):
    numpy.random.seed = 3
    os.sep = "no package"
    long_poll.LongPollClient._poll_next, other.x = made, 4
    setattr(api, "run", made)
    owner.method = made
    owner.number = 5
    self.method = made
    ours.method = 7
    api._run(3)
"""


def test_replacements_are_found_in_the_source_of_a_module() -> None:
    tree = ast.parse(SAMPLE)
    assert module_rules.replacements(tree) == {
        "numpy.random.seed",
        "long_poll.LongPollClient._poll_next",
        "api",
        "owner.method",
    }
    assert module_rules.private_names(tree) == {
        "ray.serve._private.long_poll.LongPollClient._poll_next",
        "ray.serve.api._run",
    }
