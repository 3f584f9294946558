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
def test_a_folder_inside_the_root_is_accepted(root: Path, form: str) -> None:
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
def test_a_folder_outside_the_root_is_refused(root: Path, form: str) -> None:
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
def test_an_unusable_source_is_refused(root: Path, uri: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        sources.parse(uri.format(root=root) if "{root}" in uri else uri, [root], "source")


def test_a_link_in_a_circle_is_refused(root: Path) -> None:
    with pytest.raises(errors.InvalidRequest):
        sources.parse(f"{root}/loop", [root], "source")


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_a_bundled_source_is_found(name: str) -> None:
    assert sources.parse(f"bundled://{name}", [], "source") == BundledSource(name)


def test_a_file_is_no_folder(root: Path) -> None:
    (root / "file").write_text("")
    for path in (root / "file", root / "missing", root / ("long" * 100), root / "file/below"):
        with pytest.raises(errors.SourceUnreadable):
            sources.require_folder(path, [path], "source")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "deeper/one.safetensors", "deeper/folder"])
@pytest.mark.parametrize("to", ["outside/secret", "outside", "/etc/passwd", "circle"])
def test_links_out_of_the_roots_are_not_followed(root: Path, name: str, to: str) -> None:
    """A user who may write to a root must not read other files with our rights."""
    (root.parent / "outside/secret").write_text("s3cret")
    folder = root / "my model"
    (folder / "deeper").mkdir()
    (folder / name).symlink_to((folder / name) if to == "circle" else root.parent / to)
    with pytest.raises(errors.PathNotAllowed, match=name.rpartition("/")[2]):
        sources.require_folder(folder, [root], "adapter")
    with pytest.raises(errors.PathNotAllowed):
        sources.require_file(str(folder), [root], "evaluation", folders=True)


def test_folders_behind_a_link_are_refused(root: Path) -> None:
    other, folder = root / "other", root / "my model"
    other.mkdir()
    (other / "x").symlink_to("/etc/passwd")
    (other / "back").symlink_to(folder)
    (folder / "sub").symlink_to(other)
    with pytest.raises(errors.PathNotAllowed, match="sub/x"):
        sources.require_folder(folder, [root], "source")
    (other / "x").unlink()
    assert sources.require_folder(folder, [root], "source") == folder


def test_links_among_the_roots_are(root: Path) -> None:
    """The layout of a cache of the Hugging Face hub."""
    blobs, other = root / "blobs", root.parent / "root-too"
    blobs.mkdir()
    for place in (blobs, other):
        (place / "blob").write_text("weights")
    folder = root / "my model"
    (folder / "near").symlink_to("../blobs/blob")
    (folder / "far").symlink_to(other / "blob")
    assert sources.require_folder(folder, [root, other], "source") == folder
    with pytest.raises(errors.PathNotAllowed, match="far"):
        sources.require_folder(folder, [root], "source")
