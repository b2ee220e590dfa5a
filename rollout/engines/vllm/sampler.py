"""Model Runner V2 samples with this package's noise, and a draft token is accepted if it is the token sampled.

Bias, penalties, temperature and min_p are applied by vLLM's own sampler, to rows with drafts as to rows without. So the
samples at all positions of a request are those of plain decoding, whoever proposed the drafts. Nothing in
`KeyedSampler` and `KeyedVerifier` waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from specrl.rollout.engines.local.sampler import packed_sample
from specrl.rollout.engines.vllm.wire import KEY, PROMPT_TOKENS, extra_args_of
from specrl.rollout.noise import process_logits


class RequestStates:
    """The noise key of the request in each row of vLLM's request states, and where its response begins.

    Requests bring their key in `SamplingParams.extra_args` (wire.py). They do so again after a preemption.

    Args: runner: vLLM's model runner.
    """

    def __init__(self, runner) -> None:
        size, device = runner.max_num_reqs, runner.device
        self.keys = torch.zeros(size, dtype=torch.int64, device=device)
        self.starts = torch.zeros(size, dtype=torch.int64, device=device)
        self.keyed = torch.zeros(size, dtype=torch.bool, device=device)
        self.top_p = torch.ones(size, dtype=torch.float64, device=device)
        """vLLM rounds its own to float32."""
        self.keyed_np = np.zeros(size, dtype=bool)
        self.top_p_np = np.ones(size)
        self.listeners: list[Callable[[int, Any], None]] = [self._add]
        """Called with the index of a new request and what vLLM knows of it."""
        add = runner.model_state.add_request

        def add_request(req_index: int, new_req_data) -> None:
            add(req_index, new_req_data)
            for listener in self.listeners:
                listener(req_index, new_req_data)

        runner.model_state.add_request = add_request

    def _add(self, req_index: int, new_req_data) -> None:
        params, extra = new_req_data.sampling_params, extra_args_of(new_req_data)
        self.keyed[req_index] = self.keyed_np[req_index] = KEY in extra
        self.top_p[req_index] = self.top_p_np[req_index] = params.top_p if params else 1.0
        if KEY in extra:
            self.keys[req_index] = extra[KEY]
            self.starts[req_index] = extra.get(PROMPT_TOKENS, new_req_data.prompt_len)


class KeyedSampler(Sampler):
    """vLLM's sampler, with the noise of rollout/noise.py for requests that have a key."""

    requests: RequestStates
    verifier: RejectionSampler | None = None
    """Decides about steps without drafts too."""
    packed: Tensor | None = None
    """What the last call sampled, int32 [4, N]; see rollout/engines/local/sampler.py."""
    draft_ids: Tensor | None = None
    """int32 [n], the ids that a draft model samples among; None: all."""
    draft_weight: Tensor
    """[n, H], their rows of its output layer."""

    def __call__(self, logits, input_batch):
        return self.verifier(logits, input_batch) if self.verifier else super().__call__(logits, input_batch)

    def _sample_random(
        self, processed_logits, expanded_idx_mapping, idx_mapping_np, pos, top_k, top_p, use_fused_sampler
    ) -> tuple[Tensor, Tensor]:
        """Tokens [N] for logits [N, V] at temperature 1, and the logits of their distribution."""
        states = self.requests
        keyed = states.keyed_np[idx_mapping_np]
        if not keyed.any():
            return super()._sample_random(
                processed_logits, expanded_idx_mapping, idx_mapping_np, pos, top_k, top_p, use_fused_sampler
            )
        index = expanded_idx_mapping.long()
        cuts, logits = self._cuts(processed_logits, index, idx_mapping_np)
        response_pos = pos.long() + 1 - states.starts[index]
        targets = torch.zeros_like(response_pos)
        temperature = self.sampling_states.temperature
        greedy = temperature.np[idx_mapping_np] == 0
        samples = [
            packed_sample(logits, states.keys[index], response_pos, targets, float(random), *cuts)
            for random in sorted({*(~greedy).tolist()})
        ]
        self.packed = packed = samples[-1]
        if len(samples) == 2:
            self.packed = packed = torch.where(temperature.gpu[index] == 0, samples[0], samples[1])
        tokens = packed[0].long()
        if not keyed.all():
            other_tokens, other_logits = super()._sample_random(
                processed_logits, index.int(), idx_mapping_np, pos, top_k, top_p, False
            )
            mask = states.keyed[index]
            tokens = torch.where(mask, tokens, other_tokens)
            logits = torch.where(mask[:, None], logits, other_logits)
        return tokens, logits

    def guess(self, logits: Tensor, idx_mapping: Tensor, pos: Tensor) -> Tensor:
        """The tokens, int64 [N], that a draft model samples with the noise of the policy.

        Args: logits: [N, V] or [N, n], of `draft_ids`.
        """
        index = idx_mapping.long()
        response_pos = pos.long() + 1 - self.requests.starts[index]
        temperature = self.sampling_states.temperature.gpu[index][:, None]
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)
        targets = torch.zeros_like(response_pos)
        ids = self.draft_ids
        sampled = packed_sample(scaled, self.requests.keys[index], response_pos, targets, 1.0, 0, 1.0, ids)[0].long()
        best = logits.argmax(-1)
        return torch.where(temperature[:, 0] > 0, sampled, best if ids is None else ids[best].long())

    def _cuts(self, logits: Tensor, index: Tensor, idx_mapping_np: np.ndarray) -> tuple[tuple[int, float], Tensor]:
        """Top-k and top-p that sampling still has to apply, and logits [N, V] to which the others are applied."""
        columns = (self.sampling_states.top_k.np[idx_mapping_np], self.requests.top_p_np[idx_mapping_np])
        pairs = {*zip(*(column.tolist() for column in columns), strict=True)}
        reports_logprobs = self.sampling_states.max_num_logprobs(idx_mapping_np) != NO_LOGPROBS
        if len(pairs) == 1 and not reports_logprobs:
            return pairs.pop(), logits
        cut = logits
        for k, p in pairs - {(self.sampling_states.vocab_size, 1.0)}:
            rows = (self.sampling_states.top_k.gpu[index] == k) & (self.requests.top_p[index] == p)
            cut = torch.where(rows[:, None], process_logits(logits, 1.0, k, p), cut)
        return (0, 1.0), cut


class KeyedVerifier(RejectionSampler):
    """Samples at every position as plain decoding would; draft tokens are accepted up to the first that differs.

    vLLM does the rest: chunks of rows, log-probs, placeholders, prompts of which a step computes a part.
    """

    def _verify(
        self,
        logits,
        draft_logits,
        draft_sampled,
        pos,
        cu_num_logits,
        idx_mapping,
        idx_mapping_np,
        expanded_idx_mapping,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        verify_draft_sampled,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, V] that were sampled from, tokens [R, K + 1] and how many of them are emitted [R]."""
        self.prepare(idx_mapping_np, seq_lens_upper_bound_np)
        sampled, processed_logits = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=True,
        )
        return processed_logits, *self.accept(sampled, cu_num_logits, verify_draft_sampled)

    def prepare(self, idx_mapping_np: np.ndarray, seq_lens_upper_bound_np: np.ndarray) -> None:
        """The step of these requests is about to be sampled."""

    def accept(self, sampled: Tensor, cu_num_logits: Tensor, verify_draft_sampled: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens [R, K + 1] of each row, and how many of them are emitted [R].

        Args: verify_draft_sampled: [N], the token that was an input at a position, which the position before it has to
            sample; -1 is never accepted.
        """
        first = cu_num_logits[:-1, None].long()
        num_logits = (cu_num_logits[1:] - cu_num_logits[:-1])[:, None]
        step = torch.arange(self.num_speculative_steps + 1, device=sampled.device)
        index = (first + step).clamp(max=len(sampled) - 1)
        tokens = torch.where(step < num_logits, sampled[index], 0)
        next_draft = verify_draft_sampled[(index + 1).clamp(max=len(sampled) - 1)]
        accepted = (step + 1 < num_logits) & (next_draft == tokens)
        return tokens, 1 + accepted.cumprod(1).sum(1, dtype=torch.int32)


class RolloutVerifier(KeyedVerifier):
    """For engines whose requests ask for the log-prob of each sampled token and no more.

    It is the one that sampling computes, with drafts or without, so that both train the same weights bit for bit. vLLM
    would read all logits again, and again for the token's rank.
    """

    sampler: KeyedSampler
    _keyed = False
    """All requests of the step have a key."""

    def prepare(self, idx_mapping_np: np.ndarray, seq_lens_upper_bound_np: np.ndarray) -> None:
        self._keyed = bool(self.sampler.requests.keyed_np[idx_mapping_np].all())

    def _get_logprobs_tensors(
        self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
    ) -> LogprobsTensors | None:
        if not self._keyed or max_num_logprobs != 0:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        assert self.sampler.packed is not None  # of this step
        tokens, logprobs = self.sampler.packed[:2, :, None]
        several = len(logits) != len(cu_num_logits) - 1
        on_device = several and self.enable_adaptive_verification  # which cuts drafts where only the device knows
        return LogprobsTensors(
            tokens.long(),
            logprobs.view(torch.float32),
            torch.zeros_like(tokens[:, 0], dtype=torch.int64),
            cu_num_logits_np.tolist() if several and not on_device else None,
            cu_num_logits.clone() if on_device else None,
        )


def share_noise(runner) -> None:
    """A draft model samples with the policy's noise: then it agrees with it as often as two samples can.

    The CUDA graphs of a head that vLLM captured at its start hold samples with vLLM's own noise, so it runs without.
    """
    speculator = runner.speculator
    if not isinstance(speculator, DraftModelSpeculator):
        return

    def sample_draft(
        hidden_states,
        sample_src_positions,
        idx_mapping,
        temperature,
        seeds,
        draft_step,
        draft_logits,
        spec_step_idx=0,
    ) -> Tensor:
        sampler = runner.sampler
        if sampler.draft_ids is None:
            logits = speculator.compute_draft_logits(hidden_states, spec_step_idx)
        else:
            logits = linear(hidden_states, sampler.draft_weight)
        return sampler.guess(logits, idx_mapping, sample_src_positions)

    speculator.init_cudagraph_manager(CUDAGraphMode.NONE)
    speculator.sample_draft = sample_draft  # type: ignore[method-assign]  # replaces vLLM's own


def propose_as_planned(runner: Any) -> None:
    """The speculator proposes as many tokens as the plan of a step asks for; where that is none, it makes no pass.

    A draft model of vLLM's would make a pass for each of the configuration's tokens in every step.
    """
    speculator = runner.speculator
    most = runner.num_speculative_steps
    propose = speculator.propose

    def propose_some(input_batch, *arguments, num_speculative_tokens: int | None = None, **options) -> Tensor:
        count = most if num_speculative_tokens is None else num_speculative_tokens
        if not count:
            return torch.zeros(input_batch.num_reqs, most, dtype=torch.int64, device=runner.device)
        if isinstance(speculator, StandaloneARSpeculator):  # which takes no notice of the argument
            speculator.num_speculative_steps = count
        return propose(input_batch, *arguments, num_speculative_tokens=count, **options)

    speculator.propose = propose_some


def install(runner: Any, verifier: Callable[..., KeyedVerifier] | None = None) -> None:
    """Gives a model runner the keyed sampler. Before its first request; see `check` for what it relies on.

    Args: verifier: decides about all steps; None: `KeyedVerifier`, and vLLM about those without drafts.
    """
    runner.sampler.__class__ = KeyedSampler  # whoever holds it shall have it
    runner.sampler.requests = RequestStates(runner)
    kind = verifier or KeyedVerifier
    runner.rejection_sampler = kind(runner.sampler, runner.speculative_config, runner.device)
    if verifier is not None:
        runner.sampler.verifier = runner.rejection_sampler
