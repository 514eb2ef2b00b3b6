"""Tasks of Inspect, each with one sample, for an agent that is named when they are run."""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import Score, Scorer, Target, accuracy, includes, scorer
from inspect_ai.solver import TaskState
from inspect_ai.util import ExecResult, SandboxEnvironment, sandbox, sandboxenv


@sandboxenv(name="elsewhere")
class Elsewhere(SandboxEnvironment):
    """A sandbox whose files are not on this machine."""

    @classmethod
    async def sample_init(cls, *_: Any) -> dict[str, SandboxEnvironment]:
        return {"default": cls()}

    @classmethod
    async def sample_cleanup(cls, *_: Any) -> None:
        pass

    async def exec(self, *_: Any, **__: Any) -> ExecResult[str]:
        return ExecResult(True, 0, "", "")

    async def write_file(self, *_: Any) -> None:
        raise NotImplementedError

    async def read_file(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


@scorer(metrics=[accuracy()])
def adds() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        text = await sandbox().read_file("calc.py")
        return Score(value="C" if "a + b" in text else "I", explanation=text)

    return score


@task
def mend() -> Task:
    files = {"calc.py": "def add(a, b):\n    return a - b\n"}
    return Task([Sample(id="mend-add", input="Mend add.", files=files)], scorer=adds(), sandbox="local")


@task
def question() -> Task:
    said = [ChatMessageSystem(content="Answer in French."), ChatMessageUser(content="What is a crow?")]
    return Task([Sample(id="bird", input=said, target="oiseau")], scorer=includes())


@task
def tokens() -> Task:
    return Task([Sample(id="loop", input="Look around.", target="x")], scorer=includes(), token_limit=5000)


@task
def time() -> Task:
    return Task([Sample(id="hang", input="Wait.", target="x")], scorer=includes(), time_limit=1)


@task
def down() -> Task:
    return Task([Sample(id="down", input="Fail.", target="x")], scorer=includes())


@task
def begun() -> Task:
    said = [ChatMessageUser(content="Hi."), ChatMessageAssistant(content="Hello."), ChatMessageUser(content="Go on.")]
    return Task([Sample(id="begun", input=said, target="x")], scorer=includes())


@task
def elsewhere() -> Task:
    return Task([Sample(id="far", input="Hi.", target="x")], scorer=includes(), sandbox="elsewhere")
