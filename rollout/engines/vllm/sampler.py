"""Model Runner V2 draws with this package's noise, and a draft token stands while it is the token drawn.

Bias, penalties, temperature and min_p are applied by vLLM's own sampler, to rows with drafts as to rows without. So the
draws at all positions of a request are those of plain decoding, whoever proposed the drafts. Nothing here waits for the
device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from specrl.rollout.engines.local.draw import packed_draw
from specrl.rollout.engines.vllm.wire import KEY, PROMPT_TOKENS
from specrl.rollout.noise import process_logits


class Keys:
    """The noise key of the request in each of vLLM's slots, and the position where its response begins.

    Requests bring their key in `SamplingParams.extra_args` (wire.py). They do so again after a preemption.

    Args: runner: vLLM's model runner.
    """

    def __init__(self, runner):
        slots, device = runner.max_num_reqs, runner.device
        self.keys, self.starts = (torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(2))
        self.keyed = torch.zeros(slots, dtype=torch.bool, device=device)
        self.top_p = torch.ones(slots, dtype=torch.float64, device=device)
        """vLLM rounds its own to float32."""
        self.keyed_np, self.top_p_np = np.zeros(slots, dtype=bool), np.ones(slots)
        add = runner.model_state.add_request

        def add_request(slot: int, request) -> None:
            add(slot, request)
            params = request.sampling_params
            given = (params and params.extra_args) or {}
            self.keyed[slot] = self.keyed_np[slot] = KEY in given
            self.top_p[slot] = self.top_p_np[slot] = params.top_p if params else 1.0
            if KEY in given:
                self.keys[slot] = given[KEY]
                self.starts[slot] = given.get(PROMPT_TOKENS, request.prompt_len)

        runner.model_state.add_request = add_request


class KeyedSampler(Sampler):
    """vLLM's sampler, with rollout/noise.py in the place of its noise for requests that have a key."""

    slots: Keys
    verifier: RejectionSampler | None = None
    """Decides about steps without drafts too."""
    targets: Tensor | None = None
    """Tokens [N] whose log-probs the next draw tells, and none after it."""
    packed: Tensor | None = None
    """What the last draw told, int32 [4, N]; see rollout/engines/local/draw.py."""

    def __call__(self, logits, input_batch):
        return self.verifier(logits, input_batch) if self.verifier else super().__call__(logits, input_batch)

    def _sample_random(self, logits, slots, slots_np, pos, top_k, top_p, fused) -> tuple[Tensor, Tensor]:
        """Tokens [N] for logits [N, V] at temperature 1, and the logits of their distribution.

        Args: slots, pos: of each row's input token [N]; slots_np: of each request; top_k, top_p: [N], or None for all.
        """
        keyed, targets, self.targets = self.slots.keyed_np[slots_np], self.targets, None
        if not keyed.any():
            return super()._sample_random(logits, slots, slots_np, pos, top_k, top_p, fused)
        slots = slots.long()
        cuts, processed = self._cuts(logits, slots, slots_np)
        at = pos.long() + 1 - self.slots.starts[slots]
        targets = torch.zeros_like(at) if targets is None else targets
        greedy = self.sampling_states.temperature.np[slots_np] == 0
        draws = {
            warm: packed_draw(processed, self.slots.keys[slots], at, targets, float(warm), *cuts)
            for warm in {*(~greedy).tolist()}
        }
        self.packed = draws.get(True, draws.get(False))
        if len(draws) == 2:
            still = self.sampling_states.temperature.gpu[slots] == 0
            self.packed = torch.where(still, draws[False], draws[True])
        drawn = self.packed[0].long()
        if not keyed.all():
            theirs, told = super()._sample_random(logits, slots.int(), slots_np, pos, top_k, top_p, False)
            ours = self.slots.keyed[slots]
            drawn, processed = torch.where(ours, drawn, theirs), torch.where(ours[:, None], processed, told)
        return drawn, processed

    def guess(self, logits: Tensor, slots: Tensor, pos: Tensor) -> Tensor:
        """What a draft model with logits [N, V] expects to be drawn: its own draws with the same noise, int64 [N]."""
        slots = slots.long()
        at = pos.long() + 1 - self.slots.starts[slots]
        temperature = self.sampling_states.temperature.gpu[slots][:, None]
        scaled = logits / torch.where(temperature > 0, temperature, 1.0)
        drawn = packed_draw(scaled, self.slots.keys[slots], at, torch.zeros_like(at), 1.0, 0, 1.0)[0].long()
        return torch.where(temperature[:, 0] > 0, drawn, logits.argmax(-1))

    def _cuts(self, logits, slots, slots_np) -> tuple[tuple[int, float], Tensor]:
        """The top-k and top-p that are left for the draw to cut, and logits [N, V] cut by what is not."""
        columns = self.sampling_states.top_k.np[slots_np], self.slots.top_p_np[slots_np]
        laws = {*zip(*(column.tolist() for column in columns), strict=True)}
        told = self.sampling_states.max_num_logprobs(slots_np) != NO_LOGPROBS
        if len(laws) == 1 and not told:
            return laws.pop(), logits
        cut = logits
        for k, p in laws - {(self.sampling_states.vocab_size, 1.0)}:
            rows = (self.sampling_states.top_k.gpu[slots] == k) & (self.slots.top_p[slots] == p)
            cut = torch.where(rows[:, None], process_logits(logits, 1.0, k, p), cut)
        return (0, 1.0), cut


class KeyedVerifier(RejectionSampler):
    """Draws at every row as plain decoding would; draft tokens stand up to the first that was not drawn.

    vLLM keeps the rest: chunks of rows, log-probs, placeholders, prompts of which a step computes a part.
    """

    def _verify(
        self, logits, draft_logits, inputs, pos, firsts, slots, slots_np, row_slots, row_places, lengths_np, drafts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, V] that were drawn from, tokens [R, K + 1] and how many of them stand [R].

        Args: firsts: of each request's rows, and their end, [R + 1]; drafts: [N], the token fed at a row, which is what
            the row before it has to draw; -1 stands never.
        """
        drawn, processed = self.sampler.sample(
            logits, row_slots, slots, slots_np, pos, inputs, row_places, lengths_np, return_logprobs=True
        )
        first, rows = firsts[:-1, None].long(), (firsts[1:] - firsts[:-1])[:, None]
        step = torch.arange(self.num_speculative_steps + 1, device=logits.device)
        here = (first + step).clamp(max=len(drawn) - 1)
        tokens = torch.where(step < rows, drawn[here], 0)
        behind = drafts[(here + 1).clamp(max=len(drawn) - 1)]
        stands = (step + 1 < rows) & (behind == tokens)
        return processed, tokens, 1 + stands.cumprod(1).sum(1, dtype=torch.int32)


def share_noise(runner) -> None:
    """A draft model draws with the policy's noise: then it agrees with it as often as two draws can.

    What vLLM has captured of a head's passes at its start holds draws with its own noise, so they run uncaptured.
    """
    speculator = runner.speculator
    if isinstance(speculator, DraftModelSpeculator):
        speculator.init_cudagraph_manager(CUDAGraphMode.NONE)
        speculator.sample_draft = lambda hidden, pos, slots, _law, _seeds, _step, _cache, step=0: runner.sampler.guess(
            speculator.compute_draft_logits(hidden, step), slots, pos
        )


def install(runner, verifier: type[KeyedVerifier] = KeyedVerifier) -> KeyedVerifier:
    """Gives a model runner the keyed sampler. Before its first request; see `check` for what it relies on."""
    runner.sampler.__class__ = KeyedSampler  # whoever holds it shall have it
    runner.sampler.slots = Keys(runner)
    runner.rejection_sampler = verifier(runner.sampler, runner.speculative_config, runner.device)
    return runner.rejection_sampler
