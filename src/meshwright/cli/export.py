"""`meshwright export`: the plan as launch flags of another trainer, read back to see that they mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.export import Line


def export(
    design: Annotated[Path, typer.Argument(help="A design that plan wrote, or a run directory.")],
    to: Annotated[str, typer.Option("--to", "-t", help="torchtitan, megatron-lm (or megatron) or deepspeed.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the job file or launch script here.")] = None,
    check: Annotated[
        Path | None, typer.Option("--check", help="Write nothing: compare this file of the trainer with the plan.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Export a plan to another trainer: its flags, what they keep of the plan and what they lose."""
    import meshwright
    from meshwright.cli.output import note, print_json, tell, write
    from meshwright.export import Verdict

    if check is not None:
        lines = _checked(design, to, check, out=out)
        print_json(lines) if as_json else print("\n".join(_table(lines)))
        differing = [line.name for line in lines if line.verdict is Verdict.DIFFERS]
        if differing:
            tell(f"error: {check}: not the plan of {design}: {', '.join(differing)}")
            raise typer.Exit(2)
        return
    found = meshwright.export(design, to=to)
    if out is not None:
        write(out, found.text)
        note(f"{found.version}: written to {out}, and read back as the plan it was written from")
    if as_json:
        print_json(found)
        return
    print("\n".join([*_table(found.lines), *([] if out else ["", found.text.rstrip()])]))


def _checked(design: Path, to: str, file: Path, *, out: Path | None) -> tuple[Line, ...]:
    from meshwright import catalog
    from meshwright.catalog.documents import read_text
    from meshwright.export import check, peer_named
    from meshwright.spec.errors import ConfigError, Problem

    if out is not None:
        raise ConfigError(Problem(where="--check", what="--check writes nothing", fix="leave --out away"))
    peer = peer_named(to)
    text = read_text(file, form=f"a file that {peer.value} is started with")
    return check(catalog.load_design(design), text, to=peer, where=str(file))


def _table(lines: tuple[Line, ...]) -> list[str]:
    """A line for each, in columns: the verdict, what it is of, the plan's word and, where it is another, the peer's."""
    wide = max(len(line.name) for line in lines)
    return [
        f"{line.verdict.value:8}{line.name:{wide}}  {line.plan}"
        + ("" if line.plan == line.peer else f"  ->  {line.peer}")
        for line in lines
    ]
