"""Claims on GPUs: one holder at a time, visible to all, gone with the process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulse.sources.gpu_claims import Claimant, claim_gpu, claim_path, find_claimant, find_lock_problem
from gpulse.sources.procfs import Roots

HOLD = """
import sys
from gpulse.sources.gpu_claims import claim_gpu
from gpulse.sources.procfs import Roots
print(claim_gpu("GPU-1", Roots(dev=sys.argv[1])) is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """A machine of its own."""
    (tmp_path / "shm").mkdir()
    return Roots(dev=str(tmp_path))


def test_a_gpu_has_one_claim_at_a_time(roots: Roots) -> None:
    """The next one can have it when it is given back, and no file is left."""
    first = claim_gpu("GPU-1", roots)
    assert first is not None
    assert claim_gpu("GPU-1", roots) is None
    assert Claimant(os.getpid()) == find_claimant("GPU-1", roots)
    first.release()
    assert find_claimant("GPU-1", roots) is None
    second = claim_gpu("GPU-1", roots)
    assert second is not None
    second.release()

    assert [] == os.listdir(f"{roots.dev}/shm")


def test_a_claim_ends_with_its_process(roots: Roots) -> None:
    """Even when it is killed; the file that stays claims nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, roots.dev], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert b"True\n" == other.stdout.readline()
        assert Claimant(other.pid) == find_claimant("GPU-1", roots)
        assert claim_gpu("GPU-1", roots) is None
        other.kill()
        other.wait()
    assert os.path.exists(claim_path("GPU-1", roots))
    claim = claim_gpu("GPU-1", roots)

    assert claim is not None
    claim.release()


def test_other_users_can_open_the_file(roots: Roots) -> None:
    """Whatever the umask is; nobody else can write it."""
    before = os.umask(0o077)
    try:
        claim = claim_gpu("GPU-1", roots)
    finally:
        os.umask(before)
    assert claim is not None
    assert 0o644 == os.stat(claim.path).st_mode & 0o777
    claim.release()


def test_a_name_cannot_leave_the_directory(roots: Roots) -> None:
    """Names come from a driver."""
    assert f"{roots.dev}/shm/gpulse-wait-______etc_passwd.lock" == claim_path("../../etc/passwd", roots)


def test_a_link_is_not_followed(roots: Roots, tmp_path: Path) -> None:
    """Another user may have put it there."""
    path = claim_path("GPU-1", roots)
    for target in (tmp_path / "missing", tmp_path / "present"):
        (tmp_path / "present").touch()
        os.symlink(target, path)

        assert claim_gpu("GPU-1", roots) is None
        assert find_claimant("GPU-1", roots) is None
        problem = find_lock_problem("GPU-1", roots)
        assert f"its lock file is not a regular file; remove {path}" == problem
        os.unlink(path)
    assert not (tmp_path / "missing").exists()


def test_nothing_but_a_file_is_a_lock(roots: Roots) -> None:
    """A FIFO, a socket or a directory of another user neither blocks nor fails; other GPUs can be claimed."""
    path = claim_path("GPU-1", roots)
    with socket.socket(socket.AF_UNIX) as bound:
        makers: list[tuple[Callable[[str], None], Callable[[str], None]]] = [
            (os.mkfifo, os.unlink),
            (os.mkdir, os.rmdir),
            (lambda name: bound.bind(f"/proc/self/fd/{shm}/{os.path.basename(name)}"), os.unlink),
        ]
        shm = os.open(f"{roots.dev}/shm", os.O_RDONLY)  # its path may be too long for a socket
        try:
            for make, remove in makers:
                make(path)
                assert claim_gpu("GPU-1", roots) is None
                assert "is not a regular file" in (find_lock_problem("GPU-1", roots) or "")
                remove(path)
        finally:
            os.close(shm)
    other = claim_gpu("GPU-2", roots)

    assert other is not None
    other.release()
    assert find_lock_problem("GPU-1", roots) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_without_permissions_is_no_error(roots: Roots, tmp_path: Path) -> None:
    """Its GPU is not available to users who cannot open it."""
    path = claim_path("GPU-1", roots)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o000))
    program = (
        "import os, sys; from gpulse.sources.gpu_claims import *; from gpulse.sources.procfs import Roots\n"
        "os.fchdir(int(sys.argv[1])); os.setuid(65534); roots = Roots(dev='.')\n"
        "print(claim_gpu('GPU-1', roots), find_lock_problem('GPU-1', roots))"
    )
    tmp_path.chmod(0o755)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program, str(directory)],
            pass_fds=[directory],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        os.close(directory)

    expected = "None its lock file cannot be opened; remove ./shm/gpulse-wait-GPU-1.lock\n"
    assert expected == ended.stdout


def test_no_place_for_a_lock_is_an_error(tmp_path: Path) -> None:
    """It concerns every GPU, and somebody has to mend it."""
    with pytest.raises(FileNotFoundError):
        claim_gpu("GPU-1", Roots(dev=str(tmp_path)))
