#!/bin/sh
# Writes down which job has which GPU, so that an agent knows it also without root and before the job starts anything:
#   slurm.conf: Prolog=/etc/slurm/prolog.d/gpulse.sh PrologFlags=Alloc     (or as one of several in /etc/slurm/prolog.d)
#   gpulse agent HEAD --job-map /run/gpulse-jobs
# A file a GPU, named by its device file or its UUID; in it a line a job: its number and its user's.
# It never fails: a prolog that does takes the node out of service.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
CONFIG=/etc/gpulse/slurm.conf
MAP=/run/gpulse-jobs
# shellcheck source=/dev/null
[ -r "$CONFIG" ] && . "$CONFIG"

gpus=${SLURM_JOB_GPUS:-$CUDA_VISIBLE_DEVICES}
case "$SLURM_JOB_ID$SLURM_JOB_UID" in '' | *[!0-9]*) exit 0 ;; esac
[ -n "$gpus" ] && [ -n "$MAP" ] || exit 0

umask 022
mkdir -p "$MAP" || exit 0
exec 9>"$MAP/.lock" && flock -w 5 9
for gpu in $(printf %s "$gpus" | tr , ' '); do
    case "$gpu" in
        GPU-* | MIG-*) file=$gpu ;;
        '' | *[!0-9]*) continue ;;
        *) file=nvidia$gpu ;;
    esac
    case "$file" in */*) continue ;; esac
    printf '%s %s\n' "$SLURM_JOB_ID" "$SLURM_JOB_UID" >>"$MAP/$file"
done
exit 0
