"""What ends a command, as an exit code."""

from __future__ import annotations

import click
import pytest

from gpulse.cli import shell
from gpulse.errors import CollectionError, UsageError


def ended(error: Exception, monkeypatch: pytest.MonkeyPatch, *, failed: int | None = None) -> int:
    """The exit code of a command that this happens to."""

    @click.command()
    @click.pass_context
    def command(ctx: click.Context) -> None:
        if failed is not None:
            shell.ending(ctx).failed = failed
        raise error

    monkeypatch.setattr("sys.argv", ["gpulse"])
    return shell.run(command, name="gpulse")


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
