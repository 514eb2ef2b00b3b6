"""`crow doctor`: look for faults of this machine, and test what an endpoint can do, with a few requests a probe."""

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import click
import crow_system as system
import msgspec
from crow_agent.settings.config import load_config, load_environment
from crow_agent.settings.discovery import find_models
from crow_agent.settings.home import Home
from crow_agent.settings.structs import Config
from crow_core.errors import ConfigError, ModelError
from crow_core.models.chat_model import ChatModel
from crow_core.models.quirks import Quirks
from crow_core.text import escape_controls
from msgspec import structs

from crow_cli.chat_templates import write_fitting_template
from crow_cli.examined_model import ExaminedModel
from crow_cli.machine import Finding, Verdict, examine_in_thread, to_findings
from crow_cli.probes import PROBES, REQUIRED_PROBES, Probe, ProbeResult

COLOURS: dict[Verdict, str] = {"ok": "green", "partly": "yellow", "no": "red"}


@dataclass
class DoctorReport:
    """The results of all probes."""

    results: dict[str, ProbeResult] = field(default_factory=dict[str, ProbeResult])
    quirks: dict[str, Any] = field(default_factory=dict[str, Any])
    """The quirks that differ from what crow assumed before."""

    @property
    def code(self) -> int:
        """The exit code: 0 if no probe failed, 1 if one failed, 2 if a required one failed."""
        bad = {name for name, result in self.results.items() if result.verdict == "no"}
        return 2 if bad & REQUIRED_PROBES else 1 if bad else 0


async def run_probes(
    examined: ExaminedModel, on_result: Callable[[str, ProbeResult], None] = lambda name, result: None
) -> DoctorReport:
    """Run the probes in order, calling `on_result` with each name and result. Stop after a required probe fails."""
    report, before = DoctorReport(), examined.quirks
    try:
        for name, probe in PROBES.items():
            report.results[name] = result = await run_probe(examined, probe)
            on_result(name, result)
            if name in REQUIRED_PROBES and result.verdict == "no":
                break
    finally:
        await examined.close()
    report.quirks = diff_quirks(before, examined.quirks)
    return report


async def run_probe(examined: ExaminedModel, probe: Probe) -> ProbeResult:
    """Run one probe. Its result includes the quirks that crow learned and the notices meanwhile."""
    before = examined.quirks
    examined.notices.clear()
    try:
        result = await probe(examined)
    except ModelError as error:
        result = ProbeResult("no", str(error))
    examined.quirks = structs.replace(examined.quirks, **result.quirks)
    notices = " ".join(notice for notice in dict.fromkeys(examined.notices) if notice not in result.sentence)
    if notices:
        verdict: Verdict = "partly" if result.verdict == "ok" else result.verdict
        result = replace(result, verdict=verdict, sentence=f"{result.sentence} Meanwhile: {notices}")
    return replace(result, quirks=diff_quirks(before, examined.quirks))


def diff_quirks(before: Quirks, after: Quirks) -> dict[str, Any]:
    """Return the quirks of `after` that differ from `before`."""
    old, new = structs.asdict(before), structs.asdict(after)
    return {name: value for name, value in new.items() if value != old[name]}


# The command.


async def doctor(env: Mapping[str, str], wanted: str, *, as_json: bool, save: bool, machine_only: bool = False) -> int:
    """Check the machine, unless a model is named, then probe the model. Print the results, save its quirks if `save` is
    set, and return the exit code.

    Raises ConfigError and ModelError, but not for a missing model where the machine has been checked.
    """
    found = [] if wanted else await examine_in_thread(env)
    if not as_json:
        print_machine(found)
    broken = any(one.verdict == "no" for one in found)
    if machine_only:
        if as_json:
            click.echo(escape_controls(json.dumps({"machine": to_findings(found)}, ensure_ascii=False)))
        return 1 if broken else 0
    home = Home.find(env)
    config, env = load_config(home, env), load_environment(home, env)
    name, examined = await choose_model(config, env, wanted)
    path = home.config / "config.toml"
    if save:
        check_unsaved(path, config, name)
    if found and not as_json:
        click.echo(escape_controls(f"\nThe model {name} at {examined.display_url}:"))
    report = await run_probes(examined, (lambda name, result: None) if as_json else print_row)
    if as_json:
        click.echo(escape_controls(to_json(name, examined, report, found)))
    if save and report.quirks:
        append_table(path, to_toml(name, report.quirks))
    if not as_json:
        click.echo(escape_controls(to_advice(name, report, path if save else None)))
        if advice := await write_fitting_template(examined, examined.printed, home.data / "templates"):
            click.echo(escape_controls(advice))
    return report.code or int(broken)


def print_machine(found: list[Finding]) -> None:
    """Print what was found on the machine."""
    well = [one for one in found if one.verdict == "ok"]
    for one in found:
        print_row(one.check, ProbeResult(one.verdict, one.sentence))
    if found and len(well) == len(found):
        click.echo("Nothing is wrong on this machine.")


async def choose_model(config: Config, env: Mapping[str, str], wanted: str) -> tuple[str, ExaminedModel]:
    """Find the model to examine. Raises ConfigError and ModelError."""
    name, model = next(iter((await find_models(config, env, wanted)).items()))
    if not isinstance(model, ChatModel):
        raise ModelError(f"The model {name!r} has no endpoint to examine.")
    return name, to_examined(model)


def to_examined(model: ChatModel) -> ExaminedModel:
    """Make the model with the same settings whose answers can be examined."""
    return ExaminedModel(
        name=model.name,
        base_url=model.base_url,
        api_key=model.api_key,
        headers=model.headers,
        parameters=model.parameters,
        window=model.window,
        idle_timeout=model.idle_timeout,
        quirks=model.quirks,
        attempts=3,
    )


def print_row(name: str, result: ProbeResult) -> None:
    """Print a result as a line of the table."""
    verdict = click.style(f"{result.verdict:<8}", fg=COLOURS[result.verdict])
    click.echo(f"{verdict}{name:<18}{escape_controls(result.sentence)}")


def to_json(name: str, examined: ExaminedModel, report: DoctorReport, machine: list[Finding]) -> str:
    """Convert a report to JSON text."""
    found = [{"probe": probe, **msgspec.to_builtins(result)} for probe, result in report.results.items()]
    whole = {
        "model": name,
        "endpoint": examined.display_url,
        "date": today(),
        "machine": to_findings(machine),
        "findings": found,
        "quirks": report.quirks,
    }
    return json.dumps(whole, ensure_ascii=False)


def to_advice(name: str, report: DoctorReport, saved: Path | None) -> str:
    """Return what the user can set, or that there is nothing to set."""
    if not report.quirks:
        return "\nThere is nothing to set." if report.code < 2 else ""
    if saved:
        return f"\nSaved to {saved}:\n\n{to_toml(name, report.quirks)}"
    return f"\nFor your config.toml (--save writes it there):\n\n{to_toml(name, report.quirks)}"


def today() -> str:
    return date.today().isoformat()


def to_toml(name: str, quirks: Mapping[str, Any]) -> str:
    """Format quirks as a table of `config.toml`, with the date."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
    lines = [f"{quirk} = {json.dumps(value, ensure_ascii=False)}" for quirk, value in quirks.items()]
    return "\n".join([f"[models.{key}.quirks]  # found by crow doctor on {today()}", *lines, ""])


def check_unsaved(path: Path, config: Config, name: str) -> None:
    """Check that the quirks can be saved. Raises ConfigError if the model has no table, or has quirks already."""
    if name not in config.models:
        raise ConfigError(f"--save: {path} has no [models.{name}]. Write its base_url and model there first.")
    if config.models[name].quirks:
        raise ConfigError(f"--save: {path} has quirks for {name!r} already. Remove them, or edit them by hand.")


def append_table(path: Path, text: str) -> None:
    """Append a table to a TOML file without changing its other bytes. Raises ConfigError if that is impossible."""
    path = path.resolve()
    try:
        before = path.read_bytes()
        newline = "\r\n" if b"\r\n" in before else "\n"
        gap = newline if before.endswith(b"\n") or not before else newline * 2
        after = before + (gap + text.replace("\n", newline)).encode()
        tomllib.loads(after.decode().replace("\r\n", "\n"))
        draft = path.with_name(path.name + ".crow")
        draft.write_bytes(after)
        shutil.copymode(path, draft)
        system.replace_file(draft, path)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} cannot take another table at its end ({error}). Add this by hand:\n{text}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}. Add this by hand:\n{text}") from error
