"""The most memory that a process has held.

Two counts differ by the pages of mapped files: a model that transformers has loaded keeps its checkpoint mapped, and the pages that were read count as
resident, although the kernel drops them as soon as anybody needs the memory. *Anonymous* pages are those that have to be there.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# Much shorter than the packing of a layer that is worth measuring.
_SECONDS = 0.002


class Bytes(NamedTuple):
    """Resident bytes, pages of mapped files included, and anonymous ones."""

    resident: int
    anonymous: int


def _fields() -> dict[str, int]:
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return {words[0]: int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}


def now() -> Bytes:
    """What is held at this moment; where the kernel does not tell the kinds of pages apart, all of them count as anonymous."""
    fields = _fields()
    return Bytes(fields["VmRSS:"], fields.get("RssAnon:", fields["VmRSS:"]))


def resident_peak() -> int:
    """The most bytes that were resident since the process began, or since `reset`."""
    return _fields().get("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset() -> bool:
    """Starts counting resident pages anew; False where the kernel does not allow it, and then every later peak includes the earlier ones."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return "VmHWM:" in _fields()


class Watch:
    """Both peaks, stage by stage, while the ``with`` block runs.

    The kernel keeps the peak of resident pages. Anonymous ones are looked at every 2 ms by a thread, which costs time: nothing is timed meanwhile.

    Attributes:
        separate: whether resident peaks are counted stage by stage; if not, each includes those before it.
    """

    def __init__(self) -> None:
        self.separate = reset()
        self._anonymous = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def stage(self) -> Bytes:
        """Ends a stage and returns its peaks."""
        anonymous, self._anonymous = max(self._anonymous, now().anonymous), 0
        peak = Bytes(resident_peak(), anonymous)
        reset()
        return peak

    def _look(self) -> None:
        while not self._done.wait(_SECONDS):
            self._anonymous = max(self._anonymous, now().anonymous)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
