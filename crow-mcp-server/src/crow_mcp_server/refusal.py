"""The error of a tool call that the server does not carry out."""

import logging

from fastmcp.exceptions import ToolError


class ToolRefusal(ToolError):
    """Ends a tool call with an `isError` result whose text tells the model what to do next.

    The server has not failed, so FastMCP logs it at level DEBUG.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, log_level=logging.DEBUG)
