"""docs/compatibility.md has the tables that the code and the tests of mqadmin say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages.compatibility import PAGE, TESTED, tables, with_tables

TESTS = Path(__file__).parents[2]


async def test_the_page_is_true(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, await tables(tmp_path)) == page, "run python -m tests.support.pages.compatibility"


@pytest.mark.parametrize("test", TESTED)
def test_the_tests_that_it_names_are_there(test: str) -> None:
    assert (TESTS / test).is_file()
