"""The draft models of `rollout.drafter`: a head on the policy's hidden states, or a separate model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaPreTrainedModel, LlamaRotaryEmbedding

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.chain import Chain
from specrl.rollout.durable import read_json
from specrl.rollout.engines.base import EngineSpec, SamplingParams
from specrl.rollout.engines.local.drafter import ModelDrafter
from specrl.rollout.engines.local.model import Layout, base_model
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.types import Request, RolloutError

ARCHITECTURE = "EagleLlamaForCausalLM"
"""vLLM's name of such a head, in its config.json."""
WEIGHTS = "model.safetensors"
TAKEN = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps")
"""Of the policy's configuration."""


class Head(LlamaPreTrainedModel):
    """EAGLE's drafter (arXiv 2401.15077): reads the policy's final hidden state and the token sampled from it.

    After the tokens x_1 .. x_{t+1} of a text, with h_t the policy's hidden state at x_t, the layer f gives

        h'_{t+1} = f(W [e(x_{t+1}); h_t]), attending to such entries of earlier positions,

    an approximation of h_{t+1}: the output layer turns it into the distribution of x_{t+2}, and the head continues from
    h'_{t+1} with the token sampled. As in EAGLE there is no norm before or after the layer. Embedding and output layer
    are the policy's own, with its present weights; they are not among the head's parameters.

    Args:
        config: of the layer, with the policy's hidden size.
        policy: a causal LM of transformers.
    """

    def __init__(self, config: LlamaConfig, policy: PreTrainedModel):
        super().__init__(config)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._borrowed = policy.get_input_embeddings(), policy.get_output_embeddings()  # a tuple registers no module
        self.post_init()
        self.to(self._borrowed[1].weight.device, self._borrowed[1].weight.dtype)

    @classmethod
    def of(cls, policy: PreTrainedModel) -> Head:
        """A fresh head, initialised from the policy's first layer where shapes agree.

        Raises:
            RolloutError: the policy's configuration names no sizes of a layer.
        """
        theirs = policy.config.get_text_config()
        if missing := [name for name in TAKEN if not hasattr(theirs, name)]:
            raise RolloutError(
                f"a head needs the sizes of a layer, and {type(theirs).__name__} has no {', '.join(missing)}. Use a "
                "draft model: `python -m specrl.drafter kind=model`"
            )
        config = LlamaConfig(
            **{name: getattr(theirs, name) for name in TAKEN},
            head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
            max_position_embeddings=getattr(theirs, "max_position_embeddings", 2048),
            rope_parameters=copy.deepcopy(getattr(theirs, "rope_parameters", None)),
            num_hidden_layers=1,
            architectures=[ARCHITECTURE],
        )
        head, half = cls._made(config, policy), torch.eye(config.hidden_size)
        weights = policy.state_dict()
        with torch.no_grad():
            for name, weight in head.state_dict().items():
                like = next((w for n, w in weights.items() if n.endswith(f".{name}") and w.shape == weight.shape), None)
                if like is not None:
                    weight.copy_(like.full_tensor() if hasattr(like, "full_tensor") else like)
            head.fc.weight.copy_(torch.cat([half, 0.5 * half], 1))
        return head.eval()

    @classmethod
    def load(cls, directory: str | Path, policy: PreTrainedModel) -> Head:
        """What `save_pretrained` wrote.

        Raises:
            RolloutError: it is damaged, or another policy's.
        """
        path = Path(directory)
        try:
            head = cls._made(LlamaConfig.from_pretrained(path, local_files_only=True), policy)
            head.load_state_dict(load_file(path / WEIGHTS))
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise RolloutError(f"the head in {path} cannot be read: {str(error).strip().splitlines()[0]}") from error
        hidden = policy.get_output_embeddings().weight.shape[1]
        if head.config.hidden_size != hidden:
            raise RolloutError(
                f"the head in {path} reads hidden states of {head.config.hidden_size} numbers, and the policy's have "
                f"{hidden}. Make one for this policy: `python -m specrl.drafter kind=head`"
            )
        return head.eval()

    @classmethod
    def _made(cls, config: LlamaConfig, policy: PreTrainedModel) -> Head:
        """The same in every process; the run's random state is left as it is."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cls(config, policy)

    def save_pretrained(self, directory: str | Path) -> None:  # type: ignore[override]  # it has no options
        """Writes a directory for `load`, and for vLLM as the model of its speculation method `eagle`."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        self.config.architectures = [ARCHITECTURE]
        self.config.save_pretrained(path)
        weights = {name: weight.contiguous() for name, weight in self.state_dict().items()}
        save_file(weights, path / WEIGHTS, {"format": "pt"})

    def __deepcopy__(self, memo: dict[int, Any]) -> Head:
        """The copy borrows the same layers."""
        memo |= {id(module): module for module in self._borrowed}
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__ |= {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        return twin

    def get_input_embeddings(self) -> nn.Module:
        return self._borrowed[0]

    def get_output_embeddings(self) -> nn.Module:
        return self._borrowed[1]

    def forward(
        self,
        input_ids: Tensor,
        states: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        layout: Layout | None = None,
    ) -> BaseModelOutput:
        """Approximate states [B, T, H] of the policy, each one position later than its input.

        Args:
            input_ids: tokens [B, T], each the one that follows its state.
            states: [B, T, H] of the policy, or the head's own. A packed pass reads the states that the policy's passes
                have written; one that samples writes its own state of each row's last token after them, to go on from.
        """
        shared = None if layout is None else layout.kv.policy_states
        if layout is not None and shared is not None:
            slots = layout.slot_mapping()
            buffer = shared.buffer(self.config.hidden_size, self.dtype, input_ids.device)
            states = buffer[slots][None]
        elif states is None:  # a pass that is only timed
            states = self.fc.weight.new_zeros(*input_ids.shape, self.config.hidden_size)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        # Called without hooks: a sharded policy's would begin a forward pass of all of it.
        embedded = self._borrowed[0].forward(input_ids)
        hidden = self.fc(torch.cat([embedded, states.to(self.dtype)], -1))
        extra = {} if layout is None else {"layout": layout}
        rotary = self.rotary_emb(hidden, position_ids)
        hidden = self.layers[0](hidden, position_ids=position_ids, position_embeddings=rotary, **extra)
        if layout is not None and shared is not None and layout.samples:
            last = layout.last_tokens()
            buffer[slots[last] + 1] = hidden[0, last].to(buffer.dtype)
        return BaseModelOutput(hidden)


class HeadDrafter(ModelDrafter):
    """Chain drafts by a head. It reads the states that the policy's passes keep (`KV.states`), so it needs no pass over
    the text. Its rows have the slabs that they have at the policy's reader.

    Args: see `ModelDrafter`.
    """

    reads_states = True

    def __init__(self, head: Head, sampling: SamplingParams, limits: RolloutConfig | None = None, ids: int = 0):
        super().__init__(head, sampling, limits, ids)
        self.packed.kv_bytes += head.config.hidden_size * head.fc.weight.element_size()

    def propose(
        self, texts: Mapping[int, Sequence[int]], limits: Sequence[int], chain: Chain, budget: Budget
    ) -> list[list[int]]:
        """See `ModelDrafter.propose`. The draft is rolled back, as it was computed from approximate states."""
        drafts = super().propose(texts, limits, chain, budget)
        for row, text in texts.items():
            self.reader.rollback(row, len(text))
        return drafts

    def _reader_of(self, requests: Sequence[Request], max_rows: int, policy: Reader) -> Reader:
        """The head's texts lack the first token: an entry is a token with the state before it."""
        return Reader(self.packed, [_shifted(request) for request in requests], max_rows, states=policy)


def drafter_of(
    model: PreTrainedModel, sampling: SamplingParams, limits: RolloutConfig | None = None, ids: int = 0
) -> ModelDrafter:
    """Drafts by a head, or by a model that reads the text itself. Args: see `ModelDrafter`."""
    if isinstance(model, Head):
        return HeadDrafter(model, sampling, limits, ids)
    return ModelDrafter(model, sampling, limits, ids)


def load_drafter(spec: EngineSpec, policy: PreTrainedModel) -> PreTrainedModel:
    """The draft model of `rollout.drafter`: a head on the policy, or a separate model.

    Raises:
        RolloutError: it cannot be loaded, or is a head where drafts are accepted as text.
    """
    rollout = spec.rollout
    if rollout.drafter != "head" and not is_head(rollout.drafter):
        try:
            return spec.load(rollout.drafter)
        except (OSError, ValueError) as error:
            missing = "" if Path(rollout.drafter).is_dir() else "there is no such directory, and "
            raise RolloutError(
                f"rollout.drafter={rollout.drafter} cannot be loaded: {missing}{str(error).strip().splitlines()[0]} "
                "Give a model directory, such as `python -m specrl.drafter out=DIR` writes"
            ) from error
    check_writes_text(rollout)
    policy = base_model(policy)
    return Head.of(policy) if rollout.drafter == "head" else Head.load(rollout.drafter, policy)


def check_writes_text(rollout: RolloutConfig) -> None:
    """Raises RolloutError for a head as `rollout.drafter` where drafts are accepted as text."""
    if rollout.acceptance in ("judged", "routed") and (rollout.drafter == "head" or is_head(rollout.drafter)):
        raise RolloutError(
            f"rollout.acceptance={rollout.acceptance} accepts text of rollout.drafter, but a head on the policy's "
            "states writes none by itself. Use a draft model, as `python -m specrl.drafter kind=model out=DIR` makes"
        )


def is_head(directory: str) -> bool:
    """Whether the directory holds a head on hidden states, as its config.json says."""
    try:
        return ARCHITECTURE in read_json((Path(directory) / "config.json").read_text("utf-8"))["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _shifted(request: Request) -> Request:
    """The same without its first token. A prompt of one token stays, and its rows' drafts are rejected."""
    prompt = request.prompt[1:] or request.prompt
    return Request(prompt, request.key, request.max_new_tokens, position=request.position)
