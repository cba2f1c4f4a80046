# What `gpulse deploy` does on a node, for any POSIX shell. In front of it stand its parameters; behind it, on standard
# input, come the files that belong to it.
#
# How `up` replaces an agent. Two of them cannot run at once: they would have one name at the head and one place for
# frames. So the earlier one has to end first, and whatever happens then, it goes on with its files, or the new one runs:
#
#   1. What comes on standard input is written to a directory of its own and counted, and the mark behind it is read.
#      A connection that breaks off ends here, before anything is locked.
#   2. The lock. What an earlier deploy left half done is put in order, and another machine's agent is left alone.
#   3. That gpulse runs is tried, and all that needs room on the disk is written: settings, directories, the log. A full
#      disk, a missing program or a missing token ends here, and nothing was touched.
#   4. From here on two processes are at work. One makes the exchange and the other waits for it, and the lock is that of
#      the first. If the one that waits is killed, the exchange goes on; if the one that makes it is, the other goes back.
#   5. The earlier agent is ended.
#   6. now becomes old, new becomes now. These are renames, which a full disk allows. For as long as there is an `old`,
#      it is not certain that the new agent runs, and if an agent runs then it is the new one.
#   7. The new agent is started from what is in `now`. It runs: its number is written down, and `old` is renamed away.
#   8. It does not run: what was started of it is ended, `old` becomes `now`, and the earlier agent is started again, in the same
#      way as any other, for `now` holds all that it takes.
#
# Should both be killed at once, or the machine stop, then the next deploy finds either `now` as it was or an `old` that
# it makes `now` again (mend): nobody runs then, but no file is lost, and `up` or `restart` start it again.
umask 077
trap '' HUP PIPE
unset SSH_AUTH_SOCK SSH_CONNECTION SSH_CLIENT SSH_TTY

say() { printf '%s %s\n' "$mark" "$*"; }

fail() {
  say error "$1"
  [ -z "${2:-}" ] || say hint "$2"
  exit 1
}

pause() { sleep 0.1 2>/dev/null || sleep 1; }

seconds() { date +%s; }

whole() { # a path that may begin with the home directory
  case $1 in
    '~/'*) printf '%s\n' "$HOME/${1#??}" ;;
    *) printf '%s\n' "$1" ;;
  esac
}

quoted() { # one word as a shell reads it
  printf '%s\n' "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/"
}

# Processes. A number alone may have been given to another one since; with the moment of its start it is unique.

ticks() { # when a process began, in ticks since the boot; nothing when it has ended
  set -- $(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | tail -n 1)
  case ${1:-Z} in
    Z | X) ;;
    *) printf '%s\n' "${20}" ;;
  esac
}

boot() { cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo unknown; }

is_number() {
  case $1 in
    '' | *[!0-9]*) return 1 ;;
  esac
  [ "$1" -gt 1 ]
}

is_ours() { # whether a process is an agent of this directory
  case "$(tr '\0' '\n' 2>/dev/null <"/proc/$1/cmdline")" in
    *"
--state-dir
$here/agent/"*) return 0 ;;
  esac
  return 1
}

recorded() { # whether the agent that was written down is there: pid, began, since, how
  pid='' began='' booted='' since='' how=''
  [ -r "$here/pid" ] || return 1
  read -r pid began booted since how <"$here/pid"
  is_number "$pid" && [ "$booted" = "$(boot)" ] && [ -n "$began" ] && [ "$(ticks "$pid")" = "$began" ]
}

running() { # whether the agent that was started here is there, even if nobody was left to write its number down
  ! recorded || return 0
  for file in "$here"/agent/*/agent.pid; do
    [ -r "$file" ] && read -r pid <"$file" && is_number "$pid" && is_ours "$pid" && record && return 0
  done
  for file in $(grep -lsF -- "$here/agent/" /proc/[0-9]*/cmdline 2>/dev/null); do
    pid=${file#/proc/} pid=${pid%/cmdline}
    is_ours "$pid" && record && return 0
  done
  return 1
}

record() { # write down what runs; whether it still does
  began=$(ticks "$pid") since=$(seconds) how=${by:-session}
  [ -n "$began" ] || return 1
  ! grep -qsF "$unit" "/proc/$pid/cgroup" || how=systemd
  [ -n "$mine" ] || return 0
  # on a full disk it is found without it
  printf '%s %s %s %s %s\n' "$pid" "$began" "$(boot)" "$since" "$how" 2>/dev/null >"$here/pid.new" &&
    mv -f "$here/pid.new" "$here/pid" || rm -f "$here/pid.new"
}

is_foreign() { # whether the agent of another machine, or of another container, uses this directory
  for file in "$here"/agent/*/lock; do
    [ -e "$file" ] || continue
    if command -v flock >/dev/null; then
      flock -n "$file" true 2>/dev/null
      [ $? -ne 1 ] || return 0
    elif command -v python3 >/dev/null; then
      python3 -c 'import fcntl, sys
try: fcntl.flock(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: sys.exit(9)' "$file" 2>/dev/null
      [ $? -ne 9 ] || return 0
    fi
  done
  return 1
}

of_another() { # end here when it is another's
  running || ! is_foreign || fail "another machine that is called $node too uses $here" \
    "give each machine a host name of its own, or an XDG_STATE_HOME that they do not share"
}

renamed() { # a node that got another name while its agent runs keeps its directory
  ! recorded || return 0
  ours=$here
  for file in "$state"/*/deploy/pid; do
    here=${file%/pid}
    if [ "$here" != "$ours" ] && recorded && is_ours "$pid" &&
      [ "$(readlink "/proc/$pid/ns/uts")" = "$(readlink /proc/self/ns/uts)" ]; then
      node=${here%/deploy} node=${node##*/}
      say note "it was called $node when its agent was started"
      return
    fi
  done
  here=$ours
}

stop() { # end what runs, by force if it must be
  forced=''
  kill -TERM "$pid" 2>/dev/null
  until_then=$(($(seconds) + ${patience:-15}))
  while [ "$(ticks "$pid")" = "$began" ]; do
    if [ "$(seconds)" -ge "$until_then" ]; then
      [ -z "$forced" ] || fail "process $pid does not end, not even by force" "it may hang in the driver: see dmesg there"
      forced=', by force'
      kill -KILL "$pid" 2>/dev/null
      until_then=$(($(seconds) + 10))
    fi
    pause
  done
}

no_room() { fail "cannot write $1 there" "is the disk full, or the quota used up?"; }

writable() { mkdir -p "$here" 2>/dev/null && [ -w "$here" ] || no_room "$here"; }

# One deploy at a time: the lock says which process has it.

lock() {
  [ "$verb" != up ] || writable
  name="$$.$(ticks $$)"
  until_then=$(($(seconds) + ${patience:-30}))
  until ln -s "$name" "$here/lock" 2>/dev/null; do
    held=$(readlink "$here/lock" 2>/dev/null)
    [ -n "$held" ] || ! ln -s "$name" "$here/lock" 2>/dev/null || break # it was let go just now
    if [ -z "$held" ]; then
      [ "$verb" = up ] || return 0 # no room for a lock: numbers with their starts are safe without it
      writable # whoever had it may have removed everything
    elif [ "$(ticks "${held%%.*}")" != "${held#*.}" ]; then # whoever had it is gone
      if mv -f "$here/lock" "$here/lock.$$" 2>/dev/null; then
        [ "$(readlink "$here/lock.$$" 2>/dev/null)" = "$held" ] || ln -s "$(readlink "$here/lock.$$")" "$here/lock" 2>/dev/null
        rm -f "$here/lock.$$"
        continue
      fi
      held= # nothing can be written here, and nobody has the lock
      [ "$verb" = up ] || return 0
    fi
    if [ "$(seconds)" -ge "$until_then" ]; then
      [ -n "$held" ] || no_room "$here"
      fail "another deploy is at work there" "wait for it, then try again"
    fi
    pause
  done
  mine=$name
  trap leave EXIT
}

leave() { # what came and was not used goes
  [ -z "$new" ] || rm -rf "$new"
  case $(readlink "$here/lock" 2>/dev/null) in
    "${mine:-nobody}" | "${child:-nobody}".*) rm -f "$here/lock" ;;
  esac
  rmdir "$here" "$state/$node" "$state" 2>/dev/null
}

mend() { # what a deploy that was killed left half done
  for place in "$here"/new.*; do
    name=${place##*/new.}
    [ ! -d "$place" ] || [ "$(ticks "${name%%.*}")" = "${name#*.}" ] || rm -rf "$place"
  done
  if [ -d "$here/old" ] && running; then
    settle
  elif [ -d "$here/old" ]; then
    rm -rf "$here/now"
    mv -f "$here/old" "$here/now"
  fi
  rm -rf "$here"/gone.*
}

settle() { # the new agent it is
  [ ! -d "$here/old" ] || mv -f "$here/old" "$here/gone.$$"
  rm -rf "$here"/gone.*
}

# Which gpulse.

program_of() { # the words that run gpulse: program, module
  PATH=$PATH:$HOME/.local/bin:/usr/local/bin
  module=''
  if [ -n "$keep" ]; then
    program=$(field program) module=$(field module) install=$(cat "$here/now/install" 2>/dev/null)
  elif [ -n "$gpulse" ]; then
    program=$(whole "$gpulse")
  elif [ -n "$venv" ]; then
    program=$(whole "$venv")/bin/python module=yes
  else
    [ -n "$install" ] || read -r install 2>/dev/null <"$here/now/install"
    if [ -n "$install" ] && [ -e "$data/$install/ready" ]; then
      program=$data/$install/venv/bin/python module=yes
    elif [ -n "$python" ]; then
      program=$(command -v "$(whole "$python")") || fail "$python is not there" "correct the list of nodes, or --python"
      module=yes
    else
      install=''
      program=$(command -v gpulse) || fail "gpulse is not installed there" "--push copies it there, without root or internet"
    fi
  fi
  [ -x "$program" ] || fail "$program is not there" "correct the list of nodes, or --push a copy of gpulse"
  version=$(run --version 2>&1 </dev/null) || fail "gpulse does not run there: $(printf '%s\n' "$version" | tail -n 1)" "--push copies it there, without root or internet"
  version=${version##* }
}

run() {
  if [ -n "$module" ]; then
    "$program" -m gpulse "$@"
  else
    "$program" "$@"
  fi
}

python_of() { # a Python that can run gpulse
  PATH=$PATH:/usr/local/bin:$HOME/.local/bin
  seen=''
  if [ -n "$python" ]; then
    set -- "$(whole "$python")"
  else
    set -- python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3
  fi
  for candidate; do
    found=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    case $found in
      3.[0-9] | 3.10 | 2.*) seen="$seen $found" ;;
      *)
        interpreter=$(command -v "$candidate")
        return
        ;;
    esac
  done
  [ -z "$seen" ] || fail "gpulse needs Python 3.11 or later; there is only$seen" "name another in the list of nodes: python = \"/path/to/python3.12\""
  fail "there is no ${python:-Python}" "install Python 3.11 or later there, or name one in the list of nodes"
}

# The log says how it stands with the head.

links() { # what it says, from the oldest to the newest: the head, and how it stands
  cat "$here/agent.log.1" "$here/agent.log" 2>/dev/null | tail -c 1000000 | sed -n \
    -e 's/.* I gpulse deploy starts an agent for \([^ ]*\)$/\1 not yet/p' \
    -e 's/^[^ ]* [^ ]* I connected to \([^ ]*\).*/\1 connected/p' \
    -e 's/^[^ ]* [^ ]* W lost the connection to \([^ ]*\) (\(.*\)), trying .*/\1 lost: \2/p' \
    -e 's/^[^ ]* [^ ]* W not connected to \([^ ]*\) (\(.*\)), trying .*/\1 not reached: \2/p'
}

link() { links | tail -n 1 | sed 's/^[^ ]* //'; }

last_words() { # why it ended, if the log knows
  tail -c 4000 "$here/agent.log" 2>/dev/null | grep -v '^  try: ' | tail -n 1
}

settings() { # where they are; another deploy may be about to exchange them
  if [ -d "$here/now" ]; then echo "$here/now"; else echo "$here/old"; fi
}

field() { sed -n "s/^$1 //p" "$(settings)/config" 2>/dev/null; }

report() { # what runs
  say state running
  say pid "$pid"
  say since "$since"
  say how "$how"
  say version "$(field version)"
  say head "$(field head)"
  say link "$(link)"
}

is_meant() { # whether the agent here is one of the head that was named, if one was
  [ -z "$slug" ] || [ -z "$(field slug)" ] || [ "$(field slug)" = "$slug" ]
}

# Verbs.

up() { # start an agent with these words as its options
  writable
  new=$here/new.$$.$(ticks $$)
  trap leave EXIT
  receive
  lock
  of_another
  mend
  if [ -n "$keep" ] && { [ ! -e "$here/now/config" ] || ! is_meant; }; then keep=''; fi
  [ -n "$keep" ] || [ -n "$head" ] || fail "no agent was started there yet" "--head HOST:8090 says for which head"
  if [ -z "$keep$bare" ] && [ -e "$here/now/token" ] && [ ! -e "$new/token" ]; then
    fail "the agent there has a token, and none was found here" "--token-file FILE, or --no-token if the head needs none"
  fi
  program_of
  prepare "$@"
  before='' had='' why=''
  [ ! -d "$here/now" ] || had=yes
  if running; then
    before=yes why=$(differs)
    [ -z "$force" ] || why="as asked${why:+, $why}"
    if [ -z "$why" ]; then
      say did "already running"
      report
      return
    fi
  fi
  trap : TERM INT
  (exchange) &
  child=$!
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ends the waiting, not the exchange
    wait "$child"
    code=$?
  done
  case $code in
    0) ;;
    1) exit 1 ;;
    *)
      said='it was interrupted there' hint='try again'
      if [ -d "$here/old" ] || ! running; then
        go_back
      else
        say did "interrupted"
        report
      fi
      ;;
  esac
  for user in "$data"/*/users/"$node"; do
    [ "$user" = "$data/$install/users/$node" ] || rm -f "$user"
  done
  [ -z "$install" ] || sweep
}

receive() { # the files that come on standard input, whole or not at all
  mkdir "$new" || no_room "$here"
  for piece in $pieces; do
    file=$new/${piece%%:*}
    dd bs=1 count="${piece#*:}" 2>/dev/null >"$file" || no_room "$here"
    [ "$(($(wc -c <"$file")))" = "${piece#*:}" ] || cut_off
  done
  [ "$(dd bs=1 count=16 2>/dev/null)" = "$mark" ] || cut_off
}

cut_off() { fail "the connection broke off" "try again"; }

prepare() { # everything that has to be written before an agent can be started
  if [ -n "$keep" ]; then
    rm -rf "$new"
    cp -R -p "$here/now" "$new" && {
      printf 'version %s\n' "$version" && grep -v '^version ' "$here/now/config"
    } >"$new/config"
  else
    {
      printf 'version %s\nhead %s\nslug %s\ntarget %s\nprogram %s\nmodule %s\n' \
        "$version" "$head" "$slug" "$target" "$program" "$module" &&
        for word; do printf 'option %s\n' "$word" || return 1; done
    } >"$new/config"
  fi || no_room "$here"
  rm -f "$new/run"
  if [ -n "$install" ]; then
    echo "$install" >"$new/install" && mkdir -p "$data/$install/users" && echo >"$data/$install/users/$node" || no_room "$data"
  fi
  with_words "$new" : || no_room "$here"
  mkdir -p "$state_dir" && echo "$target" >"$state_dir/head" && printf '' >>"$here/agent.log" || no_room "$here"
  ! lingers || with_words "$new" unit_of >"$new/run" || no_room "$here"
}

differs() { # why what runs is not what is wanted; nothing when it is
  old=$(field head) was=$(field version)
  if [ "$(field slug)" != "$(sed -n 's/^slug //p' "$new/config")" ]; then
    echo "its head was $old"
  elif [ "$was" != "$version" ]; then
    echo "its version was $was"
  elif [ "$(plain_config "$here/now")" != "$(plain_config "$new")" ]; then
    echo "other options"
  else
    for name in token ca.pem cert.pem key.pem; do
      [ -e "$here/now/$name" ] || [ -e "$new/$name" ] || continue
      cmp -s "$here/now/$name" "$new/$name" && continue
      case $name in
        token) echo "another token" ;;
        *) echo "other certificates" ;;
      esac
      return
    done
  fi
}

plain_config() { sed -e '/^option ssh=/d' -e '/^head /d' "$1/config"; } # a machine may be in a list by two names

exchange() { # from the earlier agent to the new one, or back
  trap - EXIT
  trap : TERM INT
  read -r own rest </proc/self/stat
  ln -s "$own.$(ticks "$own")" "$here/lock.$own" 2>/dev/null && mv -f "$here/lock.$own" "$here/lock"
  did='started' forced=''
  if [ -n "$before" ]; then
    ! running || stop
    did="restarted ($why)$forced"
  elif [ -e "$here/pid" ]; then
    did='started (it had ended)'
  fi
  said="$here cannot be written" hint=''
  [ -z "$had" ] || mv -f "$here/now" "$here/old" || go_back
  mv -f "$new" "$here/now" || go_back
  with_words "$here/now" start || go_back
  settle
  say did "$did"
  report
  exit 0
}

go_back() { # to the earlier agent with its files; why is in said and hint
  reason=$said advice=$hint
  while running; do stop; done
  if [ -d "$here/old" ]; then
    rm -rf "$here/now"
    mv -f "$here/old" "$here/now"
  elif [ -z "$had" ]; then
    rm -rf "$here/now" "$here/pid"
  fi
  [ -n "$before" ] || fail "$reason" "$advice"
  ! with_words "$here/now" start || fail "the earlier agent goes on: $reason" "$advice"
  fail "the earlier agent does not start again ($said) after this: $reason" "$advice"
}

with_words() { # do something with the words of the agent that a directory describes
  place=$1 todo=$2
  shift 2
  while IFS= read -r line; do
    case $line in
      'head '*) head=${line#* } ;;
      'slug '*) state_dir=$here/agent/${line#* } ;;
      'target '*) target=${line#* } ;;
      'program '*) program=${line#* } ;;
      'module '*) module=${line#* } ;;
      'option '*) set -- "$@" "${line#* }" ;;
    esac
  done <"$place/config"
  set -- agent "$head" "$@" --state-dir "$state_dir"
  [ ! -e "$place/token" ] || set -- "$@" --token-file "$here/now/token"
  for piece in ca cert key; do
    [ ! -e "$place/$piece.pem" ] || set -- "$@" "--tls-$piece" "$here/now/$piece.pem"
  done
  "$todo" "$@"
}

start() { # start an agent; why it does not run is in said and hint
  rm -f "$state_dir/agent.pid"
  [ -z "$(find "$here/agent.log" -size +16384 2>/dev/null)" ] || mv -f "$here/agent.log" "$here/agent.log.1"
  printf '%s I gpulse deploy starts an agent for %s\n' "$(date '+%Y-%m-%d %H:%M:%S')" "$target" 2>/dev/null >>"$here/agent.log"
  cd / || :
  code=2 by=''
  if [ -e "$here/now/run" ] && lingers; then
    start_unit
    code=$? by=systemd
  fi
  if [ "$code" -eq 2 ]; then
    by=session
    said=$(run "$@" --background --log-file "$here/agent.log" </dev/null 2>&1)
    code=$?
  fi
  if [ "$code" -ne 0 ]; then
    in_short
    return 1
  fi
  rm -f "$here/pid"
  running || { said="the agent ended at once" hint="see gpulse deploy logs" && return 1; }
}

in_short() { # why an agent does not run, in its own words
  told=$said
  said=$(printf '%s\n' "$told" | grep -v '^  try: ' | tail -n 1 | sed -e 's/^gpulse[^:]*: //' -e 's/; see [^;]*agent\.log$//')
  hint=$(printf '%s\n' "$told" | sed -n 's/^  try: //p' | tail -n 1)
  case $said in
    *' (try: '*')')
      hint=${said##*' (try: '}
      hint=${hint%)}
      said=${said%' (try: '*}
      ;;
  esac
}

lingers() { # whether this user's services go on without a login
  command -v systemd-run >/dev/null && command -v systemctl >/dev/null || return 1
  [ "$(loginctl show-user "$(id -un)" -p Linger 2>/dev/null)" = Linger=yes ] || return 1
  XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
  export XDG_RUNTIME_DIR
  systemctl --user show-environment >/dev/null 2>&1
}

unit_of() { # what a service runs
  for name in PATH LD_LIBRARY_PATH XDG_STATE_HOME XDG_CONFIG_HOME; do
    eval "value=\${$name:-}"
    [ -z "$value" ] || printf '%s=%s\nexport %s\n' "$name" "$(quoted "$value")" "$name"
  done
  printf 'exec %s%s' "$(quoted "$program")" "${module:+ -m gpulse}"
  for word; do printf ' %s' "$(quoted "$word")"; done
  printf ' >>%s 2>&1\n' "$(quoted "$here/agent.log")"
}

start_unit() { # 0: it runs, 1: it does not, for what is in said, 2: there are no services
  systemctl --user stop "$unit" 2>/dev/null # its name is free once the last one is gone
  systemd-run --user --quiet --collect --unit="$unit" --description="gpulse agent" -p TimeoutStopSec=20 \
    /bin/sh "$here/now/run" </dev/null >/dev/null 2>&1 || return 2
  until_then=$(($(seconds) + 20))
  until [ -s "$state_dir/agent.pid" ]; do
    if ! systemctl --user is-active --quiet "$unit"; then
      said=$(tail -n 2 "$here/agent.log")
      return 1
    fi
    if [ "$(seconds)" -ge "$until_then" ]; then
      systemctl --user stop "$unit" 2>/dev/null
      said="it was not up within 20 s"
      return 1
    fi
    pause
  done
}

down() {
  if [ ! -d "$here" ]; then
    say did "nothing ran"
    say state absent
    return
  fi
  is_meant || { let_be && return; }
  lock
  of_another
  mend
  if running; then
    stop
    rm -f "$here/pid" 2>/dev/null
    say did "stopped$forced"
  else
    rm -f "$here/pid" 2>/dev/null
    say did "nothing ran"
  fi
  say state stopped
}

let_be() { # an agent of another head than the one that was named
  say did "left alone: its head is $(field head)"
  status
}

status() {
  [ -L "$here/lock" ] || of_another
  if running; then
    report
  elif [ -e "$here/pid" ]; then
    say state ended
    say version "$(field version)"
    say head "$(field head)"
    say link "$(last_words)"
  elif [ -e "$(settings)/config" ]; then
    say state stopped
    say version "$(field version)"
    say head "$(field head)"
  else
    say state absent
  fi
}

logs() {
  is_meant || fail "its head is $(field head)" "leave --head out for the logs of all agents"
  [ -e "$here/agent.log" ] || fail "there is no log there" "gpulse deploy up starts an agent"
  say log "$here/agent.log"
  if [ -z "$follow" ]; then
    tail -n "$lines" "$here/agent.log"
    return
  fi
  tail -n "$lines" -F "$here/agent.log" 2>/dev/null </dev/null &
  cat >/dev/null # until whoever looks has gone
  kill $!
}

purge() {
  is_meant || { let_be && return; }
  found='' kept=''
  if [ -d "$here" ]; then
    found=yes
    lock
    of_another
    mend
    ! running || stop
    for place in "$here"/agent/*; do
      if [ -z "$spool" ] && is_unsent "$place"; then
        kept=yes
        say note "kept $place: its head may not have all frames in it (--spool removes them)"
      else
        rm -rf "$place"
      fi
    done
    if [ -n "$kept" ]; then
      for name in "$here"/*; do
        case $name in
          "$here/agent" | "$here/lock") ;;
          *) rm -rf "$name" ;;
        esac
      done
    else
      rm -rf "$here" || fail "cannot remove $here there"
    fi
    leave
  fi
  [ ! -d "$data" ] || found=yes
  rm -f "$data"/*/users/"$node"
  sweep
  if [ -n "$found" ]; then say did removed; else say did "nothing was there"; fi
  say state absent
}

is_unsent() { # whether frames wait in a directory whose head was not connected last, as far as anybody knows
  [ -n "$(find "$1/spool" -type f ! -name lock 2>/dev/null)" ] || return 1
  links | {
    target=$(cat "$1/head" 2>/dev/null) last=''
    while read -r name rest; do
      case ",$target," in *",$name,"*) last=$rest ;; esac
    done
    [ "$last" != connected ]
  }
}

sweep() { # remove the copies of gpulse that no node uses
  for copy in "$data"/*; do
    [ -d "$copy" ] || continue
    case $copy in
      *.lock) # of a copy that was never finished, and of nobody any more
        [ "$verb" != purge ] || [ -d "${copy%.lock}" ] || is_being_made "${copy%.lock}" || rm -rf "$copy"
        continue
        ;;
    esac
    [ "$verb" = purge ] || [ -n "$(find "$copy" -prune -mtime +0)" ] || continue # another node may be about to use it
    ! is_being_made "$copy" || continue
    user=''
    for file in "$copy"/users/*; do
      [ ! -e "$file" ] || user=${file##*/}
    done
    if [ -z "$user" ]; then
      rm -rf "$copy" "$copy.lock" 2>/dev/null || rm -rf "$copy" "$copy.lock"
    elif [ "$verb" = purge ]; then
      say note "kept $copy: $user uses it"
    fi
  done
  rmdir "$data" "${data%/*}" 2>/dev/null
}

is_being_made() { # whether somebody still works on a copy
  [ -d "$1.lock" ] || return 1
  beat=$(cat "$1.lock/beat" 2>/dev/null)
  sleep "${patience:-5}"
  [ "$beat" != "$(cat "$1.lock/beat" 2>/dev/null)" ]
}

probe() { # what a copy of gpulse would have to fit
  python_of
  say python "$interpreter"
  say facts "$("$interpreter" -c 'import platform, sys, sysconfig
abi = sysconfig.get_config_var("SOABI") or ""
libc = "musl" if "musl" in abi else "glibc" + platform.libc_ver()[1]
print("%s%d%d" % (sys.implementation.name.replace("cpython", "cp"), *sys.version_info[:2]), platform.machine(), libc)' </dev/null)"
  say real "$("$interpreter" -c 'import os, sys; print(os.path.realpath(sys.executable))' </dev/null)"
  for copy in "$data"/*/ready; do
    copy=${copy%/ready}
    ! is_whole "$copy" || say copy "${copy##*/}"
  done
}

is_whole() { # whether a copy of gpulse is there and runs
  [ -e "$1/ready" ] && "$1/venv/bin/python" -m gpulse --version </dev/null >/dev/null 2>&1
}

push() { # make a virtual environment of the wheels that come on standard input, unless it is there
  copy=$data/$install
  mkdir -p "$data" 2>/dev/null && [ -w "$data" ] || no_room "$data"
  last='' idle=$(seconds)
  until mkdir "$copy.lock" 2>/dev/null; do # home directories are shared by nodes
    beat=$(cat "$copy.lock/beat" 2>/dev/null)
    [ "$beat" = "$last" ] || { last=$beat && idle=$(seconds); }
    if [ $(($(seconds) - idle)) -ge 60 ]; then # whoever had it is gone
      [ -d "$copy.lock" ] || no_room "$data"
      mv "$copy.lock" "$copy.$$.lock" 2>/dev/null
      [ "$(cat "$copy.$$.lock/beat" 2>/dev/null)" = "$last" ] || mv "$copy.$$.lock" "$copy.lock" 2>/dev/null
      rm -rf "$copy.$$.lock"
      idle=$(seconds)
    fi
    sleep 1
  done
  trap 'kill "$beating" 2>/dev/null; rm -rf "$copy.lock"' EXIT
  (while date >"$copy.lock/beat"; do sleep 2; done) </dev/null >/dev/null 2>&1 &
  beating=$!
  if is_whole "$copy"; then
    say did "there already"
    return
  fi
  trap 'kill "$beating" 2>/dev/null; [ -e "$copy/ready" ] || rm -rf "$copy"; rm -rf "$copy.lock"' EXIT
  rm -rf "$copy/ready" "$copy/venv" "$copy/wheels"
  mkdir -p "$copy/wheels" || no_room "$copy"
  said=$("$interpreter" -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|").extractall(sys.argv[1], **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))' \
    "$copy/wheels" 2>&1) || not_made "the wheels did not arrive" "try again"
  said=$("$interpreter" -m venv --without-pip "$copy/venv" 2>&1 </dev/null) ||
    not_made "no virtual environment can be made there" "install python3-venv there, or name another Python in the list of nodes"
  set -- "$copy"/wheels/pip-*.whl
  said=$("$copy/venv/bin/python" "$1/pip" --isolated install --quiet --no-index --no-cache-dir --no-compile --no-warn-script-location \
    --disable-pip-version-check --find-links "$copy/wheels" "gpulse==$wanted" 2>&1 </dev/null) ||
    not_made "gpulse cannot be installed there" "gpulse deploy wheelhouse DIR prepares wheels for other machines"
  said=$("$copy/venv/bin/python" -m gpulse --version 2>&1 </dev/null) || not_made "the copy of gpulse does not run there"
  rm -rf "$copy/wheels"
  echo >"$copy/ready" || no_room "$copy"
  say did copied
}

not_made() { # why a copy was not made, in the words of what failed
  case $said in
    *'No space left'* | *'uota exceeded'*) no_room "$copy" ;;
  esac
  last=$(printf '%s\n' "$said" | grep ERROR | tail -n 1)
  fail "$1: ${last:-$(printf '%s\n' "$said" | tail -n 1)}" "${2:-}"
}

[ -n "${HOME:-}" ] && [ -d "$HOME" ] || fail "there is no home directory"
node=$(uname -n)
case $node in
  '' | */* | . | ..) node=localhost ;;
esac
state=${XDG_STATE_HOME:-$HOME/.local/state}/gpulse
data=${XDG_DATA_HOME:-$HOME/.local/share}/gpulse/deploy
here=$state/$node/deploy
unit=gpulse-deploy-agent
mine='' new='' child='' by=''
say node "$node"
case $verb in
  probe | push) ;;
  *) renamed ;;
esac
"$verb" "$@"
say end
