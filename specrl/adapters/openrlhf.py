"""OpenRLHF: an agent executor whose requests are keyed and bring earlier responses as drafts.

Written against OpenRLHF at 3c3be62 (2026-08-13): `AgentExecutorBase.execute(..., llm_engine, ...)` and the actor's
`generate(prompt_token_ids, sampling_params, multi_modal_data=None)`. Tested against fakes of these only.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from specrl.adapters.base import Before, SharedSession


def reuse_executor(executor: type, *, seed: int, group_size: int, max_mb: float = 512) -> type:
    """The `AgentExecutor` of a file for `--train.agent_func_path`; a subclass of `executor` that reuses.

    OpenRLHF loads that file before it starts the actor's engine, whose arguments cannot be set; so this call also makes
    the engine serve keyed requests.

    Args: executor: your own, or OpenRLHF's SingleTurnAgentExecutor with your reward; seed: another one after a resume,
    as OpenRLHF does not tell its steps and visits are counted from 0; group_size: its n_samples_per_prompt; max_mb: see
    ReuseSession.
    """
    from rollout.engines.vllm.served import serve_by_default

    serve_by_default()
    return reusing(executor, SharedSession(seed=seed, group_size=group_size, max_mb=max_mb))


def reusing(executor: type, session: SharedSession) -> type:
    """A subclass of an executor class all of whose requests go through `session`."""

    class ReuseExecutor(executor):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
            engine = ReuseEngine(llm_engine, session)
            return await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, engine, images)

    return ReuseExecutor


class ReuseEngine(Before):
    """Stands before OpenRLHF's rollout actor. Requests with images or video pass unchanged."""

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        if multi_modal_data:
            return await self._engine.generate(prompt_token_ids, sampling_params, multi_modal_data=multi_modal_data)
        ticket = await self._request(prompt_token_ids)
        keyed = copy(sampling_params)
        keyed.extra_args = ticket.add_to(sampling_params.extra_args)
        output = await self._engine.generate(prompt_token_ids, keyed)
        await self._session.finish(ticket, output.outputs[0].token_ids)
        return output
