"""infer, chat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Annotated

import typer

from controlplane.cli.failures import report_error
from controlplane.cli.output import print_json, print_text
from controlplane.cli.session import Json, Session, session
from controlplane.client.client import Client
from controlplane.client.responses import finish_of, text_of
from controlplane.errors import OstinatoError
from controlplane.management.schemas.models import InferenceModelRequest
from controlplane.printable import printable

CUT = "length"  # the finish reason of an answer that reached its limit
_LONGER = "raise --max-output, up to the limits of the deployment (`deploy --max-output`) and the context"

Name = Annotated[str, typer.Argument(help="A deployed model.")]
MaxOutput = Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")]


def infer(  # noqa: PLR0913 - typer reads a command's options from its parameters
    ctx: typer.Context,
    model: Name,
    text: Annotated[str, typer.Argument(help="The input text; - reads it from stdin.")],
    *,
    max_output: MaxOutput = None,
    temperature: Temperature = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text without the chat template.")] = False,
    json: Json = False,
) -> None:
    """Send one request to a deployed model and print its answer."""
    cli = session(ctx)
    request = InferenceModelRequest(
        model=model,
        inputText=sys.stdin.read() if text == "-" else text,
        maxOutputLength=max_output,
        temperature=temperature,
        seed=seed,
        format="raw" if raw else "auto",
    )
    with cli.client() as client:
        answer = client.inference_model(request)
    if cli.json:
        print_json(answer)
        return
    if answer.note:
        print(printable(answer.note), file=sys.stderr)
    print_text(answer.outputText)
    if answer.finishReason == CUT:
        print(f"the answer was cut after {answer.outputTokens} tokens; {_LONGER}", file=sys.stderr)


def chat(
    ctx: typer.Context,
    model: Name,
    max_output: MaxOutput = None,
    temperature: Temperature = None,
    json: Json = False,
) -> None:
    """Chat with a deployed model. /exit or Ctrl-D leaves; Ctrl-C stops an answer."""
    cli = session(ctx)
    given = {"max_tokens": max_output, "temperature": temperature}
    params = {name: value for name, value in given.items() if value is not None}
    messages: list[dict[str, str]] = []
    with cli.client() as client:
        for text in _inputs(prompt=sys.stdin.isatty() and not cli.json):
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(cli, client, model, messages, params)
            except OstinatoError as error:
                if not sys.stdin.isatty():
                    raise
                report_error(error, cli.json)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})


def _inputs(prompt: bool) -> Iterator[str]:
    if prompt:
        with suppress(ImportError):  # history and editing, where the platform has it
            import readline  # noqa: F401 - imported for its effect on input()
        print_text("Ctrl-C stops an answer; /exit or Ctrl-D leaves.")
    while True:
        try:
            text = input("> " if prompt else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/exit":
            return
        if text:
            yield text


def _answer(
    cli: Session,
    client: Client,
    model: str,
    messages: list[dict[str, str]],
    params: dict[str, float],
) -> str:
    """Print the answer as it comes, and return it. Ctrl-C keeps the text that came so far."""
    said: list[str] = []
    stopped, ended = False, None
    with closing(
        client.chunks("/v1/chat/completions", {**params, "model": model, "messages": messages})
    ) as chunks:
        try:
            for chunk in chunks:
                said.append(text_of(chunk))
                ended = finish_of(chunk) or ended
                _print_piece(cli, said[-1])
        except KeyboardInterrupt:
            stopped = True
        finally:
            if not cli.json:
                print_text(" [stopped]" if stopped else "")
    if cli.json:
        whole = {"role": "assistant", "content": "".join(said), "finishReason": ended}
        print_json({"done": True, "stopped": stopped, **whole})
    elif ended == CUT:
        print(f"the answer was cut at its longest allowed length; {_LONGER}", file=sys.stderr)
    return "".join(said)


def _print_piece(cli: Session, piece: str) -> None:
    if not piece:
        return
    if cli.json:
        print_json({"delta": piece})
    else:
        print(printable(piece), end="", flush=True)
