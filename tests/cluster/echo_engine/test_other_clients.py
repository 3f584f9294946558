"""Clients that are not Python's, at a real cluster; those that are heavy to install are `long`."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testkit.cluster import ways_in
from testkit.cluster.clusters import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

SDKS = Path(__file__).parents[1] / "sdks"


def test_every_client_is_answered(echo_cluster: Cluster) -> None:
    ways_in.answer_every_client(echo_cluster)


@pytest.mark.long
def test_the_jdk_s_client_is_answered(echo_cluster: Cluster) -> None:
    """It offers HTTP/2 with its first request, and reads all on one connection."""
    java = shutil.which("java")
    assert java is not None, (
        "java is missing: as root, apt-get install --no-install-recommends default-jdk-headless"
    )
    done = subprocess.run(
        [java, SDKS / "AskJava.java", echo_cluster.url],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split("\n")[:-1] == ["HTTP_1_1 200 true"] * 3, done.stderr


@pytest.mark.long
def test_a_page_of_another_origin_in_a_browser(echo_cluster: Cluster) -> None:
    """It reads whole answers, streams and refusals, with a key, for which its browser asks first."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium")
    assert browser is not None, (
        "chromium is missing: as root, apt-get install --no-install-recommends chromium"
    )
    with sync_playwright() as playwright:
        found = _in_browser(playwright, browser, echo_cluster.url)
    assert [found[name][0] for name in ("whole", "stream", "wrong")] == [200, 200, 404]
    assert json.loads(found["whole"][1])["choices"][0]["text"] == "One, two,"
    assert found["stream"][1].endswith("data: [DONE]\n\n")
    assert json.loads(found["wrong"][1])["error"]["code"] == "model_not_found"
    assert all(found[name][2] for name in ("whole", "stream", "wrong"))  # it reads the request's id


def _in_browser(playwright: Any, browser: str, api: str) -> Any:
    """The page's findings, at a place that needs no server."""
    # A page of the Internet may not ask this machine, whatever its answers allow.
    options = ["--no-sandbox", "--disable-features=LocalNetworkAccessChecks"]
    with playwright.chromium.launch(executable_path=browser, args=options) as started:
        tab = started.new_page()
        text = (SDKS / "page.html").read_text()
        tab.route(f"{ways_in.PAGE}/**", lambda route: route.fulfill(body=text, content_type="text/html"))
        tab.goto(f"{ways_in.PAGE}/page.html?api={api}")
        tab.wait_for_function("window.found !== undefined")
        return tab.evaluate("window.found")
