"""The first checks of `ostinato up`: names of variables, the home, the settings of a running cluster.

Each refusal names the expected value, the given value and what to do.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping

from controlplane import errors
from controlplane.settings import Settings

PREFIX = "OSTINATO_"
LOOPBACK = "127.0.0.1"
# Variables with our prefix that are not settings: of clients, of one process, or of tests of the kernels.
OTHERS = frozenset(
    PREFIX + name
    for name in (
        "URL",
        "CLUSTER",
        "COMPILED_DIR",
        "DISTINCT_LAYERS",
        "GROUP",
        "MEASURING_GATE",
        "MEASURING_VARIANTS",
        "SPARSE_TENSOR_CORES",
        "SVD_TENSOR_CORES",
        "VARIANT_BUS",
    )
)
# Settings of earlier versions, and their replacements.
OF_DEPLOYMENTS = {
    "MERGED_SLOT": "engine.mergedSlot",
}
NOW = {
    "PROFILE": "set OSTINATO_PROFILE_SECONDS=0 to measure nothing",
    "ECHO_TPOT_S": "set OSTINATO_ENGINE=echo:S",
    "HAPROXY": "HAProxy is always in front of the gateways",
    "PROXY_SHEDS": "set OSTINATO_SHEDS_LOAD",
}
FIXED = frozenset(
    (
        *("AUDIT_LOG_BYTES", "BATCHED_TOKENS", "BODY_TIMEOUT_S", "COMPRESS_LIMIT_S", "COMPRESS_PER_NODE"),
        *("ENGINE_NUM_CPUS", "ENGINE_START_TIMEOUT_S", "FIRST_BYTE_TIMEOUT_S", "LARGE_BODY_BYTES"),
        *("MAX_BODY_PARTS", "MAX_GRAMMAR_BYTES", "MAX_IN_FLIGHT_FACTOR", "MAX_PROMPT_LOGPROBS"),
        *("MAX_QUEUED_REQUESTS", "MAX_SEQUENCES", "MAX_WORDS", "NEXT_BYTE_TIMEOUT_S", "NODE_LOST_S"),
        *("REPORT_STALE_S", "SILENT_CUT_S", "SILENT_S", "UNSENT_BYTES", "WRITE_TIMEOUT_S"),
    )
)
# Kubernetes sets these in a Pod when a Service's name begins with ostinato.
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_\d+_(TCP|UDP)(_|$)")
# Settings of which only a digest is shown.
SECRETS = ("api_key", "store_url")


def setting_names() -> frozenset[str]:
    return frozenset(PREFIX + name.upper() for name in Settings.model_fields)


def unknown_variables(environment: Iterable[str]) -> dict[str, str]:
    """Variables with our prefix that nothing reads, each with the setting of the nearest name ("": none)."""
    names = set(environment)
    known = setting_names() | OTHERS
    links = {name for name in names if SERVICE_LINK.search(name)}
    links |= {name for name in names if name.endswith("_PORT") and f"{name[:-5]}_SERVICE_HOST" in names}
    unknown = sorted(name for name in names - known - links if name.startswith(PREFIX))
    return {name: _nearest(name) for name in unknown}


def _nearest(name: str) -> str:
    words = [each.removeprefix(PREFIX) for each in setting_names()]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), sorted(words), n=1, cutoff=0.75)
    return f"{PREFIX}{near[0]}" if near else ""


def describe_unknown(found: Mapping[str, str]) -> str:
    """One message for the variables that `unknown_variables` found."""
    said = [_said(name, near) for name, near in found.items()]
    return f"{', '.join(said)}; unset these variables, or correct their names (docs/settings.md lists them)"


def _said(name: str, near: str) -> str:
    word = name.removeprefix(PREFIX)
    if word in OF_DEPLOYMENTS:
        return f"{name} is no longer a setting (use {OF_DEPLOYMENTS[word]} of a deployment)"
    if word in NOW:
        return f"{name} is no longer a setting ({NOW[word]})"
    if word in FIXED:
        return f"{name} is no longer a setting (its value is fixed)"
    return f"{name} is not a setting" + (f" (did you mean {near}?)" if near else "")


def require_known_variables(environment: Iterable[str]) -> None:
    """Refuse unknown variables: a misspelt name would otherwise change nothing. Errors: InvalidRequest."""
    if found := unknown_variables(environment):
        raise errors.InvalidRequest(describe_unknown(found))


def require_home(settings: Settings) -> None:
    """Make the home, and write a byte there. Errors: Unavailable."""
    try:
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=settings.home) as file:
            file.write(b"x")
            file.flush()
    except OSError as e:
        raise errors.Unavailable(
            f"the home folder {settings.home} is not writable ({e.strerror}); choose another folder with"
            " OSTINATO_HOME or --home, or change the folder's owner or permissions"
        ) from e


def require_loopback() -> None:
    """Connect to 127.0.0.1, over which the processes of a local cluster talk. Errors: Unavailable."""
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as listener,
            socket.create_connection(listener.getsockname()),
        ):
            pass
    except OSError as e:
        raise errors.Unavailable(
            f"the processes of a local cluster need {LOOPBACK}, which this machine lacks ({e.strerror});"
            f" add it with `ip addr add {LOOPBACK}/8 dev lo && ip link set lo up`. Only the API can listen"
            " on IPv6 alone (OSTINATO_HTTP_HOST=::1)"
        ) from e


def require_same_settings(asked: Settings, running: Mapping[str, str]) -> None:
    """Require that a running cluster has the given settings; `up` does not change them.

    `running`: the environment of one of its processes. A setting that it lacks comes from a newer version.
    Errors: InvalidRequest.
    """
    differing = [
        f"{name} is {_shown(name, running[name])} there, but {_shown(name, value)} is set now"
        for name, value in asked.as_env().items()
        if name in running and running[name] != value
    ]
    if differing:
        raise errors.InvalidRequest(
            f"the cluster of {asked.home} already runs with other settings ({', '.join(differing)}); run"
            " `ostinato down`, then `ostinato up`, or set the same values as the running cluster"
        )


def _shown(name: str, value: str) -> str:
    if name.removeprefix(PREFIX).lower() in SECRETS and value:
        return f"(secret, sha256 {hashlib.sha256(value.encode()).hexdigest()[:8]})"
    return repr(value)


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """The given `no_proxy` plus this machine: the cluster's processes call each other without a proxy."""
    local = ("127.0.0.1", "localhost", "::1")
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    listed = [part.strip() for part in given.split(",") if part.strip()]
    names = ",".join([*listed, *(name for name in local if name not in listed)])
    return {"no_proxy": names, "NO_PROXY": names}


def proxy_hint(environment: Mapping[str, str], url: str) -> str:
    """The variable that a client on this machine must set to bypass a proxy; empty: none."""
    lower = {name.lower(): value for name, value in environment.items()}
    asked = lower.get("http_proxy") or lower.get("all_proxy")
    excepted = {part.strip() for part in lower.get("no_proxy", "").split(",")}
    host = re.sub(r"^https?://\[?|\]?:\d+$", "", url)
    if not asked or excepted & {host, "*"}:
        return ""
    wanted = ",".join(dict.fromkeys([*sorted(excepted - {""}), host, "localhost"]))
    return f"http_proxy is set: before you use other clients on this machine, run `export no_proxy={wanted}`"
