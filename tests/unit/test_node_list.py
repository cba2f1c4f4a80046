"""Lists of nodes: what people write, and what nobody should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.deploy.node_list import (
    NodeError,
    NodeListFile,
    NodeSpec,
    check_destination,
    parse_node_list,
    read_node_list,
)
from gpulse.errors import UsageError

_TOML = b"""
nodes = ["gpu01", {host = "gpu02", port = 2222, name = "big", labels = {rack = "a2"}}, {host = "bob@gpu03", venv = "/opt/v"}]

[defaults]
user = "ada"
python = "~/py/bin/python3"
head = "gpu-head:8090"
labels = {rack = "a1", site = "x"}
"""


def hosts(text: bytes, path: str = "node-list.txt") -> list[str]:
    """The destinations of a list."""
    return [node.destination for node in parse_node_list(text, path)]


def only(text: str) -> NodeSpec:
    """The node that one line is, wherever it stands."""
    (node,) = parse_node_list(f"# one\n{text}\n".encode(), "node-list.txt")
    return node._replace(place="")


def wrongs(text: bytes, path: str = "node-list.txt") -> list[str]:
    """What is wrong with the nodes of a list, with the place."""
    return [f"{node.place}: {node.wrong}" for node in parse_node_list(text, path) if node.wrong is not None]


def refusal(text: bytes, path: str = "node-list.txt") -> str:
    """Why a list is refused."""
    with pytest.raises(UsageError) as caught:
        parse_node_list(text, path)
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu01", NodeSpec("gpu01")),
        ("ada@gpu01", NodeSpec("gpu01", "ada")),
        ("a@b@gpu01", NodeSpec("gpu01", "a@b")),
        ("gpu01:2222", NodeSpec("gpu01", None, 2222)),
        ("ssh://ada@gpu01:2222", NodeSpec("gpu01", "ada", 2222)),
        ("SSH://gpu01/", NodeSpec("gpu01")),
        ("ssh://ada@[fe80::1%eth0]:22", NodeSpec("fe80::1%eth0", "ada", 22)),
        ("[::1]", NodeSpec("::1")),
        ("::1", NodeSpec("::1")),
        ("my node", NodeSpec("my node")),
        ("; rm -rf ~", NodeSpec("; rm -rf ~")),
    ],
)
def test_a_destination_is_read_as_ssh_reads_it(text: str, expected: NodeSpec) -> None:
    """And what no shell would take for a name is one all the same."""

    assert expected == only(text)


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=x",
        "-l@h",
        "ada@",
        "ada@-x",
        "@h",
        "a\x1bb",
        "a\x0bb",
        "ssh://h:0",
        "ssh://h:99999",
        "ssh://h:x",
        "h" * 300,
    ],
)
def test_what_cannot_be_meant_says_so_and_is_never_reached(text: str) -> None:
    """An option, nothing, or what cannot be printed."""

    node = only(text)
    assert node.wrong is not None
    with pytest.raises(NodeError, match=re.escape(node.wrong)):
        check_destination(node)


def test_comments_blank_lines_and_other_line_ends_are_nothing() -> None:
    """As editors on other systems leave them."""

    assert ["gpu01", "ada@gpu#2", "gpu03"] == hosts(
        b"\xef\xbb\xbf# all\r\n\r\n gpu01 \r\nada@gpu#2 # the big one\n#gpu9\n\tgpu03"
    )


def test_every_wrong_line_is_named() -> None:
    """By its number."""

    text = b"gpu01\n-x\n# c\nGPU01\na\x00b\ngpu02\n"
    assert [
        "line 2: '-x' starts with - and would be read as an option",
        "line 4: 'gpu01' is already in the list, at line 1",
        "line 5: 'a\\x00b' has unprintable characters",
    ] == wrongs(text)
    assert ["gpu01", "gpu02"] == [
        node.host for node in parse_node_list(text, "node-list.txt") if node.wrong is None
    ]


def test_toml_says_more_about_each_node() -> None:
    """What a node says itself comes before the defaults; its own program replaces theirs."""

    first, second, third = parse_node_list(_TOML, "nodes.txt")

    assert (
        NodeSpec(
            "gpu01",
            "ada",
            None,
            None,
            "~/py/bin/python3",
            None,
            None,
            "gpu-head:8090",
            {"rack": "a1", "site": "x"},
            "node 1",
        )
        == first
    )
    assert ("ada@gpu02:2222", "big", {"rack": "a2", "site": "x"}) == (
        second.destination,
        second.title,
        second.labels,
    )
    assert ("bob", None, "/opt/v") == (third.user, third.python, third.venv)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"nodes = [", "cannot read nodes.toml"),
        (b"nodes = []", "there are no nodes"),
        (b"nodes = 3", "the file may contain only a table"),
        (b"hosts = ['a']", "unknown key 'hosts'"),
        (b"nodes = ['a']\n[defaults]\nhost = 'b'", "defaults: unknown key 'host'"),
    ],
)
def test_toml_that_cannot_be_meant_is_refused(text: bytes, words: str) -> None:
    """With the place."""

    assert words in refusal(text, "nodes.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"nodes = [1]", "node 1: the entry must be"),
        (b"nodes = [{user = 'a'}]", "host is missing"),
        (b"nodes = [{host = 'a@b', user = 'c'}]", "user is given twice"),
        (b"nodes = [{host = 'a', port = true}]", "'True' is not a valid port"),
        (b"nodes = [{host = 'a', python = 'python3'}]", "must be an absolute path"),
        (b"nodes = [{host = 'a', colour = 'red'}]", "unknown key 'colour'"),
        (b"nodes = [{host = 'a', labels = {x = 1}}]", "not a valid label"),
        (
            b"nodes = [{host = 'a', name = 'n'}, {host = 'b', name = 'n'}]",
            "node 2: 'n' is already in the list",
        ),
        (b"nodes = [{host = 'a', name = 'n'}, 'n']", "node 2: 'n' is already in the list"),
    ],
)
def test_an_entry_that_cannot_be_meant_stops_no_other(text: bytes, words: str) -> None:
    """And says where it is."""

    (wrong,) = wrongs(text.replace(b"]", b", 'good']") if b"['" not in text else text, "nodes.toml")
    assert words in wrong


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """With what to do."""

    with pytest.raises(UsageError, match="cannot read"):
        read_node_list(tmp_path / "missing")
    assert "line 2 is not UTF-8" in refusal(b"a\n\xff\xfe\n")
    (tmp_path / "list").write_text("gpu01\n")
    assert ["gpu01"] == [node.host for node in read_node_list(tmp_path / "list")]


@given(
    st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)),
    st.sampled_from(["n.txt", "n.toml"]),
)
def test_no_bytes_are_more_than_a_list_or_a_refusal(data: bytes, path: str) -> None:
    """And no name that is read is an option or moves a cursor."""

    try:
        nodes = parse_node_list(data, path)
    except UsageError:
        return
    for node in nodes:
        if node.wrong is not None:
            continue
        for text in (node.host, node.user or "x"):
            assert text.isprintable()
            assert not text.startswith("-")
            assert text.strip()


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.-]{0,30}", fullmatch=True),
    st.none() | st.from_regex(r"[a-z][a-z0-9_@.]{0,10}", fullmatch=True),
    st.none() | st.integers(1, 65535),
)
def test_a_destination_is_read_as_it_is_written(host: str, user: str | None, port: int | None) -> None:
    """There and back."""

    node = NodeSpec(host, user, port)

    assert node == only(node.destination)
    assert node == only(f"ssh://{node.destination}")


def test_a_list_that_is_edited(tmp_path: Path) -> None:
    """What was added is expected from then on; a list that cannot be read changes nothing."""
    path = tmp_path / "node-list.txt"
    path.write_text("# the lab\ngpu01\nada@gpu02\n", encoding="utf-8")
    expected = NodeListFile(path)

    assert ("gpu01", "gpu02") == expected()
    path.write_text("gpu01\nada@gpu02\ngpu03.lab\n", encoding="utf-8")
    assert ("gpu01", "gpu02", "gpu03.lab") == expected()
    path.unlink()
    assert ("gpu01", "gpu02", "gpu03.lab") == expected()
    path.write_text("gpu04\n-oProxyCommand=x\ndoor:2222\n", encoding="utf-8")
    assert ("gpu04", "door:2222") == expected(), "what cannot be meant is left out"


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    """A head that is given none says so at once."""
    with pytest.raises(UsageError):
        NodeListFile(tmp_path / "none.txt")


def test_names_that_no_machine_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are left out, and that is said."""
    path = tmp_path / "node-list.txt"
    path.write_text("alpha\nmy node\n; rm -rf ~\n", encoding="utf-8")

    assert ("alpha",) == NodeListFile(path)()
    assert 2 == sum("ignoring line" in message for message in caplog.messages)
