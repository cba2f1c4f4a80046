# The part of `gpulse deploy` that runs on a node, in any POSIX shell. Its parameters precede it as variables; its files
# follow on standard input.
#
# How `up` replaces an agent: two agents cannot run at once, because they would share one name at the head and one spool.
# So the earlier agent has to end first. After any failure either the earlier agent runs with its files, or the new one:
#
#   1. The files on standard input are written to a new directory and counted, and the mark after them is read.
#      An interrupted connection ends here, before anything is locked.
#   2. The lock is taken. An unfinished earlier deploy is recovered. Another machine's agent is left alone.
#   3. gpulse is run once, and everything that needs disk space is written: settings, directories, the log. A full disk,
#      a missing program or a missing token ends here, and nothing has changed.
#   4. From here on there are two processes. One replaces the agent and owns the lock; the other waits for it. If the
#      waiting one is killed, the replacement continues; if the replacing one is killed, the other rolls back.
#   5. The earlier agent is ended.
#   6. `now` is renamed to `old` and `new` to `now`, because renames work on a full disk. While `old` exists, the new
#      agent may not run yet, and if an agent runs, it is the new one.
#   7. The new agent is started from `now`. If it runs, its process ID is recorded and `old` is renamed away.
#   8. If it does not run, its processes are ended, `old` becomes `now` again, and the earlier agent is restarted in the
#      same way, because `now` holds everything that it needs.
#
# If both processes are killed, or the machine stops, the next deploy finds either an unchanged `now`, or an `old` that it
# renames to `now` (recover): no agent runs then, but no file is lost, and `up` or `restart` starts the agent again.
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

expand_home() { # print a path that may begin with ~/
  case $1 in
    '~/'*) printf '%s\n' "$HOME/${1#??}" ;;
    *) printf '%s\n' "$1" ;;
  esac
}

quote() { # print one word as a shell reads it
  printf '%s\n' "$1" | sed "s/'/'\\\\''/g; 1s/^/'/; \$s/\$/'/"
}

# Processes. A process ID may be reused; together with the start time it is unique.

ticks() { # print the start time of a process, in ticks since the boot; nothing when it has ended
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

is_ours() { # is a process an agent of this directory?
  case "$(tr '\0' '\n' 2>/dev/null <"/proc/$1/cmdline")" in
    *"
--state-dir
$here/agent/"*) return 0 ;;
  esac
  return 1
}

read_record() { # does the recorded agent run? Sets pid, began, since, how
  pid='' began='' booted='' since='' how=''
  [ -r "$here/pid" ] || return 1
  read -r pid began booted since how <"$here/pid"
  is_number "$pid" && [ "$booted" = "$(boot)" ] && [ -n "$began" ] && [ "$(ticks "$pid")" = "$began" ]
}

running() { # does an agent of this directory run, even one that was never recorded?
  ! read_record || return 0
  for file in "$here"/agent/*/agent.pid; do
    [ -r "$file" ] && read -r pid <"$file" && is_number "$pid" && is_ours "$pid" && write_record && return 0
  done
  for file in $(grep -lsF -- "$here/agent/" /proc/[0-9]*/cmdline 2>/dev/null); do
    pid=${file#/proc/} pid=${pid%/cmdline}
    is_ours "$pid" && write_record && return 0
  done
  return 1
}

write_record() { # record the agent; fails when it has ended
  began=$(ticks "$pid") since=$(seconds) how=${by:-session}
  [ -n "$began" ] || return 1
  ! grep -qsF "$unit" "/proc/$pid/cgroup" || how=systemd
  [ -n "$mine" ] || return 0
  # on a full disk the agent is found without the record
  printf '%s %s %s %s %s\n' "$pid" "$began" "$(boot)" "$since" "$how" 2>/dev/null >"$here/pid.new" &&
    mv -f "$here/pid.new" "$here/pid" || rm -f "$here/pid.new"
}

is_foreign() { # does an agent of another machine, or of another container, use this directory?
  for file in "$here"/agent/*/lock; do
    [ -e "$file" ] || continue
    flock -n "$file" true 2>/dev/null # exits with 1 when another process has the lock
    [ $? -ne 1 ] || return 0
  done
  return 1
}

refuse_foreign() { # fail when another machine uses this directory
  running || ! is_foreign || fail "another machine with the host name $node is using $here" \
    "give each machine its own host name, or its own XDG_STATE_HOME"
}

find_renamed() { # use the directory of the earlier host name if its agent still runs
  ! read_record || return 0
  ours=$here
  for file in "$state"/*/deploy/pid; do
    here=${file%/pid}
    if [ "$here" != "$ours" ] && read_record && is_ours "$pid" &&
      [ "$(readlink "/proc/$pid/ns/uts")" = "$(readlink /proc/self/ns/uts)" ]; then
      node=${here%/deploy} node=${node##*/}
      say note "its host name was $node when its agent was started"
      return
    fi
  done
  here=$ours
}

stop() { # end the agent, with SIGKILL if necessary
  forced=''
  kill -TERM "$pid" 2>/dev/null
  until_then=$(($(seconds) + ${patience:-15}))
  while [ "$(ticks "$pid")" = "$began" ]; do
    if [ "$(seconds)" -ge "$until_then" ]; then
      [ -z "$forced" ] || fail "cannot stop process $pid, not even with SIGKILL" "the process may hang in the driver: see dmesg on the node"
      forced=', by force'
      kill -KILL "$pid" 2>/dev/null
      until_then=$(($(seconds) + 10))
    fi
    pause
  done
}

no_room() { fail "cannot write $1 there" "check that the disk is not full and the quota is not used up"; }

writable() { mkdir -p "$here" 2>/dev/null && [ -w "$here" ] || no_room "$here"; }

# One deploy at a time: the lock names its process. A symbolic link works on every file system; flock does not.

lock() {
  [ "$verb" != up ] || writable
  name="$$.$(ticks $$)"
  until_then=$(($(seconds) + ${patience:-30}))
  until ln -s "$name" "$here/lock" 2>/dev/null; do
    held=$(readlink "$here/lock" 2>/dev/null)
    [ -n "$held" ] || ! ln -s "$name" "$here/lock" 2>/dev/null || break # it was released just now
    if [ -z "$held" ]; then
      [ "$verb" = up ] || return 0 # no room for a lock: process IDs with start times are safe without it
      writable # the last owner may have removed everything
    elif [ "$(ticks "${held%%.*}")" != "${held#*.}" ]; then # its owner has ended
      if mv -f "$here/lock" "$here/lock.$$" 2>/dev/null; then
        [ "$(readlink "$here/lock.$$" 2>/dev/null)" = "$held" ] || ln -s "$(readlink "$here/lock.$$")" "$here/lock" 2>/dev/null
        rm -f "$here/lock.$$"
        continue
      fi
      held= # the directory is not writable, and no process has the lock
      [ "$verb" = up ] || return 0
    fi
    if [ "$(seconds)" -ge "$until_then" ]; then
      [ -n "$held" ] || no_room "$here"
      fail "another deploy is running on the node" "wait until the other deploy has finished, then try again"
    fi
    pause
  done
  mine=$name
  trap clean_up EXIT
}

clean_up() { # remove what arrived and was not used, and the lock
  [ -z "$new" ] || rm -rf "$new"
  case $(readlink "$here/lock" 2>/dev/null) in
    "${mine:-nobody}" | "${child:-nobody}".*) rm -f "$here/lock" ;;
  esac
  rmdir "$here" "$state/$node" "$state" 2>/dev/null
}

recover() { # finish or undo an interrupted deploy
  for place in "$here"/new.*; do
    name=${place##*/new.}
    [ ! -d "$place" ] || [ "$(ticks "${name%%.*}")" = "${name#*.}" ] || rm -rf "$place"
  done
  if [ -d "$here/old" ] && running; then
    commit
  elif [ -d "$here/old" ]; then
    rm -rf "$here/now"
    mv -f "$here/old" "$here/now"
  fi
  rm -rf "$here"/gone.*
}

commit() { # the new agent stays
  [ ! -d "$here/old" ] || mv -f "$here/old" "$here/gone.$$"
  rm -rf "$here"/gone.*
}

# Which gpulse.

find_program() { # set program and module, which run gpulse, and its version
  PATH=$PATH:$HOME/.local/bin:/usr/local/bin
  module=''
  if [ -n "$keep" ]; then
    program=$(field program) module=$(field module) install=$(cat "$here/now/install" 2>/dev/null)
  elif [ -n "$gpulse" ]; then
    program=$(expand_home "$gpulse")
  elif [ -n "$venv" ]; then
    program=$(expand_home "$venv")/bin/python module=yes
  else
    [ -n "$install" ] || read -r install 2>/dev/null <"$here/now/install"
    if [ -n "$install" ] && [ -e "$data/$install/ready" ]; then
      program=$data/$install/venv/bin/python module=yes
    elif [ -n "$python" ]; then
      program=$(command -v "$(expand_home "$python")") || fail "$python does not exist there" "correct the list of nodes, or --python"
      module=yes
    else
      install=''
      program=$(command -v gpulse) || fail "gpulse is not installed there" "install gpulse there with --push, without root or internet access"
    fi
  fi
  [ -x "$program" ] || fail "$program does not exist there" "correct the list of nodes, or install gpulse there with --push"
  version=$(run --version 2>&1 </dev/null) || fail "gpulse does not run there: $(printf '%s\n' "$version" | tail -n 1)" "install a copy with --push, without root or internet access"
  version=${version##* }
}

run() {
  if [ -n "$module" ]; then
    "$program" -m gpulse "$@"
  else
    "$program" "$@"
  fi
}

find_python() { # set interpreter to a Python that can run gpulse
  PATH=$PATH:/usr/local/bin:$HOME/.local/bin
  seen=''
  if [ -n "$python" ]; then
    set -- "$(expand_home "$python")"
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
  [ -z "$seen" ] || fail "gpulse needs Python 3.11 or later; found only$seen" "name another one in the list of nodes: python = \"/path/to/python3.12\""
  fail "cannot find ${python:-Python} there" "install Python 3.11 or later there, or name one in the list of nodes"
}

# The agent's log shows the state of its connection to the head.

links() { # print the connection states in the log, oldest first: head and state
  cat "$here/agent.log.1" "$here/agent.log" 2>/dev/null | tail -c 1000000 | sed -n \
    -e 's/.* I gpulse deploy starts an agent for \([^ ]*\)$/\1 not yet/p' \
    -e 's/^[^ ]* [^ ]* I connected to \([^ ]*\).*/\1 connected/p' \
    -e 's/^[^ ]* [^ ]* W lost the connection to \([^ ]*\) (\(.*\)); trying .*/\1 lost: \2/p' \
    -e 's/^[^ ]* [^ ]* W cannot connect to \([^ ]*\) (\(.*\)); trying .*/\1 not reached: \2/p'
}

link() { links | tail -n 1 | sed 's/^[^ ]* //'; }

last_line() { # print the last line of the log, which may be the reason why the agent ended
  tail -c 4000 "$here/agent.log" 2>/dev/null | grep -v '^  try: ' | tail -n 1
}

settings() { # print the directory of the settings; another deploy may be replacing them
  if [ -d "$here/now" ]; then echo "$here/now"; else echo "$here/old"; fi
}

field() { sed -n "s/^$1 //p" "$(settings)/config" 2>/dev/null; }

report() { # report the running agent
  say state running
  say pid "$pid"
  say since "$since"
  say how "$how"
  say version "$(field version)"
  say head "$(field head)"
  say link "$(link)"
}

is_selected() { # is the agent here for the given head, if one was given?
  [ -z "$slug" ] || [ -z "$(field slug)" ] || [ "$(field slug)" = "$slug" ]
}

# Verbs.

up() { # start an agent with these options
  writable
  new=$here/new.$$.$(ticks $$)
  trap clean_up EXIT
  receive
  lock
  refuse_foreign
  recover
  if [ -n "$keep" ] && { [ ! -e "$here/now/config" ] || ! is_selected; }; then keep=''; fi
  [ -n "$keep" ] || [ -n "$head" ] || fail "no agent has been started there yet" "give its head with --head HOST:8090"
  if [ -z "$keep$bare" ] && [ -e "$here/now/token" ] && [ ! -e "$new/token" ]; then
    fail "the agent there has a token, but no token was found here" "give --token-file FILE, or --no-token if the head requires none"
  fi
  find_program
  prepare "$@"
  before='' had='' why=''
  [ ! -d "$here/now" ] || had=yes
  if running; then
    before=yes why=$(difference)
    [ -z "$force" ] || why="as requested${why:+, $why}"
    if [ -z "$why" ]; then
      say did "already running"
      report
      return
    fi
  fi
  trap : TERM INT
  (replace) &
  child=$!
  wait "$child"
  code=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ends the wait, not the replacement
    wait "$child"
    code=$?
  done
  case $code in
    0) ;;
    1) exit 1 ;;
    *)
      said='the deploy was interrupted there' hint='try again'
      if [ -d "$here/old" ] || ! running; then
        roll_back
      else
        say did "interrupted"
        report
      fi
      ;;
  esac
  for user in "$data"/*/users/"$node"; do
    [ "$user" = "$data/$install/users/$node" ] || rm -f "$user"
  done
  [ -z "$install" ] || remove_unused_copies
}

receive() { # write the files on standard input, all or none
  mkdir "$new" || no_room "$here"
  for piece in $files; do
    file=$new/${piece%%:*}
    dd bs=1 count="${piece#*:}" 2>/dev/null >"$file" || no_room "$here"
    [ "$(($(wc -c <"$file")))" = "${piece#*:}" ] || cut_off
  done
  [ "$(dd bs=1 count=16 2>/dev/null)" = "$mark" ] || cut_off
}

cut_off() { fail "the connection was interrupted" "try again"; }

prepare() { # write everything that the start of an agent needs
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
  with_command "$new" : || no_room "$here"
  mkdir -p "$state_dir" && echo "$target" >"$state_dir/head" && printf '' >>"$here/agent.log" || no_room "$here"
  ! has_services || with_command "$new" service_script >"$new/run" || no_room "$here"
}

difference() { # print how the running agent differs from the wanted one; nothing when it does not
  old=$(field head) was=$(field version)
  if [ "$(field slug)" != "$(sed -n 's/^slug //p' "$new/config")" ]; then
    echo "its head was $old"
  elif [ "$was" != "$version" ]; then
    echo "its version was $was"
  elif [ "$(comparable_config "$here/now")" != "$(comparable_config "$new")" ]; then
    echo "its options changed"
  else
    for name in token ca.pem cert.pem key.pem; do
      [ -e "$here/now/$name" ] || [ -e "$new/$name" ] || continue
      cmp -s "$here/now/$name" "$new/$name" && continue
      case $name in
        token) echo "its token changed" ;;
        *) echo "its certificates changed" ;;
      esac
      return
    done
  fi
}

comparable_config() { sed -e '/^option ssh=/d' -e '/^head /d' "$1/config"; } # a machine may have several names in lists

replace() { # replace the earlier agent, or roll back
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
  said="cannot write $here" hint=''
  [ -z "$had" ] || mv -f "$here/now" "$here/old" || roll_back
  mv -f "$new" "$here/now" || roll_back
  with_command "$here/now" start || roll_back
  commit
  say did "$did"
  report
  exit 0
}

roll_back() { # return to the earlier agent with its files; said and hint hold the reason
  reason=$said advice=$hint
  while running; do stop; done
  if [ -d "$here/old" ]; then
    rm -rf "$here/now"
    mv -f "$here/old" "$here/now"
  elif [ -z "$had" ]; then
    rm -rf "$here/now" "$here/pid"
  fi
  [ -n "$before" ] || fail "$reason" "$advice"
  ! with_command "$here/now" start || fail "the new agent did not start, so the earlier one runs again: $reason" "$advice"
  fail "the new agent did not start ($reason), and the earlier one did not restart: $said" "$advice"
}

with_command() { # call a function with the arguments of the agent that a directory describes
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

start() { # start an agent; if it does not run, said and hint hold the reason
  rm -f "$state_dir/agent.pid"
  [ -z "$(find "$here/agent.log" -size +16384 2>/dev/null)" ] || mv -f "$here/agent.log" "$here/agent.log.1"
  printf '%s I gpulse deploy starts an agent for %s\n' "$(date '+%Y-%m-%d %H:%M:%S')" "$target" 2>/dev/null >>"$here/agent.log"
  cd / || :
  code=2 by=''
  if [ -e "$here/now/run" ] && has_services; then
    start_service
    code=$? by=systemd
  fi
  if [ "$code" -eq 2 ]; then
    by=session
    said=$(run "$@" --background --log-file "$here/agent.log" </dev/null 2>&1)
    code=$?
  fi
  if [ "$code" -ne 0 ]; then
    parse_failure
    return 1
  fi
  rm -f "$here/pid"
  running || { said="the agent ended immediately" hint="see gpulse deploy logs" && return 1; }
}

parse_failure() { # set said and hint from the error message of an agent
  output=$said
  said=$(printf '%s\n' "$output" | grep -v '^  try: ' | tail -n 1 | sed -e 's/^gpulse[^:]*: //' -e 's/; see [^;]*agent\.log$//')
  hint=$(printf '%s\n' "$output" | sed -n 's/^  try: //p' | tail -n 1)
  case $said in
    *' (try: '*')')
      hint=${said##*' (try: '}
      hint=${hint%)}
      said=${said%' (try: '*}
      ;;
  esac
}

has_services() { # do this user's services keep running after the logout?
  command -v systemd-run >/dev/null && command -v systemctl >/dev/null || return 1
  [ "$(loginctl show-user "$(id -un)" -p Linger 2>/dev/null)" = Linger=yes ] || return 1
  XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
  export XDG_RUNTIME_DIR
  systemctl --user show-environment >/dev/null 2>&1
}

service_script() { # print the script that a service runs
  for name in PATH LD_LIBRARY_PATH XDG_STATE_HOME XDG_CONFIG_HOME; do
    eval "value=\${$name:-}"
    [ -z "$value" ] || printf '%s=%s\nexport %s\n' "$name" "$(quote "$value")" "$name"
  done
  printf 'exec %s%s' "$(quote "$program")" "${module:+ -m gpulse}"
  for word; do printf ' %s' "$(quote "$word")"; done
  printf ' >>%s 2>&1\n' "$(quote "$here/agent.log")"
}

start_service() { # 0: it runs, 1: it does not, said holds the reason, 2: there are no services
  systemctl --user stop "$unit" 2>/dev/null # its name is free once the last one has ended
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
      said="the agent did not start within 20 s"
      return 1
    fi
    pause
  done
}

down() {
  if [ ! -d "$here" ]; then
    say did "no agent was running"
    say state absent
    return
  fi
  is_selected || { leave_alone && return; }
  lock
  refuse_foreign
  recover
  if running; then
    stop
    rm -f "$here/pid" 2>/dev/null
    say did "stopped$forced"
  else
    rm -f "$here/pid" 2>/dev/null
    say did "no agent was running"
  fi
  say state stopped
}

leave_alone() { # report an agent for a head other than the given one
  say did "left unchanged: its head is $(field head)"
  status
}

status() {
  [ -L "$here/lock" ] || refuse_foreign
  if running; then
    report
  elif [ -e "$here/pid" ]; then
    say state ended
    say version "$(field version)"
    say head "$(field head)"
    say link "$(last_line)"
  elif [ -e "$(settings)/config" ]; then
    say state stopped
    say version "$(field version)"
    say head "$(field head)"
  else
    say state absent
  fi
}

logs() {
  is_selected || fail "the agent there is for another head: $(field head)" "omit --head to see the logs of all agents"
  [ -e "$here/agent.log" ] || fail "there is no agent log there" "start an agent with gpulse deploy up"
  say log "$here/agent.log"
  if [ -z "$follow" ]; then
    tail -n "$lines" "$here/agent.log"
    return
  fi
  tail -n "$lines" -F "$here/agent.log" 2>/dev/null </dev/null &
  cat >/dev/null # until the client closes the connection
  kill $!
}

purge() {
  is_selected || { leave_alone && return; }
  found='' kept=''
  if [ -d "$here" ]; then
    found=yes
    lock
    refuse_foreign
    recover
    ! running || stop
    for place in "$here"/agent/*; do
      if [ -z "$spool" ] && has_unsent_frames "$place"; then
        kept=yes
        say note "kept $place: it may hold frames that the head does not have (--spool deletes them)"
      else
        rm -rf "$place"
      fi
    done
    if [ -n "$kept" ]; then
      find "$here" -mindepth 1 -maxdepth 1 ! -name agent ! -name lock -exec rm -rf {} +
    else
      rm -rf "$here" || fail "cannot remove $here there"
    fi
    clean_up
  fi
  [ ! -d "$data" ] || found=yes
  rm -f "$data"/*/users/"$node"
  remove_unused_copies
  if [ -n "$found" ]; then say did removed; else say did "nothing to remove"; fi
  say state absent
}

has_unsent_frames() { # are there frames in the spool, and was the agent last seen disconnected from its head?
  [ -n "$(find "$1/spool" -type f ! -name lock 2>/dev/null)" ] || return 1
  links | {
    target=$(cat "$1/head" 2>/dev/null) last=''
    while read -r name rest; do
      case ",$target," in *",$name,"*) last=$rest ;; esac
    done
    [ "$last" != connected ]
  }
}

remove_unused_copies() { # remove copies of gpulse that no node uses
  for copy in "$data"/*; do
    [ -d "$copy" ] || continue
    case $copy in
      *.lock) # of a copy that was never finished, without an owner
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

is_being_made() { # does another node work on a copy?
  [ -d "$1.lock" ] || return 1
  beat=$(cat "$1.lock/beat" 2>/dev/null)
  sleep "${patience:-5}"
  [ "$beat" != "$(cat "$1.lock/beat" 2>/dev/null)" ]
}

probe() { # report the platform that a copy of gpulse must match
  find_python
  say python "$interpreter"
  "$interpreter" -c 'import os, platform, sys, sysconfig
abi = sysconfig.get_config_var("SOABI") or ""
libc = "musl" if "musl" in abi else "glibc" + platform.libc_ver()[1]
name = "%s%d%d" % (sys.implementation.name.replace("cpython", "cp"), *sys.version_info[:2])
print(sys.argv[1], "facts", name, platform.machine(), libc)
print(sys.argv[1], "real", os.path.realpath(sys.executable))' "$mark" </dev/null
  for copy in "$data"/*/ready; do
    copy=${copy%/ready}
    ! is_usable "$copy" || say copy "${copy##*/}"
  done
}

is_usable() { # is a copy of gpulse complete, and does it run?
  [ -e "$1/ready" ] && "$1/venv/bin/python" -m gpulse --version </dev/null >/dev/null 2>&1
}

push() { # install the wheels on standard input into a virtual environment, unless it exists
  copy=$data/$install
  mkdir -p "$data" 2>/dev/null && [ -w "$data" ] || no_room "$data"
  last='' idle=$(seconds)
  until mkdir "$copy.lock" 2>/dev/null; do # nodes may share home directories
    beat=$(cat "$copy.lock/beat" 2>/dev/null)
    [ "$beat" = "$last" ] || { last=$beat && idle=$(seconds); }
    if [ $(($(seconds) - idle)) -ge 60 ]; then # its owner is gone
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
  if is_usable "$copy"; then
    say did "already installed"
    return
  fi
  trap 'kill "$beating" 2>/dev/null; [ -e "$copy/ready" ] || rm -rf "$copy"; rm -rf "$copy.lock"' EXIT
  rm -rf "$copy/ready" "$copy/venv" "$copy/wheels"
  mkdir -p "$copy/wheels" || no_room "$copy"
  said=$("$interpreter" -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|").extractall(sys.argv[1], **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))' \
    "$copy/wheels" 2>&1) || fail_push "cannot unpack the wheels there" "try again"
  said=$("$interpreter" -m venv --without-pip "$copy/venv" 2>&1 </dev/null) ||
    fail_push "cannot create a virtual environment there" "install python3-venv there, or name another Python in the list of nodes"
  set -- "$copy"/wheels/pip-*.whl
  said=$("$copy/venv/bin/python" "$1/pip" --isolated install --quiet --no-index --no-cache-dir --no-compile --no-warn-script-location \
    --disable-pip-version-check --find-links "$copy/wheels" "gpulse==$wanted" 2>&1 </dev/null) ||
    fail_push "cannot install gpulse there" "prepare wheels for this platform with gpulse deploy wheelhouse DIR"
  said=$("$copy/venv/bin/python" -m gpulse --version 2>&1 </dev/null) || fail_push "the copy of gpulse does not run there"
  rm -rf "$copy/wheels"
  echo >"$copy/ready" || no_room "$copy"
  say did copied
}

fail_push() { # fail with the error message of the step that failed
  case $said in
    *'No space left'* | *'uota exceeded'*) no_room "$copy" ;;
  esac
  last=$(printf '%s\n' "$said" | grep ERROR | tail -n 1)
  fail "$1: ${last:-$(printf '%s\n' "$said" | tail -n 1)}" "${2:-}"
}

[ -n "${HOME:-}" ] && [ -d "$HOME" ] || fail "the user has no home directory there"
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
  *) find_renamed ;;
esac
"$verb" "$@"
say end
