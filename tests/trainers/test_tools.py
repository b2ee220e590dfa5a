"""Results of deterministic tools are kept: no call is made twice."""

from __future__ import annotations

import asyncio

import pytest
from transformers.utils import get_json_schema

from specrl.trainers import tools
from specrl.trainers.tools import ToolResults
from tests.trainers.grpo import scripts


def declared(tool):
    """The tool with a count of its calls, declared deterministic."""
    tool.deterministic = True
    return tool


@pytest.fixture
def counted():
    """A deterministic tool that counts its calls, and the count."""
    calls = []

    @declared
    def double(number: int) -> str:
        """Doubles a number.

        Args:
            number: any number.
        """
        calls.append(number)
        if number < 0:
            raise ValueError("negative")
        return str(2 * number)

    return double, calls


def test_a_result_is_kept_by_its_arguments(counted):
    tool, calls = counted
    kept = ToolResults().wrap(tool)
    assert [kept(number=3), kept(number=4), kept(number=3)] == ["6", "8", "6"]
    assert calls == [3, 4]
    assert get_json_schema(kept) == get_json_schema(tool)


def test_a_tool_that_raises_raises_again(counted):
    tool, calls = counted
    kept = ToolResults().wrap(tool)
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            kept(number=-1)
    assert calls == [-1, -1]


def test_a_tool_that_is_not_declared_always_runs():
    assert ToolResults().wrap(scripts.tell) is scripts.tell


def test_the_oldest_result_is_dropped(counted, monkeypatch):
    tool, calls = counted
    monkeypatch.setattr(tools, "MOST", 2)
    results = ToolResults()
    kept = results.wrap(tool)
    for number in (1, 2, 1, 3, 1, 3):
        kept(number=number)
    assert calls == [1, 2, 3, 1]
    assert len(results) == 2


def test_async_tools_too():
    calls = []

    @declared
    async def wait(number: int) -> str:
        calls.append(number)
        await asyncio.sleep(0)
        return str(number)

    kept = ToolResults().wrap(wait)
    assert [asyncio.run(kept(number=n)) for n in (1, 1, 2)] == ["1", "1", "2"]
    assert calls == [1, 2]
