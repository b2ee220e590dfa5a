import pytest

from trainers.advantages import overlong_penalty


@pytest.mark.parametrize(
    ("length", "cap", "buffer", "want"),
    [
        (0, 100, 20, 0.0),
        (80, 100, 20, 0.0),  # the last length that costs nothing
        (81, 100, 20, -0.05),
        (90, 100, 20, -0.5),
        (99, 100, 20, -0.95),
        (100, 100, 20, -1.0),
        (250, 100, 20, -1.0),  # never below -1
        (100, 100, 0, 0.0),  # off
        (500, 100, 0, 0.0),
        (50, 100, 100, -0.5),  # the buffer may be the whole response
        (1, 100, 100, -0.01),
        (16_385, 20_480, 4096, -1 / 4096),  # DAPO's own numbers: 20480 tokens, 4096 of buffer
        (18_432, 20_480, 4096, -0.5),
    ],
)
def test_hand_values(length, cap, buffer, want):
    assert overlong_penalty(length, cap, buffer) == pytest.approx(want)


def test_it_never_rewards_and_never_rises():
    values = [overlong_penalty(n, 64, 16) for n in range(100)]
    assert values == sorted(values, reverse=True)
    assert (max(values), min(values)) == (0.0, -1.0)
