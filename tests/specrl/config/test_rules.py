"""The limits of options and the rules between them, each met through the command line."""

import math

import pytest

from specrl.config.load import load
from specrl.config.options import ConfigError
from specrl.config.rules import warnings
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


VLLM = "rollout.engine=vllm"
PPO = "trainer.algorithm=ppo"
LENIENT = "rollout.acceptance=lenient"
JUDGED = "rollout.acceptance=judged rollout.trained=x"
TRAIN = "trainer.drafter.train=true"
TOOLS = "dataset.tools=[specrl.run.tools:calculate]"
LEAVE_OUT = "Leave it out"
ROUTED = "rollout.acceptance=routed rollout.drafter=x"
WRONG = [
    # words, the option that the message names, what it suggests
    ("rollout.replay=nan", "rollout.replay=nan", "rollout.replay=0."),
    ("trainer.learning_rate=inf", "trainer.learning_rate=inf", "trainer.learning_rate=0."),
    ("rollout.group_size=1", "rollout.group_size=1", "rollout.group_size=8."),
    ("name=a/b", "name=a/b", "name=a-b."),
    ("name=..", "name=..", "name=run."),
    ("model=", "model", "help=model"),
    ("dataset.train_size=0", "dataset.train_size=0", "dataset.train_size=96."),
    ("dataset.test_size=0", "dataset.test_size=0", "dataset.test_size=64."),
    ("dataset.prompt_template=Q:", "dataset.prompt_template=Q:", "{prompt}"),
    ("dataset.train_split=train[80:%]", "dataset.train_split=train[80:%]", LEAVE_OUT),
    ("rollout.top_p=0", "rollout.top_p=0", "rollout.top_p=1"),
    ("rollout.sources=[prefix,gruop]", "rollout.sources has 'gruop'", "group?"),
    ("rollout.lenience=1.6", "rollout.lenience=1.6", "rollout.lenience=1."),
    (f"rollout.lenience=0 {LENIENT}", "rollout.lenience=0", "rollout.lenience=1"),
    (f"{LENIENT} rollout.replay=0.5", "rollout.replay=0.5", "rollout.replay=0."),
    (f"{LENIENT} rollout.drafter=x", "rollout.drafter=x", "rollout.acceptance=exact"),
    (f"{LENIENT} trainer.old_logprobs=trainer", "trainer.old_logprobs=trainer", "trainer.old_logprobs=engine"),
    (f"{LENIENT} rollout.top_p=0.9", "rollout.top_p=0.9", "rollout.top_p=1"),
    ("trainer.old_logprobs=engine rollout.top_k=50", "rollout.top_k=50", "rollout.top_k=0"),
    ("trainer.correction=token_mask", "trainer.correction=token_mask", LEAVE_OUT),
    ("rollout.temperature=0", "rollout.temperature=0", "rollout.temperature=1."),
    ("trainer.clip=0", "trainer.clip=0", "trainer.clip=auto."),
    ("trainer.clip_high=0.1", "trainer.clip_high=0.1", "trainer.clip_high=0.2."),
    ("trainer.overlong_buffer=200", "trainer.overlong_buffer=200", "trainer.overlong_buffer=40."),
    ("trainer.epochs=0", "trainer.epochs=0", "trainer.epochs=1."),
    ("trainer.precision=pure_bf16 lora.rank=4", "trainer.precision=pure_bf16", "trainer.precision=bf16."),
    (f"{PPO} trainer.advantage=rloo rollout.group_size=1", "trainer.advantage=rloo", "rollout.group_size=8."),
    (f"{PPO} rollout.group_size=1 trainer.prompts_per_step=1", "rollout.group_size=1", "rollout.group_size=2."),
    (f"{PPO} trainer.minibatches=3", "trainer.minibatches=3", "trainer.minibatches=2."),
    (f"{PPO} trainer.minibatches=4 trainer.rows_per_pass=16", "trainer.rows_per_pass=16", "trainer.rows_per_pass=8."),
    (f"{PPO} trainer.minibatches=4 trainer.rows_per_pass=3", "rows_per_pass=3", "trainer.rows_per_pass=2."),
    (
        f"{PPO} trainer.minibatches=2 trainer.updates_per_rollout=2 trainer.save_every=6",
        "trainer.save_every=6",
        "trainer.save_every=8.",
    ),
    ("trainer.prompts_per_step=8 trainer.rows_per_pass=512", "trainer.rows_per_pass=512", "trainer.rows_per_pass=64"),
    ("trainer.prompts_per_step=8 trainer.rows_per_pass=5", "gives 64 rows", "trainer.rows_per_pass=4."),
    ("reward.functions=[]", "reward.functions=[]", "reward.functions=[math]."),
    ("reward.weights=[1,2]", "reward.weights=[1.0,2.0]", "reward.weights=[1.0]."),
    ("reward.weights=[nan]", "reward.weights=[nan]", "finite"),
    ("reward.timeout_s=0", "reward.timeout_s=0", "reward.timeout_s=5."),
    ("report.trackers=[wandbb]", "report.trackers has 'wandbb'", "wandb?"),
    ("cluster.address=auto", "cluster.num_workers=0", "cluster.num_workers=2."),
    (f"{VLLM} rollout.vllm.runner=v1 rollout.vllm.tensor_parallel=2", "tensor_parallel=2", "rollout.vllm.runner=auto."),
    (f"{VLLM} rollout.vllm.runner=v1 rollout.drafter=x", "rollout.drafter=x", "rollout.vllm.runner=auto."),
    (
        f"{VLLM} rollout.vllm.runner=v2 rollout.acceptance=lenient",
        "rollout.acceptance=lenient",
        "rollout.vllm.runner=auto.",
    ),
    (
        f"{VLLM} cluster.num_workers=1 cluster.gpus_per_worker=1 rollout.vllm.tensor_parallel=2",
        "cluster.gpus_per_worker=1",
        "cluster.gpus_per_worker=2.",
    ),
    (
        f"{VLLM} rollout.vllm.speculator=ngram_gpu rollout.vllm.runner=v1",
        "rollout.vllm.speculator=ngram_gpu",
        "rollout.vllm.runner=auto.",
    ),
    (f"{VLLM} rollout.draft_tokens=128", "rollout.draft_tokens=128", "rollout.draft_tokens=127."),
    (f"{VLLM} rollout.vllm.speculator=text", "rollout.vllm.speculator", "texts?"),
    (f"{VLLM} rollout.vllm.speculator=draft_model=x", "rollout.vllm.speculator=draft_model=x", "rollout.drafter=x."),
    (f"{VLLM} rollout.vllm.speculator=device {LENIENT}", "rollout.vllm.speculator=device", "rollout.acceptance=exact."),
    (
        f"{VLLM} rollout.drafter=x rollout.vllm.speculator=ngram_gpu",
        "rollout.vllm.speculator=ngram_gpu",
        "rollout.vllm.speculator=texts",
    ),
    (f"{VLLM} rollout.drafter=head {TRAIN}", "rollout.drafter=head", "rollout.drafter=DIR"),
    ("rollout.acceptance=judged", "rollout.acceptance=judged", "rollout.trained"),
    (f"{JUDGED} rollout.sources=[]", "rollout.acceptance=judged", "rollout.drafter=DIR"),
    (f"{JUDGED} rollout.replay=0.5", "rollout.replay=0.5", "rollout.replay=0."),
    (f"{JUDGED} rollout.drafter=x {VLLM}", "rollout.drafter=x", "rollout.drafter= or rollout.acceptance=exact."),
    (f"{ROUTED} {VLLM} rollout.vllm.tensor_parallel=2", "rollout.vllm.tensor_parallel=2", "rollout.acceptance=exact."),
    (
        f"{ROUTED} rollout.routed.by=arbitrage rollout.trained=x rollout.routed.threshold=2",
        "rollout.routed.threshold=2",
        "0.5.",
    ),
    ("rollout.routed.separators=[]", "rollout.routed.separators", r"rollout.routed.separators=[\n\n]."),
    (f"{ROUTED} trainer.old_logprobs=trainer", "would hide that accepted tokens are off-policy", ""),
    ("rollout.acceptance=routed", "rollout.acceptance=routed", "rollout.drafter=DIR"),
    (f"{ROUTED} rollout.routed.by=arbitrage", "needs rollout.trained", ""),
    (f"{ROUTED} rollout.top_p=0.9", "needs the trainer's own log-probs", ""),
    (f"{TOOLS} rollout.acceptance=lenient", "rollout.acceptance=lenient", "Try "),
    (f"{TOOLS} rollout.replay=0.5", "rollout.replay=0.5", "Try "),
    (f"{TOOLS} {TRAIN} rollout.drafter=head", TRAIN, "Try "),
    (f"{TOOLS} dataset.chat_template=off", "dataset.chat_template=off", "Try "),
    (f"{TOOLS} dataset.tool_timeout_s=0", "dataset.tool_timeout_s=0", "Try "),
    ("rollout.drafter=head", "rollout.drafter=head", "trainer.drafter.train=true"),
    (TRAIN, TRAIN, "rollout.drafter=DIR"),
    (f"{TRAIN} rollout.drafter=x rollout.acceptance=off", TRAIN, "rollout.acceptance=exact."),
    (f"{TRAIN} rollout.drafter=x rollout.acceptance=routed", TRAIN, "rollout.acceptance=exact."),
]


@pytest.mark.parametrize(("words", "named", "suggested"), WRONG)
def test_a_wrong_option_is_named_with_a_legal_one(words, named, suggested):
    message = broken(*words.split())
    assert named in message
    assert suggested in message.partition(named)[2]
    assert "<" not in message, "every <key> of the rule is an option"


@pytest.mark.parametrize(
    "words",
    [
        "trainer.prompts_per_step=30 trainer.rows_per_pass=16",
        "rollout.acceptance=lenient rollout.lenience=1.6 trainer.correction=sequence_mask",
        "rollout.acceptance=off trainer.correction=none",
        "rollout.acceptance=judged rollout.trained=x rollout.sources=[] rollout.drafter=x rollout.replay=0.5",
        "rollout.acceptance=judged rollout.trained=x rollout.engine=vllm",
        "trainer.drafter.train=true rollout.drafter=x rollout.engine=vllm cluster.num_workers=2",
        f"{ROUTED} rollout.replay=0.5",
        f"{ROUTED} rollout.engine=vllm cluster.num_workers=2",
        f"{TRAIN} rollout.drafter=x {JUDGED}",
        "trainer.epochs=0 trainer.max_steps=3",
        "trainer.algorithm=ppo rollout.group_size=1",
        "trainer.algorithm=ppo trainer.advantage=rloo trainer.critic.model=separate",
        "trainer.algorithm=ppo trainer.beta=0.1",
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


def test_all_broken_rules_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        check("name=a/b", "trainer.clip=0", "reward.functions=[]")
    assert len(str(caught.value).splitlines()) == 3


KNOWN = options(Config)
NUMBERS = {key: option for key, option in KNOWN.items() if {int, float} & {*option.members} and not option.container}
AT_LEAST_ONE = """
rollout.group_size rollout.max_new_tokens rollout.rows_per_batch rollout.tokens_per_pass trainer.prompts_per_step
trainer.updates_per_rollout trainer.minibatches trainer.keep_checkpoints reward.workers
"""


def test_the_default_of_every_option_fits():
    assert misfits(Config()) == []


@pytest.mark.parametrize("key", NUMBERS)
def test_one_step_beyond_each_limit_is_refused_and_the_limit_is_suggested(key):
    low, high = NUMBERS[key].limits
    assert low >= 0, "no option means a negative number"
    for beyond, limit in ((low - 1, low), (high + 1, high)):
        if math.isfinite(beyond):
            assert broken(f"{key}={beyond}").endswith(f"Try {key}={limit}.")


def test_options_that_are_divided_by_or_waited_for_are_at_least_one():
    assert {key: NUMBERS[key].limits[0] for key in AT_LEAST_ONE.split()} == dict.fromkeys(AT_LEAST_ONE.split(), 1)


def changed(only):
    """Options that only this algorithm reads, each with a legal value that is not its default."""
    chosen = [option for option in KNOWN.values() if option.only == only]
    words = [next((word for word in o.choices if word != o.default), 2 if int in o.members else 0.25) for o in chosen]
    return [f"{option.key}={word}" for option, word in zip(chosen, words, strict=True)]


@pytest.mark.parametrize("word", changed("ppo"))
def test_what_only_ppo_reads_is_refused_elsewhere(word):
    for algorithm in ("trainer.algorithm=grpo", "trainer.algorithm=dapo"):
        message = broken(word, algorithm)
        assert word in message
        assert algorithm in message


@pytest.mark.parametrize("word", changed("grpo"))
def test_what_only_grpo_and_dapo_read_is_refused_by_ppo(word):
    check(word)
    check(word, "trainer.algorithm=dapo")
    message = broken(word, PPO)
    assert word in message
    assert PPO in message


def test_the_algorithm_of_an_option_is_set_by_its_field_or_its_section():
    assert {"trainer.gamma=0.25", "trainer.critic.loss_weight=0.25"} <= {*changed("ppo")}
    assert "trainer.loss=grpo" in changed("grpo")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("model=org/base trainer.learning_rate=2e-4", "trainer.learning_rate=1e-6"),
        ("model=org/base trainer.learning_rate=2e-4 lora.rank=8", ""),
        ("model=org/base trainer.learning_rate=2e-5", ""),
        ("model=tiny trainer.learning_rate=2e-4", ""),
        ("trainer.precision=pure_bf16", "trainer.precision=bf16"),
        ("rollout.max_new_tokens=16384", "rollout.engine=vllm"),
        ("rollout.max_new_tokens=16384 rollout.engine=vllm", ""),
    ],
)
def test_what_is_probably_a_mistake_is_a_warning(words, named):
    lines = warnings(load(["config=grpo_math", *words.split()]))
    assert [named in line for line in lines] == [True] * bool(named)
