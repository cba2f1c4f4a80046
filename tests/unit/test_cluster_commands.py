"""What the commands of a cluster make of their options and of a head's answers, without a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
import pytest

from gpulse.cli import agent, common, daemon, gsprof, head_client, option_types, session, session_download
from gpulse.cluster.client.transport import HeadAddress
from gpulse.cluster.protocol.answers import ExportState, OneSession, SessionAnswer, Sessions, SeveralSessions
from gpulse.errors import GpulseError, RefusedError, UsageError
from gpulse.model.time_text import parse_duration
from tests.unit.head_answers import session_answer

if TYPE_CHECKING:
    from msgspec import Struct

    from gpulse.cluster.agent.agent import AgentConfig

TOKEN = "0123456789abcdef0123"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any files."""
    for name in ("GPULSE_HEAD", "GPULSE_TOKEN", "GPULSE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


class _Client:
    """Stands for a head with a few sessions, whose files take a while."""

    address = HeadAddress("grpc", "localhost", 8090)

    def __init__(self, *names: str, polls: int = 0) -> None:
        self.names = names
        self.polls = polls
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.failure: GpulseError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def call(self, operation: str, answer: type[Struct], body: dict[str, Any] | None = None) -> Struct:
        """Answer as a head does."""
        self.asked.append((operation, body or {}))
        if self.failure is not None:
            raise self.failure
        is_over = any(asked == "stop" for asked, _ in self.asked)
        self.polls -= is_over
        if operation == "session":
            return self._session((body or {})["name"])
        if operation == "recover":
            session = self._session((body or {})["session_id"])
            return OneSession(success=True, message="", output_file=None, session=session)
        sessions = [self._session(f"id-{name}", is_active=not is_over) for name in self.names]
        if answer is Sessions:
            return Sessions(total_sessions=len(sessions), active_sessions=0, sessions=sessions)
        return SeveralSessions(success=True, message="", output_file=None, sessions=sessions)

    def _session(self, key: str, *, is_active: bool = False) -> SessionAnswer:
        name = key.removeprefix("id-")
        export = ExportState(state="writing" if self.polls > 0 else "done", path=f"/out/{name}.json")
        return session_answer(name, session_id=key, is_active=is_active, recoverable=True, export=export)


Asked = Callable[[_Client], _Client]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Lets commands ask this head."""

    def use(client: _Client) -> _Client:
        monkeypatch.setattr(head_client.HeadTarget, "connect", lambda *_, **__: client)
        monkeypatch.setattr(session_download, "_POLL_SECONDS", 0.0)
        return client

    return use


def test_all_sessions_are_stopped_at_once(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    """One request for all of them, so that they end at one moment; then their files are waited for together."""
    names = tuple(f"run{number}" for number in range(20))
    head = asked(_Client(*names, polls=3))

    session.stop.main(["--all"], standalone_mode=False)

    stops = [body for operation, body in head.asked if operation == "stop"]
    assert [{"format": "json"}] == stops
    assert len(head.asked) <= 5, "files are asked for one by one"
    said = capsys.readouterr().out
    assert all(f"{name} stopped: /out/{name}.json" in said for name in names)


def test_one_session_is_stopped_by_its_name(asked: Asked) -> None:
    """Also when it is found out which one it is, so that one begun meanwhile goes on."""
    head = asked(_Client("only", polls=2))

    session.stop.main([], standalone_mode=False)

    assert ("stop", {"name": "only", "format": "json"}) in head.asked


@pytest.mark.parametrize(
    ("command", "words", "hint"),
    [
        (session.recover_session, [], "gpulse session recover two"),
        (
            session.recover_session,
            ["--export", "--head", "h:1"],
            "gpulse session recover --export two --head h:1",
        ),
        (gsprof.recover_session, ["localhost"], "gsprof recover localhost --name two"),
        (gsprof.recover_session, ["localhost", "--export"], "gsprof recover localhost --export --name two"),
    ],
)
def test_recover_asks_which(asked: Asked, command: click.Command, words: list[str], hint: str) -> None:
    """Without a name it says which there are, and exits with 2."""
    head = asked(_Client("one", "two"))

    with pytest.raises(UsageError, match="there are 2 interrupted sessions: one, two") as caught:
        command.main(words, standalone_mode=False)

    assert (hint, 2) == (caught.value.hint, caught.value.exit_code)
    assert ["sessions"] == [operation for operation, _ in head.asked]


def test_recover_means_the_only_one(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a name there is nothing to ask when there is one session only."""
    head = asked(_Client("only"))

    gsprof.command.main(["recover", "localhost"], standalone_mode=False)

    assert ("recover", {"session_id": "id-only"}) in head.asked
    assert "only resumed\n" == capsys.readouterr().out


def test_nothing_to_recover_is_no_question(capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to choose from."""
    session.RecoveryRequest().choose([])

    assert "there is no interrupted session\n" == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["profile", "h:1", "--name", "x"], "stop it with: gsprof stop h:1 --name x, or choose another name"),
        (
            ["http-profile", "h:2", "--name", "x"],
            "stop it with: gsprof stop http://h:2 --name x, or choose another name",
        ),
    ],
)
def test_what_is_suggested_is_for_the_same_head(asked: Asked, words: list[str], hint: str) -> None:
    """A command that is copied must not ask another one."""
    head = asked(_Client())
    head.failure = RefusedError(
        409, "it is active already", hint="stop it with: gpulse session stop x, or choose another name"
    )

    with pytest.raises(RefusedError) as caught:
        gsprof.command.main(words, standalone_mode=False)
    assert hint == caught.value.hint


def test_hints_for_http_become_commands(asked: Asked) -> None:
    """What a head suggests to programs is said in words that can be typed."""
    head = asked(_Client())
    head.failure = RefusedError(404, "there is no node 'nope'", hint="list the nodes with GET /clients")

    with pytest.raises(RefusedError) as caught:
        session.start.main(["x", "--node", "nope"], standalone_mode=False)
    assert "list the nodes with gpulse status" == caught.value.hint


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ("gpulse session recover week.1, or stop it first", "gsprof recover --name week.1, or stop it first"),
        ("gpulse session export run", "gsprof recover --export --name run"),
        ("gpulse session export run --head h:1, or", "gsprof recover h:1 --export --name run, or"),
        ("gpulse session list --head h:1", "gsprof status h:1"),
        ("start a head here with `gpulse head`", "start a head here with `gsprof start`"),
        ("gpulse status lists the nodes", "gsprof status lists the nodes"),
        ("gpulse agent HOST:8090", "gsprof connect HOST:8090"),
        ("pip install 'gpulse[head]'", "pip install 'gpulse[head]'"),
        ("view it with: gpulse report /d/x.json", "view it with: gsprof stat --data /d/x.json"),
        ("`gpulse session stop`", "`gsprof stop`"),
    ],
)
def test_gsprof_suggests_its_own_commands(hint: str, words: str) -> None:
    """Where it has one."""
    assert words == gsprof.translate_commands(hint)


def test_gsprof_rewords_what_its_commands_fail_with(asked: Asked) -> None:
    """Whichever command it is."""
    head = asked(_Client())
    head.failure = RefusedError(409, "it is interrupted already", hint="gpulse session recover x, or stop it")

    with pytest.raises(RefusedError) as caught:
        gsprof.command.main(["profile", "localhost", "--name", "x"], standalone_mode=False)
    assert "gsprof recover localhost --name x, or stop it" == caught.value.hint


@pytest.mark.parametrize("text", ["90", "1.5", "10m", "1h30m", "30D", " 2w ", "250ms"])
def test_lengths_of_time_are_the_same_everywhere(text: str) -> None:
    """On the command line as in requests."""
    assert parse_duration(text.strip().lower()) == option_types.duration(text)


@pytest.mark.parametrize("text", ["", "yesterday", "-5", "10 m", "10m5", "nan"])
def test_what_is_not_a_duration(text: str) -> None:
    """It is refused."""
    with pytest.raises(click.BadParameter, match="not a duration"):
        option_types.duration(text)


def test_labels() -> None:
    """Each has a key; a value may be empty, and may hold equals signs."""
    assert {"a": "1", "b": "", "c": "x=y"} == option_types.labels(["a=1", "b=", "c=x=y"])
    for wrong in ("a", "=1", "a=" + "x" * 300, "a=\n"):
        with pytest.raises(UsageError, match=r"is not a (valid )?label"):
            option_types.labels([wrong])
    with pytest.raises(UsageError, match="too many"):
        option_types.labels([f"{number}=" for number in range(1000)])


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AgentConfig]:
    """How an agent would run that is started so."""

    def configure(**options: Any) -> AgentConfig:
        seen: list[AgentConfig] = []

        async def run(*_: object) -> None:
            return

        monkeypatch.setattr(agent, "_sample_for_heads", lambda config, _: seen.append(config))
        monkeypatch.setattr(agent, "_run", run)
        monkeypatch.setattr(daemon, "start_logging", lambda: None)
        agent.start(**{"demo": True, **options})
        return seen[0]

    return configure


def test_one_head_has_one_spool_however_it_is_written(configured: Callable[..., AgentConfig]) -> None:
    """Frames that wait for a head are found again when its port is left out the next time."""
    states = {configured(head=head).state for head in ("head", "head:8090", "HEAD", "grpc://head:8090")}

    assert [common.state_dir("agent", "head_8090")] == list(states)
    assert configured(head="::1").state == configured(head="[::1]:8090").state
    assert configured(head="head:9000").state not in states


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 254, "a\x1b[31m", "\udc80"])
def test_a_name_that_no_node_can_have(configured: Callable[..., AgentConfig], name: str) -> None:
    """It is refused before anything starts."""
    with pytest.raises(UsageError, match="is not a valid node name"):
        configured(head="head", node_name=name)


def test_agents_do_not_speak_http(configured: Callable[..., AgentConfig]) -> None:
    """An address that says so is refused, with the port to use."""
    with pytest.raises(UsageError, match="agents use the gRPC port \\(default: 8090"):
        configured(head="http://head:8091")


def test_an_agents_token_is_read_as_a_commands(configured: Callable[..., AgentConfig]) -> None:
    """One that other users can read is refused, unless the head is on this machine and needs none."""
    default = common.default_token_file()
    default.parent.mkdir(parents=True)
    default.write_text(f"{TOKEN}\n")
    default.chmod(0o644)

    assert configured(head="localhost").link.token is None
    with pytest.raises(UsageError, match="other users can read"):
        configured(head="far-away")
    default.chmod(0o600)
    assert TOKEN == configured(head="far-away").link.token
