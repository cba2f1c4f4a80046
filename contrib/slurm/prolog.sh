#!/bin/sh
# Record which job has which GPU, so that an agent knows it without root and before the job starts a process:
#   slurm.conf: Prolog=/etc/slurm/prolog.d/gpulse.sh PrologFlags=Alloc     (or as one of several in /etc/slurm/prolog.d)
#   gpulse agent HEAD --job-map /run/gpulse-jobs
# One file per GPU, named by its device file or UUID; one line per job: job ID and user ID.
# The script never fails: a failing prolog would drain the node.

trap 'exit 0' EXIT PIPE
PATH=/usr/sbin:/usr/bin:/sbin:/bin
CONFIG=/etc/gpulse/slurm.conf
MAP=/run/gpulse-jobs
if [ -r "$CONFIG" ]; then
    sh -n "$CONFIG" || exit 0
    # shellcheck source=/dev/null
    . "$CONFIG"
fi

gpus=${SLURM_JOB_GPUS:-$CUDA_VISIBLE_DEVICES}
# Slurm numbers MIG instances in its own way, so use their UUIDs.
case "$CUDA_VISIBLE_DEVICES" in MIG-*) gpus=$CUDA_VISIBLE_DEVICES ;; esac
case "$SLURM_JOB_ID" in '' | *[!0-9]*) exit 0 ;; esac
case "$SLURM_JOB_UID" in '' | *[!0-9]*) exit 0 ;; esac
[ -n "$gpus" ] && [ -n "$MAP" ] || exit 0

umask 022
set -f
mkdir -p "$MAP" || exit 0
# Not with `exec 9>`, which would end the script if the lock cannot be opened.
(
    flock -w 5 9
    for gpu in $(printf %s "$gpus" | tr , ' '); do
        case "$gpu" in
            */*) continue ;;
            GPU-* | MIG-*) file=$gpu ;;
            *[!0-9]*) continue ;;
            *) file=nvidia$gpu ;;
        esac
        printf '%s %s\n' "$SLURM_JOB_ID" "$SLURM_JOB_UID" >>"$MAP/$file"
    done
) 9>"$MAP/.lock"
exit 0
