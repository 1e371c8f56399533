"""The whole journey on this machine, as a person would type it: every line that begins with `$` is a command.

Measures this machine, designs a plan for it, trains a Llama-style model on English novels first on a showcase plan
of four workers and then, resumed from its checkpoint, on the plan that is fastest here; compares predicted with
measured, samples text and writes a page.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = Path(sys.executable).parent / "meshwright"
ASKED = ("--model", "llama-5m", "--cluster", "local:4", "--job", "examples/demo.toml")
SHOWCASE = ("pipeline=2", "shard=2", "zero='zero1'", "schedule='1f1b'", "devices=4")


def say(text: str) -> None:
    print(f"\n\033[1m# {text}\033[0m" if sys.stdout.isatty() else f"\n# {text}", flush=True)


def meshwright(*arguments: str) -> None:
    """The command has run and its output was shown; the demo ends where a command fails."""
    print(f"$ meshwright {' '.join(arguments)}", flush=True)
    result = subprocess.run([str(COMMAND), *arguments], cwd=ROOT)
    if result.returncode:
        raise SystemExit(result.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/demo", help="where the run goes (made anew)")
    parser.add_argument("--showcase-steps", type=int, default=16)
    parser.add_argument("--steps", type=int, default=None, help="steps after those (default: what the job asks)")
    options = parser.parse_args()
    folder, begun = Path(options.folder), time.monotonic()
    shutil.rmtree(ROOT / folder, ignore_errors=True)
    (ROOT / folder).mkdir(parents=True)
    run, steps = folder / "run", () if options.steps is None else ("--steps", str(options.steps))

    say("1. What this machine is: measured once, then kept")
    meshwright("cluster", "measure", "--devices", "4", "--seconds", "30")
    say("2. A showcase plan: four workers, a pipeline of two stages, each sharded over two")
    sets = [part for setting in SHOWCASE for part in ("--set", f"constraints.fix.{setting}")]
    meshwright("plan", *ASKED, *sets, "--top", "3", "--out", str(folder / "showcase.json"))
    say("3. Train on it for a while: real text, real processes")
    meshwright("train", str(folder / "showcase.json"), "--run", str(run), "--steps", str(options.showcase_steps))
    say("4. Design the plan that is fastest on this machine, and go on with it from the checkpoint:")
    print("#    another layout, the same order of data, nothing lost, nothing repeated", flush=True)
    meshwright("train", *ASKED, "--run", str(run), "--resume", *steps)
    say("5. Predicted against measured, line by line")
    meshwright("explain", str(run))
    say("6. What the model writes")
    meshwright("generate", str(run), "--prompt", "It was a dark and stormy", "--tokens", "60")
    say("7. A page to look at")
    meshwright("report", str(run))
    print(f"\nThe demo took {(time.monotonic() - begun) / 60:.1f} minutes. Open {run / 'report.html'} in a browser.")


if __name__ == "__main__":
    main()
