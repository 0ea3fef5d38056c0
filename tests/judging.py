"""An OpenAI-compatible endpoint that judges by what a test tells it, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web
from serving import serving

from jaxagent.rewards.match import normalise


class Endpoint:
    """`say` makes the reply from the prompt: a text, or a status."""

    def __init__(self, say: Callable[[str], str | int]):
        self.say, self.prompts, self.url, self.finish = say, list[str](), "", "stop"

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["messages"][0]["content"]
        assert body["model"] == "m" and body["temperature"] == 0
        self.prompts.append(prompt)
        said = self.say(prompt)
        if isinstance(said, int):
            return web.Response(status=said)
        return web.json_response({"choices": [{"message": {"content": said}, "finish_reason": self.finish}]})


def between(prompt: str, name: str) -> str:
    """What stands between the marks of `name`."""
    return prompt.partition(f" {name}\n")[2].partition("\n===")[0]


def fair(prompt: str) -> str:
    """Compares the two answers by their words."""
    same = normalise(between(prompt, "first answer")) == normalise(between(prompt, "second answer"))
    return f"I compared them.\nverdict: {'yes' if same else 'no'}"


@contextmanager
def judging(say: Callable[[str], str | int] = fair) -> Iterator[Endpoint]:
    endpoint = Endpoint(say)
    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", endpoint.complete)])
    with serving(application) as url:
        endpoint.url = f"{url}/v1"
        yield endpoint
