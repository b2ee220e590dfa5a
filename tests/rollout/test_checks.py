"""Invalid options are rejected with one line that names the value and the nearest valid one."""

import array
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from specrl.config import options
from specrl.config.load import load
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.rollout.build import build_engine
from specrl.rollout.checks import check
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy.lenient import lenient
from specrl.rollout.sections import VLLMConfig
from specrl.rollout.types import Request, RolloutError, Row

NAN = math.nan


def refusal(act) -> str:
    with pytest.raises(RolloutError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


WRONG = [
    # config, the option named in the message, the suggested value
    (RolloutConfig(temperature=NAN), "rollout.temperature=nan", "rollout.temperature=0."),
    (RolloutConfig(temperature="1"), "rollout.temperature='1'", "a number"),
    (RolloutConfig(acceptance=None), "rollout.acceptance=None", "exact, off"),
    (RolloutConfig(engine="hf"), "rollout.engine='hf'", "transformers, vllm"),
    (RolloutConfig(max_new_tokens=12.0), "rollout.max_new_tokens=12.0", "a whole number"),
    (RolloutConfig(sources="prefix"), "rollout.sources='prefix'", "rollout.sources=[prefix]."),
    (RolloutConfig(sources=["sibling"]), "rollout.sources has 'sibling'", "Did you mean"),
    (RolloutConfig(cache=4), "rollout.cache is 4", "CacheConfig"),
    (RolloutConfig(vllm=VLLMConfig(runner="V1")), "rollout.vllm.runner='V1'", "'v1'?"),
]


@pytest.mark.parametrize(("config", "named", "suggested"), WRONG)
def test_options_are_checked_as_on_the_command_line(tiny, config, named, suggested):
    message = refusal(lambda: check(config))
    assert named in message
    assert suggested in message.partition(named)[2]
    assert "<" not in message, "every <key> of the rule is an option"
    spec = EngineSpec(eos_ids=frozenset({1}), rollout=config)
    assert refusal(lambda: build_engine(spec, tiny("llama"))) == message, "building an engine checks its options"


def test_right_options_pass():
    check(RolloutConfig())
    check(RolloutConfig(temperature=0, replay=1, top_p=1, sources=()))
    check(RolloutConfig(acceptance="lenient", lenience=math.e))
    check(RolloutConfig(temperature=np.float32(0.5), top_k=np.int64(3)))


def test_the_command_line_and_the_library_refuse_alike():
    """For each number of `rollout` one step beyond each of its limits."""
    for key, option in options.options(Config).items():
        if not key.startswith("rollout.") or not {int, float} & set(option.members):
            continue
        low, high = option.limits
        for value in (low - 1, *([high + 1] if high < math.inf else [])):
            with pytest.raises(ConfigError) as caught:
                load(["config=grpo_math", f"{key}={value}"])
            config, *names = RolloutConfig(), *key.split(".")[1:]
            holder = config
            for name in names[:-1]:
                holder = getattr(holder, name)
            setattr(holder, names[-1], float(value) if float in option.members else value)
            assert refusal(lambda config=config: check(config)) == str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: SamplingParams(frozenset(), temperature=-1),
            "temperature=-1, top_k=0, top_p=1.0: expected a temperature of at least 0",
        ),
        (lambda: SamplingParams(frozenset(), temperature=NAN), "temperature=nan"),
        (lambda: SamplingParams(frozenset(), top_p=0), "top_p=0: expected"),
        (lambda: SamplingParams(frozenset(), top_k=2.5), "top_k=2.5, top_p=1.0: expected"),
        (lambda: lenient(0.0), "lenience=0.0 accepts nothing"),
        (lambda: lenient(NAN), "lenience=nan"),
        (lambda: Row(1, (5,)), "example_id=1 is not a text. Try example_id='1'."),
        (lambda: Row("a\ud800", (5,)), "example_id='a\\ud800' has no UTF-8 form. Try example_id='a?'."),
        (lambda: derive_key(0, 1, 0, 0), "example_id=1 is not a text"),
        (lambda: derive_key(0, "a", 1.0, 0), "sample_index=1.0 of a noise key is not a whole number"),
        (lambda: derive_key(0, "a", 0, True), "generation=True of a noise key"),
        (lambda: derive_key("0", "a", 0, 0), "seed='0' of a noise key"),
    ],
)
def test_wrong_arguments_are_one_line(make, said):
    assert said in refusal(make)


GOOD = Request([5, 6, 7], key=3, max_new_tokens=4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt": torch.tensor([5, 6, 7])}, "a prompt is no sequence of token ids: tensor([5, 6, 7]). Give Python"),
        ({"prompt": np.array([5, 6, 7])}, "a prompt is no sequence of token ids: array([5, 6, 7])"),
        ({"prompt": [True, 5]}, "a prompt is no sequence of token ids: [True, 5]"),
        ({"prompt": "567"}, "a prompt is no sequence of token ids: '567'"),
        ({"prompt": []}, "at least one"),
        ({"prompt": [3, -1, 4]}, "-1, outside the model's 0..60"),
        ({"prompt": [3, 61, 4]}, "61, outside the model's 0..60"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"key": 2**63}, "key=9223372036854775808 is no signed 64-bit integer, as rollout.keys.derive_key gives"),
        ({"key": 1.0}, "key=1.0 is no signed 64-bit integer"),
        ({"max_new_tokens": 4.0}, "max_new_tokens=4.0 is not a whole number"),
    ],
)
def test_wrong_requests_are_one_line(tiny, wrong, said):
    engine = TransformersEngine(tiny("llama"), SamplingParams(frozenset({1})))
    assert said in refusal(lambda: engine.generate([GOOD, replace(GOOD, **wrong)]))


def test_right_requests_pass(tiny):
    engine = TransformersEngine(tiny("llama"), SamplingParams(frozenset({1})))
    prompts = ([5, 6, 7], (5, 6, 7), range(5, 8), array.array("q", [5, 6, 7]))
    done, _ = engine.generate([replace(GOOD, prompt=p, key=k) for p in prompts for k in (3, -(2**63), 2**63 - 1)])
    assert all(c.tokens == same.tokens for i, c in enumerate(done) for same in done[i % 3 :: 3])
