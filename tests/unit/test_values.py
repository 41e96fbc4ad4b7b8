"""Values check themselves where they are made; the limits' other side is in `tests/core`."""

import pytest

from pion_grpc.core.values import (
    Durability,
    FetchQuery,
    MatchQuery,
    Position,
    RowRange,
    State,
    StoreHeader,
    WriteRowsHeader,
    check_names,
    check_namespace,
)
from pion_grpc.errors import InvalidRequest
from pion_wire import limits
from tests.core.support import MODEL, SMALL, tokens


@pytest.mark.parametrize(
    "name", ["a", "x" * 200, "ä" * 100, "|/\\ .", "日本語", "🙂", "\u00a0", "\u200b", "-", "a b"]
)
def test_any_text_that_can_be_shown_is_a_name(name: str) -> None:
    check_namespace(name)


@pytest.mark.parametrize(
    "name", ["", "x" * 201, "ä" * 101, "\0", "a\tb", "\x1b[31m", "\x9f", "\ud83d"]
)
def test_what_would_break_a_log_or_a_wire_is_no_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_namespace(name)
    assert caught.value.field == "namespace"


def test_a_thousand_names_are_the_most() -> None:
    check_names(["n"] * limits.NAMES_MAX)
    with pytest.raises(InvalidRequest):
        check_names(["n"] * (limits.NAMES_MAX + 1))


def test_the_longest_prefix_is_taken_and_one_token_more_is_not() -> None:
    longest = tokens(limits.TOKENS_MAX)
    header = StoreHeader("p", MODEL, longest, SMALL)
    assert header.token_count == limits.TOKENS_MAX
    assert header.durability is Durability.PROCESS
    with pytest.raises(InvalidRequest):
        StoreHeader("p", MODEL, longest + b"\0\0\0\0", SMALL)
    from pion_wire.layout import Side

    WriteRowsHeader("p", 0, Side.K, limits.TOKENS_MAX - 1, 1)


def test_a_match_needs_a_model_and_tokens() -> None:
    for model, ids, field in (("", tokens(1), "model_id"), ("m", b"", "token_ids")):
        with pytest.raises(InvalidRequest) as caught:
            MatchQuery(model, ids)
        assert caught.value.field == field
    assert MatchQuery("m", tokens(1)).fidelities == ("raw",)
    with pytest.raises(InvalidRequest):
        MatchQuery("m", tokens(1), fidelities=("x",) * 17)


def test_values_are_equal_by_what_they_say_and_cannot_change() -> None:
    one, two = FetchQuery("p"), FetchQuery("p")
    assert one == two
    assert (one.rows, one.resume) == (RowRange(), Position())
    with pytest.raises(AttributeError):
        one.namespace = "q"  # type: ignore[misc]
    assert {state.value for state in State} == {"registered", "live", "sealed"}
