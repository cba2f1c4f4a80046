from __future__ import annotations

import io
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulse.errors import RecordingError
from gpulse.export.session_file.file_writer import write_session
from gpulse.export.session_report import session_json_reader
from gpulse.export.session_report.file_reader import read_report, split_id
from gpulse.export.session_report.session_json_reader import parse_epoch, read_members
from tests.unit.session_store import GIB, START, MemoryStore, gpu, session

IDS = ["n1:0:NVIDIA A100", "n2:0:NVIDIA A100"]


def frame(number: int, util: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A frame as gswarm-profiler wrote it."""
    fields = {
        "frame_id": number,
        "time": f"2026-01-01 10:00:{number:02}",
        "gpu_id": IDS,
        "gpu_util": util or [50.0, 100.0],
        "gpu_memory": [10.0, 20.0],
    }
    return {**fields, **changes}


def old_file(path: Path, frames: list[Any], **more: Any) -> Path:
    """A file of the old tool."""
    path.write_text(json.dumps({"session_name": "old", **more, "frames": frames}))
    return path


def new_file(path: Path, output_format: Any = "json", **changes: Any) -> Path:
    """A file of ours, with a node that is away for three of ten seconds."""
    gpus = [gpu(1, 0), gpu(1, 1), gpu(2, 0)]
    store = MemoryStore(gpus)
    for one in gpus:
        times = [START + second + 0.4 for second in range(10) if one.node == 1 or second not in (4, 5, 6)]
        store.add(
            one,
            times,
            gpu_utilization_ratio=[0.1 * (place % 10) for place in range(len(times))],
            memory_used_bytes=8 * GIB,
            memory_total_bytes=80 * GIB,
            power_watts=360.0,
            pcie_rx_bytes_per_second=1.23e9,
            pcie_tx_bytes_per_second=0,
        )
    with path.open("wb") as file:
        write_session(store, session(bandwidth=True, **changes), file, output_format)
    return path


@pytest.mark.parametrize("output_format", ["json", "jsonl"])
def test_figures_are_those_of_the_file(output_format: str, tmp_path: Path) -> None:
    """What is computed from the frames is what the exporter said about them."""
    path = new_file(tmp_path / "run", output_format)

    report = read_report(path)

    told = read_summary(path)
    assert ("run", 10, 3, 2) == (report.name, report.frames, len(report.gpus), len(report.nodes))
    for found in report.to_dict()["gpus"]:
        expected = told[found["gpu_id"]]
        assert {key: expected[key] for key in found if key != "gpu_id"} == {
            key: value for key, value in found.items() if key != "gpu_id"
        }


def read_summary(path: Path) -> dict[str, Any]:
    """What the exporter says about every GPU: in the whole document, or in the last line."""
    text = path.read_text()
    whole = json.loads(text if text.count('"session_name"') and not is_lines(text) else text.splitlines()[-1])
    found: dict[str, Any] = whole["summary_by_device"]
    return found


def is_lines(text: str) -> bool:
    """Whether every line is a document of its own."""
    return text.splitlines()[0].endswith("}")


def test_gaps_are_seen(tmp_path: Path) -> None:
    """With who was silent, and from when to when."""
    report = read_report(new_file(tmp_path / "run.json"))

    assert [(START + 4, START + 7, (2,))] == [tuple(gap) for gap in report.gaps]
    assert [1.0, 1.0, 0.7] == [gpu.availability_ratio for gpu in report.gpus]


def test_a_file_of_the_old_tool(tmp_path: Path) -> None:
    """Numbers as text, times without a zone, no summary: everything that can be told is."""
    frames = [frame(second, ["25.5", None], gpu_memory=["10", 20]) for second in range(6)]

    report = read_report(old_file(tmp_path / "old.json", frames))

    first, second = report.gpus
    assert ("old", 6, 1.0) == (report.name, report.frames, report.interval_seconds)
    assert 25.5 == first.statistics["gpu_util"].mean
    assert "gpu_util" not in second.statistics
    assert 20.0 == second.statistics["gpu_memory"].p50
    assert (None, ()) == (first.energy_joules, report.gaps)


def test_frames_that_are_missing_altogether(tmp_path: Path) -> None:
    """As when the old head was down, are a gap of all GPUs."""
    frames = [frame(second) for second in (*range(10), *range(30, 40))]

    (gap,) = read_report(old_file(tmp_path / "old.json", frames)).gaps

    assert (20.0, (0, 1)) == (gap.seconds, gap.gpus)


def test_a_gpu_that_joins_later(tmp_path: Path) -> None:
    """Is unknown before."""
    frames = [frame(second, [1.0], gpu_id=IDS[:1], gpu_memory=[1.0]) for second in range(5)]
    frames += [frame(second) for second in range(5, 10)]

    report = read_report(old_file(tmp_path / "old.json", frames))

    assert [1.0, 0.5] == [gpu.availability_ratio for gpu in report.gpus]
    assert [(5.0, (1,))] == [(gap.seconds, gap.gpus) for gap in report.gaps]


def test_a_node_that_samples_more_slowly_has_no_gaps(tmp_path: Path) -> None:
    """Only where it was silent for longer than it always is."""
    frames = [
        frame(0, [50.0, 60.0 if second % 2 == 0 and not 40 < second < 60 else None], time=START + second)
        | {"gpu_memory": [1.0, None]}
        for second in range(100)
    ]

    report = read_report(old_file(tmp_path / "old.json", frames))

    assert [(START + 41, START + 60)] == [(gap.start, gap.end) for gap in report.gaps]


@pytest.mark.parametrize(
    "raw",
    [
        1_767_261_600,
        "1767261600.0",
        1_767_261_600_000,
        "2026-01-01T10:00:00Z",
        "2026-01-01T10:00:00.000+00:00",
        "2026-01-01 11:00:00+01:00",
    ],
)
def test_times_in_all_forms(raw: object) -> None:
    """Seconds, milliseconds, ISO 8601."""
    assert 1_767_261_600.0 == parse_epoch(raw)


@pytest.mark.parametrize("raw", [None, True, "soon", "", math.nan, math.inf, -5, 10**400, [], "9999-99-99"])
def test_what_is_no_time(raw: object) -> None:
    """Is unknown."""
    assert parse_epoch(raw) is None


def test_frames_without_times(tmp_path: Path) -> None:
    """Come one interval after the other."""
    frames = [frame(second, time=None) for second in range(4)]

    report = read_report(old_file(tmp_path / "old.json", frames, start_time=START, interval_ms=500))

    assert (START, START + 2.0) == (report.start, report.end)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("n1:3:NVIDIA H200", ("n1", "3", "NVIDIA H200")),
        ("n1:3:1:NVIDIA H200 MIG 1g.18gb", ("n1", "3:1", "NVIDIA H200 MIG 1g.18gb")),
        ("n1:3", ("n1", "3", "")),
        ("strange", ("strange", "", "")),
        ("", ("", "", "")),
    ],
)
def test_names_of_gpus(name: str, expected: tuple[str, str, str]) -> None:
    """Node, label and model."""
    assert expected == split_id(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("   \n", "cut off|empty"),
        ("hello", "not a JSON object"),
        ("[1, 2]", "not a JSON object"),
        ("{}", "has no frames"),
        ('{"frames": []}', "has no frames"),
        ('{"frames": [3]}', "not a JSON object"),
        ('{"frames": {}}', "`frames` is not a list"),
        ('{"frames": [{}]}', "no list of GPUs"),
        ('{"frames": [{"gpu_id": [1]}]}', "no list of GPUs"),
        ('{"frames": [{"gpu_id": ["a", "a"]}]}', "a GPU twice"),
        (
            '{"frames": [{"gpu_id": ["a", "b"], "gpu_util": [1]}]}',
            "frame 1 has 2 GPUs, but `gpu_util` has 1 value",
        ),
        ('{"frames": [{"gpu_id": ["a"], "gpu_util": 5}]}', "`gpu_util` is not a list"),
        ('{"frames": [{"gpu_id": ["a"]}]', "incomplete"),
        ('{"frames": [{"gpu_id": ["a"', "incomplete"),
        ('{"frames": [{"gpu_id": ["' + "a" * 99, "incomplete"),
        ('{"frames": [{"gpu_id": ["a"], "gpu_util": [nu', "it ends in frame 1"),
        ('{"frames": [{"gpu_id": ["a"]}, {"gpu_id": ["a"]}', "it ends after frame 2"),
        ('{"frames": [{"gpu_id" ["a"]}]}', "separated by a colon .* in frame 1, at "),
        ('{"frames": [{"gpu_id": ["a"]} {}]}', "expected ',' or ']' after frame 1, at "),
        ('{"frames": [{"gpu_id": ["a"]}]} {', "trailing garbage after the end of the document"),
        (
            '{"frames": [{"gpu_id" ["a"]}], "and": "much more of it, so that this is not the end"}',
            "separated by a colon",
        ),
        ('{"a": ' + "[" * 100_000, "nested deeper than 64 levels in 'a'"),
        ('{"a": 1' + "0" * 5000 + "}", "integer overflow in 'a'"),
        ('{"a": 1e400}', "overflow in 'a'"),
        ('{"format": {"version": 2}}', "its format is version 2"),
        ('{"session_name": "x"}\n{"frame_id": 1, "gpu_id"', "it ends in line 2"),
        ('{"session_name": "x"}\n[]\n', "line 2 is not a JSON object"),
        ('{"session_name": "x"}\nx\n', "line 2 is not JSON"),
    ],
)
def test_what_is_no_session_file(text: str, message: str, tmp_path: Path) -> None:
    """Is refused in words that say why."""
    path = tmp_path / "x.json"
    path.write_text(text)

    with pytest.raises(RecordingError, match=message):
        read_report(path)


def test_a_value_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not read into memory."""
    monkeypatch.setattr(session_json_reader, "MAX_VALUE_BYTES", 1 << 20)
    path = tmp_path / "x.json"
    path.write_text('{"a": "' + "b" * 2_000_000 + '"}')

    with pytest.raises(RecordingError, match="one value is larger than 1 MiB"):
        read_report(path)


def test_not_text_at_all(tmp_path: Path) -> None:
    """Nor is it taken for some."""
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": "\xff\xfe"}')

    with pytest.raises(RecordingError, match="UTF-8"):
        read_report(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Is said to be so."""
    with pytest.raises(RecordingError, match="No such file"):
        read_report(tmp_path / "x.json")


def test_values_that_are_no_numbers_are_unknown(tmp_path: Path) -> None:
    """NaN, infinities and words: never 0, and their number is told where they are none at all."""
    path = tmp_path / "x.json"
    path.write_text(
        '{"frames": [{"gpu_id": ["a", "b", "c", "d"], "gpu_util": [NaN, Infinity, "N/A", 7], "gpu_memory": [-Infinity, 1, 1, 1]}]}'
    )

    report = read_report(path)

    assert [None, None, None, 7.0] == [
        found.statistics["gpu_util"].mean if "gpu_util" in found.statistics else None for found in report.gpus
    ]
    assert 1 == report.strange_values
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("label", ["a NaN b", "NaN", "-Infinity", '"NaN', "NaNo"])
def test_words_in_texts_stay(label: str, tmp_path: Path) -> None:
    """Only values that are no numbers are unknown."""
    path = old_file(tmp_path / "x.json", [frame(0, [math.nan, -math.inf])], labels={"why": label})

    report = read_report(path)

    assert {"why": label} == report.labels
    assert ["gpu_util" in found.statistics for found in report.gpus] == [False, False]


class Slow(io.BytesIO):
    """A file that gives little at a time."""

    def read(self, size: int | None = -1, /) -> bytes:
        """At most seven bytes."""
        return super().read(7 if size is None or size > 7 or size < 0 else size)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**63, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(
    document=st.dictionaries(st.text(max_size=4), VALUES, max_size=5),
    frames=st.lists(VALUES, max_size=5),
    indent=st.sampled_from([None, 1]),
    plain=st.booleans(),
)
def test_members_are_what_json_reads(
    document: dict[str, Any], frames: list[Any], indent: int | None, plain: bool
) -> None:
    """Whatever is in it, and however little of it comes at a time."""
    text = json.dumps({**document, "frames": frames}, indent=indent, ensure_ascii=plain)

    found = list(read_members(Slow(text.encode("utf-8", "surrogatepass")), "x"))

    expected = [(key, value) for key, value in document.items() if key != "frames"]
    expected += [("frames", value) for value in frames]
    assert expected == [item for item in found if item[0] != "frames"] + [
        item for item in found if item[0] == "frames"
    ]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    """Cut anywhere, with bytes changed: a report, or a clear error, and nothing else."""
    path = tmp_path / "x.json"
    good = tmp_path / "good.json"
    text = (good if good.exists() else new_file(good)).read_bytes()
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text = text[:place] + data.draw(st.binary(max_size=3)) + text[place + data.draw(st.integers(0, 3)) :]
    path.write_bytes(text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))])

    try:
        report = read_report(path)
    except RecordingError as error:
        assert "x.json" in error.message  # noqa: PT017
    else:
        json.dumps(report.to_dict(), allow_nan=False)


JUNK = st.none() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    about=st.dictionaries(
        st.sampled_from(
            [
                "start_time",
                "end_time",
                "interval_ms",
                "labels",
                "findings",
                "events",
                "summary_by_device",
                "nodes",
            ]
        ),
        JUNK | st.dictionaries(st.sampled_from([*IDS, "energy_joules", "version"]), JUNK, max_size=3),
    ),
    frames=st.lists(
        st.fixed_dictionaries(
            {"gpu_id": st.just(IDS), "time": JUNK, "gpu_util": st.lists(JUNK, min_size=2, max_size=2)}
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_junk_in_the_right_places(about: dict[str, Any], frames: list[Any], tmp_path: Path) -> None:
    """Fields of any kind never end in anything but a report or a clear error."""
    path = old_file(tmp_path / "x.json", frames, **about)

    try:
        report = read_report(path)
    except RecordingError:
        return
    json.dumps(report.to_dict(), allow_nan=False)
    assert report.end >= report.start


@pytest.mark.slow
def test_long_files_take_little_memory(tmp_path: Path) -> None:
    """Four times the frames take no more of it, and the picture's columns stay within bounds."""
    peaks = []
    for count in (6_000, 24_000):
        path = tmp_path / f"{count}.json"
        with path.open("w") as file:
            file.write('{"session_name": "long", "interval_ms": 500, "frames": [')
            for number in range(count):
                line = json.dumps(frame(number, [number % 100, number % 50], time=START + number / 2))
                file.write((",\n" if number else "\n") + line)
            file.write("]}")
        tracemalloc.start()
        report = read_report(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == report.frames
        assert 1024 <= report.series.columns <= 2048

    assert peaks[1] < 1.3 * peaks[0]
