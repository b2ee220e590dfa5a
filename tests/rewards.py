"""Rewards that random text can earn. Reward workers load this module alone, so it imports nothing."""


def digits(prompt: str, completion: str, answer: str | None) -> float:
    """A reward with signal on random text: the share of digits."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def few_digits(prompt: str, completion: str, answer: str | None) -> float:
    """A reward that many changes of a random text leave as it is."""
    return float(sum(c.isdigit() for c in completion) < 6)


def thirds(prompt: str, completion: str, answer: str | None) -> float:
    """A reward that about half of the changes of a random text leave as it is."""
    return float(sum(c.isdigit() for c in completion) % 3 > 0)


def sixth(prompt: str, completion: str, answer: str | None) -> float:
    """1 for one response in six, else 0, so that half of the groups of four are all alike."""
    return float(sum(map(ord, completion)) % 6 == 0)


def some_digits(prompt: str, completion: str, answer: str | None) -> float | None:
    """As `digits`, but about one response in four cannot be scored; a pure function of the text."""
    return None if sum(map(ord, completion)) % 4 == 0 else digits(prompt, completion, answer)


def no_score_for_some_prompts(prompt: str, completion: str, answer: str | None) -> float | None:
    """As `digits`, but no response to about every third prompt can be scored."""
    return None if sum(map(ord, prompt)) % 3 == 0 else digits(prompt, completion, answer)


def by_prompt(prompt: str, completion: str, answer: str | None) -> float:
    """A reward that all responses to a prompt earn alike, and prompts differ in."""
    return float(sum(map(ord, prompt)) % 3)


def nothing(prompt: str, completion: str, answer: str | None) -> float:
    """A reward that no response earns."""
    return 0.0


def unscored(prompt: str, completion: str, answer: str | None) -> None:
    """A reward that cannot score anything."""


def tell(letter: str) -> str:
    """Tells more.

    Args:
        letter: of what.
    """
    return f" {ord(letter) % 10} coins now?\n"


tell.deterministic = True


def told(prompt: str, completion: str, answer: str | None, messages: list[dict]) -> float:
    """The share of digits in what the policy said, and more for every answer that is that of its call."""
    said = "".join(m["content"] for m in messages if m["role"] == "assistant")
    calls = [c["function"]["arguments"]["letter"] for m in messages for c in m.get("tool_calls", ())]
    answers = [m["content"] for m in messages if m["role"] == "tool"]
    assert answers == [tell(letter) for letter in calls[: len(answers)]]
    return sum(c.isdigit() for c in said) / max(len(said), 1) + 0.1 * len(answers)
