"""The rules of what learns from drafted text or lets it stand: co-training, judges and routers."""

from __future__ import annotations

from collections.abc import Iterator

from specrl.config.schema import Config


def cotraining_rules(c: Config) -> Iterator[str]:
    """Of a draft model that is trained beside the policy."""
    if not c.trainer.drafter.train:
        if c.rollout.drafter == "head":
            yield (
                "rollout.drafter=head begins untrained and would draft nothing that stands. Set "
                "trainer.drafter.train=true, or take rollout.drafter=DIR with a head that "
                "`python -m specrl.drafter kind=head out=DIR` makes."
            )
        return
    if not c.rollout.drafter:
        yield (
            "trainer.drafter.train=true has no draft model to train. Try rollout.drafter=DIR with a model that "
            "`python -m specrl.drafter out=DIR` makes."
        )
    if c.rollout.acceptance != "exact":
        yield (
            "trainer.drafter.train=true learns from drafts that the exact rule verifies, not "
            f"rollout.acceptance={c.rollout.acceptance}. Try trainer.drafter.train=false, or rollout.acceptance=exact."
        )


def standing_rules(c: Config, training: bool) -> Iterator[str]:
    """Of the laws under which a judge or a router lets drafted text stand."""
    r = c.rollout
    if r.acceptance not in ("judged", "routed"):
        return
    part = r.judged if r.acceptance == "judged" else r.routed
    given = f"rollout.{r.acceptance}.by={part.by}"
    if not r.drafter and (r.acceptance == "routed" or part.by == "kl" or not r.sources):
        yield f"{given} needs a model that writes. Try rollout.drafter=DIR, as `python -m specrl.drafter` makes it."
    if part.by in ("judge", "rsd", "arbitrage") and not part.path:
        yield f"{given} needs rollout.{r.acceptance}.path, as specrl.train_router or specrl.train_judge writes it."
    if c.cluster.num_workers:
        yield (
            f"rollout.acceptance={r.acceptance} works in the trainer's process, not with cluster.num_workers="
            f"{c.cluster.num_workers}, whose workers know no {r.acceptance[:5]}. Try cluster.num_workers=0."
        )
    if training and c.trainer.correction == "none" and not part.uncorrected:
        yield (
            f"rollout.acceptance={r.acceptance} with trainer.correction=none would train on drafted text as if the "
            "policy had written it. Try trainer.correction=token_truncate, or say "
            f"rollout.{r.acceptance}.uncorrected=true."
        )
