"""The configuration: what is accepted, and what a user reads when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    TrainingConfig,
    ValKwargsConfig,
    every_key,
)
from rollpacker.config_checks import check_parallel_shape, job_size, missing_features
from rollpacker.config_file import load_config, to_short_yaml, to_yaml

GOOD = "model: {path: m}\ndata: {train_files: [a.jsonl], max_response_length: 100}\n"


def load(tmp_path: Path, text: str = GOOD, *overrides: str) -> Config:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(str(path), list(overrides))


def test_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "training.lr=1e-4", "rollout.n=4", "trainer.total_training_steps=7")
    assert config.training.lr == 1e-4
    assert load(tmp_path, to_yaml(config)) == config


def test_a_file_may_build_on_another_and_be_laid_on_a_third(tmp_path: Path) -> None:
    """`base` is relative to the file that names it, and ignored where the file is laid on top of another."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "demo.yaml").write_text(GOOD + "rollout: {n: 4, top_k: -1}\n", encoding="utf-8")
    recipe = tmp_path / "recipes" / "r.yaml"
    recipe.write_text("base: ../demo.yaml\nrollout: {n: 6}\nalgorithm: {adv_estimator: rloo}\n", encoding="utf-8")
    alone = load_config(str(recipe), ["data.max_response_length=50"])
    assert (alone.model.path, alone.rollout.n, alone.algorithm.adv_estimator) == ("m", 6, "rloo")
    assert alone.data.max_response_length == 50
    other = tmp_path / "other.yaml"
    other.write_text(GOOD.replace("{path: m}", "{path: other}") + "rollout: {n: 3}\n", encoding="utf-8")
    on_top = load_config(str(other), ["rollout.n=5", str(recipe), "data.seed=7"])
    assert (on_top.model.path, on_top.rollout.n, on_top.data.seed) == ("other", 6, 7)


def test_a_base_that_is_wrong_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config .*missing.yaml"):
        load(tmp_path, "base: missing.yaml\n")
    with pytest.raises(ConfigError, match="leads back to itself"):
        load(tmp_path, "base: c.yaml\n")
    with pytest.raises(ConfigError, match=r"base=\['c.yaml'\]: expected the path of one config file"):
        load(tmp_path, "base: [c.yaml]\n")


def test_domains_are_a_mapping_in_a_file_and_in_an_override(tmp_path: Path) -> None:
    text = GOOD.replace("data: {", "data: {domains: {math: 7, 3: 1e-1}, ")
    assert load(tmp_path, text).data.domains == {"math": 7.0, "3": 0.1}
    config = load(tmp_path, text, "data.domains={math: 0.7, code: 0.3}", "data.val_files=b.parquet")
    assert (config.data.domains, config.data.val_files) == ({"math": 0.7, "code": 0.3}, ["b.parquet"])
    assert load(tmp_path, to_yaml(config)) == config
    assert load(tmp_path).data.domains == {}
    assert load(tmp_path, text, "data.domains.math=2").data.domains == {"math": 2.0, "3": 0.1}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("filter.mode=zero_variance", "training.lr_warmup_steps=5"), "Set trainer.total_training_steps"),
        (("filter.mode=zero_variance", "algorithm.adv_estimator=reinforce_plus_plus"), "still teaches"),
        (("filter.mode=zero_variance", "rollout.n=1", "algorithm.adv_estimator=rloo"), "a group of one"),
    ],
)
def test_keys_that_contradict_each_other(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, GOOD, *overrides)


def test_yaml_off_is_a_mode(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD + "tail_batching: {mode: off}\n").tail_batching.mode == "off"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rolout.n=4", "unknown key rolout. Did you mean rollout?"),
        ("rollout.temprature=1", "Did you mean rollout.temperature?"),
        ("trainer.lr=1", "Did you mean training.lr?"),
        ("rollout.n=many", "rollout.n='many': expected a whole number."),
        ("rollout.n=2.5", "expected a whole number"),
        ("rollout.n=true", "expected a whole number"),
        ("training.lr=.nan", "expected a number"),
        ("training.lr=.inf", "expected a number"),
        ("trainer.deterministic=1", "expected true or false"),
        ("training.dtype=fp16", "expected one of fp32, bf16"),
        ("tail_batching.mode=exact", "expected one of off, paper"),
        ("rollout.n=1", "a group of one has no advantage"),
        ("rollout.temperature=0", "must be above 0"),
        ("rollout.top_p=0.9", "Set algorithm.mismatch_correction=tis"),
        ("data.train_batch_size=0", "data.train_batch_size=0: must be at least 1."),
        ("training.max_tokens_per_gpu=50", "1024 + 100 = 1124"),
        ("trainer.logger=wanbd", "known loggers are console, tensorboard, wandb"),
        ("trainer.wandb_mode=dryrun", "expected one of online, offline"),
        ("rollout.val_kwargs.temprature=1", "Did you mean rollout.val_kwargs.temperature?"),
        ("rollout.val_kwarg.n=1", "Did you mean rollout.val_kwargs?"),
        ("val_kwargs.n=1", "unknown key val_kwargs. Did you mean rollout.val_kwargs?"),
        ("rollout.val_kwargs=4", "rollout.val_kwargs: expected keys below it, found 4"),
        ("rollout.n.k=4", "rollout.n={'k': 4}: expected a whole number"),
        ("rollout.val_kwargs.n=0", "rollout.val_kwargs.n=0: must be at least 1."),
        ("rollout.val_kwargs.temperature=-1", "rollout.val_kwargs.temperature=-1.0: must be at least 0."),
        ("rollout.val_kwargs.n=4", "greedy responses are all alike"),
        ("rollout.val_kwargs.top_p=1.5", "rollout.val_kwargs.top_p=1.5: must be above 0 and at most 1"),
        ("rollout=3", "write section.key=value"),
        ("rollout.n", "write section.key=value"),
        ("data.train_files=[1]", "expected a list of strings"),
        ("algorithm.ppo_mini_batch_size=129", "above data.train_batch_size=128"),
        ("algorithm.ppo_mini_batch_size=50", "does not divide data.train_batch_size=128"),
        ("rollout.n=0", "rollout.n=0: must be at least 1."),
        ("rollout.top_k=-7", "must be at least -1"),
        ("trainer.nnodes=2", "without trainer.n_gpus_per_node"),
        ("model.reference_path=other", "has no use: nothing refers to it"),
        ("training.adam_beta1=1", "must be at least 0 and below 1"),
        ("tail_batching.eta_prompts=0.9", "must be at least 1"),
        ("tail_batching.audit_fraction=2", "must be a share, 0 to 1"),
        ("reward.on_error=drop_group", "a plain round trains every group"),
        ("algorithm.overlong=soft_penalty", "overlong_buffer_len=4096 is above data.max_response_length=100"),
        ("algorithm.mismatch_cap=0.5", "must be at least 1"),
        ("data.domains=math", "data.domains='math': expected a mapping"),
        ("data.domains=null", "data.domains=None: expected a mapping"),
        ("data.domains={math: much}", "data.domains.math='much': expected a number."),
        ("data.domains={math: -1}", "gives 'math' the weight -1: must be at least 0"),
        ("data.domains={math: 0, code: 0.0}", "gives every domain the weight 0"),
        ("data.domains={off: 1}", "False is no name; put it in quotes"),
        ("data.domains={math: 1, math: 2}", "key 'math' stands twice"),
        ("data.domains={3: 1, '3': 2}", "the name 3 stands twice"),
        ("data.domains={[math]: 1}", "the value is not valid YAML"),
        ("data.val_files={a: 1}", "expected a list of strings"),
        ("training.min_lr=1", "above training.lr"),
        ("training.context_parallel_size=5", "cuts a sequence into 10 equal pieces"),
        ("training.context_parallel_size=0", "must be at least 1"),
        ("trainer.gpu_memory_gib=0", "must be at least 1"),
    ],
)
def test_bad_values_are_explained(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, GOOD, override)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not valid YAML"),
        ("- a\n", "expected sections"),
        ("model: 3\n", "model: expected keys below it, found 3"),
        ("model: {path: a}\nmodel: {path: b}\n", "'model' stands twice, in lines 1 and 2"),
        ("data: {train_files: [a]}\n", "model.path is not set"),
        ("model: {path: m}\n", "data.train_files is empty"),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert message in str(error.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(str(tmp_path / "absent.yaml"))
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        load_config(str(binary))


def test_parallel_shapes_come_with_their_equation(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "training.tensor_model_parallel_size=2", "training.pipeline_model_parallel_size=2")
    check_parallel_shape(config, 8)
    with pytest.raises(ConfigError, match=r"2 x 2 = 4 does not divide the 6 rank"):
        check_parallel_shape(config, 6)
    with pytest.raises(ConfigError, match=r"rollout\.tensor_model_parallel_size=3 does not divide the 4"):
        check_parallel_shape(load(tmp_path, GOOD, "rollout.tensor_model_parallel_size=3"), 4)


def test_context_parallel_ranks_count(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD, "training.tensor_model_parallel_size=2", "training.context_parallel_size=2")
    check_parallel_shape(config, 8)
    with pytest.raises(ConfigError, match=r"x context_parallel_size = 2 x 1 x 2 = 4 does not divide the 6 rank"):
        check_parallel_shape(config, 6)
    (text,) = missing_features(config)
    assert text.startswith("training.context_parallel_size=2: this version trains with 1;")
    assert missing_features(load(tmp_path)) == []


@pytest.mark.parametrize(
    ("override", "built"),
    [
        ("planner.policy=preemption", "fixed"),
        ("stream.enabled=on", "off"),
        ("stream.enabled=auto", "off"),
        ("rollout.routing=isolate_tail", "even"),
        ("reward.adaptive_timeout=true", "false"),
    ],
)
def test_what_is_only_simulated_does_not_train(tmp_path: Path, override: str, built: str) -> None:
    (text,) = missing_features(load(tmp_path, GOOD, override))
    assert text.startswith(f"{override}: this version trains with {built};")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["planner.policy=schedule"], r"planner.policy=schedule with planner.schedule=\[\]"),
        (["planner.schedule=[1,2]"], r"planner.policy=fixed with planner.schedule=\[1, 2\]"),
        (["planner.policy=schedule", "planner.schedule=[1,0]"], r"sizes from 1 on"),
        (["reward.adaptive_timeout=true", "reward.min_timeout_s=3"], r"min_timeout_s=3 is above reward.timeout_s=2"),
        (["stream.scale_down_at=1"], r"stream.scale_down_at=1: must be a share between 0 and 1"),
        (
            ["rollout.routing=isolate_tail", "tail_batching.mode=paper"],
            r"isolate_tail with tail_batching.mode=paper: a race ends what that routing sets apart",
        ),
    ],
)
def test_policies_that_contradict_each_other_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, GOOD, *overrides)


@pytest.mark.parametrize("section", ["training", "rollout"])
def test_tensor_parallel_groups_stay_within_a_node(tmp_path: Path, section: str) -> None:
    """Ranks of a group are neighbours, so a size that divides the node's ranks never crosses its border."""
    override = f"{section}.tensor_model_parallel_size=4"
    check_parallel_shape(load(tmp_path, GOOD, override, "trainer.n_gpus_per_node=4"), 12)
    with pytest.raises(ConfigError, match=rf"{section}\.tensor_model_parallel_size=4 does not divide .*node=6"):
        check_parallel_shape(load(tmp_path, GOOD, override, "trainer.n_gpus_per_node=6"), 12)


def test_the_planned_size_stands_for_the_job_in_a_dry_run_alone(tmp_path: Path) -> None:
    plan = load(tmp_path, GOOD, "trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    assert job_size(plan, 1, is_dry_run=True) == 16
    assert job_size(plan, 16, is_dry_run=False) == 16
    assert job_size(load(tmp_path, GOOD, "trainer.n_gpus_per_node=8"), 3, is_dry_run=False) == 3
    with pytest.raises(ConfigError, match=r"2 x 8 = 16, but this MPI world has 1 rank.*srun without --mpi=pmix"):
        job_size(plan, 1, is_dry_run=False)
    for is_dry_run in (True, False):
        with pytest.raises(ConfigError, match=r"2 x 8 = 16, but this MPI world has 4 rank.*Start 16 ranks"):
            job_size(plan, 4, is_dry_run=is_dry_run)


def test_every_key_has_a_help_sentence() -> None:
    for dotted, field, _ in every_key():
        assert field.metadata["help"].endswith("."), dotted


def test_keys_may_stand_three_deep(tmp_path: Path) -> None:
    text = GOOD + "rollout: {n: 4, val_kwargs: {n: 2, temperature: 0.6}}\n"
    config = load(tmp_path, text, "rollout.val_kwargs.n=16", "rollout.val_kwargs.top_p=0.95")
    assert (config.rollout.n, config.rollout.val_kwargs) == (4, ValKwargsConfig(16, 0.6, 0.95, -1))
    assert load(tmp_path, to_yaml(config)) == config
    assert load(tmp_path, GOOD).rollout.val_kwargs == ValKwargsConfig(1, 0.0, 1.0, -1)  # verl's defaults


def test_a_command_names_the_files_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\n")
    config = load_config(str(path), ["data.val_files=v.jsonl"], prompts="data.val_files")
    assert config.data.val_files == ["v.jsonl"]
    with pytest.raises(ConfigError, match=r"data\.val_files is empty.*data\.val_files=\[prompts\.jsonl\]"):
        load_config(str(path), prompts="data.val_files")


def test_a_short_file_holds_what_differs_and_what_is_explained(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(path="x: y"),
        data=DataConfig(train_files=["a b.jsonl", "#2.jsonl"], domains={"maths": 0.5}),
        rollout=RolloutConfig(val_kwargs=ValKwargsConfig(n=4, temperature=0.6)),
        training=TrainingConfig(lr=3e-7),
    )
    text = to_short_yaml(
        config, {"tail_batching.mode": "no race", "training.micro_batch_size": "", "rollout.val_kwargs.top_p": "all"}
    )
    assert load(tmp_path, text) == config
    assert text.splitlines() == [
        "model:",
        "  path: 'x: y'",
        "",
        "data:",
        "  train_files: [a b.jsonl, '#2.jsonl']",
        "  domains: {maths: 0.5}",
        "",
        "rollout:",
        "  val_kwargs:",
        "    n: 4",
        "    temperature: 0.6",
        "    top_p: 1.0  # all",
        "",
        "tail_batching:",
        "  mode: 'off'  # no race",
        "",
        "training:",
        "  micro_batch_size: null",
        "  lr: 3.0e-07",
    ]
