"""Put the model of a finished run on the Hugging Face hub, with its card.

    python -m specrl.push run=DIR repo=OWNER/NAME [private=false]

Uploaded is the run's `model/` directory and nothing else: no completions, no trajectories, no paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout.config import doc
from specrl.config import run as run_command
from specrl.options import ConfigError


@dataclass
class PushOptions:
    run: str = doc("", "directory of a finished run")
    repo: str = doc("", "where to put it, as OWNER/NAME; made when it does not exist")
    private: bool = doc(True, "make a new repository private; an existing one stays as it is")


class PushError(ConfigError):
    """Nothing could be uploaded. One line: what, why, the value given, the remedy."""


def push(run_dir: Path, repo: str, private: bool = True) -> str:
    """Uploads `model/` of a run in one commit and returns its address.

    Raises:
        PushError: the run has no model or card, there is no token, or the hub refuses.
    """
    from huggingface_hub import HfApi, get_token

    model = run_dir / "model"
    if not (model / "README.md").is_file():
        raise PushError(f"{model} is no finished model with its card: a run writes both when it ends. Give run=DIR.")
    if not (token := get_token()):
        raise PushError("There is no token for the hub. Log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        api.upload_folder(repo_id=repo, folder_path=model, commit_message=f"{run_dir.name}, trained with specrl")
    except Exception as error:  # the client lets the errors of its HTTP library through as well as its own
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise PushError(
            f"repo={repo} was not uploaded: {reason}. Check the name, the token's rights, the network."
        ) from error
    return f"https://huggingface.co/{repo}"


def main(options: PushOptions) -> int:
    if not options.run or not options.repo:
        raise ConfigError("Give run=DIR and repo=OWNER/NAME.")
    print(f"pushed to {push(Path(options.run), options.repo, options.private)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, schema=PushOptions))
