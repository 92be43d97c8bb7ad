"""From the section `sweep` to the configs of its runs, and what is refused with the name of its key."""

from pathlib import Path
from typing import Any

import pytest

from grpo_jax import cli
from grpo_jax.adapters.names import RUN_NAME
from grpo_jax.config.load import load_config
from grpo_jax.config.sweep import Sweep, load_sweep, shortened
from grpo_jax.errors import UsageError

BASE = """
run: study
bucket: somewhere
steps: 10
model: {source: m, dtype: float32}
task: {source: "a:b"}
rewards: [{source: "a:one"}]
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "sweep.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    write(BASE, "base.yaml")
    return write


def expanded(path: Path, *overrides: str) -> Sweep:
    sweep = load_sweep(path, overrides)
    assert sweep is not None
    return sweep


def names(sweep: Sweep) -> list[str]:
    return [variant.config.run for variant in sweep.variants]


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as error:
        load_sweep(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def test_a_grid_is_every_combination_with_every_seed_in_one_folder(write: Any) -> None:
    sweep = expanded(
        write(BASE + "sweep: {grid: {lora.rank: [1, 8], optimizer.learning_rate: [1.0e-4, 0.5]}, seeds: [3, 4]}")
    )
    assert (sweep.name, sweep.folder) == ("study", "somewhere/study")
    assert {variant.config.bucket for variant in sweep.variants} == {"somewhere/study"}
    found = [(v.config.lora.rank, v.config.optimizer.learning_rate, v.config.seed) for v in sweep.variants]
    assert found == [(rank, rate, seed) for rank in (1, 8) for rate in (1e-4, 0.5) for seed in (3, 4)]
    assert names(sweep)[:3] == [
        "study-rank1-learning_rate0p0001-s3",
        "study-rank1-learning_rate0p0001-s4",
        "study-rank1-learning_rate0p5-s3",
    ]
    assert sweep.variants[0].settings == {"lora.rank": 1, "optimizer.learning_rate": 1e-4}
    assert sweep.variants[0].name == sweep.variants[1].name


def test_named_variants_override_sections_and_dotted_keys_alike(write: Any) -> None:
    sweep = expanded(
        write(
            BASE + "sweep: {variants: {plain: , exact: {staleness: {exactly: 4}, steps: 25}, old: {max_staleness: 3,"
            " model.dtype: bfloat16}}, grid: {lora.rank: [8]}}"
        )
    )
    assert names(sweep) == ["study-plain-rank8", "study-exact-rank8", "study-old-rank8"]
    plain, exact, old = (variant.config for variant in sweep.variants)
    assert (plain.max_staleness, plain.steps, plain.staleness) == (1, 10, None)
    assert (exact.max_staleness, exact.steps, exact.window) == (4, 25, 6)
    assert (old.max_staleness, old.model.source, old.model.dtype) == (3, "m", "bfloat16")
    assert sweep.variants[1].settings == {"variant": "exact", "lora.rank": 8}


def test_extends_and_overrides_come_before_the_expansion(write: Any) -> None:
    write("extends: base.yaml\nsweep: {grid: {lora.rank: [1, 8]}, seeds: [0]}", "parent.yaml")
    child = write("extends: parent.yaml\nrun: child\nsweep: {grid: {steps: [5]}, seeds: [7, 8]}", "child.yaml")
    sweep = expanded(child, "seed=9", "sweep.grid.lora.rank=[32]", "bucket=gs://b/x/", "lora.alpha=64")
    assert names(sweep) == ["child-rank32-steps5-s7", "child-rank32-steps5-s8"]
    assert sweep.folder == "gs://b/x/child"
    assert {variant.config.lora.alpha for variant in sweep.variants} == {64.0}
    none = write("extends: parent.yaml\nsweep: null", "none.yaml")
    assert load_sweep(none) is None
    assert load_config(none).run == "study"


def test_a_number_is_a_number_however_yaml_reads_it(write: Any) -> None:
    sweep = expanded(write(BASE + "sweep: {grid: {optimizer.learning_rate: [1e-3, 2]}, seeds: [0]}"), "steps=3")
    assert sweep.variants[0].settings == {"optimizer.learning_rate": 0.001}


def test_without_seeds_the_config_s_own_counts_and_is_not_in_the_name(write: Any) -> None:
    sweep = expanded(write(BASE + "seed: 5\nsweep: {grid: {model.dtype: [float32, bfloat16]}}"))
    assert names(sweep) == ["study-dtype-float32", "study-dtype-bfloat16"]
    assert {variant.config.seed for variant in sweep.variants} == {5}
    assert names(expanded(write(BASE + "sweep: {seeds: [1, 2]}"))) == ["study-s1", "study-s2"]


def test_values_that_make_no_word_have_names_of_their_own_all_the_same(write: Any) -> None:
    sweep = expanded(
        write(
            BASE + "sweep: {grid: {lora.targets: [all-linear, [q_proj], [k_proj]], sampling.stop: [[], ['Ä ###']],"
            " task.system_prompt: ['A very long sentence, longer than a name may be, number 1', 'A very long sentence,"
            " longer than a name may be, number 2', null]}}"
        )
    )
    assert len(set(names(sweep))) == len(names(sweep)) == 18
    assert all(RUN_NAME.fullmatch(name) for name in names(sweep))


@pytest.mark.parametrize("length", [1, 62, 63, 64, 500])
def test_a_name_is_shortened_only_if_it_must_be_and_stays_valid(length: int) -> None:
    name = ("a-b_" * length)[:length]
    assert RUN_NAME.fullmatch(shortened(name))
    assert (shortened(name) == name) == (length <= 63)
    assert shortened(name + "x") != shortened(name + "y")


def test_names_that_are_too_long_differ_by_what_was_cut_off(write: Any) -> None:
    long = "x" * 60
    sweep = expanded(write(BASE.replace("study", long) + "sweep: {grid: {lora.rank: [1, 8]}, seeds: [0, 1]}"))
    assert len(set(names(sweep))) == 4
    assert {len(name) for name in names(sweep)} == {63}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sweep: {grid: {lora.rank: 8}}", "sweep.grid.lora.rank: expected a list of values"),
        ("sweep: {grid: {lora.rank: []}}", "sweep.grid.lora.rank: expected a list of values"),
        ("sweep: {gird: {lora.rank: [8]}}", "sweep.gird: unknown key"),
        ("sweep: [1]", "sweep."),
        ("sweep: {}", "sweep: has neither grid, variants nor seeds"),
        ("sweep: {seeds: [a]}", "sweep.seeds.0: "),
        ("sweep: {seeds: [1, 1]}", "sweep: two of its runs are called study-s1"),
        ("sweep: {seeds: [-1]}", "study-s-1: seed: "),
        ("sweep: {grid: {run: [a, b]}}", "sweep.grid.run: cannot be set there; it follows from the sweep"),
        (
            "sweep: {grid: {seed: [1]}, seeds: [1]}",
            "sweep.grid.seed: cannot be set there; the seeds are in sweep.seeds",
        ),
        ("sweep: {variants: {Big: {}}}", "sweep.variants.Big: a name is made of"),
        ("sweep: {variants: {a: {bucket: x}}}", "sweep.variants.a.bucket: cannot be set there"),
        ("sweep: {variants: {a: 3}}", "sweep.variants.a: "),
        (
            "sweep: {variants: {a: {lora: {rank: 8}}}, grid: {lora.rank: [1]}}",
            "sweep.variants.a.lora.rank: is in the grid",
        ),
        ("sweep: {grid: {lora.rank: [1, 8, many]}}", "study-rank-many: lora.rank: "),
        ("sweep: {grid: {lora.ranc: [1]}}", "study-ranc1: lora.ranc: unknown key"),
        ("sweep: {grid: {steps.more: [1]}}", "sweep: steps.more: steps is no section"),
        ("sweep: {grid: {rewards.3.weight: [1]}}", "sweep: rewards.3.weight: rewards has no item '3'"),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_key(write: Any, text: str, message: str) -> None:
    assert complaint(write(BASE + text)).startswith(message)


def test_a_sweep_needs_a_name_of_its_own(write: Any) -> None:
    text = BASE.replace("run: study", "") + "sweep: {seeds: [1]}"
    assert complaint(write(text)).startswith("run: a sweep needs a name")


def test_run_refuses_a_sweep_and_says_what_runs_it(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(BASE + "sweep: {seeds: [1]}")
    assert cli.main(["run", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"grpo-jax sweep {path}" in err
    assert err.count("\n") == 1


def test_sweep_refuses_a_config_of_one_run(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", str(write(BASE))]) == 2
    assert "grpo-jax run" in capsys.readouterr().err


def test_check_looks_at_every_variant(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    good = BASE.replace('"a:b"', "experiments.tasks.addition:one_digit").replace(
        '"a:one"', "tests.plugins:even_first_token"
    )
    path = write(good + "sweep: {variants: {a: {}, b: {lora.targets: [qq_proj]}}}")
    assert cli.main(["check", str(path), "--offline"]) == 2
    captured = capsys.readouterr()
    assert "1 of 2: study-a" in captured.out
    assert captured.err.startswith("grpo-jax: study-b: ")
    assert cli.main(["check", str(path), "--offline", "sweep.variants.b={}"]) == 0
    assert capsys.readouterr().out.count("objective") == 2


def test_an_exact_staleness_is_the_maximum_too(write: Any) -> None:
    config = load_config(write(BASE + "max_staleness: 1\nstaleness: {exactly: 16}"))
    assert (config.max_staleness, config.window, config.slots) == (16, 18, 19)
    assert load_config(write(BASE + "max_staleness: 2"), ["staleness=null"]).staleness is None
    for text, message in (
        ("staleness: {exactly: -1}", "staleness.exactly: "),
        ("staleness: {exactly: 1, exact: 1}", "staleness.exact: unknown key"),
        ("staleness: 3", "staleness: "),
        ("staleness: {}", "staleness.exactly: this key is required"),
    ):
        with pytest.raises(UsageError, match="staleness") as error:
            load_config(write(BASE + text))
        assert message in str(error.value), text
