"""Sbatch: a batch script handed to SLURM, and its job followed to the end."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.errors import EnvironmentUnfit, Problem, WorkerFailed

_LOOK_SECONDS = 2.0
_UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "STAGE_OUT", "REQUEUE_HOLD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What SLURM says of a job: `state` in its words, why it waits, how often it was queued again, its exit code."""

    state: str
    reason: str
    restarts: int
    exit_code: int

    @property
    def is_under_way(self) -> bool:
        return self.state in _UNDER_WAY


def submit(script: Path) -> int:
    """The number of the job that `script` has become. Raises EnvironmentUnfit where SLURM refuses it."""
    told = _told(["sbatch", "--parsable", str(script)])
    number = told.strip().partition(";")[0]
    if not number.isdigit():
        raise EnvironmentUnfit(Problem(what=f"sbatch answers {told.strip()!r}, which is no number of a job"))
    return int(number)


def job_of(number: int) -> Job:
    """What SLURM says of a job now. Raises EnvironmentUnfit where it knows none of that number."""
    fields = dict(re.findall(r"(\w+)=(\S*)", _told(["scontrol", "--oneliner", "show", "job", str(number)])))
    return Job(
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        restarts=int(fields.get("Restarts", "0")),
        exit_code=int(fields.get("ExitCode", "0").partition(":")[0]),
    )


def follow(number: int, *, output: Path, say: Callable[[str], None], show: Callable[[str], None]) -> int:
    """The exit code of a job that has ended for good; `say` is told what becomes of it, `show` its lines as they come.

    Raises WorkerFailed where SLURM ended it otherwise than by an exit code.
    """
    file, place, told = Path(str(output).replace("%j", str(number))), 0, ""
    while True:
        job = job_of(number)
        place = _shown(file, place, show)
        line = f"job {number} is {job.state.lower()}" + (f" ({job.reason})" if job.reason not in ("", "None") else "")
        if line != told and job.is_under_way:
            times = "once" if job.restarts == 1 else f"{job.restarts} times"
            say(line if not job.restarts else f"{line}; queued again {times}")
        told = line
        if not job.is_under_way:
            break
        time.sleep(_LOOK_SECONDS)
    if job.exit_code == 0 and job.state != "COMPLETED":
        fix = f"what was saved stays: the same command goes on; see {file}"
        raise WorkerFailed(Problem(what=f"SLURM ended job {number}: {job.state}", why=job.reason, fix=fix))
    return job.exit_code


def _shown(file: Path, place: int, show: Callable[[str], None]) -> int:
    """The whole lines of `file` from byte `place` on have been shown; where the next one begins."""
    if not file.is_file():
        return place
    with file.open("rb") as lines:
        lines.seek(place)
        more = lines.read()
    whole = more[: more.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        show(line)
    return place + len(whole)


def _told(words: list[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        fix = "run it where SLURM is, or hand in the script that --out writes there"
        raise EnvironmentUnfit(Problem(what=f"this machine has no {words[0]}", where="--submit", fix=fix)) from None
    if done.returncode:
        why = done.stderr.strip().replace("\n", "; ")
        raise EnvironmentUnfit(Problem(what=f"{words[0]} refuses", where="--submit", why=why))
    return done.stdout
