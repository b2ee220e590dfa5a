"""One of specrl's engines in a separate process, for benchmarks/rivals.py."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paired import PairConfig, prepare
from benchmarks.process import serve
from specrl.config.load import load_saved
from specrl.rollout.build import build_engine


class Ours:
    """Rolls out the rows of a bench whose cache holds what the older policy wrote.

    Args: opening: `config`, a file; `acceptance`, `lenience`: options of the engine.
    """

    def __init__(self, opening: dict):
        self._bench, *_ = prepare(load_saved(opening.pop("config"), PairConfig))
        self._bench.engine = build_engine(
            replace(self._bench.spec, rollout=replace(self._bench.spec.rollout, **opening))
        )
        self._bench.old_batch()
        self._bench.switch("newer")
        self._bench.plain(1)()  # it sleeps then

    def answer(self, message: dict) -> dict:
        """Rolls out once, with these settings of `rollout.*`: the fields of a Result."""
        bench = self._bench
        stage = bench.rollout(bench.old_batch(), **message)
        bench.engine.reset_cache()
        batch = bench.timed(stage)
        done, identical = batch.completions, None
        if stage.config.acceptance != "lenient":
            plain = stage.plain(bench.rows, batch.keys).completions
            identical = sum(a.tokens == b.tokens for a, b in zip(done, plain, strict=True))
        total = sum(len(c.tokens) for c in done)
        return {
            "seconds": batch.total_s,
            "tokens": total,
            "accepted": sum(sum(c.reused) for c in done),
            "steps": batch.stats.passes,
            "logp": sum(sum(c.logprobs) for c in done) / total,
            "identical": identical,
        }

    def close(self) -> None:
        self._bench.engine.close()


if __name__ == "__main__":
    serve(Ours)
