from __future__ import annotations

import os
import pwd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.process import Owner
from gpulse.sources.process_owners import JobRegistry, find_container, find_owner, find_pod, user_name
from gpulse.sources.slurm import find_environ_job, find_slurm_job

ID = "4f5a9c0e1b2d" + "0123456789abcdef" * 3 + "dead"
INNER = "aaaabbbbcccc" + "0123456789abcdef" * 3 + "beef"
POD = "8dbc5577-d0e2-4706-8787-57d52c03ddf2"


@pytest.mark.parametrize(
    "path",
    [
        "/slurm/uid_0/job_2/step_batch",
        "/slurm/uid_1000/job_2",
        "/slurm_vm/uid_0/job_2/step_batch/task_0",
        "/system.slice/slurmstepd.scope/job_2/step_0/user/task_0",
        "/system.slice/node07_slurmstepd.scope/job_2/step_extern",
        "/../../job_2/step_interactive/user/task_special",
        "/slurm/uid_1000/job_2/step_0/docker/x",
        "/gpu.slice/node07_slurmstepd.scope/job_2/step_4294967291/slurm",
        "/gpu.slice/gpu-batch.slice/slurmstepd.scope/job_2",
        "/../../../uid_1000/job_2/step_0",
        "/../slurmstepd.scope/job_2/step_0",
    ],
)
def test_a_slurm_job_is_read_off_its_control_group(path: str) -> None:
    """Both versions of control groups, with and without the node's name, name the job."""

    assert "slurm:2" == find_slurm_job(["/", path])


@pytest.mark.parametrize(
    "path", ["/", "/job_2", "/slurm/uid_0", "/user.slice/job_x/step_1", "/slurm/uid_0/job_2x"]
)
def test_other_control_groups_are_no_slurm_jobs(path: str) -> None:
    """A directory that only looks like a job's is not one."""

    assert find_slurm_job([path]) is None


_DELEGATED = "/user.slice/user-1001.slice/user@1001.service"


@pytest.mark.parametrize(
    "path",
    [
        f"{_DELEGATED}/app.slice/slurmstepd.scope/job_4711/step_0/user/task_0",
        f"{_DELEGATED}/app.slice/job_4711/step_0",
        f"{_DELEGATED}/slurm/uid_0/job_4711/step_0",
        f"{_DELEGATED}/app.slice/s5K1KKYAYG5D00/step_0",
        f"/../../..{_DELEGATED}/app.slice/slurmstepd.scope/job_4711/step_0",
        "/../user@1001.service/app.slice/slurmstepd.scope/job_4711/step_0",
        "/user.slice/slurmstepd.scope/job_4711",
        "/system.slice/hub-eve.service/slurmstepd.scope/job_4711/step_0",
        "/system.slice/hub-eve.service/job_4711/slurmstepd.scope/job_4711/step_0",
        "/lxc/eve/slurm/uid_0/job_4711/step_0",
    ],
)
def test_a_place_that_users_can_make_is_no_slurm_job(path: str) -> None:
    """Where control groups were handed over to them they choose the names."""

    assert find_slurm_job([path]) is None


@pytest.mark.parametrize(
    ("register", "job"),
    [
        (JobRegistry(), "slurm:4711"),
        (JobRegistry(users={"slurm:4711": 1000}), None),
        (JobRegistry(users={"slurm:4711": 1001}), "slurm:4711"),
        (JobRegistry(has_groups=True), None),
        (JobRegistry(users={"slurm:4711": 1000}, has_groups=True), None),
        (JobRegistry(users={"slurm:4711": 1001}, has_groups=True), "slurm:4711"),
    ],
)
def test_an_environment_outside_of_slurms_control_groups_is_believed_of_ones_own_job(
    register: JobRegistry, job: str | None
) -> None:
    """Anybody can write anybody's number; where Slurm has no groups at all nothing else is to be had."""

    login = "/user.slice/user-1001.slice/session-3.scope"

    assert job == find_owner(1001, [login], b"SLURM_JOB_ID=4711\0", register=register).job
    assert "slurm:5" == find_owner(1001, ["/slurm/uid_9/job_5"], b"SLURM_JOB_ID=4711\0", None, register).job


def test_the_environment_names_the_job_when_the_control_group_does_not() -> None:
    """SLURM_JOB_ID is believed when it is a number, and only under its full name."""

    assert "slurm:77" == find_environ_job(b"A=1\0SLURM_JOB_ID=77\0")
    assert find_environ_job(b"XSLURM_JOB_ID=77\0SLURM_JOB_ID=x\0") is None
    assert find_environ_job(None) is None


@pytest.mark.parametrize(
    "path",
    [
        f"/docker/{ID}",
        f"/system.slice/docker-{ID}.scope",
        f"/machine.slice/libpod-{ID}.scope/container",
        f"/libpod_parent/libpod-{ID}",
        f"/kubepods/burstable/pod{POD}/{ID}",
        f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope",
        f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope",
        f"/system.slice/containerd.service/kubepods-burstable-pod{POD}.slice:cri-containerd:{ID}",
        f"/docker/{INNER}/docker/{ID}",
        f"/system.slice/docker-{INNER}.scope/system.slice/docker-{ID}.scope",
        f"/docker/{INNER}/kubelet/kubepods/besteffort/pod{POD}/{ID}",
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        f"/user.slice/user-1000.slice/user@1000.service/user.slice/podman-4711.scope/libpod-{ID}.scope",
        f"/user.slice/user-1000.slice/user@1000.service/app.slice/docker-{ID}.scope",
        f"/kubepods/pod{POD}/crio-{ID}",
        f"/kubepods/besteffort/pod{POD}/{INNER}/docker/{ID}",
        f"/k8s.io/{ID}",
        f"/default/{ID}",
        f"/system.slice/nerdctl-{ID}.scope",
        f"/ecs/0123456789abcdef0123456789abcdef/{ID}",
        f"/../../cri-containerd-{ID}.scope",
        f"/slurm/uid_1000/job_7/step_0/libpod-{ID}.scope",
    ],
)
def test_a_container_is_read_off_its_control_group(path: str) -> None:
    """Each engine writes the id in its own way; the innermost container counts."""

    assert "4f5a9c0e1b2d" == find_container(["/", path])


@pytest.mark.parametrize("path", ["/lxc/web1/init.scope", "/lxc.payload.web1/x", "/lxc.payload/web1"])
def test_lxc_containers_go_by_their_name(path: str) -> None:
    """LXC has names where others have ids."""

    assert "web1" == find_container([path])


@pytest.mark.parametrize(
    "path",
    [
        "/",
        f"/machine.slice/libpod-conmon-{ID}.scope",
        "/process_api/ffaaf8066f0aff8f1b75f10b0e23abe7",
        "/lxc.monitor.web1",
        f"/kubepods.slice/crio-conmon-{ID}.scope",
        f"/system.slice/containerd.service/{ID[:40]}",
        f"/system.slice/job-{ID}0.scope",
    ],
)
def test_what_is_not_in_a_container_has_none(path: str) -> None:
    """Neither the helpers that watch containers nor other long names are containers."""

    assert find_container([path]) is None


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods/burstable/pod{POD}/{ID}",
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope",
        f"/kubepods/pod{POD}/crio-{ID}",
        f"/system.slice/containerd.service/kubepods-burstable-pod{POD}.slice:cri-containerd:{ID}",
        f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope",
        f"/docker/{INNER}/kubelet/kubepods/besteffort/pod{POD}/{ID}",
        f"/../pod{POD}/{ID}",
    ],
)
def test_a_pod_is_read_off_its_control_group(path: str) -> None:
    """The pod's UID is given with dashes, however it was written."""

    assert POD == find_pod([path])


def test_a_static_pod_has_a_uid_without_dashes() -> None:
    """The kubelet makes them of a checksum for pods that no server knows."""

    assert "0123456789abcdef0123456789abcdef" == find_pod(
        [f"/kubepods/pod0123456789abcdef0123456789abcdef/{ID}"]
    )


@pytest.mark.parametrize(
    "path", ["/", "/kubepods/burstable", "/podman/x", f"/pod-{POD}", f"/machine.slice/libpod-{ID}.scope"]
)
def test_other_groups_are_no_pods(path: str) -> None:
    """Podman's own are containers, not pods of Kubernetes."""

    assert find_pod([path]) is None


def test_an_owner_is_put_together() -> None:
    """User, job, container and pod come from different places into one owner."""

    uid = os.getuid()
    cgroups = {"": f"/kubepods/pod{POD}/{ID}", "memory": "/slurm/uid_0/job_9/step_0"}

    assert Owner(pwd.getpwuid(uid).pw_name, uid, "slurm:9", "4f5a9c0e1b2d", POD) == find_owner(
        uid, cgroups.values()
    )
    assert Owner() == find_owner(None, [])


@pytest.mark.parametrize(
    ("uid", "name"), [(None, None), (0, "root"), (3_999_999_999, "3999999999"), (1 << 70, str(1 << 70))]
)
def test_a_user_without_a_name_goes_by_the_number(uid: int | None, name: str | None) -> None:
    """A uid that the user database does not know, or could not even hold, is shown as it is."""

    assert name == user_name(uid)


@given(st.text(max_size=200), st.binary(max_size=200))
def test_no_path_and_no_environment_raises(path: str, environ: bytes) -> None:
    """Whatever a control group is called, it has an owner or none."""

    find_owner(None, [path], environ)
