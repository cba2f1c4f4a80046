"""The parts of a deploy that need no node: command lines, answers, wheels, and many at once."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.cli import deploy, deploy_nodes
from gpulse.deploy import deployment, wheelhouse
from gpulse.deploy.deployment import (
    Deployment,
    DeployOrder,
    NodeOutcome,
    WheelhouseCache,
    build_agent_options,
    choose_head,
    head_slug,
    run_on_all,
    show_log,
)
from gpulse.deploy.node_list import NodeError, NodeSpec, check_destination
from gpulse.deploy.ssh import (
    ScriptRequest,
    SshConfig,
    SshResult,
    explain_failure,
    is_new_ssh,
    make_request,
    parse_answer,
    send_request,
)
from gpulse.deploy.wheelhouse import ProgramRunner, make_own_wheel, repack_distribution
from gpulse.errors import GpulseError, UsageError
from gpulse.terminal.table import make_painter
from tests.integration.ssh_nodes import is_alive
from tests.unit.head_answers import node_status

_PRINTABLE = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1, max_size=40)


def test_ssh_is_told_to_ask_nothing_and_to_trust_nobody() -> None:
    """The destination comes after `--`, what the user wants before what we want by default."""

    words = SshConfig("/x/config", ("ServerAliveInterval=9",)).command(NodeSpec("-x y", "ada", 22), "true")

    assert ["ssh", "-T", "-a", "-x"] == words[:4]
    assert ["--", "-x y", "true"] == words[-3:]
    assert words.index("-oServerAliveInterval=9") < words.index("-oServerAliveInterval=5")
    assert "-oBatchMode=yes" == words[4]
    assert ["-F", "/x/config", "-p", "22", "-l", "ada"] == words[words.index("-F") : words.index("-F") + 6]
    assert not [word for word in words if "StrictHostKeyChecking" in word]
    assert {"-oStdinNull=no", "-oSessionType=default", "-oForkAfterAuthentication=no"} <= set(words)
    old = SshConfig(is_new=False).command(NodeSpec("x"), "true")
    assert not [word for word in old if "StdinNull" in word], "older ones would refuse it"


@pytest.mark.parametrize(
    ("said", "is_new"), [("OpenSSH_9.2p1 Debian", True), ("OpenSSH_8.0p1", False), ("who knows", False)]
)
def test_ssh_says_what_it_knows(said: str, is_new: bool, tmp_path: Path) -> None:
    """In its version."""

    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    program.chmod(0o755)
    assert is_new is is_new_ssh(str(program))
    assert not is_new_ssh("/nonexistent/ssh")


@pytest.mark.parametrize(
    "host", ["; rm -rf ~", "my node", "$(x)", "`x`", "a|b", "a&b", "a'b", 'a"b', "a\\b", "~", "a*"]
)
def test_what_no_machine_is_called_never_reaches_a_program(host: str) -> None:
    """Older ssh puts names into commands of its configuration."""

    with pytest.raises(NodeError, match="contains invalid characters"):
        check_destination(NodeSpec(host))
    with pytest.raises(NodeError, match="contains invalid characters"):
        check_destination(NodeSpec("gpu01", f"{host}\\"))


@pytest.mark.parametrize("host", ["gpu01", "gpu-01.example.org", "fe80::1%eth0", "größe", "gpu_1"])
def test_what_machines_are_called_is_left_alone(host: str) -> None:
    """Addresses and names of other alphabets too."""

    check_destination(NodeSpec(host, "LAB\\ada@x"))


def test_what_ssh_says_becomes_what_to_do() -> None:
    """And what is not known is passed on."""

    unknown = explain_failure(
        "No ED25519 host key is known for x\nHost key verification failed.\n", NodeSpec("x", "ada", 22)
    )
    assert "the node's host key is unknown" == unknown.message
    assert "ssh-keyscan -p 22 x" in (unknown.hint or "")
    assert "it is on fire" == explain_failure("noise\nssh: it is on fire\n", NodeSpec("x")).message
    assert "without a message" in explain_failure("", NodeSpec("x")).message


async def test_ssh_that_is_not_there_is_a_failure_of_the_node() -> None:
    """With what to install."""

    with pytest.raises(NodeError, match="cannot start"):
        await send_request(
            SshConfig(program="/nonexistent/ssh"), NodeSpec("x"), make_request("status", {}), seconds=5
        )


@settings(max_examples=25, deadline=None)
@given(st.lists(_PRINTABLE, max_size=4), _PRINTABLE)
def test_words_reach_a_node_as_they_are(words: list[str], head: str) -> None:
    """Whatever a shell would make of them; files behind the script arrive byte for byte."""

    order = make_request("status", {"head": head}, words, {"token": b"a\nb"}, b"\x00rest")
    script = order.data[: int(order.command.partition("count=")[2].split()[0])]
    shown = script.partition(b"# The part of `gpulse deploy`")[0] + b'printf "%s\\n" "$head" "$@"\ncat\n'
    done = subprocess.run(
        ["sh", "-c", shown], input=order.data[len(script) :], capture_output=True, check=True
    )

    assert "".join(f"{word}\n" for word in (head, *words)).encode() + b"a\nb" == done.stdout
    assert b"\x00rest" == order.rest


def test_an_answer_is_told_from_noise() -> None:
    """Login scripts talk too, and some know our words."""

    order = make_request("status", {})
    text = f"welcome\nstate running\n{order.mark} state stopped\n{order.mark} pid 12x\n\xff".encode("latin-1")
    answer = parse_answer(text, order.mark)

    assert ("stopped", None, None) == (answer.first("state"), answer.number("pid"), answer.first("head"))
    assert not answer.is_complete
    assert parse_answer(f"{order.mark} end\n".encode(), order.mark).is_complete


def test_a_request_holds_only_what_the_script_knows() -> None:
    """A parameter or a file of another name is a fault of ours."""

    for wrong in ((("rm -rf", {}),), (("up", {"x; y": "1"}),)):
        with pytest.raises(ValueError, match="not in the script"):
            make_request(*wrong[0])
    with pytest.raises(ValueError, match="not a file name"):
        make_request("up", {}, (), {"../token": b""})


def test_each_node_has_its_head_and_its_words() -> None:
    """Its own before those of all."""

    node = NodeSpec("gpu01", name="big one", head="Other:99", labels={"b": "2", "a": "1"})

    assert "Other:99" == choose_head(node, DeployOrder("up", "gpu-head"))
    assert "other_99" == head_slug("Other:99")
    words = build_agent_options(node, DeployOrder("up", options=("--demo",)))
    assert ["--demo", "--node-name", "big one"] == words[:3]
    assert ["--label", "a=1", "--label", "b=2", "--label", "ssh=gpu01"] == words[3:]
    assert "ssh=gpu01:2222" in build_agent_options(NodeSpec("gpu01", "ada", 2222), DeployOrder("up")), (
        "others may be at 2223"
    )
    with pytest.raises(UsageError, match="51 labels are too many"):
        build_agent_options(
            NodeSpec("x", labels={f"k{number}": "v" for number in range(50)}), DeployOrder("up")
        )
    with pytest.raises(UsageError, match="no head is given"):
        choose_head(NodeSpec("x"), DeployOrder("up"))
    with pytest.raises(UsageError):
        choose_head(NodeSpec("x"), DeployOrder("up", "http://gpu-head:8091"))


async def test_no_more_nodes_at_a_time_than_were_allowed() -> None:
    """All of them in the end."""

    busy, most = 0, 0
    done: list[NodeOutcome] = []

    async def job(node: NodeSpec) -> NodeOutcome:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0)
        busy -= 1
        return NodeOutcome(node, 0.0)

    nodes = [NodeSpec(f"n{number}") for number in range(20)]
    await run_on_all(nodes, job, parallel=3, begun=lambda _: None, done=done.append)

    assert 3 == most
    assert {node.host for node in nodes} == {outcome.node.host for outcome in done}


def test_a_wheel_of_an_installation_is_the_wheel_it_came_from(tmp_path: Path) -> None:
    """It has the same files, and its record names them all; making it again makes the same bytes."""

    made = repack_distribution(metadata.distribution("click"), tmp_path)
    first = made.read_bytes()
    assert first == repack_distribution(metadata.distribution("click"), tmp_path).read_bytes()
    with zipfile.ZipFile(made) as wheel:
        names = set(wheel.namelist())
        record = wheel.read(next(name for name in names if name.endswith("RECORD"))).decode()
    assert "click/__init__.py" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith("INSTALLER")]
    assert len(names) == len(record.splitlines())


def test_our_own_wheel_holds_what_is_not_code_too(tmp_path: Path) -> None:
    """The script for nodes, and the commands."""

    with zipfile.ZipFile(make_own_wheel(tmp_path)) as wheel:
        names = wheel.namelist()
        entry_points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "gpulse/deploy/node.sh" in names
    assert "gpulse = gpulse.cli.entry:main" in entry_points


def test_a_node_says_which_wheels_it_needs() -> None:
    """And one that gpulse cannot run on is refused."""

    assert (12, "aarch64", 31) == wheelhouse.parse_platform("cp312 aarch64 glibc2.31")
    assert None is wheelhouse.parse_platform("cp311 x86_64 musl").glibc
    assert (sys.version_info.minor,) == wheelhouse.own_platform()[:1]
    for facts in ("", "pypy310 x86_64 glibc2.31", "cp312 x86_64; rm", "cp312"):
        with pytest.raises(GpulseError, match="does not support"):
            wheelhouse.parse_platform(facts)


def test_a_directory_without_gpulse_is_no_wheelhouse(tmp_path: Path) -> None:
    """With how to make one; another wheel is another key."""

    with pytest.raises(UsageError, match="no wheel for gpulse"):
        wheelhouse.pack_wheelhouse(tmp_path)
    make_own_wheel(tmp_path)
    with pytest.raises(UsageError, match="no wheel for pip"):
        wheelhouse.pack_wheelhouse(tmp_path)
    (tmp_path / "pip-1-py3-none-any.whl").write_bytes(b"x")
    first = wheelhouse.pack_wheelhouse(tmp_path)
    assert first == wheelhouse.pack_wheelhouse(tmp_path)
    (tmp_path / "pip-1-py3-none-any.whl").write_bytes(b"y")
    assert first.key != wheelhouse.pack_wheelhouse(tmp_path).key


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["up"], "no head is given"),
        (["up", "--head", "http://h:8091"], "HTTP address"),
        (["up", "--head", "h", "--wheelhouse", "w"], "requires --push"),
        (["up", "--head", "h", "--push", "--wheelhouse", "w"], "no wheel for gpulse"),
        (["up", "--head", "h", "--", "--state-dir=x"], "gpulse deploy sets"),
        (["up", "--head", "h", "--", "--label", "x"], "not a label"),
        (["up", "--head", "h", "--python", "-c"], "not the path of a Python"),
        (["up", "--head", "h", "--tls-ca", "/nonexistent/ca"], "cannot read"),
        (["up", "--head", "h", "--tls-ca", "list"], "contains no certificate"),
        (["up", "--head", "h", "--tls-key", "list"], "not a usable private key"),
        (["up", "--head", "h", "--tls-ca", "large"], "larger than 1 MiB"),
        (["up", "--head", "h", "--token-file", "/nonexistent/token"], "cannot read the token file"),
        (["up", "--head", "h", "--token-file", "list", "--no-token"], "cannot be used together"),
        (["down", "--head", "http://h:8091"], "HTTP address"),
        (["down", "--only", "other"], "is not in"),
        (["down", "--ssh-config", "/nonexistent/config"], "cannot read"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_any_node_is_asked(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the exit code of wrong usage."""

    monkeypatch.delenv("GPULSE_HEAD", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list").write_text("gpu01\n")
    (tmp_path / "large").write_bytes(bytes((1 << 20) + 1))

    with pytest.raises(UsageError, match=reason):
        deploy.command.main([words[0], "--nodes", str(tmp_path / "list"), *words[1:]], standalone_mode=False)


async def test_a_fault_of_ours_is_the_outcome_of_one_node() -> None:
    """And stops no other."""

    broken = await Deployment(
        SshConfig(program="x\0y"), DeployOrder("down"), WheelhouseCache(), seconds=5
    ).run(NodeSpec("x"))
    assert "a bug in gpulse: ValueError" in (broken.error or "")


def test_tables_show_nothing_of_what_nodes_could_do_to_a_terminal() -> None:
    """Names and reasons come from elsewhere."""

    outcomes = [
        NodeOutcome(NodeSpec("gpu01"), 1.24, did="started", state="running", link="connected"),
        NodeOutcome(NodeSpec("gpu02"), 0.1, error="bad \x1b[2J thing", hint="x"),
        NodeOutcome(NodeSpec("gpu03"), 0.1, error="bad \x1b[2J thing", hint="y"),
    ]
    paint = make_painter(color=False)

    assert [
        "node   state    result           head       seconds",
        "gpu01  running  started          connected      1.2",
        "gpu02  failed   bad ^[[2J thing  -              0.1",
        "gpu03  failed   bad ^[[2J thing  -              0.1",
    ] == deploy_nodes.work_table(outcomes, width=100, paint=paint)
    assert [(["gpu02", "gpu03"], "bad ^[[2J thing", "x (for gpu02)")] == list(
        deploy_nodes.group_failures(outcomes)
    )
    status = deploy_nodes.status_table(outcomes[:1], now=10.0, width=100, paint=paint)
    assert ["node   state    connection", "gpu01  running  connected"] == status


def _program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return str(path)


async def test_a_log_without_an_end_takes_no_more_than_its_share(tmp_path: Path) -> None:
    """A node can say what it likes, and ssh ends with what is kept."""

    endless = _program(
        tmp_path / "ssh",
        'mark=$(sed -n \'s/^mark=//p; /^mark=/q\')\necho $$ >"${0%/*}/pid"\necho "$mark log x"\nexec yes '
        + "y" * 1000,
    )
    lines: list[str] = []
    told = await show_log(
        SshConfig(program=endless),
        NodeSpec("gpu01"),
        lambda _, line: lines.append(line),
        lines=50,
        follow=False,
        seconds=30,
    )

    assert "the log is larger than 16 MiB" in (told.error or "")
    assert 16_000 < len(lines) < 17_000
    assert not is_alive(int((tmp_path / "pid").read_text()))


async def test_a_connection_that_was_shut_out_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nobody could log in; what else fails is told at once."""

    monkeypatch.setattr("gpulse.deploy.ssh._FIRST_WAIT_SECONDS", 0.001)
    tries = tmp_path / "tries"
    text = f'echo >>{tries}\n[ $(wc -l <{tries}) -gt 2 ] && echo in && exit 0\necho "$SAID" >&2\nexit 255\n'
    ssh = SshConfig(program=_program(tmp_path / "ssh", text))
    monkeypatch.setenv("SAID", "kex_exchange_identification: Connection closed by remote host")
    assert b"in\n" == (await send_request(ssh, NodeSpec("x"), make_request("status", {}), seconds=10)).output
    tries.unlink()
    monkeypatch.setenv(
        "SAID", "jump: Permission denied (publickey).\nConnection closed by UNKNOWN port 65535"
    )
    with pytest.raises(NodeError, match="refused the login"):
        await send_request(ssh, NodeSpec("x"), make_request("status", {}), seconds=10)
    assert "\n" == tries.read_text()
    monkeypatch.setattr("gpulse.deploy.ssh._MAX_TRIES", 2)
    tries.unlink()
    monkeypatch.setenv("SAID", "Connection closed by UNKNOWN port 65535")
    with pytest.raises(NodeError, match="before login") as caught:
        await send_request(ssh, NodeSpec("x"), make_request("status", {}), seconds=10)
    assert "--parallel 8" in (caught.value.hint or "")


async def test_a_copy_is_for_one_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment points to it, and nodes of one home may have it elsewhere."""

    pushed = []

    async def node(_ssh: SshConfig, where: NodeSpec, order: ScriptRequest, **_: object) -> SshResult:
        script = order.data.decode()
        said = {
            "probe": f"python /x/python3\n{order.mark} facts cp311 x86_64 glibc2.36\n{order.mark} real /{where.host}",
            "push": "did copied",
            "up": "did started",
        }[script.partition("verb=")[2].split()[0]]
        if install := re.search(r"^install=(\S+)$", script, re.MULTILINE):
            pushed.append(install[1])
        return SshResult(0, f"{order.mark} {said}\n{order.mark} end\n".encode(), "")

    monkeypatch.setattr(deployment, "send_request", node)
    prepared = WheelhouseCache(wheelhouse.Wheelhouse("key", b"wheels", 1))
    order = DeployOrder("up", "h", push=True)
    for host in ("a", "b"):
        outcome = await Deployment(SshConfig(), order, prepared, seconds=5).run(NodeSpec(host))
        assert (None, True) == (outcome.error, outcome.pushed)
    first, again, other, _ = [name for name in pushed if name != "''"]
    assert first == again != other
    assert first.startswith("key-cp311-x86_64-")


def test_programs_end_when_their_runner_is_closed() -> None:
    """With all that they started, and no other begins."""

    programs, ended = ProgramRunner(), []
    thread = threading.Thread(
        target=lambda: ended.append(programs.run(["sh", "-c", "sleep 600 & wait"], seconds=600))
    )
    thread.start()
    while not programs._running:
        time.sleep(0.01)
    programs.close()
    thread.join(60)
    assert -9 == ended[0][0]
    with pytest.raises(InterruptedError):
        programs.run(["true"], seconds=1)


def test_what_a_head_says_of_a_node_that_ssh_cannot_reach() -> None:
    """By the name in the list where the head knows it; nothing where nobody can tell."""

    nodes = [
        node_status("big", "late", labels={"ssh": "gpu01"}),
        node_status("gpu02"),
        node_status("other", "lost", labels={"ssh": "door:2222"}),
    ]

    def heard(node: NodeSpec, hostname: str | None = None, error: str | None = None) -> str | None:
        return deploy_nodes._head_state(NodeOutcome(node, 0.1, hostname=hostname, error=error), nodes)

    assert "late" == heard(NodeSpec("gpu01"), error="the node refused the connection")
    assert "lost" == heard(NodeSpec("door", port=2222), error="the node refused the connection")
    assert None is heard(NodeSpec("door", port=2223), error="the node refused the connection")
    assert "healthy" == heard(NodeSpec("10.0.0.9"), hostname="gpu02")
    assert "never reported" == heard(NodeSpec("gpu03"), hostname="gpu03")
    assert "late" == heard(NodeSpec("gpu01"), hostname="ip-10-0-0-7")
