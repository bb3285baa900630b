"""No configuration holds a secret, and none is shown where one is printed."""

import traceback

import pytest

from roundhouse.config.loading import load_config, parse_config
from roundhouse.config.secrets import MASK, masked, read_secret, refuse_secrets, resolved
from roundhouse.errors import ConfigError
from tests.growth import growth


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "policy_api_key",
        "OPENAI_API_KEY",
        "hf_token",
        "hfToken",
        "password",
        "Authorization",
        "client-secret",
    ],
)
def test_values_under_secret_names_are_masked(key):
    assert masked({"a": {key: "sesame"}}) == {"a": {key: MASK}}
    assert masked({key: ["sesame", "open"]}) == {key: [MASK, MASK]}


def test_a_number_under_a_secret_name_is_masked():
    assert masked({"password": 1234, "api_key": 7}) == {"password": MASK, "api_key": MASK}


def test_counts_switches_and_unset_values_stay():
    tree = {
        "max_output_tokens": 64,
        "return_token_id_information": True,
        "api_key": None,
        "hf_token": "",
        "key": "???",
        "monkey": "see",
    }
    assert masked(tree) == tree


def test_everything_inside_a_mapping_of_secrets_is_masked():
    assert masked({"secrets": {"a": "x", "b": {"c": "y"}}}) == {"secrets": {"a": MASK, "b": {"c": MASK}}}


def test_the_user_part_of_a_url_is_masked():
    assert masked({"url": "https://me:sesame@host/v1"}) == {"url": f"https://{MASK}@host/v1"}


def test_a_long_value_is_read_in_time_by_its_length():
    """A word of 140,000 letters took minutes when every letter of it could begin a URL's scheme."""

    def read(letters: int) -> None:
        refuse_secrets({"environment": {"parameters": {"text": "a" * letters}}}, by_name=True)

    assert growth(read, 20_000) < 24


# What no configuration may hold ---------------------------------------------------------------------------------------

CANARY = "canary-5e7c1d90"
PLACES = {
    "a key among parameters": {"environment": {"kind": "custom", "target": "a:B", "parameters": {"api_key": CANARY}}},
    "one deeper down": {"environment": {"kind": "worker", "train_data": "x", "parameters": {"judge": [{"password": CANARY}]}}},
    "an argument of the engine": {"generation": {"engine_args": {"hf_token": CANARY}}},
    "a URL's user": {"generation": {"engine_url": f"http://me:{CANARY}@host", "replicas": 1}},
    "a URL's query": {"tracking": {"uri": f"https://host/?api_key={CANARY}"}},
    "a service's URL": {"train": {"service": {"kind": "remote", "url": f"https://{CANARY}@host"}}},
    "an MCP server's URL": {"environment": {"kind": "custom", "target": "a:B", "mcp_servers": {"x": f"http://u:{CANARY}@h"}}},
    "a store's URL": {"store": f"s3://key:{CANARY}@bucket/x"},
    "a head server's token": {"environment": {"kind": "agent", "url": "http://a", "train_tasks": "x", "head_token": CANARY}},
    "a token in place of its variable": {"train": {"service": {"kind": "remote", "url": "http://a", "token_variable": CANARY}}},
    "a known kind of key anywhere": {"policy": {"kind": "pretrained", "path": f"sk-{CANARY}{CANARY}"}},
}  # fmt: skip


def parameters(**given):
    return {"environment": {"kind": "custom", "target": "a:B", "parameters": given}}


PLACES |= {
    name: parameters(**{name: CANARY}) for name in ("auth", "bearer", "pwd", "creds", "sas", "DB_PWD", "basicAuth")
}
PLACES |= {
    "a header": parameters(headers={"X-Auth": CANARY}),
    "a key in a section auth": parameters(auth={"kind": "basic", "password": CANARY}),
    "a connection string": parameters(connection_string=f"Server=h;Initial Catalog=c;Password={CANARY}"),
    "a storage account's": parameters(storage=f"AccountName=a;AccountKey={CANARY}=="),
    "libpq's": parameters(database=f"host=h dbname=d password={CANARY}"),
    "an assignment": parameters(env=[f"OPENAI_API_KEY={CANARY}"]),
    "an assignment before a command": parameters(command=f"export A=1 HF_TOKEN='{CANARY}' python judge.py"),
    "a .env file's text": parameters(env=f"A=1\nexport DB_PASSWORD={CANARY}\n"),
    "a signed URL": parameters(url=f"https://h/?sv=2024&sig={CANARY}"),
    "one of S3": {"tracking": {"uri": f"https://h/x?X-Amz-Signature={CANARY}"}},
    "a URL's fragment": parameters(url=f"https://h/#access_token={CANARY}"),
    "a JSON web token": parameters(text=f"as eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{CANARY}"),
    "a GitLab token": parameters(text=f"glpat-{CANARY}{CANARY}"),
    "a fine-grained GitHub token": parameters(text=f"github_pat_{CANARY.replace('-', '_')}{CANARY.replace('-', '_')}"),
    "a Slack webhook": parameters(notify=f"https://hooks.slack.com/services/T0/B0/{CANARY}"),
}  # fmt: skip


@pytest.mark.parametrize("tree", PLACES.values(), ids=PLACES)
def test_a_secret_in_the_configuration_is_refused_with_a_remedy_and_not_repeated(tree):
    with pytest.raises(ConfigError, match=r"variable|VARIABLE") as refused:
        parse_config({"run_id": "r", **tree})
    assert CANARY not in str(refused.value)
    assert CANARY not in "".join(traceback.format_exception(refused.value))


def test_a_secret_that_a_file_would_take_from_the_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", CANARY)
    file = tmp_path / "run.yaml"
    file.write_text("run_id: r\nenvironment: {kind: custom, target: 'a:B', parameters: {judge: '${JUDGE_API_KEY}'}}\n")
    with pytest.raises(ConfigError, match=r"JUDGE_API_KEY.*\{variable: NAME\}") as refused:
        load_config(file)
    assert CANARY not in str(refused.value)


def test_what_is_no_secret_is_not_refused():
    parameters = {"sort_key": "name", "max_tokens": 5, "pad_token": "</s>", "api_key": {"variable": "JUDGE"}, "key": "c#",
                  "password": None, "secret_file": "/run/secrets/x", "home": "http://host/a@b?page=2",
                  "auth": "bearer", "basic_auth": False, "author": "me", "authors": ["a"], "auth_mode": "x", "forbearer": 1,
                  "login": {"auth": {"kind": "basic", "password": {"variable": "P"}}}, "creds_file": "/x", "sassy": "y",
                  "signature": "def f(x):", "sig": "x", "design": "https://h/?design=flat#section-2", "cwd": "/tmp",
                  "prompt": "Write f so that f(pad_token=0, key=len) holds; the answer's token=<word> is one line.\nx=1; y=2",
                  "template": "OPENAI_API_KEY=${KEY} PASSWORD={password} python judge.py --auth=none", "path": "/a/b=1/key=2",
                  "eyJ": "eyJ.no.token", "chain": "v1.2.3", "hook": "https://slack.com/help"}  # fmt: skip
    environment = {"kind": "custom", "target": "a:B", "parameters": parameters}
    assert parse_config({"run_id": "r", "environment": environment}).environment.parameters == parameters


def test_the_working_directory_of_the_shell_is_no_password(tmp_path, monkeypatch):
    monkeypatch.setenv("PWD", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text("run_id: r\nstore: ${PWD}/store\n")
    assert load_config(file).store == f"{tmp_path}/store"


def test_the_name_of_a_kubernetes_secret_is_none():
    infra = {"kind": "kubernetes", "secret": "roundhouse-s3", "images": {"roundhouse": "example.org/roundhouse:1"}}
    held = {"infra": infra, "note": [{"secret": "roundhouse-s3"}]}
    refuse_secrets(held, by_name=False)
    with pytest.raises(ValueError, match=r"infra\.secret holds a secret, by its name"):
        refuse_secrets(held, by_name=True)


def test_a_run_that_recorded_no_token_is_still_read():
    environment = {
        "kind": "agent",
        "url": "http://a",
        "train_tasks": "x",
        "head_token": None,
        "model_server_token": None,
    }
    assert parse_config({"run_id": "r", "environment": environment}).environment.url == "http://a"


def test_an_environment_gets_the_secret_that_its_configuration_names(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE", CANARY)
    (tmp_path / "secret").write_text(f"{CANARY}-file\n")
    place = {"judges": [{"api_key": {"variable": "JUDGE"}}], "db_password": {"file": str(tmp_path / "secret")}, "n": 1}
    assert resolved(place) == {"judges": [{"api_key": CANARY}], "db_password": f"{CANARY}-file", "n": 1}
    monkeypatch.delenv("JUDGE")
    with pytest.raises(ConfigError, match="JUDGE, which is not set"):
        resolved(place)


def test_a_secret_comes_from_its_variable_or_from_the_file_that_another_names(tmp_path, monkeypatch):
    monkeypatch.delenv("SOME_TOKEN", raising=False)
    assert read_secret("SOME_TOKEN") is None
    file = tmp_path / "token"
    file.write_text(f" {CANARY}\n")
    monkeypatch.setenv("SOME_TOKEN_FILE", str(file))
    assert read_secret("SOME_TOKEN") == CANARY
    monkeypatch.setenv("SOME_TOKEN", "nearer")
    assert read_secret("SOME_TOKEN") == "nearer"
    assert read_secret("SOME_TOKEN", str(file)) == CANARY
    file.write_text("")
    for path in (file, tmp_path / "none"):
        with pytest.raises(ConfigError, match="secret file"):
            read_secret("SOME_TOKEN", str(path))
