"""The hook of the documentation cancels a job of a real Slurm, and only if it belongs to the user that it names."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path

import pytest

from gpulse.cluster.notify.idle_holdings import HeldPlace, Holder
from gpulse.cluster.notify.idle_hook import HookRunner, build_hook_call, find_hook_user
from gpulse.cluster.notify.idle_policy import IdlePolicy, Track
from tests.integration.cluster import until
from tests.integration.slurm_machine import slurm_machine

_PAGE = Path(__file__).parents[2] / "docs/how-to/free-idle-gpus.md"


@pytest.mark.requires("Slurm")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a Slurm with jobs of several users")
def test_scancel(tmp_path: Path) -> None:
    """A job that another user claims is left alone."""

    found = re.search(r"```sh\n(#!/bin/sh\n.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    nobody, daemon = pwd.getpwnam("nobody"), pwd.getpwnam("daemon")
    user = find_hook_user(IdlePolicy(hook_user="root"))
    with slurm_machine() as slurm:
        script = tmp_path / "free-gpu"
        setting = f"#!/bin/sh\nexport SLURM_CONF={slurm.folder}/slurm.conf\n"
        script.write_text(found[1].replace("#!/bin/sh\n", setting), encoding="utf-8")
        script.chmod(0o755)
        job, _ = slurm.submit(nobody.pw_uid, 1, "forgotten")

        def free(name: str) -> str:
            place = HeldPlace(slurm.node, (("0", "GPU-0"),))
            track = Track(Holder(f"slurm:{job}"), name, (place,), 0.0, "unused", 0.0, 0.0)
            call = build_hook_call(("/bin/sh", str(script), "{job_id}", "{user}"), track, user)
            return HookRunner(user, 60.0).run(call).state

        def state() -> str:
            return slurm.ask("squeue", "-h", "-j", job, "-o", "%T", check=False)

        free(daemon.pw_name)
        assert state() == "RUNNING"
        assert free(nobody.pw_name) == "ended"
        until(lambda: state() != "RUNNING", "the end of the job")
