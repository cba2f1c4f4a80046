"""Run the commands that README and docs show as a newcomer would: in a minimal Debian, as an ordinary user.

`walk.py` creates a root file system, copies the committed files into it, and starts itself there (`walk.py inside`). It then
reads the documents and runs their commands in the order in which they are printed, in a network namespace from which only
`pip` reaches the outside. At the end nothing may be left: no process, and no file outside the user's home directory.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests import prerequisites  # noqa: E402
from tests.newcomer.blocks import (  # noqa: E402
    Block,
    Command,
    list_documents,
    parse_json_sample,
    read_blocks,
    read_commands,
)
from tests.newcomer.command_rules import HOSTS, RULES, Rule, find_rule  # noqa: E402

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
"""Settings of this machine that pip may need to reach a package index."""
_CUSTOM_METRIC = """import pynvml
from gpulse.integrations.dask import custom_metric


@custom_metric("power")
def power_usage(worker, handle):
    return pynvml.nvmlDeviceGetPowerUsage(handle)
"""
_MAX_COMMAND_SECONDS = 300.0
_MAX_START_SECONDS = 60.0
_MAX_END_SECONDS = 30.0
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


class WalkError(Exception):
    """A command behaved differently from what the documents say."""


# --- outside: create the root file system and enter it


def outside() -> int:
    """Create a root file system and walk in it; return the exit code."""
    why = _obstacle()
    if why:
        print(f"Skipped the walk through the documentation: {why}.", file=sys.stderr)
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
            print(f"FAILED: commands left files outside the home directory: {', '.join(new[:20])}")
            code = 1
    print(f"The walk took {time.monotonic() - began:.0f} s.")
    return code


def _obstacle() -> str:
    """Return why no root file system can be created here, or nothing."""
    if os.geteuid() != 0:
        return "it needs root, to create a root file system and to enter it"
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
    """Return a tar file with a minimal Debian; it is created again when it is old."""
    cache.mkdir(parents=True, exist_ok=True)
    tarball = cache / f"{SUITE}-{'-'.join(PACKAGES)}.tar"
    if not tarball.exists() or time.time() - tarball.stat().st_mtime > MAX_CACHE_AGE_SECONDS:
        print(f"Creating a minimal Debian: {tarball}", flush=True)
        new = tarball.with_suffix(".new.tar")
        packages = ",".join(PACKAGES)
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", SUITE, str(new)]
        subprocess.run(command, check=True)
        new.rename(tarball)
    return tarball


def _furnish(root: Path) -> None:
    """Add a user, the committed files, and the files that pip needs to reach the package index."""
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
    """Return the files outside the home directory and the caches of package managers."""
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


# --- inside: read the documents and run their commands


class Running:
    """A command that keeps running, on a terminal of its own."""

    def __init__(self, command: str, argv: Sequence[str], env: dict[str, str]) -> None:
        self.command = command
        self._master, slave = pty.openpty()
        self.popen = subprocess.Popen(
            ["setsid", "--ctty", *argv], env=env, cwd=CHECKOUT, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, words: str) -> None:
        """Wait until it has printed these words."""
        deadline = time.monotonic() + _MAX_START_SECONDS
        while words not in self.seen:
            if time.monotonic() > deadline:
                raise WalkError(f"`{self.command}` did not print {words!r} in time:\n{self.seen}")
            if not self._read(1.0) and self.popen.poll() is not None:
                raise WalkError(
                    f"`{self.command}` exited with {self.popen.returncode} before it was up:\n{self.seen}"
                )

    def press_ctrl_c(self) -> None:
        """Type Ctrl-C at its terminal."""
        os.write(self._master, b"\x03")

    def kill(self) -> None:
        """Kill it, as a crash of the machine would."""
        os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(_MAX_END_SECONDS)
        os.close(self._master)

    def check_end(self, code: int) -> None:
        """Wait until it has ended, and check its exit code."""
        deadline = time.monotonic() + _MAX_END_SECONDS
        while self.popen.poll() is None:
            if time.monotonic() > deadline:
                self.popen.kill()
                raise WalkError(f"`{self.command}` did not end:\n{self.seen[-2000:]}")
            self._read(0.2)
        os.close(self._master)
        if self.popen.returncode != code:
            raise WalkError(
                f"`{self.command}`: exit code {self.popen.returncode}, expected {code}:\n{self.seen[-2000:]}"
            )

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            self.seen += os.read(self._master, 65536).decode("utf-8", "replace")
        except OSError:  # no process has the other end open
            time.sleep(0.05)
            return False
        return True

    def drain(self) -> None:
        """Read what it has printed, so that it never blocks on a full terminal."""
        while self._read(0.0):
            pass


class Walk:
    """A newcomer who types the commands of the documents."""

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
        self._base["DASK_TEMPORARY_DIRECTORY"] = str(HOME / "dask")  # Dask leaves lock files there
        self._base |= {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._env = dict(self._base)
        self._used: set[Rule] = set()
        self.failures: list[str] = []
        self.counts = {"run": 0, "left out": 0, "compared": 0}
        self._blocks: list[Block] = []
        self._base_is_bare = True
        self._output = ""
        """What the commands of the current block printed."""
        self._reasons: dict[str, int] = {}
        self._unshare_network()

    def _unshare_network(self) -> None:
        """Enter a network namespace in which all ports are free and nothing but pip reaches other machines."""
        if self._libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot create a network namespace")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))

    def all(self) -> None:
        """Walk through all documents."""
        for document in list_documents(CHECKOUT):
            self._document(document)
        unused = [rule for rule in RULES if rule not in self._used]
        self.failures += [
            f"command_rules.py: no command of {rule.document or 'any document'} fits {rule.pattern!r}"
            for rule in unused
        ]

    def _document(self, document: str) -> None:
        blocks = read_blocks(document, (CHECKOUT / document).read_text(encoding="utf-8"))
        self._blocks += blocks
        if not any(map(read_commands, blocks)):
            return
        print(f"--- {document}", flush=True)
        before = set(CHECKOUT.rglob("*"))
        for block in blocks:
            self._env = dict(self._base)
            self._output = ""
            listed = read_commands(block)
            for command in listed:
                self._one(command)
            if listed and self._base_is_bare:
                self._base = dict(self._env)  # all later commands run in this virtual environment
                self._base_is_bare = False
            following = blocks[block.number + 1 : block.number + 2]
            if listed and following and following[0].language == "json" and self._output:
                self._compare(following[0], self._output)
        self._end_all()
        self._check_processes(document)
        self._tidy(before)

    def _compare(self, sample: Block, output: str) -> None:
        """Check that an answer has everything that the document shows of it."""
        try:
            lines = [line for line in output.splitlines() if not line.startswith("curl: ")]
            answers = parse_json_sample("\n".join(lines).replace("}{", "}\n{"))
            for shown, answer in zip(parse_json_sample(sample.text), answers, strict=True):
                for fault in find_differences(shown, answer, "answer"):
                    self._fail(f"{sample.place}: {fault}")
        except ValueError as error:
            self._fail(f"{sample.place}: the answer cannot be compared with it: {error}\n{output[-500:]}")
        else:
            self.counts["compared"] += 1

    def _one(self, command: Command) -> None:
        rule = find_rule(command) or Rule(command.document, command.text)
        self._used.add(rule)
        where = f"{command.document}:{command.line}"
        text = command.text.split("  #")[0].strip() if rule.add else command.text
        text = text.replace(*rule.replace) if rule.replace[0] else text
        shown = f"{where}: {command.text.split('  #')[0].strip()}{rule.add}"
        for pattern in rule.ends:
            self._end(pattern)
        for pattern in rule.kills:
            self._kill(pattern)
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
            self._output += self._run(text, rule.code)
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

    def _run(self, text: str, code: int) -> str:
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
            raise WalkError(f"exit code {done.returncode}, expected {code}:\n{done.stdout[-3000:]}")
        if kept.exists():
            pairs = [pair.partition("=") for pair in kept.read_text(encoding="utf-8").split("\0") if pair]
            self._env = {name: value for name, _, value in pairs}
            kept.unlink()
        return done.stdout

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

    def _kill(self, pattern: str) -> None:
        for entry in [entry for entry in self._running if re.search(pattern, entry[1].command)]:
            self._running.remove(entry)
            entry[1].kill()

    def _end_all(self) -> None:
        while self._running:
            self._end(re.escape(self._running[-1][1].command))

    def _check_processes(self, document: str) -> None:
        """Check that no process of a document's commands is left when all of them have ended."""
        deadline = time.monotonic() + _MAX_END_SECONDS
        while left := dict(_processes()):
            if time.monotonic() > deadline:
                self._fail(f"{document}: commands left processes behind: {list(left.values())}")
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.1)

    def _tidy(self, before: set[Path]) -> None:
        """Delete the files of a document, so that the next one starts like the first."""
        for path in sorted(set(CHECKOUT.rglob("*")) - before, reverse=True):
            if ".venv" not in path.parts:
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in (".config", ".local"):
            shutil.rmtree(HOME / name, ignore_errors=True)

    def report(self) -> int:
        """Print the counts and the failures, and return the exit code."""
        kinds = Counter(block.language or "text" for block in self._blocks)
        print(
            f"\nRead {len(self._blocks)} fenced blocks: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}."
        )
        print(
            "Python samples run in tests/integration/test_python_samples.py, the others are read in tests/unit/test_samples.py."
        )
        print(f"Compared {self.counts['compared']} answers with the JSON that the documents show.")
        print(f"Ran {self.counts['run']} commands and left out {self.counts['left out']}:")
        for reason, count in sorted(self._reasons.items()):
            print(f"{count:5}  {reason}")
        for failure in self.failures:
            print(f"FAILED: {failure}")
        return 1 if self.failures else 0


def find_differences(shown: Any, answer: Any, place: str) -> Iterator[str]:
    """Yield what a sample of JSON shows and an answer does not have; values may differ, their types may not."""
    if isinstance(shown, dict) and isinstance(answer, dict):
        for key in shown:
            if key in answer:
                yield from find_differences(shown[key], answer[key], f"{place}.{key}")
            else:
                yield f"{place} has no {key!r}"
    elif isinstance(shown, list) and isinstance(answer, list):
        if shown and answer:
            yield from find_differences(shown[0], answer[0], f"{place}[0]")
    elif shown is not None and answer is not None and _kind(shown) != _kind(answer):
        yield f"{place} is {answer!r}, which is not of the type of {shown!r}"


def _kind(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _processes() -> Iterator[tuple[int, str]]:
    """Yield the processes other than this one and its ancestors, and how they were started."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (
                Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
            if command:  # a zombie has none
                yield int(name), command.strip()


def inside() -> int:
    """Walk through the documents; return the exit code."""
    (CHECKOUT / "train.py").write_text("import time\n\ntime.sleep(4)\n", encoding="ascii")
    (CHECKOUT / "node-list.txt").write_text("gpu01\n", encoding="ascii")
    (CHECKOUT / "metrics.py").write_text(_CUSTOM_METRIC, encoding="ascii")
    (HOME / ".curlrc").write_text(
        "fail-with-body\nsilent\nshow-error\n", encoding="ascii"
    )  # an HTTP error is an error
    walk = Walk()
    walk.all()
    return walk.report()


if __name__ == "__main__":
    sys.exit(inside() if sys.argv[1:] == ["inside"] else outside())
