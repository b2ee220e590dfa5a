"""Pushing uploads the model alone."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from specrl import push
from specrl.config import run as run_command
from specrl.push import PushError, PushOptions


@pytest.fixture
def hub(monkeypatch):
    """The hub's client, which remembers what it was asked for."""
    calls = []

    class Api:
        def __init__(self, token):
            calls.append(("token", token))

        def create_repo(self, repo, **options):
            if repo == "some body/x":
                raise ValueError("Repo id must use alphanumeric chars.\nmore")
            calls.append(("create", repo, options))
            return SimpleNamespace(repo_id=repo)

        def upload_folder(self, **options):
            calls.append(("upload", options))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    return calls


@pytest.fixture
def finished(tmp_path) -> Path:
    (tmp_path / "first" / "model").mkdir(parents=True)
    (tmp_path / "first" / "model" / "README.md").write_text("# first")
    (tmp_path / "first" / "config.yaml").write_text("output_dir: /home/alice")
    return tmp_path / "first"


def test_the_model_directory_alone_is_uploaded_and_a_new_repository_is_private(hub, finished, capsys):
    assert run_command(push.main, [f"run={finished}", "repo=me/first"], PushOptions) == 0
    assert hub == [
        ("token", "hf_x"),
        ("create", "me/first", {"private": True, "exist_ok": True}),
        (
            "upload",
            {"repo_id": "me/first", "folder_path": finished / "model", "commit_message": "first, trained with specrl"},
        ),
    ]
    assert capsys.readouterr().out == "pushed to https://huggingface.co/me/first\n"


def test_without_a_token_nothing_is_asked_of_the_hub(hub, finished, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(PushError, match=r"no token for the hub\. Log in with `hf auth login`, or set HF_TOKEN"):
        push.push(finished, "me/first")
    assert hub == []


def test_a_run_that_has_not_ended_is_refused(hub, finished):
    (finished / "model" / "README.md").unlink()
    with pytest.raises(PushError, match="no finished model"):
        push.push(finished, "me/first")
    assert hub == []


def test_what_the_hub_refuses_is_one_line(hub, finished, capsys):
    assert run_command(push.main, [f"run={finished}", "repo=some body/x"], PushOptions) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: repo=some body/x was not uploaded: Repo id must use alphanumeric chars. Check")
    assert len(error.splitlines()) == 1
    assert run_command(push.main, [f"run={finished}"], PushOptions) == 2
