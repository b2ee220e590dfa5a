"""The package specrl.rollout; specrl/rollout is a link to this folder."""

if __name__ == "rollout":  # every class would be there twice
    raise ImportError("rollout is the package specrl.rollout: import that")
