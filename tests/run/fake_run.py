"""A run of two ranks without torch, which leaves the files that chaos looks at: steps of ten milliseconds, saved every
fifth. `python fake_run.py RUN`, or with `broken` or `wrong` after it one that never trains."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshwright.spec.goodput import Mark, Moment
from meshwright.train.observe.timekeeper import note
from meshwright.train.observe.whereabouts import Marker, Section

STEPS, SAVED_EVERY, STEP_SECONDS = 45, 5, 0.01


def launch(run_dir: Path) -> int:
    """The exit code of the ranks, as a launcher tells it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    design = run_dir / "design.json"
    if not design.is_file():
        design.write_text("{}")
    first = subprocess.Popen([sys.executable, __file__, str(run_dir), "0"])
    signal.signal(signal.SIGTERM, lambda *_: first.send_signal(signal.SIGTERM))
    code = first.wait()
    if code < 0:
        print(f"error: rank 0 was killed (signal {-code})", flush=True)
    return 5 if code < 0 else code


def lead(run_dir: Path) -> int:
    """Rank 0, which goes on with a step when rank 1 has answered."""
    marker, asked = Marker(run_dir, rank=0), []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    peer = subprocess.Popen(
        [sys.executable, __file__, str(run_dir), "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    saved = run_dir / "saved"
    step = int(saved.read_text()) if saved.is_file() else 0
    peer.stdout.read(1)
    note(run_dir, Mark(what=Moment.STARTED, at=time.time(), step=step))
    try:
        while step < STEPS and not asked:
            marker.mark(step=step + 1, section=Section.MODEL)
            peer.stdin.write(b".")
            if peer.stdout.read(1) != b".":
                print("error: rank 1 was lost", flush=True)
                return 5
            time.sleep(STEP_SECONDS)
            step += 1
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0 / step}) + "\n")
            if step % SAVED_EVERY == 0:
                save(saved, step)
    except BrokenPipeError:
        print("error: rank 1 was lost", flush=True)
        return 5
    except OSError as error:
        print(f"error: nothing more can be written: {error.strerror}", flush=True)
        return 4
    peer.stdin.close()
    if asked:
        save(saved, step)
        return 75
    return 0


def save(path: Path, step: int) -> None:
    """The file says `step`, or what it said before."""
    fresh = path.with_suffix(".partial")
    fresh.write_text(str(step))
    fresh.replace(path)


def follow(run_dir: Path) -> int:
    """Rank 1, which answers rank 0."""
    marker, step = Marker(run_dir, rank=1), 0
    print(".", end="", flush=True)
    while sys.stdin.read(1):
        step += 1
        marker.mark(step=step, section=Section.MODEL)
        print(".", end="", flush=True)
    return 0


if __name__ == "__main__":
    where, *rest = sys.argv[1:]
    if rest and rest[0] in ("broken", "wrong"):
        print(f"error: it is {rest[0]}", flush=True)
        sys.exit({"broken": 5, "wrong": 2}[rest[0]])
    rank = rest[0] if rest else ""
    sys.exit({"": launch, "0": lead, "1": follow}[rank](Path(where)))
