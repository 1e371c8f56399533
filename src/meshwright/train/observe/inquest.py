"""Who kept the others waiting when a run ended, told from the collectives and stacks that its ranks left behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec.rank_words import MOST_NAMED, ranks_in_words
from meshwright.spec.units import format_bytes
from meshwright.train.observe.collective_log import BETWEEN_TWO, Entry, Group, RankLog, read_logs
from meshwright.train.observe.stacks import Stack, in_words, outliers, stacks_of

# Operations to which every rank of the group brings as many bytes.
_EVEN = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquest:
    """`suspects` kept others waiting and waited for nobody themselves; `sentences` say so, and how it is known, or who
    did not come out of what all had entered while others went on."""

    suspects: tuple[int, ...]
    sentences: tuple[str, ...]


def inquest(run_dir: Path) -> Inquest:
    """Of a run that has ended, or hangs; nothing where it left no rank in a collective."""
    return judge(read_logs(run_dir), stacks_of(run_dir))


def judge(logs: Mapping[int, RankLog], stacks: Mapping[int, Stack]) -> Inquest:
    """What the logs of all ranks say together: who called another collective, who did not come, who stood where."""
    waiting = {rank: entry for rank, log in logs.items() if (entry := held_in(log)) is not None}
    apart = _apart(logs)
    if not waiting and not apart:
        return Inquest(suspects=(), sentences=())
    behind: dict[int, list[int]] = defaultdict(list)
    missing = {rank: _missing(rank, entry, logs) for rank, entry in waiting.items()}
    for rank, others in missing.items():
        for other in others:
            behind[other].append(rank)
    suspects = tuple(sorted(rank for rank in behind if rank not in waiting))
    named = suspects or tuple(sorted(rank for rank in behind if not missing[rank]))
    said = [*apart, *(_waited_for(rank, behind[rank], waiting, logs.get(rank)) for rank in named[:MOST_NAMED])]
    if not named and not apart and waiting:
        said.append(_none_behind(waiting))
    strange = [rank for rank in named if rank in stacks] if named else outliers(stacks)
    said += [_stood_in(rank, stacks[rank]) for rank in strange[:MOST_NAMED]]
    return Inquest(suspects=suspects, sentences=tuple(said))


def stood_in(run_dir: Path, ranks: Sequence[int]) -> tuple[str, ...]:
    """Where those of the `ranks` stood that left a stack."""
    stacks = stacks_of(run_dir)
    return tuple(_stood_in(rank, stacks[rank]) for rank in ranks[:MOST_NAMED] if rank in stacks)


def _stood_in(rank: int, stack: Stack) -> str:
    return f"{ranks_in_words((rank,))} stood in {in_words(stack)}"


def held_in(log: RankLog) -> Entry | None:
    """The newest collective that holds a rank; others that it began may still be on their way."""
    return next((entry for entry in reversed(log.entries) if entry.holds), None)


def _missing(rank: int, entry: Entry, logs: Mapping[int, RankLog]) -> list[int]:
    """Whom `rank` waits for in `entry`: those that had not entered it, or the other end of a send or receive."""
    if entry.operation in BETWEEN_TWO:
        return [entry.peer] if entry.peer is not None else []
    found = []
    for other in entry.group.ranks:
        newest = _newest(logs[other], entry.group) if other in logs else None
        if other != rank and (newest is None or newest.sequence < entry.sequence):
            found.append(other)
    return found


def _newest(log: RankLog, group: Group) -> Entry | None:
    """The last collective of a group that a rank entered."""
    return next((entry for entry in reversed(log.entries) if _is_of(entry, group)), None)


def _is_of(entry: Entry, group: Group) -> bool:
    return entry.group.name == group.name and entry.operation not in BETWEEN_TWO


def _apart(logs: Mapping[int, RankLog]) -> list[str]:
    """The first collective of each group that its ranks did not call alike: a fault of the program, of no machine."""
    groups = {entry.group.name: entry.group for log in logs.values() for entry in log.entries}
    said = []
    for group in groups.values():
        calls = {rank: _calls(logs[rank], group) for rank in group.ranks if rank in logs}
        shared = set.intersection(*map(set, calls.values())) if calls else set()
        for sequence in sorted(shared):
            kinds: dict[tuple[str, int], list[int]] = defaultdict(list)
            for rank, entries in calls.items():
                entry = entries[sequence]
                kinds[entry.operation, entry.bytes if entry.operation in _EVEN else 0].append(rank)
            if len(kinds) > 1:
                step = max(entries[sequence].step for entries in calls.values())
                told = " where ".join(
                    f"{ranks_in_words(ranks)} entered {operation}{f' of {format_bytes(size)}' if size else ''}"
                    for (operation, size), ranks in kinds.items()
                )
                said.append(
                    f"desynchronised in collective {sequence:,} of {ranks_in_words(group.ranks)}, step {step}: {told}"
                )
                break
    return said


def _calls(log: RankLog, group: Group) -> dict[int, Entry]:
    return {entry.sequence: entry for entry in log.entries if _is_of(entry, group)}


def _waited_for(rank: int, victims: Sequence[int], waiting: Mapping[int, Entry], log: RankLog | None) -> str:
    first = waiting[min(victims)]
    if first.operation in BETWEEN_TWO:
        what = f"{ranks_in_words(sorted(victims))} waited for it in a {first.operation} of {format_bytes(first.bytes)}"
    else:
        told = (
            f"{first.operation} {first.sequence:,} of {ranks_in_words(first.group.ranks)} ({format_bytes(first.bytes)})"
        )
        what = f"{ranks_in_words(sorted(victims))} waited for it in {told}"
    return f"{ranks_in_words((rank,))} kept others waiting in step {first.step}: {what}{_last_of(log)}"


def _last_of(log: RankLog | None) -> str:
    """What a rank did last: it died, or stands, in a collective that others came out of, or after one."""
    if log is None or not log.entries:
        return ""
    held = held_in(log)
    if held is not None:
        return f"; it did not come out of {held.operation} {held.sequence:,}"
    last = log.entries[-1]
    return f"; it came out of {last.operation} {last.sequence:,} last" if last.left else ""


def _none_behind(waiting: Mapping[int, Entry]) -> str:
    """All had entered what they wait in: the network between them, or a ring of ranks that wait for each other."""
    alike: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for rank, entry in sorted(waiting.items()):
        alike[entry.operation, entry.sequence, entry.group.name].append(rank)
    told = [
        f"{ranks_in_words(ranks)} did not come out of {name} {number:,}" for (name, number, _), ranks in alike.items()
    ]
    return f"every rank had entered what it waited in: {'; '.join(told[:MOST_NAMED])}"
