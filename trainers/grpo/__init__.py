"""GRPO and DAPO on TRL's trainer, and reuse in a trainer of TRL's."""


def spare_vllm() -> None:
    """Hides vLLM from TRL, which imports it for seconds wherever it is installed.

    For a process in which TRL never generates; the engine of `rollout.engine=vllm` imports vLLM itself.
    """
    import trl.import_utils as theirs

    theirs.is_vllm_available = lambda min_version=None: False
