"""The file of published runs: one row a run, as its source printed it; blank where the source does not say."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from meshwright.replay.columns import faults, values
from meshwright.replay.flops import step_flops, uncounted
from meshwright.replay.words import yes_or_no
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.paths import expanded

NEEDED = ("id", "source_id", "gpu", "n_gpus", "framework", "gbs", "seq", "status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a sequence that a model, or its encoder, reads; those of a decoder beside it where they are said."""

    encoder: int
    decoder: int | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row. `columns` are texts by name; numbers are None where a cell is blank or cannot be read.

    `torn` rows have more or fewer fields than the header. `faults` says of every cell that cannot be read why; such
    a row is not predicted.
    """

    line: int
    columns: Mapping[str, str]
    torn: bool = False

    def text(self, name: str) -> str:
        return self.columns.get(name, "")

    @cached_property
    def faults(self) -> tuple[str, ...]:
        return ("more or fewer fields than the header",) if self.torn else tuple(faults(self.columns))

    def is_yes(self, name: str) -> bool | None:
        """Of a cell of yes or no; None where it is blank or cannot be read."""
        return yes_or_no(name, self.text(name))

    def numbers(self, name: str) -> tuple[float, ...]:
        """Every number of a cell that may hold several; none where it is blank or cannot be read."""
        text = self.text(name)
        if not text:
            return ()
        try:
            found = values(name, text)
        except ValueError:
            return ()
        return found if all(map(math.isfinite, found)) else ()

    def number(self, name: str) -> float | None:
        """The number of a cell; of several the sum: devices of all kinds, tokens of an encoder and a decoder."""
        found = self.numbers(name)
        return sum(found) if found else None

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return int(value) if value is not None and value == int(value) else None

    @property
    def id(self) -> str:
        return self.text("id")

    @property
    def source(self) -> str:
        return self.text("source_id")

    @property
    def group(self) -> str:
        """Rows of one group may be compared; a row without one is alone."""
        return self.text("group") or f"alone in line {self.line}"

    @property
    def ranks_strategies(self) -> bool:
        return bool(self.text("group")) and "strategy" in self.text("rank_kind")

    @property
    def stack(self) -> tuple[str, str, str]:
        """What one efficiency factor may stand for: software, device, precision."""
        return self.text("framework"), self.text("gpu"), self.text("precision")

    @property
    def ran(self) -> bool:
        return self.text("status").lower() == "ok"

    @property
    def died(self) -> bool:
        return self.text("status").lower() == "oom"

    @property
    def noise(self) -> float:
        """Share by which two readings of one run may differ; two percent where the source gives none."""
        printed = self.number("noise_pct")
        return (2.0 if printed is None else printed) / 100.0

    @property
    def batch(self) -> int | None:
        """Sequences of one step: as printed, else from microbatches, accumulation and data parallel ranks."""
        ranks = (self.whole(name) or 1 for name in ("tp", "pp", "cp"))
        data = self.whole("dp") or (self.whole("n_gpus") or 0) // math.prod(ranks)
        steps = self.whole("ga") or int(self.steps_once)
        return self.whole("gbs") or (self.whole("mbs") or 0) * steps * data or None

    @property
    def steps_once(self) -> bool:
        """Whether one microbatch a step has to be assumed: neither a batch nor accumulation is printed, and there is no
        pipeline, which one would leave empty."""
        return not self.text("gbs") and not self.text("ga") and (self.whole("pp") or 1) == 1

    @property
    def lengths(self) -> Lengths:
        """Tokens of a sequence: `512`, `512+114` or `extra` with `decoder_seq=114`."""
        found = self.numbers("seq")
        told = re.search(
            r"(?:decoder|dec|target|tgt)[ _](?:seq(?:uence)?|len(?:gth)?)\w*\s*[=:]?\s*([1-9]\d{0,7})\b",
            self.text("extra"),
        )
        decoder = int(found[1]) if len(found) > 1 else int(told[1]) if told else None
        return Lengths(encoder=int(found[0]) if found else 0, decoder=decoder or None)

    @cached_property
    def tokens(self) -> float | None:
        """Tokens of one step: an encoder's and a decoder's where both lengths are said."""
        batch, lengths = self.batch, self.lengths
        both = lengths.encoder + (lengths.decoder or 0)
        return batch * both if batch and both else None

    @cached_property
    def seconds(self) -> float | None:
        """Seconds of one step: as printed, else from tokens a second, else from FLOP/s as the source counts them; None
        where a cell cannot be read."""
        if not self.ran or self.faults:
            return None
        if printed := self.number("iter_s"):
            return printed
        rate, devices = self.number("tokens_s_gpu"), self.number("n_gpus")
        if rate and devices and self.tokens:
            return self.tokens / (rate * devices)
        flops, achieved = step_flops(self), self._achieved
        return flops / (achieved * devices) if flops and achieved and devices else None

    @property
    def uncounted(self) -> str:
        """Why FLOP/s that are printed give no seconds, in words; nothing where they do or none are printed."""
        return uncounted(self) if self._achieved else ""

    @property
    def _achieved(self) -> float | None:
        """FLOP/s of one device: as printed, else from their share of the printed peak."""
        if printed := self.number("tflops_gpu"):
            return printed * 1e12
        share, peak = self.number("mfu_pct"), self.number("peak_tflops")
        return share / 100.0 * peak * 1e12 if share and peak else None


def read_runs(path: Path | str) -> tuple[Run, ...]:
    """Every row of `path`. Raises ConfigError when it is no such table."""
    place = expanded(path)
    try:
        if place.is_char_device():
            raise OSError("it is a device that has no end")
        with place.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, restkey=_TOO_MANY, restval=None)
            columns = table.fieldnames or ()
            twice = sorted({name for name in columns if columns.count(name) > 1})
            if twice:
                why = f"columns come twice: {', '.join(twice)}"
                raise ConfigError(Problem(what="not a table of published runs", where=str(place), why=why))
            missing = [name for name in NEEDED if name not in columns]
            if missing:
                why = f"it lacks the columns {', '.join(missing)}"
                raise ConfigError(Problem(what="not a table of published runs", where=str(place), why=why, fix=_FORM))
            rows = tuple(_run(row, table.line_num) for row in table)
    except UnicodeDecodeError:
        why = "it is not text in UTF-8"
        raise ConfigError(Problem(what="this table cannot be read", where=str(place), why=why)) from None
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(Problem(what="this table cannot be read", where=str(place), why=reason)) from None
    if not rows:
        raise ConfigError(Problem(what="the table has no rows", where=str(place)))
    return rows


def _run(row: Mapping[str | None, str | list[str] | None], line: int) -> Run:
    columns = {str(name): value.strip() for name, value in row.items() if isinstance(value, str)}
    return Run(line=line, columns=columns, torn=len(columns) != len(row))


_TOO_MANY = "too many fields"
_FORM = "columns in the first line, separated by commas; docs/validate.md names them"
