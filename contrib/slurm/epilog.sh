#!/bin/sh
# One line about how a job used its GPUs when it ends, and its GPUs given back in the directory of prolog.sh:
#   slurm.conf: Epilog=/etc/slurm/epilog.d/gpulse.sh
# The line comes from the head, which has the whole job, so that the first of its nodes asks for it.
# It never fails and never takes long: an epilog that does keeps the node from its next job.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
CONFIG=/etc/gpulse/slurm.conf
GPULSE=/usr/local/bin/gpulse
MAP=/run/gpulse-jobs
REPORTS=/var/log/gpulse-jobs.log
TELL_USER=no
PATIENCE=20
# shellcheck source=/dev/null
[ -r "$CONFIG" ] && . "$CONFIG"

gpus=${SLURM_JOB_GPUS:-$CUDA_VISIBLE_DEVICES}
case "$SLURM_JOB_ID" in '' | *[!0-9]*) exit 0 ;; esac

release() {
    [ -n "$MAP" ] && [ -d "$MAP" ] || return
    exec 9>"$MAP/.lock" && flock -w 5 9
    for file in "$MAP"/*; do
        [ -f "$file" ] || continue
        grep -v "^$SLURM_JOB_ID " "$file" >"$MAP/.left"
        if [ -s "$MAP/.left" ]; then cat "$MAP/.left" >"$file"; else rm -f "$file"; fi
    done
    rm -f "$MAP/.left"
    exec 9>&-
}

is_first() {
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" 2>/dev/null | head -n 1)
    [ -z "$first" ] || [ "$first" = "${SLURMD_NODENAME:-$first}" ]
}

release
[ -n "$gpus" ] && is_first || exit 0

[ -n "$GPULSE_HEAD" ] && export GPULSE_HEAD
[ -n "$GPULSE_TOKEN_FILE" ] && export GPULSE_TOKEN_FILE
export HOME="${HOME:-/root}"
line=$(timeout "$PATIENCE" "$GPULSE" job "$SLURM_JOB_ID" --line 2>/dev/null </dev/null) || exit 0
[ -n "$line" ] || exit 0

printf '%s\n' "$line"
[ -n "$REPORTS" ] && printf '%s\n' "$line" >>"$REPORTS"
# As the job's user: the path is the user's, and may lead anywhere.
# shellcheck disable=SC2016
if [ "$TELL_USER" = yes ] && [ -n "$SLURM_JOB_STDOUT" ] && [ "${SLURM_JOB_UID:-0}" -gt 0 ]; then
    printf '%s\n' "$line" |
        timeout 5 setpriv --reuid="$SLURM_JOB_UID" --regid="${SLURM_JOB_GID:-65534}" --clear-groups -- \
            sh -c 'cat >>"$1"' sh "$SLURM_JOB_STDOUT" 2>/dev/null
fi
exit 0
