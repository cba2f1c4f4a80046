"""Names and labels of series: one spelling, and a way back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.device import Device, Node
from gpulse.model.recording_codec import to_sparse_dict
from gpulse.model.series_labels import (
    EXPOSED_SCOPES,
    build_series_labels,
    device_from_info_labels,
    gpu_info_labels,
    is_exposed,
    node_facts_from_info_labels,
    node_info_labels,
    subject_label_name,
)

_WORD = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20)
_MAYBE = st.none() | _WORD
_NUMBER = st.none() | st.integers(0, 99)
_DEVICES = st.builds(
    Device,
    index=st.integers(0, 99),
    uuid=_WORD,
    name=_WORD,
    bus_id=_MAYBE,
    minor_number=_NUMBER,
    serial=_MAYBE,
    vbios=_MAYBE,
    architecture=_MAYBE,
    compute_capability=_MAYBE,
    numa_node=_NUMBER,
    has_gpm=st.booleans(),
    parent_uuid=_MAYBE,
    mig_index=_NUMBER,
    gpu_instance=_NUMBER,
    compute_instance=_NUMBER,
    facts=st.just({}),
    board_part_number=st.none(),
    cpu_affinity=st.none(),
    switch_links=st.none(),
    paths=st.just(()),
    adapter_paths=st.just(()),
)


@given(_DEVICES)
def test_a_gpu_comes_back_from_its_labels(device: Device) -> None:
    """What the labels of a GPU say is the GPU, except for its constant readings and its connections."""
    assert device == device_from_info_labels(gpu_info_labels("n", device))


@given(
    st.dictionaries(
        st.sampled_from(["gpu", "uuid", "numa_node", "has_gpm", "mig_index"]), st.text(max_size=9)
    )
)
def test_labels_of_others_are_no_gpu_or_one(labels: dict[str, str]) -> None:
    """Labels that somebody else wrote never raise."""
    device = device_from_info_labels(labels)

    assert device is None or device.uuid == labels["uuid"]


def test_a_node_comes_back_from_its_labels() -> None:
    """What is known of a node is in its labels, what is unknown has none."""
    node = Node("n", driver="580.1", kernel="6.1")

    labels = node_info_labels(node, host="h", machine="m", version="1")

    assert {
        "node": "n",
        "host": "h",
        "machine": "m",
        "version": "1",
        "driver": "580.1",
        "kernel": "6.1",
    } == labels
    assert {"driver": "580.1", "kernel": "6.1"} == node_facts_from_info_labels(labels)


def test_a_mig_instance_has_a_label_of_its_own() -> None:
    """Two instances of one GPU are two series."""
    device = Device(3, "MIG-1", "H200", mig_index=1)

    assert {"node": "n", "gpu": "3:1", "uuid": "MIG-1", "name": "H200"} == build_series_labels(
        "gpu", "n", to_sparse_dict(device)
    )


def test_every_scope_names_its_subject_by_a_label() -> None:
    """The label by which a store finds a subject again is among the labels of its series."""
    subject = {"index": 0, "uuid": "GPU-1", "name": "x", "mount_point": "/", "device": "d", "type": "ext4"}
    for scope in EXPOSED_SCOPES:
        label = subject_label_name(scope)

        assert label is None or label in build_series_labels(scope, "n", subject)


def test_what_comes_and_goes_is_no_series() -> None:
    """Processes, groups and interfaces of containers are left out."""
    assert not is_exposed("process", {"pid": 1})
    assert not is_exposed("cgroup", {"path": "/a"})
    assert not is_exposed("network", {"name": "veth1", "kind": "virtual"})
    assert not is_exposed("filesystem", {"mount_point": "/var/lib/kubelet/pods/1/volumes/x"})
    assert is_exposed("network", {"name": "eth0", "kind": "ethernet"})
    assert is_exposed("filesystem", {"mount_point": "/scratch"})
