# What `gpulse deploy` does on a node, for any POSIX shell. In front of it stand its parameters; behind it, on standard
# input, come the files that belong to it.
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

running() { # whether the agent that was started here is there: pid, since, how
  pid='' began='' booted='' since='' how=''
  if [ -r "$here/pid" ]; then
    read -r pid began booted since how <"$here/pid"
    if is_number "$pid" && [ "$booted" = "$(boot)" ] && [ -n "$began" ] && [ "$(ticks "$pid")" = "$began" ]; then
      return 0
    fi
  fi
  for file in "$here"/agent/*/agent.pid; do # one that began when nobody was left to write its number down
    [ -r "$file" ] && read -r pid <"$file" && is_number "$pid" || continue
    if tr '\0' '\n' <"/proc/$pid/cmdline" 2>/dev/null | grep -qxF -- "${file%/agent.pid}"; then
      record session
      return 0
    fi
  done
  return 1
}

record() { # write down what runs, and how it was started
  began=$(ticks "$pid") since=$(seconds) how=$1
  printf '%s %s %s %s %s\n' "$pid" "$began" "$(boot)" "$since" "$how" >"$here/pid.new"
  mv -f "$here/pid.new" "$here/pid"
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
  rm -f "$here/pid"
}

no_room() { fail "cannot write $1 there" "is the disk full, or the quota used up?"; }

writable() { mkdir -p "$here" 2>/dev/null && [ -w "$here" ] || no_room "$here"; }

# One deploy at a time: the lock says which process has it.

lock() {
  writable
  mine="$$.$(ticks $$)"
  until_then=$(($(seconds) + ${patience:-30}))
  until ln -s "$mine" "$here/lock" 2>/dev/null; do
    held=$(readlink "$here/lock" 2>/dev/null)
    if [ -z "$held" ]; then
      writable # whoever had it may have removed everything
    elif [ "$(ticks "${held%%.*}")" != "${held#*.}" ]; then # whoever had it is gone
      mv -f "$here/lock" "$here/lock.$$" 2>/dev/null
      [ "$(readlink "$here/lock.$$" 2>/dev/null)" = "$held" ] || ln -s "$(readlink "$here/lock.$$")" "$here/lock" 2>/dev/null
      rm -f "$here/lock.$$"
      continue
    fi
    if [ "$(seconds)" -ge "$until_then" ]; then
      [ -n "$held" ] || no_room "$here"
      fail "another deploy is at work there" "wait for it, then try again"
    fi
    pause
  done
  trap unlock EXIT
}

unlock() { # what came and was not used goes with it
  [ "$(readlink "$here/lock" 2>/dev/null)" = "$mine" ] || return 0
  rm -rf "$here/new"
  rm -f "$here/lock"
  rmdir "$here" "$state/$node" "$state" 2>/dev/null
}

# Which gpulse.

program_of() { # the words that run gpulse: program, module
  PATH=$PATH:$HOME/.local/bin:/usr/local/bin
  module=''
  if [ -n "$gpulse" ]; then
    program=$(whole "$gpulse")
  elif [ -n "$venv" ]; then
    program=$(whole "$venv")/bin/python module=yes
  else
    [ -n "$install" ] || read -r install 2>/dev/null <"$here/install"
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
  version=$(run --version 2>&1) || fail "gpulse does not run there: $(printf '%s\n' "$version" | tail -n 1)" "--push copies it there, without root or internet"
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

link() {
  tail -c 1000000 "$here/agent.log" 2>/dev/null | sed -n \
    -e 's/.* I gpulse deploy starts .*/not yet/p' \
    -e 's/^[^ ]* [^ ]* I connected to .*/connected/p' \
    -e 's/^[^ ]* [^ ]* W lost the connection to [^ ]* (\(.*\)), trying .*/lost: \1/p' \
    -e 's/^[^ ]* [^ ]* W not connected to [^ ]* (\(.*\)), trying .*/not reached: \1/p' | tail -n 1
}

last_words() { # why it ended, if the log knows
  tail -c 4000 "$here/agent.log" 2>/dev/null | grep -v '^  try: ' | tail -n 1
}

field() { sed -n "s/^$1 //p" "$here/config" 2>/dev/null; }

report() { # what runs
  say state running
  say pid "$pid"
  say since "$since"
  say how "$how"
  say version "$(field version)"
  say head "$(field head)"
  say link "$(link)"
}

# Verbs.

up() { # start an agent with these words as its options
  lock
  rm -rf "$here/new"
  mkdir "$here/new" || no_room "$here"
  for piece in $pieces; do
    dd bs=1 count="${piece#*:}" 2>/dev/null >"$here/new/${piece%%:*}" || no_room "$here"
  done
  program_of
  {
    printf 'head %s\nversion %s\nprogram %s\n' "$head" "$version" "$program"
    for word; do printf 'option %s\n' "$word"; done
  } >"$here/new/config"
  did='started'
  if running; then
    why=$(changed)
    if [ -z "$why" ]; then
      rm -rf "$here/new"
      say did "already running"
      report
      return
    fi
    stop
    did="restarted ($why)$forced"
  elif [ -e "$here/pid" ]; then
    did='started (it had ended)'
  fi
  for name in token ca.pem cert.pem key.pem config; do
    if [ -e "$here/new/$name" ]; then mv -f "$here/new/$name" "$here/$name"; else rm -f "$here/$name"; fi
  done
  rm -rf "$here/new" "$here/pid"
  if [ -n "$install" ]; then echo "$install" >"$here/install"; else rm -f "$here/install"; fi
  launch "$@"
  say did "$did"
  report
  [ -z "$install" ] || sweep
}

changed() { # why what runs is not what is wanted; nothing when it is
  [ -z "$force" ] || { echo "as asked" && return; }
  old=$(field head) was=$(field version)
  if [ "$old" != "$head" ]; then
    echo "its head was $old"
  elif [ "$was" != "$version" ]; then
    echo "its version was $was"
  else
    for name in config token ca.pem cert.pem key.pem; do
      [ -e "$here/$name" ] || [ -e "$here/new/$name" ] || continue
      cmp -s "$here/$name" "$here/new/$name" && continue
      case $name in
        config) echo "other options" ;;
        token) echo "another token" ;;
        *) echo "other certificates" ;;
      esac
      return
    done
  fi
}

launch() {
  state_dir=$here/agent/$slug
  mkdir -p "$state_dir" || no_room "$here"
  rm -f "$state_dir/agent.pid"
  [ -z "$(find "$here/agent.log" -size +16384 2>/dev/null)" ] || mv -f "$here/agent.log" "$here/agent.log.1"
  printf '%s I gpulse deploy starts an agent for %s\n' "$(date '+%Y-%m-%d %H:%M:%S')" "$head" >>"$here/agent.log"
  set -- agent "$head" "$@" --state-dir "$state_dir"
  [ ! -e "$here/token" ] || set -- "$@" --token-file "$here/token"
  for piece in ca cert key; do
    [ ! -e "$here/$piece.pem" ] || set -- "$@" "--tls-$piece" "$here/$piece.pem"
  done
  cd / || :
  if lingers && launch_unit "$@"; then
    how=systemd
  else
    how=session
    said=$(run "$@" --background --log-file "$here/agent.log" </dev/null 2>&1) || refused "$said"
  fi
  read -r pid <"$state_dir/agent.pid" && is_number "$pid" || fail "the agent did not say its number" "see gpulse deploy logs"
  record "$how"
}

refused() { # tell why an agent does not run, in its own words
  rm -f "$here/config"
  said=$(printf '%s\n' "$1" | grep -v '^  try: ' | tail -n 1 | sed -e 's/^gpulse[^:]*: //' -e 's/; see [^;]*agent\.log$//')
  hint=$(printf '%s\n' "$1" | sed -n 's/^  try: //p' | tail -n 1)
  case $said in
    *' (try: '*')')
      hint=${said##*' (try: '}
      hint=${hint%)}
      said=${said%' (try: '*}
      ;;
  esac
  fail "$said" "$hint"
}

lingers() { # whether this user's services go on without a login
  command -v systemd-run >/dev/null && command -v systemctl >/dev/null || return 1
  [ "$(loginctl show-user "$(id -un)" -p Linger 2>/dev/null)" = Linger=yes ] || return 1
  XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
  export XDG_RUNTIME_DIR
  systemctl --user show-environment >/dev/null 2>&1
}

launch_unit() {
  {
    for name in PATH LD_LIBRARY_PATH XDG_STATE_HOME XDG_CONFIG_HOME; do
      eval "value=\${$name:-}"
      [ -z "$value" ] || printf '%s=%s\nexport %s\n' "$name" "$(quoted "$value")" "$name"
    done
    printf 'exec %s%s' "$(quoted "$program")" "${module:+ -m gpulse}"
    for word; do printf ' %s' "$(quoted "$word")"; done
    printf ' >>%s 2>&1\n' "$(quoted "$here/agent.log")"
  } >"$here/run"
  systemctl --user stop "$unit" 2>/dev/null # its name is free once the last one is gone
  systemd-run --user --quiet --collect --unit="$unit" --description="gpulse agent" -p TimeoutStopSec=20 \
    /bin/sh "$here/run" </dev/null >/dev/null 2>&1 || return 1
  until_then=$(($(seconds) + 20))
  until [ -s "$state_dir/agent.pid" ]; do
    systemctl --user is-active --quiet "$unit" || refused "$(tail -n 2 "$here/agent.log")"
    [ "$(seconds)" -lt "$until_then" ] || refused "it was not up within 20 s"
    pause
  done
}

down() {
  if [ ! -d "$here" ]; then
    say did "nothing ran"
    say state absent
    return
  fi
  lock
  if running; then
    stop
    say did "stopped$forced"
  else
    rm -f "$here/pid"
    say did "nothing ran"
  fi
  say state stopped
}

status() {
  if running; then
    report
  elif [ -e "$here/pid" ]; then
    say state ended
    say version "$(field version)"
    say head "$(field head)"
    say link "$(last_words)"
  elif [ -e "$here/config" ]; then
    say state stopped
    say version "$(field version)"
    say head "$(field head)"
  else
    say state absent
  fi
}

logs() {
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
  found='' kept=''
  if [ -d "$here" ]; then
    found=yes
    lock
    case $(link) in
      lost* | 'not reached'*) [ -n "$spool" ] || kept=$(find "$here/agent" -path '*/spool/*' -type f 2>/dev/null) ;;
    esac
    ! running || stop
    if [ -n "$kept" ]; then
      for name in "$here"/*; do
        case $name in
          "$here/agent" | "$here/lock") ;;
          *) rm -rf "$name" ;;
        esac
      done
      say note "kept $here/agent: its head may not have all frames in it (--spool removes them)"
    fi
    unlock
    [ -n "$kept" ] || rm -rf "$here" || fail "cannot remove $here there"
    rmdir "$state/$node" "$state" 2>/dev/null
  fi
  [ ! -d "$data" ] || found=yes
  sweep
  if [ -n "$found" ]; then say did removed; else say did "nothing was there"; fi
  say state absent
}

sweep() { # remove the copies of gpulse that no node of this home directory uses
  for copy in "$data"/*; do
    [ -d "$copy" ] && [ "$copy" = "${copy%.lock}" ] || continue
    [ "$verb" = purge ] || [ -n "$(find "$copy" -prune -mtime +0)" ] || continue # another node may be about to use it
    ! is_being_made "$copy" || continue
    users=''
    for user in "$state"/*/deploy/install; do
      [ "$(cat "$user" 2>/dev/null)" != "${copy##*/}" ] || users=$user
    done
    if [ -z "$users" ]; then
      rm -rf "$copy" "$copy.lock" 2>/dev/null || rm -rf "$copy" "$copy.lock"
    elif [ "$verb" = purge ]; then
      users=${users%/deploy/install}
      say note "kept $copy: ${users##*/} uses it"
    fi
  done
  rmdir "$data" "${data%/*}" 2>/dev/null
}

is_being_made() { # whether somebody still works on a copy
  [ -d "$1.lock" ] || return 1
  beat=$(cat "$1.lock/beat" 2>/dev/null)
  sleep 5
  [ "$beat" != "$(cat "$1.lock/beat" 2>/dev/null)" ]
}

probe() { # what a copy of gpulse would have to fit
  python_of
  say python "$interpreter"
  say facts "$("$interpreter" -c 'import platform, sys, sysconfig
abi = sysconfig.get_config_var("SOABI") or ""
libc = "musl" if "musl" in abi else "glibc" + platform.libc_ver()[1]
print("%s%d%d" % (sys.implementation.name.replace("cpython", "cp"), *sys.version_info[:2]), platform.machine(), libc)')"
  for copy in "$data"/*/ready; do
    [ ! -e "$copy" ] || { copy=${copy%/ready} && say copy "${copy##*/}"; }
  done
}

push() { # make a virtual environment of the wheels that come on standard input, unless it is there
  target=$data/$install
  mkdir -p "$data" 2>/dev/null && [ -w "$data" ] || no_room "$data"
  last='' idle=$(seconds)
  until [ -e "$target/ready" ] || mkdir "$target.lock" 2>/dev/null; do # home directories are shared by nodes
    beat=$(cat "$target.lock/beat" 2>/dev/null)
    [ "$beat" = "$last" ] || { last=$beat && idle=$(seconds); }
    [ $(($(seconds) - idle)) -lt 60 ] || rm -rf "$target.lock" # whoever had it is gone
    sleep 1
  done
  if [ -e "$target/ready" ]; then
    say did "there already"
    return
  fi
  trap 'kill "$beating" 2>/dev/null; rm -rf "$target.lock"' EXIT
  (while date >"$target.lock/beat"; do sleep 2; done) </dev/null >/dev/null 2>&1 &
  beating=$!
  rm -rf "$target"
  mkdir -p "$target/wheels" || no_room "$target"
  said=$("$interpreter" -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|").extractall(sys.argv[1], **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))' \
    "$target/wheels" 2>&1) || fail "the wheels did not arrive: $(printf '%s\n' "$said" | tail -n 1)"
  said=$("$interpreter" -m venv --without-pip "$target/venv" 2>&1 </dev/null) ||
    fail "no virtual environment can be made there: $(printf '%s\n' "$said" | tail -n 1)" "install python3-venv there, or name another Python in the list of nodes"
  set -- "$target"/wheels/pip-*.whl
  said=$("$target/venv/bin/python" "$1/pip" --isolated install --quiet --no-index --no-cache-dir --no-compile --no-warn-script-location \
    --disable-pip-version-check --find-links "$target/wheels" gpulse 2>&1 </dev/null) ||
    fail "gpulse cannot be installed there: $(printf '%s\n' "$said" | grep ERROR | tail -n 1)" "gpulse deploy wheelhouse DIR prepares wheels for other machines"
  said=$("$target/venv/bin/python" -m gpulse --version 2>&1 </dev/null) || fail "the copy of gpulse does not run there: $(printf '%s\n' "$said" | tail -n 1)"
  rm -rf "$target/wheels"
  : >"$target/ready"
  say did copied
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
say node "$node"
"$verb" "$@"
say end
