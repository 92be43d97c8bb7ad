"""Tasks from tables, from the Hub and from generators: what ends up in which field of a problem."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tasks import files, hub
from experiments.tasks.columns import held_out
from experiments.template import filled
from grpo_jax.config.schema import Task
from grpo_jax.errors import UsageError
from grpo_jax.rollouts.rewards import Completion
from grpo_jax.rollouts.tasks import NotHere, Problem, load_task

REPO = Path(__file__).parents[2]
ROWS = [
    {"prompt": "1+1", "answer": "2", "level": "easy", "fold": "train"},
    {"prompt": '2,\n"x"', "answer": "3", "level": "é", "fold": "eval"},
    {"prompt": "3+3", "answer": "6", "level": "hard", "fold": "train"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """The rows in the format of the file's ending, by another writer than what reads them."""
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        quoted = [",".join('"' + str(cell).replace('"', '""') + '"' for cell in row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *quoted]) + "\n", encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_every_format_makes_the_same_problems(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"rows.{ending}", ROWS)
    task = Task(source="experiments.tasks.files:table", args={"path": path, "split_column": "fold"})
    metadata = [{"level": row["level"], "fold": row["fold"]} for row in ROWS]
    assert load_task(task) == {
        "train": [Problem("train-0", "1+1", "2", metadata[0]), Problem("train-1", "3+3", "6", metadata[2])],
        "eval": [Problem("eval-0", '2,\n"x"', "3", metadata[1])],
    }


def test_a_table_may_lie_in_a_bucket_and_be_compressed(tmp_path: Path) -> None:
    with fsspec.open("memory://rows/a.jsonl.gz", "wb") as file:
        file.write(gzip.compress(b'{"prompt": "x", "answer": 1}\n\n'))
    (tmp_path / "b.jsonl").write_text('{"prompt": "y", "answer": 2}')
    paths = ["memory://rows/a.jsonl.gz", str(tmp_path / "b.jsonl")]
    assert files.table(paths) == {"train": [Problem("train-0", "x", 1), Problem("train-1", "y", 2)]}


def test_columns_are_mapped_and_the_rest_is_metadata(tmp_path: Path) -> None:
    row = {"question": "How many?", "hint": "{answer}", "key": 7, "solution": "Six and one.\n#### 7 "}
    path = write(tmp_path / "a.jsonl", [row])
    found = files.table(
        path, template="{question} {hint} \\frac{1}{2}", answer="solution", id="key", answer_after="####"
    )
    metadata = {"question": "How many?", "hint": "{answer}", "solution": row["solution"]}
    assert found == {"train": [Problem("7", "How many? {answer} \\frac{1}{2}", "7", metadata)]}


def test_messages_stay_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    path = write(tmp_path / "a.jsonl", [{"prompt": chat, "answer": None}])
    assert files.table(path)["train"][0].prompt == chat


def test_the_split_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    train, held = write(tmp_path / "a.jsonl", ROWS[:2]), write(tmp_path / "b.csv", ROWS[2:])
    found = files.table(train, held)
    assert [p.prompt for p in found["train"]] == ["1+1", '2,\n"x"']
    assert [(p.id, p.prompt) for p in found["eval"]] == [("eval-0", "3+3")]


@given(st.integers(2, 40), st.data())
def test_held_out_problems_are_a_partition_that_the_seed_alone_decides(size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, size - 1))
    problems = [Problem(str(i), "x") for i in range(size)]
    splits = held_out(problems, count, seed=3)
    assert len(splits["eval"]) == count
    assert sorted(int(p.id) for split in splits.values() for p in split) == list(range(size))
    assert held_out(problems, count, seed=3) == splits
    for split in splits.values():
        assert [int(p.id) for p in split] == sorted(int(p.id) for p in split)


def test_seeds_hold_out_different_problems() -> None:
    problems = [Problem(str(i), "x") for i in range(40)]
    assert len({tuple(p.id for p in held_out(problems, 10, seed)["eval"]) for seed in range(8)}) == 8


@pytest.mark.parametrize(
    ("name", "content", "args", "message"),
    [
        ("a.jsonl", "{}", {}, r"task\.args\.answer: .* has no column 'answer', but none"),
        ("a.jsonl", '{"answer": 1, "q": 2}', {}, r"task\.args\.prompt: .* no column 'prompt', but 'answer', 'q'"),
        ("a.jsonl", '{"prompt": 1}\n{"prom', {}, r"a\.jsonl: is no jsonl file: line 2"),
        ("a.jsonl", "[1]", {}, r"line 1 is no JSON object"),
        ("a.csv", "prompt,answer\n1,2,3\n", {}, r"a\.csv: is no csv file: line 2 has not as many cells"),
        ("a.csv", "prompt,answer\n1\n", {}, r"line 2 has not as many cells"),
        ("a.parquet", "no parquet", {}, r"a\.parquet: is no parquet file|needs the package pyarrow"),
        ("a.txt", "x", {}, r"a\.txt: the format 'txt' is none of jsonl, csv, parquet"),
        ("a.csv", "prompt,answer\n1,2\n", {"held_out": 1}, r"task\.args\.held_out: 1 of 1 problems leave none"),
        ("a.csv", "prompt,answer\n1,2\n", {"held_out": 1, "split_column": "x"}, "the split is given twice"),
    ],
)
def test_a_table_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: str, args: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=message) as error:
        files.table(str(tmp_path / name), **args)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_without_the_credentials_of_its_url(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.csv: cannot be read: No such file or directory"):
        files.table(str(tmp_path / "none.csv"))
    with pytest.raises(UsageError) as error:
        files.table("http://user:secretsecret@127.0.0.1:1/a.csv")
    assert "secretsecret" not in str(error.value)
    assert "127.0.0.1:1/a.csv: cannot be read" in str(error.value)


def test_without_pyarrow_parquet_is_refused_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"a\.parquet: reading Parquet needs the package pyarrow$"):
        files.table(str(tmp_path / "a.parquet"))


def test_a_text_filled_in_is_no_template() -> None:
    assert filled("{a}{b}{c}", {"a": "{b}", "b": 2}) == "{b}2{c}"
    assert filled("{ab} {a}", {"a": 1, "ab": 2}) == "2 1"
    assert filled("{}", {}) == "{}"


# ---- the Hub


@pytest.mark.parametrize(
    ("tree", "subset", "split", "expected"),
    [
        (["main/train/0000.parquet", "main/train/0001.parquet", "main/test/0000.parquet"], None, "train", [0, 1]),
        (["a/train/0000.parquet", "b/train/0000.parquet", "b/test/0000.parquet"], "b", "train", [1]),
        (["data/train-00000-of-00001.parquet", "data/train_extra-0.parquet", "README.md"], None, "train", [0]),
        (["train.jsonl", "test.jsonl"], None, "test", [1]),
    ],
)
def test_the_files_of_a_split_are_found(
    tmp_path: Path, tree: list[str], subset: str | None, split: str, expected: list[int]
) -> None:
    for name in tree:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert hub.split_files(tmp_path, "org/set", subset, split) == [tmp_path / tree[i] for i in expected]


def test_a_subset_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "train").mkdir(parents=True)
        (tmp_path / name / "train" / "0000.parquet").touch()
    with pytest.raises(UsageError, match=r"task\.args\.subset: the data set 'org/set' has several: 'a', 'b'"):
        hub.split_files(tmp_path, "org/set", None, "train")
    with pytest.raises(UsageError, match="no files of a split 'test'"):
        hub.split_files(tmp_path, "org/set", "a", "test")


def test_what_the_hub_sent_becomes_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"q{i}", "answer": f"because #### {i}"} for i in range(3)]
    for split in ("train", "test"):
        (tmp_path / "main" / split).mkdir(parents=True)
        write(tmp_path / "main" / split / "0000.parquet", rows)
    asked: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    args = {"name": "openai/gsm8k", "subset": "main", "eval": "test", "prompt": "question", "answer_after": "####"}
    found = load_task(Task(source="experiments.tasks.hub:dataset", args={**args, "limit": 2}), offline=True)
    assert found["train"] == [Problem(f"train-{i}", f"q{i}", str(i), {"solution": f"because #### {i}"}) for i in (0, 1)]
    assert [problem.id for problem in found["eval"]] == ["eval-0", "eval-1"]
    assert {(call["name"], call["repo_type"], call["local_files_only"]) for call in asked} == {
        ("openai/gsm8k", "dataset", True)
    }
    assert all(call["revision"] == "refs/convert/parquet" for call in asked)


@pytest.mark.parametrize("offline", [True, False])
def test_a_data_set_that_cannot_be_had_is_one_sentence_of_the_real_client(tmp_path: Path, offline: bool) -> None:
    program = (
        "from experiments.tasks import hub\n"
        "hub.find_spec = lambda name: None\n"
        f"try: hub.dataset('org/set', offline={offline})\n"
        "except Exception as error: print(type(error).__name__, error, sep='|')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPO,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    kind, _, message = done.stdout.strip().partition("|")
    assert kind == ("NotHere" if offline else "UsageError"), done.stderr
    where = "is not in the cache" if offline else "cannot be fetched"
    assert message.startswith(f"task.args.name: the data set 'org/set' {where}: ")
    assert "\n" not in message


def test_not_here_is_a_usage_error_for_who_does_not_know_it() -> None:
    assert issubclass(NotHere, UsageError)


# ---- reasoning-gym


@pytest.fixture
def gym() -> Any:
    pytest.importorskip("reasoning_gym")
    from experiments.tasks import gym

    return gym


def test_generated_problems_are_the_same_at_the_same_place(gym: Any) -> None:
    train, held = gym.generated("leg_counting", size=20, eval_size=5, seed=4).values()
    again = gym.generated("leg_counting", size=9, seed=4)["train"]
    assert list(again) == train[:9]
    assert train[-1] == train[19]
    assert len({p.id for p in (*train, *held)}) == 25
    assert not {p.prompt for p in train} & {p.prompt for p in held}
    with pytest.raises(IndexError):
        train[20]


def test_the_generator_scores_what_it_has_made(gym: Any) -> None:
    from experiments.rewards.gym import score

    problem = gym.generated("leg_counting", size=1)["train"][0]

    def reward(text: str, **args: Any) -> float:
        return score(Completion(text, [], problem.prompt, problem.answer, problem.metadata, "stop"), **args)

    assert reward(f"<think>7?</think> {problem.answer}") == 1.0
    assert reward("no idea") < 1.0
    assert reward(f"it is <answer> {problem.answer} </answer>", tagged=True) == 1.0
    assert reward(str(problem.answer), tagged=True) == 0.0


def test_what_cannot_be_generated_is_one_sentence(gym: Any) -> None:
    for args in ({"name": "no_such_generator"}, {"name": "leg_counting", "colour": "red"}):
        with pytest.raises(UsageError, match=r"^task\.args: reasoning-gym cannot make") as error:
            gym.generated(**args)
        assert "\n" not in str(error.value)


def test_the_optional_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.tasks import gym

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match="needs the package reasoning-gym"):
        gym.generated("leg_counting")


def test_modules_of_tasks_and_rewards_import_without_optional_packages() -> None:
    absent = ("datasets", "jsonschema", "math_verify", "pyarrow", "reasoning_gym", "sympy", "torch")
    names = [
        f"experiments.{path.parent.name}.{path.stem}"
        for path in (REPO / "experiments").glob("*/*.py")
        if path.parent.name in ("tasks", "rewards") and path.stem not in ("__init__", "sandbox_child")
    ]
    assert len(names) > 12
    program = (
        "import importlib, sys\n"
        f"for name in {absent!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
