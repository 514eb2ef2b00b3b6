"""The public names of crow's core, each listed once; import them from `crow_core`."""

from crow_core.acp.connection import RpcError as RpcError
from crow_core.agent import Agent as Agent
from crow_core.app import Crow as Crow
from crow_core.errors import EndTurn as EndTurn
from crow_core.errors import ModelError as ModelError
from crow_core.extensions.permissions import permissions as permissions
from crow_core.mcp.result import ToolResult as ToolResult
from crow_core.mcp.server import Server as Server
from crow_core.mcp.toolbox import Toolbox as Toolbox
from crow_core.messages import Message as Message
from crow_core.messages import ToolUse as ToolUse
from crow_core.messages import merge as merge
from crow_core.messages import view as view
from crow_core.models.chat import ChatModel as ChatModel
from crow_core.models.chat import Model as Model
from crow_core.models.chat import ModelCall as ModelCall
from crow_core.options import Choice as Choice
from crow_core.options import Option as Option
from crow_core.prompts import Prompt as Prompt
from crow_core.session import Command as Command
from crow_core.session import Hooks as Hooks
from crow_core.session import Session as Session
