"""The client of a vLLM server that works ahead: a stop is confirmed, or an error."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from requests.adapters import HTTPAdapter

from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.types import RolloutError
from specrl.trainers.grpo import client
from specrl.trainers.grpo.client import KeyedClient

CONFIG = {
    "scheduler_config": {"scheduler_cls": "specrl.rollout.engines.vllm.planned.PlannedScheduler"},
    "model_config": {"max_model_len": 64},
    "weight_transfer_config": {"backend": "specrl"},
}


class Server:
    """Answers like vLLM's. A row writes a token every 10 ms until its cap, or until it is aborted.

    Args:
        deaf: so many calls to abort are lost, as of rows that are not known yet.
        dies: a row's connection breaks.
    """

    def __init__(self, deaf=0, dies=False):
        self.aborted, self.asked, self.deaf, self.dies = set(), [], deaf, dies
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                models = {"data": [{"id": "tiny"}]}
                self.answer(models if self.path.startswith("/v1/models") else {"vllm_config": CONFIG} | CONFIG)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_requests":
                    server.deaf -= 1
                    server.aborted |= set(body["request_ids"]) if server.deaf < 0 else set()
                    self.answer({})
                    return
                server.asked.append(body)
                tokens = []
                while (
                    len(tokens) < body["max_tokens"] and f"cmpl-{self.headers['X-Request-Id']}-0" not in server.aborted
                ):
                    time.sleep(0.01)
                    tokens.append(7)
                    if server.dies:
                        self.connection.close()
                        return
                reason = "length" if len(tokens) == body["max_tokens"] else "abort"
                self.answer({"choices": [{"token_ids": tokens, "finish_reason": reason}]})

            def answer(self, content):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> KeyedClient:
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return KeyedClient(base_url=f"http://127.0.0.1:{self.http.server_port}", connection_timeout=5)

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def rows(*caps):
    return [(KeyedRequest(key=key, prompt_tokens=2, group="a"), cap, [5, 6]) for key, cap in enumerate(caps)]


@pytest.mark.parametrize("deaf", [0, 2])
def test_rows_ahead_are_stopped_and_give_their_tokens_so_far(deaf):
    server = Server(deaf)
    with server as ahead:
        ahead.begin(rows(3, 10_000, 10_000))
        time.sleep(0.2)
        texts = ahead.stop()
    assert texts[0] == ([7, 7, 7], False), "it had ended"
    for tokens, cut in (texts[1], texts[2]):
        assert cut
        assert 0 < len(tokens) < 10_000
    assert all(body["vllm_xargs"]["specrl_key"] in (0, 1, 2) for body in server.asked)


def test_rows_that_were_not_sent_yet_have_no_text(monkeypatch):
    monkeypatch.setattr(client, "CONCURRENT", 1)
    server = Server()
    with server as ahead:
        ahead.begin(rows(10_000, 10_000))
        time.sleep(0.1)
        texts = ahead.stop()
    assert texts[1] == ([], True)
    assert len(server.asked) == 1


def test_a_server_that_does_not_stop_is_an_error_before_it_gets_weights(monkeypatch):
    monkeypatch.setattr(client, "STOPS_WITHIN", 0.3)
    server = Server(deaf=1000)
    with server as ahead:
        ahead.begin(rows(300))
        with pytest.raises(RolloutError, match=r"has not stopped 1 rows of the next batch within 0\.3 s.*no weights"):
            ahead.stop()


def test_a_server_that_dies_while_it_works_ahead_is_an_error():
    server = Server(dies=True)
    with server as ahead:
        ahead.session.mount("http://", HTTPAdapter(max_retries=0))  # TRL's client tries again for half a minute
        ahead.begin(rows(50))
        time.sleep(0.1)
        with pytest.raises(RolloutError, match="failed while it worked ahead"):
            ahead.stop()
