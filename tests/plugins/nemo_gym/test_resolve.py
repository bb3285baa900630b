"""A configuration from files, env.yaml and the command line to placed servers."""

import os
import socket
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from roundhouse.errors import ConfigError
from roundhouse.plugins.nemo_gym.config.resolve import Resolution, resolve
from roundhouse.plugins.nemo_gym.config.sources import SearchRoots

WEATHER = """
weather:
  resources_servers:
    weather: {entrypoint: app.py, domain: agent}
weather_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: weather}
      model_server: {type: responses_api_models, name: policy_model}
"""
MODEL = """
policy_model:
  responses_api_models:
    vllm_model: {entrypoint: app.py, base_url: "${policy_base_url}", api_key: "${policy_api_key}"}
"""
SETTINGS = ["++policy_base_url=http://127.0.0.1:8000/v1", "++policy_api_key=sesame"]


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write


@pytest.fixture
def resolved(tmp_path):
    def resolved(*paths: str, overrides=(), environ=None, **options) -> Resolution:
        roots = SearchRoots.of(cwd=tmp_path, environ=environ or {})
        return resolve(list(paths), list(overrides), roots, **options)

    return resolved


def only_problem(resolution: Resolution) -> str:
    assert len(resolution.problems) == 1, resolution.problems
    return resolution.problems[0]


def test_as_many_servers_as_ports_get_one_each(write, resolved):
    """A port that is given twice would leave one of an exact range over, in every try."""
    first = next(low for low in range(23_000, 60_000, 7) if all(_is_free(port) for port in range(low, low + 6)))
    write(
        "a.yaml", "".join(f"s{n}: {{resources_servers: {{x: {{entrypoint: a.py, domain: math}}}}}}\n" for n in range(6))
    )
    ports = [f"++port_range_low={first}", f"++port_range_high={first + 5}"]
    resolution = resolved("a.yaml", overrides=ports)
    assert {resolution.address(one)[1] for one in resolution.instances} == set(range(first, first + 6))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


# -- sources --------------------------------------------------------------------------------------------------------


def test_the_including_file_overrides_what_it_included_however_deep(write, resolved):
    write("leaf.yaml", "v: leaf\nleaf: 1\n")
    write("inner.yaml", "config_paths: [leaf.yaml]\nv: inner\ninner: 1\n")
    write("outer.yaml", "config_paths: [inner.yaml]\nv: outer\n")
    tree = resolved("outer.yaml").tree
    assert (tree["v"], tree["leaf"], tree["inner"]) == ("outer", 1, 1)
    assert tree["config_paths"] == ["outer.yaml", "inner.yaml", "leaf.yaml"]


def test_a_later_sibling_wins_with_all_that_it_pulled_in(write, resolved):
    write("first.yaml", "v: first\nw: first\n")
    write("included.yaml", "v: included\n")
    write("second.yaml", "config_paths: [included.yaml]\nx: 1\n")
    tree = resolved("first.yaml", "second.yaml").tree
    assert (tree["v"], tree["w"]) == ("included", "first")


def test_a_file_named_twice_is_merged_once_with_a_warning(write, resolved):
    write("shared.yaml", "v: shared\n")
    write("a.yaml", "config_paths: [shared.yaml]\nv: a\n")
    write("b.yaml", "config_paths: [shared.yaml]\nw: b\n")
    resolution = resolved("a.yaml", "b.yaml")
    assert resolution.tree["v"] == "a"
    assert "shared.yaml more than once" in "".join(resolution.warnings)


def test_files_that_include_each_other_end(write, resolved):
    write("a.yaml", "config_paths: [b.yaml]\nv: a\n")
    write("b.yaml", "config_paths: [a.yaml]\nv: b\n")
    assert resolved("a.yaml").tree["v"] == "a"


def test_env_yaml_overrides_files_and_the_command_line_overrides_it(write, resolved):
    write("a.yaml", "x: file\ny: file\nz: file\n")
    write("env.yaml", "y: env\nz: env\n")
    tree = resolved("a.yaml", overrides=["z=line"]).tree
    assert (tree["x"], tree["y"], tree["z"]) == ("file", "env", "line")


def test_env_yaml_may_name_the_files(write, resolved):
    write("a.yaml", "x: file\n")
    write("env.yaml", "config_paths: [a.yaml]\n")
    assert resolved().tree["x"] == "file"


def test_the_command_line_may_name_the_files(write, resolved):
    write("a.yaml", "x: file\n")
    assert resolved(overrides=["+config_paths=[a.yaml]"]).tree["x"] == "file"


def test_files_named_by_themselves_and_by_config_paths_are_all_merged_in_that_order(write, resolved):
    for name in "abc":
        write(f"{name}.yaml", f"{name}: there\nlast: {name}\n")
    resolution = resolved("a.yaml", overrides=["+config_paths=[b.yaml]", "++config_paths=[c.yaml]"])
    tree = resolution.tree
    assert [tree[name] for name in "abc"] == ["there"] * 3
    assert (tree["last"], tree["config_paths"]) == ("c", ["a.yaml", "b.yaml", "c.yaml"])


def test_files_of_env_yaml_that_the_command_line_displaces_are_told(write, resolved):
    write("a.yaml", "x: a\n")
    write("b.yaml", "y: b\n")
    write("env.yaml", "config_paths: [b.yaml]\n")
    resolution = resolved("a.yaml")
    assert "y" not in resolution.tree
    assert "b.yaml" in "".join(resolution.warnings)


OURS = """
policy_model:
  responses_api_models:
    roundhouse_model: {base_url: "http://127.0.0.1:8000/v1"}
"""


@pytest.mark.parametrize(
    ("key", "value"),
    [("sink", "mod:Sink"), ("dir", "/tmp/x"), ("rebuild_response", "false"), ("max_mask_fraction", "0.1")],
)
def test_a_capture_setting_that_our_model_server_does_not_follow_is_a_problem(write, resolved, key, value):
    write("a.yaml", f"{OURS}token_id_capture: {{enabled: true, {key}: {value}}}\n")
    assert f"token_id_capture.{key}" in only_problem(resolved("a.yaml"))
    write("b.yaml", WEATHER + MODEL + f"token_id_capture: {{enabled: true, {key}: {value}}}\n")
    theirs = resolved("b.yaml", overrides=SETTINGS)
    assert (theirs.problems, "not by roundhouse gym collect" in "".join(theirs.warnings)) == ([], True)


def test_all_keys_that_our_servers_do_not_follow_are_one_problem_with_remedies(write, resolved):
    keys = "global_aiohttp_intended_concurrency: 16384\ntelemetry: {enabled: true}\ndispatch_budget_s: 60\ntop: 1\n"
    write("a.yaml", OURS + keys)
    problem = only_problem(resolved("a.yaml"))
    assert "do not follow 3 key(s)" in problem
    for remedy in (
        "global_aiohttp_intended_concurrency (set",
        "telemetry (read",
        "dispatch_budget_s (end",
    ):
        assert remedy in problem
    write("b.yaml", WEATHER + MODEL + keys)
    theirs = resolved("b.yaml", overrides=SETTINGS)
    assert (theirs.problems, theirs.warnings) == ([], []), "NeMo Gym's own servers receive it"
    both = resolved("b.yaml", overrides=SETTINGS, ours=True)
    assert (both.problems, len(both.warnings)) == ([], 1)


def test_a_limit_of_connections_that_is_no_number_is_a_problem(write, resolved):
    write("a.yaml", f"{OURS}global_aiohttp_connector_limit: many\nglobal_aiohttp_connector_limit_per_host: 4\n")
    assert "global_aiohttp_connector_limit is 'many'; give a whole number" in only_problem(resolved("a.yaml"))


def test_an_unknown_capture_setting_is_a_problem(write, resolved):
    write("a.yaml", f"{OURS}token_id_capture: {{enable: true}}\n")
    assert "token_id_capture.enable is unknown" in only_problem(resolved("a.yaml"))


def test_more_workers_than_one_are_a_problem_of_a_server_of_ours(write, resolved):
    write("b.yaml", WEATHER)
    write("m.yaml", MODEL)
    more = "++policy_model.responses_api_models.vllm_model.num_workers=4"
    assert resolved("b.yaml", "m.yaml", overrides=[*SETTINGS, more]).problems == [], "NeMo Gym's server has workers"
    told = only_problem(resolved("b.yaml", "m.yaml", overrides=[*SETTINGS, more], ours=True))
    assert "num_workers is 4" in told


def test_extra_roots_come_before_the_working_directory_and_the_install_root_last(write, tmp_path, resolved):
    for root in ("extra", "install"):
        write(f"{root}/a.yaml", f"where: {root}\n")
    write("install/b.yaml", "other: install\n")
    write("a.yaml", "where: cwd\n")
    environ = {"NEMO_GYM_EXTRA_ROOTS": f"{tmp_path}/extra{os.pathsep}{tmp_path}/nowhere"}
    assert resolved("a.yaml", environ=environ).tree["where"] == "extra"
    roots = SearchRoots.of(cwd=tmp_path, install=tmp_path / "install", environ={})
    tree = resolve(["a.yaml", "b.yaml"], [], roots).tree
    assert (tree["where"], tree["other"]) == ("cwd", "install")
    searched = SearchRoots.of([tmp_path / "install"], cwd=tmp_path, environ=environ)
    assert resolve(["a.yaml"], [], searched).tree["where"] == "install"


def test_a_missing_file_names_every_place_that_was_searched(tmp_path, resolved):
    problem = only_problem(resolved("nowhere.yaml"))
    assert "nowhere.yaml" in problem
    assert str(tmp_path) in problem


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2\n", "config_paths: a.yaml\n", "a: ${b\n"])
def test_a_file_that_is_no_configuration_is_told_with_its_name(write, resolved, text):
    assert "bad.yaml" in only_problem(resolved(write("bad.yaml", text)))


# -- overrides ------------------------------------------------------------------------------------------------------


def test_overrides_set_change_and_remove(write, resolved):
    write("a.yaml", "x: {y: 1, z: 2}\nw: 1\n")
    tree = resolved("a.yaml", overrides=["x.y=5", "+n.m=[a]", "++w=7", "~x.z"]).tree
    assert (tree["x"], tree["n"], tree["w"]) == ({"y": 5}, {"m": ["a"]}, 7)


@pytest.mark.parametrize(
    ("override", "told"),
    [("x.q=1", "has no 'q'"), ("~x.q", "has no 'q'"), ("~x.y=2", "x.y is 1"), ("x", "is not one of")],
)
def test_an_override_that_hits_nothing_is_refused(write, resolved, override, told):
    write("a.yaml", "x: {y: 1}\n")
    assert told in only_problem(resolved("a.yaml", overrides=[override]))


def test_an_override_may_change_what_a_directive_brings(write, resolved):
    write("a.yaml", "base: {y: 1}\nx: {_inherit_from: base}\n")
    assert resolved("a.yaml", overrides=["x.y=2"]).tree["x"] == {"y": 2}


# -- servers --------------------------------------------------------------------------------------------------------


def test_servers_get_hosts_and_different_free_ports(write, resolved):
    resolution = resolved(write("w.yaml", WEATHER), write("m.yaml", MODEL), overrides=SETTINGS)
    assert resolution.problems == []
    assert [(one.name, one.type, one.kind) for one in resolution.instances] == [
        ("weather", "resources_servers", "foreign"),
        ("weather_agent", "responses_api_agents", "foreign"),
        ("policy_model", "responses_api_models", "foreign"),
    ]
    addresses = [resolution.address(one) for one in resolution.instances]
    assert {host for host, _ in addresses} == {"127.0.0.1"}
    ports = {port for _, port in addresses}
    assert len(ports) == 3
    assert all(10_001 <= port <= 20_000 for port in ports)
    assert resolution.head_address() == ("127.0.0.1", 11_000)
    assert ports | {11_000} == set(resolution.tree["disallowed_ports"])


def test_an_explicit_port_wins_and_no_other_server_gets_it(write, resolved):
    write("w.yaml", WEATHER)
    write("m.yaml", MODEL)
    place = "policy_model.responses_api_models.vllm_model"
    for _ in range(20):
        resolution = resolved(
            "w.yaml",
            "m.yaml",
            overrides=[*SETTINGS, f"+{place}.port=15001", "+port_range_low=15001", "+port_range_high=15040"],
        )
        by_name = {one.name: resolution.address(one)[1] for one in resolution.instances}
        assert by_name["policy_model"] == 15001
        assert len(set(by_name.values())) == 3


def test_a_port_in_use_and_a_disallowed_one_are_not_given_out(write, resolved):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        low = min(port, 65_000)
        text = "m: {responses_api_models: {any: {entrypoint: app.py}}}\n"
        settings = [f"+port_range_low={low}", f"+port_range_high={low + 40}", f"+disallowed_ports=[{low + 1}]"]
        for _ in range(20):
            resolution = resolved(write("a.yaml", text), overrides=settings)
            assert resolution.address(resolution.instances[0])[1] not in (port, low + 1)
        full = resolved("a.yaml", overrides=[f"+port_range_low={port}", f"+port_range_high={port}"])
        assert "is free" in only_problem(full)


@pytest.mark.parametrize(
    "setting", ["head_server.port=many", "port_range_low=x", "port_range_high=70000", "disallowed_ports=[a]"]
)
def test_a_port_that_is_none_is_told_by_its_key(write, resolved, setting):
    write("a.yaml", "m: {responses_api_models: {any: {entrypoint: app.py}}}\n")
    assert only_problem(resolved("a.yaml", overrides=[f"++{setting}"])).startswith(setting.split("=")[0])


def test_the_heads_port_may_be_an_interpolation(write, resolved):
    write("a.yaml", "p: 12345\nhead_server: {port: '${p}'}\n")
    assert resolved("a.yaml").head_address() == ("127.0.0.1", 12345)


def test_two_servers_at_one_address_are_refused(write, resolved):
    text = "a: {responses_api_models: {x: {entrypoint: a.py, port: 15050}}}\n" + (
        "b: {responses_api_models: {x: {entrypoint: a.py, port: 15050}}}\n"
    )
    assert "a and b both" in only_problem(resolved(write("a.yaml", text)))


def test_default_host_and_absolute_ip_place_servers_and_head(write, resolved):
    write("a.yaml", "m: {responses_api_models: {any: {entrypoint: app.py}}}\n")
    named = resolved("a.yaml", overrides=["+default_host=0.0.0.0"])
    assert (named.address(named.instances[0])[0], named.head_address()[0]) == ("0.0.0.0", "0.0.0.0")
    absolute = resolved("a.yaml", overrides=["+use_absolute_ip=true"])
    assert absolute.address(absolute.instances[0])[0] == socket.gethostbyname(socket.gethostname())


def test_a_reference_to_nothing_names_the_nearest(write, resolved):
    overrides = ["++weather_agent.responses_api_agents.simple_agent.resources_server.name=wether", *SETTINGS]
    problem = only_problem(resolved(write("w.yaml", WEATHER), write("m.yaml", MODEL), overrides=overrides))
    assert "weather_agent.responses_api_agents.simple_agent.resources_server" in problem
    assert "Did you mean weather?" in problem


def test_all_problems_are_told_at_once(write, resolved):
    write("w.yaml", WEATHER)
    write("a.yaml", "a: {responses_api_models: {x: {entrypoint: a.py, port: many}}}\nb: ???\nc: {d: ['???']}\n")
    resolution = resolved("w.yaml", "a.yaml")
    told = "\n".join(resolution.problems)
    assert "b, c.d[0]" in told
    assert "responses_api_models.x.port" in told
    assert "policy_model, which is not configured" in told
    with pytest.raises(ConfigError, match="3 problem"):
        resolution.raise_problems()


def test_an_unset_value_that_is_deleted_or_overwritten_is_no_problem(write, resolved):
    write("a.yaml", "base: {x: '???', y: 1}\nb: {_inherit_from: base, _delete_key: x}\nc: {_copy: b}\nd: '???'\n")
    assert resolved("a.yaml", overrides=["d=1"]).problems == []


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("resources_servers: {x: {entrypoint: a.py}}", "domain is required"),
        ("resources_servers: {x: {entrypoint: a.py, domain: cooking}}", "domain"),
        ("responses_api_models: {x: {entrypoint: a.py}, y: {entrypoint: b.py}}", "one implementation"),
        ("responses_api_models: {x: {entrypoint: a.py}}, resources_servers: {y: {}}", "one server has one type"),
        ("responses_api_models: {x: {entrypoint: /abs/a.py}}", "relative"),
        ("responses_api_models: {x: {url: 'tcp://a'}}", "url"),
        (
            "responses_api_agents: {x: {entrypoint: a.py, datasets: [{name: d, type: train, jsonl_fpath: d.jsonl}]}}",
            "license",
        ),
        (
            "responses_api_agents: {x: {entrypoint: a.py, datasets: [{name: d, type: benchmark, jsonl_fpath: d}]}}",
            "prepare_script",
        ),
        (
            "responses_api_agents: {x: {entrypoint: a.py, datasets: "
            "[{name: d, type: example, jsonl_fpath: d, num_repeats: 0}]}}",
            "num_repeats",
        ),
    ],
)
def test_an_almost_server_is_refused_with_the_reason(write, resolved, block, reason):
    problem = only_problem(resolved(write("a.yaml", f"almost: {{{block}}}\n")))
    assert problem.startswith("almost looks like a server")
    assert reason in problem


def test_almost_servers_can_be_let_pass_with_a_warning(write, resolved):
    text = "error_on_almost_servers: false\nalmost: {resources_servers: {x: {entrypoint: a.py}}}\n"
    resolution = resolved(write("a.yaml", text))
    assert resolution.problems == []
    assert resolution.instances == []
    assert "almost looks like" in "".join(resolution.warnings)


def test_reserved_keys_and_plain_values_are_no_servers(write, resolved):
    text = (
        "model_call_capture_dir: {responses_api_models: {x: {entrypoint: a.py}}}\nnotes: {resources_servers: later}\n"
    )
    resolution = resolved(write("a.yaml", text))
    assert (resolution.instances, resolution.problems) == ([], [])


def test_a_dummy_model_gives_its_fields_to_the_real_one(write, resolved):
    text = "p: {responses_api_models: {dummy_model: {entrypoint: app.py, model: m, n: 1}, vllm_model: {n: 2}}}\n"
    resolution = resolved(write("a.yaml", text))
    assert resolution.instances[0].implementation == "vllm_model"
    fields = resolution.fields(resolution.instances[0])
    assert (fields["entrypoint"], fields["model"], fields["n"]) == ("app.py", "m", 2)


def test_an_external_server_is_placed_by_its_url_and_may_be_referred_to(write, resolved):
    text = WEATHER + "policy_model: {responses_api_models: {any: {url: 'http://10.0.0.7:9000/'}}}\n"
    resolution = resolved(write("a.yaml", text))
    assert resolution.problems == []
    model = resolution.instances[-1]
    assert (model.kind, resolution.address(model)) == ("external", ("10.0.0.7", 9000))
    assert resolution.base_url(model) == "http://10.0.0.7:9000"


def test_our_own_servers_need_neither_entrypoint_nor_domain(write, resolved):
    resolution = resolved(
        write("a.yaml", "calc: {resources_servers: {roundhouse_environment: {environment: {kind: calculator}}}}\n")
    )
    assert resolution.problems == []
    assert resolution.instances[0].kind == "own"


def test_top_level_skip_verification_reaches_agents_that_do_not_say_otherwise(write, resolved):
    place = "weather_agent.responses_api_agents.simple_agent"
    files = (write("w.yaml", WEATHER), write("m.yaml", MODEL))
    top = ["+skip_verification=true", "+skip_verification_reward=0.5"]
    resolution = resolved(*files, overrides=[*SETTINGS, *top, f"+{place}.skip_verification=false"])
    fields = resolution.fields(resolution.instances[1])
    assert (fields["skip_verification"], fields["skip_verification_reward"]) == (False, 0.5)


# -- what leaves ----------------------------------------------------------------------------------------------------


def test_interpolations_stay_in_the_yaml_for_children_and_are_filled_for_us(write, resolved):
    resolution = resolved(write("w.yaml", WEATHER), write("m.yaml", MODEL), overrides=SETTINGS)
    written = yaml.safe_load(resolution.yaml())["policy_model"]["responses_api_models"]["vllm_model"]
    assert written["base_url"] == "${policy_base_url}"
    assert resolution.fields(resolution.instances[-1])["base_url"] == "http://127.0.0.1:8000/v1"
    child = OmegaConf.create(resolution.yaml())
    assert child.policy_model.responses_api_models.vllm_model.api_key == "sesame"


def test_an_interpolation_that_a_server_could_not_fill_is_a_problem(write, resolved, monkeypatch):
    problem = resolved(write("w.yaml", WEATHER), write("m.yaml", MODEL), overrides=SETTINGS[1:]).problems
    assert problem == [
        "policy_model.responses_api_models.vllm_model.base_url: refers to 'policy_base_url', which is not set. "
        "Set it on the command line (++policy_base_url=…) or in env.yaml"
    ]
    monkeypatch.setenv("GYM_TEST_URL", "http://from.environment")
    resolution = resolved("w.yaml", "m.yaml", overrides=["++policy_base_url='${oc.env:GYM_TEST_URL}'", SETTINGS[1]])
    assert resolution.problems == []
    assert resolution.fields(resolution.instances[-1])["base_url"] == "http://from.environment"


def test_secrets_are_masked_for_people_and_clear_for_children(write, resolved):
    resolution = resolved(write("w.yaml", WEATHER), write("m.yaml", MODEL), overrides=SETTINGS)
    assert "sesame" in resolution.yaml()
    assert "sesame" not in resolution.masked_yaml()
    assert yaml.safe_load(resolution.masked_yaml()).keys() == yaml.safe_load(resolution.yaml()).keys()


def test_directories_are_absolute_since_servers_have_working_directories_of_their_own(write, resolved):
    tree = resolved(write("a.yaml", "results_dir: out\n")).tree
    assert Path(tree["results_dir"]).is_absolute()
    assert Path(tree["cache_dir"]).is_absolute()
