"""The worked examples of the demo, whose expected numbers were computed independently."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import worked_examples  # noqa: E402

RESULTS = worked_examples.results()


@pytest.mark.parametrize("result", RESULTS, ids=lambda r: f"{r.example}-{r.quantity}")
def test_result(result):
    assert result.error < 1e-9


def test_every_example_is_used():
    used = {r.example for r in RESULTS} | {"the_train_left_the_station_on_time"}  # shapes only
    assert used == set(worked_examples.EXAMPLES)


def test_heat_maps():
    for figure, panels in (
        (worked_examples.cat_heat_map(), 2),
        (worked_examples.train_heat_map(), 1),
    ):
        axes = [a for a in figure.axes if a.get_xlabel()]
        assert len(axes) == panels
        assert [t.get_text() for t in axes[0].get_yticklabels()][0] == "the"
