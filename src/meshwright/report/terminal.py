"""Decisions and reports on the terminal, from 60 columns up; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from meshwright.cost.stacks import OWN
from meshwright.export import Peer, holder
from meshwright.report.rows import row_words
from meshwright.report.terminal_parts import WIDE, bullets, plain, table, title
from meshwright.report.terminal_step import WaterfallView
from meshwright.report.waterfall import waterfall
from meshwright.search import Rejection
from meshwright.search.candidate import Candidate, Decision
from meshwright.spec.job import Automatic, Objective, Switch
from meshwright.spec.outlook import Outlook
from meshwright.spec.report import MemoryPart, Report, StageMemory
from meshwright.spec.units import counted, format_bytes, format_count, format_interval, format_percent, format_seconds

GIB = 2.0**30
SHOWN_RANKS = 8
NARROWEST = 50  # columns, under which all figures of a plan stand below each other
NARROW = 80  # columns, under which the figures of a plan stand in two columns beside its step
ALIKE = 0.02
SURE = 0.9  # to fit: what is less likely to is told in the headline


@dataclass(frozen=True, slots=True)
class DecisionView:
    """A decision as a page of the terminal: ranked plans, the best plan's step and memory, why, what was rejected."""

    decision: Decision

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        value, width = self.decision, options.max_width
        yield heading(value)
        if value.predicts_only:
            yield title("predicts only: this runtime cannot train the plan yet")
            yield from bullets(str(problem) for problem in value.predicts_only)
            yield Text()
        yield ranked(value.ranked, width=width, objective=value.design.job.objective)
        if value.ordered_by:
            yield plain(f"Ranked by {value.ordered_by}.{_shortest(value)}{_alike_words(value)}", style="dim")
        yield from report_tables(value.report)
        yield title("why")
        yield from bullets(value.why)
        if value.rejected:
            yield title("rejected, by rule")
            yield rejected(value.rejected)


def decision(value: Decision) -> DecisionView:
    return DecisionView(value)


def heading(value: Decision) -> Text:
    job, plan = value.design.job, value.design.plan
    devices = counted(value.design.cluster.num_devices, "device")
    lines = Text()
    lines.append(plain(f"{value.design.model.name} on {value.design.cluster.name}", style="bold"))
    lines.append(
        f"\n{format_count(value.design.model.parameters)} parameters, {devices}, "
        f"{format_count(job.batch_tokens)} tokens a step in sequences of {job.sequence_length:,}, "
        f"to {format_count(job.total_tokens)} tokens in {plan.first_group.precision.value}"
    )
    lines.append(
        f"\n{value.considered:,} legal plans searched in {format_seconds(value.seconds)}; {_priced(value)}. "
        f"Best by {job.objective.value}:"
    )
    lines.append(plain(f"\n{plan.describe()}\n", style="bold green"))
    if line := chance_words(value.report):
        lines.append(plain(f"{line}\n", style="bold yellow"))
    for line in job_words(value):
        lines.append(plain(f"{line}\n", style="dim"))
    return lines


def chance_words(value: Report) -> str:
    """How likely a plan fits in memory, where that is not nearly sure; else nothing."""
    chance = value.fit_probability
    return "" if chance is None or chance >= SURE else f"it fits in memory with {format_percent(chance)}"


def job_words(value: Decision) -> tuple[str, ...]:
    """What of the job was asked for and what are defaults, where that is known; the trainer plans are held to, and what
    they are priced as."""
    parts = []
    for name, figures in (("asked", value.asked), ("defaults", value.defaults)):
        told = ", ".join(f"{field} {figure}" for field, figure in figures.items())
        parts += [f"{name}: {told}"] if told else []
    change = " (change one with --set)" if value.defaults else ""
    lines = [f"{'; '.join(parts)}{change}"] if parts else []
    lines += [f"only plans that {value.trainer} has words for"] if value.trainer else []
    return (*lines, *_software_words(value))


def _software_words(value: Decision) -> tuple[str, ...]:
    """What software the plans are priced as, and why that."""
    name = value.report.software
    if not name:
        return ()
    job = value.design.job
    if job.software != Automatic.AUTO:
        own = holder(value.trainer).stack(job) if value.trainer else ""
        if name == own:
            can = value.trainer == Peer.TORCHTITAN and job.compile is not Switch.ON
            plain = "; as its file says, nothing is compiled (--set compile=on compiles model and loss)" if can else ""
            return (f"priced as {name}, the software of {value.trainer}{plain}",)
        rest = f'; {value.trainer}\'s own is {own}, that of software = "auto"' if own else ""
        return (f"priced as {name}, the software that the job names{rest}",)
    return (f"priced as {name}, {'this runtime' if name == OWN else 'which runs on these devices'}",)


def ranked(candidates: Sequence[Candidate], *, width: int, objective: Objective = Objective.TIME) -> Table:
    """The ranked plans, two lines each with all that makes them differ; narrow terminals show figures in pairs.

    Beside the step stands the time that plans are ranked by, but where memory is asked for.
    """
    by_time = objective is not Objective.MEMORY
    names = ["step", *(["ranked by"] if by_time else []), "tokens/s", "MFU", "used GiB", "free", "bubble", "comm."]
    names += ["time", "cost"]
    if width < WIDE:
        step = "step\nranked by" if by_time else "step"
        names = [step, "tokens/s\nMFU", "GiB\nfree", "bubble\ncomm.", "time\ncost"]
    if width < NARROW:
        names = [step, "tokens/s\nMFU\ntime\ncost", "GiB\nfree\nbubble\ncomm."]
    if width < NARROWEST:
        names = ["\n".join(names)]
    rows = table(columns=[("", "right"), ("plan", "left"), *((name, "right") for name in names)])
    for place, (entry, words) in enumerate(
        zip(candidates, row_words([entry.plan for entry in candidates]), strict=True), 1
    ):
        step, *cells = _figures(entry)
        sure = [_expected(entry)] if by_time else []
        if width < WIDE:
            speed, mfu, used, free, bubble, comm, time, cost = cells
            pairs = (f"{speed}\n{mfu}", f"{used}\n{free}", f"{bubble}\n{comm}", f"{time}\n{cost}")
            speeds, room, shares, totals = pairs
            held = (f"{speeds}\n{totals}", f"{room}\n{shares}") if width < NARROW else pairs
            figures = ["\n".join([step, *sure]), *held]
            figures = ["\n".join(figures)] if width < NARROWEST else figures
            rows.add_row(str(place), words, *figures, style=_style(place))
        else:
            rows.add_row(str(place), words, step, *sure, *cells, style=_style(place))
    return rows


def _shortest(value: Decision) -> str:
    """Which plan has the shortest step, where time is asked for and that is not the first."""
    steps = [entry.step_seconds for entry in value.ranked]
    if value.design.job.objective is not Objective.TIME or not min(steps) < steps[0]:
        return ""
    return f" Plan {steps.index(min(steps)) + 1} has the shortest step of these, and less certainly."


def _alike_words(value: Decision) -> str:
    """That all plans show the same figures, where they do."""
    figures = {(_expected(entry), *_figures(entry)) for entry in value.ranked}
    if len(figures) > 1 or len(value.ranked) < 2:
        return ""
    return f" All {len(value.ranked)} show the same figures: what they differ in decides nothing here."


def _expected(entry: Candidate) -> str:
    return "-" if entry.expected_seconds is None else format_seconds(entry.expected_seconds)


def _figures(entry: Candidate) -> tuple[str, ...]:
    return (
        format_seconds(entry.step_seconds),
        format_count(entry.tokens_per_second),
        "N/A" if entry.mfu is None else format_percent(entry.mfu),
        _gib(entry.peak_bytes),
        _gib(entry.free_bytes),
        format_percent(entry.bubble_share),
        format_percent(entry.communication_share),
        format_seconds(entry.total_seconds),
        "-" if entry.total_cost is None else f"${format_count(entry.total_cost)}",
    )


def _style(place: int) -> str:
    return "green" if place == 1 else ""


def _gib(count: float) -> str:
    gib = count / GIB
    return f"{gib:.1f}" if abs(gib) >= 10 else f"{gib:.2f}"


def report_tables(value: Report) -> Iterable[RenderableType]:
    low, high = (value.step_seconds * bound for bound in value.error_band)
    band = f" (nine of ten: {format_interval(low, high)})" if high > low else ""
    yield title(f"step of the best plan: {format_seconds(value.step_seconds)}{band}")
    yield WaterfallView(waterfall(value))
    if value.bottleneck:
        yield plain(f"bottleneck: {value.bottleneck}")
    if value.outlook is not None:
        yield title(f"to {format_count(value.outlook.tokens)} tokens")
        yield outlook(value.outlook, price_per_hour=value.price_per_hour)
    chance = "" if value.fit_probability is None else f", fits with {format_percent(value.fit_probability)}"
    yield title(f"memory at the peak, GiB{chance}")
    yield memory(value.memory)


def _rent(price_per_hour: float | None) -> str:
    return "" if price_per_hour is None else f"; the devices are ${price_per_hour:,.2f} an hour"


def outlook(value: Outlook, *, price_per_hour: float | None = None) -> Table:
    """The whole run: its time with failures, its price and its energy, each with what it rests on."""
    rows = table(columns=[("whole run", "left"), ("", "right"), ("note", "left")])
    rows.add_row("time", format_seconds(value.seconds), value.assumed[0] if value.assumed else "")
    if value.goodput is not None and value.checkpoint_seconds is not None:
        failures = f"{format_count(value.failures or 0.0)} failures"
        rows.add_row(
            "goodput", format_percent(value.goodput), f"{failures}, {format_seconds(value.restart_seconds)} each"
        )
        rows.add_row("checkpoint every", format_seconds(value.checkpoint_seconds), checkpoint_words(value))
    if value.dollars is not None and value.dollars_per_billion is not None:
        each = f"${value.dollars_per_billion:,.2f} a billion tokens{_rent(price_per_hour)}"
        rows.add_row("cost", f"${format_count(value.dollars)}", each)
    else:
        rows.add_row("cost", "-", "no price is known: --set cluster.device.price_per_hour=2.5 gives that of a device")
    if value.kilowatt_hours is not None and value.kilowatt_hours_per_billion is not None:
        each = f"{value.kilowatt_hours_per_billion:,.1f} kWh a billion tokens; {value.assumed[-1]}"
        rows.add_row("energy", f"{value.kilowatt_hours:,.0f} kWh", each)
    return rows


def checkpoint_words(value: Outlook) -> str:
    """What a checkpoint is, what it stops, and when it is safe; that it comes too soon where it does."""
    size, stall = format_bytes(value.checkpoint_bytes), format_seconds(value.stall_seconds)
    written = format_seconds(value.write_seconds)
    if value.checkpoint_hurries:
        return f"{size}; too often: each takes {written} to write, and training waits for the one before"
    if value.stall_seconds < value.write_seconds:
        return f"{size}; each stops training for {stall}, to copy it to hosts and agree, and is safe after {written}"
    return f"{size}; each stops training for the {written} that it takes to write"


def memory(stages: Sequence[StageMemory]) -> Table:
    """Peak GiB by part, a column for each pipeline rank; alike neighbours share one, and of many the ends are shown."""
    shown = _merged(stages)
    parts = [part for part in MemoryPart if any(_gib(stage.parts.get(part, 0.0)) != "0.00" for _, stage in shown)]
    rows = table(columns=[("pipeline rank", "left"), *((label, "right") for label, _ in shown)])
    for part in parts:
        rows.add_row(part.value, *(_gib(stage.parts.get(part, 0.0)) for _, stage in shown))
    rows.add_section()
    rows.add_row("peak", *(_gib(stage.total) for _, stage in shown), style="bold")
    rows.add_row("has", *(_gib(stage.capacity) for _, stage in shown))
    free = [stage.capacity - stage.total for _, stage in shown]
    rows.add_row("free", *(_gib(room) for room in free), style="red" if min(free) < 0 else "")
    if any(stage.host for _, stage in shown):
        rows.add_row("on the host", *(_gib(stage.host) for _, stage in shown))
    return rows


def _merged(stages: Sequence[StageMemory]) -> list[tuple[str, StageMemory]]:
    """Runs of ranks whose parts differ by less than ALIKE of the peak, each told by its fullest."""
    runs: list[list[StageMemory]] = []
    for stage in stages:
        if runs and _alike(runs[-1][0], stage):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    rows = [
        (f"{run[0].rank}-{run[-1].rank}" if len(run) > 1 else str(run[0].rank), max(run, key=lambda one: one.total))
        for run in runs
    ]
    if len(rows) <= SHOWN_RANKS:
        return rows
    fullest = max(range(len(rows)), key=lambda index: rows[index][1].total)
    kept = sorted({0, 1, 2, fullest, len(rows) - 2, len(rows) - 1})
    return [rows[index] for index in kept]


def _alike(one: StageMemory, other: StageMemory) -> bool:
    names = {*one.parts, *other.parts}
    gap = max((abs(one.parts.get(name, 0.0) - other.parts.get(name, 0.0)) for name in names), default=0.0)
    return gap <= ALIKE * one.total and one.capacity == other.capacity


def rejected(entries: Sequence[Rejection]) -> Table:
    rows = table(columns=[("rule", "left"), ("refused", "right"), ("for example", "left")])
    for entry in entries:
        rows.add_row(entry.rule, f"{entry.count:,}", entry.example)
    return rows


def _priced(value: Decision) -> str:
    """`all were priced, 12 fit`, or how many were, the others being out of reach of the best."""
    if value.priced >= value.considered:
        return f"{value.fitting:,} fit"
    return f"{value.priced:,} that could be best were priced, {value.fitting:,} of them fit"
