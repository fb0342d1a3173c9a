"""The table of model families in FAMILIES.md is what running them gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers_models import kernels, one_thread, quiet  # noqa: F401

import moe_cpu.integrations.transformers as integration
from moe_cpu.integrations.transformers import detect, forward, status
from moe_cpu.integrations.transformers.families import FAMILIES

pytestmark = [quiet, kernels, pytest.mark.usefixtures("one_thread")]
PAGE = Path(integration.__file__).with_name("FAMILIES.md")
COMMAND = "python -m moe_cpu.integrations.transformers.status"


def table() -> list[list[str]]:
    """Cells of the page's rows."""
    begin, end = (f"<!-- {word}: {COMMAND} -->\n" for word in ("begin", "end"))
    header, rule, *rows = PAGE.read_text().partition(begin)[2].partition(end)[0].splitlines()
    assert (header, rule) == status.HEADER
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_has_every_family_once() -> None:
    assert [row[0] for row in table()] == [family.name for family in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_a_family_runs_as_the_page_says(family: Any) -> None:
    """All but the distance, whose last digits depend on the machine; that one is held to the bound."""
    try:
        found = status.status_of(family)
    except ImportError as error:
        pytest.skip(str(error))
    assert found.ok, found
    written = next(row for row in table() if row[0] == family.name)
    now = [cell.strip() for cell in found.markdown().strip("|").split("|")]
    assert now[:3] + now[4:] == written[:3] + written[4:], f"paste `{COMMAND}` into {PAGE.name}"
    assert 0 <= float(written[3]) <= float(written[4])


def test_the_table_shows_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "reference_forward", lambda self, x, *_: -x)
    monkeypatch.setattr(forward, "plan_of", lambda _: detect.Plan(None, "no kernel wanted"))
    found = status.status_of(FAMILIES[0])
    assert not found.ok
    assert "**outside**" in found.markdown()
    assert "**differ**" in found.markdown()
