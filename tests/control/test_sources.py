"""Which URIs are read from, and which are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane import errors
from controlplane.controller import sources
from controlplane.controller.sources import BundledSource


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/my model").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root-too").mkdir()
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    (tmp_path / "root/loop").symlink_to(tmp_path / "root/loop")
    (tmp_path / "way-in").symlink_to(tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize(
    "form",
    [
        "{root}/my model",
        "{root}/./x/../my model",
        "file://{root}/my model",
        "file://{root}/my%20model",
        "file://localhost{root}/my%20model",
        "file:{root}/my%20model",
        "{root}/../way-in/my model",
    ],
)
def test_inside_the_root(root: Path, form: str) -> None:
    assert sources.parse(form.format(root=root), [root], "source") == root / "my model"


@pytest.mark.parametrize(
    "form",
    [
        "/etc",
        "/",
        "{root}/..",
        "{root}/../outside",
        "{root}/link",
        "{root}/link/deeper",
        "{root}-too",
        "file:///etc/passwd",
        "file://{root}/%2e%2e/outside",
        "file://{root}/..%2Foutside",
        "file://{root}/link",
        "file:",
        "file:relative",
        "file://",
    ],
)
def test_outside_the_root(root: Path, form: str) -> None:
    with pytest.raises(errors.PathNotAllowed) as refusal:
        sources.parse(form.format(root=root), [root], "adapter")
    assert refusal.value.param == "adapter"


@pytest.mark.parametrize(
    "uri",
    [
        "relative/path",
        "~/model",
        "http://example.com/m",
        "hf://org/model",
        "org/model",
        "file://elsewhere/m",
        "bundled://nothing",
        "bundled://smollm2-135m-instruct/x",
        "bundled:smollm2-135m-instruct",
        "http://[::1",
        "file://[x/m",
        "{root}/nul\0byte",
        "file://{root}/nul%00byte",
        "",
        " ",
    ],
)
def test_unusable(root: Path, uri: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        sources.parse(uri.format(root=root) if "{root}" in uri else uri, [root], "source")


def test_a_link_in_a_circle_is_refused(root: Path) -> None:
    with pytest.raises(errors.InvalidRequest):
        sources.parse(f"{root}/loop", [root], "source")


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_bundled(name: str) -> None:
    assert sources.parse(f"bundled://{name}", [], "source") == BundledSource(name)


def test_a_file_is_no_folder(root: Path) -> None:
    (root / "file").write_text("")
    for path in (root / "file", root / "missing", root / ("long" * 100), root / "file/below"):
        with pytest.raises(errors.SourceUnreadable):
            sources.require_folder(path, "source")
