"""Requests and reads of litellm. Arguments: the base URL and a bias of tokens as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices

import litellm  # type: ignore[import-not-found, unused-ignore]

url, bias = sys.argv[1], json.loads(sys.argv[2])
ASKED = [{"role": "user", "content": "What time is it?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS, "strict": True}}]
NAMED = {"type": "function", "function": {"name": "get_time"}}


def ask(model: str, **options: Any) -> Any:
    given = {"api_base": url, "api_key": "unused", "temperature": 0, "messages": ASKED, "num_retries": 0}
    return litellm.completion(model=f"openai/{model}", **{**given, **options})


text = ask("forte", max_tokens=8).choices[0].message.content
stream = "".join(c.choices[0].delta.content or "" for c in ask("forte", max_tokens=8, stream=True))
called = ask("smol", max_tokens=300, tools=TOOLS, tool_choice=NAMED, logit_bias=bias).choices[0].message
try:
    ask("nobody", max_tokens=8)
    unknown = "answered"
except Exception as error:
    unknown = type(error).__name__
named = [[call.function.name, json.loads(call.function.arguments)] for call in called.tool_calls]
print(json.dumps({"text": text, "stream": stream, "named": named, "unknown": unknown}))
