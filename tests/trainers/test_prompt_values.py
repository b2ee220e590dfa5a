"""What is known of a prompt before its response: by hand, and without the responses it is the baseline of."""

import json

import pytest

from trainers.critic import PromptValues


def test_a_prompt_is_worth_what_its_earlier_responses_earned():
    prompts = PromptValues()
    assert prompts.of(["a", "b"]) == [0.0, 0.0], "nothing is known"
    prompts.learn([("a", 1.0), ("a", 1.0), ("b", 0.5)])
    assert prompts.of(["a", "b"]) == pytest.approx([(2 * 0 + 2) / 4, (2 * 0 + 0.5) / 3])
    usual = (0.5 + 0.5 / 3) / 2
    assert prompts.of(["new"]) == pytest.approx([usual]), "as the others"
    prompts.learn([("a", 0.0), ("new", 1.0)])
    assert prompts.of(["a", "new"]) == pytest.approx([2 * 0.5 / 3, (2 * usual + 1) / 3])


def test_it_goes_on_from_what_was_saved():
    prompts = PromptValues()
    prompts.learn([("a", 1.0), ("b", 0.25)])
    again = PromptValues(json.loads(json.dumps(prompts.state())))
    assert again.of(["a", "b", "c"]) == prompts.of(["a", "b", "c"])
