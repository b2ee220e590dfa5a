"""What runs inside vLLM's workers. vLLM imports this module there, because its start names the classes below.

Importing it also registers the weight transfer in the worker.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import rollout.engines.vllm.weights  # noqa: F401 - registers the transfer


class WorkerExtension:
    """Methods that the driver calls on every worker by name."""

    def specrl_install_v1(self, flow) -> None:
        """In-process only: `flow` (vllm_v1.OneRequest) draws and drafts from now on."""
        flow.install(self.model_runner)

    def specrl_install_v2(self, rows_per_chunk: int) -> None:
        """Requests with `prompt_logprob_token_ids` return what `score_drafts` computes."""
        runner = self.model_runner
        if runner.prompt_logprobs_worker is not None:  # the last pipeline stage has it
            scores = partial(score_drafts, runner, rows_per_chunk)
            runner.prompt_logprobs_worker.compute_prompt_token_id_logprobs = scores


class RequestDrafter:
    """What V1's `speculative_config.model` names; `vllm_v1.OneRequest` takes over its `propose`."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, *_) -> None:
        """There is none."""

    def propose(self, sampled: list[list[int]], *_, **__) -> list[list[int]]:
        """Nothing."""
        return [[] for _ in sampled]


@torch.inference_mode()
def score_drafts(
    runner, rows_per_chunk: int, logits_fn, hidden_states: Tensor, batch, prompt_lens
) -> dict[str, Tensor]:
    """V2: what a verify request returns for each draft position, chunk by chunk of its prefill.

    Takes the place of PromptLogprobsWorker.compute_prompt_token_id_logprobs, whose bookkeeping it keeps: a prefill that
    starts behind the first scored position (the cache held it) returns nothing.

    Returns: by request id, float32 [K, 3]: log-prob of the draft token at the request's temperature, the token V2's
    sampler would draw there (ids are exact below 2^24), and that token's log-prob.
    """
    pending, done = runner.prompt_logprobs_worker.token_id_scores, {}
    for i, name in enumerate(batch.req_ids):
        if (job := pending.get(name)) is None:
            continue
        slot = int(batch.idx_mapping_np[i])
        length, first = int(prompt_lens[slot]), int(batch.num_computed_prefill_tokens_np[i])
        last = first + int(batch.num_scheduled_tokens[i])
        if first >= length or length < batch.prefill_len_np[i] or (job.scores is None and first > job.start):
            del pending[name]
            continue
        if job.scores is None:
            job.scores = torch.full((len(job.token_ids), 3), torch.nan, device=hidden_states.device)
        base = int(batch.query_start_loc_np[i]) - first
        low, high = max(job.start, first), min(last, length - 1)
        for a in range(low, high, rows_per_chunk):
            b = min(a + rows_per_chunk, high)
            part = slice(a - job.start, b - job.start)
            logits = logits_fn(hidden_states[base + a : base + b]).float()
            job.scores[part] = _judge(runner, logits, slot, a, job.token_ids[part])
        if last >= length:
            done[name] = job.scores
            del pending[name]
    return done


def _judge(runner, logits: Tensor, slot: int, first: int, targets: Tensor) -> Tensor:
    """[N, 3] for logits [N, V] of the positions first, first + 1, ... of the request in `slot`; targets [N, 1]."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    states, n = runner.sampler.sampling_states, len(logits)
    temperature = float(states.temperature.np[slot])
    positions = torch.arange(first, first + n, device=logits.device)
    slots = torch.full((n,), slot, dtype=torch.int32, device=logits.device)
    drawn = gumbel_sample(
        logits,
        slots,
        states.temperature.gpu,
        states.seeds.gpu,
        positions,
        apply_temperature=True,
        is_drafting=False,
        use_fp64=runner.sampler.use_fp64_gumbel,
    )
    logp = (logits / (temperature or 1.0)).log_softmax(-1)
    return torch.cat([logp.gather(-1, targets), drawn[:, None].float(), logp.gather(-1, drawn[:, None].long())], dim=-1)
