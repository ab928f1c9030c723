#!/usr/bin/env python3
"""Applies one-line mutations to the source, one at a time, and expects a test to fail.

usage: scripts/mutate.py [--build FOLDER] [--only PART/PARTS] [--list FILE] [--timeout SECONDS]

Each entry of tests/mutations.json names a test (target and filter, and its environment; "{build}" there is the build's folder)
and the mutations that it must catch: a file, a line's text, and what it becomes. The file must hold the text exactly once. The tree is restored after every
mutation, also when the script is interrupted or terminated. A test that fails without a mutation ends the script. A
mutation that does not compile, or whose test runs out of time, is reported as such and does not count as caught: it proves
nothing about the tests.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave(number, _frame):
    """Unwinds to where the file is restored; a second signal must not interrupt that."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def run(command, timeout, environment=None):
    # A session of its own: what a build started ends with it, and does not write objects of a restored file.
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env=dict(os.environ, **(environment or {}))
    )
    try:
        text, _ = process.communicate(timeout=timeout)
        return process.returncode, text.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return None, "timed out"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def outcome(entry, args):
    code, text = run(["cmake", "--build", args.build, "--target", entry["target"]], 1800)
    if code != 0:
        return "does not compile", text
    program = next(pathlib.Path(ROOT, args.build).glob("tests/**/" + entry["target"]))
    code, text = run([str(program), "--gtest_brief=1", "--gtest_filter=" + entry.get("filter", "*")], args.timeout,
                     {name: value.replace("{build}", str(ROOT / args.build)) for name, value in entry.get("environment", {}).items()})
    if code is None:
        return "timed out", text
    return ("survived", text) if code == 0 else ("caught", text)


def check_unmutated(entries, args):
    """Each test must pass by itself: what fails anyway catches nothing."""
    tests = {json.dumps([entry["target"], entry.get("filter"), entry.get("environment")]): entry for entry in entries}
    for test, entry in tests.items():
        result, text = outcome(entry, args)
        if result != "survived":
            sys.exit(f"{text}\nwithout a mutation: {'fails' if result == 'caught' else result}: {test}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--list", default="tests/mutations.json")
    parser.add_argument("--only", default="0/1", help="every PARTS-th mutation from PART on")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a test may take")
    args = parser.parse_args()
    part, parts = map(int, args.only.split("/"))
    tests = json.loads(pathlib.Path(ROOT, args.list).read_text())
    entries = [{**test, **mutation} for test in tests for mutation in test["mutations"]][part::parts]
    counts = {}
    for each in SIGNALS:
        signal.signal(each, leave)
    check_unmutated(entries, args)
    for number, entry in enumerate(entries, 1):
        path = ROOT / entry["file"]
        original = path.read_text()
        if original.count(entry["old"]) != 1:
            sys.exit(f"{entry['file']}: the text must stand there exactly once: {entry['old']}")
        begin = time.monotonic()
        try:
            path.write_text(original.replace(entry["old"], entry["new"]))
            result, _ = outcome(entry, args)
        finally:
            path.write_text(original)
        counts[result] = counts.get(result, 0) + 1
        print(f"{number:3} of {len(entries)}  {result:17} {time.monotonic() - begin:5.0f} s  {entry['file']}: {entry['why']}",
              flush=True)
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return 0 if set(counts) <= {"caught"} else 1


if __name__ == "__main__":
    sys.exit(main())
