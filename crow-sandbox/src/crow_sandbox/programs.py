"""Programs that crow starts for others, such as MCP servers and hooks: each is limited while it runs.

Their changes are not reviewed: what they may write, they write directly.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from crow_system.files import make_private_folder

from crow_sandbox import landlock, layers, sandbox, seatbelt
from crow_sandbox.policy import Level, Policy, SandboxError
from crow_sandbox.sandbox import Standing

proofs: dict[int, tuple[bool, str]] = {}
"""The findings in this process without bubblewrap, by the device of the sandbox's folder."""


@asynccontextmanager
async def limit_program(
    policy: Policy,
    arguments: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    folder: Path,
    readable: Sequence[str] = (),
) -> AsyncGenerator[tuple[list[str], dict[str, str]]]:
    """Yield the arguments and the environment that start a program in the folder `cwd`, limited by its policy.

    The block runs as long as the program does: then its temporary files and its layers of caches are removed. `folder`
    is that of the sandbox, in crow's data; the program sees those that are `readable` also where they lie in a hidden
    one. The level is `workspace`, `read-only` or `off`. Raises SandboxError if no
    program of this machine can apply the policy.
    """
    if policy.level == "off":
        yield list(arguments), dict(env)
        return
    if (await asyncio.to_thread(sandbox.prove, folder)).binding:
        own = sandbox.Sandbox(folder)
        try:
            run = await own.begin(policy)
            words = [find_program(arguments[0], env), *arguments[1:]]
            yield await asyncio.to_thread(run.wrap, words, env, cwd, (), readable)
        finally:
            await own.close()
        return
    holds, says = await asyncio.to_thread(prove_without_namespaces, folder)
    if not holds:
        raise SandboxError(says)
    roots = layers.check_roots(policy.roots, folder)
    policy = replace(policy, roots=(*roots, *layers.find_repositories(roots)))
    limit = seatbelt.limit if sys.platform == "darwin" else landlock.limit
    place, lock = layers.make_run_folder(folder, "program-")
    try:
        temporary = place / "temporary"
        temporary.mkdir(mode=0o700)
        yield limit(policy, [find_program(arguments[0], env), *arguments[1:]], env, temporary)
    finally:
        await asyncio.to_thread(layers.remove_run, place)
        os.close(lock)


def find_program(name: str, env: Mapping[str, str]) -> str:
    """Return the path of a program by the PATH of its environment; the name itself if there is none."""
    return shutil.which(name, path=env.get("PATH", os.defpath)) or name


async def prove_limits(level: Level, folder: Path) -> Standing:
    """Find whether programs can be limited here, by running one; the answer is kept for this process."""
    if level == "off":
        return Standing("off", "Programs are not limited.")
    proof = await asyncio.to_thread(sandbox.prove, folder)
    if binding := proof.binding:
        return Standing(level, f"Programs write only to their folders and see no credentials, by {binding.version}.")
    holds, says = await asyncio.to_thread(prove_without_namespaces, folder)
    return Standing(level if holds else "off", f"{says} {proof.says}" if sys.platform == "linux" else says)


def prove_without_namespaces(folder: Path) -> tuple[bool, str]:
    """Find whether Landlock or Seatbelt holds here, once in this process."""
    if sys.platform != "linux":
        return seatbelt.prove()
    try:
        make_private_folder(folder)
        device = os.stat(folder).st_dev
        if device not in proofs:
            place, lock = layers.make_run_folder(folder, "proof-")
            try:
                proofs[device] = landlock.prove(place)
            finally:
                layers.remove_run(place)
                os.close(lock)
        return proofs[device]
    except OSError as error:
        return False, f"The sandbox cannot be tried in {folder}: {error.strerror}."
