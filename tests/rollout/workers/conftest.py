"""A fake of vLLM's sender of weights."""

import sys
from types import SimpleNamespace

import pytest


class Sender:
    """Replaces vLLM's endpoint in the trainer's process. Sends three weights at a time."""

    def __init__(self, client, source, ranks):
        self.client, self.source, self.sent, self.closed = client, source, 0, False
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 1 + ranks})

    def send_weights(self):
        self.client.start_weight_update()
        weights = list(self.source)
        for i in range(0, len(weights), 3):
            self.client.update_weights(dict(weights[i : i + 3]))
        self.client.finish_weight_update()
        self.sent += 1

    def shutdown(self):
        self.closed = True


@pytest.fixture
def senders(monkeypatch):
    """The senders that were opened, with their numbers of ranks."""
    opened = []

    def open_link(route, client, source, ranks, address):
        opened.append(Sender(client, source, ranks))
        return opened[-1]

    monkeypatch.setitem(sys.modules, "specrl.rollout.engines.vllm.weights", SimpleNamespace(open_link=open_link))
    monkeypatch.setattr("specrl.rollout.workers.delivery.gpu_uuid", lambda: "GPU of the trainer")
    return opened
