# The verbs of this repository. `just` is optional: each line works without it.

default:
    @just --list

# install everything, as locked
sync:
    uv sync --locked

# format, and mend what can be mended
fmt:
    uv run ruff format
    uv run ruff check --fix

# lint, format and types
check:
    uv run ruff check
    uv run ruff format --check
    uv run --group types pyright

# types, as on Windows and on macOS
check-systems:
    uv run --group types pyright --pythonplatform Windows
    uv run --group types pyright --pythonplatform Darwin

# the tests, with what other systems have: threads instead of polled pipes, psutil instead of /proc, paths instead of open folders
systems *args:
    CROW_TEST_SYSTEM=threads,psutil,paths uv run pytest {{args}}

# run Windows' own Python by Wine, such as `just wine -m crow_cli demo` or `just wine -m pytest -n0 FILE`
wine *args:
    uv run python scripts/run_in_wine.py {{args}}

# the tests of the tools in a folder that ignores case, such as `lowntfs-3g -o ignore_case,permissions IMAGE FOLDER` mounts
caseless folder:
    uv run pytest --basetemp={{folder}}/tests crow-mcp-server/tests crow-extensions/tests/test_undo.py

# the tests but the slow ones (--slow runs them, too); arguments go to pytest
test *args:
    uv run pytest {{args}}

# kill it 200 times, let 32 processes write at once, on both databases, kill, stop and cut off workers, and kill the agent of each session after every tool call; CROW_TEST_POSTGRES names a server
soak:
    CROW_SOAK=200 CROW_TEST_ALL=1 uv run pytest crow-persistence/tests/test_kill.py
    CROW_SOAK=200 CROW_TEST_ALL=1 uv run pytest -rP crow-cli/tests/test_worker.py # an hour
    CROW_SOAK=200 uv run pytest -rP crow-eval/tests/test_evaluation_statistics.py # 2,000 experiments for each rate
    CROW_SOAK=20 CROW_TEST_ALL=1 uv run pytest crow-eval/tests/test_planted_search.py # 20 searches with an optimum, 20 without
    CROW_SOAK=1 CROW_TEST_ALL=1 uv run pytest -k killed crow-cli/tests/sessions

# 300 varied turns in each version of ACP, each message validated by the official schema
turns:
    CROW_TURNS=300 uv run pytest -n2 crow-core/tests/test_varied_turns.py

# the tests of the command, each command and each agent in a process of its own: the gate runs most of them in forks
processes:
    CROW_TEST_PROCESSES=1 CROW_TEST_ALL=1 uv run pytest crow-cli/tests crow-acp-tools/tests crow-eval/tests

# somebody types on in 1,000 random sessions while questions appear: none may be answered
typing:
    uv run pytest --slow -k thousand crow-terminal/tests/test_question.py

# change the code in many small ways, and list the changes that no test notices: hooks, react, messages, ...; hours for all
mutate *names:
    uv run --group mutation scripts/mutate.py {{names}}

# compare, in one run each; nothing else should run on the machine
bench:
    uv run benchmarks/stream.py
    uv run benchmarks/versions.py
    uv run benchmarks/view.py
    uv run benchmarks/persistence.py
    uv run benchmarks/search.py
    uv run benchmarks/serve.py
    uv run benchmarks/mcp_servers.py
    uv run benchmarks/code_mode.py
    uv run benchmarks/terminal.py
    uv run benchmarks/sandbox.py
    uv run benchmarks/tools.py
    uv run benchmarks/cancel.py
    uv run benchmarks/workflows.py
    uv run benchmarks/evaluation.py
    uv run benchmarks/idle.py
    uv run benchmarks/permissions.py
    uv run benchmarks/web.py

# print the figures of the prose of each page, or each hard sentence of some files
prose *files:
    uv run scripts/check_prose.py {{files}}

# build the documentation site in build/site, offline; fails at a dead link and at a page that the navigation lacks
docs:
    uv run --group docs scripts/build_docs.py

# build all packages; check their contents and metadata; install each alone and all together on each Python that is here
packages *versions="3.11 3.12 3.13 3.14":
    uv run --group release scripts/check_packages.py {{versions}}
    CROW_TEST_INSTALL=1 uv run --group release pytest --slow -n0 tests/test_install.py tests/test_release.py

# name the distributions that an installation brings and that have no licence
audit:
    uv run --group types scripts/generate_notices.py --audit

# regenerate what scripts write: the ACP structs, the tools, the table of hooks, and the pages of the reference
generate:
    uv run scripts/generate_acp_schema.py
    uv run scripts/generate_tools.py
    uv run scripts/generate_cli_help.py
    uv run scripts/generate_hook_table.py
    uv run scripts/generate_acp_table.py
    uv run scripts/generate_mcp_table.py
    uv run scripts/generate_settings.py
    uv run --group types scripts/generate_notices.py
    uv run scripts/generate_exit_codes.py
    uv run scripts/generate_python_api.py
    uv run scripts/draw_docs.py

# serve a small model that calls tools, for `crow eval first-steps`; the first run downloads 1.1 GB
lab *args:
    uv run scripts/lab.py {{args}}

# record the terminal again: the images of the README
record:
    uv run scripts/record_terminal.py

# draw the scenes of the terminal at four sizes into a folder, and store their texts, which a test compares
gallery folder="/tmp/crow-gallery":
    uv run scripts/gallery.py --folder {{folder}} --update
