"""Settings: their files, their precedence, and the errors about wrong ones."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from crow_agent.settings.config import find_ignored_settings, load_config, load_environment, load_project_config
from crow_agent.settings.discovery import search_models
from crow_agent.settings.home import Home
from crow_agent.settings.mcp_servers import to_mcp_server, to_server
from crow_agent.settings.structs import (
    Config,
    ModelSettings,
    OAuthSettings,
    ProjectConfig,
    ProjectPermissions,
    ServerSettings,
)
from crow_core.acp.schema import EnvVariable, HttpHeader, McpServer
from crow_core.errors import ConfigError
from crow_core.mcp.server import Server
from crow_core.models.chat_model import ChatModel
from crow_extensions.agent_settings import AgentSettings
from msgspec import UNSET

ROOT = Path("/").absolute().as_posix()
"""`/`, on Windows with the drive."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "crow", tmp_path / "crow")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def read_fault(home: Home, toml: str, **env: str) -> str:
    """Return the error about a `config.toml`, without the file's path at its beginning."""
    file = write(home.config / "config.toml", toml)
    with pytest.raises(ConfigError) as caught:
        load_config(home, env)
    assert str(caught.value).startswith(str(file))
    return str(caught.value).removeprefix(str(file))


@pytest.mark.parametrize(
    ("env", "config", "data"),
    [
        ({"HOME": "/home/ann"}, "/home/ann/.config/crow", "/home/ann/.local/share/crow"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": f"{ROOT}c", "XDG_DATA_HOME": f"{ROOT}d"}, f"{ROOT}c/crow", f"{ROOT}d/crow"),
        ({"HOME": f"{ROOT}h", "XDG_CONFIG_HOME": "~/c", "XDG_DATA_HOME": "~/d"}, f"{ROOT}h/c/crow", f"{ROOT}h/d/crow"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": "c", "XDG_DATA_HOME": ""}, "/h/.config/crow", "/h/.local/share/crow"),
        ({"HOME": "/h", "CROW_HOME": f"{ROOT}x", "XDG_CONFIG_HOME": f"{ROOT}c"}, f"{ROOT}x", f"{ROOT}x"),
        ({"HOME": "/h", "CROW_HOME": "~/x"}, f"{ROOT}h/x", f"{ROOT}h/x"),
        ({"HOME": "/h", "CROW_HOME": "~"}, f"{ROOT}h", f"{ROOT}h"),
        ({"HOME": "/h", "CROW_HOME": f"{ROOT}~x"}, f"{ROOT}~x", f"{ROOT}~x"),
        ({"HOME": "/h", "CROW_HOME": ""}, "/h/.config/crow", "/h/.local/share/crow"),
    ],
)
def test_home_is_crow_home_or_the_xdg_folders(env: dict[str, str], config: str, data: str) -> None:
    assert Home.find(env) == Home(Path(config), Path(data))


def test_relative_crow_home_is_below_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Home.find({"CROW_HOME": "x"}).config == tmp_path / "x"


def test_finding_home_creates_no_folder(tmp_path: Path) -> None:
    Home.find({"HOME": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_without_files_all_settings_have_defaults_and_no_file_is_created(home: Home) -> None:
    assert load_config(home, {}) == Config()
    assert not home.config.exists()


def test_settings_are_read_from_toml(home: Home) -> None:
    write(
        home.config / "config.toml",
        """
model = "local"
[models.local]
base_url = "http://localhost:8080/v1"
model = "qwen3:8b"
parameters = { temperature = 0.2 }
[permissions]
allow = ["terminal:git status"]
[mcp.servers.files]
command = "files"
timeoutt = 5  # of another program
""",
    )
    config = load_config(home, {})
    settings = ModelSettings(base_url="http://localhost:8080/v1", model="qwen3:8b", parameters={"temperature": 0.2})
    assert config.models == {"local": settings}
    assert config.permissions.allow == ["terminal:git status"]
    assert config.mcp.servers == {"files": ServerSettings(command="files")}


def test_file_may_begin_with_a_byte_order_mark(home: Home) -> None:
    write(home.config / "config.toml", "\ufeffmax_requests = 7\n")
    assert load_config(home, {}).max_requests == 7


def test_variables_are_expanded_in_all_texts(home: Home) -> None:
    write(
        home.config / "config.toml",
        '[models.a]\nbase_url = "http://${HOST}:${PORT}/v1"\nmodel = "m"\n'
        'headers = { X = "${KEY}" }\nparameters = { stop = ["${KEY}"], top_k = 3 }\n',
    )
    model = load_config(home, {"HOST": "h", "PORT": "1", "KEY": "k"}).models["a"]
    assert (model.base_url, model.headers, model.parameters) == (
        "http://h:1/v1",
        {"X": "k"},
        {"stop": ["k"], "top_k": 3},
    )


def test_variables_come_from_the_env_file_in_crows_home_and_the_environment_wins(home: Home) -> None:
    write(home.config / ".env", "A=file\nB='the file $A'\n# C=no\n")
    write(home.config / "config.toml", '[models.x]\nbase_url = "${A}"\nmodel = "${B}"\n')
    model = load_config(home, {"A": "environment"}).models["x"]
    assert (model.base_url, model.model) == ("environment", "the file $A")


def test_env_file_of_the_working_directory_is_not_read(
    home: Home, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project / ".env", "A=stolen\n")
    monkeypatch.chdir(project)
    assert "uses ${A}, which is not set" in read_fault(home, 'model = "${A}"\n')


def test_malformed_env_file_is_an_error_that_names_it(home: Home) -> None:
    write(home.config / "config.toml", "")
    (home.config / ".env").write_bytes(b"A=1\nB\n= 3\n")
    with pytest.raises(ConfigError, match=r"\.env, line 3, is not NAME=value"):
        load_config(home, {})
    (home.config / ".env").write_bytes(b"A=\xff\n")
    with pytest.raises(ConfigError, match=r"\.env cannot be read"):
        load_config(home, {})


@pytest.mark.parametrize("env", [{}, {"KEY": ""}], ids=["missing", "empty"])
def test_variable_that_is_not_set_is_an_error_with_file_line_and_name(home: Home, env: dict[str, str]) -> None:
    toml = '# url = "${KEY}"\n[database]\n\n\nurl = "${KEY}"\n'
    assert read_fault(home, toml, **env) == ", line 5, uses ${KEY}, which is not set. Set KEY or change the line."


UNKNOWN = "no such setting. Remove it, or correct its name."


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('modell = "x"\n', f", line 1, modell: {UNKNOWN}"),
        ('# modell\n\nmodel = ""\nmodell = "x"\n', f", line 4, modell: {UNKNOWN}"),
        ('[models.a]\nbase_url = "x"\nmodel = "m"\nwindov = 3\n', f", line 4, models.a.windov: {UNKNOWN}"),
        ("[permission]\n", f", line 1, permission: {UNKNOWN}"),
        ('[permissions]\nmode = "ask"\nalow = []\n', f", line 3, permissions.alow: {UNKNOWN}"),
        ('[mcp]\nservers = {}\n[mcp.server.x]\ncommand = "x"\n', f", line 3, mcp.server: {UNKNOWN}"),
    ],
)
def test_unknown_key_is_an_error_with_file_line_and_key(home: Home, toml: str, said: str) -> None:
    assert read_fault(home, toml) == said


MODEL = 'base_url = "http://x/v1"\nmodel = "m"\n'


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('max_requests = "many"\n', ", line 1, max_requests: expected `int`, got `str`."),
        ("max_requests = 0\n", ", line 1, max_requests: expected `int` >= 1."),
        (f"[models.a]\n{MODEL}window = -5\n", ", line 4, models.a.window: expected `int` >= 1."),
        ("[models]\nlocal = 3\n", ", line 2, models.local: expected `object`, got `int`."),
        ('[permissions]\nmode = "yes"\n', ", line 2, permissions.mode: invalid enum value 'yes'."),
        ('[permissions]\nallow = ["a",\n  3]\n', ", line 2, permissions.allow: expected `str`, got `int`."),
        (
            '[permissions]\ndeny = ["terminal(rm *)"]\n',
            ", line 1, permissions: 'terminal(rm *)' is no rule: write TOOL or TOOL:PATTERN, such as 'terminal:rm *'.",
        ),
        (
            f'[models.a]\n{MODEL}window = 8\n# window = "x"\n[models."b:c"]\n{MODEL}window = "big"\n',
            ", line 9, models.b:c.window: expected `int | null`, got `str`.",
        ),
        (
            f"[models.a]\n{MODEL}prices = {{ input = '1', output = 2 }}\n",
            ", line 4, models.a.prices.input: expected `float`, got `str`.",
        ),
        ('[models.a]\nmodel = "m"\n', ", line 1, models.a: object missing required field `base_url`."),
        (
            '[mcp.servers.x]\nenv = { A = "1" }\n[mcp.servers.y.env]\nA = "2"\nB = 3\n',
            ", line 5, mcp.servers.y.env.B: expected `str`, got `int`.",
        ),
        ("mcp.servers.x.args = 3\n", ", line 1, mcp.servers.x.args: expected `array`, got `int`."),
    ],
)
def test_value_of_a_wrong_type_is_an_error_with_file_line_and_key(home: Home, toml: str, said: str) -> None:
    assert read_fault(home, toml) == said


def test_former_name_of_a_setting_is_an_error_that_says_the_new_one(home: Home) -> None:
    said = read_fault(home, 'model = ""\nmax_turns = 7\n')
    assert said == ", line 2, max_turns: this setting is called max_requests now. Rename it."


def test_broken_toml_is_an_error_with_file_and_line(home: Home) -> None:
    said = read_fault(home, 'model = "a"\n[models.a\n')
    assert said.startswith(" is not valid TOML: ")
    assert "line 2" in said


def test_file_that_is_not_utf_8_is_an_error_that_names_it(home: Home) -> None:
    home.config.mkdir()
    (home.config / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        load_config(home, {})


def test_folder_instead_of_a_file_is_an_error_that_names_it(home: Home) -> None:
    (home.config / "config.toml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        load_config(home, {})


def test_unknown_default_model_is_an_error_that_lists_the_configured_ones(home: Home) -> None:
    said = read_fault(home, f'model = "c"\n[models.a]\n{MODEL}[models.b]\n{MODEL}')
    assert said == ": model = 'c' names no [models.c]. Configured are: a, b."


def test_variable_sets_the_level_of_the_sandbox(home: Home) -> None:
    write(home.config / "config.toml", '[sandbox]\nlevel = "review"\n')
    assert load_config(home, {"CROW_SANDBOX": "off"}).sandbox.level == "off"
    with pytest.raises(ConfigError, match=r"CROW_SANDBOX is 'bare'\. Set it to review or off, or remove it\."):
        load_config(home, {"CROW_SANDBOX": "bare"})


def test_servers_of_mcp_json_are_joined_and_config_toml_wins(home: Home) -> None:
    write(home.config / "config.toml", '[mcp.servers.both]\ncommand = "toml"\n')
    write(
        home.config / "mcp.json",
        '{"mcpServers": {"both": {"command": "json"}, "web": {"type": "http", "url": "http://x", "headers": '
        '{"Authorization": "Bearer ${KEY}"}, "alwaysAllow": []}}, "inputs": []}',
    )
    assert load_config(home, {"KEY": "k"}).mcp.servers == {
        "both": ServerSettings(command="toml"),
        "web": ServerSettings(type="http", url="http://x", headers={"Authorization": "Bearer k"}),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"mcpServers": {\n "a": {"command": "x"},\n}}', " is not valid JSON: "),
        ('{\n "mcpServers": {\n  "a": {"command": "a"},\n  "b": {\n   "args": "x"}}}', ", line 5, mcpServers.b.args: "),
        ("[]", ": expected `object`, got `array`."),
        ("", " is not valid JSON: "),
    ],
)
def test_wrong_mcp_json_is_an_error_with_file_line_and_key(home: Home, text: str, said: str) -> None:
    file = write(home.config / "mcp.json", text)
    with pytest.raises(ConfigError) as caught:
        load_config(home, {})
    assert str(caught.value).startswith(f"{file}{said}")


def test_broken_json_names_the_line(home: Home) -> None:
    write(home.config / "mcp.json", '{"mcpServers": {\n "a": x\n}}')
    with pytest.raises(ConfigError, match="line 2"):
        load_config(home, {})


def test_configured_servers_are_converted_to_acp_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERPROFILE" if sys.platform == "win32" else "HOME", "/home/ann")
    local = ServerSettings(command="~/bin/x", args=["~", "-v"], env={"A": "1"})
    assert to_mcp_server("x", local) == McpServer(
        name="x", command="/home/ann/bin/x", args=["~", "-v"], env=[EnvVariable(name="A", value="1")], type=UNSET
    )
    assert to_mcp_server("x", ServerSettings(command="./x")).command == "./x"
    web = ServerSettings(url="http://x", headers={"A": "1"})
    assert to_mcp_server("x", web) == McpServer(
        name="x", type="http", url="http://x", headers=[HttpHeader(name="A", value="1")]
    )
    assert to_mcp_server("x", ServerSettings(url="http://x", type="sse")).type == "sse"


async def start(name: str, settings: ServerSettings, cwd: Path) -> Server:
    """Start a configured server and close it again."""
    server = to_server(name, settings, str(cwd), tokens=cwd, visit=nowhere)
    await server.list()
    await server.close()
    return server


@asynccontextmanager
async def nowhere(url: str) -> AsyncGenerator[None]:
    raise ConnectionError("there is nobody here")
    yield


@pytest.mark.anyio
async def test_server_without_command_and_url_reports_it_at_its_start(tmp_path: Path) -> None:
    server = await start("x", ServerSettings(), tmp_path)
    assert server.error == "MCP server 'x' did not start: It has neither command nor url. Give it one of them."


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["config.toml", "mcp.json"])
async def test_unset_variable_makes_only_its_server_unusable(home: Home, tmp_path: Path, name: str) -> None:
    texts = {
        "config.toml": '[mcp.servers.a]\nurl = "http://h/${NO}"\n[mcp.servers.b]\ncommand = "${YES}"\n',
        "mcp.json": '{"mcpServers": {\n"a": {"headers": {"A": "${env:NO}"}}, "b": {"command": "${YES}"}}}',
    }
    file = write(home.config / name, texts[name])
    servers = load_config(home, {"YES": "yes"}).mcp.servers
    assert servers["b"] == ServerSettings(command="yes")
    lacking = await start("a", servers["a"], tmp_path)
    sentence = f"{file}, line 2, uses ${{NO}}, which is not set. Set NO or change the line."
    assert lacking.error == f"MCP server 'a' did not start: {sentence}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.toml", '[mcp.servers.a]\ncommand = "true"\nerror = "surprise"\n'),
        ("mcp.json", '{"mcpServers": {"a": {"command": "true", "error": "surprise"}}}'),
    ],
)
def test_server_in_a_file_has_no_setting_called_error(home: Home, name: str, text: str) -> None:
    write(home.config / name, text)
    server = load_config(home, {}).mcp.servers["a"]
    assert server == ServerSettings(command="true")
    assert to_mcp_server("a", server).command == "true"


def test_variable_may_have_a_default(home: Home) -> None:
    write(home.config / "config.toml", 'model = "${NO:-}"\n[mcp.servers.a]\nargs = ["${NO:-a b}", "${A:-no}"]\n')
    config = load_config(home, {"A": "${B}"})
    assert config.model == ""
    assert config.mcp.servers["a"].args == ["a b", "${B}"]  # a variable's value is not expanded again


def test_servers_in_the_formats_of_other_programs_are_read(home: Home) -> None:
    write(
        home.config / "mcp.json",
        """{"inputs": [], "servers": {
            "vscode": {"type": "stdio", "command": "x", "cwd": "~/y"},
            "cursor": {"url": "http://x", "headers": {"A": "1"}},
            "claude": {"type": "http", "url": "http://x", "timeout": 60000, "oauth": {"clientId": "c"}},
            "gemini": {"httpUrl": "http://x", "includeTools": ["a_*"], "excludeTools": ["b"], "trust": true},
            "windsurf": {"serverUrl": "http://x", "disabled": true},
            "cline": {"type": "streamableHttp", "url": "http://x", "timeout": 60, "alwaysAllow": ["x"]},
            "codex": {"command": "x", "enabled": false, "enabled_tools": ["a"], "startup_timeout_sec": 5},
            "fastmcp": {"url": "http://x", "transport": "sse", "auth": "oauth"}
        }}""",
    )
    assert load_config(home, {}).mcp.servers == {
        "vscode": ServerSettings(type="stdio", command="x", cwd="~/y"),
        "cursor": ServerSettings(url="http://x", headers={"A": "1"}),
        "claude": ServerSettings(type="http", url="http://x", timeout=60, oauth=OAuthSettings(client_id="c")),
        "gemini": ServerSettings(url="http://x", allow=["a_*"], deny=["b"], trust=True),
        "windsurf": ServerSettings(url="http://x", disabled=True),
        "cline": ServerSettings(type="streamableHttp", url="http://x", timeout=60),
        "codex": ServerSettings(command="x", disabled=True, allow=["a"], start_timeout=5),
        "fastmcp": ServerSettings(url="http://x", type="sse", auth="oauth"),
    }


def test_settings_of_a_server_reach_it(tmp_path: Path) -> None:
    settings = ServerSettings(
        command="x", allow=["a*"], deny=["ab"], trust=True, timeout=7, start_timeout=8, env={"KEY": "secret-7f3a02c2"}
    )
    server = to_server("x", settings, str(tmp_path), tokens=tmp_path, visit=nowhere)
    assert (server.allow, server.deny, server.trust) == (["a*"], ["ab"], True)
    assert (server.timeout, server.start_timeout) == (7, 8)
    assert server.secrets == {"secret-7f3a02c2"}


def test_project_cannot_trust_a_server(project: Path) -> None:
    write(project / ".crow" / "config.toml", '[mcp.servers.a]\ncommand = "a"\ntrust = true\n')
    write(project / ".mcp.json", '{"mcpServers": {"b": {"command": "b", "trust": true}}}')
    assert [server.trust for server in load_project_config(project, {}).mcp.servers.values()] == [False, False]


def test_project_may_only_add_servers_agents_and_diagnostics_and_tighten_permissions(project: Path) -> None:
    write(
        project / ".crow" / "config.toml",
        'model = "evil"\nmax_requests = 9999\n[models.evil]\nbase_url = "http://evil"\nmodel = "m"\n'
        '[prompts]\nsystem = "x"\n'
        '[permissions]\nmode = "yolo"\nallow = ["*"]\nask = ["terminal"]\ndeny = ["fetch"]\n'
        '[mcp.servers.a]\ncommand = "a"\n[agents.b]\ncommand = "b"\n',
    )
    write(project / ".mcp.json", '{"mcpServers": {"a": {"command": "no"}, "b": {"command": "${WHO}"}}}')
    config = load_project_config(project, {"WHO": "me"})

    assert config.permissions == ProjectPermissions(ask=["terminal"], deny=["fetch"])
    assert config.mcp.servers == {"a": ServerSettings(command="a"), "b": ServerSettings(command="me")}
    assert ProjectConfig.__struct_fields__ == ("permissions", "mcp", "agents", "diagnostics", "worktree")
    assert config.agents == {"b": AgentSettings(command="b")}
    assert ProjectPermissions.__struct_fields__ == ("ask", "deny")


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        (
            '[permissions]\nmode = "yolo"\nallow = ["*"]\nask = ["terminal"]\n',
            ["allow of [permissions]", "mode of [permissions]"],
        ),
        ('[permissions]\ndeny = ["terminal"]\n', []),
        ("permissions = 5\nmcp = 5\n[agents.a]\ncommand = 'a'\n", []),
        ("[mcp]\nservers = 5\n", []),
        (
            'model = "m"\n[models.m]\nx = 1\n[[hooks.end]]\nrun = "x"\n[taint]\n',
            ["[hooks]", "[models]", "[taint]", "model"],
        ),
        ('[mcp.servers.a]\ncommand = "a"\ntrust = true\n', ["trust of [mcp.servers.a]"]),
        ("[permissions\n", []),
    ],
)
def test_settings_that_a_project_cannot_set_are_found(project: Path, text: str, ignored: list[str]) -> None:
    write(project / ".crow" / "config.toml", text)
    assert find_ignored_settings(project) == ignored


def test_allow_rule_that_can_never_match_is_an_error_with_file_and_key(home: Home) -> None:
    file = write(home.config / "config.toml", '[permissions]\nallow = ["terminal:git push | cat"]\n')
    with pytest.raises(ConfigError, match="compared one by one") as caught:
        load_config(home, {})
    assert str(file) in str(caught.value)


def test_wrong_project_file_is_an_error_with_file_line_and_key(project: Path) -> None:
    file = write(project / ".crow" / "config.toml", '[permissions]\ndeny = "fetch"\n')
    with pytest.raises(ConfigError) as caught:
        load_project_config(project, {})
    assert str(caught.value) == f"{file}, line 2, permissions.deny: expected `array`, got `str`."


def test_environment_overrides_the_env_file_of_crows_home(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("CROW_MODEL=from-file\nOPENAI_BASE_URL=http://localhost:1/v1\n")
    found = load_environment(Home(tmp_path, tmp_path), {"CROW_MODEL": "from-environment"})
    assert found == {"CROW_MODEL": "from-environment", "OPENAI_BASE_URL": "http://localhost:1/v1"}


@pytest.mark.anyio
async def test_variable_that_is_not_set_breaks_only_the_model_that_uses_it(home: Home):
    toml = '[models.a]\nbase_url = "http://a/v1"\nmodel = "m"\napi_key = "${KEY}"\n'
    toml += '[models.b]\nbase_url = "http://b/v1"\nmodel = "m"\n'
    write(home.config / "config.toml", f'model = "b"\n{toml}')
    config = load_config(home, {})
    assert [*config.models] == ["a", "b"]
    assert [*(await search_models(config, {})).models] == ["b"]
    sentence = r"config.toml, line 5, uses \$\{KEY\}, which is not set"
    with pytest.raises(ConfigError, match=sentence):
        await search_models(config, {}, "a")
    with pytest.raises(ConfigError, match=sentence):
        await search_models(config, {"CROW_MODEL": "a"})
    assert [*(await search_models(load_config(home, {"KEY": "k"}), {}, "a")).models] == ["a", "b"]
    write(home.config / "config.toml", toml)
    with pytest.raises(ConfigError, match=r"line 4, uses \$\{KEY\}"):
        await search_models(load_config(home, {}), {})  # nobody chooses another model for the user


@pytest.mark.parametrize(
    ("written", "used"),
    [
        ("localhost:11434/v1", "http://localhost:11434/v1"),
        ("127.0.0.1/v1", "http://127.0.0.1/v1"),
        ("192.168.1.5:8000/v1", "http://192.168.1.5:8000/v1"),
        ("gpu.lan:8000", "http://gpu.lan:8000"),
        ("[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("api.example.org/v1", "https://api.example.org/v1"),
        ("http://api.example.org/v1", "http://api.example.org/v1"),
        ("ftp://example.org", "ftp://example.org"),
    ],
)
@pytest.mark.anyio
async def test_address_without_a_scheme_gets_one(home: Home, written: str, used: str):
    write(home.config / "config.toml", f'[models.a]\nbase_url = "{written}"\nmodel = "m"\n')
    (model,) = (await search_models(load_config(home, {}), {})).models.values()
    assert isinstance(model, ChatModel)
    assert model.base_url == used
    (model,) = (await search_models(Config(), {"OPENAI_BASE_URL": written, "CROW_MODEL": "m"})).models.values()
    assert isinstance(model, ChatModel)
    assert model.base_url == used
