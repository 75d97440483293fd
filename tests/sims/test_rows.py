"""Rows whose environments are stepped one after the other: one that fails leaves, the others go on."""

import pytest

from mmrl.sims.vector.rows import EnvironmentRows
from mmrl.sims.vector.transitions import Transition


def test_a_row_that_fails_loses_what_played_and_the_others_go_on():
    rows, seen = EnvironmentRows[str](4), []
    for row in (1, 2, 3):
        rows[row] = f"game {row}"

    def act(i, row):
        seen.append((i, rows[row]))
        if row == 3:
            raise ValueError("broken")

    out = Transition.empty(3, 1, (0, 0, 3), 0)
    assert rows.each([3, 2, 1], out, act) is out
    assert seen == [(0, "game 3"), (1, "game 2"), (2, "game 1")]
    assert [str(error) for error in out.errors] == ["broken", "None", "None"]
    assert [rows.get(row) for row in range(4)] == [None, "game 1", "game 2", None]
    with pytest.raises(RuntimeError, match="row 3 has no episode"):
        rows[3]
