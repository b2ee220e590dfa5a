"""The package specrl.reward; specrl/reward is a link to this folder."""

if __name__ == "reward":  # every class would be there twice
    raise ImportError("reward is the package specrl.reward: import that")
