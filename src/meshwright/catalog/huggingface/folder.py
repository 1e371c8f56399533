"""A folder in the Hugging Face form: its config, which file holds which tensor, and whether they are the model's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from meshwright.catalog.huggingface.families import model_from_config
from meshwright.catalog.huggingface.header import Entry, read_header
from meshwright.catalog.huggingface.tensors import Table, tensors
from meshwright.catalog.model_ranges import checked_model
from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, MeshwrightError, Problem
from meshwright.spec.json_text import parse_json
from meshwright.spec.model import ModelSpec, language_model

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
READ_TYPES = ("F64", "F32", "F16", "BF16")
HEAD = "lm_head.weight"
MOST_TOLD = 20
CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor: the file that holds it, and where."""

    file: Path
    entry: Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder whose files were found sound. `tensors` are by the names of `table`, those left out not among them.

    `model` is what of it is trained here, `rest` what is stored of the others. `tied` is the name of the embedding's
    table and the head that is stored beside it though the config ties them; None where no head is.
    """

    path: Path
    config: Mapping[str, Any]
    model: ModelSpec
    table: Table
    tensors: Mapping[str, Stored]
    rest: Mapping[str, Stored]
    tied: tuple[str, Stored] | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types of the stored tensors, the commonest first."""
        counts: dict[str, int] = {}
        for stored in self.tensors.values():
            counts[stored.entry.dtype] = counts.get(stored.entry.dtype, 0) + 1
        return tuple(sorted(counts, key=lambda dtype: -counts[dtype]))


def open_folder(path: Path) -> Folder:
    """The folder, read by its headers alone.

    Raises ConfigError with everything that is wrong: files that are not there, tensors that are missing or unknown
    (with the nearest name), of another shape or type than the config says, and arithmetic that is not ours.
    """
    config = read_config(path)
    title = path.resolve().name.lower()
    model = language_model(checked_model(model_from_config(config, name=title, source=CONFIG)))
    table = tensors(config, model)
    problems: list[Problem] = []
    owners = _owners(path)
    found = dict(_stored(path, owners, problems))
    named = {_full_name(name, table): stored for name, stored in found.items()}
    # What a file held that cannot be read is not missing: the file is told, and would be told for each tensor.
    unread = {_full_name(name, table) for name, file in owners.items() if str(path / file) in _places(problems)}
    if owners or not problems:
        problems += _mismatches(path, named, table, unread=unread)
    if problems:
        raise ConfigError(_few(problems))
    kept = {name: named[name] for name in table.theirs}
    rest = {name: stored for name, stored in named.items() if table.is_rest(name)}
    return Folder(
        path=path,
        config=config,
        model=model,
        table=table,
        tensors=MappingProxyType(kept),
        rest=rest,
        tied=_tied(named, table, model),
    )


def check_tied(folder: Folder) -> None:
    """A stored head that the config ties to the embedding is that table, byte by byte. Raises ConfigError."""
    if folder.tied is None:
        return
    name, head = folder.tied
    table = folder.tensors[name]
    same = (head.entry.dtype, head.entry.shape) == (table.entry.dtype, table.entry.shape)
    if same and all(one == other for one, other in zip(_bytes(head), _bytes(table), strict=True)):
        return
    why = "config.json ties them (tie_word_embeddings), so one of the two would be lost"
    fix = f"set tie_word_embeddings to false to keep both, or remove {HEAD} to tie them"
    raise ConfigError(Problem(what=f"{HEAD} is not {name}", where=str(head.file), why=why, fix=fix))


def _tied(named: Mapping[str, Stored], table: Table, model: ModelSpec) -> tuple[str, Stored] | None:
    head = next((name for name in named if name.split(".")[-2:] == HEAD.split(".")), None)
    if not model.head.tied or head is None:
        return None
    return table.of_ours["embedding.tokens.weight"][0].theirs, named[head]


def _bytes(stored: Stored) -> Iterator[bytes]:
    with stored.file.open("rb") as file:
        file.seek(stored.entry.start)
        for start in range(stored.entry.start, stored.entry.stop, CHUNK_BYTES):
            yield file.read(min(CHUNK_BYTES, stored.entry.stop - start))


def read_config(path: Path) -> Mapping[str, Any]:
    """config.json of the folder. Raises ConfigError when there is none."""
    file = path / CONFIG
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        fix = "name a folder with config.json and .safetensors files"
        raise ConfigError(
            Problem(what="not a Hugging Face folder", where=str(path), why="no config.json", fix=fix)
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(what="cannot be read", where=str(file), why=str(error))) from error
    if not isinstance(config, dict):
        raise ConfigError(Problem(what="is not a table", where=str(file)))
    return config


def _places(problems: Iterable[Problem]) -> set[str]:
    return {problem.where for problem in problems}


def _stored(path: Path, owners: Mapping[str, str], problems: list[Problem]) -> Iterator[tuple[str, Stored]]:
    """Every tensor of every file; what is wrong with files is added to `problems`."""
    files = sorted(set(owners.values())) if owners else [SINGLE]
    for name in files:
        try:
            entries = read_header(path / name)
        except MeshwrightError as error:
            problems += error.problems
            continue
        for tensor, entry in entries.items():
            if not owners or owners.get(tensor) == name:
                yield tensor, Stored(file=path / name, entry=entry)


def _owners(path: Path) -> Mapping[str, str]:
    """Which file holds which tensor, by the index; empty where one file holds all. Raises ConfigError."""
    index = path / INDEX
    if not index.is_file():
        if (path / SINGLE).is_file():
            return {}
        others = sorted(entry.name for entry in path.glob("*.bin"))
        why = f"it holds {others[0]}, which can run code when it is read" if others else f"neither {SINGLE} nor {INDEX}"
        fix = "save the model as safetensors"
        raise ConfigError(Problem(what="the folder has no safetensors files", where=str(path), why=why, fix=fix))
    try:
        owners = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        plain = all(isinstance(name, str) and Path(name).name == name for name in owners.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(Problem(what="is not an index", where=str(index), why=str(error))) from error
    if not plain:
        raise ConfigError(Problem(what="is not an index", where=str(index), why="it names files outside the folder"))
    return dict(owners)


def _full_name(name: str, table: Table) -> str:
    """The name in the table: folders saved without the outer class leave its prefix out."""
    full = f"{table.prefix}{name}"
    return full if name not in table.theirs and full in table.theirs else name


def _mismatches(path: Path, found: Mapping[str, Stored], table: Table, *, unread: Collection[str]) -> Iterator[Problem]:
    """Tensors that the model has and the folder lacks, but for `unread`, the other way round, and those of other shapes
    or types.
    """
    told = 0
    unknown = [name for name in found if not (name in table.theirs or table.leaves_out(name) or table.is_rest(name))]
    for name, shape in table.theirs.items():
        if name in unread:
            continue
        if name not in found:
            near = nearest(name, unknown) if unknown and told < MOST_TOLD else ""
            told += 1
            yield Problem(what=f"{name} is missing", where=str(path), fix=near if near.startswith("did you") else "")
            continue
        entry = found[name].entry
        if entry.shape != shape:
            what = f"{name} is {entry.shape} and config.json makes it {shape}"
            yield Problem(what=what, where=str(found[name].file))
        if entry.dtype not in READ_TYPES:
            fix = f"convert a folder of {', '.join(READ_TYPES)}"
            yield Problem(what=f"{name} is of type {entry.dtype}", where=str(found[name].file), fix=fix)
    missing = [known for known in table.theirs if known not in found]
    for index, name in enumerate(unknown):
        near = nearest(name, missing) if index < MOST_TOLD else ""
        fix = near if near.startswith("did you") else "config.json is of another model, or remove the tensor"
        yield Problem(what=f"{name} is no tensor of the model", where=str(found[name].file), fix=fix)


def _few(problems: list[Problem]) -> list[Problem]:
    """The first of many; the last line counts the rest."""
    if len(problems) <= MOST_TOLD:
        return problems
    rest = len(problems) - MOST_TOLD
    return [*problems[:MOST_TOLD], Problem(what=f"and {rest:,} more like these", where=problems[0].where)]
