"""PPO (Schulman et al. 2017, arXiv 1707.06347) on accelerate: rollout, advantages, clipped updates, in reading order.

Rollouts, cache, rewards and metrics are the Collector's, as under GRPO; transformers' callbacks record, save and stop.
Nothing but weights, optimiser and schedule is remembered: data order, minibatches and dropout follow from (seed, step).
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from rollout.keys import derive_key
from rollout.types import RolloutBatch, RolloutError
from trainers import snapshot
from trainers.advantages import gae, reinforce_plus_plus, rloo, token_rewards, whiten
from trainers.base import Rollouts
from trainers.checkpoint import writing
from trainers.collector import Setup
from trainers.critic import ActorCritic, trunk_of
from trainers.experience import Experience
from trainers.losses import adapted_beta, clipped, kl_estimate, policy_loss, value_loss
from trainers.metrics import response_metrics
from trainers.prior import Prior

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
PROGRESS = ("global_step", "epoch", "num_input_tokens_seen")
SMOOTHING = 0.9  # of the explained variance, whose parts are small and noisy where a rollout's rewards are nearly alike


class PPOTrainer(Rollouts):
    """PPO whose responses come from SpeculativeRollout; see trainers/base.py for what a run asks of it.

    Args: as GRPOTrainerWithReuse; `args` are those of trainers.arguments.ppo_arguments.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        train_dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        setup: Setup,
        peft_config: PeftConfig | None = None,
    ):
        self.args, self._options, self._group_size = args, setup.trainer, setup.rollout.group_size
        self._dataset, self._tokenizer = train_dataset, tokenizer
        self.accelerator = Accelerator(cpu=args.use_cpu, mixed_precision="bf16" if args.bf16 else "no")
        if self.accelerator.distributed_type not in PLAIN:
            raise RolloutError(
                f"PPO trains with whole weights in every process, not with {self.accelerator.distributed_type.value}. "
                "Launch it with torchrun or with accelerate's MULTI_GPU, or take trainer.algorithm=grpo"
            )
        self._per_pass = args.per_device_train_batch_size
        self._build(model, setup.rollout.temperature, peft_config)
        self.state = TrainerState(
            max_steps=args.max_steps,
            logging_steps=args.logging_steps,
            save_steps=args.save_steps,
            num_train_epochs=args.num_train_epochs,
            is_world_process_zero=self.accelerator.is_main_process,
            is_local_process_zero=self.accelerator.is_local_main_process,
        )
        self._explained = [0.0, 0.0]  # variance of the critic's errors, and of returns
        self.control, self._beta, self._prior = TrainerControl(), setup.trainer.beta, Prior()
        flow = [DefaultFlowCallback, *get_reporting_integration_callbacks(args.report_to)]
        self._callbacks = CallbackHandler(flow, self.policy, tokenizer, self.optimizer, self.scheduler)
        self._beside: dict[str, list[float]] = defaultdict(list)  # metrics of callbacks
        self._open_rollouts(setup, lambda: self.policy, train_dataset, tokenizer, self._beside)

    def _build(self, model: PreTrainedModel, temperature: float, peft_config: PeftConfig | None) -> None:
        """Policy, critic, reference, optimiser and schedule."""
        options, critic = self._options, self._options.critic
        valued = options.advantage == "gae"
        trunk = trunk_of(model) if valued and critic.model == "separate" else None
        if trunk is not None and options.precision == "bf16":
            trunk.float()  # it is trained whole, also where adapters leave the policy's own weights in bf16
        plain = {"trunk": None, "valued": False, "temperature": temperature, "entropic": False}
        self._reference, self._initial = None, nullcontext
        if options.beta and not peft_config:
            self._reference = ActorCritic(copy.deepcopy(model), **plain).requires_grad_(False).eval()
        if peft_config:
            from peft import get_peft_model

            model = get_peft_model(model, peft_config)
            if options.beta:
                self._reference, self._initial = ActorCritic(model, **plain), model.disable_adapter
        if self.args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        entropic = options.entropy_bonus > 0
        both = ActorCritic(model, trunk=trunk, valued=valued, temperature=temperature, entropic=entropic)
        groups = [{"params": [p for p in model.parameters() if p.requires_grad], "lr": options.learning_rate}]
        if valued:
            own = [p for name, p in both.named_parameters() if not name.startswith("policy.")]
            groups.append({"params": own, "lr": critic.learning_rate})
        self.policy, self.model = model, self.accelerator.prepare_model(both)
        self.optimizer = torch.optim.AdamW(groups, weight_decay=options.weight_decay)
        self.scheduler = get_scheduler(
            options.lr_schedule, self.optimizer, options.warmup_steps, num_training_steps=self.args.max_steps
        )

    # The run -----------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """All steps that are left. A step is an optimiser step; every `steps_per_rollout`-th begins with a rollout."""
        if resume_from_checkpoint:
            self._load(Path(resume_from_checkpoint))
        self._event("on_train_begin")
        while self.state.global_step < self.args.max_steps and not self.control.should_training_stop:
            self._step()
        self._event("on_train_end")

    def _step(self) -> None:
        self._event("on_step_begin")
        step, logs = self.state.global_step, {}
        torch.manual_seed(derive_key(self.args.seed, "dropout", self.accelerator.process_index, step, "trainer"))
        if (update := step % self._options.steps_per_rollout) == 0:
            self._experience, logs = self._collect()
        # every minibatch has rows of all prompts, and the same ones on any number of processes
        part = self._experience.select(slice(update % self._options.minibatches, None, self._options.minibatches))
        logs = {**self._update(part), **logs, "num_tokens": self.state.num_input_tokens_seen}
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self._steps_per_epoch
        self._event("on_step_end")
        logs |= {name: values.pop() for name, values in self._beside.items() if values}
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._event("on_log", logs=logs)
        if self.control.should_save:
            self._save()
            self._event("on_save")

    def _event(self, name: str, **details) -> None:
        self.control = getattr(self._callbacks, name)(self.args, self.state, self.control, **details)

    # Rollout -> experience ---------------------------------------------------------------------------------------

    @property
    def _steps_per_epoch(self) -> int:
        return len(self._dataset) // self._options.prompts_per_step * self._options.steps_per_rollout

    def _inputs(self) -> list[dict]:
        """This process's dataset rows of the coming rollout: each prompt `group_size` times, shuffled every epoch."""
        epoch, step = divmod(self.state.global_step, self._steps_per_epoch)
        order = torch.Generator().manual_seed(self.args.seed * 1_000_003 + epoch)
        first = step // self._options.steps_per_rollout * self._options.prompts_per_step
        prompts = torch.randperm(len(self._dataset), generator=order)[first : first + self._options.prompts_per_step]
        rows = [index for index in prompts.tolist() for _ in range(self._group_size)]
        share = len(rows) // self.accelerator.num_processes
        own = rows[self.accelerator.process_index * share :][:share]
        return [self._dataset[index] for index in own]

    def _collect(self) -> tuple[Experience, dict[str, float]]:
        """Rolls out, scores with policy, critic and reference, and turns rewards into advantages."""
        got = self.collector.collect(self._inputs())
        rows, batch, rewards = got.rows, got.batch, got.rewards
        cut = [self._options.mask_truncated and c.finish == "length" for c in batch.completions]
        trained = [reward is not None and not out for reward, out in zip(rewards, cut, strict=True)]
        pad_id, device = self._tokenizer.pad_token_id, self.accelerator.device
        found = Experience.of(rows, batch.completions, trained, pad_id, device)
        totals = torch.tensor([torch.nan if r is None else r for r in rewards], device=device)
        ids = [row.example_id for row in rows]
        self._score(found, ids)
        gap = (found.old - found.drawn).abs()
        ratios = self.collector.importance(found.drawn, found.mask, own=lambda logp=found.old: logp)
        if self.collector.old_from_engine:
            found.old = found.drawn
        found.advantages, found.returns = self._advantages(found, totals, ids)
        if ratios is not None:
            found.advantages = found.advantages * ratios
        self.state.num_input_tokens_seen += int(self._total(found.attention.sum()))
        metrics = self.collector.finish() | self._batch_metrics(batch, totals) | self._value_metrics(found)
        metrics["sampling/sampling_logp_difference/mean"] = self._mean(gap, found.mask)
        metrics["sampling/sampling_logp_difference/max"] = (
            self.accelerator.gather((gap * found.mask).max()).max().item()
        )
        return found, metrics | self._adapt(found)

    @torch.no_grad()
    def _score(self, found: Experience, prompts: Sequence[str]) -> None:
        """Fills in the policy's and the reference's log-probs and the values, of responses to these prompts."""
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        pieces = [(piece.ids, piece.attention, found.length) for piece in found.split(self._per_pass)]
        scored = [model(*piece) for piece in pieces]
        found.old = torch.cat([outputs.logp for outputs in scored])
        if model.value is not None:
            found.facts = self._prior.facts(prompts, found.old, found.mask)
            found.prior = self._prior.values(found.facts)
            found.values = torch.cat([outputs.values for outputs in scored]) + found.prior
        if self._reference is not None:
            with self._initial(), self.accelerator.autocast():
                found.reference = torch.cat([self._reference(*piece).logp for piece in pieces])

    def _advantages(self, found: Experience, totals: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Advantages and, with a critic, returns [B, T] from total rewards [B] of responses to these prompts."""
        options, mask = self._options, found.mask
        penalised = found.reference is not None and options.kl_penalty == "reward"
        kl = found.old - found.reference if penalised else torch.zeros_like(mask)
        rewards = token_rewards(totals, kl, mask, self._beta)
        if options.advantage == "gae":
            advantages, returns = gae(rewards, found.values, mask, options.gamma, options.gae_lambda)
            whole, _ = gae(rewards, torch.zeros_like(mask), mask, options.gamma, 1.0)
            begun = [(prompt, w) for prompt, w, m in zip(prompts, whole[:, 0].tolist(), mask[:, 0], strict=True) if m]
            self._prior.learn(found.facts, whole, mask, self._total)
            self._prior.prompts.learn(gather_object(begun) if self.accelerator.num_processes > 1 else begun)
            return whiten(advantages, mask, self._total), returns
        if options.advantage == "reinforce_plus_plus":
            return reinforce_plus_plus(rewards, mask, options.gamma, self._total), None
        sums = rewards.sum(-1).masked_fill(mask.sum(-1) == 0, torch.nan)
        first = self.accelerator.process_index * len(sums)  # a group may go on in the next process
        own = rloo(self.accelerator.gather(sums), self._group_size)[first : first + len(sums)]
        return own[:, None] * mask, None

    # Experience -> update ----------------------------------------------------------------------------------------

    def _update(self, part: Experience) -> dict[str, float]:
        """One optimiser step on a minibatch, in which every token of all processes weighs the same."""
        self.model.train()
        tokens, sums = self._total(part.mask.sum()).clamp(min=1), Counter()
        pieces = list(part.split(self._per_pass))
        for i, piece in enumerate(pieces):
            with nullcontext() if i == len(pieces) - 1 else self.accelerator.no_sync(self.model):
                self.training_step(piece, tokens, sums)
        norms = [  # policy and critic apart, so that the critic's errors do not shrink the policy's step
            self.accelerator.clip_grad_norm_(group["params"], self.args.max_grad_norm or torch.inf).item()
            for group in self.optimizer.param_groups
        ]
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        means = self._total(torch.stack(list(sums.values()))) / tokens
        metrics = dict(zip(sums, means.tolist(), strict=True)) | {"grad_norm": norms[0], "learning_rate": rate}
        return metrics | ({"value/grad_norm": norms[1]} if part.values is not None else {})

    def training_step(self, piece: Experience, tokens: Tensor, sums: Counter) -> Tensor:
        """Forward and backward of the rows of one pass; returns their part of the minibatch's loss.

        Args:
            tokens: how many the minibatch has, over all processes.
            sums: collects metrics, summed over tokens.
        """
        options, mask = self._options, piece.mask
        outputs = self.model(piece.ids, piece.attention, piece.length)
        ratio = (outputs.logp, piece.old, piece.advantages, options.clip, options.clip_high or options.clip)
        found = {"policy_loss": policy_loss(*ratio), "entropy": outputs.entropy}
        loss = found["policy_loss"] - options.entropy_bonus * outputs.entropy
        if piece.values is not None:
            values = outputs.values + piece.prior
            found["value_loss"] = value_loss(values, piece.values, piece.returns, options.critic.clip)
            loss = loss + options.critic.loss_weight * found["value_loss"]
        if piece.reference is not None:
            found["kl"] = kl_estimate(outputs.logp, piece.reference)
            if options.kl_penalty == "loss":
                loss = loss + self._beta * found["kl"]
        low, high = clipped(*ratio)
        found |= {"loss": loss, "clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
        found["clip_ratio/region_mean"] = low + high
        for name, values in found.items():
            sums[name] += (values.detach() * mask).sum()
        loss = (loss * mask).sum() / tokens
        self.accelerator.backward(loss * self.accelerator.num_processes)  # gradients are averaged over processes
        return loss.detach()

    # Metrics -----------------------------------------------------------------------------------------------------

    def _batch_metrics(self, batch: RolloutBatch, totals: Tensor) -> dict[str, float]:
        done, device = batch.completions, totals.device
        lengths = torch.tensor([len(c.tokens) for c in done], device=device)
        ended = torch.tensor([c.finish == "stop" and not c.failure for c in done], device=device)
        return response_metrics(*map(self.accelerator.gather, (lengths, ended, totals)), self._group_size)

    def _value_metrics(self, found: Experience) -> dict[str, float]:
        if found.values is None:
            return {}
        error, mask = found.returns - found.values, found.mask
        spread = self._mean((found.returns - self._mean(found.returns, mask)).square(), mask)
        missed = self._mean((error - self._mean(error, mask)).square(), mask)
        self._explained = [SMOOTHING * old + new for old, new in zip(self._explained, (missed, spread), strict=True)]
        missed, spread = self._explained
        explained = 1 - missed / spread if spread > 1e-6 else torch.nan  # returns that are all alike
        return {"value/mean": self._mean(found.values, mask), "value/explained_variance": explained}

    def _adapt(self, found: Experience) -> dict[str, float]:
        """Moves the KL weight towards its target, for the next rollout."""
        if not self._options.kl_target:
            return {}
        used = self._beta
        kl = self._mean(kl_estimate(found.old, found.reference), found.mask)
        self._beta = adapted_beta(used, kl, self._options.kl_target)
        return {"kl_beta": used}

    def _mean(self, values: Tensor, mask: Tensor) -> float:
        """Over the masked tokens of all processes."""
        summed, count = self._total(torch.stack([(values * mask).sum(), mask.sum()]).double()).tolist()
        return summed / max(count, 1)

    def _total(self, values: Tensor) -> Tensor:
        """Sum over processes."""
        return self.accelerator.reduce(values, "sum")

    # What others call --------------------------------------------------------------------------------------------

    def add_callback(self, callback: TrainerCallback) -> None:
        """See trainers/base.py."""
        self._callbacks.add_callback(callback)

    def save_model(self, output_dir: str) -> None:
        """See trainers/base.py."""
        if self.accelerator.is_main_process:
            self.policy.save_pretrained(output_dir)

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            progress = {name: getattr(self.state, name) for name in PROGRESS}
            progress |= {"beta": self._beta, "schedule": self.scheduler.state_dict()}
            progress |= {"prior": self._prior.state(), "explained": self._explained}
            with writing(folder):
                snapshot.save(folder, self.accelerator.unwrap_model(self.model), self.optimizer, progress)

    def _load(self, folder: Path) -> None:
        progress = snapshot.load(folder, self.accelerator.unwrap_model(self.model), self.optimizer)
        for name in PROGRESS:
            setattr(self.state, name, progress[name])
        self._beta, self._explained = progress["beta"], progress["explained"]
        self._prior.restore(progress["prior"])
        self.scheduler.load_state_dict(progress["schedule"])
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
