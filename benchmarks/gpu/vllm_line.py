"""Seconds of plain decoding by vLLM with its own defaults: `python vllm_line.py DIR`, a model and asked.json in DIR."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    import vllm

    asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    llm = vllm.LLM(model=str(folder), skip_tokenizer_init=True, generation_config="vllm")
    found: dict = {"version": vllm.__version__}
    for rows, tokens in asked["lines"]:
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"][:rows]]

        def run(tokens: int, rows: int = rows, prompts: list = prompts) -> float:
            law = vllm.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            llm.reset_prefix_cache()
            began = time.perf_counter()
            done = llm.generate(prompts, law, use_tqdm=False)
            seconds = time.perf_counter() - began
            if (given := sum(len(each.outputs[0].token_ids) for each in done)) != tokens * rows:
                raise RuntimeError(f"vLLM gave {given} tokens instead of {tokens * rows}")
            return seconds

        run(8)
        seconds = run(tokens)
        of_tokens = {"seconds_a_token": seconds / rows / tokens, "ms_a_step": round(1e3 * seconds / tokens, 3)}
        found[f"{rows} rows"] = {"tokens": tokens, "seconds": round(seconds, 3)} | of_tokens
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
