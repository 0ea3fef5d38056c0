"""An HTTP service as tools: what its document says, where a request can go, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from calling import called
from serving import serving

from jaxagent.toolbox.box import Toolbox
from jaxagent.toolbox.openapi import segment
from jaxagent.tools import ToolFailed
from sandbox_client import InfrastructureError

DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "servers": [{"url": "http://elsewhere.example"}],
    "paths": {
        "/towns/{name}": {
            "parameters": [{"$ref": "#/components/parameters/name"}],
            "get": {
                "operationId": "town",
                "summary": "Tells of a town.",
                "parameters": [
                    {"name": "year", "in": "query", "schema": {"type": "integer"}, "description": "of the census"},
                    {"name": "X-Secret", "in": "header", "schema": {"type": "string"}},
                ],
            },
        },
        "/towns": {
            "post": {
                "operationId": "found",
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Town"}}},
                },
            },
            "get": {"summary": "Lists them."},
        },
        "/fail/{status}": {"get": {"parameters": [{"name": "status", "in": "path", "schema": {"type": "integer"}}]}},
    },
    "components": {
        "parameters": {"name": {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}},
        "schemas": {
            "Town": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "people": {"type": "integer"},
                    "twin": {"$ref": "#/components/schemas/Town"},
                },
            }
        },
    },
}


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    async def town(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.raw_path} {request.headers.get('Authorization')}")

    async def found(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    async def fail(request: web.Request) -> web.Response:
        status = int(request.match_info["status"])
        if status == 0:
            await asyncio.sleep(0.5)
        if status == 302:
            raise web.HTTPFound("http://127.0.0.1:1/secret")
        return web.Response(status=status, text="x" * (2 << 20) if status == 200 else "sorry")

    application = web.Application()
    application.add_routes(
        [web.get("/towns", town), web.get("/towns/{name}", town), web.post("/towns", found), web.get("/fail/{status}", fail)]
    )
    with serving(application) as url:
        yield url


def box(folder: Path, at: str, document: Any = DOCUMENT, **options: Any) -> Toolbox:
    (folder / "api.json").write_text(json.dumps(document))
    given = {"document": str(folder / "api.json"), "url": at, "hosts": (at.rpartition("/")[2],), **options}
    return Toolbox({"openapi": given})


def test_paths_become_tools_with_their_schemas(tmp_path: Path) -> None:
    every = box(tmp_path, "http://h.example", methods=("get", "post")).specs
    assert [spec.name for spec in every] == ["town", "get_towns", "found", "get_fail_status"]
    town, found = every[0], every[2]
    assert town.description == "Tells of a town."
    assert town.parameters["properties"] == {
        "name": {"type": "string"},
        "year": {"type": "integer", "description": "of the census"},
    }
    assert town.parameters["required"] == ["name"]
    assert found.parameters["required"] == ["name"]
    assert found.parameters["properties"]["twin"]["type"] == "object"
    assert [spec.name for spec in box(tmp_path, "http://h.example", only=("town",)).specs] == ["town"]


def test_a_call_goes_to_its_path_with_query_body_and_token(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOWN_TOKEN", "t0k")
    tools = box(tmp_path, service, methods=("get", "post"), token_variable="TOWN_TOKEN")
    one, two, three = called(
        tools,
        ("town", {"name": "Ulm/x?y=1#z", "year": 1900}),
        ("found", {"name": "Neu", "people": 3}),
        ("town", {"name": ".."}),
    )
    assert one.result == "/towns/Ulm%2Fx%3Fy%3D1%23z?year=1900 Bearer t0k"
    assert json.loads(two.result) == {"name": "Neu", "people": 3}
    assert three.outcome == "error" and "leads to another" in three.result
    assert segment("a b..") == "a%20b.."
    for astray in ("", ".", "../admin", "a/../b", "..\\admin", "a\\."):
        with pytest.raises(ToolFailed, match="cannot be a part of a path"):
            segment(astray)


def test_what_the_service_refuses_is_an_observation_and_what_breaks_it_is_not(service: str, tmp_path: Path) -> None:
    tools = box(tmp_path, service)
    results = called(tools, *(("get_fail_status", {"status": status}) for status in (404, 422, 302, 200)))
    assert [record.outcome for record in results] == ["error"] * 4
    assert [record.result[:17] for record in results[:3]] == [f"error: status {status}" for status in (404, 422, 302)]
    assert "longer than" in results[3].result
    for status in (401, 403, 407, 408, 429, 500, 503):
        with pytest.raises(InfrastructureError):
            called(tools, ("get_fail_status", {"status": status}))
    with pytest.raises(InfrastructureError, match="TimeoutError"):
        called(box(tmp_path, service, timeout_s=0.05), ("get_fail_status", {"status": 0}))


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({}, {"hosts": ("other.example",)}, "must name the host 'h.example'"),
        ({}, {"url": "", "hosts": ("h.example",)}, "must name the host 'elsewhere.example'"),
        ({}, {"url": "ftp://h.example"}, "http or https"),
        ({}, {"methods": ("get", "trace")}, "must be of get, post, put, patch, delete, got 'trace'"),
        ({}, {"only": ("nothing",)}, "names 'nothing'; .* has town"),
        ({}, {"token_variable": "NO_SUCH_VARIABLE"}, "is not set"),
        ({"openapi": "2.0"}, {}, "version 3 with paths"),
        ({"components": {}}, {}, "'#/components/parameters/name' leads nowhere"),
    ],
)
def test_a_document_that_leads_astray_is_told(change: Any, options: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        box(tmp_path, "http://h.example", {**DOCUMENT, **change}, **options)
