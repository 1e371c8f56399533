"""audit: whether a run has read every sequence of its data exactly once, told from its directory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data import Corpus, prepare
from meshwright.data.fingerprint import BITS
from meshwright.run.files import design_of_run
from meshwright.run.preflight import check_corpus
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.incident import Incident, Trouble
from meshwright.spec.paths import expanded
from meshwright.spec.plan import Design
from meshwright.train.checkpoint import Checkpoint, corrupt, open_checkpoint, places
from meshwright.train.ledger import Ledger
from meshwright.train.observe.incidents import incidents_of

_RECORDS = ("corpus.json", "tokenizer.json")
_AT_ONCE = 256  # sequences that are read from the text at once

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Of one source: `whole` times every window of its text was read, and once more `begun` of `windows`."""

    source: str
    windows: int
    whole: int
    begun: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Bytes of tensors that the checkpoint of `step` wrote itself, and that it has in common with an earlier one."""

    step: int
    written_bytes: int
    referred_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the checkpoint of `step` has read: sequences [since, consumed) but those `skipped`, each exactly once where
    there are no `problems`. All `cache_bytes` of tokenised text have the checksums that they were written with.
    `dropped` were read by a learner that undid its step. `unfit` checkpoints are told apart, and those that the run
    itself has `passed_over`: nothing is lost while one is whole. `sums` are the fingerprints that were kept and found.
    Files `missing` would say which text and tokenizer the run began with.
    """

    run: str
    step: int
    since: int
    consumed: int
    skipped: tuple[tuple[int, int], ...]
    dropped: int
    passes: tuple[Passes, ...]
    sums: tuple[str, str]
    cache_bytes: int
    checkpoints: tuple[int, ...]
    stored: tuple[Stored, ...]
    unfit: tuple[Problem, ...]
    passed_over: tuple[Incident, ...]
    missing: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def read(self) -> int:
        return self.consumed - self.since - sum(stop - start for start, stop in self.skipped)


def audit(run_dir: Path | str, *, cache: Path, say: Say | None = None) -> Audit:
    """The newest whole checkpoint of a run held against its text, which is tokenised into `cache` unless it is there.

    Every file of every checkpoint is read. Raises ConfigError where the run has no whole checkpoint, where that was
    saved before ledgers were kept, and where the text is not what it was; EnvironmentUnfit where bits of the tokenised
    text were turned.
    """
    folder, tell = expanded(run_dir), say or _nobody
    design = design_of_run(folder)
    whole, unfit = _checkpoints(folder / "checkpoints", say=tell)
    if not whole:
        raise ConfigError([Problem(what="the run has no whole checkpoint", where=str(folder)), *unfit])
    newest = whole[0]
    state = newest.manifest.state
    consumed = int(state["consumed"])
    ledger = Ledger.of(state.get("ledger"), consumed=consumed)
    if ledger.since == consumed:
        why = "it was saved before runs kept what they had read, or has read nothing"
        raise ConfigError(Problem(what="this checkpoint says nothing of its data", where=str(newest.path), why=why))
    corpus = prepare(design.job.data, sequence_length=design.plan.sequence_length, seed=design.job.seed, cache=cache)
    check_corpus(design, corpus, run_dir=folder)
    tell("reading the tokenised text for its checksums")
    cache_bytes = corpus.verify()
    found = _sum(corpus, ledger, consumed=consumed, say=tell)
    problems = [] if found == ledger.read else [_unlike(newest, ledger, seed=design.job.seed)]
    return Audit(
        run=str(folder),
        step=newest.step,
        since=ledger.since,
        consumed=consumed,
        skipped=tuple(ledger.skipped),
        dropped=ledger.dropped,
        passes=_passes(design, corpus, _stretches(ledger, consumed)),
        cache_bytes=cache_bytes,
        sums=(f"{ledger.read:016x}", f"{found:016x}"),
        checkpoints=tuple(checkpoint.step for checkpoint in whole),
        stored=tuple(_stored(checkpoint) for checkpoint in whole),
        unfit=tuple(unfit),
        passed_over=tuple(each for each in incidents_of(folder) if each.trouble is Trouble.CHECKPOINT),
        missing=tuple(name for name in _RECORDS if not (folder / name).is_file()),
        problems=tuple(problems),
    )


def _nobody(line: str) -> None:
    """Nobody is told."""


def _checkpoints(directory: Path, *, say: Say) -> tuple[list[Checkpoint], list[Problem]]:
    """Those of which every byte is what was saved, newest first, and what is wrong with the others."""
    whole, unfit = [], []
    for folder in places(directory):
        found = open_checkpoint(folder)
        if isinstance(found, Problem):
            unfit.append(found)
            continue
        say(f"reading the checkpoint of step {found.step:,}")
        problem = corrupt(found)
        if problem is None:
            whole.append(found)
        else:
            unfit.append(problem)
    return whole, unfit


def _stored(checkpoint: Checkpoint) -> Stored:
    told = checkpoint.manifest
    return Stored(step=told.step, written_bytes=told.written_bytes, referred_bytes=told.referred_bytes)


def _stretches(ledger: Ledger, consumed: int) -> list[tuple[int, int]]:
    """What was read, as stretches in order."""
    edges = [ledger.since, *(edge for stretch in ledger.skipped for edge in stretch), consumed]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _sum(corpus: Corpus, ledger: Ledger, *, consumed: int, say: Say) -> int:
    total, read = 0, 0
    stretches = _stretches(ledger, consumed)
    everything = sum(stop - start for start, stop in stretches)
    for start, stop in _cut(stretches):
        total = (total + corpus.train.sequences(start, stop - start).fingerprint) % 2**BITS
        read += stop - start
        say(f"reading the text: {read:,} of {everything:,} sequences")
    return total


def _cut(stretches: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, stop in stretches:
        for begin in range(start, stop, _AT_ONCE):
            yield begin, min(begin + _AT_ONCE, stop)


def _passes(design: Design, corpus: Corpus, stretches: Sequence[tuple[int, int]]) -> tuple[Passes, ...]:
    """How often every window of every source was read: the times that all were, and how many were once more."""
    streams = corpus.train.streams
    counts = [np.zeros(stream.windows(corpus.train.sequence_length), dtype=np.int64) for stream in streams]
    for start, stop in stretches:
        stream, window = corpus.train.places(np.arange(start, stop, dtype=np.int64))
        for which, count in enumerate(counts):
            count += np.bincount(window[stream == which], minlength=len(count))
    return tuple(
        Passes(source=source.path, windows=len(count), whole=int(count.min()), begun=int((count > count.min()).sum()))
        for source, count in zip(design.job.data.sources, counts, strict=True)
    )


def _unlike(checkpoint: Checkpoint, ledger: Ledger, *, seed: int) -> Problem:
    why = f"the sum of fingerprints that was kept, {ledger.read:016x}, is not that of the text"
    fix = "compare the cache of tokenised text on all hosts; a sequence was lost, repeated or read otherwise"
    saved = checkpoint.manifest.state.get("seed")
    if saved not in (None, seed):
        why = f"it was saved with seed {saved}, and design.json says {seed}, which is another order"
        fix = f"set job.seed in design.json back to {saved}"
    return Problem(what="what was read is not every sequence once", where=str(checkpoint.path), why=why, fix=fix)
