"""What runs inside vLLM's workers. vLLM imports this module there, because its start names the classes below.

Importing it also registers the weight transfer in the worker.
"""

from __future__ import annotations

import specrl.rollout.engines.vllm.weights  # noqa: F401 - registers the transfer
from specrl.rollout.engines.vllm.sampler import install, share_noise
from specrl.rollout.engines.vllm.texts import DeviceTexts


class WorkerExtension:
    """Methods that the driver calls on every worker by name."""

    def specrl_install_flow(self, flow) -> None:
        """In-process only: `flow` (a requests.OneRequest) draws and drafts from now on."""
        flow.install(self.model_runner)

    def specrl_install_device(self, texts: bool) -> None:
        """Keys draw; drafts come from the requests' texts, or else from vLLM's own speculator."""
        install(self.model_runner)
        if texts:
            DeviceTexts(self.model_runner)
        else:
            share_noise(self.model_runner)
            self.weight_transfer_engine.drafter = self.get_draft_model()
