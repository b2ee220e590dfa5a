"""How large everything is that is measured: as on the machine that is asked about, and as small as it goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 151_936

    def kv_bytes(self, tokens: int) -> int:
        """Keys and values of that many tokens, in 2 bytes a number."""
        return tokens * self.layers * self.kv_heads * self.head_dim * 2 * 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    copy_mb: int = 4096
    gemm: int = 8192
    ops: int = 2000
    attention_rows: int = 64
    attention_widths: tuple[int, ...] = (256, 257, 1024)
    growing: int = 40
    """Widths, each longer than the last by one."""

    draw_vocab: int = 151_936
    draw_hidden: tuple[int, ...] = (2048, 1024, 3584)
    draw_rows: tuple[int, ...] = (64, 256, 512, 4096)

    policy: Shape = Shape(2048, 6144, 28, 16, 8, 128)
    """1.7B."""
    smaller: Shape = Shape(1024, 3072, 28, 16, 8, 128)
    """0.6B."""
    prompts: int = 64
    prompt_tokens: int = 200
    group: int = 8

    pass_rows: tuple[int, ...] = (64, 512, 1, 256, 16)
    pass_tokens: tuple[int, ...] = (1, 9, 2, 33, 5)
    pass_widths: tuple[int, ...] = (1024, 256, 2048)
    pass_repeats: int = 3

    generate_rows: tuple[tuple[int, int], ...] = ((64, 256), (256, 96), (512, 48))
    """(rows, tokens of each); the first by every cache."""
    cudnn_tokens: int = 64

    rollouts: tuple[tuple[int, int], ...] = ((64, 512), (256, 512), (512, 512), (64, 2048))
    """(rows, longest response), in the order of value."""
    numeric_rows: int = 64
    numeric_tokens: int = 256
    probes: int = 64
    train: tuple[str, ...] = ("trainer.max_steps=6", "dataset.train_size=8", "rollout.measure_every=0")
    """Three epochs: from the second on there is old text."""
    head_steps: int = 128
    """Texts that a head is trained on."""
    compile_s: float = 45.0
    """What compiling the policy may take."""


SMALL = Sizes(
    copy_mb=16,
    gemm=256,
    ops=200,
    attention_rows=2,
    attention_widths=(16, 17),
    growing=3,
    draw_vocab=512,
    draw_hidden=(64,),
    draw_rows=(4, 8),
    policy=Shape(128, 128, 2, 4, 2, 32, 512),  # sizes for which vLLM has kernels on a CPU
    smaller=Shape(128, 96, 2, 4, 2, 32, 512),
    prompts=2,
    prompt_tokens=12,
    group=4,
    pass_rows=(8, 2, 4),
    pass_tokens=(1, 5),
    pass_widths=(16, 32),
    generate_rows=((8, 16), (4, 8)),
    cudnn_tokens=8,
    rollouts=((8, 32), (4, 48)),
    numeric_rows=8,
    numeric_tokens=32,
    probes=4,
    train=("trainer.max_steps=2", "dataset.train_size=4", "rollout.max_new_tokens=32", "trainer.eval_prompts=0"),
    head_steps=8,
    compile_s=0.0,
)
