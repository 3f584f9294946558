"""Carries out a `FetchRequest` in a process of its own, which ends when this process ends, for any reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Mapping

from workers.clean_environment import clean_environment
from workers.fetching.messages import LINES, REQUESTS, Failed, Fetched, FetchRequest
from workers.group.jobs import exit_reason

# What clients of sources read: endpoints, proxies, certificates, and the installation's credentials.
_PREFIXES = ("HF_", "HUGGING_FACE_", "AWS_", "GOOGLE_", "CLOUDSDK_", "GCE_", "SSL_CERT_")
_NAMES = ("STORAGE_EMULATOR_HOST", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
# A tenant's fetch finds no credentials in its environment.
_PLACES = (
    "HF_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "AWS_CA_BUNDLE",
)


class FetchingError(RuntimeError):
    """A fetch was interrupted; a restart continues it. The message has the cause."""


def carry_out(request: FetchRequest) -> Generator[str, None, None]:
    """Yield lines (`messages.LINES`) as they come; the last one is Fetched or Failed. Closing this ends the
    process. Raises FetchingError if the process ends without such a line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.fetching"],
        env=fetch_environment(os.environ, own=not request.tenant),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(REQUESTS.dump_json(request) + b"\n")
        process.stdin.flush()
        for line in process.stdout:
            yield line.decode().rstrip("\n")
            if isinstance(LINES.validate_json(line), Fetched | Failed):
                return
        raise FetchingError(f"the process that fetches ended with {exit_reason(process.wait())}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


def fetch_environment(environment: Mapping[str, str], own: bool) -> dict[str, str]:
    """The environment of a fetch: with the installation's credentials only if they are its `own`."""
    kept = {
        name: value
        for name, value in environment.items()
        if name.lower() in _PROXIES
        or name in (*_NAMES, *_PLACES)
        or (name.startswith(_PREFIXES) and (own or name.startswith("SSL_CERT_")))
    }
    cleaned = clean_environment(environment)
    del cleaned["HF_HUB_OFFLINE"]
    return cleaned | kept | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
