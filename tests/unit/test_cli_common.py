"""Run commands: exit codes, error messages, and log lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click
import pytest

from gpulse.cli import common, daemon
from gpulse.errors import CollectionError, UsageError


def ended(error: Exception, monkeypatch: pytest.MonkeyPatch, *, failed: int | None = None) -> int:
    """The exit code of a command that this happens to."""

    @click.command()
    @click.pass_context
    def command(ctx: click.Context) -> None:
        if failed is not None:
            common.exit_codes(ctx).failed = failed
        raise error

    monkeypatch.setattr("sys.argv", ["gpulse"])
    return common.run(command, name="gpulse")


@pytest.mark.parametrize("error", [MemoryError(), CollectionError("x"), ZeroDivisionError()])
def test_a_command_chooses_the_code_of_its_failures(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To `why` 1 means findings, and nothing that goes wrong may look like one."""

    assert 1 == ended(error, monkeypatch)
    assert 3 == ended(error, monkeypatch, failed=3)


def test_wrong_usage_has_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command makes of its failures."""

    assert 2 == ended(UsageError("x"), monkeypatch, failed=3)
    assert 2 == ended(click.UsageError("x"), monkeypatch, failed=3)


@contextmanager
def own_logging() -> Iterator[None]:
    """Give back the handlers and levels of all loggers that a program sets."""
    loggers = [logging.getLogger(name) for name in (None, "asyncio", "uvicorn")]
    before = [(logger, logger.level, logger.handlers) for logger in loggers]
    logging.getLogger().handlers = []
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers = handlers


def test_names_in_errors_and_logs_cannot_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences and direction overrides are spelled out, and nobody forges a second line of a log."""
    evil = "\x1b[2J\u202e\x9b"
    ended(CollectionError(f"cannot read {evil}", hint=evil), monkeypatch)
    with own_logging():
        daemon.start_logging()
        logging.getLogger("gpulse").warning("ended %s", f"{evil}\nforged")

    *said, logged = capfd.readouterr().err.splitlines()
    assert ["gpulse: cannot read ^[[2J<202E><9B>", "  try: ^[[2J<202E><9B>"] == said
    assert "ended ^[[2J<202E><9B>^Jforged" == logged.partition(" W ")[2]
