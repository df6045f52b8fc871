"""Tables of ways to exchange tokens are read back as they are written, and refused where no rank could follow them."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.ir.exchange_table import ExchangeTable

TEXT = "0:flat:1;4096:two-level:4;9000:flat:2"


def test_a_table_is_read_as_it_is_written_and_looked_up_by_load() -> None:
    table = ExchangeTable.parse(TEXT)
    assert table.text == TEXT and table.chunks == 4
    assert [table.at(rows)[1:] for rows in (0, 4095, 4096, 8999.5, 1e9)] == [
        ("flat", 1), ("flat", 1), ("two-level", 4), ("two-level", 4), ("flat", 2)
    ]  # fmt: skip
    assert str(table) == "flat in 1 chunk, two-level in 4 chunks from 4,096 rows, flat in 2 chunks from 9,000 rows"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected ways"), ("0:flat", "expected ways"), ("0:flat:1;", "expected ways"), (7, "found 7"),
        ("1:flat:1", "no row from 0 on"), ("0:flat:1;9:flat:2;9:flat:1", "do not rise"),
        ("0:sideways:1", "none of flat, two-level"), ("0:flat:9", "not 1 to 8"), ("0:flat:0", "not 1 to 8"),
        ("0:flat:3;5:flat:4", "do not divide"), ("0:flat:1;-5:flat:4", "expected ways"),
    ],
)  # fmt: skip
def test_what_ranks_could_not_follow_is_refused(text: object, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ExchangeTable.parse(text)
