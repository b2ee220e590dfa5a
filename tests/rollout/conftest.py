"""The reference responses that several files share."""

import pytest

from tests.rollout.golden import prompts_and_caps, reference, requests_of


@pytest.fixture(scope="session")
def golden(tiny):
    """golden(family): the model, 26 requests without drafts, and their reference responses."""
    done = {}

    def get(family: str):
        if family not in done:
            cases = prompts_and_caps(26)
            done[family] = tiny(family), cases, reference(tiny(family), requests_of(cases))
        return done[family]

    return get
