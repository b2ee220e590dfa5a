"""Fakes of what verl and OpenRLHF document, as their packages need environments of their own.

`Server` stands for a vLLM server that serves keyed requests: it reads the same `extra_args` and draws with the same
noise, on a tiny transformers model; tests/rollout/engines/vllm/test_vllm_served.py holds the real server to that.
Signatures and field names are those of verl at 1dda039 and OpenRLHF at 3c3be62.
"""

from __future__ import annotations

import asyncio
from copy import deepcopy
from types import SimpleNamespace

from rollout.engines.base import Sampling
from rollout.engines.vllm.wire import KeyedRequest
from rollout.types import Completion, Request
from specrl.adapters.base import ReuseSession
from tests.engines import local

EOS_IDS = frozenset({1})


class Here:
    """A Session in this process, as SharedSession is one in an actor."""

    def __init__(self, session: ReuseSession):
        self.session = session

    async def request(self, *args, **options):
        await asyncio.sleep(0)  # others come in between
        return self.session.request(*args, **options)

    async def finish(self, *args):
        self.session.finish(*args)


class Server:
    """Answers keyed requests one by one; `fail_at` names a request that breaks it."""

    def __init__(self, model, fail_at: int | None = None):
        self._engine, self._fail_at = local(model, Sampling(EOS_IDS), window=16), fail_at
        self.done: list[tuple[KeyedRequest, Completion]] = []
        self.prompts: list[list[int]] = []

    def answer(self, prompt: list[int], extra_args: dict | None, max_tokens: int) -> Completion:
        keyed = KeyedRequest.read(extra_args)
        assert keyed is not None, "vLLM would draw this itself"
        if len(self.done) == self._fail_at:
            raise RuntimeError("EngineDeadError")
        (done,), _ = self._engine.generate([Request(prompt, keyed.key, max_tokens, keyed.drafter({}, prompt))])
        self.done.append((keyed, done))
        self.prompts.append(list(prompt))
        return done

    def plain(self, prompt: list[int], key: int, max_tokens: int) -> list[int]:
        """What plain decoding gives."""
        return self._engine.generate([Request(prompt, key, max_tokens, plain=True)])[0][0].tokens


class FakeLLMServerClient:
    """verl's LLMServerClient: token ids in and out, sampling parameters as a dict."""

    def __init__(self, server: Server):
        self.server, self.seen = server, []

    async def generate(self, request_id, *, prompt_ids, sampling_params, image_data=None, **kwargs):
        self.seen.append(sampling_params)
        if image_data:
            return SimpleNamespace(token_ids=[3], log_probs=None, stop_reason="completed", extra_fields={})
        params = dict(sampling_params)
        done = self.server.answer(prompt_ids, params.pop("extra_args", None), params.pop("max_tokens", 24))
        return SimpleNamespace(token_ids=done.tokens, log_probs=done.logprobs, stop_reason="completed", extra_fields={})


class FakeSingleTurnAgentLoop:
    """verl's agent loop for one turn; it is made anew for every sample and given more than it uses."""

    def __init__(self, trainer_config, server_manager, tokenizer, **kwargs):
        self.server_manager, self.tokenizer = server_manager, tokenizer

    async def run(self, sampling_params, priority=0, **kwargs):
        prompt_ids = self.tokenizer(kwargs["raw_prompt"])
        output = await self.server_manager.generate(
            request_id="r", prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=kwargs.get("images")
        )
        return SimpleNamespace(prompt_ids=prompt_ids, response_ids=output.token_ids, response_logprobs=output.log_probs)


class FakeToolAgentLoop(FakeSingleTurnAgentLoop):
    """verl's agent loop for several turns: each prompt is all that was said, and a tool's answer."""

    async def run(self, sampling_params, priority=0, **kwargs):
        ids = self.tokenizer(kwargs["raw_prompt"])
        start = len(ids)
        for turn in range(3):
            output = await self.server_manager.generate(
                request_id="r", prompt_ids=list(ids), sampling_params=sampling_params
            )
            ids += [*output.token_ids, 7, 8 + turn]
        return SimpleNamespace(prompt_ids=ids[:start], response_ids=ids[start:])


class FakeSamplingParams(SimpleNamespace):
    """vLLM's SamplingParams, as far as OpenRLHF and the adapter touch it."""


class FakeRolloutActor:
    """OpenRLHF's RolloutRayActor: the `llm_engine` of an executor, and what starts executors."""

    def __init__(self, server: Server, executor):
        self.server, self.executor = server, executor

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        done = self.server.answer(prompt_token_ids, sampling_params.extra_args, sampling_params.max_tokens)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=done.tokens, finish_reason=done.finish)])

    def get_num_unfinished_requests(self):
        return 0

    async def generate_responses(self, prompt, label, sampling_params, max_length, hf_tokenizer, num_samples=1):
        return [
            await self.executor.execute(
                prompt=prompt,
                label=label,
                sampling_params=sampling_params,
                max_length=max_length,
                hf_tokenizer=hf_tokenizer,
                llm_engine=self,
                images=None,
            )
            for _ in range(num_samples)
        ]


class FakeToolExecutor:
    """An OpenRLHF executor of several turns."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        ids = hf_tokenizer(prompt)
        for turn in range(3):
            output = await llm_engine.generate(list(ids), deepcopy(sampling_params))
            ids += [*output.outputs[0].token_ids, 7, 8 + turn]
        return {"observation_tokens": ids, "reward": 1.0, "prompt": prompt}


class FakeAgentExecutor:
    """An OpenRLHF executor of one turn that scores its response."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        assert llm_engine.get_num_unfinished_requests() == 0, "the rest of the engine is in reach"
        ids = hf_tokenizer(prompt)
        output = await llm_engine.generate(ids, deepcopy(sampling_params), multi_modal_data=None)
        tokens = output.outputs[0].token_ids
        return {"observation_tokens": ids + tokens, "reward": float(len(tokens)), "prompt": prompt}
