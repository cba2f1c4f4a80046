"""The findings as a document: `python -m gpulse.export.manual` writes docs/diagnosis.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpulse.diagnosis.manual import FAMILIES, Entry, entries
from gpulse.diagnosis.seconds import SIGNALS
from gpulse.diagnosis.thresholds import DEFAULTS
from gpulse.model.units import seconds, share

LIVE = Path("docs") / "diagnosis_live.md"
"""The part that is written by hand, relative to the repository."""


def diagnosis_markdown(live: str = "") -> str:
    """How the diagnosis works, every finding, and what was seen live."""
    known = entries()
    lines = [*_introduction(known), *_table(known)]
    for entry in known:
        lines += _section(entry)
    text = "\n".join(lines) + "\n"
    return f"{text}\n{live}" if live else text


def _introduction(known: list[Entry]) -> Iterator[str]:
    t = DEFAULTS
    quiet = sum(entry.informational for entry in known)
    yield f"""\
# Diagnosis

`gpulse why` says what holds a GPU up, `gpulse explain ID` says everything about one finding, and this page is
all of that in one place. It is made from the rules in `src/gpulse/diagnosis/rules` by `make docs`.

## How it works

**Who ran on the host while the GPU did not?** That is the whole idea. A GPU that waits cannot say for what, but
the machine around it can: a process that computes, a worker that never rests, a disk that is waited for, a copy
that is on its way. So frames are taken a few times a second, digested into seconds, and for each second in which
the GPU lost time the host is asked who was busy.

**Lost time** is the share of the time in which no kernel ran. Below {share(t.lost)} it is not explained: every
program has gaps. From {share(t.lost)} on it is of severity low, from {share(t.lost_medium)} medium, from
{share(t.lost_high)} high.

**Each second is put down to one cause**, the first that holds in an order in which one hides the next: the CPU
limit of the control group, swapping, too many threads for the CPUs, storage, copies, workers, the program's own
threads. A cause is named when it explains **half of the lost time** ({share(t.explained)}). Half is the line because
then no other cause can explain more; from {share(t.explained_surely)} on the finding is surer. When no cause
reaches half, the finding is [`host_wait_unattributed`](#host_wait_unattributed), which says honestly that the
reason is not on this machine or not visible.

**Pauses are looked at first.** A GPU that works, stands still for a second or more and works again is not a GPU
that is fed too slowly. Such pauses are checkpoints or other work of the program, and their time is not explained
twice.

**Only the job at work is judged**: not its start, not what comes after its end. At least
{seconds(t.shortest_seconds)} of it are needed. When there is less the verdict is *not enough data*, which is not
the same as *healthy*.

**Every number is evidence.** A finding lists what was measured and the threshold beside it, what speaks against it,
what was ruled out and by which measure, what to do, why, and how to see cheaply whether it was right. `-v` adds
the names of the signals, and every number can be computed again from a recording.

**Confidence** is a word: *sure*, *likely*, *possible*. It falls when GPM is missing, when less than 15 s were
seen, and when pressure or I/O of the processes cannot be read.

**Informational** findings are told as notes and never as the verdict. Either they are no problem (the GPU itself is
the limit), or their rule has not been seen on a recording of a real run yet: {quiet} of the {len(known)} findings
below are marked so.

## What it needs

| what can be read | what can be judged |
|---|---|
| everything: GPM (Hopper and later), NVML, the host and the job's processes | all findings |
| NVML and the host, without GPM | lost time, input, copies where PCIe traffic is known, pauses, memory, clocks, links; not how full the GPU is while busy, so neither thin kernels, unused tensor cores nor small launches |
| NVML alone (another container, no permission to read the processes) | faults, clocks, links, device memory, and that time is lost; not for what |

The kinds of signals, as the *needs* of a finding name them:
"""
    for signal, words in SIGNALS.items():
        yield f"- `{signal}`: {words}"
    yield """
What could not be read is listed at the end of the answer with the findings that were therefore not judged. A signal
that is missing is never taken for zero.

## Traps

- **A spinning main thread.** A thread that waits for the GPU (`torch.cuda.synchronize`, `.item()`) spins at 100 % of
  a CPU. A busy thread alone therefore proves nothing. It counts as the cause only when it had less rest than
  half of what the GPU had.
- **Utilization of 100 %.** It says that some kernel was resident, not that the GPU was used: one block on one of 132
  multiprocessors reads 100 %. A collective that hangs reads 100 % as well. The activity of the multiprocessors, of the
  tensor cores and of the memory says how much was used.
- **The power cap at the default limit.** A GPU that computes as hard as it can reaches its power limit and lowers its
  clocks a little. That is how it is meant to run and no finding; a limit that somebody lowered is one.
- **Utilization counts copies.** On some drivers NVML's utilization is high while nothing but copies run. Where GPM is
  there its word counts.
- **A full memory.** JAX and vLLM take all memory at the start. Only memory that grows is a leak.
- **An idle PCIe link** drops to an older generation to save power. It is looked at under load alone.

## All findings
"""


def _table(known: list[Entry]) -> Iterator[str]:
    yield "| finding | what it says | family | severity |"
    yield "|---|---|---|---|"
    for entry in known:
        mark = " *(informational)*" if entry.informational else ""
        yield f"| [`{entry.id}`](#{entry.id}) | {_cell(entry.title)}{mark} | {entry.family} | {_cell(entry.severity)} |"


def _section(entry: Entry) -> Iterator[str]:
    yield ""
    yield f"## {entry.id}"
    yield ""
    yield f"**{entry.title}.** {entry.means}"
    yield ""
    yield f"Family: {FAMILIES[entry.family]}. Severity: {_lowered(entry.severity)}"
    if entry.informational:
        yield ""
        yield "Informational: this rule has not been seen on a recording of a real run yet."
    yield ""
    yield f"*Recognised:* {entry.recognised}"
    for title, items in (("Thresholds", entry.limits), ("Needs", entry.needs), ("Sources", entry.sources)):
        if items:
            yield ""
            yield f"*{title}:* {'; '.join(items)}."
    yield ""
    yield "*What to do:*"
    yield ""
    for place, advice in enumerate(entry.advice, start=1):
        yield f"{place}. {advice.do}  "
        yield f"   Why: {advice.why}.  "
        yield f"   To see whether it was right: {advice.confirm}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


if __name__ == "__main__":
    print(diagnosis_markdown(LIVE.read_text(encoding="utf-8") if LIVE.exists() else ""), end="")
