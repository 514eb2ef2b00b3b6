"""Durable workflows: programs with agents that go on where they were after their process has ended.

Importing this loads no engine; it is loaded when the first workflow starts.
"""

from crow_agent.workflows.answers import answer as answer
from crow_agent.workflows.answers import list_waiting as list_waiting
from crow_agent.workflows.answers import show_waiting as show_waiting
from crow_agent.workflows.answers import through_client as through_client
from crow_agent.workflows.approvals import Approval as Approval
from crow_agent.workflows.approvals import WaitingApproval as WaitingApproval
from crow_agent.workflows.errors import WorkflowCancelled as WorkflowCancelled
from crow_agent.workflows.errors import WorkflowChanged as WorkflowChanged
from crow_agent.workflows.errors import WorkflowConflict as WorkflowConflict
from crow_agent.workflows.errors import WorkflowError as WorkflowError
from crow_agent.workflows.errors import WorkflowFailed as WorkflowFailed
from crow_agent.workflows.errors import WorkflowNotFound as WorkflowNotFound
from crow_agent.workflows.queues import WorkflowQueue as WorkflowQueue
from crow_agent.workflows.steps import WorkflowStep as WorkflowStep
from crow_agent.workflows.steps import list_steps as list_steps
from crow_agent.workflows.workflow import Workflow as Workflow
from crow_agent.workflows.workflow import WorkflowHandle as WorkflowHandle
from crow_agent.workflows.workflow import WorkflowStatus as WorkflowStatus
from crow_agent.workflows.workflow import approve as approve
from crow_agent.workflows.workflow import cancel as cancel
from crow_agent.workflows.workflow import fork as fork
from crow_agent.workflows.workflow import launch as launch
from crow_agent.workflows.workflow import list_workflows as list_workflows
from crow_agent.workflows.workflow import open_workflows as open_workflows
from crow_agent.workflows.workflow import resume as resume
from crow_agent.workflows.workflow import sleep as sleep
from crow_agent.workflows.workflow import step as step
from crow_agent.workflows.workflow import workflow as workflow
