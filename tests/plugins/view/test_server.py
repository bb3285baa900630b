"""The viewer's HTTP answers, its clients, and its refusals."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import httpx
import pytest
from tokenizers import Tokenizer

from roundhouse.images import image_name, image_part
from roundhouse.plugins.nemo_gym.exchange.json_lines import ROLLOUT, TASK, CollectionFiles, write_rows
from roundhouse.plugins.view.catalog import Catalog, Filters, Scope, ViewError, spellings
from roundhouse.plugins.view.detail import Decoder, Details, chains_of
from roundhouse.plugins.view.index import Indexes
from roundhouse.plugins.view.server import Answers, export_page
from roundhouse.stages.importing import import_files
from roundhouse.store.location import Location
from tests.sql.stores import HOSTILE, begin_stage, write_run


@pytest.mark.parametrize(
    "path", ["", "static/app.js", "api/store", "api/nothing", "static/nothing", "api/rollouts?run=none"]
)
def test_every_answer_forbids_foreign_code(url: str, path: str) -> None:
    headers = httpx.get(url + path).headers
    assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_nothing_can_be_written(url: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert httpx.request(method, f"{url}api/rollouts?run=a").status_code == 405


def test_another_sites_name_is_refused(url: str) -> None:
    answer = httpx.get(f"{url}api/store", headers={"Host": "evil.example:80"})
    assert answer.status_code == 421
    assert "runs" not in answer.text
    assert httpx.get(f"{url}api/store", headers={"Host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize("name", ["..%2fserver.py", "%2e%2e/answers.py", "/etc/passwd"])
def test_files_outside_of_the_page_are_not_served(url: str, name: str) -> None:
    assert httpx.get(f"{url}static/{name}").status_code == 404


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("run=none", "Runs there: a, b, wide"),
        ("run=..%2fa", "Runs there"),
        ("run=a&iteration=9", "available: 1 to 3"),
        ("run=a&iteration=x", "neither a number"),
        ("run=a&stage=train", "collect or evaluate"),
        ("run=a&iteration=1&sort=reward;drop", "Available: iteration"),
        ("run=a&iteration=1&reward_min=low", "not a number"),
        ("run=a&iteration=1&limit=-1", "out of range"),
    ],
)
def test_requests_that_cannot_be_answered_are_told_why(url: str, query: str, told: str) -> None:
    answer = httpx.get(f"{url}api/rollouts?{query}")
    assert answer.status_code == 404
    assert told in answer.json()["error"]


@pytest.mark.parametrize("text", ["'; DROP TABLE rollouts; --", "%", HOSTILE, '"quoted"', "é😀", "back\\slash"])
def test_what_is_searched_is_data(store: str, text: str) -> None:
    index = Indexes(Catalog(store)).at(Scope("b", 2, "collect"))
    found = index.page(Filters(search=text))
    assert found["matched"] == (12 if text in f"{HOSTILE} é😀" else 0)
    assert index.page(Filters())["matched"] == 12


def test_a_text_is_found_as_it_stands_in_json_and_in_json_in_json() -> None:
    assert spellings('a"b') == ['a\\"b', 'a\\\\\\"b']
    assert spellings("Plain") == ["plain"]


def test_the_viewer_reads_a_bucket_as_it_reads_a_disk(store_uri: str) -> None:
    write_run(store_uri, "a", iterations=2)
    answers = Answers(store_uri)
    scope = {"run": "a", "iteration": "2"}
    page = answers.rollouts(scope)
    assert (page["matched"], len(page["rows"])) == (12, 12)
    assert answers.rollouts({"run": "a", "iteration": "all"})["matched"] == 24
    assert answers.rollouts(scope | {"q": "What is 1 + 2?"})["matched"] == 4
    assert [point["iteration"] for point in answers.curve(scope)] == [1, 2]
    shown = answers.rollout(scope | {"rollout": "sum/2/1", "rollout_iteration": "2"})
    [stream] = shown["streams"]
    assert "".join(stream["texts"]).endswith("The answer is 7.<|im_end|>")
    assert sum(stream["mask"]) == shown["columns"][0]["trained_tokens"]
    assert shown["missing"] == {}
    assert {
        len(stream[name]) for name in ("ids", "mask", "turn", "logprob", "advantage", "version", "trainer_logprob")
    } == {len(stream["ids"])}


def test_a_stage_that_is_being_written_is_shown_and_followed(tmp_path, monkeypatch) -> None:
    store = str(tmp_path / "store")
    run = write_run(store, "a", iterations=1)
    begin_stage(run, 2, attempts=1)
    catalog = Catalog(store)
    indexes = Indexes(catalog)
    scope = Scope("a", 2, "collect")
    assert indexes.at(scope).count == 1
    begin_stage(run, 2, attempts=3)
    monkeypatch.setattr("roundhouse.plugins.view.catalog.FRESH_SECONDS", 0.0)  # the time between two looks is over
    assert indexes.at(scope).count == 3


def test_comparing_joins_the_tasks_that_both_have(store: str) -> None:
    answers = Answers(store)
    found = answers.compare({"run": "a", "iteration": "2", "b_run": "wide", "b_iteration": "1"})
    assert [row["task"] for row in found["tasks"]] != []
    assert (len(found["tasks"]), found["only_a"], found["only_b"]) == (3, 0, 97)


def test_of_all_iterations_each_shows_the_whole_group_of_its_own(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    write_run(store, "long", iterations=4, tasks=1, group_size=70)
    answers, scope = Answers(store), {"run": "long", "iteration": "all"}
    last = answers.rollouts(scope | {"sort": "-iteration", "limit": "1"})["rows"][0]
    shown = answers.rollout(scope | {"rollout": last["rollout_id"], "rollout_iteration": "4"})
    assert len(shown["siblings"]) == 70
    assert answers.rollouts(scope | {"group": last["group_id"]})["matched"] == 280
    beside = answers.group(scope | {"of": last["group_id"], "of_iteration": "4"})["rollouts"]
    assert (len(beside), {row["iteration"] for row in beside}) == (64, {4})


def test_an_imported_dataset_is_shown_whatever_its_versions_are_called(tmp_path: Path) -> None:
    files, store = CollectionFiles(tmp_path / "run.jsonl"), str(tmp_path / "store")
    write_rows(
        files.rollouts,
        [{"responses_create_params": {"input": "2*3?"}, "reward": 1.0, **dict.fromkeys((TASK, ROLLOUT), 0)}],
    )
    catalog, scope = Catalog(store), {"run": "datasets/math"}

    def numbers(version: str) -> dict[str, int]:
        import_files(store, "math", files.rollouts, version)
        return {label: number for number, label in catalog.versions("datasets/math").items()}

    chosen = numbers("final")["final"]
    found = [numbers(version) for version in ("v000001", "another", "v000002")][-1]
    assert found == {"v000001": 1, "v000002": 2, "another": found["another"], "final": chosen}
    Location(store).write("datasets/math/empty/note", b"")
    for place in ("datasets/math", "datasets", "runs", "replays"):
        (Path(store) / place / "a person's notes").mkdir(parents=True)
    assert [run["run_id"] for run in catalog.runs()] == ["datasets/math"]
    assert catalog.replays("r") == []
    assert [row["label"] for row in Answers(store).curve(scope)] == list(catalog.versions("datasets/math").values())
    for number in found.values():
        assert Answers(store).rollouts(scope | {"iteration": str(number)})["matched"] == 1


def test_images_are_shown_by_name(tmp_path: Path) -> None:
    files, store = CollectionFiles(tmp_path / "run.jsonl"), str(tmp_path / "store")
    part = image_part(b"the file of an image")
    asked = {"input": [{"role": "user", "content": [part, {"type": "input_text", "text": "how many?"}]}]}
    write_rows(files.rollouts, [{"responses_create_params": asked, "reward": 1.0, **dict.fromkeys((TASK, ROLLOUT), 0)}])
    import_files(store, "seen", files.rollouts, "v000001")
    scope = {"run": "datasets/seen", "iteration": "1"}
    [row] = Answers(store).rollouts(scope)["rows"]
    detail = Answers(store).rollout(scope | {"rollout": row["rollout_id"], "rollout_iteration": "1"})
    shown = detail["rollout"]["messages"][0]["content"][0]["image_url"]
    assert shown == f"data:image/png;sha256,{image_name(b'the file of an image')}"
    export_page(store, Scope("datasets/seen", 1, "collect"), tmp_path / "page.html", 10)
    page = (tmp_path / "page.html").read_text()
    assert shown in page
    assert part["image_url"] not in page


def test_runs_with_an_unreadable_identity_hide_no_other_run(tmp_path: Path) -> None:
    run = write_run(str(tmp_path), iterations=1)
    for name in ("cut", "endless"):
        (tmp_path / "runs" / name).mkdir()
    (tmp_path / "runs/cut/run.json").write_bytes(b'{"run_id": "cut"')
    (tmp_path / "runs/endless/run.json").symlink_to("/dev/zero")
    assert [each["run_id"] for each in Catalog(str(tmp_path)).runs()] == [run.run_id]


def test_an_unknown_rollout_is_told(store: str) -> None:
    with pytest.raises(ViewError, match="Rollout 'sum/9/9' does not exist"):
        Answers(store).rollout({"run": "a", "iteration": "1", "rollout": "sum/9/9", "rollout_iteration": "1"})


def test_branches_are_chains_of_their_own() -> None:
    turns = [{"turn": 0, "parent": None}, {"turn": 1, "parent": 0}, {"turn": 2, "parent": 0}, {"turn": 3, "parent": 2}]
    assert [[turn["turn"] for turn in chain] for chain in chains_of(turns)] == [[0, 1], [0, 2, 3]]
    loop = [{"turn": 0, "parent": 1}, {"turn": 1, "parent": 0}, {"turn": 2, "parent": 1}]
    assert [[turn["turn"] for turn in chain] for chain in chains_of(loop)] == [[0, 1, 2]]


def test_a_tokenizer_that_cannot_be_read_leaves_the_tokens_as_ids(caplog: pytest.LogCaptureFixture) -> None:
    catalog: Any = SimpleNamespace(tokenizer_file=lambda run_id: b'{"model": 3}')
    assert Details(catalog, Indexes(catalog)).decoder("mine") is None
    assert "The tokenizer of run mine cannot be read" in caplog.text


def test_tokens_read_as_the_text_they_make(store: str) -> None:
    file = Catalog(store).tokenizer_file("a")
    assert file is not None
    decoder = Decoder(file)
    ids = Tokenizer.from_buffer(file).encode("The answer is 7. \n x", add_special_tokens=False).ids
    assert "".join(decoder.texts(ids)) == "The answer is 7. \n x"
    assert decoder.texts([10**9]) == ["<1000000000?>"]


@pytest.mark.parametrize(
    ("learning", "kept"), [("trained", ["a/0", "a/1"]), ("collapsed", ["b/0", "b/1"]), ("refused", ["c/1"])]
)
def test_a_collapsed_group_is_one_whose_advantages_are_all_zero(learning: str, kept: list[str]) -> None:
    database = duckdb.connect()
    database.execute(
        "CREATE TABLE rollouts AS SELECT * FROM (VALUES (1, 'a/0', 'a', 0.5, NULL), (1, 'a/1', 'a', -0.5, NULL), "
        "(1, 'a/2', 'a', 0.0, NULL), (1, 'b/0', 'b', 0.0, NULL), (1, 'b/1', 'b', 0.0, NULL), (2, 'b/2', 'b', NULL, NULL), "
        "(1, 'c/1', 'c', NULL, 'too_old')) AS t(iteration, rollout_id, group_id, advantage, reason)"
    )
    where = Filters.of({"learning": learning}).where
    found = database.execute(f"SELECT rollout_id FROM rollouts WHERE {where} ORDER BY 1").fetchall()
    assert [name for (name,) in found] == kept


def test_an_unknown_choice_of_learning_is_refused_with_the_choices() -> None:
    with pytest.raises(ViewError, match=r"learning='moved' is unknown. Known: trained, collapsed, refused"):
        Filters.of({"learning": "moved"})
