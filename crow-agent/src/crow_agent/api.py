"""The public names of crow's SDK, each listed once; import them from `crow_agent`."""

from crow_agent.agent import Agent as Agent
from crow_agent.blocking import sync as sync
from crow_agent.budget import Budget as Budget
from crow_agent.errors import AgentClosed as AgentClosed
from crow_agent.errors import AgentError as AgentError
from crow_agent.errors import AgentLost as AgentLost
from crow_agent.errors import BudgetSpent as BudgetSpent
from crow_agent.errors import OutputError as OutputError
from crow_agent.errors import PromptFailed as PromptFailed
from crow_agent.errors import PromptTimeout as PromptTimeout
from crow_agent.errors import SessionNotFound as SessionNotFound
from crow_agent.errors import TurnStopped as TurnStopped
from crow_agent.prompt_stream import PromptStream as PromptStream
from crow_agent.result import Result as Result
from crow_agent.session import AgentSession as AgentSession
from crow_agent.tools import tool as tool
from crow_agent.work import BackgroundWork as BackgroundWork
