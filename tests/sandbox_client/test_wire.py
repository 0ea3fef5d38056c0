"""The words on the wire: strict decoding, and errors that cannot be mistaken for a program's failure."""

import json

import pytest

from sandbox_client import wire


@pytest.mark.parametrize(
    "text",
    [
        "{nan",
        "[1]",
        "1",
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1e999}',
        '{"a": 1, "a": 2}',
        '{"a":' * 100_000,
        "\xff",
    ],
)
def test_malformed_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        wire.decode(text.encode("latin-1"), unique=True)


def test_what_is_encoded_decodes_to_itself() -> None:
    value = {"text": "ünï\u0000\ud800", "number": -0.5, "list": [None, True, {}], "big": 10**30}
    assert wire.decode(wire.encode(value)) == value


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}, object()])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        wire.encode(value)


def test_a_wrong_type_is_named_with_its_key() -> None:
    with pytest.raises(ValueError, match="wanted 'seq' as int, got bool"):
        wire.take({"seq": True}, "seq", int)


@pytest.mark.parametrize("field", ["outcome", "stdout", "stderr", "dropped_bytes", "elapsed_s", "session_lost"])
def test_an_exec_reply_with_a_field_missing_is_against_the_schema(field: str) -> None:
    reply = {
        "outcome": "ok",
        "stdout": "",
        "stderr": "",
        "exit_code": 0,
        "dropped_bytes": 0,
        "elapsed_s": 0.1,
        "value": None,
        "error": None,
        "session_lost": False,
    }
    assert wire.parse_exec(reply, 1).outcome is wire.Outcome.OK
    del reply[field]
    with pytest.raises(ValueError):
        wire.parse_exec(reply, 1)


def test_no_infrastructure_failure_is_an_outcome() -> None:
    kinds = wire.InfrastructureError.__subclasses__()
    assert {kind.__name__ for kind in kinds} == {
        "Unreachable",
        "Overloaded",
        "SessionLost",
        "ProtocolError",
        "Unknown",
        "Cancelled",
    }
    assert not {str(outcome) for outcome in wire.Outcome} & {kind.__name__.lower() for kind in kinds}


def test_an_infrastructure_error_says_whether_the_call_may_have_run() -> None:
    error = wire.Unknown("no reply", attempts=3, may_have_executed=True)
    assert (error.attempts, error.may_have_executed) == (3, True)
    assert "attempts: 3; the call may have executed" in str(error)
    assert "was not executed" in str(wire.Unreachable("refused", attempts=1))


def test_the_replies_fit_into_their_limit_in_the_worst_encoding() -> None:
    assert len(json.dumps("\x00" * wire.EXEC_OUTPUT_BYTES)) * 2 < wire.REPLY_MAX_BYTES
