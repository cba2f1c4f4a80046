"""Try every command that README and docs show, as a newcomer: in a minimal Debian, as an ordinary user.

`walk.py` makes the root file system, copies the committed files into it, and starts itself in there (`walk.py inside`). There
the documents are read and their commands run in the order in which they are printed, in a network of their own in which only
`pip` reaches the outside. In the end nothing may be left: no process, and no file outside the user's home.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import prerequisites  # noqa: E402
from tests.newcomer.blocks import Command, commands  # noqa: E402
from tests.newcomer.plan import DOCUMENTS, HOSTS, RULES, Rule  # noqa: E402

SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "make", "ca-certificates", "curl")
MAX_CACHE_AGE_SECONDS = 7 * 86400.0
USER = "ada"
UID = 1000
HOME = Path("/home") / USER
CHECKOUT = HOME / "gpulse"
CACHE = Path("/var/cache/newcomer")
_PASSED_ON = (
    *("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_DEFAULT_TIMEOUT", "SSL_CERT_FILE"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Settings of this machine without which pip may not reach a package index."""
_MAX_COMMAND_SECONDS = 300.0
_MAX_START_SECONDS = 60.0
_MAX_END_SECONDS = 30.0
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


class WalkError(Exception):
    """A command did something else than the documents say."""


# --- outside: make the root file system and go in


def outside() -> int:
    """Make a root file system and walk in it; return the exit code."""
    why = _obstacle()
    if why:
        print(f"The walk through the documentation is skipped: {why}.", file=sys.stderr)
        return 1 if os.environ.get("CI") else 0
    began = time.monotonic()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpulse-newcomer"
    tarball = _base(cache)
    with tempfile.TemporaryDirectory(prefix="gpulse-newcomer-") as directory:
        root = Path(directory) / "root"
        root.mkdir()
        subprocess.run(["tar", "-C", str(root), "-xf", str(tarball)], check=True)
        _furnish(root)
        before = _files(root)
        code = _enter(root, cache / "pip")
        new = sorted(str(path) for path in _files(root) - before)
        if new:
            print(f"FAILED: files were left outside the home: {', '.join(new[:20])}")
            code = 1
    print(f"The walk took {time.monotonic() - began:.0f} s.")
    return code


def _obstacle() -> str:
    """Return why no root file system can be made here, or nothing."""
    if os.geteuid() != 0:
        return "it needs root, to make a root file system and to enter it"
    if prerequisites.install("walk") != 0:
        return "mmdebstrap is missing (apt-get install mmdebstrap)"
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--uts",
        "--net",
        "mount",
        "-t",
        "tmpfs",
        "tmpfs",
        "/mnt",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        "" if done.returncode == 0 else f"namespaces or mounts are not permitted here ({done.stderr.strip()})"
    )


def _base(cache: Path) -> Path:
    """Return a tar file with a minimal Debian, made anew when it is old."""
    cache.mkdir(parents=True, exist_ok=True)
    tarball = cache / f"{SUITE}-{'-'.join(PACKAGES)}.tar"
    if not tarball.exists() or time.time() - tarball.stat().st_mtime > MAX_CACHE_AGE_SECONDS:
        print(f"Making a minimal Debian: {tarball}", flush=True)
        new = tarball.with_suffix(".new.tar")
        packages = ",".join(PACKAGES)
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", SUITE, str(new)]
        subprocess.run(command, check=True)
        new.rename(tarball)
    return tarball


def _furnish(root: Path) -> None:
    """Add a user, the committed files, and what pip needs to reach the package index."""
    subprocess.run(["chroot", root, "useradd", "-m", "-u", str(UID), "-s", "/bin/bash", USER], check=True)
    place = root / CHECKOUT.relative_to("/")
    place.mkdir()
    archive = subprocess.Popen(["git", "-C", str(ROOT), "archive", "HEAD"], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-C", str(place), "-xf", "-"], stdin=archive.stdout, check=True)
    if archive.wait() != 0:
        raise WalkError("git archive HEAD failed: the walk needs a git checkout")
    subprocess.run(["chown", "-R", f"{UID}:{UID}", str(root / HOME.relative_to("/"))], check=True)
    (root / CACHE.relative_to("/")).mkdir(parents=True)
    for name in (
        os.environ.get("PIP_CERT"),
        os.environ.get("SSL_CERT_FILE"),
        "/etc/ssl/certs/ca-certificates.crt",
    ):
        if name and Path(name).is_file():
            target = root / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, target)
    if Path("/etc/resolv.conf").is_file():
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    hosts = " ".join(["localhost", "newcomer", *HOSTS])
    (root / "etc/hosts").write_text(f"127.0.0.1 {hosts}\n", encoding="ascii")


def _files(root: Path) -> set[Path]:
    """Return the files outside the home and the caches of package managers."""
    apart = {
        root / HOME.relative_to("/"),
        root / CACHE.relative_to("/"),
        root / "proc",
        root / "sys",
        root / "dev",
    }
    found: set[Path] = set()
    for directory, names, files in os.walk(root):
        here = Path(directory)
        names[:] = [name for name in names if here / name not in apart and name != "__pycache__"]
        found |= {Path("/") / (here / name).relative_to(root) for name in files}
    return found


def _enter(root: Path, pip_cache: Path) -> int:
    pip_cache.mkdir(parents=True, exist_ok=True)
    os.chown(pip_cache, UID, UID)
    steps = f"""
set -e
mount --make-rprivate /
hostname newcomer
mount --bind {pip_cache} {root}{CACHE}
mount -t proc proc {root}/proc
mount --bind /sys {root}/sys
mount -t tmpfs -o mode=755 dev {root}/dev
for name in null zero full random urandom tty; do touch {root}/dev/$name; mount --bind /dev/$name {root}/dev/$name; done
mkdir {root}/dev/pts {root}/dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts {root}/dev/pts
mount -t tmpfs -o mode=1777 shm {root}/dev/shm
ln -s pts/ptmx {root}/dev/ptmx
ln -s /proc/self/fd {root}/dev/fd
exec chroot {root} /usr/bin/python3 -B {CHECKOUT}/tests/newcomer/walk.py inside
"""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONUNBUFFERED": "1", **passed_on}
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "sh", "-c", steps]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode


# --- inside: read the documents and do what they say


class Running:
    """A command that runs on, on a terminal of its own."""

    def __init__(self, command: str, argv: Sequence[str], env: dict[str, str]) -> None:
        self.command = command
        self._master, slave = pty.openpty()
        self.popen = subprocess.Popen(
            ["setsid", "--ctty", *argv], env=env, cwd=CHECKOUT, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, words: str) -> None:
        """Wait until it has printed this."""
        deadline = time.monotonic() + _MAX_START_SECONDS
        while words not in self.seen:
            if time.monotonic() > deadline:
                raise WalkError(f"`{self.command}` did not print {words!r} in time:\n{self.seen}")
            if not self._read(1.0) and self.popen.poll() is not None:
                raise WalkError(f"`{self.command}` ended with {self.popen.returncode}:\n{self.seen}")

    def press_ctrl_c(self) -> None:
        """Type it at its terminal."""
        os.write(self._master, b"\x03")

    def check_end(self, code: int) -> None:
        """Wait until it has ended, and check how."""
        deadline = time.monotonic() + _MAX_END_SECONDS
        while self.popen.poll() is None:
            if time.monotonic() > deadline:
                self.popen.kill()
                raise WalkError(f"`{self.command}` did not end:\n{self.seen[-2000:]}")
            self._read(0.2)
        os.close(self._master)
        if self.popen.returncode != code:
            raise WalkError(
                f"`{self.command}` ended with {self.popen.returncode}, not {code}:\n{self.seen[-2000:]}"
            )

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            self.seen += os.read(self._master, 65536).decode("utf-8", "replace")
        except OSError:  # nobody holds the other end
            time.sleep(0.05)
            return False
        return True

    def drain(self) -> None:
        """Take what it has printed, so that it never waits for a reader."""
        while self._read(0.0):
            pass


class Walk:
    """A newcomer who types what the documents say."""

    def __init__(self) -> None:
        self._outside_network = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._running: list[tuple[Rule, Running]] = []
        self._base = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(HOME),
            "USER": USER,
            "LANG": "C.UTF-8",
        }
        self._base |= {
            "TERM": "xterm-256color",
            "PIP_CACHE_DIR": str(CACHE),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self._base["DASK_TEMPORARY_DIRECTORY"] = str(HOME / "dask")  # where Dask leaves lock files of its own
        self._base |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._env = dict(self._base)
        self._used: set[Rule] = set()
        self.failures: list[str] = []
        self.counts = {"run": 0, "left out": 0}
        self._reasons: dict[str, int] = {}
        self._unshare_network()

    def _unshare_network(self) -> None:
        """Have a network without the outside: ports are free, and nothing but pip can ask anybody."""
        if self._libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot have a network of its own")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))

    def all(self) -> None:
        """Read all documents."""
        for document in DOCUMENTS:
            self._document(document)
        unused = [rule for rule in RULES if rule not in self._used]
        self.failures += [f"plan.py: no command of {rule.document} fits {rule.pattern!r}" for rule in unused]

    def _document(self, document: str) -> None:
        listed = commands(document, (CHECKOUT / document).read_text(encoding="utf-8"))
        if not listed:
            return
        print(f"--- {document}", flush=True)
        before = set(CHECKOUT.rglob("*"))
        block = -1
        for command in listed:
            if command.block != block:
                block = command.block
                self._env = dict(self._base)
            self._one(command)
            if (command.document, command.block) == ("README.md", self._first_block):
                self._base = dict(self._env)  # from here on as in a shell with the virtual environment
        self._end_all()
        self._check_processes(document)
        self._tidy(before)

    @property
    def _first_block(self) -> int:
        text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
        return commands("README.md", text)[0].block

    def _one(self, command: Command) -> None:
        fitting = [rule for rule in RULES if rule.fits(command)]
        rule = fitting[0] if fitting else Rule(command.document, command.text)
        self._used |= set(fitting[:1])
        where = f"{command.document}:{command.line}"
        text = command.text.split("  #")[0].strip() if rule.add else command.text
        shown = f"{where}: {command.text.split('  #')[0].strip()}{rule.add}"
        for pattern in rule.ends:
            self._end(pattern)
        if rule.skip:
            self.counts["left out"] += 1
            self._reasons[rule.skip] = self._reasons.get(rule.skip, 0) + 1
            print(f"left out ({rule.skip})  {shown}", flush=True)
            return
        self.counts["run"] += 1
        began = time.monotonic()
        try:
            self._do(rule, text + rule.add)
        except WalkError as error:
            self._fail(f"{shown}\n{error}")
        else:
            print(f"{time.monotonic() - began:5.1f} s  {shown}", flush=True)

    def _fail(self, why: str) -> None:
        self.failures.append(why)
        print(f"FAILED  {why}", flush=True)

    def _do(self, rule: Rule, text: str) -> None:
        for helper, words in rule.before:
            self._start(Rule(rule.document, helper), helper).wait_for(words)
        if rule.ready:
            self._run(rule.ready, 0)
        for _, running in self._running:
            running.drain()
        if rule.until:
            self._start(rule, text).wait_for(rule.until)
        else:
            self._run(text, rule.code)
        if rule.gone:
            self._end(rule.gone, by_ctrl_c=False)
        if rule.after:
            self._run(rule.after, 0)

    def _argv(self, text: str) -> list[str]:
        user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--init-groups", "--"]
        return [*user, "bash", "-c", text]

    def _start(self, rule: Rule, text: str) -> Running:
        running = Running(text, self._argv(text), self._env)
        self._running.append((rule, running))
        return running

    def _run(self, text: str, code: int) -> None:
        kept = Path(HOME / ".walk-env")
        script = f"{text}\ncode=$?\nenv -0 > {kept}\nexit $code"
        is_pip = re.search(r"\bpip install\b", text) is not None
        done = subprocess.run(
            self._argv(script),
            env=self._env,
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_MAX_COMMAND_SECONDS,
            check=False,
            preexec_fn=self._join_outside if is_pip else None,
        )
        if done.returncode != code:
            raise WalkError(f"it exits with {done.returncode}, not with {code}:\n{done.stdout[-3000:]}")
        if kept.exists():
            pairs = [pair.partition("=") for pair in kept.read_text(encoding="utf-8").split("\0") if pair]
            self._env = {name: value for name, _, value in pairs}
            kept.unlink()

    def _join_outside(self) -> None:
        self._libc.setns(self._outside_network, _CLONE_NEWNET)

    def _end(self, pattern: str, *, by_ctrl_c: bool = True) -> None:
        for entry in [entry for entry in self._running if re.search(pattern, entry[1].command)]:
            self._running.remove(entry)
            rule, running = entry
            try:
                if by_ctrl_c:
                    running.press_ctrl_c()
                running.check_end(rule.end_code)
            except WalkError as error:
                self._fail(str(error))

    def _end_all(self) -> None:
        while self._running:
            self._end(re.escape(self._running[-1][1].command))

    def _check_processes(self, document: str) -> None:
        """Nothing of a document's commands may run on when all of them have ended."""
        deadline = time.monotonic() + _MAX_END_SECONDS
        while left := dict(_processes()):
            if time.monotonic() > deadline:
                self._fail(f"{document}: processes were left: {list(left.values())}")
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.1)

    def _tidy(self, before: set[Path]) -> None:
        """Begin the next document as the first one: without the files of the last one."""
        for path in sorted(set(CHECKOUT.rglob("*")) - before, reverse=True):
            if ".venv" not in path.parts:
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in (".config", ".local"):
            shutil.rmtree(HOME / name, ignore_errors=True)

    def tell(self) -> int:
        """Print what was done, and return the exit code."""
        print(f"\n{self.counts['run']} commands were run, {self.counts['left out']} were left out:")
        for reason, count in sorted(self._reasons.items()):
            print(f"{count:5}  {reason}")
        for failure in self.failures:
            print(f"FAILED: {failure}")
        return 1 if self.failures else 0


def _processes() -> Iterator[tuple[int, str]]:
    """Yield the processes other than this one and its ancestors, and how they were started."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (
                Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
            if command:  # what has ended and waits to be collected has none
                yield int(name), command.strip()


def inside() -> int:
    """Walk; return the exit code."""
    (CHECKOUT / "train.py").write_text("import time\n\ntime.sleep(4)\n", encoding="ascii")
    (CHECKOUT / "node-list.txt").write_text("gpu01\n", encoding="ascii")
    (HOME / ".curlrc").write_text(
        "fail-with-body\nsilent\nshow-error\n", encoding="ascii"
    )  # an HTTP error is an error
    walk = Walk()
    walk.all()
    return walk.tell()


if __name__ == "__main__":
    sys.exit(inside() if sys.argv[1:] == ["inside"] else outside())
