"""The Dockerfile, read: no container runtime is needed, and none of this proves that it builds."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from controlplane.runtime.front_door import environment as front_door
from controlplane.runtime.local import ray_switches

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN",
    "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """The arguments before the first stage, and the stages by name."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        assert name in INSTRUCTIONS, f"unknown instruction: {line}"
        if name == "FROM":
            image, keyword, alias = rest.split()
            assert keyword == "AS"
            current = stages[alias] = Stage(alias, image)
        elif current is None:
            assert name == "ARG"
            key, _, value = rest.partition("=")
            arguments[key] = value
        else:
            current.steps.append((name, " ".join(rest.split())))
    return arguments, stages


ARGUMENTS, STAGES = parse(DOCKERFILE.read_text())
final = pytest.mark.parametrize("stage", [STAGES["cpu"], STAGES["gpu"]], ids=["cpu", "gpu"])
each_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)


def base_of(stage: Stage) -> str:
    name = re.fullmatch(r"\$\{(\w+)\}", stage.base)
    return ARGUMENTS[name[1]] if name else stage.base


@each_stage
def test_bases_are_pinned(stage: Stage) -> None:
    image, _, tag = base_of(stage).partition(":")
    assert image
    assert tag, f"{image} has no tag"
    assert "latest" not in tag


def test_the_image_has_pinned_bases() -> None:
    assert base_of(STAGES["cpu"]) == "python:3.11-slim"
    assert re.fullmatch(r"nvidia/cuda:[\d.]+-runtime-ubuntu[\d.]+", base_of(STAGES["gpu"]))


@final
def test_the_image_runs_as_another_user_than_root(stage: Stage) -> None:
    assert stage.all("USER") == ["1000:1000"]
    after = [name for name, _ in stage.steps][[name for name, _ in stage.steps].index("USER") :]
    assert "RUN" not in after
    assert "COPY" not in after
    created = " ".join(stage.all("RUN"))
    assert "useradd --uid 1000" in created


@final
def test_the_image_reports_its_health(stage: Stage) -> None:
    (check,) = stage.all("HEALTHCHECK")
    command = json.loads(check.partition("CMD")[2])
    assert command[0] == "python"
    compile(command[2], "healthcheck", "exec")
    assert "/-/healthz" in command[2]


@final
def test_the_image_runs_the_serve_configuration(stage: Stage) -> None:
    (command,) = stage.all("CMD")
    run, verb, path = json.loads(command)
    assert (run, verb) == ("serve", "run")
    assert (ROOT / Path(path).relative_to("/opt/ostinato")).is_file()


@final
def test_the_image_builds_in_another_stage(stage: Stage) -> None:
    copied = [shlex.split(text) for text in stage.all("COPY")]
    assert {words[0] for words in copied} == {f"--from={stage.name}-build"}
    assert [words[2] for words in copied] == ["/opt/venv", "/opt/ostinato"]
    # A virtual environment works only where it was made, with the Python it was made with.
    assert all(words[1] == words[2] for words in copied)
    assert base_of(stage) == base_of(STAGES[f"{stage.name}-build"])


def test_the_cpu_image_installs_the_lock() -> None:
    steps = STAGES["cpu-build"].steps
    assert ("COPY", "requirements/cpu.txt /tmp/cpu.txt") in steps
    installs = [text for name, text in steps if name == "RUN" and "pip install" in text]
    assert "pip install --no-deps -r /tmp/cpu.txt" in installs[0]
    assert "--no-deps --no-build-isolation -e /opt/ostinato" in installs[-1]


def test_the_gpu_image_pins_vllm() -> None:
    stage = STAGES["gpu-build"]
    arguments = dict(text.partition("=")[::2] for text in stage.all("ARG"))
    assert arguments["VLLM_VERSION"] == "0.26.0"
    assert all('"vllm==${VLLM_VERSION}"' in text for text in stage.all("RUN") if "pip install" in text)


def test_versions_of_ray_agree() -> None:
    arguments = dict(text.partition("=")[::2] for text in STAGES["gpu-build"].all("ARG"))
    locked = re.search(r"(?m)^ray(?:\[.*\])?==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text())
    assert locked
    chart = yaml.safe_load((ROOT / "helm" / "ostinato" / "values.yaml").read_text())
    assert {arguments["RAY_VERSION"], locked[1], chart["ray"]["version"]} == {"2.60.0"}


@each_stage
def test_the_image_has_no_secrets(stage: Stage) -> None:
    for name, text in stage.steps:
        if name in {"ARG", "ENV"}:
            assert not re.search(r"(?i)(token|secret|password|api_?key|credential)", text), text


@each_stage
def test_package_lists_are_not_kept(stage: Stage) -> None:
    for text in stage.all("RUN"):
        if "apt-get update" in text:
            assert "--no-install-recommends" in text
            assert "rm -rf /var/lib/apt/lists/*" in text


def test_the_build_context_holds_only_copied_files() -> None:
    rules = (ROOT / ".dockerignore").read_text().split("\n")
    rules = [rule for rule in rules if rule and not rule.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    packages = {"controlplane", "workers", "placement", "profiler"}
    assert packages | {"pyproject.toml", "requirements", "README.md", "deploy/serve-config.yaml"} <= kept
    assert not {".git", "tests", ".tools", ".venv", "helm"} & kept


def ray_settings() -> dict[str, str]:
    lines = (ROOT / "deploy" / "ray.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_rays_settings_are_those_of_a_local_cluster() -> None:
    told = ray_settings()
    program = told.pop(front_door.BINARY)  # a local cluster has one of its own
    assert program == f"$(command -v {front_door.PROGRAM})"
    assert told.items() <= ray_switches().items()
    assert front_door.EVERYWHERE.items() <= told.items()


@final
def test_images_have_rays_settings(stage: Stage) -> None:
    pairs = [pair for text in stage.all("ENV") for pair in shlex.split(text)]
    environment = dict(pair.split("=", 1) for pair in pairs)
    told = ray_settings() | {front_door.BINARY: f"/opt/venv/bin/{front_door.PROGRAM}"}
    assert told.items() <= environment.items()
    assert front_door.problem(environment) == ""
