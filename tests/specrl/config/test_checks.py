"""The rules between options, each met through the command line."""

import math

import pytest

from specrl.config.load import load
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.rollout.checks import misfits, options


def check(*words, **settings):
    return load(["config=grpo_math", *words], **settings)


def broken(*words, **settings):
    """The one rule that grpo_math breaks with these options."""
    with pytest.raises(ConfigError) as caught:
        check(*words, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rollout.replay=1.5", "rollout.replay=1.5 must be from 0 to 1. Try rollout.replay=1."),
        ("rollout.replay=nan", "rollout.replay=nan must be from 0 to 1. Try rollout.replay=0."),
        ("trainer.learning_rate=inf", "trainer.learning_rate=inf must be at least 0. Try trainer.learning_rate=0."),
        ("rollout.group_size=0", "rollout.group_size=0 must be at least 1. Try rollout.group_size=1."),
        (
            "rollout.group_size=1",
            "rollout.group_size=1 gives trainer.algorithm=grpo no other response to compare with.",
        ),
        ("rollout.top_k=-1", "rollout.top_k=-1 must be at least 0. Try rollout.top_k=0."),
        ("rollout.top_p=1.1", "rollout.top_p=1.1 must be from 0 to 1. Try rollout.top_p=1."),
        ("rollout.tie_margin=-1", "rollout.tie_margin=-1.0 must be at least 0. Try rollout.tie_margin=0."),
        ("seed=-1", "seed=-1 must be from 0 to 4294967295. Try seed=0."),
        ("name=a/b", "name=a/b must be a plain file name. Try name=a-b."),
        ("name=..", "name=.. must be a plain file name. Try name=run."),
        ("model=", "model must not be empty. help=model says what it can be."),
        (
            "dataset.train_size=0",
            "dataset.train_size=0 takes all, but data=arithmetic has no end. Try dataset.train_size",
        ),
        (
            "dataset.test_size=0",
            "dataset.test_size=0 takes all, but data=arithmetic has no end. Try dataset.test_size=64",
        ),
        ("dataset.prompt_template=Q:", "dataset.prompt_template=Q: has no {prompt}, the place of the question."),
        (
            "dataset.train_size=3",
            "dataset.train_size=3 is below trainer.prompts_per_step=4: there would be no step. Try",
        ),
        ("rollout.top_p=0", "rollout.top_p=0 keeps no token. Try rollout.top_p=1"),
        (
            "rollout.sources=[prefix,sibling]",
            "rollout.sources has 'sibling', which is none of prefix, position, earlier, prompt, group, contexts,",
        ),
        (
            "rollout.lenience=1.6",
            "rollout.lenience=1.6 has no effect with rollout.acceptance=exact. Try rollout.lenience=1",
        ),
        (
            "rollout.lenience=0 rollout.acceptance=lenient",
            "rollout.lenience=0 accepts nothing. Try rollout.lenience=1,",
        ),
        (
            "rollout.acceptance=lenient rollout.replay=0.5",
            "rollout.replay=0.5 cannot be combined with rollout.acceptance",
        ),
        (
            "rollout.acceptance=lenient trainer.old_logprobs=trainer",
            "trainer.old_logprobs=trainer with rollout.acceptance",
        ),
        (
            "rollout.acceptance=lenient rollout.top_p=0.9",
            "rollout.top_p=0.9 with rollout.top_k=0 needs the trainer's own",
        ),
        (
            "trainer.old_logprobs=engine rollout.top_k=50",
            "rollout.top_p=1.0 with rollout.top_k=50 needs the trainer's own",
        ),
        ("trainer.correction=token_mask", "trainer.correction=token_mask has no effect with rollout.acceptance=exact"),
        ("rollout.temperature=0", "rollout.temperature=0 gives all responses of a group the same text"),
        ("trainer.clip=0", "trainer.clip=0 lets no ratio pass. Try trainer.clip=auto."),
        ("trainer.clip_high=0.1", "trainer.clip_high=0.1 is below trainer.clip=0.2. Try trainer.clip_high=0.2."),
        ("trainer.gamma=1.1", "trainer.gamma=1.1 must be from 0 to 1. Try trainer.gamma=1."),
        ("trainer.minibatches=2", "trainer.minibatches=2 has no effect with trainer.algorithm=grpo. Leave it out."),
        ("trainer.advantage=rloo", "trainer.advantage=rloo has no effect with trainer.algorithm=grpo. Leave it out."),
        ("trainer.critic.clip=0.1", "trainer.critic.clip=0.1 has no effect with trainer.algorithm=grpo. Leave it out."),
        (
            "trainer.algorithm=ppo trainer.loss=dr_grpo",
            "trainer.loss=dr_grpo has no effect with trainer.algorithm=ppo.",
        ),
        (
            "trainer.algorithm=ppo trainer.kl_target=0.1",
            "trainer.kl_target=0.1 needs a KL weight to begin with. Try trainer.beta=0.05.",
        ),
        (
            "trainer.algorithm=ppo trainer.advantage=rloo rollout.group_size=1",
            "rollout.group_size=1 gives trainer.advantage=rloo no other response to compare with.",
        ),
        (
            "trainer.algorithm=ppo trainer.minibatches=3",
            "prompts_per_step=4 with group_size=8 gives 32 rows, not divisible by trainer.minibatches=3. Try "
            "trainer.minibatches=2.",
        ),
        (
            "trainer.algorithm=ppo trainer.minibatches=4 trainer.rows_per_pass=16",
            "trainer.rows_per_pass=16 does not divide the 8 rows of each of trainer.minibatches=4. Try "
            "trainer.rows_per_pass=8.",
        ),
        (
            "trainer.algorithm=ppo trainer.minibatches=4 trainer.rows_per_pass=3",
            "trainer.rows_per_pass=3 does not divide the 8 rows of each of trainer.minibatches=4. Try "
            "trainer.rows_per_pass=2 or 4.",
        ),
        (
            "dataset.train_split=train[80:%]",
            "dataset.train_split=train[80:%] has no effect with data=arithmetic, which draws its prompts. Leave it",
        ),
        (
            "trainer.algorithm=ppo trainer.minibatches=2 trainer.updates_per_rollout=2 trainer.save_every=6",
            "trainer.save_every=6 is no multiple of updates_per_rollout=2 times minibatches=2: the checkpoint would",
        ),
        ("trainer.overlong_buffer=200", "trainer.overlong_buffer=200 must be below rollout.max_new_tokens=200. Try"),
        ("trainer.epochs=0", "trainer.epochs=0 and trainer.max_steps=0 train nothing. Try trainer.epochs=1."),
        ("reward.functions=[]", "reward.functions=[] scores nothing. Try reward.functions=[math]."),
        (
            "reward.weights=[1,2]",
            "reward.weights=[1.0,2.0] has 2 numbers for 1 functions [math]. Try reward.weights=[1.0].",
        ),
        ("reward.weights=[nan]", "reward.weights=[nan] must be finite numbers."),
        ("cluster.address=auto", "cluster.address=auto with cluster.num_workers=0 has no use. Try"),
        (
            "cluster.num_workers=1 cluster.address=auto cluster.dashboard=true",
            "cluster.dashboard=true has no effect on a cluster that runs already.",
        ),
        (
            "rollout.engine=vllm rollout.vllm.runner=v1 rollout.vllm.tensor_parallel=2",
            "rollout.vllm.runner=v1 lets the host draft, and rollout.vllm.tensor_parallel=2 leaves that to the device.",
        ),
        (
            "rollout.engine=vllm cluster.num_workers=1 cluster.gpus_per_worker=1 rollout.vllm.tensor_parallel=2",
            "rollout.vllm.tensor_parallel=2 needs as many GPUs in each worker, not cluster.gpus_per_worker=1. Try",
        ),
        (
            "rollout.engine=vllm rollout.vllm.speculator=ngram_gpu rollout.vllm.scheduling=sync",
            "rollout.vllm.scheduling=sync lets the host draft, and rollout.vllm.speculator=ngram_gpu leaves that",
        ),
        (
            "rollout.engine=vllm rollout.vllm.speculator=text",
            "rollout.vllm.speculator=text is none of texts, ngram_gpu, eagle, eagle3, mtp. Did you mean texts?",
        ),
        (
            "rollout.engine=vllm rollout.vllm.speculator=draft_model=x",
            "rollout.vllm.speculator=draft_model=x is set by rollout.drafter. Try rollout.drafter=x.",
        ),
        (
            "rollout.engine=vllm rollout.vllm.scheduling=async rollout.acceptance=lenient",
            "rollout.acceptance=lenient decides on the host what stands of a draft, and rollout.vllm.scheduling=async",
        ),
        ("rollout.acceptance=judged", "rollout.judged.by=judge needs rollout.judged.path, as specrl.train_router or"),
        (
            "rollout.acceptance=judged rollout.judged.path=x rollout.sources=[]",
            "rollout.judged.by=judge needs a model that writes. Try rollout.drafter=DIR,",
        ),
        ("rollout.acceptance=judged rollout.judged.by=kl", "rollout.judged.by=kl needs a model that writes. Try"),
        (
            "rollout.acceptance=judged rollout.judged.path=x rollout.replay=0.5",
            "rollout.replay=0.5 cannot be combined with rollout.acceptance=judged, which draws with fresh noise. Try",
        ),
        (
            "rollout.acceptance=judged rollout.judged.path=x cluster.num_workers=1",
            "rollout.acceptance=judged works in the trainer's process, not with cluster.num_workers=1, whose workers",
        ),
        (
            "rollout.acceptance=judged rollout.judged.path=x rollout.drafter=x rollout.engine=vllm",
            "rollout.acceptance=judged decides on the host what stands of a draft, and rollout.drafter=x leaves drafts",
        ),
        (
            "rollout.acceptance=judged rollout.judged.by=kl rollout.drafter=x rollout.engine=vllm",
            "rollout.judged.by=kl compares the laws of rollout.drafter and the policy, and rollout.engine=vllm has st",
        ),
        (
            "rollout.acceptance=routed rollout.drafter=x rollout.engine=vllm",
            "rollout.acceptance=routed has the policy go on with the KV of a row behind each step of",
        ),
        (
            "rollout.acceptance=judged rollout.judged.path=x trainer.correction=none",
            "rollout.acceptance=judged with trainer.correction=none would train on drafted text as if the policy",
        ),
        (
            "rollout.acceptance=routed rollout.drafter=x rollout.routed.by=rsd rollout.routed.path=x "
            "rollout.routed.threshold=2",
            "rollout.routed.threshold=2.0 is no probability, as rollout.routed.by=rsd needs. Try 0.5.",
        ),
        ("rollout.acceptance=lenient rollout.drafter=x", "rollout.drafter=x cannot be combined with"),
        (
            "rollout.engine=vllm rollout.drafter=head trainer.drafter.train=true",
            "rollout.drafter=head is made beside the trainer's model, and rollout.engine=vllm loads its drafter from",
        ),
        ("rollout.drafter=head", "rollout.drafter=head begins untrained and would draft nothing that stands. Set tra"),
        (
            "rollout.engine=vllm rollout.drafter=x rollout.vllm.runner=v1",
            "rollout.vllm.runner=v1 lets the host draft, and rollout.drafter=x drafts on the device with",
        ),
        (
            "rollout.engine=vllm rollout.drafter=x rollout.vllm.speculator=ngram_gpu",
            "rollout.drafter=x and rollout.vllm.speculator=ngram_gpu would both propose. Try rollout.vllm.speculator=t",
        ),
        (
            "trainer.drafter.train=true",
            "trainer.drafter.train=true has no draft model to train. Try rollout.drafter=DIR",
        ),
        (
            "trainer.drafter.train=true rollout.drafter=x rollout.acceptance=off",
            "trainer.drafter.train=true learns from drafts that the exact rule verifies, not rollout.acceptance=off.",
        ),
        (
            "trainer.drafter.train=true rollout.drafter=x rollout.acceptance=judged rollout.judged.path=x",
            "trainer.drafter.train=true learns from drafts that the exact rule verifies, not rollout.acceptance=",
        ),
        (
            "trainer.drafter.interval=0",
            "trainer.drafter.interval=0 must be at least 1. Try trainer.drafter.interval=1.",
        ),
        ("rollout.vllm.draft_tokens=200", "rollout.vllm.draft_tokens=200 must be from 1 to 127. Try"),
        ("reward.start_timeout_s=0", "reward.start_timeout_s=0.0 must be at least 1. Try reward.start_timeout_s=1."),
        ("reward.timeout_s=0", "reward.timeout_s=0 leaves no time to score. Try reward.timeout_s=5."),
    ],
)
def test_a_broken_rule_gives_the_value_and_the_nearest_legal_one(words, message):
    assert broken(*words.split()).startswith(message)


@pytest.mark.parametrize(
    ("prompts", "per_pass", "message"),
    [
        (30, 32, "32 rows per pass. Try trainer.rows_per_pass=30 or 40, or prompts_per_step=32 (256) or 28 (224)."),
        (8, 512, "512 rows per pass. Try trainer.rows_per_pass=64, or prompts_per_step=64 (512)."),
        (8, 5, "5 rows per pass. Try trainer.rows_per_pass=4 or 8, or prompts_per_step=10 (80) or 5 (40)."),
    ],
)
def test_rows_must_fill_whole_passes(prompts, per_pass, message):
    text = broken(f"trainer.prompts_per_step={prompts}", f"trainer.rows_per_pass={per_pass}")
    assert text == f"prompts_per_step={prompts} with group_size=8 gives {prompts * 8} rows, not divisible by {message}"


@pytest.mark.parametrize(
    "words",
    [
        "trainer.prompts_per_step=30 trainer.rows_per_pass=16",
        "rollout.acceptance=lenient rollout.lenience=1.6 trainer.correction=sequence_mask",
        "rollout.acceptance=off trainer.correction=none",
        "rollout.acceptance=judged rollout.judged.path=x",
        "rollout.acceptance=judged rollout.judged.path=x rollout.sources=[] rollout.drafter=x rollout.replay=0.5",
        "rollout.acceptance=judged rollout.judged.path=x rollout.judged.uncorrected=true trainer.correction=none",
        "rollout.acceptance=judged rollout.judged.path=x rollout.engine=vllm",
        "trainer.drafter.train=true rollout.drafter=x rollout.engine=vllm cluster.num_workers=2",
        "rollout.acceptance=routed rollout.drafter=x rollout.replay=0.5",
        "rollout.top_p=0.9 rollout.top_k=20",
        "trainer.epochs=0 trainer.max_steps=3",
        "trainer.clip_high=0.28",
        "trainer.algorithm=ppo rollout.group_size=1",
        "trainer.algorithm=ppo trainer.advantage=rloo trainer.critic.model=separate",
        "trainer.algorithm=ppo trainer.beta=0.1 trainer.kl_target=0.1 trainer.kl_penalty=loss",
        "reward.functions=[math,format] reward.weights=[1,0]",
        "dataset.test_size=0 trainer.eval_prompts=0",
        "data=gsm8k dataset.train_size=0 dataset.test_size=0",
        "name=a.b-c_1",
    ],
)
def test_legal_neighbours_of_the_rules(words):
    check(*words.split())


def test_evaluation_may_be_greedy_with_single_responses():
    loaded = check("rollout.temperature=0", "rollout.group_size=1", training=False)
    assert loaded.rollout.group_size == 1
    assert "must be at least 1" in broken("rollout.group_size=0", training=False)


def test_all_broken_rules_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check("name=a/b", "trainer.clip=0", "reward.functions=[]")
    assert len(str(caught.value).splitlines()) == 3


NUMBERS = {key: option for key, option in options(Config).items() if {int, float} & set(option.members)}
ALL_ROWS = """
rollout.group_size rollout.max_new_tokens rollout.rows_per_batch rollout.tokens_per_pass trainer.prompts_per_step
trainer.updates_per_rollout trainer.minibatches trainer.keep_checkpoints reward.workers cluster.tasks_per_worker
"""


def test_the_default_of_every_option_fits():
    assert misfits(Config()) == []


@pytest.mark.parametrize("key", NUMBERS)
def test_one_step_beyond_each_limit_is_refused_and_the_limit_is_what_to_try(key):
    low, high = NUMBERS[key].limits
    assert low >= 0, "no option means a negative number"
    for beyond, limit in ((low - 1, low), (high + 1, high)):
        if math.isfinite(beyond):
            assert broken(f"{key}={beyond}").endswith(f"Try {key}={limit}.")
            assert load_with(key, limit) == []


def load_with(key, value):
    """What is said of one option's value by itself."""
    config = Config()
    *path, name = key.split(".")
    part = config
    for step in path:
        part = getattr(part, step)
    setattr(part, name, value)
    return misfits(config)


@pytest.mark.parametrize("key", ALL_ROWS.split())
def test_what_is_divided_by_or_waited_for_is_at_least_one(key):
    assert broken(f"{key}=0") == f"{key}=0 must be at least 1. Try {key}=1."


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("seed=4294967296", "seed=4294967295"),
        ("rollout.vllm.draft_tokens=128", "rollout.vllm.draft_tokens=127"),
        ("rollout.vllm.memory_utilization=0", "rollout.vllm.memory_utilization=0.01"),
        ("rollout.vllm.memory_utilization=1.5", "rollout.vllm.memory_utilization=1"),
        ("cluster.cpus_per_worker=0", "cluster.cpus_per_worker=0.01"),
        ("cluster.object_store_mb=79", "cluster.object_store_mb=80"),
    ],
)
def test_other_ranges(word, near):
    assert broken(word).endswith(f"Try {near}.")


def changed(only):
    """Options that only this algorithm reads, each with a legal value that is not its default."""
    chosen = [option for option in options(Config).values() if option.metadata.get("only") == only]
    words = [next((word for word in o.choices if word != o.default), 2 if int in o.members else 0.25) for o in chosen]
    return [f"{option.key}={word}" for option, word in zip(chosen, words, strict=True)]


@pytest.mark.parametrize("word", changed("ppo"))
def test_what_only_ppo_reads_is_refused_elsewhere(word):
    assert broken(word) == f"{word} has no effect with trainer.algorithm=grpo. Leave it out."
    assert "has no effect with trainer.algorithm=dapo." in broken(word, "trainer.algorithm=dapo")


@pytest.mark.parametrize("word", changed("grpo"))
def test_what_only_grpo_and_dapo_read_is_refused_by_ppo(word):
    check(word)
    check(word, "trainer.algorithm=dapo")
    assert broken(word, "trainer.algorithm=ppo") == f"{word} has no effect with trainer.algorithm=ppo. Leave it out."


def test_what_one_algorithm_only_reads_is_marked_by_its_field_or_its_section():
    assert {"trainer.gamma=0.25", "trainer.critic.clip=0.25"} <= {*changed("ppo")}
    assert "trainer.loss=grpo" in changed("grpo")
