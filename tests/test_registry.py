"""The entry in the ACP registry: its rules, as CONTRIBUTING, FORMAT and AUTHENTICATION there state them."""

import copy
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from crow_core import __version__

ENTRY = Path(__file__).parents[1] / "registry" / "crow-acp"
MANIFEST: dict[str, Any] = json.loads((ENTRY / "agent.json").read_text("utf-8"))
ICON = (ENTRY / "icon.svg").read_text("utf-8")

TEXTS = ("id", "name", "version", "description")
OPTIONAL = dict.fromkeys(("repository", "website", "license", "license_url", "icon"), str) | {"authors": list}
COLOURS = {"currentcolor", "none", "inherit"}


def faults_of_manifest(manifest: dict[str, Any], folder: str) -> list[str]:
    """What the registry would refuse."""
    faults = [f"{key} is missing" for key in TEXTS if not isinstance(manifest.get(key), str) or not manifest[key]]
    if faults:
        return faults
    version = manifest["version"]
    faults += ["the id's form"] if not re.fullmatch("[a-z][a-z0-9-]*", manifest["id"]) else []
    faults += ["the id is not the folder's name"] if manifest["id"] != folder else []
    faults += ["the version's form"] if not re.fullmatch(r"\d+\.\d+\.\d+", version) else []
    faults += [f"unknown: {key}" for key in manifest.keys() - {*TEXTS, *OPTIONAL, "distribution"}]
    faults += [
        f"{key} is no {kind}" for key, kind in OPTIONAL.items() if not isinstance(manifest.get(key, kind()), kind)
    ]
    urls = {key: manifest[key] for key in ("repository", "website", "license_url") if key in manifest}
    faults += [f"{key} is no address" for key, url in urls.items() if not re.fullmatch(r"https://[\w.-]+/\S*", url)]
    distributions = manifest.get("distribution")
    if not isinstance(distributions, dict) or not distributions:
        return [*faults, "no distribution"]
    for kind, package in distributions.items():
        if kind not in ("npx", "uvx"):  # crow has no binaries, which have rules of their own
            faults.append(f"unknown distribution: {kind}")
            continue
        faults += [f"unknown: {key}" for key in package.keys() - {"package", "cmd", "args", "env"}]
        name, _, pinned = package.get("package", "").partition("@")
        faults += ["no package"] if not name else []
        faults += ["the package is not pinned to the version"] if pinned != version else []
        faults += ["args are no texts"] if not all(isinstance(arg, str) for arg in package.get("args", [])) else []
    return faults


def faults_of_icon(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    faults = ["not 16x16"] if (root.get("width"), root.get("height")) != ("16", "16") else []
    box = (root.get("viewBox") or "0 0 16 16").split()
    faults += ["not square"] if box[2] != box[3] else []
    paints = [element.get(key) for element in root.iter() for key in ("fill", "stroke")]
    styles = [paint for style in re.findall(r'style\s*=\s*"([^"]*)"', svg) for paint in style.split(";")]
    paints += [value.strip() for name, _, value in (style.partition(":") for style in styles) if "fill" in name]
    faults += [f"a colour of its own: {paint}" for paint in paints if paint and paint.lower() not in COLOURS]
    return faults if "currentcolor" in svg.lower() else [*faults, "no currentColor"]


def faults_of_authentication(answer: dict[str, Any]) -> list[str]:
    """There has to be a method that a client can lead its user through."""
    methods = answer.get("result", {}).get("authMethods") or []
    kinds = [method.get("type") or meta_kind(method.get("_meta") or {}) for method in methods]
    return [] if {"agent", "terminal"} & set(kinds) else [f"no method of the type agent or terminal in {kinds}"]


def meta_kind(meta: dict[str, Any]) -> str:
    return "terminal" if "terminal-auth" in meta else "agent"


def test_the_manifest_is_as_the_registry_wants_it() -> None:
    assert faults_of_manifest(MANIFEST, "crow-acp") == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "Crow"),
        ("id", "crows"),
        ("name", ""),
        ("version", "0.1"),
        ("version", "9.9.9"),
        ("description", None),
        ("authors", "somebody"),
        ("license_url", "LICENSE"),
        ("website", "http://example.com/"),
        ("colour", "black"),
        ("distribution", {}),
        ("distribution.snap", {"package": "crow"}),
        ("distribution.uvx.package", "crow-acp"),
        ("distribution.uvx.package", "crow-acp@latest"),
        ("distribution.uvx.args", [1]),
        ("distribution.uvx.command", "crow"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_noticed(path: str, value: Any) -> None:
    manifest = copy.deepcopy(MANIFEST)
    *parents, last = path.split(".")
    place = manifest
    for key in parents:
        place = place[key]
    place[last] = value

    assert faults_of_manifest(manifest, "crow-acp")


def test_the_manifest_names_this_version_of_a_package_with_a_command_of_its_name() -> None:
    uvx = MANIFEST["distribution"]["uvx"]
    name, _, version = uvx["package"].partition("@")

    assert (MANIFEST["version"], version) == (__version__, __version__)
    assert name in {script.name for script in distribution(name).entry_points if script.group == "console_scripts"}
    assert uvx["args"] == ["acp"]


def test_the_icon_is_small_square_and_takes_the_colour_of_its_surroundings() -> None:
    assert faults_of_icon(ICON) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('width="16"', 'width="32"'),
        ('viewBox="0 0 16 16"', 'viewBox="0 0 16 24"'),
        ('fill="currentColor"', 'fill="#000"'),
        ('fill="currentColor"', 'style="fill: red"'),
        ('fill="currentColor"', ""),
        ("<path", '<path stroke="black"'),
    ],
)
def test_an_icon_that_breaks_a_rule_is_noticed(old: str, new: str) -> None:
    assert old in ICON
    assert faults_of_icon(ICON.replace(old, new))


def test_crow_offers_a_login_where_nothing_is_set_up_and_says_nothing_else(tmp_path: Path) -> None:
    """The registry's gate: in an empty home, the first line that is printed has to be the answer."""
    command = Path(sys.executable).with_name(MANIFEST["distribution"]["uvx"]["package"].partition("@")[0])
    capabilities = {
        "terminal": True,
        "fs": {"readTextFile": True, "writeTextFile": True},
        "_meta": {"terminal_output": True, "terminal-auth": True},
    }
    params = {
        "protocolVersion": 1,
        "clientInfo": {"name": "ACP Registry Validator", "version": "1.0.0"},
        "clientCapabilities": capabilities,
    }
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    done = subprocess.run(
        [command, *MANIFEST["distribution"]["uvx"]["args"]],
        input=json.dumps(request) + "\n",
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    [line] = done.stdout.splitlines()
    answer = json.loads(line)

    assert faults_of_authentication(answer) == []
    assert answer["id"] == 1
    assert done.stderr == ""


@pytest.mark.parametrize("methods", [None, [], [{"id": "key", "name": "Key", "type": "env_var"}]])
def test_an_agent_without_such_a_login_is_noticed(methods: Any) -> None:
    assert faults_of_authentication({"result": {"authMethods": methods}})
