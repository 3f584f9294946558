"""A command's failure: two short lines for people or one JSON document, on stderr, and the exit code."""

from __future__ import annotations

import re
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from controlplane.cli.output import json_text
from controlplane.client.responses import error_of
from controlplane.errors import OstinatoError
from controlplane.printable import printable
from controlplane.state.terms import Phase

if TYPE_CHECKING:
    from controlplane.management.schemas.models import OperationView


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_REACHABLE = 3
    INTERRUPTED = 130


USAGE = "usage"
REST_CALL = re.compile(r"\b(GET|POST|PUT|PATCH|DELETE) /")

HINTS: dict[str, str] = {
    "internal_error": "this is a defect: run the command again with --debug and report its output",
    "invalid_request": "correct the request; `ostinato COMMAND --help` shows arguments and options",
    "context_length_exceeded": "shorten the text, or `ostinato tune MODEL --context N`",
    "no_chat_template": "`ostinato infer MODEL TEXT` completes a text without a chat template",
    "source_unreadable": "check that the folder holds a complete checkpoint or adapter",
    "unauthorized": "set OSTINATO_API_KEY to the key that this installation was started with",
    "forbidden": "use a key with more rights: an admin's key, or a key of the tenant that owns the model",
    "quota_exceeded": "delete variants that are not needed, or ask an administrator to raise the quota",
    "path_not_allowed": "add the folder to OSTINATO_ALLOWED_ROOTS and start Ostinato again",
    "source_not_allowed": "add the source to OSTINATO_SOURCES and start Ostinato again",
    "source_not_found": "check the name, the revision and the address of the source",
    "source_denied": "set HF_TOKEN or other credentials before `ostinato up`, or OSTINATO_SOURCE_CREDENTIALS",
    "wrong_digest": "register again; if it fails again, the file is damaged at its source",
    "source_unreachable": "check the network and the source, then register again: the fetch continues",
    "disk_budget_too_small": "raise OSTINATO_SOURCE_BYTES, undeploy a model, or free space on the disk",
    "model_not_found": "`ostinato models` lists the names",
    "not_deployed": "deploy the model with `ostinato deploy MODEL`",
    "operation_not_found": "`ostinato operations` lists the ids",
    "already_exists": "choose another name, or delete the model of this name first",
    "in_use": "undeploy or delete first what uses the model; `ostinato status` shows what does",
    "not_ready": "wait until the model is Ready; `ostinato operations` shows the progress",
    "idempotency_conflict": "send a different request with a new Idempotency-Key",
    "stale_write": "look at the present state with `ostinato status`, then try again",
    "host_not_allowed": "use the machine's own name in the URL, or add this name to OSTINATO_ALLOWED_HOSTS",
    "body_too_slow": "send the body faster, or split it into smaller requests",
    "body_too_large": "send a shorter request, or raise OSTINATO_MAX_BODY_BYTES",
    "adapter_mismatch": "register the adapter with the base that it was trained on",
    "loss_too_large": "allow more with --max-loss, or serve the fine-tune as a model of its own",
    "no_feasible_plan": "loosen the limits, free a device, or allow more compression",
    "overloaded": "try again in a moment, with fewer requests at once",
    "rate_limit_exceeded": "wait for the time in Retry-After, or ask an administrator to raise the quota",
    "engine_failed": "`ostinato logs MODEL` shows why; the engine is being restarted",
    "profiling_failed": "`ostinato profile MODEL` tries again; until then estimates are rough",
    "compression_failed": "see `ostinato describe MODEL`, then delete the model and register it again",
    "unavailable": "try again in a moment; `ostinato status` shows what is starting",
    "late": "raise the request's target, or let late requests finish (`ostinato tune MODEL --late finish`)",
    "cut": "try again; `ostinato logs MODEL` shows what the engine does",
    "timed_out": "ask for a shorter answer, or raise OSTINATO_REQUEST_TIMEOUT_S",
}


# Hints for codes without a class, which concern the call itself.
CALL_HINTS = {
    "path_not_found": (
        "give --url without a path, such as http://127.0.0.1:8000; a server of another version may lack this "
        "call"
    ),
}


class NotSucceeded(Exception):
    """The operation failed or was cancelled."""

    def __init__(self, operation: OperationView) -> None:
        super().__init__(operation.id)
        self.operation = operation


class Interrupted(Exception):
    """Ctrl-C while waiting for an operation, which continues."""

    def __init__(self, operation: OperationView) -> None:
        super().__init__(operation.id)
        self.operation = operation


def require_success(operation: OperationView) -> None:
    if operation.phase in {Phase.FAILED, Phase.CANCELLED}:
        raise NotSucceeded(operation)


def report_error(error: OstinatoError, as_json: bool) -> ExitCode:
    reachable = error.details.get("reachable") is not False
    code = ExitCode.FAILED if reachable else ExitCode.NOT_REACHABLE
    return _report(error.body(), code, as_json)


def report_operation(operation: OperationView, as_json: bool) -> ExitCode:
    if operation.phase == Phase.CANCELLED:
        message = f"operation {operation.id} on '{operation.target}' was cancelled; run the command again"
        return report(message, "cancelled", ExitCode.FAILED, as_json)
    return _report(error_of(operation).body(), ExitCode.FAILED, as_json)


def report_interrupt(operation: OperationView, as_json: bool) -> ExitCode:
    ways = f"`ostinato watch {operation.id}` follows it, `ostinato cancel {operation.id}` stops it"
    message = f"this command stopped waiting, but operation {operation.id} continues; {ways}"
    return report(message, "interrupted", ExitCode.INTERRUPTED, as_json)


def report(message: str, code: str, exit_code: ExitCode, as_json: bool) -> ExitCode:
    """Report a failure that does not come from the API."""
    error = {"message": message, "type": "cli_error", "param": None, "code": code}
    return _report({"error": error}, exit_code, as_json)


def report_usage(message: str, command: str | None, as_json: bool) -> ExitCode:
    """Report a wrong command line; `command` is the first of our commands in it."""
    error = {"message": message, "type": "cli_error", "param": None, "code": USAGE}
    return _report({"error": error}, ExitCode.USAGE, as_json, _help(message, command))


def _help(message: str, command: str | None) -> str:
    early = next(
        (flag for flag in ("--url", "--debug") if message.startswith(f"No such option: {flag}")), None
    )
    if early and command:
        return f"write {early} before the command: `ostinato {early} ... {command}`"
    if command is None:
        return "`ostinato --help` lists the commands"
    return f"`ostinato {command} --help` shows its arguments and options"


def _report(body: dict[str, Any], code: ExitCode, as_json: bool, usage: str = "") -> ExitCode:
    if as_json:
        print(json_text({**body, "exitCode": int(code)}), file=sys.stderr)
        return code
    error = body["error"]
    details = error.get("details") or {}
    what, hint = (error["message"], usage) if usage else _two_lines(error["message"], _code(error, details))
    hint = _ways(details) or hint
    text = f"Error: {what}" + (f"\nHint:  {hint}" if hint else "")
    print(printable(text), file=sys.stderr)
    return code


def _code(error: dict[str, Any], details: dict[str, Any]) -> str:
    """The API's code. A code without a class in this version is in the details."""
    named = details.get("code")
    return named if isinstance(named, str) and named in CALL_HINTS else str(error["code"])


def _ways(details: dict[str, Any]) -> str:
    """The relaxations that would make limits feasible, one per line."""
    texts = [
        str(relaxation["text"])
        for relaxation in details.get("relaxations") or ()
        if isinstance(relaxation, dict)
    ]
    if len(texts) < 2:
        return "".join(texts)
    which = "do all of these together:" if details.get("together") else "do any of these:"
    return "\n  - ".join([which, *texts])


def _two_lines(message: str, code: str) -> tuple[str, str]:
    """Split a message "what happened; what to do" into its parts. A message without a second part gets its
    code's hint, and so does a message that names a REST call."""
    what, _, advice = message.partition("\n")[0].rstrip(": ").partition("; ")
    if not advice or REST_CALL.search(advice):
        advice = CALL_HINTS.get(code) or HINTS.get(code, advice)
    return what, advice
