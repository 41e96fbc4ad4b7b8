"""The rows about retrieved chunks: what is asked can be answered, and agreement is not overstated."""

import pytest

from pion_grpc.cli.bench import retrieval


def test_no_question_is_without_its_answer_or_has_that_of_another_harbour():
    for number, harbour in enumerate(retrieval.HARBOURS):
        asked = retrieval.question(number)
        assert f" {asked.answer}." in retrieval.log(number)
        assert harbour in asked.text
        others = [other for other in retrieval.HARBOURS if other != harbour]
        assert not [other for other in others if other in retrieval.log(number) + asked.text]


def test_more_logs_are_not_wanted_than_there_are():
    counts = (*retrieval.PACKS, *retrieval.CASES)
    assert max(counts) <= len(retrieval.HARBOURS) == len({*retrieval.HARBOURS})
    assert {*range(1, 9), 12, 16, 20} <= {*retrieval.PACKS}
    for count in counts:
        numbers = retrieval.asked_about(count)
        assert numbers == sorted({*numbers})
        assert (numbers[0], numbers[-1]) == (0, count - 1)
        assert len(numbers) == min(count, retrieval.QUESTIONS_MAX)


@pytest.mark.parametrize(
    ("ours", "theirs", "agreeing"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([9], [1], 0), ([1, 2], [1, 2, 3], 2)],
)
def test_tokens_behind_the_first_that_differs_do_not_agree(ours, theirs, agreeing):
    assert retrieval._agreeing(ours, theirs) == agreeing
