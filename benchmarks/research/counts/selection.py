"""AdaSPEC (arXiv 2510.19779) against all tokens, and its share of the tokens that are kept.

AdaSPEC's student learns after a reference that took as many steps, so all tokens are learnt in as many steps as the
student takes, and in as many as both take together.
"""

from __future__ import annotations

from benchmarks.research.counts.record import Record
from specrl.drafter import DrafterOptions, agreement, distil, shortened
from specrl.trainers.cotraining import distil as recipe

SHARES = (0.2, 0.4, 0.8)
STEPS, BATCH, SEEDS = 40, 8, (0,)


def measure(record: Record) -> dict:
    """Agreement on held-out texts of one-layer models, for each seed of the order of the texts."""
    result = {
        "all tokens": of(record, DrafterOptions(steps=STEPS)),
        "all tokens, twice the steps": of(record, DrafterOptions(steps=2 * STEPS)),
    }
    published = recipe.KEPT_SHARE
    for share in SHARES:
        recipe.KEPT_SHARE = share
        result[f"AdaSPEC, {share} of the tokens"] = of(record, DrafterOptions(steps=STEPS, select="adaspec"))
    recipe.KEPT_SHARE = published
    return {"steps": STEPS, "agreement": result}


def of(record: Record, options: DrafterOptions) -> list[float]:
    found = []
    for seed in SEEDS:
        options.seed, options.batch = seed, BATCH
        student = shortened(record.policy, 1)
        distil(record.policy, student, record.learnt, options)
        found.append(round(agreement(record.policy, student, record.texts, record.keys), 4))
    return found
