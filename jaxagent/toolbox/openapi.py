"""The operations of an HTTP service as tools, read from its OpenAPI document (version 3, JSON).

The host is fixed by whoever set the world up: a policy chooses arguments, and can lead a request nowhere else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from jaxagent.toolbox.kit import Kit, Task, Workplace
from jaxagent.toolbox.web import Service, wanted_url
from jaxagent.tools import PURE_ATTEMPTS, Tool, ToolFailed
from jaxagent.types import ToolSpec

_METHODS = ("get", "post", "put", "patch", "delete")
_DEPTH = 20  # of references


@dataclass(frozen=True)
class Operation:
    """One path and method. `places` says of every parameter whether it goes into the path, the query or the body."""

    spec: ToolSpec
    method: str
    path: str
    places: dict[str, str]
    whole_body: str  # the parameter that is the whole body, where the body is no object

    def request(self, arguments: dict[str, Any]) -> tuple[str, dict[str, str], Any]:
        """Path, query and body of a call."""
        path, query, body = self.path, dict[str, str](), dict[str, Any]()
        for name, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            if self.places[name] == "path":
                path = path.replace(f"{{{name}}}", segment(text))
            elif self.places[name] == "query":
                query[name] = text
            else:
                body[name] = value
        if self.whole_body:
            return path, query, body.get(self.whole_body)
        return path, query, body if "body" in self.places.values() else None


def segment(text: str) -> str:
    """A text as one segment of a path, with its separators escaped.

    Raises ToolFailed for an empty one, and where a part is `.` or `..`: servers and proxies that undo the escapes go elsewhere.
    """
    if not text or {".", ".."} & set(re.split(r"[/\\]", text)):
        raise ToolFailed(f"error: {text!r} cannot be a part of a path: it is empty, or leads to another one")
    return quote(text, safe="")


def openapi(
    document: str,
    hosts: Sequence[str],
    url: str = "",
    methods: Sequence[str] = ("get",),
    only: Sequence[str] = (),
    token_variable: str = "",
    timeout_s: float = 10.0,
) -> Kit:
    """The kit `openapi`.

    Args:
        document: a file, JSON.
        hosts: that may be asked, as host or host:port.
        url: of the service, in place of the document's first server.
        methods: that become tools; those of `get` are pure.
        only: names of operations; empty takes all.
        token_variable: environment variable with a bearer token.
        timeout_s: of a request; one that is late is the service's trouble.

    Raises ValueError for a document that cannot be understood, a host that is not allowed, names that clash.
    """
    whole = _read(document)
    servers = whole.get("servers") or [{}]
    base = wanted_url(url or str(servers[0].get("url", "")), "toolbox.openapi.url, or else servers of the document,")
    host = urlsplit(base).netloc
    if host not in hosts:
        raise ValueError(f"toolbox.openapi.hosts must name the host {host!r} that {document} leads to, got {tuple(hosts)}")
    if strange := [method for method in methods if method not in _METHODS]:
        raise ValueError(f"toolbox.openapi.methods must be of {', '.join(_METHODS)}, got {strange[0]!r}")
    operations = [operation for operation in _operations(whole, document) if operation.method in methods]
    if missing := [name for name in only if name not in [operation.spec.name for operation in operations]]:
        known = ", ".join(operation.spec.name for operation in operations)
        raise ValueError(f"toolbox.openapi.only names {missing[0]!r}; {document} has {known}")
    chosen = [operation for operation in operations if not only or operation.spec.name in only]
    headers = {}
    if token_variable:
        if not os.environ.get(token_variable):
            raise ValueError(f"toolbox.openapi.token_variable={token_variable}: this environment variable is not set")
        headers["Authorization"] = f"Bearer {os.environ[token_variable]}"

    def tools(place: Workplace, task: Task) -> list[Tool]:
        service = Service(place, base, headers, timeout_s)

        def run_fn(operation: Operation) -> Callable[..., Awaitable[str]]:
            async def run(**arguments: Any) -> str:
                path, query, body = operation.request(arguments)
                return await service.ask(operation.method.upper(), path, query, body)

            return run

        return [Tool(one.spec, run_fn(one), timeout_s * (PURE_ATTEMPTS + 1), one.method == "get") for one in chosen]

    return Kit(tools)


def _read(document: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(document).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"toolbox.openapi.document={document}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"toolbox.openapi.document={document}: not JSON ({error})") from None
    if not isinstance(found, dict) or not str(found.get("openapi", "")).startswith("3") or not found.get("paths"):
        raise ValueError(f"toolbox.openapi.document={document}: an OpenAPI document of version 3 with paths is wanted")
    return found


def _operations(whole: dict[str, Any], document: str) -> list[Operation]:
    found: dict[str, Operation] = {}
    for path, item in whole["paths"].items():
        for method in _METHODS:
            if method not in item:
                continue
            operation = _operation(whole, path, method, item)
            if operation.spec.name in found:
                raise ValueError(f"{document}: two operations are named {operation.spec.name!r}; give them an operationId each")
            found[operation.spec.name] = operation
    return list(found.values())


def _operation(whole: dict[str, Any], path: str, method: str, item: dict[str, Any]) -> Operation:
    said = item[method]
    given = said.get("operationId")
    name = re.sub(r"\W+", "_", given) if given else re.sub(r"[\W_]+", "_", f"{method}_{path}").strip("_")
    properties, required, places, whole_body = dict[str, Any](), list[str](), dict[str, str](), ""
    for one in (*item.get("parameters", ()), *said.get("parameters", ())):
        parameter = resolved(whole, one)
        if parameter.get("in") not in ("path", "query"):
            continue  # headers and cookies are not a policy's to set
        key = parameter["name"]
        properties[key] = _schema(whole, parameter.get("schema", {}), parameter.get("description", ""))
        places[key] = parameter["in"]
        if parameter.get("required") or parameter["in"] == "path":
            required.append(key)
    body = resolved(whole, said.get("requestBody") or {})
    content = body.get("content", {}).get("application/json")
    if content:
        schema = resolved(whole, content.get("schema", {}))
        if schema.get("type") == "object" and not set(schema.get("properties", {})) & set(places):
            for key, value in schema.get("properties", {}).items():
                properties[key], places[key] = _schema(whole, value, ""), "body"
            required += [key for key in schema.get("required", ()) if key in properties]
        else:
            whole_body = "body" if "body" not in places else "request_body"
            properties[whole_body], places[whole_body] = _schema(whole, schema, ""), "body"
            required += [whole_body] if body.get("required") else []
    summary = str(said.get("summary") or said.get("description") or "").strip().partition("\n")[0]
    schema = {"type": "object", "properties": properties, "required": list(dict.fromkeys(required))}
    return Operation(ToolSpec(name, summary, schema), method, path, places, whole_body)


def _schema(whole: dict[str, Any], schema: dict[str, Any], said: str) -> dict[str, Any]:
    found = expanded(whole, schema)
    return {**found, "description": said} if said and "description" not in found else found


def expanded(whole: dict[str, Any], value: Any, depth: int = 0) -> Any:
    """A schema with its references in place; one that contains itself ends in an empty schema."""
    if depth > _DEPTH:
        return {}
    if isinstance(value, dict):
        value = resolved(whole, value)
        return {key: expanded(whole, inner, depth + 1) for key, inner in value.items()}
    return [expanded(whole, inner, depth + 1) for inner in value] if isinstance(value, list) else value


def resolved(whole: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """What a `$ref` within the document leads to. Raises ValueError where that is nowhere."""
    for _ in range(_DEPTH):
        if "$ref" not in value:
            return value
        place: Any = whole
        reference = str(value["$ref"])
        for part in reference.removeprefix("#/").split("/"):
            place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
        if not reference.startswith("#/") or not isinstance(place, dict):
            raise ValueError(f"toolbox.openapi.document: the reference {reference!r} leads nowhere in it")
        value = place
    raise ValueError(f"toolbox.openapi.document: the reference {value['$ref']!r} leads in a circle")
