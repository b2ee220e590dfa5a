"""TRL with vLLM, in its process and behind a server: drafts change the time and nothing else, in every turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import requests
from trl import GRPOConfig, GRPOTrainer

from specrl import reusing
from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError
from specrl.run.policy import TINY_PATH
from specrl.trainers.grpo.client import KeyedClient
from tests.runs import ROOT, by_two_processes, free_port
from tests.trainers.grpo.scripts import assert_equal, make, train

pytest.importorskip("vllm", reason="needs vLLM: make setup")

ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
STARTS_WITHIN = 180  # seconds


def row_of_the_matrix(folder: Path, mode: str, kinds: str, *url: str) -> None:
    """Runs matrix.py, which compares, with some of its kinds."""
    command = [sys.executable, "-m", "tests.trainers.grpo.matrix", str(folder), mode, kinds, *url]
    environment = ENVIRONMENT | {"MASTER_PORT": str(free_port())}  # two tests at once would take TRL's first choice
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("equal in") == len(kinds.split(","))


@pytest.mark.long
def test_colocated(tmp_path):
    row_of_the_matrix(tmp_path, "colocate", "rloo,tools")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of `python -m specrl.serve` with the embedded policy."""
    with serving(tmp_path_factory.mktemp("server"), [sys.executable, "-m", "specrl.serve"]) as url:
        yield url


class serving:
    """A vLLM server for a `with` block. Args: command: what starts it, to which options are added."""

    def __init__(self, folder: Path, command: list[str], **environment: str):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        self.command = [*command, *f"--model {TINY_PATH} --served-model-name tiny --port {port}".split()]
        self.command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--block-size", "32"]
        self.command += ["--max-model-len", "900", "--max-num-batched-tokens", "2048"]
        self.environment = ENVIRONMENT | environment

    def __enter__(self) -> str:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + STARTS_WITHIN
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if requests.get(f"{self.url}/health", timeout=5).ok:
                    return self.url
            except requests.ConnectionError:
                time.sleep(0.5)
        self.__exit__()
        raise AssertionError(self.log.read_text()[-4000:])

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # vLLM's processes of a server that was killed go on


@pytest.mark.long
def test_served(server, tmp_path):
    row_of_the_matrix(tmp_path, "server", "tools", server)


@pytest.mark.long
def test_a_server_works_ahead_and_changes_nothing(server, tmp_path):
    """With conversations too, of which the first turns are begun."""
    runs = {}
    for ahead in ("auto", "off"):
        config = RolloutConfig(ahead=ahead, measure_every=3)
        options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server, "num_train_epochs": 3}
        options |= {"vllm_importance_sampling_correction": False}  # vLLM's log-probs are rounded by the rows of a pass
        runs[ahead] = train(tmp_path / ahead, config, max_completion_length=100, learning_rate=1e-3, **options)
    assert_equal(runs["auto"], runs["off"])
    later = [batch.turns[0].batch for batch in runs["auto"].training[1:]]
    pairs = [(text, c.tokens) for batch in later for text, c in zip(batch.ahead, batch.completions, strict=True)]
    complete = [(text.tokens, tokens) for text, tokens in pairs if text and text.finish]
    assert len(complete) > len(pairs) / 4
    assert any([*text] != tokens for text, tokens in complete), "the weights changed some"
    assert any([*text] == tokens for text, tokens in complete)


@pytest.mark.long
def test_a_server_that_is_killed_ends_the_run(tmp_path, monkeypatch):
    """No reward is computed of what it did not answer. It dies having just been sent the next batch."""
    held, begin = serving(tmp_path, [sys.executable, "-m", "specrl.serve"]), KeyedClient.begin

    def begin_and_die(client, rows) -> None:
        begin(client, rows)
        held.process.kill()

    monkeypatch.setattr(KeyedClient, "begin", begin_and_die)
    with held as url:
        options = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
        run = make(tmp_path / "run", RolloutConfig(), max_completion_length=100, **options)
        with pytest.raises(RolloutError, match="failed while it worked ahead"):
            run.trainer.train()
    assert len(run.batches) == len(run.logged("reward")) == 1


PROGRAM = """
import json, os, sys
from specrl.rollout.config import RolloutConfig
from tests.trainers.grpo.scripts import train
halved = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "num_train_epochs": 2, "max_completion_length": 60}
halved |= {"vllm_importance_sampling_correction": False}  # vLLM's log-probs are rounded by the rows of a pass
given, fill = json.loads(os.environ["VLLM"]), json.loads(os.environ.get("FILL", '"auto"'))
found = []
for ahead in ("auto", "off"):
    config = RolloutConfig(ahead=ahead, fill=fill if ahead == "auto" else "auto")
    run = train(f"{sys.argv[1]}/{ahead}", config, **halved, **given)
    begun = [text is not None for batch in run.training for text in batch.turns[0].batch.ahead]
    found.append({"tokens": [batch.tokens for batch in run.batches], "loss": run.logged("loss"), "begun": sum(begun)})
print(json.dumps(found), file=open(f"{sys.argv[1]}/rank{os.environ['RANK']}.json", "w"))
"""


@pytest.mark.long
def test_a_server_works_ahead_for_two_processes(server, tmp_path):
    """The first one sends the rows of both, and each gets the texts of its own."""
    given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server}
    for auto, off in by_two_processes(tmp_path, PROGRAM, 600, VLLM=json.dumps(given))[0]:
        assert (auto["tokens"], auto["loss"]) == (off["tokens"], off["loss"])
        assert auto["begun"] > off["begun"] == 0


@pytest.mark.long
def test_colocated_engines_of_two_processes_begin_the_next_batch(tmp_path):
    given = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 300}
    given |= {"vllm_gpu_memory_utilization": 0.1}
    environment = {name: value for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    reports, _ = by_two_processes(tmp_path, PROGRAM, 600, VLLM=json.dumps(given), FILL="64", **environment)
    for auto, off in reports:
        assert (auto["tokens"], auto["loss"]) == (off["tokens"], off["loss"])
        assert auto["begun"] > off["begun"] == 0


@pytest.mark.long
def test_a_bad_request_ends_no_server(server, tmp_path):
    """Unknown entries, wrong values and ids outside the vocabulary, each followed by a good request."""
    for extra, prompt in (({"specrl_key": 1}, [5, 6]), ({"specrl_kye": 1}, [5, 6]), ({"specrl_key": "x"}, [5])):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "vllm_xargs": extra}
        assert not requests.post(f"{server}/v1/completions", json=body, timeout=60).ok
        good = body | {"vllm_xargs": {}}
        assert requests.post(f"{server}/v1/completions", json=good, timeout=60).ok


@pytest.mark.long
def test_a_server_without_our_classes_is_refused_before_a_model_is_loaded(tmp_path):
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    with serving(tmp_path, command, VLLM_SERVER_DEV_MODE="1") as url:
        args = GRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, vllm_mode="server", vllm_server_base_url=url
        )
        with pytest.raises(RolloutError, match=r"python -m specrl\.serve"):
            reusing(GRPOTrainer)("no-such-model", args=args, reward_funcs=len)
