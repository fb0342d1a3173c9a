"""The training text: what the Python on this machine says about itself in English.

Docstrings, other long strings and blocks of comments of the standard library and of the packages that moe-cpu itself needs, pydoc's topics, and Debian's
copies of common licences where there are any. No text is kept in the repository; a run records what it read.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import multiprocessing
import platform
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

PACKAGES = {"numpy": "BSD-3-Clause", "torch": "BSD-3-Clause"}
LICENCES = Path("/usr/share/common-licenses")

# Tests say little in English; the others are the standard library's guests or hold tables.
_SKIPPED = {"test", "tests", "testing", "site-packages", "dist-packages", "_vendor", "encodings", "ensurepip"}
# Shorter strings are labels and messages.
_FEWEST_WORDS = 8
# Prose is nearly all letters and spaces; below that it is tables, formats and encoded data.
_FEWEST_LETTERS = 0.75
# One document in this many is held out.
_HELD_OUT = 20


class Document(NamedTuple):
    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """By a hash of its name, so that a document is on the same side on every machine."""
        return hashlib.sha256(self.name.encode()).digest()[0] % _HELD_OUT == 0


class Corpus(NamedTuple):
    """`sources` says for each source its version, licence, number of documents, bytes and the sha256 of all of them."""

    training: list[Document]
    held_out: list[Document]
    sources: list[dict[str, Any]]


def collect(limit: int | None = None) -> Corpus:
    """All documents in the order of their names, without repetitions; the first `limit` bytes of each source only."""
    training: list[Document] = []
    held_out: list[Document] = []
    sources = []
    seen: set[bytes] = set()
    for source, version, licence, documents in _sources():
        digest, size, count = hashlib.sha256(), 0, 0
        for document in documents:
            fresh = document._replace(text=_without_repetitions(document.text, seen))
            data = fresh.text.encode()
            if not data:
                continue
            (held_out if fresh.held_out else training).append(fresh)
            digest.update(data)
            size, count = size + len(data), count + 1
            if limit is not None and size >= limit:
                break
        sources.append(
            {"source": source, "version": version, "licence": licence, "documents": count, "bytes": size, "sha256": digest.hexdigest()}
        )  # fmt: skip
    return Corpus(training, held_out, sources)


def _sources() -> Iterator[tuple[str, str, str, Iterator[Document]]]:
    python = platform.python_version()
    yield "standard library", python, "PSF-2.0", _from_files("python", Path(sysconfig.get_path("stdlib")))
    yield "pydoc topics", python, "PSF-2.0", _topics()
    if LICENCES.is_dir():
        yield "common licences", "Debian", "each its own: copying allowed", _licences()
    for package, licence in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent
            yield package, importlib.metadata.version(package), licence, _from_files(package, root)


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document("pydoc topics", f"topic {name}", topics[name])


def _licences() -> Iterator[Document]:
    for path in sorted(LICENCES.iterdir()):
        if not path.is_symlink():
            yield Document("common licences", f"licence {path.name}", path.read_text(errors="ignore"))


def _from_files(source: str, root: Path) -> Iterator[Document]:
    paths = [p for p in sorted(root.rglob("*.py")) if not _SKIPPED & set(p.relative_to(root).parts)]
    # Forked: a fresh process would load torch again before it reads a line. What runs there is plain Python.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(mp_context=context)
    try:
        texts = pool.map(prose_of, paths, chunksize=16)
        bar = tqdm(texts, f"reading {source}", total=len(paths), unit="file", leave=False, disable=None)
        for path, text in zip(paths, bar, strict=True):
            if text:
                yield Document(source, f"{source}/{path.relative_to(root)}", text)
    finally:  # with a limit, most of them are not wanted
        pool.shutdown(cancel_futures=True)


def prose_of(path: Path) -> str:
    """English of a Python file in the order in which it stands there, as paragraphs; "" for a file that is none."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes in strings
            pieces = sorted([*_strings(source), *_comments(source)])
    except (OSError, ValueError, SyntaxError, RecursionError, tokenize.TokenError):
        return ""
    return "\n\n".join(text for _, text in pieces if _is_prose(text))


def _strings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, inspect.cleandoc(node.value)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments that stand alone, consecutive lines together."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield first, "\n".join(block)
            block = []
        if not block:
            first = line
        block.append(token.string.lstrip("#").removeprefix(" ").rstrip())
        last = line
    if block:
        yield first, "\n".join(block)


def _is_prose(text: str) -> bool:
    letters = sum(c.isalpha() or c.isspace() for c in text)
    return len(text.split()) >= _FEWEST_WORDS and letters >= _FEWEST_LETTERS * len(text) and text.isascii()


def _without_repetitions(text: str, seen: set[bytes]) -> str:
    """Paragraphs that no earlier document has, so that none is both trained on and held out."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        key = hashlib.sha256(" ".join(paragraph.split()).encode()).digest()
        if paragraph.strip() and (key not in seen):
            kept.append(paragraph.rstrip())
            seen.add(key)
    return "\n\n".join(kept)
