"""Every fenced block of README and docs is checked by something; a block in an unknown language is an error.

Commands run in the walk (tests/newcomer), and are parsed in test_shown_commands.py. Python runs in
tests/integration/test_python_samples.py. Configurations and data are read here, by the code that reads them in use.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from gpulse.cluster.notify.config import parse_config
from gpulse.deploy.node_list import parse_node_list
from tests.newcomer.blocks import Block, list_documents, parse_json_sample, read_blocks, read_commands
from tests.newcomer.command_lines import check
from tests.unit.harvest_config_lab import Lab
from tools.docs.command_tree import PROGRAMS

ROOT = Path(__file__).parents[2]
BLOCKS = [
    block
    for document in list_documents(ROOT)
    for block in read_blocks(document, (ROOT / document).read_text(encoding="utf-8"))
]
GENERATED = "docs/reference/commands.md"
"""Its blocks are the usage and the examples of help texts, which test_shown_commands.py checks at their source."""


def check_commands(block: Block, directory: Path) -> None:  # noqa: ARG001
    """A script has at least one command."""
    assert read_commands(block)


def check_output(block: Block, directory: Path) -> None:  # noqa: ARG001
    """What was printed has no command without a prompt, which nothing would test."""
    first_words = {line.split(" ")[0] for line in block.text.splitlines()}

    assert (
        block.document == GENERATED
        or read_commands(block)
        or not first_words & {*PROGRAMS, "curl", "make", "pip"}
    )


def check_python(block: Block, directory: Path) -> None:  # noqa: ARG001
    """It can be compiled; test_python_samples.py runs it."""
    ast.parse(block.text)


def check_json(block: Block, directory: Path) -> None:  # noqa: ARG001
    """It can be parsed; the walk compares answers of the head with it."""
    assert parse_json_sample(block.text)


def check_toml(block: Block, directory: Path) -> None:
    """A list of nodes, where notifications go, or a configuration of `gpulse harvest`."""
    if re.search(r"^nodes = ", block.text, re.MULTILINE):
        assert parse_node_list(block.text.encode(), "nodes.toml")
    elif "[targets." in block.text:
        for secret, text in (("mail-password", "secret"), ("chat.url", "json://chat.example.com/secret")):
            (directory / secret).write_text(text, encoding="utf-8")
            (directory / secret).chmod(0o600)
        environment = {"GPULSE_PHONE_URL": "json://phone.example.com/secret"}
        assert parse_config(block.text, str(directory / "notify.toml"), environment, is_private=True)
    else:
        assert lab_with_programs(directory).load("harvest.toml", block.text, count=4)


def check_ini(block: Block, directory: Path) -> None:
    """A configuration in gpu_mon's format."""
    assert lab_with_programs(directory).load("gpu_mon.conf", block.text, count=4)


def lab_with_programs(directory: Path) -> Lab:
    """A directory with the programs that the documents name."""
    lab = Lab(directory)
    for name in ("dask", "python", "python3"):
        lab.program(lab.bin / name)
    return lab


def check_yaml(block: Block, directory: Path) -> None:
    """A configuration of Prometheus, or an object of Kubernetes whose command gpulse accepts."""
    document = yaml.safe_load(block.text)
    if "kind" in document:
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)
        for container in document["spec"]["template"]["spec"]["containers"]:
            assert "" == check([*container["command"], *container.get("args", [])])
    else:
        assert {"scrape_configs", "remote_write", "rule_files", "groups"} & set(document)
        if promtool := shutil.which("promtool"):
            path = directory / "prometheus.yml"
            path.write_text(
                re.sub(r"credentials_file: \S+", "credentials: token", block.text), encoding="utf-8"
            )
            subprocess.run([promtool, "check", "config", path], check=True)


def check_css(block: Block, directory: Path) -> None:  # noqa: ARG001
    """The variables and classes that it sets are those of the dashboard."""
    static = ROOT / "src" / "gpulse" / "web" / "static"
    known = "".join(
        path.read_text(encoding="utf-8")
        for kind in ("css", "html", "js")
        for path in static.rglob(f"*.{kind}")
    )
    without_comments = re.sub(r"/\*.*?\*/", "", block.text, flags=re.DOTALL)
    classes = re.findall(r"(?m)^\s*\.([\w-]+)", without_comments)

    assert block.text.count("{") == block.text.count("}")
    assert [] == [name for name in re.findall(r"--[\w-]+", without_comments) if name not in known]
    assert [] == [name for name in classes if name not in known]


CHECKS: dict[str, Callable[[Block, Path], None]] = {
    "": check_output,
    "bash": check_commands,
    "console": check_output,
    "css": check_css,
    "ini": check_ini,
    "json": check_json,
    "python": check_python,
    "sh": check_commands,
    "text": check_output,
    "toml": check_toml,
    "yaml": check_yaml,
}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_is_what_its_language_says(block: Block, tmp_path: Path) -> None:
    """Blocks that quote a file are compared with it in test_documents.py."""
    if block.source:
        assert (ROOT / block.source).is_file()
    else:
        CHECKS[block.language](block, tmp_path)


def test_blocks_are_counted() -> None:
    """None is lost on the way: the fences in the files are twice the blocks that are read."""
    fences = sum(
        len(re.findall(r"(?m)^ *```", (ROOT / document).read_text(encoding="utf-8")))
        for document in list_documents(ROOT)
    )
    counts = Counter(block.language or "text" for block in BLOCKS)
    print(dict(counts))

    assert fences == 2 * len(BLOCKS)
