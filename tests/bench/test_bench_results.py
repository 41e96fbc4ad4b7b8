"""Figures, ratios, verdicts, and what is written is what was measured."""

import json

import pytest

from pion_grpc.cli.bench import ROWS, chart, figures, table
from pion_grpc.cli.bench.results import (
    Report,
    Result,
    Row,
    Samples,
    at_least,
    at_most,
    not_measured,
    rates,
)

FAST, SLOW = Samples("ours", (3.0, 1.0, 2.0)), Samples("peer", (4.0, 4.0, 5.0))


@pytest.mark.parametrize(
    ("bound", "verdict"),
    [
        (at_least(0.5), "met"),
        (at_least(0.51), "missed"),
        (at_least(0.4, aim=0.6), "met"),
        (at_most(0.5), "met"),
        (at_most(0.49), "missed"),
        (at_most(2, of_ratio=False), "met"),
        (at_most(1.9, of_ratio=False), "missed"),
        (None, "reported"),
    ],
)
def test_a_verdict_does_not_follow_from_anything_but_figure_and_bound(bound, verdict):
    result = Result("x", "ms", FAST, SLOW, bound)
    assert (result.figure, result.peer_figure, result.ratio) == (2.0, 4.0, 0.5)
    assert result.verdict == verdict


def test_what_was_not_measured_does_not_meet_a_bound():
    assert not_measured("x", "why").verdict == "not measured"
    assert Result("x", "ms", FAST, bound=at_least(0.1)).verdict == "not measured"  # without a peer


def test_the_99th_percentile_is_not_the_largest_of_many():
    samples = Samples("x", tuple(float(n) for n in range(1_000)))
    assert samples.quantile(0.99) == 990
    assert Samples("x", (1.0, 2.0)).quantile(0.99) == 2.0
    assert Result("x", "ms", samples, fraction=0.99).figure == 990


def test_rates_do_not_confuse_bytes_and_seconds():
    assert rates("x", 2_000_000_000, [0.5, 4.0]).values == (4.0, 0.5)


def report(*rows: Row, started: int = 1, quick: bool = False) -> Report:
    machine = dict.fromkeys(("cpu", "system", "python", "commit", "file_system"), "abc")
    libraries, blas = {"numpy": "2"}, {"numpy": "n", "mlx": "m"}
    sizes = {"cores": 2, "memory_gib": 4.0, "load_average": 0.5}
    machine |= {"libraries": libraries, "blas": blas, **sizes}
    return Report(started, quick, machine, rows)


ROW = Row(
    "fetch", 1.5, 0.25, (Result("f", "GB/s", FAST, SLOW, at_least(0.4)), not_measured("g", "?"))
)


def test_a_report_does_not_change_on_its_way_through_json():
    written = json.loads(json.dumps(report(ROW).to_json()))
    assert Report.from_json(written) == report(ROW)
    (first, second) = written["rows"][0]["results"]
    assert (first["figure"], first["peer_figure"], first["ratio"]) == (2.0, 4.0, 0.5)
    assert (first["verdict"], second["verdict"]) == ("met", "not measured")
    assert first["ours"] == {"name": "ours", "values": [3.0, 1.0, 2.0]}


@pytest.mark.parametrize("document", [{}, {"format": 2}, {"format": 1}, {"format": 1, "rows": 3}])
def test_another_document_is_not_taken_for_a_report(document):
    with pytest.raises(ValueError, match="format 1"):
        Report.from_json(document)


def test_a_table_does_not_lose_figure_range_or_reason():
    text = table.markdown([ROW])
    assert (
        "| `fetch` | f | 2 GB/s (1 to 3) | peer 4 GB/s (4 to 5) | 0.50 × | ≥ 0.4 × | met |" in text
    )
    assert "g<br>?" in text
    assert table.rich_table([ROW]).row_count == 2


def test_the_picture_does_not_show_other_figures_than_the_table():
    cold = Samples("cold", (9_000.0, 7_000.0, 8_000.4))
    what = "first token after 1,024 tokens, a model: export"
    results = (Result(what, "ms", FAST, SLOW), Result(f"{what}, against cold", "ms", SLOW, cold))
    text = chart.first_tokens(Row("first-token", 1.0, 0.0, results))
    assert 'x-axis "tokens of the prompt" ["1,024"]' in text
    assert text.index("bar [8000]") < text.index("bar [4]"), "what is drawn later is in front"


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (145.0, "145"), (99.44, "99.4"), (1.2345, "1.23"), (0.0123, "0.0123")],
)
def test_numbers_are_not_shown_with_more_digits_than_they_have(value, text):
    assert table.number(value) == text


def test_no_figure_of_the_description_names_a_row_that_is_not_there():
    named = {figure.row for figure in figures.FIGURES if figure.row}
    assert named <= {entry.name for entry in ROWS}
    for figure in figures.FIGURES:
        assert figures.ours(figure, {}) == (figures.NO_FIGURE if figure.row else "")


def test_our_figure_stands_beside_the_one_it_belongs_to():
    result = Result("Membership, p50", "ms", FAST, SLOW)
    row = Row("calls", 1.0, 0.0, (Result("Lookup, p50", "ms", FAST), result))
    (line,) = (s for s in figures.markdown({"calls": row}).splitlines() if "Membership" in s)
    assert "Membership, p50: 2 ms, peer 4 (0.50 ×)" in line
    assert "Lookup" not in line
