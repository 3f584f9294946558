"""Requests and reads of the openai package, in whichever version runs this: 1.x, 2.x or 3.x.

Arguments: the base URL and a bias of tokens as JSON. Prints one object of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

url, bias = sys.argv[1], json.loads(sys.argv[2])
client = openai.OpenAI(
    base_url=url,
    api_key="unused",
    max_retries=0,
    timeout=300,
    http_client=openai.DefaultHttpxClient(trust_env=False),
)
ASKED: Any = [{"role": "user", "content": "What time is it?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS, "strict": True}}
]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}
LENIENT: Any = [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}]
WRITTEN: Any = {
    "structured_outputs": {
        "regex": r'<tool_call>\n\{"name": "get_time", "arguments": \{"zone": "utc"\}\}\n</tool_call>'
    }
}


def calls(message: Any) -> list[Any]:
    return [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or []]


def streamed(**options: Any) -> dict[str, Any]:
    names, arguments, text, ended = [], "", "", None
    for chunk in client.chat.completions.create(stream=True, messages=ASKED, temperature=0, **options):
        for choice in chunk.choices:
            ended, text = choice.finish_reason or ended, text + (choice.delta.content or "")
            for call in choice.delta.tool_calls or []:
                names += [call.function.name] if call.function and call.function.name else []
                arguments += (call.function.arguments if call.function else None) or ""
    return {
        "names": names,
        "arguments": json.loads(arguments) if arguments else None,
        "text": text,
        "ended": ended,
    }


def asked(**options: Any) -> dict[str, Any]:
    choice = client.chat.completions.create(messages=ASKED, temperature=0, **options).choices[0]
    return {"calls": calls(choice.message), "text": choice.message.content, "ended": choice.finish_reason}


def refused(**options: Any) -> str:
    try:
        asked(**options)
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.code}"
    return "answered"


found: dict[str, Any] = {"version": openai.__version__, "models": [card.id for card in client.models.list()]}
for model in ("smol", "forte"):
    forced = {"model": model, "max_tokens": 300, "logit_bias": bias}
    found[model] = {
        "text": asked(model=model, max_tokens=8),
        "stream": streamed(model=model, max_tokens=8),
        "named": asked(**forced, tools=TOOLS, tool_choice=NAMED),
        "required": asked(**forced, tools=TOOLS, tool_choice="required", parallel_tool_calls=False),
        "streamed": streamed(**forced, tools=TOOLS, tool_choice=NAMED),
        "auto": asked(model=model, max_tokens=300, tools=LENIENT, extra_body=WRITTEN),
        "auto, streamed": streamed(model=model, max_tokens=300, tools=LENIENT, extra_body=WRITTEN),
        "long": asked(model=model, max_tokens=100_000, stop=["a", "e", " "])["ended"] in ("stop", "length"),
    }
found["unknown"] = refused(model="nobody")
found["wrong"] = refused(model="smol", extra_body={"guided_json": {}})
print(json.dumps(found))
