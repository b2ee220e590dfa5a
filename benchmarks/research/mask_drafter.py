"""A draft model that drafts K tokens in one pass, after PARD (arXiv 2504.18583), from mask tokens.

Mask i after a text has the position of the i-th token to come, sees the text and the masks before it, and learns the
policy's distribution of the token after its position. In training every position of a response is such an end of the
text. Of the masks at depth i a share of max(0.7^i, 0.2) is kept, and none whose predecessor was dropped (PARD's COD).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import OneCycleLR
from transformers import PreTrainedModel

from benchmarks.research.responses import response_states
from specrl.drafter import DrafterOptions
from specrl.trainers.cotraining.texts import Text

KEEP, LEAST = 0.7, 0.2  # COD's shares
_PADDING = 1 << 12  # an end that no text reaches: padding sees and is seen by padding only


@dataclass(frozen=True)
class Ends:
    """A text and masks after its prefixes, flat int64 [S]."""

    ids: Tensor
    ends: Tensor
    """Place of a token, and for a mask that of the last token it sees."""
    depths: Tensor
    """0 for tokens of the text, i for the i-th mask."""
    first: int
    """Place whose answer is the response's first token."""

    @property
    def answers(self) -> Tensor:
        """Index of the response token that each position of the response answers [N]."""
        return (self.ends + self.depths)[self.answering] - self.first

    @property
    def answering(self) -> Tensor:
        return self.ends >= self.first


def ends_of(text: Text, depth: int, rng: random.Random | None = None) -> Ends:
    """Every prefix of the response with `depth` - 1 masks after it. Args: rng: drops masks as COD does; None: none."""
    first, last = len(text.prompt) - 1, len(text) - 2
    ids = [*text.prompt, *text.response[:-1]]
    ends, depths, kept, share = [*range(len(ids))], [0] * len(ids), [*range(first, last + 1)], 1.0
    for i in range(1, depth):
        share, before = max(KEEP**i, LEAST), share
        kept = [end for end in kept if end + i <= last and (rng is None or rng.random() < share / before)]
        ends += kept
        depths += [i] * len(kept)
    ids += [0] * (len(ends) - len(ids))
    return Ends(torch.tensor(ids), torch.tensor(ends), torch.tensor(depths), first)


class MaskDrafter(nn.Module):
    """A student of the policy and the embedding of its one mask token.

    Args:
        student: as `specrl.drafter.shortened` makes it.
        depth: K, tokens that one pass drafts.
    """

    def __init__(self, student: PreTrainedModel, depth: int):
        super().__init__()
        self.student, self.depth = student, depth
        self.mask = nn.Parameter(student.get_input_embeddings().weight.mean(0).detach().clone())

    def forward(self, texts: Sequence[Ends]) -> Tensor:
        """Logits [N, V] of the positions that answer, one text after the other."""
        ids, depths = (pad_sequence([getattr(t, name) for t in texts], True) for name in ("ids", "depths"))
        ends = pad_sequence([t.ends for t in texts], True, _PADDING)
        embedded = torch.where((depths > 0)[..., None], self.mask, self.student.get_input_embeddings()(ids))
        before = (depths == 0)[:, None] & (ends[:, None] <= ends[..., None])
        deeper = (ends[:, None] == ends[..., None]) & (depths[:, None] <= depths[..., None])
        bias = torch.zeros(before.shape).masked_fill_(~(before | deeper), torch.finfo(torch.float32).min)
        hidden = self.student.base_model(
            inputs_embeds=embedded, attention_mask=bias[:, None], position_ids=ends + depths, use_cache=False
        ).last_hidden_state
        return self.student.get_output_embeddings()(
            torch.cat([row[: len(t.ids)][t.answering] for row, t in zip(hidden, texts, strict=True)])
        )


def distil(policy: PreTrainedModel, drafter: MaskDrafter, texts: Sequence[Text], options: DrafterOptions) -> None:
    """Trains in place as `specrl.drafter.distil` does: forward KL, AdamW, one cycle, the same batches."""
    near = sorted(texts, key=len)
    cuts = [near[at : at + options.batch] for at in range(0, len(near), options.batch)]
    hidden: dict[int, list[Tensor]] = {}
    steps, rate = options.schedule
    optimizer = torch.optim.AdamW(drafter.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    rng, began = random.Random(options.seed), time.perf_counter()
    order = (at for _ in count() for at in rng.sample(range(len(cuts)), len(cuts)))
    for step, at in zip(range(1, steps + 1), order, strict=False):
        ends = [ends_of(text, drafter.depth, rng) for text in cuts[at]]
        with torch.no_grad():
            if at not in hidden:
                hidden[at] = response_states(policy, cuts[at]).split([len(text.response) for text in cuts[at]])
            states = torch.cat([own[e.answers] for own, e in zip(hidden[at], ends, strict=True)])
            target = policy.get_output_embeddings()(states).log_softmax(-1)
        loss = kl_div(drafter(ends).log_softmax(-1), target, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % min(100, max(1, steps // 10)) == 0:
            took = time.perf_counter() - began
            print(f"step {step}/{steps} KL {loss.item():.4f} after {took:.0f} s", flush=True)
    drafter.eval()
