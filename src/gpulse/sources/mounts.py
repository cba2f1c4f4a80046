"""Which of the many mounts of a machine hold data, each file system once."""

from __future__ import annotations

from gpulse.sources.procfs import Mount

_PSEUDO_TYPES = frozenset(
    "autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fusectl fuse.gvfsd-fuse "  # noqa: SIM905  words read better as words
    "fuse.lxcfs fuse.portal hugetlbfs iso9660 mqueue nsfs proc pstore ramfs rootfs rpc_pipefs securityfs "
    "selinuxfs squashfs sysfs tracefs".split()
)
NETWORK_TYPES = frozenset(
    "9p afs beegfs ceph cifs fuse.ceph fuse.cvmfs2 fuse.gcsfuse fuse.glusterfs fuse.juicefs fuse.s3fs fuse.sshfs "  # noqa: SIM905  see above
    "glusterfs gpfs lustre nfs nfs4 smb3 smbfs virtiofs wekafs".split()
)
_CONTAINER_FILES = frozenset({"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"})
"""Files that container engines mount one by one; they name the host's disk, not a place for data."""


def real_mounts(mounts: list[Mount]) -> list[Mount]:
    """The mounts that hold data, each device once: at `/` if it is there, else at its shortest path."""
    visible = {mount.mount_point: mount for mount in mounts}
    chosen: dict[tuple[str, ...], Mount] = {}
    for mount in sorted(visible.values(), key=_preference):
        if _is_real(mount):
            chosen.setdefault(_device_key(mount), mount)
    return sorted(chosen.values(), key=lambda mount: mount.mount_point)


def _preference(mount: Mount) -> tuple[bool, int, str]:
    return mount.mount_point in _CONTAINER_FILES, len(mount.mount_point), mount.mount_point


def _device_key(mount: Mount) -> tuple[str, ...]:
    # FUSE programs name their device as they like, often all the same.
    own = mount.type.startswith("fuse.") and ":" not in mount.device
    return (mount.device, mount.mount_point) if own else (mount.device,)


def _is_real(mount: Mount) -> bool:
    if mount.type == "tmpfs":
        return mount.mount_point == "/dev/shm"  # noqa: S108  the one tmpfs that data loaders fill
    if mount.type == "overlay":
        return mount.mount_point == "/"
    return mount.type not in _PSEUDO_TYPES and not mount.mount_point.startswith("/snap/")
