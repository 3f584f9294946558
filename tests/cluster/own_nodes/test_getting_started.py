"""Every command of docs/getting-started.md, as a reader types them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.runtime import local
from controlplane.settings import Settings
from testkit.cluster.clusters import COMPILED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/getting-started.md"
PORT = "8000"  # what the guide says; the test asks for a free one


def blocks(guide: str) -> list[str]:
    """The guide's commands: indented blocks and those fenced as `sh`, in order."""
    found = re.finditer(
        r"^```sh\n(?P<fenced>(?:[^`][^\n]*\n|\n)*)```$|(?P<indented>(?:^    [^\n]*\n|^\n)+)", guide, re.M
    )
    texts = [m["fenced"] or re.sub(r"^    ", "", m["indented"], flags=re.M) for m in found]
    return [text.strip("\n") for text in texts if text.strip()]


@pytest.fixture
def environment(tmp_path: Path, smollm2_folder: Path) -> Iterator[dict[str, str]]:
    """A reader's, with a home of their own, a free port, few steps of training and nothing measured. What was
    compiled on this machine before need not be compiled again."""
    home = Path(f"/tmp/ost-guide-{os.getpid()}")  # Ray's socket paths may not be long
    shutil.copytree(smollm2_folder, tmp_path / "shelves/models/smollm2-135m-instruct")
    port = str(local.free_port())
    yield {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
        **COMPILED,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": str(ROOT),
        "STEPS": "8",
        "OSTINATO_HOME": str(home),
        "OSTINATO_HTTP_PORT": port,
        "OSTINATO_URL": f"http://127.0.0.1:{port}",
        "OSTINATO_PROFILE_SECONDS": "0",
    }
    local.end_leftovers(Settings(home=home), lambda message: None)
    shutil.rmtree(home, ignore_errors=True)


def test_every_command_works_and_variants_know_what_they_learned(
    environment: dict[str, str], tmp_path: Path
) -> None:
    commands = blocks(GUIDE.read_text(encoding="utf-8"))
    assert len(commands) >= 10, "the guide's commands were not recognised"
    port = environment["OSTINATO_HTTP_PORT"]
    script = "\n".join(f"echo '--- {n}'\n{text}" for n, text in enumerate(commands))
    script = script.replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{port}").replace(". .venv/bin/activate", ":")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=(log := (tmp_path / "stderr").open("w+")),
        text=True,
        check=False,
    )
    log.seek(0)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{log.read()[-3000:]}"
    said: dict[str, str] = dict(re.findall(r"^--- (\d+)\n(.*?)(?=^--- |\Z)", done.stdout, re.M | re.S))

    def answer_to(command: str) -> str:
        """The last lines of the block that holds this command."""
        return next(said[str(n)] for n, text in enumerate(commands) if command in text)

    lora, base = answer_to("infer shelves ").split("\n")[-3:-1]
    assert "The tea is on shelf" in lora
    assert "on shelf" not in base
    assert "on shelf" in answer_to("| ostinato chat shelves")
    assert "on shelf" in answer_to("infer shelves-full")
    assert "on shelf" in answer_to("curl -s")
