"""Builds the packed passes of a model and probes at start whether they compute what the model itself computes.

Logits alone would not show a difference of a model whose weights are small, of a 16-bit type, or of long texts. So the
probe also compares what does not depend on the weights: the arguments that attention receives
(`model.packed_attention`), which tokens its masks hide, enlarged logits, and keys beside a far position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import SamplingParams, evaluation, out_of_memory
from specrl.rollout.engines.local.kv import KV
from specrl.rollout.engines.local.model import PackedModel
from specrl.rollout.types import RolloutError

OWN = "specrl_own"
TEXT, OTHER, THIRD = [5, 6, 7, 8, 9, 10, 11], [31, 34, 37, 40, 43, 46, 49], [17, 19, 21, 23, 25, 27, 29]
EXACT = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Tolerated root mean square error of logits or keys, relative to their spread."""
ROUNDED, ROUNDED_KEYS, ISOLATED = 0.15, 0.02, 0.01
"""The same in 16 bits: of logits, of keys, and of a row's logits when the other row of its pass changes."""


def packed_model(
    model: PreTrainedModel, sampling: SamplingParams, limits: RolloutConfig | None = None, checked: bool = True
) -> PackedModel:
    """The model with the passes that its device wants: static ones on CUDA in half precision, else padded rows.

    Args: checked: probe the model, see `probe`.
    """
    packed: PackedModel
    if on_gpu(model):
        from specrl.rollout.engines.local.static import StaticModel

        packed = StaticModel(model, sampling, limits)
    else:
        packed = PackedModel(model, sampling, limits)
    if checked:
        packed.context, packed.limit = probe(packed)
    return packed


def on_gpu(model: PreTrainedModel) -> bool:
    """True for weights on CUDA in half precision, with heads that flash attention supports, and without autocast."""
    weight = next(model.parameters(), torch.empty(0))
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cuda"):
        return False
    config = model.config.get_text_config()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim % 8 == 0 and dim <= 256


def check_kind(model: PreTrainedModel) -> None:
    """Refuses a model whose class, configuration or layers say that packed passes do not compute it.

    It needs no weights, so a model on the meta device is enough; `probe` finds what only numbers show.

    Raises:
        RolloutError: the message names what it has.
    """
    if getattr(model, "_is_stateful", False):
        raise RolloutError("it carries a state from token to token, which the rows of a pass would share")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if value := getattr(model.config.get_text_config(), cap, None):
            raise RolloutError(f"it has {cap}={value}, which packed passes do not compute")
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        raise RolloutError("its attention has sinks, which packed passes do not compute")


def probe(model: PackedModel) -> tuple[int, str]:
    """Compares packed passes with the model's own.

    Returns: the most tokens of a row, and why there are no more if that is not the model's own limit.

    Raises:
        RolloutError: the model computes something that packed passes do not; the message names what differs.
    """
    try:
        with evaluation(model.model), torch.no_grad():
            check_kind(model.model)
            _compare_logits(model)
            _compare_output_layer(model)
            return _context(model)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        name = type(model.model).__name__
        raise RolloutError(f"{name} does not work with the transformers engine: {error}") from error


def _own(model: PackedModel, *rows: Sequence[int]) -> Tensor:
    """The model's own logits [R, n, V] of rows of equal length."""
    ids = torch.tensor(rows, device=model.device) % model.vocab
    return model.model(input_ids=ids, use_cache=False).logits.float()


def two_rows(model: PackedModel, other: Sequence[int], last: int = 6) -> tuple[Tensor, KV, set[int]]:
    """A packed batch of the rows `other` and TEXT, each fed in two passes.

    Args: last: position of the last token of `other` that is given to the model; the token is written at 6.
    Returns: logits [9, V] of other[4:] and of TEXT[1:]; the KV; the layers whose attention took part.
    """
    kv = model.kv(2, 7)
    with model.inference():
        for first, second, starts in ((other[:4], TEXT[:1], (0, 0)), (other[4:], TEXT[1:], (4, 1))):
            lengths = len(first), len(second)
            positions = [*range(starts[0], starts[0] + lengths[0]), *range(starts[1], starts[1] + lengths[1])]
            if starts[0]:
                positions[lengths[0] - 1] = last
            layout = model.layout(kv, [0, 1], starts, lengths, model.device, positions)
            hidden = model.forward([token % model.vocab for token in (*first, *second)], layout)
        return model.lm_head(hidden).float(), kv, layout.layers


def _compare_logits(model: PackedModel) -> None:
    """Refuses logits of two rows that are not the model's own, or that depend on the other row."""
    packed, kv, layers = two_rows(model, TEXT)
    stacks = [part for part in model.decoder.children() if isinstance(part, torch.nn.ModuleList)]
    if len(layers) < (len(stacks[0]) if len(stacks) == 1 else 1):
        raise RolloutError(f"only {len(layers)} of its layers use the attention interface of transformers")
    exact = EXACT.get(model.dtype)
    if _error(kv.keys(0, 7)[0], kv.keys(1, 7)[0]) > (exact or ROUNDED_KEYS):
        raise RolloutError("it ignores the positions that it is given: two rows with the same text have other keys")
    own = _own(model, TEXT)[0]
    error = _error(packed, torch.cat([own[4:], own[1:]]))
    if not error <= (exact or max(ROUNDED, 4 * _rounding(model, own))):
        raise RolloutError(
            f"its logits differ by {error:.2g} from the model's own (an attention variant or a logit transform that "
            "the packed path does not know)"
        )
    error = _error(two_rows(model, OTHER)[0][3:], packed[3:])
    if not error <= (exact or ISOLATED):
        raise RolloutError(f"a row's logits change by {error:.2g} with the text of the other row in its pass")


def _rounding(model: PackedModel, own: Tensor) -> float:
    """By how much a model in 16 bits differs from itself: with experts between batches, and between its attentions.

    Some real models have large activations, so that roundings of the attention alone change their logits by a fifth.
    """
    other_batch = _own(model, TEXT, OTHER, THIRD)[0]
    with model.attention("eager"):
        other_attention = _own(model, TEXT)[0]
    return max(_error(other_batch, own), _error(other_attention, own))


def _compare_output_layer(model: PackedModel) -> None:
    """Refuses a model that changes the logits of its output layer, which shows on logits that are large enough."""
    seen: list[Tensor] = []

    def enlarge(module, args):
        logits, hidden = module.forward(*args).float(), args[0].float()
        scale = min(1e3 / max(logits.abs().max().item(), 1e-9), 1e4 / max(hidden.abs().max().item(), 1e-9))
        return (args[0] * scale,)

    hooks = [
        model.lm_head.register_forward_pre_hook(enlarge),
        model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.float())),
    ]
    try:
        own = _own(model, TEXT)
    finally:
        for hook in hooks:
            hook.remove()
    if not seen or seen[-1].shape != own.shape:
        raise RolloutError("its logits do not come from its output layer")
    error = _error(own, seen[-1])
    if not error <= ROUNDED_KEYS:
        raise RolloutError(f"its logits differ by {error:.2g} from its output layer's (a soft cap, a scale)")


def _context(model: PackedModel) -> tuple[int, str]:
    """The most tokens of a row, and why there are no more."""
    context, why = model.context, ""
    for sees in _unknown_masks(model):
        hidden = _first_hidden(sees, context, model.device)
        if hidden < context:
            context = hidden
            why = "; beyond it this model hides early tokens in a way that packed passes do not know"

    def rotary_changes(length: int) -> bool:
        """Whether a row of `length` tokens changes the keys of the other row in its pass."""
        far = two_rows(model, TEXT, length - 1)[1].keys(1, 7)
        near = two_rows(model, TEXT)[1].keys(1, 7)  # after it, as a short text undoes what a long one has changed
        return any(_error(a, b) > EXACT.get(model.dtype, ROUNDED_KEYS) for a, b in zip(far, near, strict=True))

    longest = min(context, 1 << 20)
    if rotary_changes(longest):
        context = 7 + bisect_left(range(8, longest), True, key=rotary_changes)
        why = "; beyond it this model's rotary embedding changes with the longest row of a batch"
    return context, why


def _unknown_masks(model: PackedModel) -> list[Callable]:
    """The mask functions of the model's own pass that hide more than the window that the attention is given.

    Raises:
        RolloutError: a mask is not causal.
    """
    made: list[tuple[Tensor, Callable]] = []
    unknown: list[Callable] = []
    odd: list[str] = []
    device = model.device  # the functions stay registered and must not keep the model

    def mask(*args, **options):
        tensor = AttentionMaskInterface()["sdpa"](*args, **{**options, "allow_is_causal_skip": False})
        made.append((tensor, options["mask_function"]))
        return tensor

    def attention(module, query, key, value, attention_mask, **options):
        window = options.get("sliding_window")
        if attention_mask is not None:
            if not _is_causal(attention_mask, window):
                odd.append(type(module).__name__)
            functions = [f for tensor, f in made if tensor is attention_mask] or [f for _, f in made]  # a part of any
            most = 1 << 30
            unknown.extend(f for f in functions if _first_hidden(f, most, device) != (window or most))
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)

    AttentionMaskInterface.register(OWN, mask)
    AttentionInterface.register(OWN, attention)
    with model.attention(OWN):
        _own(model, TEXT)
    made.clear()
    if odd:
        raise RolloutError(f"the mask of its attention ({odd[0]}) is not the causal one that packed passes compute")
    return unknown


def _is_causal(mask: Tensor, window: int | None) -> bool:
    """True for a mask [..., n, n], boolean or additive, that hides later tokens and those beyond the window only."""
    past = torch.arange(mask.shape[-2], device=mask.device)[:, None] - torch.arange(mask.shape[-1], device=mask.device)
    causal = (past >= 0) if window is None else (past >= 0) & (past < window)
    if mask.dtype == torch.bool:
        return bool((mask == causal).all())
    return bool(((mask == 0) | (mask < -1e3)).all() and ((mask == 0) == causal).all())


def _first_hidden(sees: Callable, length: int, device: torch.device) -> int:
    """The first position below `length` that does not see position 0; `length` if all do."""
    zero = torch.tensor(0, device=device)
    return bisect_left(range(length), True, key=lambda i: not sees(zero, zero, torch.tensor(i, device=device), zero))


def _error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference relative to the spread of `want` over its last dimension."""
    want = want.float()
    spread = (want - want.mean(-1, keepdim=True)).square().mean().sqrt()
    return ((got - want).square().mean().sqrt() / spread.clamp(min=1e-30)).item()
