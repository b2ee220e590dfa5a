"""Which models packed passes run: decided when an engine is built, by what a model does and not by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface

from specrl.rollout.engines.base import evaluation, out_of_memory
from specrl.rollout.types import RolloutError

if TYPE_CHECKING:
    from specrl.rollout.engines.local.ragged import RaggedModel

OWN = "specrl_own"
EXACT = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest error of a logit, relative to the largest there is."""
ROUNDED = 0.15
"""In coarser types: root mean square error of the logits, relative to their spread, that rounding explains."""
BESIDE, COARSE_BESIDE = {torch.float64: 1e-8, torch.float32: 1e-4}, 0.01
"""The same of a row's logits when the other row of its pass changes: 0 but for the rounding of experts."""
HEAD = 0.02
"""The same output layer on the same hidden states: largest error of a logit, relative to the largest."""


def check(model: RaggedModel) -> tuple[int, str]:
    """Compares packed passes with the model's own.

    Numbers alone would pass a model whose weights are small, as untrained ones are, and what hides in the rounding of a
    coarse type or shows in longer texts only. So what does not depend on the weights is looked at as itself: what the
    attention is asked for (`ragged_attention`), which tokens it may see, what becomes of logits behind the output
    layer, whether a row's logits depend on another row, and whether the rotary embedding depends on the longest text.

    Returns: the most tokens of a row, and why there are no more where that is not the model's own limit.

    Raises:
        RolloutError: the model computes something that packed passes do not.
    """
    try:
        with evaluation(model.model), torch.no_grad():
            _structure(model)
            _numbers(model)
            _head(model)
            return _length(model)
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        name = type(model.model).__name__
        raise RolloutError(f"{name} does not work with the transformers engine: {error}") from error


def _texts(vocab: int) -> list[list[int]]:
    return [[(first + step * i) % vocab for i in range(7)] for first, step in ((5, 1), (31, 3), (17, 2))]


def _own(model: RaggedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """The model's own logits [R, n, V] of rows of equal length."""
    return model.model(input_ids=torch.tensor(rows, device=model.device), use_cache=False).logits.float()


def _structure(model: RaggedModel) -> None:
    """Refuses layers that packed passes do not know, whatever their weights."""
    if getattr(model.model, "_is_stateful", False):
        raise RolloutError("it carries a state from token to token, which the rows of a pass would share")
    text, *_ = _texts(model.vocab)
    stacks = [part for part in model.decoder.children() if isinstance(part, torch.nn.ModuleList)]
    wide, layers = model.two_rows(text, text, spread=2)
    if len(layers) < (len(stacks[0]) if len(stacks) == 1 else 1):
        raise RolloutError(f"only {len(layers)} of its layers use the attention interface of transformers")
    if torch.equal(wide, model.two_rows(text, text)[0]):
        raise RolloutError("it takes no notice of the positions that it is given")


def _numbers(model: RaggedModel) -> None:
    """Refuses logits of two rows, each fed in two passes, that are not the model's own or not each row's own."""
    text, other, third = _texts(model.vocab)
    own, (packed, _), dtype = _own(model, [text])[0], model.two_rows(text, text), model.dtype
    want = torch.cat([own[4:], own[1:]])
    if dtype in EXACT:
        error, allowed = ((packed - want).abs().max() / _largest(want)).item(), EXACT[dtype]
    else:  # between two batches a model may differ from itself by more than is usual, as one with experts does
        error = _relative(packed, want)
        allowed = max(ROUNDED, 4 * _relative(_own(model, [text, other, third])[0], own))
    if not error <= allowed:
        raise RolloutError(
            f"its logits differ by {error:.2g} from the model's own (an attention variant or a logit transform that "
            "the packed path does not know)"
        )
    beside = _relative(model.two_rows(other, text)[0][3:], packed[3:])
    if not beside <= BESIDE.get(dtype, COARSE_BESIDE):
        raise RolloutError(f"a row's logits change by {beside:.2g} with the text of the other row in its pass")


def _head(model: RaggedModel) -> None:
    """Refuses a model that does something to logits behind its output layer, seen on logits that are large enough."""
    (text, *_), seen = _texts(model.vocab), []

    def enlarge(module, args):
        logits, hidden = module.forward(*args).float(), args[0].float()
        scale = min(1e3 / max(logits.abs().max().item(), 1e-9), 1e4 / max(hidden.abs().max().item(), 1e-9))
        return (args[0] * scale,)

    def keep(module, args, output):
        seen.append(output.float())

    with _hooked([model.lm_head.register_forward_pre_hook(enlarge), model.lm_head.register_forward_hook(keep)]):
        own = _own(model, [text])
    if not seen or seen[-1].shape != own.shape:
        raise RolloutError("its logits do not come from its output layer")
    error = ((own - seen[-1]).abs().max() / _largest(seen[-1])).item()
    if not error <= HEAD:
        raise RolloutError(f"its logits differ by {error:.2g} from its output layer's (a soft cap, a scale)")


def _relative(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference of logits [N, V] relative to their spread over the vocabulary."""
    spread = (want - want.mean(-1, keepdim=True)).square().mean().sqrt()
    return ((got - want).square().mean().sqrt() / spread.clamp(min=1e-30)).item()


def _largest(logits: Tensor) -> Tensor:
    return (logits - logits.mean(-1, keepdim=True)).abs().max().clamp(min=1e-30)


# Long texts ----------------------------------------------------------------------------------------------------------


def _length(model: RaggedModel) -> tuple[int, str]:
    """The most tokens of a row, and why there are no more.

    Raises:
        RolloutError: which tokens see which, or the rotary embedding, follows rules that packed passes do not know.
    """
    config = model.model.config.get_text_config()
    context, why = getattr(config, "max_position_embeddings", None) or 1 << 30, ""
    for seen in _masks(model):
        if (hidden := _first_hidden(seen, context, model.device)) is not None:
            context, why = hidden, "; beyond it this model hides early tokens in a way that packed passes do not know"
    if _rotary_changes(model, context):
        original = min((n for n in _originals(config) if 1 < n < context), default=0)
        if not original or _rotary_changes(model, original):
            raise RolloutError("its rotary embedding changes with the longest text, from an unknown length on")
        context, why = original, "; beyond it this model's rotary embedding changes with the longest row of a batch"
    return context, why


def _masks(model: RaggedModel) -> list[Callable]:
    """What decides which tokens its attention sees in the model's own pass, less the windows that it is told of."""
    made: list[tuple[Tensor, Callable]] = []
    unknown: list[Callable] = []
    strange: list[str] = []
    device = model.device  # what is registered below stays so, and must not keep the model

    def mask(*args, **options):
        tensor = AttentionMaskInterface()["sdpa"](*args, **{**options, "allow_is_causal_skip": False})
        made.append((tensor, options["mask_function"]))
        return tensor

    def attention(module, query, key, value, attention_mask, **options):
        window = options.get("sliding_window")
        if attention_mask is not None and not _causal(attention_mask, window):
            strange.append(type(module).__name__)
        functions = [f for tensor, f in made if tensor is attention_mask] or [f for _, f in made]  # a part of any
        if attention_mask is not None:
            unknown.extend(f for f in functions if f not in unknown and _first_hidden(f, 1 << 30, device) != window)
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)

    AttentionMaskInterface.register(OWN, mask)
    AttentionInterface.register(OWN, attention)
    with model.attention(OWN):
        _own(model, _texts(model.vocab)[:1])
    made.clear()
    if strange:
        raise RolloutError(f"the mask of its attention ({strange[0]}) is not the causal one that packed passes compute")
    return unknown


def _causal(mask: Tensor, window: int | None) -> bool:
    """True for a mask [..., n, n], boolean or additive, that hides what is later or behind the window, and no more."""
    past = torch.arange(mask.shape[-2], device=mask.device)[:, None] - torch.arange(mask.shape[-1], device=mask.device)
    seen = (past >= 0) if window is None else (past >= 0) & (past < window)
    bare = mask.dtype == torch.bool or ((mask == 0) | (mask < -1e3)).all()
    return bool(bare and ((mask if mask.dtype == torch.bool else mask == 0) == seen).all())


def _first_hidden(sees: Callable, length: int, device: torch.device) -> int | None:
    """The first position below `length` that does not see position 0; None if all do."""

    def hidden(position: int) -> bool:
        zero = torch.tensor(0, device=device)
        return not sees(zero, zero, torch.tensor(position, device=device), zero)

    low, high = 0, length - 1
    if not hidden(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle, high)
    return high


def _originals(config) -> Iterator[int]:
    """Lengths that the configuration calls original."""
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (vars(config), ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        if isinstance(n := part.get("original_max_position_embeddings"), int):
            yield n


def _rotary_changes(model: RaggedModel, length: int) -> bool:
    """True if a text of `length` tokens gives its first positions other rotary embeddings than a short one does."""
    far, near = (_rotary(model, last) for last in (min(length, 1 << 20) - 1, 2))  # short last: some keep what they used
    return any(not torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(far, near, strict=True))


def _rotary(model: RaggedModel, last: int) -> list[Tensor]:
    """What the model's rotary modules give the positions 0 and 1 of a text whose third token is at `last`."""
    found: list[Tensor] = []

    def keep(module, args, output):
        for table in output if isinstance(output, tuple) else (output,):
            if torch.is_tensor(table) and table.dim() > 1 and table.shape[-2] == 3:
                found.append(table[..., :2, :].clone())

    rotary = [module for module in model.decoder.modules() if "rotary" in type(module).__name__.lower()]
    with _hooked([module.register_forward_hook(keep) for module in rotary]):
        if rotary:
            text = torch.tensor([_texts(model.vocab)[0][:3]], device=model.device)
            positions = torch.tensor([[0, 1, last]], device=model.device)
            model.decoder(input_ids=text, position_ids=positions, use_cache=False)
    return found


@contextmanager
def _hooked(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Takes the hooks off again."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
