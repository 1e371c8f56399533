"""A schedule's table as a plan carries it: one line a pipeline rank, `0F*3 (0F 0B)*5 0B*3`.

`0F` is a forward of stage 0, `0B` a whole backward, `0I` and `0W` its two halves; `*3` does a word, or the words in
brackets, three times. Which microbatch a pass is of goes without saying: forwards and backwards of a stage take them in
order, and a W is of the oldest I that waits for one. No order of microbatches is faster than this one, for they are
alike: the k-th pass of a stage never waits for more than the k-th of another. Those with paths of their own are not,
and their passes say which they are: `0F3`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from meshwright.schedule import paths as path_lines
from meshwright.schedule.check import check
from meshwright.schedule.paths import Paths
from meshwright.schedule.table import Action, Table, Work
from meshwright.spec.errors import ConfigError, Problem

MOST_PASSES = 1_000_000  # of a row
_LONGEST = 24  # words of a run that is told once
_TOKEN = re.compile(r"\s*(?:(?P<open>\()|(?:(?P<word>\d{1,6}[FBIW]\d{0,6})|\))(?:\*(?P<times>\d{1,7}))?(?=[\s()]|$))")
_WORD = re.compile(r"(\d+)([FBIW])(\d*)")
_NUMBERED = re.compile(r"[FBIW]\d")
_FIX = "write passes as 0F, 0B, 0I or 0W and runs of them as 0F*3 or (0F 0B)*5"
Words = tuple[str, ...]


def write(table: Table) -> tuple[str, ...]:
    """The lines of a table that takes the microbatches of every stage in order; `read` of them gives it back."""
    return tuple(_told(tuple(f"{action.stage}{action.work.value}" for action in row)) for row in table)


def write_numbered(table: Table) -> tuple[str, ...]:
    """The lines of a table whose passes say which microbatch they are of; `read` of them gives it back."""
    return tuple(" ".join(map(str, row)) for row in table)


def read(lines: Sequence[str]) -> Table:
    """The table that lines tell, legal or not. Raises ConfigError with every line that tells none."""
    return _read(tuple(lines))


def legal(lines: Sequence[str], *, pipeline: int, chunks: int, microbatches: int, paths: Sequence[str] = ()) -> Table:
    """The table that lines tell of so many ranks, stages and microbatches. Raises ConfigError with all that is wrong
    with it: what cannot be read, passes that are missing or too many, stages that are on another rank, passes that
    come before what they need, and ranks that wait for each other for ever. With `paths` passes are those on them.
    """
    return _legal(tuple(lines), pipeline, chunks, microbatches, tuple(paths))


def first_microbatches(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """The lines without passes of later microbatches, for none of which the first ones wait."""
    return _of(lines, lambda microbatch: microbatch if microbatch < count else None)


def outer_microbatches(lines: Sequence[str], count: int, *, among: int) -> tuple[str, ...]:
    """The lines with passes of `count` microbatches `among` so many, the first half and the last, which are numbered on
    from the first: no microbatch waits for another."""
    first, gone = (count + 1) // 2, among - count

    def number(microbatch: int) -> int | None:
        if microbatch < first:
            return microbatch
        return microbatch - gone if microbatch >= first + gone else None

    return _of(lines, number)


def _of(lines: Sequence[str], number: Callable[[int], int | None]) -> tuple[str, ...]:
    """The lines with passes of those microbatches that have a `number`."""
    rows = tuple(
        tuple(replace(action, microbatch=told) for action in row if (told := number(action.microbatch)) is not None)
        for row in read(lines)
    )
    return write_numbered(rows) if any(_NUMBERED.search(line) for line in lines) else write(rows)


def splits(lines: Sequence[str]) -> bool:
    """Whether some backwards have two halves."""
    return any(Work.INPUT.value in line for line in lines)


def placement(lines: Sequence[str]) -> tuple[int, ...]:
    """The rank of every stage, by number, that the lines tell of."""
    ranks = {action.stage: rank for rank, row in enumerate(read(lines)) for action in row}
    return tuple(ranks[stage] for stage in sorted(ranks))


@lru_cache(maxsize=64)
def _read(lines: tuple[str, ...]) -> Table:
    rows, problems = [], []
    for rank, line in enumerate(lines):
        try:
            rows.append(_numbered(_words(line)))
        except ValueError as error:
            problems.append(Problem(what=str(error), where=f"schedule.table[{rank}]", fix=_FIX))
    if problems:
        raise ConfigError(problems)
    return tuple(rows)


@lru_cache(maxsize=64)
def _legal(lines: tuple[str, ...], pipeline: int, chunks: int, microbatches: int, told: tuple[str, ...]) -> Table:
    table, stages = read(lines), pipeline * chunks
    problems = list(path_lines.problems(told, stages=stages, microbatches=microbatches))
    paths = () if problems else path_lines.read(told)
    problems += _misshapen(table, pipeline=pipeline, chunks=chunks)
    problems += [] if told else _uncounted(table, microbatches=microbatches)
    problems += _out_of_turn(table, stages=stages, paths=paths)
    if not problems:
        found = check(table, stages=stages, placement=placement(lines), paths=paths)
        problems = [
            Problem(what=each.what, where=f"schedule.{each.where}", why=each.why, fix=each.fix) for each in found
        ]
    if problems:
        raise ConfigError(problems)
    return table


def _misshapen(table: Table, *, pipeline: int, chunks: int) -> Iterator[Problem]:
    """Another number of ranks, more stages than passes, and stages that are not down the ranks in turn, nor, of two a
    rank, up again."""
    where = "schedule.table"
    if len(table) != pipeline:
        yield Problem(
            what=f"{_number(len(table), 'row')} for {pipeline} pipeline ranks", where=where, fix="write one row a rank"
        )
        return
    number, passes = pipeline * chunks, sum(map(len, table))
    if number > passes:
        what = f"{passes:,} passes for {number:,} stages"
        yield Problem(what=what, where=where, fix="write all passes of every stage, or choose fewer chunks")
        return
    told = [{action.stage for action in row} for row in table]
    stages = range(number)
    loop = [{stage for stage in stages if stage % pipeline == rank} for rank in range(pipeline)]
    bend = [{rank, number - 1 - rank} for rank in range(pipeline)]
    if told == loop or (chunks == 2 and told == bend):
        return
    for rank, (own, due) in enumerate(zip(told, loop, strict=True)):
        if own == due or (chunks == 2 and own == bend[rank] and told[0] == bend[0]):
            continue
        fix = f"rank {rank} holds {_listed(due)}" + (f", or {_listed(bend[rank])} of a V" if chunks == 2 else "")
        what = f"passes of {_listed(own)} on rank {rank} of {pipeline}, with {_number(chunks, 'stage')} a rank"
        yield Problem(what=what, where=f"{where}[{rank}]", fix=fix)


def _uncounted(table: Table, *, microbatches: int) -> Iterator[Problem]:
    """Stages that do not go forward and backward once for every microbatch."""
    for rank, row in enumerate(table):
        counts = Counter((action.stage, action.work) for action in row)
        for stage in sorted({stage for stage, _ in counts}):
            forward, whole, half, late = (counts[stage, work] for work in Work)
            if forward != microbatches or whole + half != microbatches or late != half:
                passes = [f"{counts[stage, work]} {work.value}" for work in Work if counts[stage, work]]
                told = " and ".join([", ".join(passes[:-1]), passes[-1]] if len(passes) > 1 else passes)
                what = f"stage {stage}: {told} for {microbatches} microbatches"
                fix = f"write {microbatches} F, as many B and I together, and a W for every I"
                yield Problem(what=what, where=f"schedule.table[{rank}]", fix=fix)


def _out_of_turn(table: Table, *, stages: int, paths: Paths) -> Iterator[Problem]:
    """Losses that are not formed in the order of microbatches, in which the runtime keeps them; and halves of backwards
    of microbatches with paths."""
    where = "schedule.table"
    row = next((row for row in table if any(action.stage == stages - 1 for action in row)), ())
    order = [each.microbatch for each in row if each.stage == stages - 1 and each.work is Work.FORWARD]
    if order != sorted(order):
        fix = "number microbatches in the order in which they come to the head"
        yield Problem(what="the last stage takes microbatches out of order", where=where, fix=fix)
    if paths and any(action.work in (Work.INPUT, Work.WEIGHT) for row in table for action in row):
        yield Problem(what="halves of backwards of microbatches with paths", where=where, fix="write B")


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _listed(stages: set[int]) -> str:
    names = " and ".join(map(str, sorted(stages)))
    return f"stage{'s' if len(stages) > 1 else ''} {names}" if stages else "no stage"


def _words(line: str) -> Words:
    """The words of a line, as often as they are done. Raises ValueError where it is no line."""
    found: list[list[str]] = [[]]
    place = 0
    while line[place:].strip():
        token = _TOKEN.match(line, place)
        if token is None:
            raise ValueError(f"{line[place:].strip()[:20]!r} is no pass")
        place = token.end()
        times = int(token["times"] or 1)
        if token["open"]:
            found.append([])
            continue
        run = [token["word"]] if token["word"] else found.pop() if len(found) > 1 else []
        if not run or times < 1:
            raise ValueError(f"brackets of {line.strip()[:40]!r} do not match, or hold nothing")
        if len(run) * times + len(found[-1]) > MOST_PASSES:
            raise ValueError(f"more than {MOST_PASSES:,} passes")
        found[-1] += run * times
    if len(found) > 1:
        raise ValueError(f"a bracket of {line.strip()[:40]!r} is not closed")
    if not found[0]:
        raise ValueError("nothing is done")
    return tuple(found[0])


def _numbered(words: Words) -> tuple[Action, ...]:
    """The passes of words, each with its microbatch, by its number where it has one: more than there are of a W that
    no I is left for."""
    done: Counter[tuple[int, str]] = Counter()
    halves: dict[int, list[int]] = {}
    known = {word: _parts(word) for word in set(words)}
    row = []
    for stage, work, number in (known[word] for word in words):
        key = (stage, "F" if work is Work.FORWARD else "W" if work is Work.WEIGHT else "B")
        if work is Work.INPUT:
            halves.setdefault(stage, []).append(done[key])
        row.append((stage, work, done[key], number))
        done[key] += 1
    return tuple(
        Action(
            work=work,
            stage=stage,
            microbatch=_late(halves.get(stage, []) if work is Work.WEIGHT else [], index) if number is None else number,
        )
        for stage, work, index, number in row
    )


def _parts(word: str) -> tuple[int, Work, int | None]:
    """Stage and work of a word, and its microbatch where it says one."""
    match = _WORD.fullmatch(word)
    assert match is not None, f"{word} is a pass"
    return int(match[1]), Work(match[2]), int(match[3]) if match[3] else None


def _late(halves: list[int], index: int) -> int:
    return halves[index] if index < len(halves) else index


def _told(words: Words) -> str:
    """The words of a row with runs of them told once: at every place the run that saves most."""
    found, place = [], 0
    while place < len(words):
        length, times = max(
            ((size, _times(words, place, size)) for size in range(1, min(_LONGEST, len(words) - place) + 1)),
            key=lambda run: (run[0] * (run[1] - 1), -run[0]),
        )
        run = " ".join(words[place : place + length])
        found.append(run if times == 1 else f"{run}*{times}" if length == 1 else f"({run})*{times}")
        place += length * times
    return " ".join(found)


def _times(words: Words, place: int, length: int) -> int:
    """How often the words at a place come one after the other."""
    run, times = words[place : place + length], 1
    while words[place + times * length : place + (times + 1) * length] == run:
        times += 1
    return times
