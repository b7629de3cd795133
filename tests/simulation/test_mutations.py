"""The checker can fail: each wrong variant of the table is caught, by the invariant that it breaks."""

from __future__ import annotations

import pytest

from tests.simulation import (
    losing_controllers,
    unled,
    wrong_adapters,
    wrong_answers,
    wrong_controllers,
    wrong_divergence,
    wrong_liveness,
    wrong_memories,
    wrong_pieces,
    wrong_ranks,
    wrong_recoveries,
    wrong_seats,
)
from tests.simulation.mutations import MUTATIONS, Mutation, first_caught, main


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.patch.__name__)
def test_wrong_variant_is_caught(mutation: Mutation, capsys: pytest.CaptureFixture[str]) -> None:
    """Within the seeds that the table states; the seed and the violation are printed."""
    seed, text = first_caught(mutation)
    with capsys.disabled():
        print(f"\n  {mutation.name}: caught at seed {seed}: {text[:100]}", end="")


def test_a_variant_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trying nothing would pass."""
    monkeypatch.setattr("sys.argv", ["mutations", "thaws all"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "no variant thaws all: there are" in capsys.readouterr().err


def test_the_table_names_every_wrong_variant_once() -> None:
    """A variant without a row would not be tried."""
    listed = [mutation.patch for mutation in MUTATIONS]
    written = {
        function
        for module in (
            losing_controllers,
            unled,
            wrong_adapters,
            wrong_answers,
            wrong_controllers,
            wrong_divergence,
            wrong_liveness,
            wrong_ranks,
            wrong_memories,
            wrong_pieces,
            wrong_recoveries,
            wrong_seats,
        )
        for name, function in vars(module).items()
        if getattr(function, "__module__", "") == module.__name__ and function.__annotations__.get("patch") == "Patch"
        if name != "with_decide" and not name.startswith("_")
    }
    assert len(set(listed)) == len(listed) >= 18
    assert set(listed) == written
    assert len({mutation.wrong for mutation in MUTATIONS}) == len(MUTATIONS)
