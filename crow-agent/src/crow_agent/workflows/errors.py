"""The errors of workflows. Their texts are for a person.

WorkflowError               any of these
    WorkflowFailed          the workflow ended with an error
    WorkflowCancelled       the workflow was cancelled
    WorkflowConflict        the id belongs to another run of a workflow, or to other arguments
    WorkflowNotFound        there is no workflow with this id
    WorkflowChanged         the code of the workflow no longer fits what it has done
    WorkflowServerDown      the server of the database does not answer, or is about to stop or to start
"""


class WorkflowError(Exception):
    """A workflow could not do what it was asked."""


class WorkflowFailed(WorkflowError):
    """The workflow ended with an error."""


class WorkflowCancelled(WorkflowError):
    """The workflow was cancelled."""


class WorkflowConflict(WorkflowError):
    """The id belongs to another workflow, or to other arguments."""


class WorkflowNotFound(WorkflowError):
    """There is no workflow with this id."""

    def __init__(self, id: str) -> None:
        super().__init__(f"There is no workflow {id!r}.")
        self.workflow_id = id


class WorkflowServerDown(WorkflowError):
    """The server of the database does not answer. It may do so later."""


class WorkflowChanged(WorkflowError):
    """The code of the workflow no longer fits what it has done."""
