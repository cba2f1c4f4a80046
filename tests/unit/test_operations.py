from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.protocol.answers import Error
from gpulse.cluster.protocol.codec import MAX_BODY_BYTES, encode, read_body
from gpulse.cluster.protocol.head_interface import HeadInterface
from gpulse.cluster.protocol.operations import OPERATIONS, OPERATIONS_BY_NAME, call_operation, open_download
from gpulse.cluster.protocol.requests import Duration, Time
from gpulse.errors import CollectionError, DiskError, RefusedError, UsageError
from gpulse.model.finding import CodeLocation, Finding
from gpulse.model.finding_acknowledgement import SILENCED_EVENT, Silence
from gpulse.model.message_limits import MAX_TIME_SECONDS
from gpulse.model.metric_catalog import CATALOG
from gpulse.model.time_text import MAX_DURATION_SECONDS, parse_duration, parse_time
from gpulse.web import live_stream
from tests.unit.fake_head import NOW, FakeHead

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


NEEDED: dict[str, dict[str, Any]] = {
    "hardware": {"name": "alpha"},
    "session": {"name": "one"},
    "compare": {"before": "one", "after": "s1"},
    "recover": {"name": "one"},
    "export": {"name": "s1"},
    "download": {"name": "one", "format": "json"},
    "query": {"metric": "power_watts"},
    "history": {"metrics": "power_watts,temperature_celsius"},
    "job": {"job": "slurm:4711"},
    "stacks": {"job": "slurm:4711"},
    "acknowledge": {"group": "host_single_thread", "by": "mo"},
    "silence": {"nodes": ["alpha"], "seconds": "2h", "reason": "being repaired", "by": "mo"},
    "end_silence": {"silence": "s1", "by": "mo"},
}
"""What requests must say, by operation."""
PLACE = CodeLocation(
    7, "main", "/home/ada/hidden_train.py", 84, "hidden_step", 0.8, 40, "hidden_io.py:5 hidden"
)
IN_CODE = Finding(
    "host_single_thread", "host", "high", 0.9, "s", 0, "0", (7,), where=(PLACE,), where_note="hidden_note"
)


async def refused(head: HeadInterface, operation: str, body: dict[str, Any]) -> tuple[int, str]:
    """The status and the message of a request that is refused."""
    status, answer = await call_operation(head, operation, body, now=NOW)
    assert isinstance(answer, Error)
    assert answer.error == answer.detail
    return status, answer.error


async def test_every_operation_answers() -> None:
    """Every operation of the table reaches the head and comes back."""

    fake = FakeHead()
    fake.finding = IN_CODE
    fake.responses.apply(SILENCED_EVENT, NOW, Silence("s1", NOW, NOW + 60, "r", "mo", nodes=("x",)).to_dict())
    head: HeadInterface = fake
    assert 200 == (await call_operation(head, "start", {"name": "one"}, now=NOW))[0]
    for operation in OPERATIONS:
        if not operation.is_file and operation.name != "start":
            status, answer = await call_operation(
                head, operation.name, NEEDED.get(operation.name, {}), now=NOW
            )
            assert 200 == status, operation.name
            if isinstance(operation.answer, type):
                assert isinstance(answer, operation.answer), operation.name
                assert encode(answer) == encode(msgspec.json.decode(encode(answer), type=operation.answer))


async def test_a_session_with_everything() -> None:
    """All fields of a start reach the head, in its types."""

    head = FakeHead()
    body = {
        "name": "a.b-c_1",
        "since": "1h30m",
        "nodes": ["alpha"],
        "gpus": ["alpha:0"],
        "labels": {"k": "v", "e": ""},
        "interval_ms": 500.0,
    }
    await call_operation(head, "start", body, now=NOW)

    assert [
        (
            "start",
            {
                "name": "a.b-c_1",
                "since": 5400.0,
                "nodes": ("alpha",),
                "gpus": ("alpha:0",),
                "labels": {"k": "v", "e": ""},
                "interval_ms": 500,
            },
        )
    ] == head.asked


@pytest.mark.parametrize(
    "body", [{}, {"name": None}, {"name": ""}, {"name": None, "nodes": None, "since": None}]
)
async def test_a_name_may_be_left_out(body: dict[str, Any]) -> None:
    """Clients of old send null or nothing for a name that they do not care about."""

    head = FakeHead()

    assert 200 == (await call_operation(head, "start", body, now=NOW))[0]
    assert 200 == (await call_operation(head, "stop", body if "nodes" not in body else {}, now=NOW))[0]
    assert "" == head.asked[0][1]["name"]


@pytest.mark.parametrize(
    ("operation", "body", "word"),
    [
        ("start", {"name": "../../x"}, "invalid session name '../../x'"),
        ("start", {"name": "x" * 10_000}, "invalid session name"),
        ("start", {"name": 7}, "name must be a session's name, not 7"),
        ("start", {"name": ["a"]}, ", not ['a']"),
        ("start", {"name": "a\n"}, "invalid session name 'a\\n'"),
        ("start", {"nmae": "x"}, "unknown field 'nmae'"),
        ("start", {"x" * 5000: 1}, "unknown field"),
        ("start", {"since": -1}, "not a duration"),
        ("start", {"since": math.nan}, "not a duration"),
        ("start", {"since": math.inf}, "not a duration"),
        ("start", {"since": "soon"}, "not a duration"),
        ("start", {"since": True}, "not a duration"),
        ("start", {"since": "inf"}, "not a duration"),
        ("start", {"since": 10**400}, "not a duration"),
        ("start", {"since": 1e300}, "ten years"),
        ("start", {"since": 3650 * 86400 + 1}, "ten years"),
        ("start", {"since": "3651d"}, "ten years"),
        ("start", {"since": "999999999w"}, "ten years"),
        ("start", {"nodes": ["a\nb"]}, "nodes[0] must be a string of 1 to 200 characters without control characters"),
        ("start", {"nodes": ["a", "b\n"]}, "nodes[1] must be"),
        ("start", {"gpus": ["\x1b[31m0"]}, "control character"),
        ("start", {"labels": {"a": "b\x00"}}, "control character"),
        ("start", {"labels": {"a\x7f": "b"}}, "control character"),
        ("start", {"labels": {"a": "b\u2028c"}}, "control character"),
        ("events", {"kinds": ["a\tb"]}, "control character"),
        ("start", {"nodes": 5}, "nodes must be a list of at most 10,000 strings, not 5"),
        ("start", {"nodes": [5]}, "must be a string of 1 to 200 characters"),
        ("start", {"nodes": [""]}, "of 1 to 200 characters"),
        ("start", {"nodes": ["x" * 201]}, "of 1 to 200 characters"),
        ("start", {"nodes": ["x"] * 10_001}, "at most 10,000 strings"),
        ("start", {"labels": ["a"]}, "labels must be an object with at most 50 strings"),
        ("start", {"labels": {"a": 1}}, ", not {'a': 1}"),
        ("start", {"labels": {"": "x"}}, ", not {'': 'x'}"),
        ("start", {"labels": {str(n): "x" for n in range(51)}}, "at most 50 strings"),
        ("start", {"interval_ms": 0}, "whole number from 50 to"),
        ("start", {"interval_ms": 10.5}, "whole number"),
        ("start", {"interval_ms": "ten"}, "whole number"),
        ("start", {"interval_ms": True}, "whole number"),
        ("start", {"interval_ms": math.inf}, "whole number"),
        ("stop", {"format": "pickle"}, "format must be one of: csv, json, jsonl, parquet, not 'pickle'"),
        ("settings", {"bandwidth": "yes"}, "must be true or false, not"),
        ("settings", {"bandwidth": 1}, "must be true or false, not"),
        ("recover", {}, "name or session_id is missing"),
        ("session", {}, "name is missing"),
        ("session", {"name": ""}, "invalid session name"),
        ("query", {}, "metric is missing"),
        ("history", {}, "metrics is missing"),
        ("history", {"metrics": "power_watts,nothing"}, "metrics[1] must be one of: "),
        ("history", {"metrics": "power_watts", "points": 9}, "whole number from 10 to 2,000"),
        ("history", {"metrics": "power_watts", "points": 2001}, "whole number from 10 to 2,000"),
        ("history", {"metrics": "power_watts", "spread": "yes"}, "must be true or false, not"),
        ("history", {"metrics": list(CATALOG["gpu"])[:33]}, "a list of 1 to 32 strings"),
        ("usage", {"by": "team"}, "by must be one of: job, user"),
        ("usage.csv", {}, "the answer of this operation is a file"),
        ("query", {"metric": "power_watts; drop"}, ", …, not 'power_watts; drop'"),
        ("query", {"metric": "power_watts", "from": "yesterday"}, "not a time"),
        ("query", {"metric": "power_watts", "from": "-10"}, "not a time"),
        ("query", {"metric": "power_watts", "from": 1e300}, "after the year 9999"),
        ("query", {"metric": "power_watts", "from": "253402300800"}, "after the year 9999"),
        ("query", {"metric": "power_watts", "to": "-999999999w"}, "ten years"),
        ("query", {"metric": "power_watts", "step": 1e10}, "ten years"),
        ("query", {"metric": "power_watts", "statistic": "sum"}, "one of: last, max, mean, min"),
        ("events", {"kinds": [{}]}, "kinds[0] must be a string"),
        ("status", {"verbose": True}, "unknown field"),
        ("download", {"name": "x"}, "the answer of this operation is a file"),
    ],
)  # fmt: skip
async def test_requests_that_make_no_sense(operation: str, body: dict[str, Any], word: str) -> None:
    """Every wrong field is refused in words that name it, and nothing is done."""

    head = FakeHead()
    status, message = await refused(head, operation, body)

    assert 400 == status
    assert word in message
    assert len(message) < 400
    assert [] == head.asked


async def test_unknown_operations_and_metrics() -> None:
    """What there is not is not found, and what there is is said."""

    assert 404 == (await refused(FakeHead(), "rm -rf", {}))[0]
    status, message = await refused(FakeHead(), "query", {"metric": "cpus", "scope": "gpu"})
    assert (404, "the scope gpu has no metric cpus") == (status, message)


async def test_whose_number_is_meant() -> None:
    """A metric of hosts alone needs no scope; one of several scopes is the GPU's."""

    head = FakeHead()
    await call_operation(head, "query", {"metric": "cpus"}, now=NOW)
    await call_operation(head, "query", {"metric": "memory_used_bytes"}, now=NOW)
    await call_operation(
        head,
        "query",
        {
            "metric": "memory_used_bytes",
            "scope": "cgroup",
            "nodes": ["a,b", "c"],
            "from": "-10m",
            "to": "now",
            "step": "10s",
        },
        now=NOW,
    )

    assert ["host", "gpu", "cgroup"] == [given["scope"] for _, given in head.asked]
    assert ("a", "b", "c") == head.asked[2][1]["nodes"]
    assert (NOW - 600) == head.asked[2][1]["start"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RefusedError(409, "busy", hint="wait"), 409),
        (UsageError("no"), 400),
        (DiskError("full"), 503),
        (CollectionError("nothing"), 500),
        (KeyError("oops"), 500),
    ],
)
async def test_failures(error: Exception, status: int) -> None:
    """Whatever the head raises becomes an answer; what nobody expected says nothing of its insides."""

    head = FakeHead()
    head.failure = error
    given, message = await refused(head, "start", {})

    assert status == given
    assert "oops" not in message


async def test_downloads() -> None:
    """A download is checked as any other request, and refused when there is no such session or no such file."""

    head = FakeHead()
    with pytest.raises(UsageError):
        await open_download(head, "download", {"name": "../x"}, now=NOW)
    with pytest.raises(RefusedError):
        await open_download(head, "download", {"name": "x", "format": "csv"}, now=NOW)
    for operation in ("status", "nothing"):
        with pytest.raises(RefusedError) as refusal:
            await open_download(head, operation, {}, now=NOW)
        assert "use one of: download, usage.csv" == refusal.value.hint


async def test_usage_as_a_file() -> None:
    """The file has the same rows as the document, and its fields reach the head in its types."""

    head = FakeHead()
    file = await open_download(head, "usage.csv", {"from": "-1h", "by": "job", "users": ["ada,bob"]}, now=NOW)
    lines = b"".join([piece async for piece in file.pieces]).decode().splitlines()

    assert (
        "usage",
        {"start": NOW - 3600, "end": None, "by": "job", "nodes": (), "users": ("ada", "bob")},
    ) == head.asked[0]
    assert ("text/csv", 2, True) == (file.media_type, len(lines), lines[1].startswith("'=ada,,,"))


@given(
    st.sampled_from(sorted(OPERATIONS_BY_NAME)),
    st.dictionaries(
        st.sampled_from(
            ["name", "since", "nodes", "labels", "from", "metric", "interval_ms", "bandwidth", "x"]
        ),
        ANY_JSON,
    ),
)
async def test_no_body_breaks_it(operation: str, body: dict[str, Any]) -> None:
    """Whatever JSON can hold, the answer is a document and never a failure of the head."""

    status, answer = await call_operation(FakeHead(gpus=1), operation, body, now=NOW)

    assert status in {200, 400, 404}
    json.loads(encode(answer))


@given(st.binary(max_size=200) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
def test_no_bytes_break_the_reader(raw: bytes) -> None:
    """Any bytes are an object or a refusal."""

    try:
        document = read_body(raw)
    except UsageError:
        return
    assert isinstance(document, dict)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": -Infinity}', "not JSON"),
        (b'{"a": "\\ud800"}', "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
    ],
)
def test_bodies_that_are_no_requests(raw: bytes, word: str) -> None:
    """What is not an object in JSON is refused with what it is instead."""

    with pytest.raises(UsageError, match=word):
        read_body(raw)


def test_bodies_that_are_too_large() -> None:
    """A megabyte is the most."""

    with pytest.raises(RefusedError) as caught:
        read_body(b" " * (MAX_BODY_BYTES + 1))
    assert 413 == caught.value.status
    assert {} == read_body(b" \n")


@pytest.mark.parametrize(
    ("given_text", "seconds"),
    [(600, 600.0), ("600", 600.0), ("10m", 600.0), ("1h30m", 5400.0), ("500ms", 0.5), ("1.5h", 5400.0), ("2d", 172800.0), ("1w", 604800.0), (0, 0.0), ("3650d", MAX_DURATION_SECONDS)],
)  # fmt: skip
def test_durations(given_text: object, seconds: float) -> None:
    """Lengths of time are read as people write them."""

    assert seconds == parse_duration(given_text)


@pytest.mark.parametrize(
    ("given_text", "seconds"),
    [
        (NOW, NOW),
        (str(NOW), NOW),
        ("2026-01-01T00:00:00Z", NOW),
        ("2026-01-01t00:00:00z", NOW),
        ("2026-01-01T01:00:00+01:00", NOW),
        ("2026-01-01T00:00:00", NOW),
        ("2026-01-01 00:00", NOW),
        ("2026-01-01", NOW),
        ("-10m", NOW - 600),
        ("now", NOW),
        ("0001-01-01T00:00:00+14:00", 0.0),
        ("9999-12-31T23:59:59-12:00", MAX_TIME_SECONDS),
        (MAX_TIME_SECONDS, MAX_TIME_SECONDS),
        ("-3650d", NOW - MAX_DURATION_SECONDS),
    ],
)
def test_times(given_text: object, seconds: float) -> None:
    """Times are read as people write them; without an offset they are UTC."""

    assert seconds == parse_time(given_text, NOW)


@given(st.text(max_size=30) | st.floats() | st.integers())
def test_times_are_finite(given_text: object) -> None:
    """Whatever is read as a time or a length is a finite number that is not negative."""

    for read in (parse_duration, lambda value: parse_time(value, NOW)):
        try:
            assert 0 <= read(given_text) <= MAX_TIME_SECONDS
        except ValueError:
            continue


@given(st.data())
def test_what_schemas_allow_is_read(data: st.DataObject) -> None:
    """Every text that the document's patterns let through is a length of time, or a time."""

    for kind, place in ((Duration, 1), (Time, 2)):
        pattern = str(kind.SCHEMA["anyOf"][place]["pattern"])
        written = data.draw(st.from_regex(pattern, fullmatch=True, alphabet=st.characters(codec="ascii")))
        assert kind.decode(written.rstrip("\n"), NOW) >= 0


def test_the_table_is_whole() -> None:
    """Names and paths are unique, fields in paths are fields, and every metric can be asked for."""

    places = [(operation.method, path) for operation in OPERATIONS for path in operation.paths]
    assert len(places) == len(set(places))
    assert len(OPERATIONS_BY_NAME) == len(OPERATIONS)
    metric = OPERATIONS_BY_NAME["query"].fields["metric"].type
    assert isinstance(metric, msgspec.inspect.LiteralType)
    assert {name for names in CATALOG.values() for name in names} == set(metric.values)
    for operation in OPERATIONS:
        assert all(field.help for field in operation.fields.values()), operation.name
        for path in operation.paths:
            assert set(re.findall(r"{(\w+)}", path)) <= set(operation.fields), path


async def answer_text(head: HeadInterface, operation: str, *, is_trusted: bool) -> str:
    """Everything that an operation answers, as text."""
    body = NEEDED.get(operation, {})
    if OPERATIONS_BY_NAME[operation].is_file:
        file = await open_download(head, operation, body, now=NOW, is_trusted=is_trusted)
        return b"".join([piece async for piece in file.pieces]).decode()
    status, answer = await call_operation(head, operation, body, now=NOW, is_trusted=is_trusted)
    assert 200 == status, operation
    return encode(answer).decode()


async def test_callers_who_only_read_see_no_code() -> None:
    """Findings come to them without lines, in every answer; whoever may change something gets them."""

    head = FakeHead()
    head.finding = IN_CODE
    await call_operation(head, "start", {"name": "one"}, now=NOW)
    reading = [operation.name for operation in OPERATIONS if not operation.writes]

    trusted = {name: await answer_text(head, name, is_trusted=True) for name in reading}
    others = {name: await answer_text(head, name, is_trusted=False) for name in reading}

    shown = {"status", "findings", "finding_groups", "finding_spans", "job", "events", "download"}
    assert shown == {name for name, text in trusted.items() if "hidden_train.py" in text}
    assert not [name for name, text in others.items() if "hidden" in text or "where" in text]
    assert all("host_single_thread" in others[name] for name in shown - {"download"})


def test_the_live_stream_has_no_code() -> None:
    """All clients share its texts, whatever they may see elsewhere."""

    node = FakeHead().nodes[0]._replace(findings=(IN_CODE,))

    text = encode(live_stream.describe(node)).decode()

    assert "host_single_thread" in text
    assert "hidden" not in text


def test_every_answer_with_code_has_a_form_for_readers() -> None:
    """Whoever adds lines of code to another answer must say what callers who only read get."""

    def names_code(kind: Any, seen: set[Any]) -> bool:
        if kind in seen or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            inner = getattr(kind, "__args__", ())
            return any(names_code(part, seen) for part in inner)
        seen.add(kind)
        fields = msgspec.structs.fields(kind)
        return any(field.name == "where" or names_code(field.type, seen) for field in fields)

    open_to_readers = [each for each in OPERATIONS if not each.writes and each.answer is not None]
    assert {"status", "findings", "finding_groups", "finding_spans", "job"} == {
        each.name for each in open_to_readers if names_code(each.answer, set())
    }
    assert all(each.hides_code for each in open_to_readers if names_code(each.answer, set()))
