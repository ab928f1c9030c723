#!/usr/bin/env python3
"""Runs jobs of engine.py one after the other on a GPU, the imports of the next ones ahead of time.

    RESULTS=results.jsonl LOGS=logs drive.py JOBS.json SECONDS

A job that would not end within SECONDS is left out: its "needs" says how long it takes, "timeout" when it is ended."""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

AHEAD = 3  # engines whose imports run while another one works
HERE = pathlib.Path(__file__).parent
BEGAN = time.time()
LOGS = pathlib.Path(os.environ["LOGS"])


class Process:
    """An engine that has its imports, or is at them."""

    def __init__(self, job):
        self.job, self.ready = job, threading.Event()
        self.log = LOGS / f"{job['name']}.log"
        self.process = subprocess.Popen(
            [sys.executable, "-u", HERE / "engine.py", json.dumps(job)],
            env={**os.environ, **job.get("env", {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with open(self.log, "w") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if line.startswith("READY"):
                    self.ready.set()
                elif line.startswith("[") and self.job["name"] in line[:60]:
                    print(line.rstrip()[:700], flush=True)
        self.ready.set()

    def run(self, deadline):
        """Whether it wrote a result without an error."""
        self.ready.wait(min(deadline - time.time(), 90))
        began = time.time()
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            self.process.wait(min(self.job.get("timeout", 90), max(deadline - began, 5)))
        except (subprocess.TimeoutExpired, OSError) as error:
            self.process.kill()
            print(f"--- {self.job['name']}: {type(error).__name__}", flush=True)
        self.reader.join(2)
        good = has_result(self.job["name"])
        state = "ok" if good else "FAILED"
        print(f"--- {self.job['name']}: {state}, {time.time() - began:.1f} s, {time.time() - BEGAN:.0f} s in all", flush=True)
        if not good:
            print("".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-40:])[-3000:], flush=True)
        return good


def has_result(name):
    try:
        rows = [json.loads(line) for line in open(os.environ["RESULTS"])]
    except OSError:
        return False
    return any(row["name"] == name and "error" not in row for row in rows)


def main():
    with open(sys.argv[1]) as given:
        jobs = [job for job in json.load(given) if isinstance(job, dict) and "name" in job]
    limit = float(sys.argv[2])
    started, failed, good = {}, 0, 0
    for i, job in enumerate(jobs):
        for next_job in jobs[i : i + 1 + AHEAD]:
            if next_job["name"] not in started:
                started[next_job["name"]] = Process(next_job)
        process, left = started[job["name"]], limit - (time.time() - BEGAN)
        if left < job.get("needs", 25) or (failed >= 3 and good == 0):
            print(f"--- {job['name']}: not run, {left:.0f} s left, {good} of {good + failed} good", flush=True)
            process.process.kill()
            continue
        if process.run(BEGAN + limit):
            good += 1
        else:
            failed += 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
