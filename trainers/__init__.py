"""The package specrl.trainers; specrl/trainers is a link to this folder."""

if __name__ == "trainers":  # every class would be there twice
    raise ImportError("trainers is the package specrl.trainers: import that")
