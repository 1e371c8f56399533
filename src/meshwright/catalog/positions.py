"""Where each key of a TOML or JSON text stands, so that an error can name its line.

The text has been parsed already: these scanners only find lines and accept whatever the parser accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_KEY = re.compile(r"""[ \t]*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)[ \t]*(\.|)""")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"""+|\'\'\'.*?\'\'\'+|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)
_GAP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[^,\]}\n#]*")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]|[^\s"{}\[\],:]+')


def locate(lines: Mapping[str, int], path: str) -> int:
    """The line of `path`, or of the nearest table around it; 1 when nothing of it is in the text."""
    while path:
        if path in lines:
            return lines[path]
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return 1


def toml_lines(text: str) -> dict[str, int]:
    """Line of every key of a TOML text, by path: `data.sources[0].path` is where that `path =` stands."""
    return _Toml(text).scan()


def json_lines(text: str) -> dict[str, int]:
    """Line of every key and list item of a JSON text, by path."""
    lines: dict[str, int] = {}
    stack: list[tuple[str, int | None]] = []
    path, key_next, line, seen = "", False, 1, 0
    for token in _JSON_TOKEN.finditer(text):
        word, line, seen = token[0], line + text.count("\n", seen, token.start()), token.start()
        if stack and stack[-1][1] is not None and word not in "]},":
            path = f"{stack[-1][0]}[{stack[-1][1]}]"
            lines.setdefault(path, line)
        if word in "{[":
            stack.append((path, 0 if word == "[" else None))
            key_next = word == "{"
        elif word in "}]":
            path = stack.pop()[0] if stack else ""
            key_next = False
        elif word == ",":
            base, index = stack[-1]
            stack[-1] = (base, None if index is None else index + 1)
            key_next = index is None
        elif key_next:
            base = stack[-1][0]
            name = json.loads(word)
            path, key_next = (f"{base}.{name}" if base else name), False
            lines[path] = line
    return lines


class _Toml:
    """One pass over a TOML text; `at` is the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: dict[str, int] = {}
        self.arrays: dict[str, int] = {}

    def scan(self) -> dict[str, int]:
        table = ""
        while True:
            self._skip()
            if self.at >= len(self.text):
                return self.lines
            if self.text.startswith("[[", self.at):
                table = self._header(2)
            elif self.text[self.at] == "[":
                table = self._header(1)
            else:
                self._pair(table)

    def _header(self, brackets: int) -> str:
        line = self._line()
        self.at += brackets
        path = ""
        parts = self._keys()
        for index, part in enumerate(parts):
            path = f"{path}.{part}" if path else part
            self.lines.setdefault(path, line)
            if index < len(parts) - 1 and path in self.arrays:
                path = f"{path}[{self.arrays[path]}]"
        self.at += brackets
        if brackets == 2:
            self.arrays[path] = self.arrays.get(path, -1) + 1
            path = f"{path}[{self.arrays[path]}]"
        self.lines.setdefault(path, line)
        return path

    def _pair(self, table: str) -> None:
        line, path = self._line(), table
        for part in self._keys():
            path = f"{path}.{part}" if path else part
            self.lines.setdefault(path, line)
        self.at = self.text.index("=", self.at) + 1
        self._value(path)

    def _keys(self) -> list[str]:
        parts = []
        while match := _KEY.match(self.text, self.at):
            self.at = match.end()
            parts.append(match[1].strip("\"'"))
            if not match[2]:
                break
        return parts

    def _value(self, path: str) -> None:
        self._skip()
        if match := _STRING.match(self.text, self.at):
            self.at = match.end()
        elif self.text.startswith("[", self.at):
            self._list(path)
        elif self.text.startswith("{", self.at):
            self._inline(path)
        else:
            match = _BARE.match(self.text, self.at)
            self.at = match.end() if match else len(self.text)

    def _list(self, path: str) -> None:
        self.at += 1
        index = 0
        while True:
            self._skip()
            if self.at >= len(self.text) or self.text[self.at] == "]":
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
                index += 1
                continue
            self.lines.setdefault(f"{path}[{index}]", self._line())
            self._value(f"{path}[{index}]")

    def _inline(self, path: str) -> None:
        self.at += 1
        while True:
            self._skip()
            if self.at >= len(self.text) or self.text[self.at] == "}":
                self.at += 1
                return
            if self.text[self.at] == ",":
                self.at += 1
                continue
            self._pair(path)

    def _skip(self) -> None:
        match = _GAP.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1
