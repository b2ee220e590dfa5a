"""Visits count how often a prompt was rolled out."""

import json

from specrl.rollout.keys import Visits


def test_a_batch_is_one_visit_to_each_of_its_prompts():
    visits = Visits()
    assert visits.next(["a", "a", "b"]) == [0, 0, 0]
    assert visits.next(["b", "b"]) == [1, 1]
    assert visits.next(["a", "b", "c"]) == [1, 2, 0]


def test_counting_goes_on_from_what_was_saved():
    visits = Visits()
    visits.next(["a", "b"])
    visits.next(["a"])
    assert Visits(json.loads(json.dumps(visits.state()))).next(["a", "b", "c"]) == [2, 1, 0]
