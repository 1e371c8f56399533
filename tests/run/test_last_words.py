"""Where threads stand at SIGTERM is written by the process itself, whatever its main thread is held in."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from meshwright.train.observe.stacks import main_thread, path_of
from tests.run.elastic_runs import until

CHILD = """
import signal, sys, threading
from pathlib import Path
from meshwright.run.last_words import LastWords

def count_for_ever(n):
    while True:
        n += sum(range(20))

def stay():
    threading.Lock().acquire()
    held = threading.Lock()
    held.acquire()
    print("ready", flush=True)
    held.acquire()

asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
words = LastWords(Path(sys.argv[1]), rank=3)
if sys.argv[2] == "well":
    words.unneeded()
    raise SystemExit(0)
for _ in range(3):
    threading.Thread(target=count_for_ever, args=(0,), daemon=True).start()
stay()
"""


def child(run: Path, manner: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(run), manner], stdout=subprocess.PIPE, text=True)


def written(path: Path, times: int) -> bool:
    return path.read_text().count("in stay") >= times


def test_the_main_thread_is_told_last_and_the_process_lives_on(tmp_path: Path) -> None:
    with child(tmp_path, "held") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        path = path_of(tmp_path, 3)
        for times in range(1, 6):
            process.send_signal(signal.SIGTERM)
            until(partial(written, path, times))
        text = path.read_text()
        assert process.poll() is None
        process.kill()
    stack = main_thread(text)
    assert [call.name for call in stack] == ["stay", "<module>"]
    assert text.count("in count_for_ever") == 15


def test_nothing_is_left_of_a_run_that_ended_well(tmp_path: Path) -> None:
    with child(tmp_path, "well") as process:
        assert process.wait() == 0
    assert list(tmp_path.iterdir()) == []
