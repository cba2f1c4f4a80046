#!/bin/sh
# When a job ends, log one line about how it used its GPUs, and release its GPUs in the job map of prolog.sh:
#   slurm.conf: Epilog=/etc/slurm/epilog.d/gpulse.sh
# The line comes from the head, which knows the whole job, so only the first of its nodes requests it.
# The script never fails and never takes long: otherwise the node could not start its next job.

trap 'exit 0' EXIT PIPE
PATH=/usr/sbin:/usr/bin:/sbin:/bin
CONFIG=/etc/gpulse/slurm.conf
GPULSE=/usr/local/bin/gpulse
MAP=/run/gpulse-jobs
REPORTS=/var/log/gpulse-jobs.log
TELL_USER=no
PATIENCE=20
if [ -r "$CONFIG" ]; then
    sh -n "$CONFIG" || exit 0
    # shellcheck source=/dev/null
    . "$CONFIG"
fi

gpus=${SLURM_JOB_GPUS:-$CUDA_VISIBLE_DEVICES}
case "$SLURM_JOB_ID" in '' | *[!0-9]*) exit 0 ;; esac

# Each file is replaced atomically, and only if all remaining lines could be written.
release() (
    umask 022
    flock -w 2 9
    for file in "$MAP"/*; do
        grep -qs "^$SLURM_JOB_ID " "$file" || continue
        grep -v "^$SLURM_JOB_ID " "$file" >"$MAP/.left"
        case $? in
            0) mv -f "$MAP/.left" "$file" ;;
            1) rm -f "$file" ;;
        esac
    done
    rm -f "$MAP/.left"
)

# The name of the first of n[01-32],m3 is n01.
is_first() {
    first=$(printf %s "${SLURM_JOB_NODELIST:-$SLURM_NODELIST}" | sed 's/\[\([^],-]*\)[^]]*\]/\1/g; s/,.*//')
    [ -z "$first" ] || [ "$first" = "${SLURMD_NODENAME:-$first}" ]
}

# Print the path of the job's output. Slurm gives its pattern, or nothing for the default. A pattern with unknown parts yields nothing.
output() {
    rest=${SLURM_JOB_STDOUT:-$SLURM_JOB_WORK_DIR/slurm-%j.out} name=
    case "$rest" in *\\*) return ;; esac
    while [ "$rest" != "${rest#*%}" ]; do
        name=$name${rest%%%*} rest=${rest#*%}
        case "$rest" in
            %*) word=% ;;
            [jJ]*) word=$SLURM_JOB_ID ;;
            A*) word=$SLURM_ARRAY_JOB_ID ;;
            a*) word=$SLURM_ARRAY_TASK_ID ;;
            u*) word=$SLURM_JOB_USER ;;
            x*) word=$SLURM_JOB_NAME ;;
            N*) word=$(hostname -s) ;;
            [nt]*) word=0 ;;
            s*) word="batch" ;;
            *) word= ;;
        esac
        [ -n "$word" ] || return
        name=$name$word rest=${rest#?}
    done
    printf %s "$name$rest"
}

# Not with `exec 9>`, which would end the script if the lock cannot be opened.
[ -n "$MAP" ] && [ -d "$MAP" ] && release 9>"$MAP/.lock"
[ -n "$gpus" ] && is_first || exit 0

[ -n "$GPULSE_HEAD" ] && export GPULSE_HEAD
[ -n "$GPULSE_TOKEN_FILE" ] && export GPULSE_TOKEN_FILE
export HOME="${HOME:-/root}"
line=$(timeout -k 1 "$PATIENCE" "$GPULSE" job "$SLURM_JOB_ID" --line 2>/dev/null </dev/null) || exit 0
[ -n "$line" ] || exit 0

printf '%s\n' "$line"
# shellcheck disable=SC2016
[ -n "$REPORTS" ] && printf '%s\n' "$line" | timeout -k 1 5 sh -c 'cat >>"$1"' sh "$REPORTS"
# Run as the job's user, because the user chose the path.
# shellcheck disable=SC2016
if [ "$TELL_USER" = yes ] && [ "${SLURM_JOB_UID:-0}" -gt 0 ]; then
    printf '%s\n' "$line" |
        timeout -k 1 5 setpriv --reuid="$SLURM_JOB_UID" --regid="${SLURM_JOB_GID:-65534}" --clear-groups -- \
            sh -c '[ -f "$1" ] && cat >>"$1"' sh "$(output)" 2>/dev/null
fi
exit 0
