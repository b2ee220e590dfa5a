"""Stock vLLM gets a model, memory and sampling params, in the user's environment and a process of its own.

The engine of these tests is a package `vllm` that writes down how it was started.
"""

import json
import os

import pytest

from benchmarks import process
from benchmarks.process import Process
from benchmarks.vllm_baseline import settings
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.types import RolloutError
from tests.runs import ROOT

MODEL = {"model", "revision", "trust_remote_code", "dtype", "seed", "skip_tokenizer_init", "tensor_parallel_size"}
MEMORY = {"max_model_len", "kv_cache_memory_bytes", "gpu_memory_utilization"}
SAMPLING = {"generation_config"}
SPECRLS = {  # variables that specrl's engine sets when it is imported and started
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}

FAKE = """
import json, os
from types import SimpleNamespace

class SamplingParams:
    pass

class LLM:
    llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)

    def __init__(self, **arguments):
        print("a library that prints")
        if arguments.get("speculative_config", {}).get("method") == "suffix":
            raise ImportError("Arctic Inference is required")
        with open(os.environ["STARTED_WITH"], "w") as file:
            json.dump({"arguments": arguments, "env": dict(os.environ)}, file)

    def sleep(self, level):
        pass

    def reset_prefix_cache(self):
        pass
"""


@pytest.fixture
def started_with(tmp_path, monkeypatch):
    """started_with(): arguments and environment of the last fake engine, started after a specrl engine."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    FINAL_ONLY = 0\n")
    users = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "STARTED_WITH": str(tmp_path / "started_with.json"),
    }
    for name, value in {**users, "VLLM_LOGGING_LEVEL": "INFO"}.items():
        monkeypatch.setitem(process.USERS, name, value)
    for name, value in SPECRLS.items():
        monkeypatch.delitem(process.USERS, name, raising=False)
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    return lambda: json.loads((tmp_path / "started_with.json").read_text())


@pytest.fixture
def started():
    """started(module, **opening): a process that ends with the test."""
    made = []

    def start(module: str, **opening) -> Process:
        made.append(Process(module, **opening))
        return made[-1]

    yield start
    for process_of_engine in made:
        process_of_engine.close()


def spec_of(**vllm) -> EngineSpec:
    config = RolloutConfig(engine="vllm", rows_per_batch=7, tokens_per_pass=99)
    for name, value in vllm.items():
        setattr(config.vllm, name, value)
    return EngineSpec(eos_ids=frozenset({1}), rollout=config, model="here", dtype="bfloat16")


@pytest.mark.parametrize(("on_gpu", "method"), [(False, ""), (True, "ngram")])
def test_vllm_keeps_its_own_defaults(started_with, started, on_gpu, method):
    started("benchmarks.vllm_baseline", settings=settings(spec_of(), on_gpu, method))
    arguments, env = started_with()["arguments"], started_with()["env"]
    speculation = {"speculative_config", "disable_log_stats"} if method else set()
    platform = "enable_sleep_mode" if on_gpu else "block_size"
    assert set(arguments) == MODEL | MEMORY | SAMPLING | speculation | {platform}
    assert not SPECRLS.keys() & env.keys()
    assert env["VLLM_LOGGING_LEVEL"] == "INFO", "the user's own"
    assert (arguments["model"], arguments["dtype"], arguments["gpu_memory_utilization"]) == ("here", "bfloat16", 0.45)
    assert arguments["kv_cache_memory_bytes"] == (None if on_gpu else 512 * 2**20)
    if method:
        assert arguments["speculative_config"]["method"] == ("ngram_gpu" if on_gpu else "ngram")


def test_errors_of_the_process_reach_the_caller(started_with, started):
    with pytest.raises(RolloutError, match="ImportError: Arctic Inference is required"):
        started("benchmarks.vllm_baseline", settings=settings(spec_of(), on_gpu=False, method="suffix"))
    with pytest.raises(RolloutError, match=r"ended with 1: .*No module named benchmarks\.nothing"):
        started("benchmarks.nothing")
    engine = started("benchmarks.vllm_baseline", settings=settings(spec_of(), on_gpu=False))
    with pytest.raises(RolloutError, match="KeyError: 'rows'"):
        engine.ask()
    assert engine.ask(rows=[], sampling_params={})["tokens"] == [], "it goes on"
