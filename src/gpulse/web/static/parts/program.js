// What a process runs, in the words that tell it from others.

const INTERPRETER = /^(python[\d.]*|pypy[\d.]*|bash|sh|zsh|dash|perl|ruby|node|Rscript|julia)$/;
const TAKES_A_WORD = new Set(["-W", "-X", "--check-hash-based-pycs"]);

/** The words of a command from its script on, without directories: `train.py --x`; of another program all of them. */
export function programWords(process) {
  const [first, ...rest] = process.command ?? [];
  if (first === undefined) {
    return [process.name ?? `pid ${process.pid}`];
  }
  const name = base(first);
  const at = INTERPRETER.test(name) ? scriptAt(rest) : -1;
  return at < 0 ? [name, ...rest] : [base(rest[at]), ...rest.slice(at + 1)];
}

/** A process's whole command, or its name. */
export function commandOf(process) {
  return process.command?.length ? process.command.join(" ") : process.name;
}

/** Where an interpreter's script or module stands among its words; -1 when it has none. */
function scriptAt(words) {
  for (let at = 0; at < words.length; at += 1) {
    if (words[at] === "-m") {
      return at + 1 < words.length ? at + 1 : -1;
    }
    if (words[at] === "-c" || words[at] === "-e" || words[at] === "-") {
      return -1;
    }
    if (TAKES_A_WORD.has(words[at])) {
      at += 1;
    } else if (!words[at].startsWith("-")) {
      return words[at].trim() ? at : -1;
    }
  }
  return -1;
}

function base(path) {
  return path.slice(path.lastIndexOf("/") + 1) || path;
}
