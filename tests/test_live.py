"""The page that follows a run: what it is told, as files appear, and who is refused. How it looks is a matter for a browser."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from test_view import HOSTILE, TEMPLATE, embedded, episode, write_run

from jaxagent import live
from jaxagent.__main__ import main
from jaxagent.data.store import Store
from jaxagent.live import Index, LiveServer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    group = [episode("train/0", i, reward=float(i == 1)) for i in range(4)]
    return write_run(tmp_path / "run", {"train-000001": group, "before": [episode("test/0")]}, finished=False)


@pytest.fixture
def server(run: Path) -> Iterator[LiveServer]:
    with LiveServer([run]) as running:
        running.index.update()
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield running
        running.shutdown()


def get(server: LiveServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    told = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return told


def found(server: LiveServer, name: str) -> Any:
    status, _, body = get(server, f"/{server.token}/{name}")
    assert status == 200, body
    return json.loads(body)


def test_rows_say_everything_but_the_tokens_and_an_episode_says_those(server: LiveServer) -> None:
    told = found(server, "rows?from=0")
    assert (told["total"], told["reading"], told["faults"]) == (5, False, [])
    assert [(row["set"], row["step"], row["rollout"]) for row in told["rows"]] == [
        ("before", 0, 0),
        *(("train", 1, i) for i in range(4)),
    ]
    row = told["rows"][2]
    assert row["solved"] and row["reward"] == 1.0 and row["bad"] == []
    assert "right answer" in row["plain"] and '"key": "37"' in row["plain"] and "tokens" not in row
    assert found(server, "rows?from=5")["rows"] == []
    whole = found(server, "episode?at=2")
    assert whole["item"]["tokens"] == episode("train/0").tokens
    assert "".join(whole["vocab"][str(i)] for i in whole["item"]["tokens"]) == TEMPLATE.text(whole["item"]["tokens"])
    assert {key: whole["item"][key] for key in ("set", "step", "rollout")} == {"set": "train", "step": 1, "rollout": 1}


def test_a_step_that_appears_is_told_and_one_written_anew_begins_anew(run: Path) -> None:
    index = Index([run])
    assert index.update() == 2 and index.update() == 0
    store = Store(run / "trajectories")
    store.write("train-000002", [episode("train/1", i, reward=float(i)) for i in range(2)])
    assert index.update() == 1
    assert [row["step"] for row in index.since(5)["rows"]] == [2, 2]
    assert index.epoch == 0
    written = index.since(0)["written"]
    (run / "eval.json").write_text("{}")
    assert index.since(0)["written"] != written
    store.write("train-000002", [episode("train/1")])
    os.utime(run / "trajectories" / "train-000002.jsonl", ns=(1, 1))
    assert index.update() == 3
    assert (index.epoch, len(index.rows)) == (1, 6)
    assert index.run()["epoch"] == index.since(0)["epoch"] == 1  # where they differ, the page is loaded again


def test_a_file_that_cannot_be_read_is_told_and_hides_no_other(run: Path) -> None:
    (run / "trajectories" / "after.jsonl").write_text('{"torn')
    Store(run / "trajectories").write("another-000001-v2", [episode("another/0")])
    index = Index([run])
    index.update()
    assert len(index.rows) == 5
    faults = index.since(0)["faults"]
    assert "after.jsonl: JSONDecodeError" in faults[0] and "another-000001-v2.jsonl: ValueError" in faults[1]
    opened = [index.episode(number)["item"] for number in range(5)]
    assert [item["set"] for item in opened] == ["before", *["train"] * 4]
    assert [item["rollout"] for item in opened] == [row["rollout"] for row in index.rows]


def test_a_group_tells_what_separated_it_and_runs_stand_apart(run: Path, tmp_path: Path) -> None:
    rows = [episode("train/0", 0), episode("train/0", 1, reward=1.0)]
    rows[0].turns[0].tools = []
    other = write_run(tmp_path / "other", {"train-000001": rows})
    index = Index([run, other])
    index.update()
    told = index.since(0)
    assert [row["run"] for row in told["rows"]] == [0] * 5 + [1] * 2
    assert len({row["family"] for row in told["rows"]}) == 3
    ((facts),) = told["groups"].values()
    assert {"fact": "calls", "winners": 1.0, "losers": 0.0, "chance": 1.0} in facts
    assert told["rows"][5]["bad"] == ["no call"]
    assert [name.rpartition("/")[2] for name in index.run()["names"]] == ["run", "other"]
    assert index.run()["beside"][0]["finished"] and index.run()["apart"] == {}
    for workdir, temperature in ((run, 1.0), (other, 0.6)):
        settings = {"policy": {"step": 9}, "temperature": temperature}
        (workdir / "eval.json").write_text(json.dumps({"after": {"success": 0.5, "settings": settings}}))
    assert list(index.run()["apart"]) == ["after"] and "temperature is 1.0" in index.run()["apart"]["after"]


def test_the_page_may_ask_its_server_and_nobody_else_and_holds_no_markup_of_data(run: Path) -> None:
    (run / "config.json").write_text(json.dumps({"env": {"name": HOSTILE}, "init_from": ""}))
    with LiveServer([run]) as running:
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        status, headers, body = get(running, f"/{running.token}/")
        running.shutdown()
    page = body.decode()
    assert status == 200 and "default-src 'none'; connect-src 'self';" in page
    assert "<img" not in page and embedded(page)["config"]["env"]["name"] == HOSTILE
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_who_has_no_token_or_comes_from_elsewhere_is_refused(server: LiveServer) -> None:
    rows = f"/{server.token}/rows?from=0"
    assert get(server, rows)[0] == 200
    assert get(server, rows, Origin=f"http://127.0.0.1:{server.server_port}")[0] == 200
    assert get(server, rows, Origin="http://elsewhere.test")[0] == 403
    assert get(server, rows, Origin="null")[0] == 403
    assert get(server, rows, Host="elsewhere.test")[0] == 403  # a name that was made to lead here
    assert get(server, rows, Host=f"localhost:{server.server_port}")[0] == 200
    for path in ("/", "/rows?from=0", f"/{server.token[:-1]}/rows", f"/{server.token}/../rows"):
        status, _, body = get(server, path)
        assert status == 404 and server.token.encode() not in body
    for name in ("episode?at=5", "episode?at=-1", "episode?at=x", "episode", "config.json"):
        assert get(server, f"/{server.token}/{name}")[0] == 404


def test_numbers_that_are_none_are_told_as_none(tmp_path: Path) -> None:
    rows = [episode("test/0", reward=float("nan"))]
    index = Index([write_run(tmp_path / "run", {"before": rows}, finished=False)])
    index.update()
    assert index.since(0)["rows"][0]["reward"] is None


def test_faults_of_the_command_are_told_in_a_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path / "nowhere"), "--serve"]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["view", str(run), "--beside", str(run)]) == 2
    assert "belong to jaxagent view --serve" in capsys.readouterr().err
    with LiveServer([run]) as taken, pytest.raises(ValueError, match=r"--port=\d+: Address already in use"):
        live.watch(str(run), "", taken.server_port)
