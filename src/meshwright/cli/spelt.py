"""A console that shows what it is given and obeys nothing of it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from meshwright.spec.errors import spelt_out


class SpeltConsole(Console):
    """Control characters in texts, names of models from strangers' files for example, are spelt out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=spelt_out(segment.text))
