"""Why a command cannot be run, as `record -- COMMAND`, `why -- COMMAND` and harvest say it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpulse.harvest.supervise.launch import explain_launch_error


def said(command: str, path: str, cwd: Path) -> str:
    """What is said of a command that cannot be run."""
    with pytest.raises(OSError) as caught:  # noqa: PT011  any of them
        subprocess.Popen([command], cwd=cwd, env={"PATH": path})
    return explain_launch_error(command, caught.value, {"PATH": path})


@pytest.mark.parametrize(
    ("words", "content", "mode"),
    [
        ("cannot run {}: Permission denied; chmod +x {}", "#!/bin/sh\n", 0o644),
        (
            (
                "cannot run {}: No such file or directory; its first line names the interpreter /no/such/python, "
                "which does not exist; correct that line"
            ),
            "#!/no/such/python -u\n",
            0o755,
        ),
        (
            (
                "cannot run {}: Permission denied; its first line names the interpreter /etc/passwd, "
                "which is not executable; correct that line"
            ),
            "#!/etc/passwd\n",
            0o755,
        ),
        (
            (
                "cannot run {}: Exec format error; it is neither a program for this machine nor a script "
                "that starts with #!; run it as `sh {}`"
            ),
            "echo hello\n",
            0o755,
        ),
    ],
)
def test_a_file_that_cannot_be_run_is_named_with_what_to_do(
    words: str, content: str, mode: int, tmp_path: Path
) -> None:
    """By its path, and found in PATH too."""
    path = tmp_path / "work"
    path.write_text(content)
    path.chmod(mode)

    assert words.replace("{}", str(path)) == said(str(path), "/bin", tmp_path)
    assert words.replace("{}", str(path)) == said("work", f"/nowhere:{tmp_path}", tmp_path)


def test_a_directory_is_no_program(tmp_path: Path) -> None:
    """Its error alone would send people to its permissions."""

    assert f"cannot run {tmp_path}: Permission denied; it is a directory; give the path of a program" == said(
        str(tmp_path), "/bin", tmp_path
    )


def test_a_program_that_is_nowhere_is_looked_for_in_path(tmp_path: Path) -> None:
    """Where else it was looked for is said."""

    assert (
        "cannot run nosuch: No such file or directory; it is not in any directory of PATH; use its full path"
        == said("nosuch", "/bin", tmp_path)
    )
    assert "cannot run /no/such: No such file or directory" == said("/no/such", "/bin", tmp_path)
