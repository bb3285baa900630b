"""The wire contract of a resources server, over real HTTP."""

import json
from collections.abc import Iterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from roundhouse.environments.base import Environment, Verdict
from roundhouse.http.sessions import SessionStore
from roundhouse.plugins.nemo_gym.servers.resources import build_app
from roundhouse.rollout.responses import response_object
from tests.gym.counter import Counter, counter_row
from tests.gym.playground import serving, serving_command, serving_counter

COOKIE = "Counter___counter"
RESPONSE = response_object("resp_1", [], model="policy", created_at=0.0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_counter() as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/livez", "/readyz"])
def test_it_says_that_it_is_alive_where_probes_ask(client: httpx.Client, path: str):
    assert client.get(path).json() == {"status": "ok"}


def test_a_session_lives_from_seed_to_verify(client: httpx.Client):
    assert client.post("/seed_session", json=counter_row("a")).json() == {"supports_explicit_close": True}
    answer = client.post("/add", json={"n": 3})
    assert (answer.text, answer.headers["content-type"]) == ('{"owner":"a","total":3}', "application/json")
    assert client.post("/total", json={}).text == "3 für a"
    row = counter_row("a", expected_answer=[7], _ng_task_index=4)
    verdict = client.post("/verify", json={**row, "response": RESPONSE}).json()
    assert verdict["reward"] == 0.3
    assert verdict["reward_components"] == {"sum": 0.3, "form": 0.0}
    assert verdict["metrics"] == {"words": 0.0, "status": 1.0}
    assert {name: verdict[name] for name in row} == row, "the row's fields are kept"
    assert verdict["response"] == RESPONSE
    assert "mask_sample" not in verdict


def named_seed(name: str, **row: object) -> dict[str, object]:
    """The body of an environment server, which names its session itself."""
    identity = {"episode_id": {"rollout_id": name, "attempt": 0}, "task_id": {"taskset": "t", "task_id": "1"}}
    return {"resources_session_id": name, **identity, "task_data": counter_row(**row)}


def test_a_named_session_is_seeded_once_and_reached_by_its_cookie(url: str):
    seed = named_seed("s-1")
    with httpx.Client(base_url=url) as first, httpx.Client(base_url=url) as again:
        assert first.post("/seed_session", json=seed).json() == {"resources_session_id": "s-1"}
        first.post("/add", json={"n": 3})
        assert again.post("/seed_session", json=seed).json() == {"resources_session_id": "s-1"}
        assert again.post("/add", json={"n": 4}).json() == {"owner": "t", "total": 7}


def test_a_named_session_is_not_seeded_after_its_close(client: httpx.Client):
    for name in ("s-2", "never seeded"):
        close = {key: value for key, value in named_seed(name).items() if key in ("resources_session_id", "episode_id")}
        if name == "s-2":
            client.post("/seed_session", json=named_seed(name))
        for _ in range(2):
            assert client.post("/close_session", json=close).json() == {"resources_session_id": name}
        assert client.post("/seed_session", json=named_seed(name)).status_code == 409


def test_a_mask_is_reported(client: httpx.Client):
    row = counter_row(verdict="mask")
    client.post("/seed_session", json=row)
    assert client.post("/verify", json={**row, "response": RESPONSE}).json()["mask_sample"] is True


@pytest.mark.parametrize(
    ("path", "body", "status", "answer"),
    [
        ("/seed_session", counter_row(), 200, {"supports_explicit_close": True}),
        ("/subtract", {"n": 3}, 404, {"detail": "Not Found"}),
        ("/no/such/path", {}, 404, {"detail": "Not Found"}),
        ("/fail", {}, 500, "ValueError('no such \"thing\"')"),
        (
            "/add",
            {},
            422,
            {"detail": [{"type": "missing", "loc": ["body", "n"], "msg": "Field required", "input": {}}]},
        ),
        (
            "/verify",
            {"response": RESPONSE},
            422,
            {
                "detail": [
                    {
                        "type": "missing",
                        "loc": ["body", "responses_create_params"],
                        "msg": "Field required",
                        "input": {"response": RESPONSE},
                    }
                ]
            },
        ),
    ],
)
def test_every_answer_sends_the_session_cookie_again(client: httpx.Client, path: str, body, status: int, answer):
    first = client.post("/seed_session", json=counter_row()).cookies[COOKIE]
    reply = client.post(path, json=body)
    assert (reply.status_code, reply.json()) == (status, answer)
    cookie = reply.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}={first.split('.')[0]}.")
    assert cookie.endswith("; path=/; Max-Age=1209600; httponly; samesite=lax")


def test_a_body_that_is_no_json_is_refused_in_fastapis_shape(client: httpx.Client):
    client.post("/seed_session", json=counter_row())
    reply = client.post("/add", content=b"{n: 3}")
    assert reply.status_code == 422
    (detail,) = reply.json()["detail"]
    assert (detail["type"], detail["loc"][0], detail["msg"]) == ("json_invalid", "body", "JSON decode error")


def test_the_rollout_prefix_is_stripped_and_the_session_stays(client: httpx.Client):
    client.post("/ng-rollout/3-1-a2/seed_session", json=counter_row("p"))
    assert client.post("/ng-rollout/3-1-a2/add", json={"n": 2}).json() == {"owner": "p", "total": 2}
    assert client.post("/total", json={}).text == "2 für p"
    assert client.post("/ng-rollout/-bad/add", json={"n": 2}).status_code == 404


def test_starlettes_own_session_middleware_reads_our_cookie_and_we_read_its(url: str):
    async def whoami(request: Request) -> JSONResponse:
        request.session["session_id"] = request.session.get("session_id", "from-theirs")
        return JSONResponse(request.session["session_id"])

    theirs = Starlette(
        routes=[Route("/whoami", whoami)],
        middleware=[Middleware(SessionMiddleware, secret_key=COOKIE, session_cookie=COOKIE)],
    )
    with serving(theirs) as other:
        given = httpx.get(f"{other}/whoami").cookies[COOKIE]
        headers = {"Cookie": f"{COOKIE}={given}"}
        seeded = httpx.post(f"{url}/seed_session", json=counter_row("x"), headers=headers)
        back = httpx.get(f"{other}/whoami", headers={"Cookie": f"{COOKIE}={seeded.cookies[COOKIE]}"})
        assert back.json() == "from-theirs"
    assert httpx.post(f"{url}/add", json={"n": 1}, headers=headers).json() == {"owner": "x", "total": 1}


def test_a_forged_cookie_gets_a_session_of_its_own(client: httpx.Client):
    reply = client.post("/seed_session", json=counter_row(), headers={"Cookie": f"{COOKIE}=eyJhIjoxfQ==.x.y"})
    assert reply.status_code == 200
    assert reply.cookies[COOKIE] != "eyJhIjoxfQ==.x.y"


def test_a_session_that_is_not_here_is_an_infrastructure_failure_and_never_a_verdict(client: httpx.Client):
    for path, body in (("/add", {"n": 1}), ("/verify", counter_row() | {"response": RESPONSE})):
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.headers["x-roundhouse-failure"]) == (503, "infra")
        assert reply.json().startswith("UnknownSession(")


def test_a_stateless_environment_needs_no_seed():
    class Echo(Environment):
        name = "echo"

        def tasks(self, split):
            return []

        async def verify(self, session, row, response):
            return Verdict(float(row["wanted"]))

    with serving(build_app(Echo())) as url:
        assert httpx.get(f"{url}/reverify_mode").json() == "stateless"
        body = {"responses_create_params": {"input": "x"}, "response": RESPONSE, "wanted": 0.25}
        assert httpx.post(f"{url}/verify", json=body).json()["reward"] == 0.25


def test_a_full_server_refuses_new_sessions_and_keeps_the_open_ones():
    with (
        serving_counter(sessions=SessionStore(capacity=1)) as url,
        httpx.Client(base_url=url) as first,
        httpx.Client(base_url=url) as second,
    ):
        first.post("/seed_session", json=counter_row("a"))
        refused = second.post("/seed_session", json=counter_row("b"))
        assert (refused.status_code, refused.headers["x-roundhouse-failure"]) == (503, "infra")
        assert first.post("/add", json={"n": 1}).json() == {"owner": "a", "total": 1}
        first.post("/verify", json=counter_row("a") | {"response": RESPONSE})
        assert second.post("/seed_session", json=counter_row("b")).status_code == 200


def test_a_tool_that_hangs_does_not_outlive_the_servers_time_limit():
    with serving_counter(request_seconds=0.1) as url, httpx.Client(base_url=url) as client:
        client.post("/seed_session", json=counter_row())
        reply = client.post("/hang", json={})
    assert (reply.status_code, reply.headers["x-roundhouse-failure"]) == (503, "infra")
    assert "did not return within 0.1 s" in reply.json()


def test_aggregate_metrics_are_statistics_over_all_and_over_each_task(client: httpx.Client):
    rows = [
        {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "metrics": {"words": 2}},
        {"_ng_task_index": 0, "_ng_rollout_index": 1, "reward": 0.0, "reward_components": {"form": 0.0}},
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 0.5, "response": {"usage": {"total_tokens": 7}}},
    ]
    found = client.post("/aggregate_metrics", json={"verify_responses": rows}).json()
    assert found["agent_metrics"]["mean/reward"] == 0.5
    assert found["agent_metrics"]["std/reward"] == 0.5
    assert found["agent_metrics"]["mean/words"] == 2
    assert found["agent_metrics"]["max/total_tokens"] == 7
    assert set(found["key_metrics"]) == {
        "mean/reward",
        "mean/words",
        "mean/reward_components/form",
        "mean/total_tokens",
    }
    first, second = found["group_level_metrics"]
    assert (first["_ng_task_index"], first["num_rollouts"], first["mean/reward"]) == (0, 2, 0.5)
    assert [info["rollout_id"] for info in first["rollout_infos"]] == ["0:0", "0:1"]
    assert second["median/reward"] == 0.5


def test_an_environments_own_metrics_are_among_the_aggregate():
    class Measured(Counter):
        def compute_metrics(self, tasks):
            return {"tasks": len(tasks)}

    rows = [{"_ng_task_index": index, "reward": 1.0} for index in (0, 0, 1)]
    with serving(build_app(Measured())) as url:
        told = httpx.post(f"{url}/aggregate_metrics", json={"verify_responses": rows}).json()
    assert told["agent_metrics"]["tasks"] == 2


def test_aggregating_nothing_gives_four_empties(client: httpx.Client):
    found = client.post("/aggregate_metrics", json={"verify_responses": []}).json()
    empties = {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}, "repeat_level_metrics": []}
    assert found == empties


def test_the_command_serves_an_environment():
    with serving_command("--environment", "calculator", "--parameters", '{"heldout_fraction": 0.5}') as url:
        told = httpx.post(f"{url}/seed_session", json={}).json()
    assert told == {"supports_explicit_close": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--environment", "calcluator"], "calcluator"),
        (["--environment", "sort", "--parameters", json.dumps({"digit": 5})], "digit"),
        (["--environment", "sort", "--parameters", "[5]"], "JSON object"),
        (["--environment", "no_such_module:Thing"], "no_such_module"),
    ],
)
def test_the_command_says_what_to_change(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    from roundhouse.plugins.nemo_gym.servers.resources import main

    with pytest.raises(SystemExit) as ended:
        main(options)
    assert str(ended.value).startswith("resources server: ")
    assert message in str(ended.value)


def test_the_counter_is_itself():
    assert set(Counter().tools()) == {"add", "total", "fail", "hang", "crash"}
