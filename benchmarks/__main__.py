"""Runs the benchmarks and keeps what they found: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.measure import ROOT

_FAKE = {
    "one_look": "the whole command beside `nvitop -1` and `gpustat`",
    "sample_cost": "one sample beside the bare NVML calls, and beside nvitop's API",
    "overhead": "CPU and memory of a sampler that runs on and on",
    "sick_gpu": "how late the others are while one GPU hardly answers",
    "diagnosis": "how often `gpulse why` is right on labelled recordings, beside others' rules",
    "diagnosis_speed": "what a diagnosis costs: of a window, of a stream, of a day",
    "diagnosis_timing": "how soon a verdict comes, whether an early one lasts, and how often live findings change",
    "line_overhead": "what reading stacks takes from a program that computes in Python",
    "harvest": "how soon a GPU is given back, and what harvesting costs meanwhile",
    "dask": "what monitoring costs a Dask cluster: tasks, eight hours of memory, an export",
    "past": "what questions about weeks cost: a GPU's month, who held a thousand GPUs",
    "forms": "what each form of history buys and costs: questions about weeks with one of them left out",
    "job": "what a report about a job costs: a day of eight GPUs among a thousand",
    "remote": "what sending a quarter of a million samples a second to an engine costs",
    "database": "what sharing a PostgreSQL database costs a head, and a month of a thousand users from it",
    "scrape": "what a scrape of a thousand GPUs costs a head, and of eight an agent",
    "profile": "what gpulse.profile takes from the program that uses it",
    "web": "the dashboard: a thousand GPUs in a browser, its first paint, many pages, a day's chart",
    "ingest": "what a frame costs a head and its sealing process, by thread, and what 25,000 GPUs would",
    "readers": "how long agents wait while hundreds of clients poll their head and hundreds of pages are open",
    "day": "a simulated day of a head: memory and open files by the hour",
    "hours": "a cluster for two real hours: memory and open files of all its processes and of a page",
    "cluster": "a head with 10,000 GPUs, its store, its answers, an agent, sessions",
}
_REAL = {
    "gpm_cost": "what single readings cost, on a real GPU",
    "training_overhead": "what a sampler takes from a training loop, on a real GPU with torch",
}


def main() -> int:
    """List the benchmarks or run them, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="which ones; without, all that need no real GPU")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--quick", action="store_true", help="a short pass whose results are not kept")
    given = parser.parse_args()
    known = {**_FAKE, **_REAL}
    if unknown := set(given.names) - known.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if given.list:
        for name, words in known.items():
            print(f"{name:18} {words}")
        return 0
    code = 0
    for name in given.names or _FAKE:
        print(f"{name}: {known[name]}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--quick" if given.quick else "--write"]
        code = max(code, abs(subprocess.run(command, cwd=ROOT, check=False).returncode))
    return code


if __name__ == "__main__":
    sys.exit(main())
