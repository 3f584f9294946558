"""The OpenAPI document as one page for people.

The page loads no program or style from other hosts, so it works without the Internet. It needs no key,
because it reveals nothing about an installation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; color: #222 }
code, pre { font: 13px ui-monospace, monospace; background: #f3f3f3; border-radius: 3px }
code { padding: 0 .2em } pre { padding: .6em; overflow-x: auto }
summary { cursor: pointer } summary b { display: inline-block; width: 4.5em }
details { border-top: 1px solid #ddd; padding: .4em 0 } td { padding: .1em .8em .1em 0; vertical-align: top }
"""
_METHODS = ("get", "post", "put", "patch", "delete")


def page_of(document: Mapping[str, Any]) -> str:
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    by_tag: dict[str, list[str]] = {}
    for path, calls in document["paths"].items():
        for method in _METHODS:
            if method in calls:
                tag = (calls[method].get("tags") or ["other"])[0]
                by_tag.setdefault(tag, []).append(_call(document, method, path, calls[method]))
    parts = [f"<h2>{escape(tag)}</h2>{''.join(calls)}" for tag, calls in by_tag.items()]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><p>{escape(info.get('description', ''))} Send the API key, if the installation has "
        "one, as <code>Authorization: Bearer KEY</code>. Programs read <code>GET /openapi.json</code>.</p>"
        f"{''.join(parts)}</html>"
    )


def _call(document: Mapping[str, Any], method: str, path: str, call: Mapping[str, Any]) -> str:
    schema = _body_schema(document, call)
    rows = [_parameter(document, each) for each in call.get("parameters", ())]
    rows += _fields(document, schema)
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    said = escape(call.get("description") or schema.get("description", ""))
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code></summary>"
        f"<p>{said}</p>{table}<pre>{escape(_example(method, path, schema))}</pre></details>"
    )


def _parameter(document: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    return _row(document, f"{given['name']} ({given['in']})", given.get("schema", {}), given)


def _fields(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    needed = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        yield _row(document, f"{name} *" if name in needed else name, field, field)


def _row(document: Mapping[str, Any], name: str, schema: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    default = schema.get("default")
    by_default = "" if default is None else f" ({json.dumps(default)})"
    said = escape(told.get("description", ""))
    kind = escape(_kind(document, schema) + by_default)
    return f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{said}</td></tr>"


def _kind(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A type in words."""
    if "$ref" in schema:
        named = _resolved(document, schema)
        inner = ", ".join(named.get("properties", ()))
        return f"{{{inner}}}" if inner else _kind(document, named)
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            kinds = [_kind(document, each) for each in schema[several] if each.get("type") != "null"]
            return " | ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return f"list of {_kind(document, schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _body_schema(document: Mapping[str, Any], call: Mapping[str, Any]) -> Mapping[str, Any]:
    content = call.get("requestBody", {}).get("content", {})
    return _resolved(document, content.get("application/json", {}).get("schema", {}))


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in schema:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _example(method: str, path: str, schema: Mapping[str, Any]) -> str:
    """A command that makes the call, with its required fields."""
    body = {name: _value(schema["properties"][name]) for name in schema.get("required", ())}
    sent = f" \\\n  -H 'Content-Type: application/json' -d '{json.dumps(body)}'" if schema else ""
    return f'curl -X {method.upper()} "$URL{path}" -H "Authorization: Bearer $KEY"{sent}'


def _value(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    if kind == "array":
        return [_value(schema.get("items", {}))]
    if kind == "object":
        return {name: _value(schema["properties"][name]) for name in schema.get("required", ())}
    return {"integer": 1, "number": 1.0, "boolean": True}.get(str(kind), (schema.get("enum") or ["..."])[0])
