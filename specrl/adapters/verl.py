"""verl: an agent loop whose requests are keyed and bring earlier responses as drafts.

Written against verl 0.10.0.dev at 1dda039 (2026-08-22), its V1 trainer: `AgentLoopBase.run(sampling_params, **row)`,
whose rows name `session_id` and `global_steps`, and `LLMServerClient.generate`. Tested against fakes of these only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from rollout.types import RolloutError
from specrl.adapters.base import Before, SharedSession

SINGLE_TURN = "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop"


def agent_loop(seed: int = 0, max_mb: float = 512, loop: str = SINGLE_TURN, **verl: Any) -> Any:
    """The `_target_` of an agent loop in verl's `agent_loop_config_path`.

    Args: seed, max_mb: see ReuseSession; loop: the agent loop to speed up, by its dotted path; verl: what verl gives
    every agent loop.
    """
    module, _, name = loop.rpartition(".")
    return reusing(getattr(import_module(module), name))(_session(seed, max_mb), **verl)


@cache
def _session(seed: int, max_mb: float) -> SharedSession:
    return SharedSession(seed=seed, max_mb=max_mb)


@cache
def reusing(loop: type) -> Callable[..., Any]:
    """A subclass of an agent loop class that takes a Session first and lets all its requests reuse."""

    class ReuseAgentLoop(loop):
        def __init__(self, session: SharedSession, **verl: Any):
            super().__init__(**verl)
            self._session, self._client = session, self.server_manager

        async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
            if missing := [name for name in ("session_id", "global_steps") if name not in row]:
                raise RolloutError(f"verl's row has no {' and no '.join(missing)}: use its V1 trainer (trainer.use_v1)")
            visit, slot = int(row["global_steps"]), int(row["session_id"])
            self.server_manager = ReuseClient(self._client, self._session, visit=visit, slot=slot)
            return await super().run(sampling_params, **row)

    return ReuseAgentLoop


class ReuseClient(Before):
    """Stands before an `LLMServerClient` for one sample. Requests with images, video or audio pass unchanged."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict, **more: Any) -> Any:
        given = {"prompt_ids": prompt_ids, "sampling_params": sampling_params, **more}
        if any(more.get(name) for name in ("image_data", "video_data", "audio_data")):
            return await self._engine.generate(request_id, **given)
        ticket = await self._request(prompt_ids)
        keyed = {**sampling_params, "extra_args": ticket.add_to(sampling_params.get("extra_args"))}
        output = await self._engine.generate(request_id, **{**given, "sampling_params": keyed})
        await self._session.finish(ticket, output.token_ids)
        return output
